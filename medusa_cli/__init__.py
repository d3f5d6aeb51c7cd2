"""Medusa decoding for Hugging Face causal language models.

    import medusa_cli

    model = medusa_cli.load("smollm2-135m")
    print(model.generate("Why is the sky blue?").text)

torch and transformers are imported when `load` and the other names are first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from medusa_cli.config import Acceptance, FinishReason, Limits, SamplingConfig
    from medusa_cli.models.loader import LoadOptions
    from medusa_cli.session import Medusa, load
    from medusa_cli.text.events import Piece, Result, Started, Step

_HOMES = {
    "Acceptance": "medusa_cli.config",
    "FinishReason": "medusa_cli.config",
    "Limits": "medusa_cli.config",
    "LoadOptions": "medusa_cli.models.loader",
    "Medusa": "medusa_cli.session",
    "Piece": "medusa_cli.text.events",
    "Result": "medusa_cli.text.events",
    "SamplingConfig": "medusa_cli.config",
    "Started": "medusa_cli.text.events",
    "Step": "medusa_cli.text.events",
    "load": "medusa_cli.session",
}
__all__ = [
    "Acceptance",
    "FinishReason",
    "Limits",
    "LoadOptions",
    "Medusa",
    "Piece",
    "Result",
    "SamplingConfig",
    "Started",
    "Step",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
