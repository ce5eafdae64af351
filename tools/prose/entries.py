"""Readers of entries: dictionaries, help texts of games, and SWORD modules."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from tools.prose.sections import Section, clean, entitled, untag

_LINK = re.compile(r"\{([^{}]*)\}")
_LABEL = re.compile(r"^(?:\d\. )?(?:<[^<>]*> ?|\[[^\[\]]*\] )+")
_DATED = re.compile(r"^\(\d{4}-\d\d-\d\d\)$|^\{?\(?https?:|^\[.*\]\.?$|^\[1913 Webster\]$|^\(https?:.*\)\.?$")
_FREECOL = re.compile(
    r"^(model\.(?:foundingFather|nation|building|goods|tile|unit)\.\w+)\.\w*(?:text|[dD]escription)=(.*)", re.M
)
_STRING = re.compile(r'_\("((?:[^"\\]|\\.)*)"\)', re.S)


def dictionary(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Entries of a dictd file: a headword at the margin, its text indented."""
    head, lines = "", list[str]()
    for line in [*data.splitlines(), "end"]:
        if line[:1].strip():
            if lines:
                yield _entry(document, head, lines, book)
            head, lines = line.strip(), []
        elif head:
            lines.append(line)


def _entry(document: str, head: str, lines: list[str], book: str) -> Section:
    """A headword's paragraphs without links, labels and dates."""
    paragraphs = list[str]()
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        paragraph = re.sub(r"^\s+[^\[\]]*\]\s+(?=\d\.|[A-Z])", "", paragraph)  # what is left of an etymology
        text = _LABEL.sub("", clean(_LINK.sub(r"\1", paragraph))).replace("__", "")
        text = re.sub(r"\s?\((?:https?:[^()]*|\d{4}-\d\d-\d\d)\)|\[1913 Webster\]", "", text)
        if text and not _DATED.match(text) and not re.match(r"/.*/,? ?\S{0,4}$|[a-z]{1,4}\.$", text):
            paragraphs.append(text.strip())
    return Section(document, entitled(book, re.sub(r"\s*\\.*|\s+/.*/.*", "", head)), tuple(paragraphs))


def devil(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Entries of the Devil's Dictionary: a headword in capitals begins a paragraph."""
    for entry in re.split(r"\n(?=[A-Z][A-Z' -]+, \w)", data):
        head = entry.split(",")[0].strip()
        if len(head) < 40:
            yield Section(document, entitled(book, head.capitalize()), tuple(map(clean, re.split(r"\n\s*\n", entry))))


def ruleset(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Named sections of Freeciv: what `legend`, `helptext` and `text` say."""
    for block in re.split(r"\n(?=\[\w+\])", data):
        name = re.search(r'\nname\s*=\s*_\("(?:\?[^:"]*:)?([^"]+)"', block)
        said = re.search(r"\n(?:legend|helptext|text)\s*=\s*(.*?)(?=\n\w+\s*=|\n\[|\Z)", block, re.S)
        if name and said:
            whole = "\n\n".join(each.replace("\\\n", "") for each in _STRING.findall(said[1]))
            parts = whole.replace("\\n", "\n").replace('\\"', '"').split("\n\n")
            yield Section(document, entitled(book, name[1]), tuple(map(clean, parts)))


def described(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Entries between lines of per cent signs: a name, then its description."""
    for entry in re.split(r"\n%{2,}\n", data):
        parts = [part for part in re.split(r"\n\s*\n", entry) if not part.startswith("#")]
        if len(parts) > 1 and len(parts[0]) < 40:
            yield Section(document, entitled(book, parts[0].splitlines()[-1]), tuple(clean(part) for part in parts[1:]))


def planets(document: str, data: str, book: str = "") -> Iterator[Section]:
    """What Endless Sky tells of every planet."""
    for block in re.split(r"\n(?=\S)", data):
        name = re.match(r'planet (?:"([^"]+)"|(\S+))', block)
        if name:
            told = re.findall(r"\n\t(?:description|spaceport) `(.*?)`", block)
            yield Section(document, entitled(book, name[1] or name[2]), tuple(map(clean, told)))


def strings(document: str, data: str, book: str = "") -> Iterator[Section]:
    """Long texts of a table of keys and strings (FreeOrion, FreeCol)."""
    for key, text in re.findall(r"^([A-Z][A-Z0-9_]+)\n'''(.*?)'''", data, re.S | re.M):
        name = key.replace("_TEXT", "").replace("_DESC", "").replace("_", " ").capitalize()
        parts = [re.sub(r"<[^>]*>", "", part) for part in text.split("\n\n") if "[[" not in part]
        yield Section(document, entitled(book, name), tuple(map(clean, parts)))
    for key, text in _FREECOL.findall(data):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key.split(".")[-1])
        yield Section(document, entitled(book, name[:1].upper() + name[1:]), (clean(text.replace("\\n", " ")),))


def hacks(document: str, data: str, book: str = "") -> Iterator[Section]:
    """The description of a screen saver."""
    name = re.search(r'_label="([^"]+)"', data)
    said = re.search(r"<_description>(.*?)</_description>", data, re.S)
    if name and said:
        yield Section(document, entitled(book, name[1]), tuple(map(untag, re.split(r"\n\s*\n", said[1]))))


def sword(document: str, path: Path, book: str = "") -> Iterator[Section]:
    """Chapters of a compressed SWORD module. path: its file of blocks (`*.?zz`)."""
    packed = path.read_bytes()
    index = path.with_name(path.name[:-1] + "s").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", index):
        if not size:
            continue
        text = zlib.decompress(packed[offset : offset + size]).decode("utf-8", "replace")
        for chapter in re.split(r"(?=<chapter [^>]*sID=)", text):
            place = re.search(r'osisID="([^".]+)\.?(\d*)', chapter)
            name = f"{place[1]} {place[2]}".strip() if place else ""
            chapter = re.sub(r"<note.*?</note>|<title.*?</title>", " ", chapter, flags=re.S)
            chapter = re.sub(r'<div [^>]*type="(?:x-)?p(?:aragraph)?"[^>]*/?>|<p>|</p>|<lg[^>]*>', "\n\n", chapter)
            parts = [re.sub(r"\s+([,.;:!?])", r"\1", untag(part)) for part in chapter.split("\n\n")]
            if any(parts):
                yield Section(document, entitled(book, name), tuple(part for part in parts if part))
