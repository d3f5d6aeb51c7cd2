"""Model folders from the Hugging Face hub, with errors that say what to do."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from medusa_cli.errors import ModelNotFoundError, StorageError
from medusa_cli.models.progress import Report, Stage
from medusa_cli.models.storage import human_bytes

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
ANNOUNCE_BYTES = 500_000_000  # a download from this size on is announced with its size


def fetch_first(
    repositories: Sequence[str], revision: str | None, report: Report, *, offline: bool
) -> Path:
    """The local snapshot of the first of several repository names that exists.

    Raises:
        ModelNotFoundError: none exists, access is refused, no network, or offline and not cached.
        StorageError: the disk has no room for it.
    """
    for name in repositories[:-1]:
        try:
            return fetch(name, revision, report, offline=offline)
        except ModelNotFoundError:
            continue  # published under either name; the last one's error is shown
    return fetch(repositories[-1], revision, report, offline=offline)


def fetch(repository: str, revision: str | None, report: Report, *, offline: bool) -> Path:
    """The local snapshot of a repository, downloaded if it is not in the hub's cache.

    Of weights in both formats only the safetensors are taken.

    Raises:
        ModelNotFoundError: no such repository or revision, access refused, no network, or offline
            and not cached.
        StorageError: the disk has no room for it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        if offline or constants.HF_HUB_OFFLINE:
            raise ModelNotFoundError(
                f"'{repository}' is not in the hub's cache, and offline mode forbids fetching it.\n"
                "Run once without --offline, or give a local directory."
            ) from None
    try:
        patterns = _wanted_files(repository, revision, report)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        message = (
            f"'{repository}' is gated: accept its licence on its page, then log in with "
            "`hf auth login`."
        )
    except RevisionNotFoundError:
        message = f"'{repository}' has no revision '{revision}': check --revision."
    except RepositoryNotFoundError:
        message = (
            f"the hub has no model '{repository}', or it is private (then: `hf auth login`).\n"
            "`medusa models` lists known names."
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and error.strerror == "ENOSPC":
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        message = (
            f"'{repository}' cannot be fetched: {reason}\n"
            "Check the network and try again, or give a local directory."
        )
    raise ModelNotFoundError(message)


def _wanted_files(repository: str, revision: str | None, report: Report) -> list[str]:
    """File patterns to download, after saying how much that is and checking the disk."""
    from huggingface_hub import HfApi, constants

    files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    sizes = {file.rfilename: file.size or 0 for file in files}
    for weights in ("*.safetensors", "*.bin", "*.pt"):
        chosen = {name: size for name, size in sizes.items() if Path(name).match(weights)}
        if chosen:
            break
    needed = sum(chosen.values())
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if needed > free:
        raise StorageError(
            f"'{repository}' needs {human_bytes(needed)} of disk, {human_bytes(free)} are free.\n"
            "Make room, or set HF_HOME to a folder on another disk."
        )
    if needed > ANNOUNCE_BYTES:
        report(Stage(f"downloading {repository}: {human_bytes(needed)}, {human_bytes(free)} free"))
    return [*TEXT_FILES, *chosen]
