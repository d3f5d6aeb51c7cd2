"""Where a chat's messages come from: a line editor on a terminal, lines of a pipe elsewhere."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from medusa_cli.cli.streams import Streams
from medusa_cli.decoding.adaptive import AUTO
from medusa_cli.decoding.tree import shipped_trees
from medusa_cli.errors import UsageError

BLOCK = '"""'


class ChatInput(Protocol):
    """Gives one message after the other."""

    def read(self, default: str = "") -> str | None:
        """The next message, None at the end; `default` is there to be edited."""
        ...

    def choose(self, question: str, letters: str) -> str:
        """One of `letters`, as an answer to a question; the last one declines."""
        ...


class PipedInput:
    """Each line of standard input is a message; a block in triple quotes is one too."""

    def __init__(self, streams: Streams) -> None:
        self._lines = iter(streams.stdin.buffer)
        self._ahead: list[str] = []

    def is_empty(self) -> bool:
        """Whether nothing is left but empty lines."""
        for line in self._text_lines():
            if line.strip():
                self._ahead.append(line)
                return False
        return True

    def read(self, default: str = "") -> str | None:
        """The next line or block without its quotes; None at the end."""
        del default
        lines = self._text_lines()
        line = self._ahead.pop() if self._ahead else next(lines, None)
        if line is None or not is_open_block(line):
            return None if line is None else without_quotes(line)
        block = [line]
        for more in lines:
            block.append(more)
            if not is_open_block("\n".join(block)):
                break
        return without_quotes("\n".join(block))

    def choose(self, question: str, letters: str) -> str:
        """The last letter: a pipe cannot be asked."""
        del question
        return letters[-1]

    def _text_lines(self) -> Iterator[str]:
        for data in self._lines:
            try:
                yield data.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise UsageError("standard input is not UTF-8: convert it first") from None


class TerminalInput:
    """A prompt_toolkit line editor.

    Enter sends; Alt-Enter and Ctrl-J make a new line, as Enter does inside triple quotes. A pasted
    text is one message. Ctrl-C clears the line, Ctrl-D on an empty one ends the chat, Ctrl-R
    searches the history, Ctrl-X Ctrl-E opens $EDITOR, Tab completes.

    Args:
        history: file that keeps what was sent.
        commands: names to complete behind a slash.
    """

    def __init__(self, history: Path, commands: Iterable[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(history)),
            completer=_ChatCompleter(commands),
            complete_while_typing=False,
            multiline=True,
            enable_open_in_editor=True,
            key_bindings=_key_bindings(),
            prompt_continuation="  ",
            reserve_space_for_menu=4,
        )

    def read(self, default: str = "") -> str | None:
        """The next message without its quotes; None at Ctrl-D."""
        while True:
            try:
                return without_quotes(self._session.prompt("> ", default=default))
            except KeyboardInterrupt:
                default = ""  # a signal from outside clears the line as Ctrl-C does
            except EOFError:
                return None

    def choose(self, question: str, letters: str) -> str:
        """Asks until the answer begins with one of `letters`; Ctrl-D takes the last one."""
        asking: PromptSession[str] = PromptSession()
        while True:
            try:
                answer = asking.prompt(f"{question} ").strip().lower()
            except (EOFError, KeyboardInterrupt):
                return letters[-1]
            if answer[:1] and answer[:1] in letters:
                return answer[:1]


def is_open_block(text: str) -> bool:
    """Whether the text begins a block in triple quotes and does not end it."""
    text = text.strip()
    return text.startswith(BLOCK) and (len(text) < 2 * len(BLOCK) or not text.endswith(BLOCK))


def without_quotes(text: str) -> str:
    """The text inside a block's triple quotes, or the text itself; no empty lines at its end."""
    stripped = text.strip()
    if not stripped.startswith(BLOCK):
        return text.rstrip("\n")
    return stripped.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")


@contextlib.contextmanager
def keys_unseen(streams: Streams) -> Iterator[None]:
    """Within the block, keys typed on the terminal wait for the next prompt and do not show.

    It spans the whole chat: prompts go back to the state they found, so no key falls between two.
    """
    if sys.platform == "win32":  # its console shows no keys that nobody reads
        yield
        return
    import termios

    terminal = streams.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = termios.tcgetattr(terminal)
    silent[0] &= ~termios.ICRNL  # Enter stays Enter, which sends; else it would be Ctrl-J
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    # While the history is searched, Enter and Ctrl-C belong to the search.
    @bindings.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=~is_searching)
    def clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return bindings


class _ChatCompleter(Completer):
    """Completes commands, and the trees and paths behind them."""

    def __init__(self, commands: Iterable[str]) -> None:
        self._commands = sorted(commands)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """Completions for the text before the cursor."""
        text = document.text_before_cursor
        command, space, argument = text.partition(" ")
        if not text.startswith("/"):
            return
        if not space:
            for name in self._commands:
                if name.startswith(command[1:]):
                    yield Completion(f"/{name}", start_position=-len(command))
            return
        if command == "/tree":
            for name in (AUTO, *shipped_trees()):
                if name.startswith(argument):
                    yield Completion(name, start_position=-len(argument))
        if command in ("/tree", "/save", "/load", "/export"):
            yield from self._paths.get_completions(Document(argument), complete_event)
