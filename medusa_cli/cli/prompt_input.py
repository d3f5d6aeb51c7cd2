"""Where `generate` takes its prompt from: option, file, standard input, or a batch file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.cli.streams import Streams
from medusa_cli.errors import UsageError

_ROLES = ("system", "user", "assistant")


def read_prompt(prompt: str | None, file: str | None, streams: Streams) -> str:
    """The prompt's text: `-f` or else standard input when it is no terminal, then `-p`.

    One final newline of a file or of standard input is dropped, as a shell's $(...) does.

    Raises:
        UsageError: nothing was given, it is empty, or it is not UTF-8.
    """
    parts = []
    if file is not None and file != "-":
        parts.append(read_text(Path(file)))
    elif file == "-" or not streams.stdin.isatty():
        parts.append(_decode(streams.stdin.buffer.read(), "standard input"))
    if prompt is not None:
        parts.append(_checked(prompt))
    if not parts:
        raise UsageError("no prompt: give -p TEXT, -f FILE, or text on standard input")
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise UsageError("the prompt is empty: give some text with -p, -f or standard input")
    return text


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One line of a batch file.

    Attributes:
        id: as the line gives it, else None.
        prompt: text or messages.
    """

    id: Any
    prompt: str | list[dict[str, str]]


def read_batch(file: Path) -> list[BatchItem]:
    """The prompts of a JSONL file, all checked before the first is run.

    Raises:
        UsageError: naming the first bad line and what is wrong with it.
    """
    lines = enumerate(read_text(file).split("\n"), start=1)
    items = [_batch_item(line, f"{file}, line {n}") for n, line in lines if line.strip()]
    if not items:
        raise UsageError(f"{file} holds no prompts")
    return items


def _batch_item(line: str, where: str) -> BatchItem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise UsageError(f"{where} must be an object with either 'prompt' or 'messages'")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise UsageError(f"{where}: 'prompt' must be text and not empty")
        return BatchItem(row.get("id"), row["prompt"])
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: 'messages' must be a list and not empty")
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in _ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise UsageError(
                f"{where}: each message needs a 'role' ({', '.join(_ROLES)}) and 'content'"
            )
    kept = [{"role": m["role"], "content": m["content"]} for m in messages]
    return BatchItem(row.get("id"), kept)


def read_text(path: Path) -> str:
    """A text file without its final newline.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    return _decode(data, str(path))


def _decode(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 (byte {error.start}): convert it first") from None
    return text.removesuffix("\n").removesuffix("\r")


def _checked(text: str) -> str:
    """Refuses an argument whose bytes were not UTF-8: Python smuggles them in as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("-p is not UTF-8: check the terminal's encoding") from None
    return text
