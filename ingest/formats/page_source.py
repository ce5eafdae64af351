"""The bytes of a page of HTML to its source, its style sheets, and how deeply its elements lie in each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ragkv.ingest.formats import charsets
from ragkv.ingest.text import check_replacements, check_text

if TYPE_CHECKING:
    from ragkv.ingest.formats.page_style import StyleSheets

MOST_NESTED = 10_000
"""Most elements that are open at the same time. For each further one lexbor looks at all that are open."""
_XML = re.compile(rb"<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
_META = re.compile(rb"<meta\b[^>]{0,400}", re.IGNORECASE)
_CHARSET = re.compile(rb"charset\s*=\s*(?:[\"']\s*)?([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]{0,15})(?=[\s/>])", re.IGNORECASE)
_LEFT_OPEN = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"),
    *("a", "body", "button", "colgroup", "dd", "dt", "head", "html", "li", "nobr", "optgroup", "option", "p", "rp"),
    *("rt", "tbody", "td", "tfoot", "th", "thead", "tr"),
}
"""Elements that have no end, or end where the next one begins."""
_VOID = "area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr"
_CLOSED = re.compile(rf"<(?!(?:{_VOID})[\s/])([A-Za-z][\w:-]*)((?:\s[^<>]*)?)/>", re.ASCII | re.IGNORECASE)
"""An element that XHTML closes at once. HTML would leave it open: a `<title/>` would swallow the page."""
_CDATA = "<![CDATA["
_PREFIX = re.compile(r"""xmlns:([A-Za-z]\w{0,15})\s?=\s?["']http://www\.w3\.org/199(?:8/Math/MathML|9/xhtml)["']""")
_TELLING = {
    *(
        "none",
        "hidden",
        "collapse",
        "line-through",
        "super",
        "sub",
        "vertical-align",
        "relative",
        "list-style",
        "block",
    ),
    *(":before", ":after"),
}
"""Words of style sheets that say more than how a page looks."""
_XHTML = 'xmlns="http://www.w3.org/1999/xhtml"'
_HEAD = 4096
"""Bytes at the start of a page that are searched for its character set."""
_CODE_POINTS = {"utf-16le", "utf-16be", "utf-16", "utf-32", "utf-32-le", "utf-32-be", "utf-7"}


def decode(data: bytes) -> tuple[str, str]:
    """Decode a page as browsers do: by its byte order mark, else by what it declares, else as text without a label.

    Returns:
        Its source, and its character set where its characters show that and it does not declare it; else empty.

    Raises:
        InvalidDocument: The bytes are no text.
    """
    text, encoding = _decoded(data)
    check_text(text)
    return text, encoding


def _decoded(data: bytes) -> tuple[str, str]:
    for mark, name in charsets.BOMS:
        if data.startswith(mark):
            text = data.removeprefix(mark).decode(name, errors="replace")
            check_replacements(text, f"it is not text in {name}; save it as UTF-8")
            return text, ""
    head = _without_comments(data[:_HEAD])
    found = _XML.match(head.lstrip()) or next(filter(None, map(_declared, _META.finditer(head))), None)
    if found is None:
        return charsets.detect(data)
    label = found[1].decode()
    # The declaration could be read as ASCII, so the page is in no code that has two bytes for a letter.
    return charsets.decode(data, "utf-8" if charsets.name_of(label) in _CODE_POINTS else label)


def _declared(meta: re.Match[bytes]) -> re.Match[bytes] | None:
    """Return what a tag says of the character set. The name and the text of another one, `description`, say nothing."""
    is_other = b"name" in meta[0] and b"http-equiv" not in meta[0].lower()
    return None if is_other and b"content" in meta[0] else _CHARSET.search(meta[0])


def _without_comments(head: bytes) -> bytes:
    """Return the start of a page without its comments, which declare nothing."""
    first, *others = head.split(b"<!--")
    return first + b"".join(other.partition(b"-->")[2] for other in others)


def is_xhtml(source: str) -> bool:
    """Whether a page says that it is XML."""
    return source.lstrip().startswith("<?xml") or _XHTML in source[:_HEAD]


def html_of(source: str) -> str:
    """Return a page of XHTML as HTML: what is closed at once or quoted (CDATA)."""
    if _CDATA in source:
        source = _escaped(source)
    return _CLOSED.sub(r"<\1\2></\1>", source)


def unprefixed(source: str) -> str:
    """Return a page without the prefix that its elements of HTML or MathML have."""
    for prefix in set(_PREFIX.findall(source)) if "xmlns:" in source else ():
        source = source.replace(f"<{prefix}:", "<").replace(f"</{prefix}:", "</")
    return source


def is_for_screen(attributes: Mapping[str, str | None]) -> bool:
    """Whether a style sheet is for what is read on a screen."""
    return (attributes.get("media") or "").strip().lower() not in ("print", "aural", "braille")


def _escaped(source: str) -> str:
    """Return a page with the signs of what is quoted (CDATA) as entities."""
    first, *others = source.split(_CDATA)
    parts = [first]
    for other in others:
        quoted, end, rest = other.partition("]]>")
        parts += [quoted.replace("&", "&amp;").replace("<", "&lt;"), rest] if end else [_CDATA, other]
    return "".join(parts)


def styles_of(sheets: Sequence[str], root: Mapping[str, str | None]) -> StyleSheets | None:
    """Return what style sheets hide, set off and write; None for none of it. root: attributes of <html>.

    Few saved pages have some; the module is imported for them.
    """
    if not any(word in sheet for sheet in map(str.lower, sheets) for word in _TELLING):
        return None
    from ragkv.ingest.formats.page_style import StyleSheets

    read = StyleSheets(sheets, root)
    return read if read.says_anything else None


def is_nested(source: str) -> bool:
    """Whether more than MOST_NESTED elements are open at the same time, as far as their tags say."""
    if source.count("<") <= MOST_NESTED:
        return False
    opened = Counter[str]()
    depth = 0
    for tag in _TAG.finditer(source):
        name = tag[2].lower()
        if name in _LEFT_OPEN:
            continue
        if not tag[1]:
            opened[name] += 1
            depth += 1
        elif opened[name]:
            opened[name] -= 1
            depth -= 1
        if depth > MOST_NESTED:
            return True
    return False
