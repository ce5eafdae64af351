"""HTML to the text that a reader of the page sees, without navigation and the like.

selectolax (lexbor) builds the tree, so that unclosed tags end where a browser ends them. The tree is walked once and
without recursion. Each block belongs to one of three places:

    main      in <main> or <article>
    body      elsewhere
    around    navigation, page header and footer, sidebars

Blocks `around` are left out. So are blocks in `body` where `main` holds a fair part of the text. A page is never left
empty. Headings keep their level as `#` marks.

This is written by hand because trafilatura 2.3 would lose tested behaviour: it returns hidden elements (`hidden`,
`display: none`, closed dialogs, options) and nothing at all for deeply nested pages, and it splits lines at <br> into
paragraphs.
"""

from __future__ import annotations

import re
from collections import Counter

from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

from ingest.formats import charsets
from ingest.formats.base import LINE, Parsed, TextBlocks, one_line, without_controls
from ingest.text import check_replacements, check_text
from ragkv.errors import TooLarge

MOST_NESTED = 10_000
"""Most elements that are open at the same time. For each further one lexbor looks at all that are open."""
MAIN, BODY, AROUND = "main", "body", "around"
MAIN_SHARE = 0.25
"""Share of the text outside `around` that `main` must hold for `body` to be left out."""
LEAST_SHARE = 0.1
"""Where the rest holds no more than this share of the text `around`, nothing is left out."""
ANCHORS = {"¶", "§", "#"}
"""Texts of links that point from a heading to itself."""

