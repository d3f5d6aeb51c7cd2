"""Where `generate` takes its prompt from: option, file, standard input, or a batch file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.cli.streams import Streams
from medusa_cli.errors import UsageError
from medusa_cli.text.prompt_files import decode_text, prompt_of, read_rows, read_text


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
        parts.append(decode_text(streams.stdin.buffer.read(), "standard input"))
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
    rows = read_rows(file)
    return [BatchItem(row.get("id"), prompt_of(row, f"{file}, line {n}")) for n, row in rows]


def _checked(text: str) -> str:
    """Refuses an argument whose bytes were not UTF-8: Python smuggles them in as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("-p is not UTF-8: check the terminal's encoding") from None
    return text
