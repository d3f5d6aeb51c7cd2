"""The process's streams as one value, so that commands can be run on others in a test."""

import sys
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Streams:
    """Standard input, output and error, and which of them are terminals."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO

    @classmethod
    def of_process(cls) -> "Streams":
        """The current process's streams; output is UTF-8 whatever the locale says."""
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(encoding="utf-8", errors="replace", newline="")
        return cls(sys.stdin, sys.stdout, sys.stderr)

    @property
    def live(self) -> bool:
        """Whether a live footer makes sense: text and footer share one terminal."""
        return self.stdout.isatty() and self.stderr.isatty()

    def write(self, text: str) -> None:
        """Writes to standard output and flushes."""
        self.stdout.write(text)
        self.stdout.flush()

    def note(self, text: str) -> None:
        """Writes one line to standard error."""
        self.stderr.write(f"{text}\n")
        self.stderr.flush()
