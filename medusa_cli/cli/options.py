"""Options that several commands share, and the configurations that they make."""

from typing import Annotated, Any

import typer

from medusa_cli.config import Acceptance
from medusa_cli.models.registry import entries

_MODEL, _SAMPLING = "Model", "Sampling"


def _aliases(incomplete: str) -> list[str]:
    return [alias for alias in entries() if alias.startswith(incomplete)]


def complete_trees(incomplete: str) -> list[str]:
    """Names of shipped trees that begin so."""
    from medusa_cli.decoding.tree import shipped_trees

    return [name for name in shipped_trees() if name.startswith(incomplete)]


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
        "--tree", metavar="NAME|PATH", autocompletion=complete_trees,
        help="Tree of candidates: a shipped one or a JSON file. [default: suits the device]",
    ),
]  # fmt: skip
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


def given(**values: Any) -> dict[str, Any]:
    """The options that were given on the command line: all but None."""
    return {name: value for name, value in values.items() if value is not None}
