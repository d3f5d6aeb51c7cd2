"""Names that users may give for a model, and what each stands for."""

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from medusa_cli.errors import ModelNotFoundError

DEFAULT_MODEL = "smollm2-135m"
SMALL_TREE = "mc_sim_7b_7"  # for machines where a wide verification step is dear
WIDE_TREE = "mc_sim_7b_63"
_DATA = Path(__file__).parent / "data"
_BUILTIN = "builtin:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Entry:
    """What an alias stands for.

    Attributes:
        about: one line for a person.
        parameters: of the base model, 0 where unknown.
        model: hub ids to try in this order; empty for the embedded model.
        embedded: whether the model comes from a Python package instead of the hub.
        heads: hub id or `builtin:NAME`; None when they are in the model's own checkpoint.
        tree: for accelerators.
        small_tree: for CPUs.
        template: name of a shipped chat template, for tokenizers that have none.
    """

    about: str
    parameters: int = 0
    model: tuple[str, ...] = ()
    embedded: bool = False
    heads: str | None = None
    tree: str = WIDE_TREE
    small_tree: str = SMALL_TREE
    template: str | None = None


@cache
def entries() -> dict[str, Entry]:
    """The registry by alias, read from `data/registry.json`."""
    data = json.loads((_DATA / "registry.json").read_text(encoding="utf-8"))
    return {
        alias: Entry(**{**fields, "model": tuple(fields.get("model", ()))})
        for alias, fields in data.items()
    }


def builtin_heads(source: str) -> Path | None:
    """The folder of heads that come with the package, for `builtin:NAME`; None for other names."""
    return _DATA / "heads" / source.removeprefix(_BUILTIN) if source.startswith(_BUILTIN) else None


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form OWNER/REPOSITORY."""
    return _HUB_ID.fullmatch(name) is not None


def unknown_model(name: str) -> ModelNotFoundError:
    """The error for a name that is neither alias, directory nor hub id."""
    close = difflib.get_close_matches(name, entries(), n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return ModelNotFoundError(
        f"no model '{name}': {hint}`medusa models` lists the names; "
        "a hub id (OWNER/NAME) or a local directory works too"
    )
