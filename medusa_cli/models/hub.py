"""Model folders from the Hugging Face hub, with errors that say what to do."""

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from medusa_cli.errors import MedusaError, ModelNotFoundError, StorageError
from medusa_cli.models.progress import Report, Stage
from medusa_cli.models.storage import human_bytes
from medusa_cli.models.tensor_files import read_json

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
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
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        cached = None
    # The hub also returns a folder that an interrupted download left half-full.
    if cached is not None and _is_whole(cached):
        return cached
    if offline or constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"'{repository}' is not whole in the hub's cache, and offline mode forbids fetching "
            "it.\nRun once without --offline, or give a local directory."
        )
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
    except MedusaError:
        raise
    except Exception as error:  # noqa: BLE001  # the hub's HTTP library differs by its release
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StorageError(
                f"the disk filled up while '{repository}' was fetched: make room and run again; "
                "the download goes on where it stopped."
            ) from None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        message = (
            f"'{repository}' cannot be fetched: {reason}\n"
            "Check the network and try again, or give a local directory."
        )
    raise ModelNotFoundError(message)


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has weights, and every shard that an index of it names."""
    for index in folder.glob("*.index.json"):
        shards = set(read_json(index).get("weight_map", {}).values())
        if all((folder / shard).is_file() for shard in shards):
            return True
    indexed = any(folder.glob("*.index.json"))
    return not indexed and any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def _wanted_files(repository: str, revision: str | None, report: Report) -> list[str]:
    """File patterns to download, after saying how much that is and checking the disk."""
    from huggingface_hub import HfApi, constants

    files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    sizes = {file.rfilename: file.size or 0 for file in files}
    chosen = [name for name in sizes if Path(name).match("medusa_*")]
    for weights in WEIGHT_FILES:
        found = [name for name in sizes if Path(name).match(weights)]
        if found:
            chosen += found
            break
    needed = sum(sizes[name] for name in set(chosen))
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
