"""Where `medusa` keeps what it makes, and whether there is room for it."""

import contextlib
import os
import shutil
from pathlib import Path

import platformdirs

from medusa_cli.errors import StorageError

CACHE_VARIABLE = "MEDUSA_CACHE"


def cache_folder() -> Path:
    """The user's cache folder for `medusa`; `MEDUSA_CACHE` overrides it. It may not exist yet."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else platformdirs.user_cache_path("medusa-cli")


def embedded_folder(alias: str) -> Path:
    """Where an embedded model lies once it is converted."""
    return cache_folder() / "models" / alias


def ensure_folder(folder: Path, needed: int) -> None:
    """Makes `folder` and checks that its disk has `needed` bytes free.

    Raises:
        StorageError: it cannot be made or written, or there is too little room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(folder, "permission denied")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder} needs {human_bytes(needed)} of disk, but {human_bytes(free)} are free.\n"
            f"Make room, or set {CACHE_VARIABLE} to a folder on another disk."
        )


def write_atomic(
    path: Path, content: str | bytes, *, private: bool = False, parents: bool = False
) -> None:
    """Writes a whole file or leaves the old one.

    Args:
        private: readable by its user alone.
        parents: make its folder, too.

    Raises:
        StorageError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(temporary, flags, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from None


def _not_writable(folder: Path, reason: str) -> StorageError:
    return StorageError(
        f"the cache folder {folder} cannot be written: {reason}.\n"
        f"Set {CACHE_VARIABLE} to a folder that can."
    )


def human_bytes(count: float) -> str:
    """A size for a person, in decimal units: 13.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
