"""Opening a model for a command: options checked, progress shown, libraries kept quiet.

Nothing heavy is imported before a model is opened.
"""

import os
import warnings
from typing import TYPE_CHECKING

from medusa_cli.cli.streams import Streams
from medusa_cli.errors import UsageError

if TYPE_CHECKING:
    from medusa_cli.cli.options import ModelOptions
    from medusa_cli.session import Medusa


def check_conflicts(
    options: "ModelOptions", *, plain: bool, tree: str | None, lookup: bool | None = None
) -> None:
    """Raises `UsageError` where one option would silently switch another off."""
    if plain and lookup:
        raise UsageError("--plain decodes without speculation: drop --lookup")
    if plain and (options.heads is not None or tree is not None):
        raise UsageError("--plain decodes without heads and tree: drop --heads and --tree")
    if options.device_map is not None and options.device != "auto":
        raise UsageError("--device-map chooses the devices itself: drop --device")


def open_model(
    streams: Streams,
    options: "ModelOptions",
    *,
    plain: bool,
    tree: str | None,
    lookup: bool | None = None,
) -> "Medusa":
    """Loads what the options ask for, with progress on standard error.

    Raises:
        MedusaError: as `medusa_cli.load` does.
    """
    from medusa_cli.cli.loading import LoadProgress

    with LoadProgress(streams, options.model, quiet=options.quiet) as report:
        progress = streams.stderr.isatty() and not options.quiet
        quiet_libraries(offline=options.offline, progress=progress)
        from medusa_cli.models.loader import LoadOptions
        from medusa_cli.session import load

        return load(
            options.model,
            heads=options.heads,
            tree=tree,
            lookup=lookup,
            plain=plain,
            options=LoadOptions(
                options.device,
                options.device_map,
                options.dtype,
                options.trust_remote_code,
                options.quantize,
                options.compile,
            ),
            revision=options.revision,
            offline=options.offline,
            report=report,
        )


def quiet_libraries(*, offline: bool, progress: bool) -> None:
    """Keeps the libraries' own chatter off the terminal; `MEDUSA_DEBUG=1` leaves it on.

    Must run before the first import of huggingface_hub, which reads the environment once.
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("MEDUSA_DEBUG") == "1":
        return
    warnings.filterwarnings("ignore")
    if not progress:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
