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

from collections.abc import Sequence
from typing import TYPE_CHECKING

from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

from ragkv.errors import TooLarge
from ragkv.ingest.formats import scripts
from ragkv.ingest.formats.base import LINE, Parsed, TextBlocks, one_line, without_controls
from ragkv.ingest.formats.elements import (
    ANCHORS,
    AROUND,
    BLOCKS,
    BODY,
    HEADINGS,
    INLINE,
    MAIN,
    SHAPED,
    TABLE_PARTS,
    Attributes,
    filled_in,
    font_of,
    is_anchor,
    is_line,
    is_unseen,
    items_of,
    place_of,
    script,
    ticked,
)
from ragkv.ingest.formats.numbering import NumberedList, span_of
from ragkv.ingest.formats.page_source import (
    MOST_NESTED,
    decode,
    html_of,
    is_for_screen,
    is_nested,
    is_xhtml,
    styles_of,
    unprefixed,
)
from ragkv.ingest.formats.symbols import signs

if TYPE_CHECKING:
    from ragkv.ingest.formats.formulas import Formula
    from ragkv.ingest.formats.page_style import StyleSheets

MAIN_SHARE = 0.25
"""Share of the text outside `around` that `main` must hold for `body` to be left out."""
LEAST_SHARE = 0.1
"""Where the rest holds no more than this share of the text `around`, nothing is left out."""


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a page. The title is that of <title>, or else of the first <h1>.

    Raises:
        InvalidDocument: The bytes are no text.
        TooLarge: The text has over `limit` bytes, or MOST_NESTED elements lie in each other.
    """
    source, encoding = decode(data)
    page = parse_text(html_of(source) if is_xhtml(source) else source, limit)
    return page._replace(metadata={**page.metadata, "encoding": encoding}) if encoding else page


def parse_text(source: str, limit: int, place: str = BODY, linked: Sequence[str] = ()) -> Parsed:
    """Parse a page that is decoded. place: of what stands in no element that says it. linked: Its style sheets.

    Raises:
        TooLarge: See `parse`.
    """
    source = unprefixed(source)
    if is_nested(source):
        raise TooLarge(f"over {MOST_NESTED} of its elements are open at the same time")
    try:
        tree = LexborHTMLParser(source)
    except SelectolaxError:
        raise MemoryError from None  # any text is a page, so only memory can be missing
    sheets = [*linked, *(node.text() for node in tree.css("style") if is_for_screen(node.attributes))]
    page = _Page(limit, place, styles_of(sheets, tree.root.attributes if tree.root is not None else {}))
    if tree.body is not None:
        _walk(page, tree.body)
        if sheets and not page.text().strip():  # scripts show what its style hides
            page = _Page(limit, place, None)
            _walk(page, tree.body)
    titles = (node.text() for query in ("head title", "h1") for node in tree.css(query)[:1])
    title = next(filter(None, map(one_line, titles)), "")
    language = tree.root.attributes.get("lang") if tree.root is not None else None
    metadata = {"format": "html", **({"language": language.strip()} if language and language.strip() else {})}
    return Parsed(title, without_controls(page.text()), metadata)


class _Page:
    """Collects the blocks of a page, element by element."""

    def __init__(self, limit: int, place: str, sheets: StyleSheets | None):
        self._blocks = TextBlocks(limit)
        self._sheets = sheets
        self._lists: list[NumberedList | None] = []
        self._blocks.place = place
        # Of each open element: the place around it, and its mark (LINE: it is a line, None: it is not seen).
        self._path: list[tuple[str, str | None]] = []
        self._fonts: list[tuple[int, str]] = []  # that were set, with the number of open elements
        self._verbatim = self._notes = 0
        self._formula: Formula | None = None

    def enter(self, node: LexborNode) -> bool:
        """Enter a node. Returns whether to visit its children."""
        tag, blocks = node.tag or "", self._blocks
        if self._formula is not None:
            return self._enter_formula(self._formula, node, tag)
        if tag == "-text":
            text = node.text_content or ""
            if text not in ANCHORS or not is_anchor(node.parent):
                text = text.replace("\n", LINE) if self._verbatim else text
                blocks.write(signs(text, self._fonts[-1][1]) if self._fonts else text)
            return False
        if tag == "br":
            blocks.write(LINE)
        if tag.startswith("-"):
            return False
        self._path.append((blocks.place, ""))
        attributes: Attributes = node.attributes
        sheets = self._sheets
        if sheets is not None and (styled := sheets.enter(tag, attributes)) is not None:
            attributes = styled
        else:
            sheets = None
        if is_unseen(tag, attributes) or (sheets is not None and sheets.hides(node.attributes)):
            self._path[-1] = (blocks.place, None)
            if tag == "col":
                blocks.add_columns(span_of(attributes.get("span")), hidden=True)
            elif tag in ("td", "th"):
                blocks.skip_cell(span_of(attributes.get("colspan")))
            return False
        if tag == "math":
            self._formula = _formula()
            return True
        if tag in BLOCKS:
            blocks.pause(verbatim=self._verbatim > 0)
        elif tag in INLINE or "style" in attributes or "role" in attributes:
            self._enter_inline(node, tag, attributes)
        place = place_of(node, tag, attributes, blocks.place)
        if place != blocks.place:
            blocks.pause()
            blocks.place = place
        if tag in SHAPED:
            self._enter_block(node, tag, attributes)
        if sheets is not None and (written := sheets.start()):
            blocks.write(written)
        return True

    def _enter_block(self, node: LexborNode, tag: str, attributes: Attributes) -> None:
        blocks = self._blocks
        if tag == "table":
            blocks.open_table()
        elif tag == "col":
            blocks.add_columns(span_of(attributes.get("span")), hidden=False)
        elif tag in TABLE_PARTS:
            blocks.open_section()
        elif tag == "tr":
            blocks.open_row()
        elif tag in ("td", "th"):
            blocks.open_cell(span_of(attributes.get("colspan")), span_of(attributes.get("rowspan")))
        elif tag in ("ol", "ul", "menu"):
            self._lists.append(NumberedList(attributes, items_of(node)) if tag == "ol" else None)
        elif tag == "li":
            numbers = self._lists[-1] if self._lists else None
            blocks.mark("- " if numbers is None else numbers.mark(attributes))
        elif tag in HEADINGS:
            blocks.mark("#" * int(tag[1]) + " ")
        self._verbatim += tag == "pre"

    def _enter_inline(self, node: LexborNode, tag: str, attributes: Attributes) -> None:
        blocks = self._blocks
        if self._fonts or "style" in attributes or tag == "font":
            outside = self._fonts[-1][1] if self._fonts else ""
            if (font := font_of(tag, attributes, outside)) != outside:
                self._fonts.append((len(self._path), font))
        if tag == "img":
            if (alt := (attributes.get("alt") or "").strip()) and attributes.get("role") != "presentation":
                blocks.write(f" {alt} ")
        elif tag == "input":
            blocks.write(filled_in(attributes))
        elif not self._notes and (mark := script(node, tag, attributes)):
            self._path[-1] = (blocks.place, mark)
            self._notes += mark == scripts.NOTE
            blocks.write(mark)
        elif "role" in attributes and (box := ticked(attributes)):
            blocks.write(f" {box}")
        elif is_line(attributes):
            blocks.begin_line()
            self._path[-1] = (blocks.place, "" if self._verbatim else LINE)

    def _enter_formula(self, formula: Formula, node: LexborNode, tag: str) -> bool:
        """Enter a node of a formula."""
        if tag == "-text":
            formula.text(node.text_content or "")
        if tag.startswith("-"):
            return False
        formula.start(tag)
        attributes = node.attributes
        if tag == "mfrac" and (attributes.get("linethickness") or "").strip("px.") == "0":
            formula.set("type", "noBar")
        for name in ("open", "close") if tag == "mfenced" else ():
            if (value := attributes.get(name)) is not None:
                formula.set(name, value)
        return True

    def leave(self, node: LexborNode) -> None:
        """Leave a node."""
        tag, blocks = node.tag or "", self._blocks
        if tag.startswith("-"):
            return
        if self._formula is not None:
            if tag != "math":
                self._formula.end()
                return
            blocks.write_formula(self._formula.whole() or node.attributes.get("alttext") or "")
            self._formula = None
        if self._fonts and self._fonts[-1][0] == len(self._path):
            self._fonts.pop()
        place, mark = self._path.pop()
        if self._sheets is not None and (written := self._sheets.leave()) and mark is not None:
            blocks.write(written)
        if mark == LINE:
            blocks.begin_line()
        elif mark:
            blocks.write(scripts.END)
            self._notes -= mark == scripts.NOTE
        if tag in BLOCKS or place != blocks.place:
            blocks.pause(verbatim=self._verbatim > 0)
        if tag in SHAPED and mark is not None:
            self._leave_block(tag)
        blocks.place = place

    def _leave_block(self, tag: str) -> None:
        blocks = self._blocks
        if tag == "tr":
            blocks.close_row()
        elif tag == "table":
            blocks.close_table()
        elif tag in ("ol", "ul", "menu") and self._lists:
            self._lists.pop()
        if tag in HEADINGS or tag == "li":
            blocks.mark("")
        self._verbatim -= tag == "pre"

    def text(self) -> str:
        """Return the text. What is left out is never nearly all of it."""
        blocks = self._blocks
        main, body, around = (blocks.length(place) for place in (MAIN, BODY, AROUND))
        if main + body <= LEAST_SHARE * around:
            return blocks.joined()
        if main >= MAIN_SHARE * (main + body):
            return blocks.joined(BODY, AROUND)
        return blocks.joined(AROUND)


def _formula() -> Formula:
    from ragkv.ingest.formats.formulas import Formula

    return Formula()


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
