"""How the slow parts of loading tell the user what they do, without knowing who shows it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing that is being done.

    Attributes:
        text: what, for a person.
        done: units finished, None where they cannot be counted.
        total: units in all, None where they cannot be counted.
    """

    text: str
    done: int | None = None
    total: int | None = None


Report = Callable[[Stage], None]


def silent(_stage: Stage) -> None:
    """A `Report` that shows nothing."""
