"""Runs arms over questions, interleaved, and times them.

The arms take turns prompt by prompt in ABBA order: a drift of the machine hits all of them alike.
Clock and memory meter are arguments, so that a test can run all of this on made-up times.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from medusa_cli.bench.arms import Arm, Unavailable
from medusa_cli.bench.statistics import Amount
from medusa_cli.text.loops import loop_period
from medusa_cli.text.prompt_files import Question

WARMUP_STEPS = 8


class MemoryMeter(Protocol):
    """Tells the most memory in use since the last `reset`."""

    def reset(self) -> None:
        """A new run begins."""
        ...

    def sample(self) -> None:
        """A good moment to look."""
        ...

    def peak(self) -> int:
        """Bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """One turn of one question.

    Attributes:
        question: which.
        turn: from 0.
        prompt_ids: S token ids, the same for every arm.
    """

    question: Question
    turn: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One arm's answer to one item.

    Attributes:
        arm, question, category, turn, repeat: what was run.
        order: position in the whole sequence of runs.
        prompt_ids: S token ids.
        token_ids: what was emitted, an end token included.
        first_tokens: how many of them came with the first step.
        accept_lengths: of each verification, before the cut at an end token.
        step_seconds: of each step behind the first.
        ttft_seconds: from the start to the end of the first step.
        peak_bytes: most memory in use at the end of a step.
        ended: whether the answer ended before the token limit.
        nodes: of each verification, where the arm tells them.
    """

    arm: str
    question: str
    category: str
    turn: int
    repeat: int
    order: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    first_tokens: int
    accept_lengths: tuple[int, ...]
    step_seconds: tuple[float, ...]
    ttft_seconds: float
    peak_bytes: int
    ended: bool
    nodes: tuple[int, ...] = ()

    @property
    def decoded(self) -> Amount:
        """Tokens behind the first step, and the time that they took."""
        return Amount(len(self.token_ids) - self.first_tokens, sum(self.step_seconds))

    @property
    def loop_period(self) -> int | None:
        """Length of the cycle that the answer ends in; None when it does not loop."""
        return loop_period(self.token_ids)


@dataclass(slots=True)
class Measurement:
    """What was measured so far.

    Attributes:
        runs: in the order in which they were made.
        unavailable: arms that could not run, or failed on the way, with the reason.
        skipped: prompts that do not fit the context, as `question/turn`.
        complete: whether everything that was planned has run.
    """

    runs: list[Run] = field(default_factory=list)
    unavailable: list[Unavailable] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        max_new_tokens: most tokens of an answer.
        warmup: untimed short runs of each arm before the first timed one.
        repeats: timed runs of each arm on each prompt.
    """

    max_new_tokens: int = 128
    warmup: int = 1
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Conversation:
    """How questions become ids, and answers text.

    Attributes:
        encode: prompt ids of a question behind its answers so far.
        decode: the text of an answer.
        turns: how many turns of a question can be asked.
        context_length: most tokens of prompt and answer together, None for no limit.
    """

    encode: Callable[[Question, Sequence[str]], list[int]]
    decode: Callable[[Sequence[int]], str]
    turns: Callable[[Question], int]
    context_length: int | None


class _WarmedUpError(Exception):
    """Leaves an arm's run once it is warm."""


