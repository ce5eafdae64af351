"""Readers of marked-up documentation: HTML, DocBook, Mallard and POD."""

from __future__ import annotations

import re
from collections.abc import Iterator

from selectolax.lexbor import LexborHTMLParser, LexborNode

from tools.prose.sections import Section, clean, entitled

_HEADINGS = frozenset("h1 h2 h3 h4 title".split())
_BLOCKS = frozenset("p para simpara li dd blockquote listitem".split())
_DROPPED = (
    "script style table nav header footer pre code-block screen programlisting noscript form sup.footnote "
    ".navheader .navfooter .toc .contents .index .breadcrumbs .highlight .sphinxsidebar .related .nav_table "
    ".headerlink .footnotes .sidebar .verbatim .example .literallayout .copyright .legalnotice .author .header "
    "#toc indexterm info bookinfo synopsis cmdsynopsis"
).split()
_ENTITY = re.compile(r"&(?!amp|lt|gt|quot|nbsp|apos|#)([A-Za-z][\w.-]*);")
_VOID = re.compile(r"<(\w+)([^<>]*)/>")
_TITLE = re.compile(r"<(title|refentrytitle)\b[^>]*>(.*?)</\1>", re.S | re.I)


def html(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Sections of a page, one for each heading.

    Args:
        document: Its name.
        data: HTML, or XML of DocBook or Mallard.
        book: Stands first in the titles.
    """
    if data.lstrip()[:5] == "<?xml" and "<html" not in data[:2000]:
        data = _as_html(data)
    tree = LexborHTMLParser(data)
    for selector in _DROPPED:
        for node in tree.css(selector):
            if node.tag not in ("body", "html"):
                node.decompose()
    body = tree.body
    if body is None:
        return
    head = tree.css_first("h1") or tree.css_first("title") or tree.css_first("h2")
    page = clean(head.text(separator="")) if head else ""
    heading, held = page, list[str]()
    for node in body.traverse(include_text=False):
        if node.tag in _HEADINGS:
            if held:
                yield Section(document, entitled(book or page, heading), tuple(held))
            heading, held = clean(node.text(separator="")), []
        elif _block(node) and not _nested(node):
            text = clean(node.text(separator=""))
            if text:
                held.append(text)
    if held:
        yield Section(document, entitled(book or page, heading), tuple(held))


def _block(node: LexborNode) -> bool:
    """Whether a node is a paragraph; Publican writes them as `div`."""
    return node.tag in _BLOCKS or (node.tag == "div" and node.attributes.get("class") == "para")


def _nested(node: LexborNode) -> bool:
    """Whether blocks inside give this block's text."""
    return any(child != node and _block(child) for child in node.traverse(include_text=False))


def _as_html(data: str) -> str:
    """XML as an HTML parser takes it: named entities as words, closed elements, titles as headings."""
    data = re.sub(r"<\?.*?\?>|<!DOCTYPE.*?(?:\]>|>)|<!--.*?-->|<!\[CDATA\[|\]\]>", "", data, flags=re.S)
    data = _VOID.sub(r"<\1\2></\1>", _ENTITY.sub(lambda found: found[1], data))
    return _TITLE.sub(r"<h2>\2</h2>", data)


_POD = re.compile(r"[A-Z](?:<<+ (.*?) >>+|<([^<>]*)>)", re.S)


def pod(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Sections of Perl's plain old documentation."""
    heading, held = "", list[str]()
    for paragraph in re.split(r"\n\s*\n", data):
        found = re.match(r"=head\d\s+(.*)", paragraph, re.S)
        if found:
            if held:
                yield Section(document, entitled(book, heading), tuple(held))
            heading, held = _unpod(found[1]), []
        elif not paragraph.startswith(("=", " ", "\t")):
            held.append(_unpod(paragraph))
    if held:
        yield Section(document, entitled(book, heading), tuple(held))


def _unpod(text: str) -> str:
    for _ in range(3):
        text = _POD.sub(lambda found: (found[1] or found[2] or "").split("|")[0], text)
    return clean(text)


def plain(document: str, data: str, book: str = "") -> Iterator[Section]:
    """A text file: blank lines end paragraphs."""
    yield Section(document, book, tuple(clean(each) for each in re.split(r"\n\s*\n", data)))
