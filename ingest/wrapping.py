"""Lines that were broken to fit a width become paragraphs again: a break inside a sentence is white space.

Poems, addresses, code, tables and lists keep their breaks. What a paragraph is, is seen from its lines:

    a width that its lines fill        the first word of the next line had no room in this one
    words that go on                   no end of a sentence, and the next line begins in lower case or with a digit
    verse                              short lines of which each begins with a capital

In Markdown a break is a space unless the author says otherwise, so there only the last counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import add

from ragkv.ingest.paragraphs import FULL, VERSE, WIDE, WIDE_FROM, indent_of, joined, quote_of, with_whole_words

LONGEST = 65536
"""Characters of lines that are held at once, unless they are code."""
_WIDEST = 120
"""Characters of the longest line that a program wraps."""
_SENTENCE_ENDS = (".", "!", "?", "…", ".”", '."', ":", ";")
_FENCE = re.compile(r" {0,3}(```|~~~|\$\$|<pre\b)")
_ITEM = re.compile(
    r"\s{0,12}(?:[-*+•‣▪◦–—]|\(?(?:\d{1,3}|[A-Za-z]|[ivx]{2,4})[.)]|\[[ xX]\]|\[\^[^\]\s]{1,40}\]:|o(?=  ))\s+\S"
)
_APART = re.compile(r"\t|[^\s.!?:] {2,}\S|\S {3,}\S| \| |^\s{0,3}\||\|\s*$")
"""What columns of a table have between them."""
_ALONE = re.compile(
    r"\s{0,3}(?:#{1,6}(?:\s|$)|[=*_~-]{3,}\s*$|(?:[-*_] ){2,}[-*_]\s*$|<[A-Za-z/!]"
    r"|\[(?!\^)[^\]\n]{1,80}\]:|:(?:\s|::)|\.\.\s|@|\$ )"
)
"""Lines that belong to no paragraph: headings, rules, elements of HTML, definitions, commands."""
_CODE = re.compile(
    r"\s*(?:def \w+\(|class \w+[:(]|import \w+$|from [\w.]+ import |#include|return;|(?:if|for|while) ?\(|//|/\*|\})"
)
_FIRST_WORD = r"[^\W\d_]{2,}+(?:[ ,.;!?’'”\")-]|\Z|(?=\n))|[AaIO] |\d{1,9}+,? [^\W\d_]"
_SENTENCE = rf"(?![ivx]{{2,4}}[.)])[\"“‘]?(?:{_FIRST_WORD})[^\n]*+(?:\n(?=[^\n])|\Z)"
"""A line of plain sentences, by its first word."""
_SENTENCES = re.compile(rf"(?:{_SENTENCE})++\Z")
_FIELDLESS = re.compile(rf"(?:(?![^:\n]{{0,31}}:){_SENTENCE})++\Z")
"""Lines of sentences, and those of which none may be a field, `Name: value`, with a name shorter than KEY_LENGTH."""
_CODE_SIGNS = ("(", ":", "import ", "#", ";", "/", "{", "}")
"""What a line of a program has, one of them at least."""
_PROGRAM_ENDS = frozenset("()[]{},;:")
_SIGNS, _ENDINGS, _LEAST_PROGRAM = 0.5, 0.3, 3
"""Signs for each line, share of lines with such an end, and lines, from which on a block is one of a program."""
# Characters of which one begins what a pattern matches: most lines begin with another, and are not matched.
_ITEM_BEGINS, _ALONE_BEGINS, _CODE_BEGINS = "-*+•‣▪◦–—[o", "#=*_~-<[:.@$", "dcif#rw/}"
_CODE_ENDS = "{};\\"
_ODD_ENDS = frozenset(" -‐‑–\xad")
"""Ends of lines that are joined otherwise than by a space."""
_INDENTS, _FRONT_MARKS = ("    ", "\t"), ("---", "+++")
SIGNATURE = ("--", "-- ")
"""Lines above the signature of a message."""


def unwrapped(text: str, markdown: bool = False) -> str:
    """Return a text with the lines of each paragraph in one. The time is linear in its length."""
    text_end = len(text) if text.endswith("\n\n") else len(text) - text.endswith("\n")
    if text.count("\n", 0, text_end) == 2 * text.count("\n\n"):  # no line has another below it
        return text
    text = with_whole_words(text) if "-\n" in text else text
    text, signature = (text, "") if markdown else _signed(text)
    if markdown and text.startswith(_FRONT_MARKS):
        return _unwrapped(text, markdown)
    out, others, size, is_open = list[str](), list[str](), 0, False
    for block, end in _blocks(text):
        plain = None if is_open else _plain(block, markdown)
        if plain is None and not (is_open or markdown):
            plain = _indented(block) if block.startswith(_INDENTS[0]) else None
            if plain is None and not others and _is_program(block):
                plain = block
        if plain is None:
            others += [block, end]
            size += len(block)
            is_open = _is_left_open(block, is_open)
        if others and (plain is not None or (size >= LONGEST and not is_open)):
            out.append(_unwrapped("".join(others), markdown))
            others, size = [], 0
        if plain is not None:
            out += [plain, end]
    out.append(_unwrapped("".join(others), markdown))
    return "".join(out) + signature


def unwrapped_in_place(text: str) -> str:
    """Return a text that was sent rather than read from a file.

    Breaks of paragraphs that are clearly prose, wrapped at a width, become spaces, so that every offset stays what it
    is for the sender. All other breaks stay: nobody knows what the text is.
    A text with carriage returns stays as it is.
    """
    if "\r" in text or "\n" not in text.strip("\n"):
        return text
    parts, is_open = list[str](), False
    for block, end in _blocks(text):
        body = block.rstrip("\n")
        prose = None if is_open or body.count("\n") == 0 else _plain(body, markdown=False)
        is_open = _is_left_open(block, is_open)
        parts += [prose if prose and _is_wrapped(body, prose) else body, block[len(body) :], end]
    return "".join(parts)


def _is_wrapped(block: str, prose: str) -> bool:
    """Whether a block of full lines is wrapped prose, rather than lines that are sentences each. prose: it, joined."""
    lines = block.split("\n")
    if len(prose) != len(block) or max(map(len, lines)) > _WIDEST:
        return False
    return not all(line.endswith(_SENTENCE_ENDS) for line in lines[:-1])


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield what stands between empty lines, and what ends it. A long block is cut at the end of a line."""
    start = 0
    while start < len(text):
        end = text.find("\n\n", start, start + LONGEST)
        after = end + 2
        if end < 0:
            end = text.find("\n", start + LONGEST - 2)
            after = end + 1
        if end < 0:
            yield text[start:], ""
            return
        yield text[start:end], text[end:after]
        start = after


