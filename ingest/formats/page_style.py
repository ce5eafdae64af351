"""What the style sheets of a page hide and set off. Selectors of tags, classes and ids are understood, and those of the
elements around them: `.note`, `p.old.x`, `table.prices .old`, `#menu > li`.

.x { display: none }        hidden
.x.open { display: block }  shown again, where this rule is the more specific one or the later of two alike
.up { vertical-align: super }  raised or lowered, struck out, or numbered by letters: as if it stood in `style`
@media print { … }          left out, as are rules of attributes, of states (`:hover`), and of what is beside an element

Selectors are matched here: lexbor's take time of the square of the page for `:nth-child` and `~`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
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
MOST_AROUND = 64
"""Elements around one that are looked at."""
_COMPOUND = re.compile(r"(\*|[a-z][a-z0-9]*)?((?:[.#][\w-]+)*)", re.IGNORECASE)


class _Element(NamedTuple):
    """An element: its tag, classes and id, of which those that are empty may be any in a selector."""

    tag: str
    id: str
    classes: frozenset[str]

    def names(self, element: _Element) -> bool:
        """Whether a part of a selector names an element."""
        return self.tag in ("", element.tag) and self.id in ("", element.id) and self.classes <= element.classes


_ANY = _Element("", "", frozenset())


class _Rule(NamedTuple):
    """What one selector says of elements.

    Attributes:
        subject: The element itself.
        around: Elements that it is in, the innermost first, each with whether it is the parent of the one before.
        weight: How specific the selector is: ids, classes and tags; and which rule it is of.
        style: What sets the element off; empty in rules that hide or show it.
    """

    subject: _Element
    around: tuple[tuple[bool, _Element], ...]
    weight: tuple[int, int, int, int]
    style: str


class StyleSheets:
    """The rules of a page about what is shown, and the elements that are open while it is read."""

    def __init__(self, sheets: Iterable[str], root: Attributes):
        """Read the rules. root: attributes of the page's <html>."""
        self._open = [_element("html", root)]
        hidden, shown, set_off = list[_Rule](), list[_Rule](), list[_Rule]()
        for number, (selectors, body) in enumerate(chain.from_iterable(map(_rules, sheets))):
            found = hidden if _HIDDEN.search(body) else shown if _SHOWN.search(body) else None
            if found is not None:
                found += islice(_selected(selectors, number, ""), MOST_RULES - len(found))
            if style := "; ".join(_SET_OFF.findall(body)):
                set_off += islice(_selected(selectors, number, style), MOST_RULES - len(set_off))
        self._hidden, self._shown, self._set_off = map(_by_key, (hidden, shown, set_off))

    def enter(self, tag: str, attributes: Attributes) -> Attributes:
        """Enter an element. Returns its attributes, of which `style` also has what rules say that sets it off."""
        self._open.append(_element(tag, attributes))
        if not self._set_off or not (styles := [rule.style for rule in self._fitting(self._set_off)]):
            return attributes
        return {**attributes, "style": "; ".join([*styles, attributes.get("style") or ""])}

    def leave(self) -> None:
        """Leave the element that was entered last."""
        self._open.pop()

    def hides(self) -> bool:
        """Whether the rules hide the element that was entered last: the most specific one, or the last of those."""
        if not self._hidden:
            return False
        hidden = max((rule.weight for rule in self._fitting(self._hidden)), default=None)
        return hidden is not None and all(rule.weight < hidden for rule in self._fitting(self._shown))

    def _fitting(self, keyed: Mapping[str, list[_Rule]]) -> Iterator[_Rule]:
        """Yield the rules that are for the innermost open element."""
        element = self._open[-1]
        for key in (*element.classes, element.id, element.tag) if keyed else ():
            for rule in keyed.get(key, ()):
                if rule.subject.names(element) and self._is_inside(rule.around):
                    yield rule

    def _is_inside(self, around: Sequence[tuple[bool, _Element]]) -> bool:
        """Whether the innermost open element is in these, of which each is looked for up to the nearest one."""
        at, last = len(self._open) - 1, max(0, len(self._open) - 1 - MOST_AROUND)
        for is_parent, wanted in around:
            at -= 1
            while not is_parent and at > last and not wanted.names(self._open[at]):
                at -= 1
            if at < last or not wanted.names(self._open[at]):
                return False
        return True


def _element(tag: str, attributes: Attributes) -> _Element:
    return _made(tag, attributes.get("id") or "", attributes.get("class") or "") if attributes else _made(tag, "", "")


@lru_cache(1024)
def _made(tag: str, id: str, classes: str) -> _Element:
    """Make an element. Most elements of a page are like others."""
    return _Element(tag, id, frozenset(classes.split()))


def _by_key(rules: Iterable[_Rule]) -> dict[str, list[_Rule]]:
    """Return rules by a class, the id or the tag that an element must have."""
    keyed = dict[str, list[_Rule]]()
    for rule in rules:
        subject = rule.subject
        keyed.setdefault(next(iter(subject.classes), "") or subject.id or subject.tag, []).append(rule)
    return keyed


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


def _selected(selectors: str, number: int, style: str) -> Iterator[_Rule]:
    """Yield a rule for each selector of a list that is understood."""
    for selector in selectors.split(","):
        steps = list[tuple[bool, _Element]]()
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
        if steps and not steps[0][0] and not is_parent and (steps[1:] or steps[0][1] != _ANY):
            parts = [part for _, part in steps]
            ids, classes = sum(part.id != "" for part in parts), sum(len(part.classes) for part in parts)
            weight = (ids, classes, sum(part.tag != "" for part in parts), number)
            yield _Rule(parts[0], tuple(steps[1:]), weight, style)


def _named(word: str) -> _Element | None:
    """Read the part of a selector that names one element; None for what is not understood."""
    match = _COMPOUND.fullmatch(word)
    if match is None:
        return None
    names = re.findall(r"([.#])([\w-]+)", match[2])
    ids = [name for sign, name in names if sign == "#"]
    tag = (match[1] or "").lower().strip("*")
    return _Element(tag, ids[0] if ids else "", frozenset(name for sign, name in names if sign == "."))
