"""The rules of style sheets, and which elements their selectors are for: `.note`, `#menu > li`, `td:nth-child(2)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_HOLDS = re.compile(r"@(?:layer\b|supports\s*\(|media\s+(?:only\s+)?(?:screen|all)\s*\Z)", re.IGNORECASE)
"""Rules around others that hold for every screen."""
_UNQUOTED = str.maketrans("", "", "\"'")
_COMPOUND = re.compile(
    r"(\*|[a-z][a-z0-9]*)?((?:[.#][\w-]+|\[[\w-]+(?:=[\"']?[\w-]*[\"']?)?\])*)(?::nth-child\((\d{1,3})\)|(:first-child))?",
    re.IGNORECASE,
)


class SelectedElement(NamedTuple):
    """An element: its tag, classes, id and place, of which those that are empty may be any in a selector.

    The place is counted from 1, where a selector asks for one. An attribute is a class in brackets: `[open]`.
    """

    tag: str
    id: str
    classes: frozenset[str]
    place: int = 0

    def names(self, element: SelectedElement) -> bool:
        """Whether a part of a selector names an element."""
        if self.place not in (0, element.place):
            return False
        return self.tag in ("", element.tag) and self.id in ("", element.id) and self.classes <= element.classes


ANY = SelectedElement("", "", frozenset())


class StyleRule(NamedTuple):
    """What one selector says of elements.

    Attributes:
        subject: The element itself.
        around: Elements that it is in, the innermost first, each with whether it is the parent of the one before.
        weight: How specific the selector is: ids, classes and tags; and which rule it is of.
        style: What sets the element off; empty in rules that hide or show it.
    """

    subject: SelectedElement
    around: tuple[tuple[bool, SelectedElement], ...]
    weight: tuple[int, int, int, int]
    style: str


def rules_of(sheet: str) -> Iterator[tuple[str, str]]:
    """Yield (selectors, declarations) of the rules that hold for a screen, without those in other rules."""
    depth = 0
    for part in _without_comments(sheet).split("}"):
        *outer, body = part.split("{")
        if depth:  # inside of @media and the like
            depth += len(outer) - 1
            continue
        while len(outer) > 1 and _HOLDS.match(outer[0].rpartition(";")[2].strip()):
            del outer[0]
        if len(outer) == 1:
            yield outer[0].rpartition(";")[2], body
        elif outer:
            depth = len(outer) - 1


def of_place(selectors: str, place: str) -> str:
    """Return those of selectors that are for the place before or behind elements, as selectors of the elements."""
    named = (selector.strip().partition(f":{place}") for selector in selectors.split(","))
    return ",".join(element.rstrip(":") for element, mark, rest in named if mark and not rest)


def _without_comments(sheet: str) -> str:
    """Return a style sheet without comments, and without the marks that hid it from old browsers."""
    first, *others = sheet.replace("<!--", "").replace("-->", "").split("/*")
    return first + "".join(other.partition("*/")[2] for other in others)


def selected(selectors: str, number: int, style: str) -> Iterator[StyleRule]:
    """Yield a rule for each selector of a list that is understood."""
    for selector in selectors.split(","):
        steps = list[tuple[bool, SelectedElement]]()
        is_parent = False
        for word in reversed(selector.replace(">", " > ").split()):
            if word == ">":
                is_parent = True
            elif (named := _named(word)) is not None:
                steps.append((is_parent, named))
                is_parent = False
            else:
                steps.clear()
                break
        if steps and not steps[0][0] and not is_parent and (steps[1:] or steps[0][1] != ANY):
            parts = [part for _, part in steps]
            ids, classes = (
                sum(part.id != "" for part in parts),
                sum(len(part.classes) + (part.place > 0) for part in parts),
            )
            weight = (ids, classes, sum(part.tag != "" for part in parts), number)
            yield StyleRule(parts[0], tuple(steps[1:]), weight, style)


def _named(word: str) -> SelectedElement | None:
    """Read the part of a selector that names one element; None for what is not understood."""
    match = _COMPOUND.fullmatch(word)
    if match is None:
        return None
    names = re.findall(r"([.#\[])([^.#\[\]]+)", match[2])
    ids = [name for sign, name in names if sign == "#"]
    tag = (match[1] or "").lower().strip("*")
    attributes = (f"[{name.translate(_UNQUOTED)}]" for sign, name in names if sign == "[")
    classes = frozenset((*(name for sign, name in names if sign == "."), *attributes))
    return SelectedElement(tag, ids[0] if ids else "", classes, int(match[3] or 0) if not match[4] else 1)