def _signed(text: str) -> tuple[str, str]:
    """Return a message, and its signature."""
    at = min((at for mark in SIGNATURE if (at := text.find(f"\n{mark}\n")) >= 0), default=len(text))
    return text[:at], text[at:]


def _plain(block: str, markdown: bool) -> str | None:
    """Return a paragraph of plain sentences in one line; None for any other block, which is looked at line by line.

    Most paragraphs are plain, and these few steps take a tenth of the time.
    """
    if "  " in block or "\t" in block or "|" in block or "\\" in block or "<br" in block:
        return None
    if block[:2] == "> " and block.count("\n") == block.count("\n> "):
        inner = _plain(block[2:].replace("\n> ", "\n"), markdown)
        return None if inner is None or "\n" in inner else f"> {inner}"
    plain = _FIELDLESS.match(block) if ":" in block else _SENTENCES.match(block)
    if plain is None:
        return None
    if "\n" not in block:
        return block
    lines = block.split("\n")
    widths = list(map(len, lines))
    width = max(widths)
    if width <= VERSE or not (block.isascii() or max(block) < WIDE_FROM):
        return None
    if not _ODD_ENDS.isdisjoint([line[-1] for line in lines]):
        return None
    if not markdown:
        words = [line.find(" ") for line in lines]
        if -1 in words:
            words = [length if word < 0 else word for word, length in zip(words, widths, strict=True)]
        if min(map(add, widths, words[1:])) <= FULL * width - 1:
            return None
        if any(map(block.__contains__, _CODE_SIGNS)) and any(_is_code(line, line) for line in lines[:-1]):
            return None
    return block.replace("\n", " ")


def _indented(block: str) -> str | None:
    """Return a paragraph of plain sentences that has a margin in one line; None for any other block."""
    if block.find("\n") <= VERSE:  # as nearly all code
        return None
    body, margin = block.rstrip("\n"), " " * (len(block) - len(block.lstrip(" ")))
    if body.count("\n") != body.count(f"\n{margin}"):
        return None
    plain = _plain(body[len(margin) :].replace(f"\n{margin}", "\n"), markdown=False)
    return None if plain is None or "\n" in plain else plain + block[len(body) :]


def _is_program(block: str) -> bool:
    """Whether a block is one of a program, by the signs that its lines have and those that they end in."""
    if "=" not in block and "(" not in block:
        return False
    lines = block.split("\n")
    if sum(line[-1:] in _PROGRAM_ENDS for line in lines) < _ENDINGS * len(lines) or len(lines) < _LEAST_PROGRAM:
        return False
    signs = block.count("(") + block.count("=") + block.count("{") + block.count("_")
    return signs >= _SIGNS * len(lines) and not _has_fences(block)


