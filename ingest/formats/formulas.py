"""Formulas of MathML (HTML, EPUB) and of Office (Word, PowerPoint) in one line: `(a+b)/2`, `√16`, `[1, 2; 3, 4]`.

A parser sends the elements as it meets them. Each element becomes text once it is complete, from that of its children.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

DEEPEST = 32
"""Elements that lie in each other. Those inside are read as text in a row, so that no text is copied without end."""
_HIGH = str.maketrans("0123456789n", "⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ")
_INVISIBLE = str.maketrans("", "", "\u2061\u2062\u2063\u2064\u200b")
_ACCENTS = {"acc": "\u0302", "bar": "\u0304"}
_BINARY = set("=≠<>≤≥≈≡→⇒⇔∈")
UNSEEN = {
    *("annotation", "annotation-xml", "mphantom", "ctrlPr", "rPr"),
    *("instrText", "delText", "del", "moveFrom"),
}
"""Elements that are no part of what is shown."""


_OFFICE_VALUES = {"begChr", "endChr", "sepChr", "chr", "type", "show"}
_OFF = {"0", "off", "false"}
"""Elements of Office whose value says something of the element around them."""


class _Term(NamedTuple):
    """A part of a formula.

    Attributes:
        role: The tag that it was made of.
        text: The text.
    """

    role: str
    text: str


class _Element:
    def __init__(self, tag: str):
        self.tag = tag
        self.pieces: list[_Term] = []
        self.values: dict[str, str] = {}


class Formula:
    """Collects a formula."""

    def __init__(self) -> None:
        self._open = [_Element("math")]
        self._flat = self._unseen = 0

    def start(self, tag: str, value: str | None = None) -> None:
        """Begin an element. value: what an attribute says of its parent, such as the sign of brackets."""
        if self._unseen or tag in UNSEEN:
            self._unseen += 1
        elif len(self._open) > DEEPEST:
            self._flat += 1
        else:
            if value is not None:
                self._open[-1].values[tag] = value
                for above in self._open[-2:-1]:
                    above.values.setdefault(tag, value)
            self._open.append(_Element(tag))

    def start_office(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Begin an element of Office, which may say something of the element around it."""
        if tag in ("strike", "dstrike") and attributes.get("val") not in _OFF:  # of a run, in its unseen properties
            self._open[-1].values["struck"] = tag
        self.start(tag, attributes.get("val") if tag in _OFFICE_VALUES else None)

    def set(self, name: str, value: str) -> None:
        """Say something of the open element."""
        if not self._unseen and not self._flat:
            self._open[-1].values[name] = value

    def end(self) -> None:
        """End the open element."""
        if self._unseen:
            self._unseen -= 1
        elif self._flat:
            self._flat -= 1
        elif len(self._open) > 1:
            element = self._open.pop()
            self._open[-1].pieces.append(_Term(element.tag, _RULES.get(element.tag, _row)(element)))

    def text(self, text: str) -> None:
        """Add text to the open element."""
        if not self._unseen and (shown := text.translate(_INVISIBLE).strip(" \t\n\r")):
            self._open[-1].pieces.append(_Term("", shown))

    def whole(self) -> str:
        """Return the formula."""
        while len(self._open) > 1:
            self._flat = self._unseen = 0
            self.end()
        return _row(self._open[0])


def _row(element: _Element) -> str:
    """Return pieces one after the other. A space keeps words and numbers apart."""
    parts, last, before = list[str](), "", ""
    for role, text in element.pieces:
        if not text:
            continue
        apart = last[-1:].isalnum() and text[:1].isalnum()
        if text in _BINARY and element.tag != "mo":
            parts += [" ", text, " "] if last else [text, " "]
            last, before = " ", ""
            continue
        if apart and (_are_words(last, text) or role in _APART or before in _APART or _RULES.get(before) is _scripts):
            parts.append(" ")
        parts.append(text)
        last, before = text, role
    return " ".join("".join(parts).split())


def _are_words(left: str, right: str) -> bool:
    """Whether two pieces would be read as one: two numbers, or a word and anything."""
    both_numbers = left[-1:].isdigit() and right[:1].isdigit()
    return both_numbers or (len(left) > 1 and left.isalpha()) or (len(right) > 1 and right.isalpha())


def _child(element: _Element, at: int, role: str = "") -> str:
    """Return the text of a child: the first one of this role, else the one at this place."""
    for piece in element.pieces:
        if role and piece.role == role:
            return piece.text
    named = any(piece.role in _PLACES for piece in element.pieces)
    return element.pieces[at].text if not named and at < len(element.pieces) else ""


def _bracketed(text: str) -> str:
    atom = re.fullmatch(r"[+\-−±]?(?:[\d.,]+|[^\W\d_]+|[^\w\s])[′'°%]?", text)
    return text if atom or _is_bracketed(text) else f"({text})"


def _is_bracketed(text: str) -> bool:
    """Whether one pair of brackets is around all of a text."""
    if text[:1] not in "([" or text[-1:] not in ")]":
        return False
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if not depth:
            return at == len(text) - 1
    return False


def _fraction(element: _Element) -> str:
    top, bottom = _child(element, 0, "num"), _child(element, 1, "den")
    if element.values.get("type") == "noBar":
        return f"({top} choose {bottom})"
    below = bottom if re.fullmatch(r"[\d.,]+|[^\W\d_]+", bottom) else f"({bottom})"
    return f"{_bracketed(top)}/{below}"


