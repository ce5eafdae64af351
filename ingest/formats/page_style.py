"""What the style sheets of a page hide and set off. Selectors of tags, classes and ids are understood, and those of the
elements around them: `.note`, `p.old.x`, `table.prices .old`, `#menu > li`.

.x { display: none }        hidden
.x.open { display: block }  shown again, where this rule is the more specific one or the later of two alike
.up { vertical-align: super }  raised or lowered, struck out, numbered by letters, or a line: as if it stood in `style`
h2::before { content: … }   written there (page_content.py)
@media print { … }          left out, as are rules of attributes, of states (`:hover`), and of what is beside an element

Selectors are matched here: lexbor's take time of the square of the page for `:nth-child` and `~`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

from ragkv.ingest.formats.page_content import Counters, content_of, counted_by

Attributes = Mapping[str, str | None]
MOST_RULES = 500
"""Most selectors that are read. Pages that scripts make have thousands."""
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_SHOWN = re.compile(r"display\s*:\s*[a-z]|visibility\s*:\s*visible", re.IGNORECASE)
_SET_OFF = re.compile(
    r"vertical-align\s*:\s*su(?:per|b)\b|text-decoration(?:-line)?\s*:[^;}]{0,40}line-through"
    r"|list-style(?:-type)?\s*:\s*(?:none|(?:lower|upper)-[a-z]+)"
    r"|(?<![\w-])display\s*:\s*(?:block|flex|grid|table|list-item)\b",
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


class _Fitting(NamedTuple):
    """The rules for one element, as far as it says itself."""

    hidden: Sequence[_Rule]
    shown: Sequence[_Rule]
    set_off: Sequence[_Rule]
    before: Sequence[_Rule]
    behind: Sequence[_Rule]
    counted: Sequence[_Rule]


_NONE = _Fitting((), (), (), (), (), ())
_MOST_KNOWN = 256
"""Elements whose rules are kept."""


def _weight(rule: _Rule) -> tuple[int, int, int, int]:
    return rule.weight


class StyleSheets:
    """The rules of a page about what is shown, and the elements that are open while it is read."""

    def __init__(self, sheets: Iterable[str], root: Attributes):
        """Read the rules. root: attributes of the page's <html>."""
        self._open = [_element("html", root)]
        hidden, shown, set_off = list[_Rule](), list[_Rule](), list[_Rule]()
        before, behind, counted = list[_Rule](), list[_Rule](), list[_Rule]()
        for number, (selectors, body) in enumerate(chain.from_iterable(map(_rules, sheets))):
            found = hidden if _HIDDEN.search(body) else shown if _SHOWN.search(body) else None
            if found is not None:
                found += islice(_selected(selectors, number, ""), MOST_RULES - len(found))
            if style := "; ".join(_SET_OFF.findall(body)):
                set_off += islice(_selected(selectors, number, style), MOST_RULES - len(set_off))
            if "counter-" in body:
                counted += islice(_selected(selectors, number, counted_by(body)), MOST_RULES - len(counted))
            for place, rules in (("before", before), ("after", behind)):
                if f":{place}" in selectors and (content := content_of(body)):
                    rules += islice(_selected(_of_place(selectors, place), number, content), MOST_RULES - len(rules))
        self._keyed = [_by_key(rules) for rules in (hidden, shown, set_off, before, behind, counted)]
        self._known: dict[_Element, _Fitting] = {}
        self._fitting = [_NONE]
        self._counters = Counters()
        self.says_anything = any((hidden, set_off, before, behind))

    def enter(self, tag: str, attributes: Attributes) -> Attributes:
        """Enter an element. Returns its attributes, of which `style` also has what rules say that sets it off."""
        element = _element(tag, attributes)
        fitting = self._fitting_to(element)
        self._open.append(element)
        self._fitting.append(fitting)
        if not fitting.set_off or not (styles := [rule.style for rule in self._inside(fitting.set_off)]):
            return attributes
        return {**attributes, "style": "; ".join([*styles, attributes.get("style") or ""])}

    def start(self) -> str:
        """Return what is written before the element that was entered last, which is shown."""
        fitting = self._fitting[-1]
        for rule in sorted(self._inside(fitting.counted), key=_weight) if fitting.counted else ():
            self._counters.count(len(self._open), rule.style)
        return self._written(fitting.before) if fitting.before else ""

    def leave(self) -> str:
        """Leave the element that was entered last. Returns what is written behind it."""
        fitting = self._fitting.pop()
        text = self._written(fitting.behind) if fitting.behind else ""
        self._counters.leave(len(self._open))
        self._open.pop()
        return text

    def _written(self, rules: Sequence[_Rule]) -> str:
        rule = max(self._inside(rules), key=_weight, default=None)
        return self._counters.text(rule.style) if rule else ""

    def hides(self) -> bool:
        """Whether the rules hide the element that was entered last: the most specific one, or the last of those."""
        fitting = self._fitting[-1]
        if not fitting.hidden:
            return False
        hidden = max(map(_weight, self._inside(fitting.hidden)), default=None)
        return hidden is not None and all(rule.weight < hidden for rule in self._inside(fitting.shown))

    def _fitting_to(self, element: _Element) -> _Fitting:
        """Return the rules for elements like this one, whatever is around them. Most elements are like others."""
        found = self._known.get(element)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            keys = (*element.classes, element.id, element.tag)
            found = self._known[element] = _Fitting(
                *(
                    [rule for key in keys for rule in keyed.get(key, ()) if rule.subject.names(element)]
                    for keyed in self._keyed
                )
            )
        return found

    def _inside(self, rules: Iterable[_Rule]) -> Iterator[_Rule]:
        """Yield those of rules that are for the innermost open element where it is."""
        return (rule for rule in rules if self._is_inside(rule.around))

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


def _of_place(selectors: str, place: str) -> str:
    """Return those of selectors that are for the place before or behind elements, as selectors of the elements."""
    named = (selector.strip().partition(f":{place}") for selector in selectors.split(","))
    return ",".join(element.rstrip(":") for element, mark, rest in named if mark and not rest)


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
