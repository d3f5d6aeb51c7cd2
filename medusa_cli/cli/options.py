"""Options that several commands share, and the configurations that they make."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer

from medusa_cli.config import Acceptance
from medusa_cli.models.registry import DEFAULT_MODEL, entries

_MODEL, _SAMPLING = "Model", "Sampling"


class TableFormat(StrEnum):
    """How a command prints what it lists."""

    TABLE = "table"
    JSON = "json"


def _aliases(incomplete: str) -> list[str]:
    return [alias for alias in entries() if alias.startswith(incomplete)]


def complete_trees(incomplete: str) -> list[str]:
    """Names of shipped trees that begin so."""
    from medusa_cli.decoding.tree import shipped_trees

    return [name for name in shipped_trees() if name.startswith(incomplete)]


def complete_drafted(incomplete: str) -> list[str]:
    """What `--tree` of a decoding command takes by name and begins so."""
    auto = ["auto"] if "auto".startswith(incomplete) else []
    return auto + complete_trees(incomplete)


Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", envvar="MEDUSA_MODEL", metavar="NAME|PATH", autocompletion=_aliases,
        help="Alias (see `medusa models`), hub id or local directory.",
    ),
]  # fmt: skip
Heads = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="Medusa heads: alias, hub id, directory or file. [default: the model's own]",
    ),
]
TreeName = Annotated[
    str | None,
    typer.Option(
        "--tree", metavar="NAME|PATH|auto", autocompletion=complete_drafted,
        help="Tree of candidates: a shipped one, a JSON file, or auto, which chooses at each step "
        "what pays. [default: auto where the heads are calibrated, else suits the device]",
    ),
]  # fmt: skip
LookupBranch = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="Draft also what followed the last tokens earlier in the text. "
        "[default: with --tree auto only]",
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="No speculation: one token per forward, the baseline.")
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N|mps", help="Where to run.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(metavar="auto|balanced|...", help="Spread the model with accelerate."),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Precision; auto: float32 on a CPU, half precision on a GPU.",
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        metavar="none|int8|nf4", help="Bits of linear layers: int8, or nf4 (4 bits, on a CUDA GPU)."
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile the layers at load (half a minute); for GPUs."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub model.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run model code that the checkpoint brings.")
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Open no connection (also HF_HUB_OFFLINE=1).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, footer or warnings.")]

Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; above 0 samples. [default: 0]")
]
TopP = Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Keep the k best tokens; 0: off.")]
MinP = Annotated[float | None, typer.Option(help="Least probability relative to the best.")]
TypicalP = Annotated[float | None, typer.Option(help="Locally typical mass in (0, 1].")]
EtaCutoff = Annotated[float | None, typer.Option(help="Entropy-dependent cut-off in [0, 1).")]
EpsilonCutoff = Annotated[float | None, typer.Option(help="Absolute cut-off in [0, 1).")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 discourages tokens that are there already.")
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same text. [default: chosen and reported]")
]
AcceptanceRule = Annotated[
    Acceptance | None,
    typer.Option(
        help="How sampled drafts are accepted: lossless keeps the base model's distribution; "
        "typical is faster and lossy. [default: lossless]"
    ),
]
Epsilon = Annotated[float | None, typer.Option(help="Typical acceptance: hard threshold.")]
Delta = Annotated[float | None, typer.Option(help="Typical acceptance: entropy factor.")]
GreedyRoot = Annotated[
    bool | None, typer.Option("--greedy-root", help="Typical acceptance: argmax at the root.")
]
ModelDefaults = Annotated[
    bool,
    typer.Option(
        "--model-defaults", help="Take sampling values that are not given from the model's own."
    ),
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to load and how, an option for each field."""

    model: Model = DEFAULT_MODEL
    heads: Heads = None
    device: Device = "auto"
    device_map: DeviceMap = None
    dtype: Dtype = "auto"
    quantize: Quantize = "none"
    compile: Compile = False
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    offline: Offline = False
    quiet: Quiet = False


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, an option for each field; None where it was not given."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    typical_p: TypicalP = None
    eta_cutoff: EtaCutoff = None
    epsilon_cutoff: EpsilonCutoff = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    epsilon: Epsilon = None
    delta: Delta = None
    greedy_root: GreedyRoot = None
    model_defaults: ModelDefaults = False

    def given(self) -> dict[str, Any]:
        """The fields of `SamplingConfig` that were given on the command line."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["model_defaults"]
        return {name: value for name, value in values.items() if value is not None}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters are an option for each of their fields.

    Typer reads options off the signature: the result's has the fields in the groups' places.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        flat += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(groups[name])
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    return run