_UNSEEN = {
    *("audio", "button", "canvas", "datalist", "embed", "head", "iframe", "map", "noscript", "object", "script"),
    *("select", "style", "svg", "template", "textarea", "title", "video"),
}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "dialog", "div"),
    *("dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("header", "hgroup", "hr", "legend", "li", "main", "menu", "nav", "ol", "p", "pre", "search", "section"),
    *("summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"),
}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_MAIN_TAGS, _MAIN_ROLES = {"main", "article"}, {"main", "article"}
_AROUND_TAGS = {"nav", "search"}
_AROUND_PAGE = {"header", "footer", "aside"}
"""Tags that are `around` the page. Inside `main` they are content: the head of an article, a note."""
_AROUND_ROLES = {"navigation", "banner", "contentinfo", "complementary", "search", "menu", "menubar"}
_HIDING = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_XML = re.compile(rb"<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*(?:[\"']\s*)?([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]{0,15})(?=[\s/>])", re.IGNORECASE)
_LEFT_OPEN = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"),
    *("a", "body", "button", "colgroup", "dd", "dt", "head", "html", "li", "nobr", "optgroup", "option", "p", "rp"),
    *("rt", "tbody", "td", "tfoot", "th", "thead", "tr"),
}
"""Elements that have no end, or end where the next one begins."""
_HEAD = 4096
"""Bytes at the start of a page that are searched for its character set."""
_CODE_POINTS = {"utf-16le", "utf-16be", "utf-16", "utf-32", "utf-32-le", "utf-32-be", "utf-7"}


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a page. The title is that of <title>, or else of the first <h1>.

    Raises:
        InvalidDocument: The bytes are no text.
        TooLarge: The text has over `limit` bytes, or MOST_NESTED elements lie in each other.
    """
    return parse_text(decode(data), limit)


def parse_text(source: str, limit: int) -> Parsed:
    """Parse a page that is decoded. Raises TooLarge."""
    if _is_nested(source):
        raise TooLarge(f"over {MOST_NESTED} of its elements are open at the same time")
    try:
        tree = LexborHTMLParser(source)
    except SelectolaxError:
        raise MemoryError from None  # any text is a page, so only memory can be missing
    page = _Page(limit)
    if tree.body is not None:
        _walk(page, tree.body)
    titles = (node.text() for query in ("head title", "h1") for node in tree.css(query)[:1])
    title = next(filter(None, map(one_line, titles)), "")
    language = tree.root.attributes.get("lang") if tree.root is not None else None
    metadata = {"format": "html", **({"language": language.strip()} if language and language.strip() else {})}
    return Parsed(title, without_controls(page.text()), metadata)


def _is_nested(source: str) -> bool:
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


class _Page:
    """Collects the blocks of a page, element by element."""

    def __init__(self, limit: int):
        self._blocks = TextBlocks(limit)
        self._blocks.place = BODY
        self._path: list[str] = []
        self._verbatim = 0

    def enter(self, node: LexborNode) -> bool:
        """Enter a node. Returns whether to visit its children."""
        tag, blocks = node.tag or "", self._blocks
        if tag == "-text":
            text = node.text_content or ""
            if text not in ANCHORS or not _is_anchor(node.parent):
                blocks.write(text.replace("\n", LINE) if self._verbatim else text)
            return False
        if tag == "br":
            blocks.write(LINE)
        if tag.startswith("-"):
            return False
        self._path.append(blocks.place)
        if _unseen(node, tag):
            return False
        if tag in _BLOCKS:
            blocks.pause(verbatim=self._verbatim > 0)
        place = _place(node, tag, blocks.place)
        if place != blocks.place:
            blocks.pause()
            blocks.place = place
        if tag == "tr":
            blocks.open_row()
        elif tag in ("td", "th"):
            blocks.open_cell()
        elif tag == "li":
            blocks.mark("- ")
        elif tag in _HEADINGS:
            blocks.mark("#" * int(tag[1]) + " ")
        self._verbatim += tag == "pre"
        return True

    def leave(self, node: LexborNode) -> None:
        """Leave a node."""
        tag, blocks = node.tag or "", self._blocks
        if tag.startswith("-"):
            return
        place = self._path.pop()
        if tag in _BLOCKS or place != blocks.place:
            blocks.pause(verbatim=self._verbatim > 0)
        if tag == "tr":
            blocks.close_row()
        if tag in _HEADINGS or tag == "li":
            blocks.mark("")
        self._verbatim -= tag == "pre"
        blocks.place = place

    def text(self) -> str:
        """Return the text. What is left out is never nearly all of it."""
        blocks = self._blocks
        main, body, around = (blocks.length(place) for place in (MAIN, BODY, AROUND))
        if main + body <= LEAST_SHARE * around:
            return blocks.joined()
        if main >= MAIN_SHARE * (main + body):
            return blocks.joined(BODY, AROUND)
        return blocks.joined(AROUND)


def _walk(page: _Page, body: LexborNode) -> None:
    """Visit every node on the way down and on the way up. Nesting has no limit, as recursion would have."""
    node, depth = body, 0
    while True:
        child = node.first_child if page.enter(node) else None
        if child is not None:
            node, depth = child, depth + 1
            continue
        page.leave(node)
        following = node.next
        while depth and following is None and (parent := node.parent) is not None:
            node, depth = parent, depth - 1
            page.leave(node)
            following = node.next
        if not depth or following is None:
            return
        node = following


def _is_anchor(node: LexborNode | None) -> bool:
    return node is not None and node.tag == "a" and (node.attributes.get("href") or "").startswith("#")


def _unseen(node: LexborNode, tag: str) -> bool:
    attributes = node.attributes
    return (
        tag in _UNSEEN
        or "hidden" in attributes
        or (tag == "dialog" and "open" not in attributes)
        # Icons and anchors. A page that was saved with an open dialog may have it on all other blocks.
        or (attributes.get("aria-hidden") == "true" and tag not in _BLOCKS)
        or _HIDING.search(attributes.get("style") or "") is not None
    )


def _place(node: LexborNode, tag: str, outside: str) -> str:
    """Return the place of an element, by its tag, its role and the place of its parent."""
    role = (node.attributes.get("role") or "").strip().lower()
    if outside == AROUND or tag in _AROUND_TAGS or role in _AROUND_ROLES:
        return AROUND
    if tag in _AROUND_PAGE and outside != MAIN:
        return AROUND
    return MAIN if tag in _MAIN_TAGS or role in _MAIN_ROLES else outside


def decode(data: bytes) -> str:
    """Decode a page as browsers do: by its byte order mark, else by what it declares, else as text without a label.

    Raises:
        InvalidDocument: The bytes are no text.
    """
    text = _decoded(data)
    check_text(text)
    return text


def _decoded(data: bytes) -> str:
    for mark, name in charsets.BOMS:
        if data.startswith(mark):
            text = data.removeprefix(mark).decode(name, errors="replace")
            check_replacements(text, f"it is not text in {name}; save it as UTF-8")
            return text
    head = _without_comments(data[:_HEAD])
    found = _XML.match(head.lstrip()) or _CHARSET.search(head)
    if found is None:
        return charsets.detect(data)
    label = found[1].decode()
    # The declaration could be read as ASCII, so the page is in no code that has two bytes for a letter.
    return charsets.decode(data, "utf-8" if charsets.name_of(label) in _CODE_POINTS else label)


def _without_comments(head: bytes) -> bytes:
    """Return the start of a page without its comments, which declare nothing."""
    first, *others = head.split(b"<!--")
    return first + b"".join(other.partition(b"-->")[2] for other in others)
