"""What placeholders of a slide take over from its layout and master: numbers of items, and what is struck out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ragkv.ingest.formats.numbering import whole
from ragkv.ingest.formats.package import Package, PartHandler

LEVELS = {f"lvl{level + 1}pPr": level for level in range(9)}
"""Levels of the style of a shape."""
_TELLING = re.compile(rb'buAutoNum|strike="[sd]')
"""What a layout has that says something. Most have neither, and are not parsed."""
_BODY = "body"


class LevelStyles:
    """Numbers of items by level, and the levels that are struck out."""

    def __init__(self) -> None:
        self.autos: dict[int, tuple[str, int]] = {}
        self.struck: set[int] = set()

    def clear(self) -> None:
        """Forget what was told."""
        self.autos.clear()
        self.struck.clear()

    def tell(self, level: int, tag: str, attributes: Mapping[str, str]) -> None:
        """Take what an element says of a level."""
        match tag:
            case "buAutoNum":
                self.autos[level] = attributes.get("type", ""), whole(attributes.get("startAt"), 1)
            case "buNone" | "buChar":
                self.autos.pop(level, None)
            case "defRPr" if (strike := attributes.get("strike")) is not None:
                (self.struck.discard if strike == "noStrike" else self.struck.add)(level)

    def take(self, others: LevelStyles | None) -> None:
        """Take over other styles."""
        if others is not None:
            self.autos |= others.autos
            self.struck |= others.struck


class Placeholders(PartHandler):
    """Collects the styles of the placeholders of a layout or a master, by their kind and number."""

    def __init__(self) -> None:
        self._found: dict[str, LevelStyles] = {}
        self._open: list[LevelStyles] = []
        self._level: int | None = None

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "sp":
                self._open = []
            case "ph":
                names = [attributes.get("type", _BODY), f"#{attributes.get('idx', '')}"]
                self._open = [self._found.setdefault(name, LevelStyles()) for name in names]
            case "bodyStyle":
                self._open = [self._found.setdefault("", LevelStyles())]
            case _ if tag in LEVELS:
                self._level = LEVELS[tag]
            case _ if self._level is not None:
                for styles in self._open:
                    styles.tell(self._level, tag, attributes)

    def end(self, tag: str) -> None:
        if tag in LEVELS:
            self._level = None
        elif tag in ("sp", "bodyStyle"):
            self._open = []

    def named(self, name: str) -> LevelStyles | None:
        """Return the styles of a kind of placeholder, of one with a number (`#1`), or of all bodies (empty)."""
        return self._found.get(name)


class Layouts:
    """The layouts of a presentation and their masters. Each is read once."""

    def __init__(self, package: Package):
        self._package = package
        self._known: dict[str, tuple[Placeholders, Placeholders]] = {}
        self._masters: dict[str, Placeholders] = {}

    def of(self, layout: str) -> tuple[Placeholders, Placeholders]:
        """Return the placeholders of a master, and those of a layout of it."""
        if layout not in self._known:
            links = self._package.links(layout).values()
            master = next((link.target for link in links if link.kind == "slideMaster"), "")
            if master not in self._masters:
                self._masters[master] = self._read(master)
            self._known[layout] = self._masters[master], self._read(layout)
        return self._known[layout]

    def _read(self, name: str) -> Placeholders:
        found = Placeholders()
        if name in self._package.names and _TELLING.search(self._package.bytes_of(name)):
            self._package.read(name, found)
        return found


def inherited(around: tuple[Placeholders, ...], attributes: Mapping[str, str]) -> LevelStyles:
    """Return what a placeholder takes over. around: of its master and its layout; attributes: of its `ph`."""
    styles, kind = LevelStyles(), attributes.get("type", _BODY)
    number = f"#{attributes['idx']}" if "idx" in attributes else kind
    for at, part in enumerate(around):
        if kind in (_BODY, "obj") and not at:
            styles.take(part.named(""))
        styles.take(part.named(number) or part.named(kind) if at else part.named(kind))
    return styles
