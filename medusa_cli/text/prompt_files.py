"""Prompts in files: text, JSON lines, and the set that comes with the package."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).parent / "prompts.jsonl"
_ROLES = ("system", "user", "assistant")
_KEYS = ("prompt", "messages", "turns")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to measure with, and what the user says after the answers.

    Attributes:
        id: unique in its set.
        category: what kind of task it is; '' when the file does not say.
        first: the prompt's text, or messages that end where the answer begins.
        follow_ups: the user's later turns.
    """

    id: str
    category: str
    first: str | tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The conversation that asks for the turn behind `answers`."""
        first = self.first
        opening = [{"role": "user", "content": first}] if isinstance(first, str) else list(first)
        for answer, turn in zip(answers, self.follow_ups, strict=False):
            opening += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn},
            ]
        return opening


def read_questions(source: str) -> tuple[Question, ...]:
    """Prompts of a JSONL file, or of the set that comes with the package for `builtin`.

    A line has `prompt`, `messages` or `turns` (user turns), optionally `id` and `category`.

    Raises:
        UsageError: naming the first bad line and what is wrong with it.
    """
    path = _BUILTIN_FILE if source == BUILTIN else Path(source)
    questions = []
    for n, row in read_rows(path):
        where = f"{path}, line {n}"
        first, *follow_ups = _turns(row, where)
        name, category = str(row.get("id", n)), str(row.get("category", ""))
        kept = tuple(first) if isinstance(first, list) else first
        questions.append(Question(name, category, kept, tuple(follow_ups)))
    ids = [question.id for question in questions]
    repeated = next((name for i, name in enumerate(ids) if name in ids[:i]), None)
    if repeated is not None:
        raise UsageError(f"{path} has two prompts with the id '{repeated}'")
    return tuple(questions)


def spread(questions: Sequence[Question], limit: int | None) -> tuple[Question, ...]:
    """At most `limit` questions, as many of each category as of any other, in their order.

    Raises:
        UsageError: the limit is below 1.
    """
    if limit is None:
        return tuple(questions)
    if limit < 1:
        raise UsageError(f"--limit must be at least 1, not {limit}")
    seen: dict[str, int] = defaultdict(int)
    rounds = []
    for i, question in enumerate(questions):
        rounds.append((seen[question.category], i))
        seen[question.category] += 1
    chosen = sorted(i for _, i in sorted(rounds)[:limit])
    return tuple(questions[i] for i in chosen)


def questions_sha256(questions: Sequence[Question]) -> str:
    """SHA-256 of what is asked, whatever the ids, categories and order."""
    texts = sorted(json.dumps([q.first, q.follow_ups], sort_keys=True) for q in questions)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with its line number; empty lines are skipped.

    Raises:
        UsageError: it cannot be read, is not UTF-8 or not JSON objects, or holds none.
    """
    rows = []
    for n, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {n} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {n} must be an object with {_or(_KEYS)}")
        rows.append((n, row))
    if not rows:
        raise UsageError(f"{path} holds no prompts")
    return rows


def prompt_of(row: dict[str, Any], where: str) -> str | list[dict[str, str]]:
    """The `prompt` or the `messages` of a row.

    Raises:
        UsageError: it has neither or both, or they are empty or not of the right form.
    """
    if ("prompt" in row) == ("messages" in row):
        raise UsageError(f"{where} must be an object with either 'prompt' or 'messages'")
    if "prompt" in row:
        return _text(row["prompt"], f"{where}: 'prompt'")
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
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def read_text(path: Path) -> str:
    """A text file without its final newline.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    return decode_text(data, str(path))


def decode_text(data: bytes, where: str) -> str:
    """UTF-8 without its final newline.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 (byte {error.start}): convert it first") from None
    return text.removesuffix("\n").removesuffix("\r")


def _turns(row: dict[str, Any], where: str) -> list[Any]:
    """What is asked first, text or messages, and the user's turns behind it."""
    if sum(key in row for key in _KEYS) != 1:
        raise UsageError(f"{where} must be an object with one of {_or(_KEYS)}")
    if "turns" not in row:
        return [prompt_of(row, where)]
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise UsageError(f"{where}: 'turns' must be a list of texts and not empty")
    return [_text(turn, f"{where}: each of 'turns'") for turn in turns]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{what} must be text and not empty")
    return value


def _or(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
