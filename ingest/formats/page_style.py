"""What the style sheets of a page hide and set off. Selectors of tags, classes and ids are understood, and those of the
elements around them: `.note`, `p.old.x`, `table.prices .old`, `#menu > li`.

.x { display: none }        hidden
.x.open { display: block }  shown again, where this rule is the more specific one or the later of two alike
.up { vertical-align: super }  raised or lowered, struck out, numbered by letters, or a line: as if it stood in `style`
h2::before { content: … }   written there (page_content.py)
td:nth-child(2) { … }      the second child of its parent
@media print { … }          left out, as are rules of states (`:hover`), and of what is beside an element

Selectors are matched here: lexbor's take time of the square of the page for `:nth-child` and `~`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from ragkv.ingest.formats.page_content import Counters, content_of, counted_by
from ragkv.ingest.formats.page_rules import SelectedElement, StyleRule, of_place, rules_of, selected

Attributes = Mapping[str, str | None]
T = TypeVar("T")
MOST_RULES = 500
"""Most selectors that are read. Pages that scripts make have thousands."""
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)", re.IGNORECASE)
_SHOWN = re.compile(r"display\s*:\s*[a-z]|visibility\s*:\s*visible", re.IGNORECASE)
_SET_OFF = re.compile(
    r"(?:vertical-align|font-variant-position)\s*:\s*su(?:per|b)\b|text-decoration(?:-line)?\s*:[^;}]{0,40}line-through"
    r"|list-style(?:-type)?\s*:\s*(?:none|(?:lower|upper|cjk)-[a-z-]+|decimal-leading-zero)"
    r"|(?<![\w-])display\s*:\s*(?:block|flex|grid|table|list-item)\b",
    re.IGNORECASE,
)
_MOVED = re.compile(
    r"(?:vertical-align|(?<![\w-])(?:top|bottom))\s*:\s*(?:text-top|-?[\d.]{1,9}(?:em|ex|px|pt|%))|position\s*:\s*relative",
    re.IGNORECASE,
)
"""What moves letters above or below the line, where they are small."""
MOST_AROUND = 64
"""Elements around one that are looked at."""


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
        names_places: Whether one asks for a place among the children.
        attributes: Those that rules ask for.
    """

    keyed: _Rules[dict[str, list[StyleRule]]]
    says_anything: bool
    names_ids: bool
    names_places: bool
    attributes: frozenset[str]


_NONE: _Rules[list[StyleRule]] = _Rules([], [], [], [], [], [])
_MOST_KNOWN = 256
"""Elements whose rules are kept."""


def _weight(rule: StyleRule) -> tuple[int, int, int, int]:
    return rule.weight


class StyleSheets:
    """The rules of a page about what is shown, and the elements that are open while it is read."""

    def __init__(self, sheets: Iterable[str], root: Attributes):
        """Read the rules. root: attributes of the page's <html>."""
        self._read = _read(tuple(sheets))
        self.says_anything = self._read.says_anything
        self._known: dict[tuple[str, str, str, int], tuple[SelectedElement, _Rules[list[StyleRule]]]] = {}
        self._children = [0]
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
        if self._read.names_places:
            self._children.pop()
        return text

    def _written(self, rules: Sequence[StyleRule]) -> str:
        rule = max(self._inside(rules), key=_weight, default=None)
        return self._counters.text(rule.style) if rule else ""

    def hides(self, attributes: Attributes) -> bool:
        """Whether the rules hide the element that was entered last: the most specific one, or the last of those.

        attributes: Its own, of which `style` counts more than any rule.
        """
        fitting = self._open[-1][1]
        if not fitting.hidden or _SHOWN.search(attributes.get("style") or ""):
            return False
        hidden = max(map(_weight, self._inside(fitting.hidden)), default=None)
        return hidden is not None and all(rule.weight < hidden for rule in self._inside(fitting.shown))

    def _of(self, tag: str, attributes: Attributes) -> tuple[SelectedElement, _Rules[list[StyleRule]]]:
        """Return an element and the rules for those like it, whatever is around them. Most elements are like others."""
        id = attributes.get("id") or "" if self._read.names_ids else ""
        place = 0
        if self._read.names_places:
            self._children[-1] += 1
            place = self._children[-1]
            self._children.append(0)
        classes = attributes.get("class") or ""
        if self._read.attributes:
            for name in self._read.attributes & attributes.keys():
                classes = f"{classes} [{name}] [{name}={attributes[name]}]"
        key = tag, id, classes, place
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            element = SelectedElement(tag, id, frozenset(key[2].split()), place)
            names = (*element.classes, id, tag)
            fitting: _Rules[list[StyleRule]] = _Rules._make(
                [rule for name in names for rule in keyed.get(name, ()) if rule.subject.names(element)]
                for keyed in self._read.keyed
            )
            found = self._known[key] = element, fitting if any(fitting) else _NONE
        return found

    def _inside(self, rules: Iterable[StyleRule]) -> Iterator[StyleRule]:
        """Yield those of rules that are for the innermost open element where it is."""
        return (rule for rule in rules if self._is_inside(rule.around))

    def _is_inside(self, around: Sequence[tuple[bool, SelectedElement]]) -> bool:
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
    rules: _Rules[list[StyleRule]] = _Rules([], [], [], [], [], [])

    def add(kind: list[StyleRule], found: Iterator[StyleRule]) -> None:
        kind += islice(found, MOST_RULES - len(kind))

    for number, (selectors, body) in enumerate(chain.from_iterable(map(rules_of, sheets))):
        if _HIDDEN.search(body):
            add(rules.hidden, selected(selectors, number, ""))
        elif _SHOWN.search(body):
            add(rules.shown, selected(selectors, number, ""))
        if style := "; ".join(_set_off(body)):
            add(rules.set_off, selected(selectors, number, style))
        if "counter-" in body:
            add(rules.counted, selected(selectors, number, counted_by(body)))
        for place, kind in (("before", rules.before), ("after", rules.behind)):
            if f":{place}" in selectors and (content := content_of(body)):
                add(kind, selected(of_place(selectors, place), number, content))
    says_anything = any((rules.hidden, rules.set_off, rules.before, rules.behind))
    parts = [part for rule in chain(*rules) for part in (rule.subject, *(part for _, part in rule.around))]
    ids, places = any(part.id for part in parts), any(part.place for part in parts)
    named = {name[1:-1].partition("=")[0] for part in parts for name in part.classes if name[0] == "["}
    return _Read(_Rules._make(map(_by_key, rules)), says_anything, ids, places, frozenset(named))


def _set_off(body: str) -> list[str]:
    """Return the declarations of a rule that set elements off. A large first letter is in the line of the others."""
    found = _SET_OFF.findall(body)
    if "float" in body:
        found = [declared for declared in found if not declared.lower().startswith("display")]
    if "font-size" in body and (moved := _MOVED.findall(body)):
        found += [*moved, "font-size: 1em"]
    return found


def _by_key(rules: Iterable[StyleRule]) -> dict[str, list[StyleRule]]:
    """Return rules by a class, the id or the tag that an element must have."""
    keyed = dict[str, list[StyleRule]]()
    for rule in rules:
        subject = rule.subject
        keyed.setdefault(next(iter(subject.classes), "") or subject.id or subject.tag, []).append(rule)
    return keyed