def _is_left_open(block: str, is_open: bool) -> bool:
    """Whether code that this block begins, or one before it, goes on behind it."""
    if any(mark in block for mark in ("```", "~~~", "$$")):
        for line in block.split("\n"):
            is_open ^= _FENCE.match(line) is not None
    elif "<pre" in block or "</pre" in block:
        is_open = f"\n{block}".rfind("\n<pre") > block.rfind("</pre")
    return is_open


def _unwrapped(text: str, markdown: bool) -> str:
    """Unwrap a text line by line."""
    if not text:
        return ""
    out, paragraph, quoted = list[str](), list[str](), ">" in text
    for line, is_prose, is_item in _lines(text.split("\n"), markdown, _has_fences(text)):
        if is_prose and paragraph and not is_item:
            may_begin = quoted or (not markdown and line[:1].isspace())
            if not may_begin or not _begins_anew(paragraph[-1], line, markdown, quoted):
                paragraph.append(line)
                continue
        if paragraph:
            out += joined(paragraph, markdown, quoted) if len(paragraph) > 1 else paragraph
            paragraph.clear()
        (paragraph if is_prose else out).append(line)
    return "\n".join([*out, *joined(paragraph, markdown, quoted)])


def _has_fences(text: str) -> bool:
    """Whether a line of a text may begin or end code."""
    return "```" in text or "~~~" in text or "$$" in text or "<pre" in text


def _lines(lines: Sequence[str], markdown: bool, fenced: bool) -> Iterator[tuple[str, bool, bool]]:
    """Yield each line, whether it is one of a paragraph, and whether it begins an item of a list.

    fenced: Whether there may be marks of code.
    """
    fence, start, before = "", _front_matter(lines) if markdown else 0, ""
    listed = False
    for at, line in enumerate(lines):
        mark = _FENCE.match(line) if fenced else None
        if at < start or fence or mark:
            if at >= start:
                fence = _fence_behind(line, fence, mark[1] if mark else "")
            yield line, False, False
            continue
        bare = line.strip()
        first, head = bare[:1], bare[:6]
        item = _ITEM.match(line) if first in _ITEM_BEGINS or "." in head or ")" in head else None
        is_item = item is not None
        listed = is_item or (listed and (not bare or line[:1].isspace()))
        is_code = not before and not listed and line.startswith(_INDENTS)
        if is_code and not markdown:  # the first line of a paragraph may be indented
            is_code = at + 1 == len(lines) or lines[at + 1].startswith(_INDENTS)
        before = bare if not is_code else ""
        is_prose = bool(bare) and not is_code and not (first in _ALONE_BEGINS and _ALONE.match(line))
        if is_prose and ("  " in bare or "|" in bare or "\t" in line):
            is_prose = _APART.search(line, item.end() - 1 if item else 0) is None
        yield line, is_prose and (markdown or not _is_code(line, bare)), is_item


def _fence_behind(line: str, fence: str, mark: str) -> str:
    """Return the mark of the code that a line is in, as it is behind the line. mark: What the line begins with."""
    if (fence or mark) == "<pre":
        return "" if "</pre" in line else "<pre"
    return "" if fence == mark else fence or mark


def _is_code(line: str, bare: str) -> bool:
    """Whether a line is one of a program rather than of a sentence. bare: the line without white space around it."""
    end = bare[-1:]
    if end and end in _CODE_ENDS and (end != ";" or "(" in line or "=" in line):
        return True
    return bare[:1] in _CODE_BEGINS and _CODE.match(line) is not None


def _front_matter(lines: Sequence[str]) -> int:
    """Return how many lines at the start are metadata between two lines of dashes, or of plus signs."""
    if (mark := lines[0].rstrip()) not in _FRONT_MARKS:
        return 0
    return next((at + 1 for at in range(1, len(lines)) if lines[at].rstrip() == mark), 0)


def _begins_anew(before: str, line: str, markdown: bool, quoted: bool) -> bool:
    """Whether a line that is no item begins another paragraph than the one before it.

    quoted: Whether lines may be quotations.
    """
    if quoted and (quote := quote_of(line)) != quote_of(before):
        return bool(quote) or not markdown or len(before) < WIDE or before.rstrip().endswith(_SENTENCE_ENDS)
    if markdown:
        return False
    return indent_of(line) > indent_of(before) + 1 and not _ITEM.match(before)
