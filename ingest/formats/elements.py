"""What an element of a page is by its tag and attributes: where it belongs, whether it is seen or off the line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from selectolax.lexbor import LexborNode

from ragkv.ingest.formats import scripts
from ragkv.ingest.formats.symbols import is_symbols

MAIN, BODY, AROUND = "main", "body", "around"
Attributes = Mapping[str, str | None]
_UNSEEN = {
    *("audio", "button", "canvas", "datalist", "embed", "head", "iframe", "map", "noscript", "object", "script"),
    *("style", "svg", "template", "title", "video"),
    *("s", "strike", "del", "rt", "rp", "rtc"),  # what was struck out; how words are pronounced
    "epub:default",  # what stands for MathML where that cannot be shown
}
BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "dialog", "div"),
    *("dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("header", "hgroup", "hr", "legend", "li", "main", "menu", "nav", "ol", "p", "pre", "search", "section"),
    *("summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"),
}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
TABLE_PARTS = {"tbody", "thead", "tfoot"}
SHAPED = {"table", *TABLE_PARTS, "col", "tr", "td", "th", "ol", "ul", "menu", "li", "pre", *HEADINGS}
"""Blocks that are more than paragraphs."""
INLINE = {"a", "sup", "sub", "img", "input", "font"}
"""Elements inside of blocks that are more than their text."""
ANCHORS = {"¶", "§", "#"}
"""Texts of links that point from a heading to itself."""
_MAIN_TAGS, _MAIN_ROLES = {"main", "article"}, {"main", "article"}
_AROUND_TAGS = {"nav", "search"}
_AROUND_PAGE = {"header", "footer", "aside"}
"""Tags that are `around` the page. Inside `main` they are content: the head of an article, a note."""
_AROUND_ROLES = {"navigation", "banner", "contentinfo", "complementary", "search", "menu", "menubar"}
_HIDING = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|\bline-through\b)", re.IGNORECASE)
_SIZELESS = re.compile(
    r"(?<![\w-])(?:max-)?(?:height|width)\s*:\s*0(?:px)?\s*;(?:[^;]*;){0,9}?\s*overflow\s*:\s*hidden", re.IGNORECASE
)
_PAGE_NUMBERS = {"pagebreak", "doc-pagebreak"}
"""Kinds of elements that say where a page of the printed book begins, in the middle of a sentence."""
_SECTIONS = {"section", "aside", "blockquote", "td", "figure", "details"}
"""Elements whose head, foot and notes are theirs and not those of the page."""
_LINE_STYLE = re.compile(r"(?<![\w-])display\s*:\s*(?:block|flex|grid|table|list-item)\b", re.IGNORECASE)
_FONT = re.compile(r"(?<![\w-])font(?:-family\s*:\s*([^;]{1,100})|\s*:[^;]*?([\"'][^\"';]{1,100}[\"']))", re.IGNORECASE)
_BOXES = {"checkbox": ("[ ] ", "[x] "), "radio": ("( ) ", "(x) ")}
"""What stands for a box that can be ticked: empty, and ticked."""
_TEXTS = {"text", "number", "date", "time", "datetime-local", "month", "email", "tel", "url"}
_CELLS = {"cell", "gridcell", "columnheader", "rowheader"}
_RAISING = re.compile(r"(?:vertical-align|font-variant-position)\s*:\s*(super|sub)\b", re.IGNORECASE)
_MOVED = re.compile(
    r"(?:vertical-align|(?<![\w-])(?:top|bottom))\s*:\s*(-?)(?:text-top|(?:0?\.[2-9]\d*|[1-9](?:\.\d+)?)(?:em|ex|px|pt)|[2-9]\d%)",
    re.IGNORECASE,
)
"""Small letters that are moved above or below the line by a length."""
_RAISED_BY_WORD = re.compile(r"(?<![\w-])top\s*:\s*(-?)(?:[2-9]|\d\d)(?:\.\d{1,4})?pt", re.IGNORECASE)
_NOTES = {"noteref", "doc-noteref"}
"""Kinds of links that lead to a note."""
_NEAREST = 8
"""Elements around a header that are looked at."""
_FORMULA_OF_SCRIPT = "mathml"
"""Part of the class of a formula that scripts hide, for they draw a picture of it."""


def is_anchor(node: LexborNode | None) -> bool:
    return node is not None and node.tag == "a" and (node.attributes.get("href") or "").startswith("#")


def script(node: LexborNode, tag: str, attributes: Attributes) -> str:
    """Return the mark of what is raised, lowered or the mark of a note; empty for any other element."""
    if tag == "a" and _is_note_link(node, attributes):
        return scripts.NOTE
    if tag == "sup":
        inner: LexborNode | None = node
        for _ in range(3):
            inner = inner.first_child if inner is not None else None
            if _leads_into(inner):
                return scripts.NOTE
        return scripts.NOTE if _leads_into(node.parent) else scripts.SUP
    if tag == "sub":
        return scripts.SUB
    return _moved(style, node) if (style := attributes.get("style")) else ""


def _moved(style: str, node: LexborNode) -> str:
    """Return the mark of what a style moves above or below the line. Word moves text without making it small."""
    if raised := _RAISING.search(style):
        return scripts.SUP if raised[1].lower() == "super" else scripts.SUB
    if "font-size" not in style and "relative" in style and (raised := _RAISED_BY_WORD.search(style)):
        is_text = node.first_child is not None and node.first_child.tag == "-text"
        return (scripts.SUP if raised[1] else scripts.SUB) if is_text else ""
    if "font-size" not in style or (moved := _MOVED.search(style)) is None:
        return ""
    is_top = moved[0].lower().startswith("top")
    if not moved[0].lower().startswith("vert") and "relative" not in style:
        return ""
    return scripts.SUB if bool(moved[1]) != is_top else scripts.SUP


def _is_note_link(node: LexborNode, attributes: Attributes) -> bool:
    """Whether a link is the mark of a note: it says so, or is a number right behind a word."""
    kinds = f"{attributes.get('epub:type') or ''} {attributes.get('role') or ''}".split()
    if _NOTES.intersection(kinds):
        return True
    before, inner, behind = node.prev, node.first_child, node.next
    if "#" not in (attributes.get("href") or ""):
        return False
    if before is None:  # the mark of the note itself
        if inner is None or behind is None or behind.tag != "-text":
            return False
        return (inner.text_content or "").isdigit() and (behind.text_content or "")[:1].isalpha()
    if before.tag != "-text":
        return False
    is_number = inner is not None and inner.tag == "-text" and (inner.text_content or "").strip("[]*†‡ ").isdigit()
    return (
        is_number
        and not (before.text_content or " ")[-1:].isspace()
        and (before.text_content or "")[-1:] not in "([-–/"
    )


def _leads_into(node: LexborNode | None) -> bool:
    """Whether a node is a link to a place in a page."""
    return node is not None and node.tag == "a" and "#" in (node.attributes.get("href") or "")


def is_line(attributes: Attributes) -> bool:
    """Whether an element of a line is shown as a line of its own, or is a cell of a table that has no tags."""
    if attributes.get("role") in _CELLS:
        return True
    style = attributes.get("style") or ""
    return "display" in style and "float" not in style and _LINE_STYLE.search(style) is not None


def ticked(attributes: Attributes) -> str:
    """Return the box that an element draws which is no `input`; empty for none."""
    box = _BOXES.get(attributes.get("role") or "")
    return box[attributes.get("aria-checked") == "true"] if box and "aria-checked" in attributes else ""


def filled_in(attributes: Attributes) -> str:
    """Return what a field of a form (`input`) shows: a box or a text; empty for buttons and passwords."""
    kind = (attributes.get("type") or "text").strip().lower()
    if box := _BOXES.get(kind):
        return f" {box['checked' in attributes]}"
    return f" {attributes.get('value') or ''} " if kind in _TEXTS else ""


def font_of(tag: str, attributes: Attributes, outside: str) -> str:
    """Return the font of an element if that has signs for letters; else empty. outside: that of its parent."""
    font = attributes.get("face") if tag == "font" else None
    if font is None and "font" in (style := attributes.get("style") or "") and (named := _FONT.search(style)):
        font = named[1] or named[2] or ""
    first = outside if font is None else font.partition(",")[0].strip(" \"'")
    return first if is_symbols(first) else ""


def is_unseen(tag: str, attributes: Attributes) -> bool:
    if not attributes:
        return tag in _UNSEEN or tag in ("dialog", "option")
    if _FORMULA_OF_SCRIPT in (attributes.get("class") or ""):
        return False
    return (
        tag in _UNSEEN
        or "hidden" in attributes
        or ("epub:type" in attributes and attributes["epub:type"] in _PAGE_NUMBERS)
        or ("role" in attributes and attributes["role"] in _PAGE_NUMBERS)
        or (tag == "dialog" and "open" not in attributes)
        or (tag == "option" and "selected" not in attributes)
        # Icons and anchors. A page that was saved with an open dialog may have it on all other blocks.
        or (attributes.get("aria-hidden") == "true" and tag not in BLOCKS)
        or ("style" in attributes and _hides(attributes["style"] or ""))
    )


def _hides(style: str) -> bool:
    return _HIDING.search(style) is not None or ("overflow" in style and _SIZELESS.search(style) is not None)


def place_of(node: LexborNode, tag: str, attributes: Attributes, outside: str) -> str:
    """Return the place of an element, by its tag, its role and the place of its parent."""
    role = (attributes.get("role") or "").strip().lower()
    if outside == AROUND or tag in _AROUND_TAGS or role in _AROUND_ROLES:
        return AROUND
    if tag in _AROUND_PAGE and outside != MAIN and not _is_in_section(node):
        return AROUND
    return MAIN if tag in _MAIN_TAGS or role in _MAIN_ROLES else outside


def _is_in_section(node: LexborNode) -> bool:
    """Whether an element is in a section, as far as the nearest elements around it say."""
    around = node.parent
    for _ in range(_NEAREST):
        if around is None or around.tag in _SECTIONS:
            break
        around = around.parent
    return around is not None and around.tag in _SECTIONS


def items_of(listed: LexborNode) -> int:
    """Return how many items a list has."""
    return sum(1 for child in listed.iter() if child.tag == "li")
