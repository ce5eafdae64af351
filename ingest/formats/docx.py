"""Word documents to text. Their XML is read as a stream (package.py).

    _rels/.rels            where the document is, usually word/document.xml
    word/styles.xml        which styles are headings, and of which level; which are lists, raised, struck out, hidden
    word/numbering.xml     how list items and headings are numbered
    word/document.xml      paragraphs (p) of runs (t), tables (tbl, tr, tc), lists (numPr)
    word/diagrams/drawing1.xml    the texts of diagrams (SmartArt), read after it
    word/footnotes.xml, word/endnotes.xml    read at the end
    docProps/core.xml      the title

Tracked changes read as accepted: deleted text is left out, and inserted text is kept. So is text that is struck out.
The text of content controls and text boxes is kept too. Formulas are written in one line (formulas.py).

This is written by hand because libraries would lose tested behaviour: mammoth 1.13 returns hidden text, ignores
headings by base style or outline level, and takes 46 s for a deflate bomb that is refused here at once. python-docx 1.2
cannot open strict documents, and drops tracked insertions, content controls, text boxes and footnotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats.base import LINE, Parsed, TextBlocks, one_line, without_controls
from ragkv.ingest.formats.fields import Fields
from ragkv.ingest.formats.numbering import span_of, written
from ragkv.ingest.formats.office_formulas import OfficeFormulas
from ragkv.ingest.formats.package import Package, PartHandler, diagrams_of, open_package
from ragkv.ingest.formats.rows import MOST_COLUMNS
from ragkv.ingest.formats.scripts import END, NOTE, SUB, SUP
from ragkv.ingest.formats.symbols import sign, signs
from ragkv.ingest.formats.word_forms import FORM_ENDS, FORM_TAGS, FormFields
from ragkv.ingest.formats.word_styles import PLAIN, Numbering, Style, Styles, is_on

_UNSEEN = {"Fallback", "moveFrom", "del", "rt", "pPrChange", "rPrChange", "tblPrChange", "trPrChange", "tcPrChange"}
"""Elements that are skipped: a second copy of a drawing for older programs, text that was taken out or moved away, how
words are pronounced, and how a changed part looked before."""
_TAKEN_OUT = {"del", "moveFrom"}
"""What stands in the properties of a paragraph whose end was taken out: it goes on in the next one. So does one whose
end is hidden, and the large letter that begins a text."""
_GONE = {"del", "cellDel", "hidden"}
"""What stands in the properties of a row or a cell that was taken out or is hidden."""
_TABLE = {"tbl", "tr", "tc", "trPr", "tcPr", "gridBefore", "gridSpan", "vMerge", "hMerge", "cellDel", "hidden"}
_WORDS = ("descr", "alt", "title")
"""Attributes of a picture whose words stand for it."""
_OF_PARAGRAPHS = {"outlineLvl", "numPr", "ilvl", "numId"}
_REFERENCES = {"footnoteReference", "endnoteReference"}
_ENDING = {*FORM_ENDS, "fldSimple", "r", "pPr", "p", "txbxContent", "instrText", "trPr", "tcPr", "tr", "tbl"}
"""Elements whose end says something."""
_PROPERTIES = {"pStyle", "rStyle", "vertAlign", "position", "strike", "dstrike", "vanish", "rFonts", *_OF_PARAGRAPHS}


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a Word document. The title comes from its properties, or else is the first heading.

    Raises:
        InvalidDocument: The file is no Word document, is damaged or has a password.
        TooLarge: The text has over `limit` bytes, or its parts over UNPACKED_BYTES.
    """
    with open_package(data, "Word document", ".doc") as package:
        return _parse(package, limit)


def _parse(package: Package, limit: int) -> Parsed:
    document = package.document("word/document.xml")
    if document not in package.names:
        raise InvalidDocument("it is no Word document: a zip archive without one")
    folder = PurePosixPath(document).parent
    styles, numbers = Styles(), Numbering()
    package.read(str(folder / "styles.xml"), styles)
    package.read(str(folder / "numbering.xml"), numbers)
    body = _Body(TextBlocks(limit), styles.whole(), numbers)
    package.read(document, body)
    if body.root != "document":
        raise InvalidDocument("it is no Word document, but another one of an office program")
    for diagram in diagrams_of(package.links(document)):
        package.read(diagram, body)
    for notes in ("footnotes.xml", "endnotes.xml"):
        package.read(str(folder / notes), body)
    title = one_line(package.title()) or one_line(body.blocks.heading())
    return Parsed(title, without_controls(body.blocks.joined()), {"format": "docx"})


