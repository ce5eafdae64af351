"""Findings: what `ragkv doctor` tells, a line each, as it finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.cli.common import out, printable
from ragkv.errors import RagkvError

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red", "": "dim"}


@dataclass
class Findings:
    """What was found, told as it comes. wrong: how many things are not as they must be."""

    wrong: int = 0

    def ok(self, what: str, words: str) -> None:
        """Works."""
        self._tell("ok", what, words)

    def note(self, what: str, words: str) -> None:
        """Works, but worth knowing."""
        self._tell("note", what, words)

    def fault(self, what: str, words: str) -> None:
        """Does not work."""
        self.wrong += 1
        self._tell("wrong", what, words)

    def fact(self, what: str, words: str) -> None:
        """For the record."""
        self._tell("", what, words)

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """A fault of the part inside is told, and the other parts are still looked at."""
        try:
            yield
        except (RagkvError, OSError) as error:
            self.fault(what, str(error))

    def _tell(self, mark: str, what: str, words: str) -> None:
        from rich.text import Text

        line = Text.assemble((f"{mark:<6}", _STYLES[mark]), (f"{what:<10} ", "bold"), printable(words))
        out().print(line)


def without_password(url: str) -> str:
    """The URL without what stands before its @."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url
