"""What the style sheets of a page hide and set off. Only selectors of one element are understood: `.note`, `p.old.x`.

.x { display: none }        hidden
.x.open { display: block }  shown again
.up { vertical-align: super }  raised or lowered, struck out, or numbered by letters: as if it stood in `style`
@media print { … }          left out, as are rules that depend on other elements
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

Attributes = Mapping[str, str | None]
MOST_RULES = 500
"""Most selectors that are read. Pages that scripts make have thousands."""
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_SHOWN = re.compile(r"display\s*:\s*[a-z]|visibility\s*:\s*visible", re.IGNORECASE)
_SET_OFF = re.compile(
    r"vertical-align\s*:\s*su(?:per|b)\b|text-decoration(?:-line)?\s*:[^;}]{0,40}line-through"
    r"|list-style(?:-type)?\s*:\s*(?:lower|upper)-[a-z]+",
    re.IGNORECASE,
)


class _Selector(NamedTuple):
    """An element: its tag, classes and id, of which those that are empty may be any."""

    tag: str
    id: str
    classes: frozenset[str]


class StyleSheets:
    """The rules of a page about what is shown."""

    def __init__(self, sheets: Iterable[str]):
        hidden, shown, set_off = list[_Selector](), list[_Selector](), list[tuple[str, _Selector]]()
        for sheet in sheets:
            for selectors, body in _rules(sheet):
                if _HIDDEN.search(body):
                    hidden += islice(_selectors(selectors), MOST_RULES - len(hidden))
                elif _SHOWN.search(body):
                    shown += islice(_selectors(selectors), MOST_RULES - len(shown))
                if style := "; ".join(_SET_OFF.findall(body)):
                    room = MOST_RULES - len(set_off)
                    set_off += ((style, selector) for selector in islice(_selectors(selectors), room))
        self._set_off = [(style, _by_key([selector])) for style, selector in set_off]
        self._hidden, self._shown = _by_key(hidden), _by_key(shown)

    def hides(self, tag: str, attributes: Attributes) -> bool:
        """Whether the rules hide an element."""
        if not self._hidden:
            return False
        if not attributes.get("class") and not attributes.get("id") and tag not in self._hidden:
            return False
        element = _element(tag, attributes)
        return _fits(self._hidden, element) and not _fits(self._shown, element)

    def with_style(self, tag: str, attributes: Attributes) -> Attributes:
        """Return the attributes of an element, of which `style` also has what rules say that sets it off."""
        if not self._set_off or tag.startswith("-"):
            return attributes
        element = _element(tag, attributes)
        styles = [style for style, selectors in self._set_off if _fits(selectors, element)]
        return {**attributes, "style": "; ".join([*styles, attributes.get("style") or ""])} if styles else attributes


def _element(tag: str, attributes: Attributes) -> _Selector:
    return _Selector(tag, attributes.get("id") or "", frozenset((attributes.get("class") or "").split()))


def _by_key(selectors: list[_Selector]) -> dict[str, list[_Selector]]:
    """Return selectors by a class, the id or the tag that an element must have."""
    keyed = dict[str, list[_Selector]]()
    for selector in selectors:
        keyed.setdefault(next(iter(selector.classes), "") or selector.id or selector.tag, []).append(selector)
    return keyed


def _fits(keyed: dict[str, list[_Selector]], element: _Selector) -> bool:
    """Whether one of these selectors is fulfilled by an element."""
    return any(
        selector.tag in ("", element.tag) and selector.id in ("", element.id) and selector.classes <= element.classes
        for key in (*element.classes, element.id, element.tag)
        for selector in keyed.get(key, ())
    )


def _rules(sheet: str) -> Iterator[tuple[str, str]]:
    """Yield (selectors, declarations) of the rules that hold for a screen, without those in other rules."""
    depth = 0
    for part in _without_comments(sheet).split("}"):
        *outer, body = part.split("{")
        if depth:  # inside of @media and the like
            depth += len(outer) - 1
        elif len(outer) == 1:
            yield outer[0].rpartition(";")[2], body
        elif outer:
            depth = len(outer) - 1


def _without_comments(sheet: str) -> str:
    first, *others = sheet.split("/*")
    return first + "".join(other.partition("*/")[2] for other in others)


def _selectors(listed: str) -> Iterator[_Selector]:
    """Yield the selectors of a list that name one element."""
    for text in listed.split(","):
        match = re.fullmatch(r"([a-z][a-z0-9]*)?((?:[.#][\w-]+)*)", text.strip(), re.IGNORECASE)
        if match is not None and match[0]:
            names = re.findall(r"([.#])([\w-]+)", match[2])
            ids = [name for sign, name in names if sign == "#"]
            yield _Selector((match[1] or "").lower(), ids[0] if ids else "", frozenset(n for s, n in names if s == "."))
