"""A conversation with a model: turns, the KV cache that lives across them, saving and loading.

It does not know about terminals; the REPL in `medusa_cli.cli.repl` draws what it yields.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_cli.config import FinishReason, Limits, SamplingConfig
from medusa_cli.decoding.tree import ROOT_ONLY
from medusa_cli.errors import ContextLengthError, UsageError
from medusa_cli.models.cache import KVCache
from medusa_cli.models.progress import Report, silent
from medusa_cli.session import Medusa
from medusa_cli.text.events import Event, Result
from medusa_cli.text.prompts import Message, continue_chat, render_chat

FORMAT = "medusa-chat/1"
DROP_RESERVE = 0.25  # share of the context that dropping the oldest turns makes free


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer.

    Attributes:
        user: what was asked.
        answer: the answer's text.
        interrupted: whether the answer was stopped before its end.
        ids: all tokens of the conversation up to and with this answer, as fed and emitted;
            empty after loading from a file.
    """

    user: str
    answer: str
    interrupted: bool = False
    ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Chat:
    """A conversation in progress.

    Attributes:
        model: with heads and tree, also while decoding is switched to plain.
        sampling: of the next answer.
        limits: of the next answer.
        system: system message; None leaves that to the template.
        plain: decode the next answer without speculation.
        turns: finished ones, oldest first.
        results: of this sitting's answers, for statistics.
        cache: rows of the conversation.
    """

    model: Medusa
    sampling: SamplingConfig
    limits: Limits
    system: str | None = None
    plain: bool = False
    turns: list[Turn] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    cache: KVCache = field(default_factory=KVCache)

    def ask(
        self, user: str, should_stop: Callable[[], bool] = lambda: False
    ) -> Generator[Event, None, Result]:
        """Answers one message, yielding the events of `Medusa.stream`; the turn is then kept.

        Only tokens that the cache does not hold are prefilled. When the consumer leaves before
        the end, no turn is added.

        Raises:
            UsageError: the message is empty, or the chat template fails.
            ContextLengthError: the conversation with this message does not fit the context.
        """
        ids = self.prompt_ids(user)
        context = self.model.base.context_length
        if context is not None and len(ids) >= context:
            raise ContextLengthError(
                f"the conversation with this message has {len(ids)} tokens, "
                f"the context holds {context}"
            )
        model = replace(self.model, heads=None, tree=ROOT_ONLY) if self.plain else self.model
        result: Result | None = None
        for event in model.stream(
            ids,
            sampling=self.sampling,
            limits=self.limits,
            cache=self.cache,
            should_stop=should_stop,
        ):
            result = event if isinstance(event, Result) else None
            yield event
        assert result is not None, "a stream ends with its result"
        interrupted = result.finish_reason is FinishReason.INTERRUPTED
        self.turns.append(Turn(user, result.text, interrupted, (*ids, *result.token_ids)))
        self.results.append(result)
        return result

    def prompt_ids(self, user: str) -> list[int]:
        """The ids that asking `user` would feed: those of the turns before, then what is new."""
        before = self.turns[-1].ids if self.turns else ()
        return continue_chat(self.model.tokenizer, self.messages(user), self.model.template, before)

    def rendered(self, user: str) -> str:
        """The text that asking `user` would feed."""
        return render_chat(self.model.tokenizer, self.messages(user), self.model.template)

    def messages(self, user: str | None = None) -> list[Message]:
        """The conversation as messages, with a new one of the user at the end if given."""
        found: list[Message] = []
        if self.system is not None:
            found.append({"role": "system", "content": self.system})
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.answer})
        return found if user is None else [*found, {"role": "user", "content": user}]

    def tokens_used(self) -> int:
        """How many tokens of the context the conversation takes so far."""
        return len(self.turns[-1].ids) if self.turns else 0

    def undo(self) -> Turn:
        """Takes the last turn back and returns it; the cache follows with the next answer.

        Raises:
            UsageError: there is none.
        """
        if not self.turns:
            raise UsageError("there is no turn to take back")
        return self.turns.pop()

    def reset(self) -> None:
        """Forgets all turns; system message and settings stay."""
        self.turns.clear()

    def drop_oldest(self, user: str) -> int:
        """Drops turns from the front until `user` fits with room for an answer; returns how many.

        Raises:
            ContextLengthError: the message alone does not fit.
        """
        context = self.model.base.context_length
        assert context is not None, "without a limit nothing overflows"
        # The ids of turns that stay begin with those of dropped ones: they are encoded anew.
        fresh = [replace(turn, ids=()) for turn in self.turns]
        for dropped in range(len(fresh) + 1):
            needed = len(replace(self, turns=fresh[dropped:]).prompt_ids(user))
            room = context if dropped == len(fresh) else context * (1 - DROP_RESERVE)
            if needed < room:
                self.turns = fresh[dropped:]
                return dropped
        raise ContextLengthError(f"the message alone has {needed} tokens: shorten it")

    def use_tree(self, source: str, report: Report = silent) -> None:
        """Switches to another tree, and back to speculation.

        Args:
            report: hears what is being measured for `auto`.

        Raises:
            UsageError: there are no heads.
            TreeError: no such tree, or one that the heads cannot draft.
        """
        self.require_heads()
        self.model = self.model.with_tree(source, report)
        self.plain = False

    def require_heads(self) -> Any:
        """The model's heads. Raises `UsageError` when it was loaded without."""
        if self.model.heads is None:
            raise UsageError("this chat was started with --plain: there are no heads to use")
        return self.model.heads

    def to_data(self) -> dict[str, Any]:
        """The conversation as JSON data, format `medusa-chat/1`."""
        messages: list[dict[str, Any]] = [dict(message) for message in self.messages()]
        answers = [message for message in messages if message["role"] == "assistant"]
        for turn, answer in zip(self.turns, answers, strict=True):
            if turn.interrupted:
                answer["interrupted"] = True
        return {"format": FORMAT, "model": self.model.name, "messages": messages}

    def restore(self, data: Any) -> None:
        """Takes over a conversation from `to_data`; on an error everything stays as it was.

        Raises:
            UsageError: it is not one, or of another version.
        """
        system, turns = parse_conversation(data)
        self.system, self.turns = system, turns


def parse_conversation(data: Any) -> tuple[str | None, list[Turn]]:
    """System message and turns of a saved conversation.

    Raises:
        UsageError: naming what is wrong.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"not a saved chat of the format {FORMAT}")
    messages = data.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError("the saved chat's messages are damaged")
    system = None
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    pairs = list(zip(messages[::2], messages[1::2], strict=False))
    roles = [(user["role"], answer["role"]) for user, answer in pairs]
    if len(messages) % 2 or any(pair != ("user", "assistant") for pair in roles):
        raise UsageError("the saved chat's messages do not take turns")
    turns = [
        Turn(user["content"], answer["content"], answer.get("interrupted") is True)
        for user, answer in pairs
    ]
    return system, turns


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )


def accepted_by_depth(results: Sequence[Result]) -> list[float]:
    """Share of verifications that accepted a draft at depth 1, 2, ..."""
    lengths = [length for result in results for length in result.accept_lengths]
    deepest = max(lengths, default=1) - 1
    return [
        sum(length > depth for length in lengths) / len(lengths) for depth in range(1, deepest + 1)
    ]