def _root(element: _Element) -> str:
    """Return a square root, or another one with its index in front."""
    if element.tag == "rad":
        base, index = _child(element, 0, "e"), _child(element, 9, "deg")
    elif element.tag == "mroot":
        base, index = _child(element, 0), _child(element, 1)
    else:
        base, index = _row(element), ""
    if index in ("", "2"):
        return f"√{_bracketed(base)}"
    high = index.translate(_HIGH)
    return f"{high}√{_bracketed(base)}" if all(c in "⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ" for c in high) else f"{_bracketed(base)}^(1/{index})"


def _scripts(element: _Element) -> str:
    """Return a base with what is below and above it."""
    base, low, high = _child(element, 0, "e"), "", ""
    if element.tag in ("msub", "munder", "sSub", "limLow"):
        low = _child(element, 1, "sub") or _child(element, 1, "lim")
    elif element.tag in ("msup", "mover", "sSup", "limUpp"):
        high = _child(element, 1, "sup") or _child(element, 1, "lim")
    else:
        low, high = _child(element, 1, "sub"), _child(element, 2, "sup")
    if element.tag == "mover" and len(high) == 1 and not high.isalnum():
        return base + high
    return _with_scripts(base, low, high)


def _with_scripts(base: str, low: str, high: str) -> str:
    shown = base if re.fullmatch(r"[\w.,]+", base) or len(base) < 2 else _bracketed(base)
    prime = high and not high.strip("′″‴'*")
    return shown + (f"_{_bracketed(low)}" if low else "") + (high if prime else f"^{_bracketed(high)}" if high else "")


def _many_scripts(element: _Element) -> str:
    """Return a base with scripts on both sides (mmultiscripts)."""
    pieces, before = list(element.pieces[1:]), list[_Term]()
    for at, piece in enumerate(pieces):
        if piece.role == "mprescripts":
            pieces, before = pieces[:at], pieces[at + 1 :]
            break
    shown = _with_scripts(element.pieces[0].text, *_pair(pieces)) if element.pieces else ""
    low, high = _pair(before)
    return (f"_{_bracketed(low)}" if low else "") + (f"^{_bracketed(high)}" if high else "") + shown


def _pair(pieces: list[_Term]) -> tuple[str, str]:
    return pieces[0].text if pieces else "", pieces[1].text if len(pieces) > 1 else ""


def _matrix(element: _Element) -> str:
    rows = [piece.text for piece in element.pieces if piece.text]
    many = len(rows) > 1 or any(", " in row for row in rows)
    return f"[{'; '.join(rows)}]" if many else "".join(rows)


def _cells(element: _Element) -> str:
    return ", ".join(piece.text for piece in element.pieces if piece.role in ("mtd", "e"))


def _lines(element: _Element) -> str:
    """Return lines of Office, without the marks where they are aligned and where their number begins."""
    lines = (piece.text.replace("&", "").replace("#", " ") for piece in element.pieces if piece.text)
    return "; ".join(" ".join(line.split()) for line in lines)


def _fence(element: _Element) -> str:
    values = element.values
    left, right = values.get("begChr", values.get("open", "(")), values.get("endChr", values.get("close", ")"))
    inner = values.get("sepChr", "|" if element.tag == "d" else ", ").join(
        piece.text for piece in element.pieces if piece.text
    )
    if inner.startswith("[") and inner.endswith("]") and "; " in inner and left in ("(", "["):
        return inner  # a matrix has brackets already
    return left.strip() + inner + right.strip()


def _sum(element: _Element) -> str:
    sign = element.values.get("chr", "∫")
    low, high, inner = _child(element, 9, "sub"), _child(element, 9, "sup"), _child(element, 9, "e")
    return f"{_with_scripts(sign, low, high)} {inner}".strip()


def _function(element: _Element) -> str:
    return f"{_child(element, 0, 'fName')} {_child(element, 1, 'e')}".strip()


def _before(element: _Element) -> str:
    low, high = _child(element, 9, "sub"), _child(element, 9, "sup")
    marks = (f"_{_bracketed(low)}" if low else "") + (f"^{_bracketed(high)}" if high else "")
    return marks + _child(element, 9, "e")


def _accent(element: _Element) -> str:
    return _child(element, 0, "e") + element.values.get("chr", _ACCENTS.get(element.tag, ""))


def _run(element: _Element) -> str:
    return "" if "struck" in element.values else _row(element)


def _phantom(element: _Element) -> str:
    """Return what may be there only for its size."""
    return "" if element.values.get("show") in _OFF else _row(element)


def _shown_first(element: _Element) -> str:
    return element.pieces[0].text if element.pieces else ""


def _token(element: _Element) -> str:
    return " ".join("".join(piece.text for piece in element.pieces).split())


_PLACES = {"num", "den", "e", "sub", "sup", "deg", "lim", "fName"}
"""Elements whose name, and not their place, says what they are."""
_APART = {"mfrac", "f", "mtext"}
_RULES: dict[str, Callable[[_Element], str]] = {
    **dict.fromkeys(("mi", "mn", "mo", "mtext", "ms", "t"), _token),
    **dict.fromkeys(("mfrac", "f"), _fraction),
    **dict.fromkeys(("msqrt", "mroot", "rad"), _root),
    **dict.fromkeys(("msub", "msup", "msubsup", "munder", "mover", "munderover"), _scripts),
    **dict.fromkeys(("sSub", "sSup", "sSubSup", "limLow", "limUpp"), _scripts),
    **dict.fromkeys(("mtable", "m"), _matrix),
    **dict.fromkeys(("mtr", "mlabeledtr", "mr"), _cells),
    **dict.fromkeys(("mfenced", "d"), _fence),
    **dict.fromkeys(("acc", "bar", "groupChr"), _accent),
    "mmultiscripts": _many_scripts,
    "eqArr": _lines,
    "nary": _sum,
    "func": _function,
    "sPre": _before,
    "r": _run,
    "phant": _phantom,
    "semantics": _shown_first,
}
