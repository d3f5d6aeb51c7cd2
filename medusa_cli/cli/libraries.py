"""Settings of the libraries underneath that belong to a command line, not to a Python API."""

import os
import warnings


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
