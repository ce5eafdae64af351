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
from typing import Generic, NamedTuple, TypeVar

from ragkv.ingest.formats.page_content import Counters, content_of, counted_by

Attributes = Mapping[str, str | None]
T = TypeVar("T")
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


class _Rules(NamedTuple, Generic[T]):
    """Rules by what they do: those of style sheets, or those for one element, as far as it says itself."""

    hidden: T
    shown: T
    set_off: T
    before: T
    behind: T
    counted: T


class _Read(NamedTuple):
    """Style sheets that were read.

    Attributes:
        keyed: The rules of each kind, by a class, the id or the tag that an element must have.
        says_anything: Whether they change what is shown.
        names_ids: Whether a rule asks for an id.
    """

    keyed: _Rules[dict[str, list[_Rule]]]
    says_anything: bool
    names_ids: bool


_NONE: _Rules[list[_Rule]] = _Rules([], [], [], [], [], [])
_MOST_KNOWN = 256
"""Elements whose rules are kept."""


def _weight(rule: _Rule) -> tuple[int, int, int, int]:
    return rule.weight


class StyleSheets:
    """The rules of a page about what is shown, and the elements that are open while it is read."""

    def __init__(self, sheets: Iterable[str], root: Attributes):
        """Read the rules. root: attributes of the page's <html>."""
        self._read = _read(tuple(sheets))
        self.says_anything = self._read.says_anything
        self._known: dict[tuple[str, str, str], tuple[_Element, _Rules[list[_Rule]]]] = {}
        self._open = [self._of("html", root)]
        self._counters = Counters()

    def enter(self, tag: str, attributes: Attributes) -> Attributes | None:
        """Enter an element.

        Returns:
            Its attributes, of which `style` also has what rules say that sets it off. None if no rule is for such
            elements, as for most.
        """
        opened = self._of(tag, attributes)
        self._open.append(opened)
        fitting = opened[1]
        if fitting is _NONE:
            return None
        if not fitting.set_off or not (styles := [rule.style for rule in self._inside(fitting.set_off)]):
            return attributes
        return {**attributes, "style": "; ".join([*styles, attributes.get("style") or ""])}

    def start(self) -> str:
        """Return what is written before the element that was entered last, which is shown."""
        fitting = self._open[-1][1]
        for rule in sorted(self._inside(fitting.counted), key=_weight) if fitting.counted else ():
            self._counters.count(len(self._open), rule.style)
        return self._written(fitting.before) if fitting.before else ""

    def leave(self) -> str:
        """Leave the element that was entered last. Returns what is written behind it."""
        fitting = self._open[-1][1]
        text = self._written(fitting.behind) if fitting.behind else ""
        if self._read.keyed.counted:
            self._counters.leave(len(self._open))
        self._open.pop()
        return text

    def _written(self, rules: Sequence[_Rule]) -> str:
        rule = max(self._inside(rules), key=_weight, default=None)
        return self._counters.text(rule.style) if rule else ""

    def hides(self) -> bool:
        """Whether the rules hide the element that was entered last: the most specific one, or the last of those."""
        fitting = self._open[-1][1]
        if not fitting.hidden:
            return False
        hidden = max(map(_weight, self._inside(fitting.hidden)), default=None)
        return hidden is not None and all(rule.weight < hidden for rule in self._inside(fitting.shown))

    def _of(self, tag: str, attributes: Attributes) -> tuple[_Element, _Rules[list[_Rule]]]:
        """Return an element and the rules for those like it, whatever is around them. Most elements are like others."""
        id = attributes.get("id") or "" if self._read.names_ids else ""
        key = tag, id, attributes.get("class") or ""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            element = _Element(tag, id, frozenset(key[2].split()))
            names = (*element.classes, id, tag)
            fitting: _Rules[list[_Rule]] = _Rules._make(
                [rule for name in names for rule in keyed.get(name, ()) if rule.subject.names(element)]
                for keyed in self._read.keyed
            )
            found = self._known[key] = element, fitting if any(fitting) else _NONE
        return found

    def _inside(self, rules: Iterable[_Rule]) -> Iterator[_Rule]:
        """Yield those of rules that are for the innermost open element where it is."""
        return (rule for rule in rules if self._is_inside(rule.around))

    def _is_inside(self, around: Sequence[tuple[bool, _Element]]) -> bool:
        """Whether the innermost open element is in these, of which each is looked for up to the nearest one."""
        at, last = len(self._open) - 1, max(0, len(self._open) - 1 - MOST_AROUND)
        for is_parent, wanted in around:
            at -= 1
            while not is_parent and at > last and not wanted.names(self._open[at][0]):
                at -= 1
            if at < last or not wanted.names(self._open[at][0]):
                return False
        return True


@lru_cache(4)
def _read(sheets: tuple[str, ...]) -> _Read:
    """Read the rules of style sheets. Chapters of a book have the same."""
    rules: _Rules[list[_Rule]] = _Rules([], [], [], [], [], [])

    def add(kind: list[_Rule], found: Iterator[_Rule]) -> None:
        kind += islice(found, MOST_RULES - len(kind))

    for number, (selectors, body) in enumerate(chain.from_iterable(map(_rules, sheets))):
        if _HIDDEN.search(body):
            add(rules.hidden, _selected(selectors, number, ""))
        elif _SHOWN.search(body):
            add(rules.shown, _selected(selectors, number, ""))
        if style := "; ".join(_SET_OFF.findall(body)):
            add(rules.set_off, _selected(selectors, number, style))
        if "counter-" in body:
            add(rules.counted, _selected(selectors, number, counted_by(body)))
        for place, kind in (("before", rules.before), ("after", rules.behind)):
            if f":{place}" in selectors and (content := content_of(body)):
                add(kind, _selected(_of_place(selectors, place), number, content))
    says_anything = any((rules.hidden, rules.set_off, rules.before, rules.behind))
    names_ids = any(part.id for rule in chain(*rules) for part in (rule.subject, *(part for _, part in rule.around)))
    return _Read(_Rules._make(map(_by_key, rules)), says_anything, names_ids)


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