class Runner:
    """Runs arms over questions.

    Args:
        arms: the first one's answers are the history of multi-turn questions.
        conversation: how questions become ids.
        plan: how much is run.
        on_run: hears every finished run.
        clock: seconds.
        memory: what is in use.
        should_stop: asked after each step; True raises `KeyboardInterrupt` out of `run`.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        conversation: Conversation,
        plan: Plan,
        on_run: Callable[[Run], None],
        memory: MemoryMeter,
        clock: Callable[[], float] = time.perf_counter,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._arms = list(arms)
        self._conversation, self._plan = conversation, plan
        self._on_run, self._memory, self._clock = on_run, memory, clock
        self._should_stop = should_stop

    def run(self, questions: Sequence[Question], measurement: Measurement) -> None:
        """Adds runs to `measurement`, which is right also when an interrupt ends this early."""
        self._warm_up(questions, measurement)
        forward = True
        for question in questions:
            answers: list[str] = []
            turns = self._conversation.turns(question)
            for turn in range(turns):
                ids = self._conversation.encode(question, answers)
                item = Item(question, turn, tuple(ids))
                if self._room(item) < 1:
                    measurement.skipped.append(f"{question.id}/{turn + 1}")
                    break
                for repeat in range(self._plan.repeats):
                    order = self._arms if forward else self._arms[::-1]
                    forward = not forward
                    for arm in list(order):
                        self._timed(arm, item, repeat, measurement)
                if not self._arms:
                    return
                if turn + 1 < turns:
                    answers.append(self._answer(item, measurement))
        measurement.complete = True

    def _warm_up(self, questions: Sequence[Question], measurement: Measurement) -> None:
        """Short runs on the longest first prompt; an arm that cannot run shows here."""
        prompts = [self._conversation.encode(question, []) for question in questions]
        items = [Item(q, 0, tuple(ids)) for q, ids in zip(questions, prompts, strict=True)]
        fitting = [item for item in items if self._room(item) >= 1]
        if not fitting:
            return
        longest = max(fitting, key=lambda item: len(item.prompt_ids))
        for arm in list(self._arms):
            for _ in range(self._plan.warmup):
                steps = 0

                def count(new: Sequence[int], accept_length: int, nodes: int = 0) -> None:
                    del new, accept_length, nodes
                    nonlocal steps
                    steps += 1
                    self._check_interrupt()
                    if steps > WARMUP_STEPS:
                        raise _WarmedUpError

                try:
                    arm.run(longest.prompt_ids, self._room(longest), count)
                except _WarmedUpError:
                    continue
                except Exception as error:  # noqa: BLE001  # whatever a peer raises: it is reported
                    self._drop(arm, error, measurement)
                    break

    def _timed(self, arm: Arm, item: Item, repeat: int, measurement: Measurement) -> None:
        tokens: list[int] = []
        counts: list[int] = []
        lengths: list[int] = []
        sizes: list[int] = []
        seconds: list[float] = []
        limit = self._room(item)
        self._memory.reset()
        started = self._clock()

        def on_step(new: Sequence[int], accept_length: int, nodes: int = 0) -> None:
            nonlocal started
            seconds.append(self._clock() - started)
            tokens.extend(new)
            counts.append(len(new))
            if accept_length > 0:
                lengths.append(accept_length)
            if nodes > 0:
                sizes.append(nodes)
            self._memory.sample()
            self._check_interrupt()
            started = self._clock()  # what happened here is not the arm's time

        try:
            arm.run(item.prompt_ids, limit, on_step)
        except Exception as error:  # noqa: BLE001  # whatever a peer raises: it is reported
            self._drop(arm, error, measurement)
            return
        run = Run(
            arm=arm.info.name,
            question=item.question.id,
            category=item.question.category,
            turn=item.turn,
            repeat=repeat,
            order=len(measurement.runs),
            prompt_ids=item.prompt_ids,
            token_ids=tuple(tokens),
            first_tokens=counts[0],
            accept_lengths=tuple(lengths),
            step_seconds=tuple(seconds[1:]),
            ttft_seconds=seconds[0],
            peak_bytes=self._memory.peak(),
            ended=len(tokens) < limit,
            nodes=tuple(sizes),
        )
        measurement.runs.append(run)
        self._on_run(run)

    def _check_interrupt(self) -> None:
        if self._should_stop():
            raise KeyboardInterrupt

    def _drop(self, arm: Arm, error: Exception, measurement: Measurement) -> None:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        measurement.unavailable.append(Unavailable(arm.info.name, f"failed: {reason}"))
        self._arms.remove(arm)

    def _room(self, item: Item) -> int:
        """How many tokens an answer may have."""
        context = self._conversation.context_length
        asked = self._plan.max_new_tokens
        return asked if context is None else min(asked, context - len(item.prompt_ids))

    def _answer(self, item: Item, measurement: Measurement) -> str:
        """The answer that the next turn follows: the first arm's."""
        first = self._arms[0].info.name
        run = next(
            run
            for run in reversed(measurement.runs)
            if (run.arm, run.question, run.turn) == (first, item.question.id, item.turn)
        )
        return self._conversation.decode(run.token_ids)
