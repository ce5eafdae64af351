"""Passages in the form in which they came: Markdown is drawn, preformatted text stands in a fixed face.

Markdown becomes a tree of elements that answer.js draws. Their names come from a list, their text is shown as text, and
they have no attributes but the first number of a list. So a document cannot add a link, a picture or a script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ragkv.passages import has_headings

Part = tuple[str, bool]
"""A part of a text, and whether it is marked."""
Node = Any
"""A text, or [tag, attributes, nodes]."""

FIXED, DRAWN, PROSE = "monospaced", "drawn", "prose"
"""Forms of a passage: a fixed face, a tree of elements, or text as it is."""
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Stand around marked words while Markdown is parsed: private characters, which no syntax knows."""
_MARKS = re.compile("([\ue000\ue001])")
_TAGS = frozenset(
    "p h1 h2 h3 h4 h5 h6 ul ol li blockquote em strong s table thead tbody tr th td hr br pre code".split()
)
_LINE_START = re.compile(r"(?:[ \t]*(?:#{1,6}|[-*+>|]|\d{1,9}[.)])(?=[ \t]|$))*[ \t]*")
"""What makes a line a heading, an item, a quotation or a row. A mark stands behind it."""
_COLUMNS = re.compile(r"\S(?:[ ]{2,}|\t)\S|^(?: {4}|\t)\S|[│┃|+]-{2,}|[┌└├─]")
"""What a line of a table, of a drawing or of code has, and prose has not."""
_SHARE = 0.3
"""Share of lines like this from which on a text is preformatted."""


def form_of(document_id: str, metadata: Mapping[str, Any], text: str) -> str:
    """Return the form of a passage: FIXED, DRAWN or PROSE.

    Args:
        document_id: Its document.
        metadata: Of the document.
        text: Text of the passage.
    """
    if _OPEN in text or _CLOSE in text:
        return PROSE
    if has_headings(document_id, metadata):
        return DRAWN
    lines = [line for line in text.splitlines() if line.strip()]
    columns = sum(bool(_COLUMNS.search(line)) for line in lines)
    return FIXED if columns >= 2 and columns >= _SHARE * len(lines) else PROSE


def drawn(parts: Sequence[Part]) -> list[Node]:
    """Return a passage of Markdown as a tree of elements.

    Args:
        parts: Its text, with the parts that are marked.
    """
    return _Tree().nodes(_parser().parse(_with_signs(parts)))


def _with_signs(parts: Sequence[Part]) -> str:
    """Join the parts, with signs around those that are marked."""
    text = ""
    for part, marked in parts:
        if not marked or not part.strip():
            text += part
            continue
        line = text[text.rfind("\n") + 1 :]
        # At the start of a line a sign would hide what makes it a heading or an item
        start = _LINE_START.match(part) if _LINE_START.fullmatch(line) else None
        lead = part[: start.end()] if start else ""
        words = part[len(lead) :]
        body = words.rstrip()
        text += f"{lead}{_OPEN}{body}{_CLOSE}{words[len(body) :]}" if body else part
    return text


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class _Tree:
    """Makes the tree of one passage. `marked` lasts from the sign of a beginning to that of an end."""

    def __init__(self) -> None:
        self._marked = False

    def nodes(self, tokens: Sequence[Token]) -> list[Node]:
        """Return the nodes of tokens, in which each opening one has its closing one."""
        stack: list[list[Node]] = [[]]
        for token in tokens:
            if token.nesting == 1:
                stack.append([])
            elif token.nesting == -1:
                inside = stack.pop()
                stack[-1] += self._element(token, inside)
            else:
                stack[-1] += self._alone(token)
            if token.nesting == 1 and token.tag == "ol" and (first := token.attrs.get("start")) is not None:
                stack[-1].append(first)
        return stack[0]

    def _element(self, token: Token, inside: list[Node]) -> list[Node]:
        attributes: dict[str, int] = {}
        if token.tag == "ol" and inside and isinstance(inside[0], int):
            attributes = {"start": inside.pop(0)}
        if token.hidden or token.tag not in _TAGS:  # a paragraph of a tight list; a link, of which the words stay
            return inside
        return [[token.tag, attributes, inside]]

    def _alone(self, token: Token) -> list[Node]:
        if token.type == "inline":
            return self.nodes(token.children or [])
        if token.type in ("fence", "code_block"):
            return [["pre", {}, [["code", {}, self._text(token.content.rstrip("\n"))]]]]
        if token.type == "code_inline":
            return [["code", {}, self._text(token.content)]]
        if token.type in ("hardbreak", "hr"):
            return [["br" if token.type == "hardbreak" else "hr", {}, []]]
        return self._text("\n" if token.type == "softbreak" else token.content)

    def _text(self, text: str) -> list[Node]:
        """Return a text as nodes, the marked parts of it as `mark`."""
        found: list[Node] = []
        for piece in _MARKS.split(text):
            if piece in (_OPEN, _CLOSE):
                self._marked = piece == _OPEN
            elif piece:
                found.append(["mark", {}, [piece]] if self._marked and piece.strip() else piece)
        return found