class _Body(PartHandler):
    """Writes the text of the document and of its notes into blocks."""

    def __init__(self, blocks: TextBlocks, styles: Mapping[str, Style], numbers: Numbering):
        self.blocks = blocks
        self.root = ""
        self._styles, self._numbers = styles, numbers
        self._paragraph = self._run = PLAIN
        self._unseen, self._formulas = 0, OfficeFormulas()
        self._text = self._raised = False
        self._forms = FormFields()
        self._in_properties = self._is_joined = self._in_cell_properties = self._is_gone = False
        self._fields, self._is_code = Fields(), False
        self._around: list[tuple[Style, Style, bool, bool]] = []
        self._notes: dict[tuple[str, str], str] = {}
        self._note, self._unread = "", set[tuple[str, str]]()

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.root = self.root or tag
        if self._unseen or tag in _UNSEEN:
            self._is_joined |= self._in_properties and tag in _TAKEN_OUT
            self._is_gone |= self._in_cell_properties and tag in _GONE
            if tag in _REFERENCES:
                self._unread.add((tag.removesuffix("Reference"), attributes.get("id", "")))
            self._unseen += 1
        elif self._formulas.has(tag):
            self._text = tag == "t"
            self._formulas.start(tag, attributes)
        elif tag in _TABLE:
            self._start_table(tag, attributes)
        elif tag in _PROPERTIES:
            self._start_property(tag, attributes)
        else:
            self._start_text(tag, attributes)

    def end(self, tag: str) -> None:
        if self._unseen:
            self._unseen -= 1
            if tag == "tr" and not self._unseen:  # that was taken out
                self.blocks.close_row()
            return
        if tag == "t":
            self._text = False
        if self._formulas.present is not None:
            if (formula := self._formulas.end(tag)) and not self._run.is_hidden:
                self.blocks.write_formula(formula.whole())
            return
        if tag not in _ENDING:
            return
        match tag:
            case "r":
                if self._raised:
                    self.blocks.write(END)
                self._run, self._raised = self._paragraph, False
            case "pPr":
                self._in_properties = False
                if not self._is_joined:  # else the mark is that of the next one
                    self.blocks.mark(self._mark())
            case _ if tag in FORM_ENDS:
                self.blocks.write(self._forms.end(tag))
            case "fldSimple":
                self._write(self._fields.mark("end"))
            case "p" if not self._is_joined:
                self.blocks.keep_number()
                self._fields.end_codes()
                self._begin()
            case "txbxContent" if self._around:
                self._paragraph, self._run, self._raised, self._is_joined = self._around.pop()
                self.blocks.resume()
            case "instrText":
                self._is_code = False
            case "trPr" | "tcPr":
                self._unseen += self._is_gone  # up to the end of the row or the cell
                self._in_cell_properties = self._is_gone = False
            case "tr":
                self.blocks.close_row()
            case "tbl":
                self.blocks.close_table()

    def text(self, text: str) -> None:
        if self._is_code:
            self._fields.tell(text)
        if not self._text or self._unseen:
            return
        if self._formulas.present is not None:
            self._formulas.present.text(text)
        elif not self._run.is_hidden:
            self._write(signs(text, self._run.font or ""))

    def _start_text(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "p":
                self._begin()
            case "pPr":
                self._in_properties = True
            case "r":
                self._run = self._paragraph
            case "t":
                self._text = True
            case "txbxContent":
                self._around.append((self._paragraph, self._run, self._raised, self._is_joined))
                self._raised = self._is_joined = False
                self.blocks.set_aside()
            case "specVanish":  # the end of a heading, which the text follows in its line
                self._is_joined = False
            case "framePr" if attributes.get("dropCap", "none") != "none":
                self._is_joined = True
            case "tab" | "ptab":
                self.blocks.write("\t")
            case "br" | "cr":
                self.blocks.write(LINE)
            case "noBreakHyphen":
                self.blocks.write("-")
            case "sym" if not self._run.is_hidden:
                self._write(sign(attributes.get("char", ""), attributes.get("font", "")))
            case "docPr" | "shape" if not is_on({"val": attributes.get("hidden", "0")}):
                if words := next(filter(None, (attributes.get(name, "").strip() for name in _WORDS)), ""):
                    self.blocks.write(f" {words} ")
            case "instrText":
                self._is_code = True
            case "fldChar":
                if text := self._fields.mark(attributes.get("fldCharType", "")):
                    self._write(text)
            case "footnoteReference" | "endnoteReference" if "customMarkFollows" not in attributes:
                self.blocks.write(NOTE + self._number(tag.removesuffix("Reference"), attributes.get("id", "")) + END)
            case "fldSimple":
                self._fields.mark("begin")
                self._fields.tell(attributes.get("instr", ""))
                self._fields.mark("separate")
            case "textpath" if words := attributes.get("string", "").strip():
                self.blocks.write(f" {words} ")
            case "footnote" | "endnote" if (tag, attributes.get("id", "")) in self._unread - self._notes.keys():
                self._unseen += 1
            case "footnote" | "endnote":
                self._note = self._notes.get((tag, attributes.get("id", "")), "")
            case _ if tag in FORM_TAGS:
                self._forms.start(tag, attributes)

    def _start_property(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Take what is said of the paragraph or the run."""
        value = attributes.get("val", "")
        if tag == "pStyle":
            self._paragraph = self._run = self._styles.get(value, PLAIN)
        elif tag == "rStyle":
            self._run = self._run.over(self._styles.get(value, PLAIN))
        elif tag in _OF_PARAGRAPHS:
            self._paragraph = self._run = self._paragraph.told(tag, attributes)
        else:
            self._run = self._run.told(tag, attributes)
            if self._in_properties and tag == "vanish":
                self._is_joined |= is_on(attributes)

    def _start_table(self, tag: str, attributes: Mapping[str, str]) -> None:
        value = attributes.get("val", "")
        match tag:
            case "tbl":
                self.blocks.open_table()
            case "tr":
                self.blocks.open_row()
            case "tc":
                self.blocks.open_cell()
            case "trPr" | "tcPr":
                self._in_cell_properties = True
            case "cellDel" | "hidden" if self._in_cell_properties:
                self._is_gone |= is_on(attributes)
            case "gridBefore":
                for _ in range(min(span_of(value), MOST_COLUMNS)):
                    self.blocks.open_cell()
            case "gridSpan":
                self.blocks.widen_cell(span_of(value))
            case "vMerge" if value != "restart":
                self.blocks.widen_cell(like="above")
            case "hMerge" if value != "restart":
                self.blocks.widen_cell(like="left")

    def _write(self, text: str) -> None:
        """Write the text of the run, with a mark before its first one where it is raised or lowered."""
        if self._note:
            self.blocks.write(f"[{self._note}] ")
            self._note = ""
        if self._fields.take(text) or self._run.is_hidden:
            return
        text = self._forms.shown(text)
        if self._run.raised and not self._raised:
            self.blocks.write(SUP if self._run.raised == "superscript" else SUB)
            self._raised = True
        self.blocks.write(text)

    def _number(self, kind: str, id: str) -> str:
        """Return the number of a note, which counts where notes are referred to."""
        if (kind, id) not in self._notes:
            number = 1 + sum(1 for known, _ in self._notes if known == kind)
            self._notes[kind, id] = written(number, "i" if kind == "endnote" else "1")
        return self._notes[kind, id]

    def _begin(self) -> None:
        """End the open block, unless the end of its paragraph was taken out, and begin a plain one."""
        if not self._is_joined:
            self.blocks.pause()
            self.blocks.mark("")
        self._is_joined = False
        self._paragraph = self._run = PLAIN

    def _mark(self) -> str:
        """Return the mark of the paragraph: a heading, which may have a number, or a list item."""
        item = self._numbers.mark(self._paragraph.list, self._paragraph.level)
        if not self._paragraph.heading:
            return item
        return self._paragraph.heading + item.removeprefix("- ")
