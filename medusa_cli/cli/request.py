"""What one call of `generate` asks for, apart from the model."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from medusa_cli.config import Limits


class Format(StrEnum):
    """What `generate` prints."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class Request:
    """How to answer and how to show it.

    Attributes:
        limits: where an answer ends.
        given: fields of `SamplingConfig` that were given on the command line.
        model_defaults: take the fields that were not from the model's own configuration.
        chat: render text with the chat template; None: where there is one.
        system: system message in front of a text prompt.
        template: Jinja text that replaces the model's chat template.
        format: what to print.
        trace: colour tokens by the depth they were accepted at.
        quiet: no footer, no warnings.
    """

    limits: Limits
    given: dict[str, Any]
    model_defaults: bool
    chat: bool | None
    system: str | None
    template: str | None
    format: Format
    trace: bool
    quiet: bool
