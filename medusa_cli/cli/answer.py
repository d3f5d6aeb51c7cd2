"""Runs a request on a loaded model and prints the answers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from medusa_cli.cli.boundary import INTERRUPTED, exit_code
from medusa_cli.cli.interrupt import interruptible
from medusa_cli.cli.live import LiveText, summary
from medusa_cli.cli.prompt_input import BatchItem
from medusa_cli.cli.report import result_object, start_event, step_event, to_json
from medusa_cli.cli.request import Format, Request
from medusa_cli.cli.streams import Streams
from medusa_cli.config import FinishReason, SamplingConfig
from medusa_cli.errors import MedusaError, UsageError
from medusa_cli.session import Medusa, Prompt
from medusa_cli.text.events import Event, Result, Started, Step

ShouldStop = Callable[[], bool]


class Answerer:
    """Answers prompts one after the other.

    Args:
        model: loaded.
        request: how to answer.
        streams: where to print.
        load_seconds: what loading took, for the report.

    Raises:
        UsageError: the request does not fit the model.
    """

    def __init__(
        self, model: Medusa, request: Request, streams: Streams, load_seconds: float
    ) -> None:
        self._model = model
        if request.template is not None:
            self._model = replace(model, template=request.template)
        self._request, self._streams, self._load_seconds = request, streams, load_seconds
        defaults = model.sampling_defaults() if request.model_defaults else {}
        self._sampling = SamplingConfig(**(defaults | request.given))
        if request.system is not None and not self._model.has_template:
            raise UsageError("--system needs a chat template: give one with --template FILE")
        for name in self._sampling.ineffective(request.given):
            why = "at temperature 0" if self._sampling.temperature == 0 else "here"
            self._note(f"--{name.replace('_', '-')} has no effect {why}")

    def one(self, item: BatchItem) -> int:
        """Answers one prompt in the request's format; returns the exit code."""
        with interruptible() as should_stop:
            events = self._events(item, should_stop)
            match self._request.format:
                case Format.TEXT:
                    result = self._text(events)
                case Format.JSON:
                    result = _last(events)
                    indent = 2 if self._streams.stdout.isatty() else None
                    self._streams.write(to_json(self._object(result), indent=indent))
                case Format.JSONL:
                    result = self._json_lines(events)
        return INTERRUPTED if result.finish_reason is FinishReason.INTERRUPTED else 0

    def batch(self, items: list[BatchItem]) -> int:
        """Answers prompts in order, one JSON object a line; returns the exit code.

        A prompt that fails gets an object with `error`, and the others go on.
        """
        code = 0
        with interruptible() as should_stop:
            for item in items:
                identity = {} if item.id is None else {"id": item.id}
                try:
                    result = _last(self._events(item, should_stop))
                except MedusaError as error:
                    code = code or exit_code(error)
                    self._streams.write(to_json({**identity, "error": str(error)}))
                    continue
                self._streams.write(to_json({**identity, **self._object(result)}))
                if result.finish_reason is FinishReason.INTERRUPTED:
                    return INTERRUPTED
        return code

    def _events(self, item: BatchItem, should_stop: ShouldStop) -> Iterator[Event]:
        prompt: Prompt = item.prompt
        if isinstance(prompt, str) and self._request.system is not None:
            system = {"role": "system", "content": self._request.system}
            prompt = [system, {"role": "user", "content": prompt}]
        return self._model.stream(
            prompt,
            sampling=self._sampling,
            limits=self._request.limits,
            chat=self._request.chat,
            should_stop=should_stop,
        )

    def _text(self, events: Iterator[Event]) -> Result:
        terminal = self._streams.stdout.isatty()
        if terminal:
            footer = self._streams.live and not self._request.quiet
            with LiveText(self._streams.stdout, trace=self._request.trace, footer=footer) as screen:
                result = _each_step(events, screen.show)
            if footer:
                self._streams.note(summary(result))
        else:
            result = _each_step(events, lambda step: self._streams.write(step.text))
        for warning in result.warnings:
            self._note(f"warning: {warning}")
        return result

    def _json_lines(self, events: Iterator[Event]) -> Result:
        started = next(events)
        assert isinstance(started, Started)
        start = start_event(self._model, self._sampling, started.prompt_tokens)
        self._streams.write(to_json(start))
        result = _each_step(events, lambda step: self._streams.write(to_json(step_event(step))))
        self._streams.write(to_json({"event": "end", **self._object(result)}))
        return result

    def _object(self, result: Result) -> dict[str, Any]:
        return result_object(self._model, result, self._load_seconds)

    def _note(self, text: str) -> None:
        if not self._request.quiet:
            self._streams.note(f"medusa: {text}")


def _each_step(events: Iterator[Event], show: Callable[[Step], None]) -> Result:
    """Shows every step and returns the result behind the last one."""
    for event in events:
        if isinstance(event, Step):
            show(event)
        elif isinstance(event, Result):
            return event
    raise AssertionError("a stream of events ends with its result")


def _last(events: Iterator[Event]) -> Result:
    return _each_step(events, lambda _step: None)
