"""The user's chat files: saved conversations, the last session, the input history."""

import json
from pathlib import Path
from typing import Any

import platformdirs

from medusa_cli.errors import StorageError, UsageError
from medusa_cli.models.storage import write_atomic

HISTORY_ENTRIES = 1000


def state_folder() -> Path:
    """The user's state folder for `medusa`, made if need be, closed to others."""
    folder = platformdirs.user_state_path("medusa-cli")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from None
    return folder


def last_session() -> Path:
    """Where each turn of a chat on a terminal is kept for `--continue`."""
    return state_folder() / "last-chat.json"


def history_file() -> Path:
    """The input history, readable by its user alone and cut to its newest entries."""
    path = state_folder() / "history"
    path.touch(mode=0o600)
    path.chmod(0o600)
    # prompt_toolkit writes an entry as a comment line with the time and lines that begin with +.
    entries = path.read_text(encoding="utf-8", errors="replace").split("\n# ")
    if len(entries) > HISTORY_ENTRIES:
        write_atomic(path, "\n# " + "\n# ".join(entries[-HISTORY_ENTRIES:]), private=True)
    return path


def save_json(path: Path, data: dict[str, Any]) -> None:
    """Writes JSON atomically. Raises `StorageError` when it cannot be written."""
    write_atomic(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n", private=True)


def load_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        UsageError: it cannot be read, or is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not a saved chat: it is damaged or of another kind") from None
