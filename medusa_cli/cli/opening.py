"""Opening a model for a command: options checked, progress shown, libraries kept quiet.

Nothing heavy is imported before a model is opened.
"""

import os
import warnings
from typing import TYPE_CHECKING

from medusa_cli.cli.streams import Streams
from medusa_cli.errors import UsageError

if TYPE_CHECKING:
    from medusa_cli.session import Medusa


def check_conflicts(
    *, plain: bool, heads: str | None, tree: str | None, device: str, device_map: str | None
) -> None:
    """Raises `UsageError` where one option would silently switch another off."""
    if plain and (heads is not None or tree is not None):
        raise UsageError("--plain decodes without heads and tree: drop --heads and --tree")
    if device_map is not None and device != "auto":
        raise UsageError("--device-map chooses the devices itself: drop --device")


def open_model(
    streams: Streams,
    *,
    quiet: bool,
    model: str,
    heads: str | None,
    tree: str | None,
    plain: bool,
    device: str,
    device_map: str | None,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    offline: bool,
) -> "Medusa":
    """Loads what the options of the same names ask for, with progress on standard error.

    Raises:
        MedusaError: as `medusa_cli.load` does.
    """
    from medusa_cli.cli.loading import LoadProgress

    with LoadProgress(streams, model, quiet=quiet) as report:
        quiet_libraries(offline=offline, progress=streams.stderr.isatty() and not quiet)
        from medusa_cli.models.loader import LoadOptions
        from medusa_cli.session import load

        return load(
            model,
            heads=heads,
            tree=tree,
            plain=plain,
            options=LoadOptions(device, device_map, dtype, trust_remote_code),
            revision=revision,
            offline=offline,
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
