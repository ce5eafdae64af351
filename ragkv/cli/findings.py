"""Findings of `ragkv doctor`, printed one per line as they are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.cli.common import out, printable
from ragkv.errors import RagkvError

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red", "": "dim"}


@dataclass
class Findings:
    """Prints findings. wrong: number of faults so far."""

    wrong: int = 0

    def ok(self, what: str, words: str) -> None:
        """Print that something works."""
        self._print("ok", what, words)

    def note(self, what: str, words: str) -> None:
        """Print something worth knowing that is not a fault."""
        self._print("note", what, words)

    def fault(self, what: str, words: str) -> None:
        """Print and count a fault."""
        self.wrong += 1
        self._print("wrong", what, words)

    def fact(self, what: str, words: str) -> None:
        """Print a fact."""
        self._print("", what, words)

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Print an error of the block as a fault, so that the other checks still run."""
        try:
            yield
        except (RagkvError, OSError) as error:
            self.fault(what, str(error))

    def _print(self, mark: str, what: str, words: str) -> None:
        from rich.text import Text

        line = Text.assemble((f"{mark:<6}", _STYLES[mark]), (f"{what:<10} ", "bold"), printable(words))
        out().print(line)
