"""The chat's read-eval-print loop: messages in, answers drawn, commands run."""

import contextlib

from medusa_cli.chat import Chat, Turn
from medusa_cli.cli import session_file
from medusa_cli.cli.boundary import exit_code
from medusa_cli.cli.chat_input import ChatInput
from medusa_cli.cli.commands import Commands, Leave
from medusa_cli.cli.interrupt import Interrupts, interruptible
from medusa_cli.cli.live import LiveText, MarkdownText, summary
from medusa_cli.cli.streams import Streams
from medusa_cli.config import FinishReason
from medusa_cli.errors import ContextLengthError, MedusaError, StorageError, UsageError
from medusa_cli.text.events import Result, Started, Step

NEARLY_FULL = 0.9  # share of the context from which on the user is told what is left


class Repl:
    """Runs a chat on a terminal, or line by line on pipes.

    Attributes:
        chat: the conversation.
        streams: where to print.
        terminal: whether a person sits there: footer, colours, questions, last session kept.
        trace: colour tokens by the depth they were accepted at.
        markdown: render finished blocks.
        draft: text that the next prompt starts with.
    """

    def __init__(
        self,
        chat: Chat,
        source: ChatInput,
        streams: Streams,
        *,
        terminal: bool,
        trace: bool = False,
        markdown: bool = False,
        quiet: bool = False,
    ) -> None:
        self.chat = chat
        self.streams = streams
        self.terminal = terminal
        self.trace = trace
        self.markdown = markdown
        self.draft = ""
        self._quiet = quiet
        self._input = source
        self._interrupts = Interrupts()
        self._commands = Commands(self)

    def run(self) -> int:
        """Loops until the end of the input or /exit; returns the exit code.

        On pipes the code is that of the first message that failed.
        """
        with interruptible() as self._interrupts:
            return self._loop()

    def _loop(self) -> int:
        code = 0
        while True:
            default, self.draft = self.draft, ""
            message = self._input.read(default)
            self._interrupts.clear()
            if message is None:
                return code
            if not message.strip():
                continue
            try:
                self._handle(message)
            except Leave:
                return code
            except MedusaError as error:
                self.note(f"medusa: {error}" if not self.terminal else str(error))
                code = code or (0 if self.terminal else exit_code(error))

    def greet(self) -> None:
        """Says what is loaded, and what of the last chat is there again."""
        model = self.chat.model
        parts = [model.name, f"{model.base.device}"]
        if model.heads is not None and not self.chat.plain:
            parts.append(f"tree {model.tree.name}")
        if self.chat.turns:
            parts.append(f"{len(self.chat.turns)} turns resumed")
        self.note(" · ".join([*parts, "/help for help"]))

    def say(self, text: str) -> None:
        """Prints what a command has to say."""
        self.streams.write(f"{text}\n")

    def note(self, text: str) -> None:
        """Prints a remark beside the conversation."""
        self.streams.note(text)

    def ask(self, user: str) -> None:
        """Answers a message and keeps the turn.

        Raises:
            MedusaError: the message cannot be answered; the chat is as before.
        """
        try:
            self._answer(user)
        except ContextLengthError as error:
            if not self.terminal or not self.chat.turns:
                raise
            self.note(str(error))
            if self._input.choose("drop the oldest turns, or stop? [d/s]", "ds") == "s":
                raise UsageError("the message was not sent") from None
            dropped = self.chat.drop_oldest(user)
            self.note(f"dropped the oldest {dropped} turns")
            self._answer(user)

    def ask_again(self, turn: Turn) -> None:
        """Answers a turn's question again; if that fails the turn is put back."""
        try:
            self.ask(turn.user)
        except MedusaError:
            self.chat.turns.append(turn)
            raise

    def _handle(self, message: str) -> None:
        if message.startswith("//"):
            self.ask(message[1:])
        elif message.startswith("/"):
            self._commands.run(message)
        else:
            self.ask(message)
        self._keep()

    def _keep(self) -> None:
        """Keeps the chat for --continue; a chat goes on also where that fails."""
        if self.terminal:
            try:
                session_file.save_json(session_file.last_session(), self.chat.to_data())
            except StorageError as error:
                self.note(f"this chat is not kept for --continue: {error}")

    def _answer(self, user: str) -> None:
        result = self._show(user)
        if result.finish_reason is FinishReason.INTERRUPTED:
            self.note("[interrupted]")
        if self.terminal and not self._quiet:
            self._remarks(result)

    def _show(self, user: str) -> Result:
        result: Result | None = None
        with contextlib.ExitStack() as stack:
            events = stack.enter_context(contextlib.closing(self.chat.ask(user, self._interrupts)))
            started = next(events)
            assert isinstance(started, Started)
            screen: LiveText | None = None
            if self.terminal:
                screen = stack.enter_context(self._screen(user, started.prompt_tokens))
            for event in events:
                if isinstance(event, Result):
                    result = event
                elif isinstance(event, Step) and screen is not None:
                    screen.show(event)
                elif isinstance(event, Step):
                    self.streams.write(event.text)
        assert result is not None, "a stream ends with its result"
        if not self.terminal:
            self.streams.write("\n")
        return result

    def _screen(self, user: str, prompt_tokens: int) -> LiveText:
        kind = MarkdownText if self.markdown else LiveText
        return kind(
            self.streams.stdout,
            trace=self.trace,
            footer=not self._quiet,
            thinking=self.chat.rendered(user).rstrip().endswith("<think>"),
            context_used=prompt_tokens,
            context_length=self.chat.model.base.context_length,
        )

    def _remarks(self, result: Result) -> None:
        for warning in result.warnings:
            self.note(f"warning: {warning}")
        context = self.chat.model.base.context_length
        used = self.chat.tokens_used()
        text = summary(result)
        if context is not None:
            text += f" · context {used}/{context}"
        self.note(f"({text})")
        if context is not None and result.finish_reason is FinishReason.CONTEXT:
            self.note("the context is full, so the answer ends here: /undo or /reset make room")
        elif context is not None and used > NEARLY_FULL * context:
            self.note(f"the context is nearly full: {context - used} tokens are left")
