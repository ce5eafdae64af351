"""Zip archives of XML parts, as office programs and e-books write them. No part and no tree is ever whole in memory.

Tags are compared by their local names, so that transitional and strict documents read the same. No office program
declares a document type. A part that does is refused, which excludes external entities and every entity bomb. Macros,
pictures and whatever else is in the archive are never opened.
"""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from xml.parsers import expat

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.base import MAX_TITLE

UNPACKED_BYTES = 128 * 2**20
"""Most bytes of all unpacked parts that are read. Text has its own limit; this one covers the markup."""
LINK = "r:id"
"""Name of the attribute that refers to a relationship: its local name is that of another attribute."""
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


class PartHandler:
    """Handles the XML events of a part. Tags and attributes are local names."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Handle the start of an element."""

    def end(self, tag: str) -> None:
        """Handle the end of an element."""

    def text(self, text: str) -> None:
        """Handle text."""


class Link(NamedTuple):
    """A relationship.

    Attributes:
        kind: Last word of its type, such as `slide`.
        target: Name of the part that it leads to.
    """

    kind: str
    target: str


class Package:
    """An open archive.

    What reading takes grows with what is in the archive, and not with how often its parts name each other.

    Attributes:
        names: Names of its parts.
    """

    def __init__(self, archive: zipfile.ZipFile):
        self._archive, self.names = archive, frozenset(archive.namelist())
        self._unread, self._left = set(self.names), UNPACKED_BYTES

    def read(self, name: str, part: PartHandler) -> None:
        """Send the XML events of the part `name` to `part`. Raises as `open_package`.

        A missing part has none, nor has one that was read before.
        """
        if name not in self._unread:
            return
        self._unread.remove(name)
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse
        tags, keys, start, end = _LocalTags(), _LocalKeys(), part.start, part.end
        parser.StartElementHandler = lambda tag, attributes: start(
            tags[tag], {keys[key]: value for key, value in attributes.items()} if attributes else attributes
        )
        parser.EndElementHandler = lambda tag: end(tags[tag])
        parser.CharacterDataHandler = part.text
        for piece in self._pieces(name):
            parser.Parse(piece)
        parser.Parse(b"", True)

    def bytes_of(self, name: str) -> bytes:
        """Return a part. Raises as `open_package`."""
        return b"".join(self._pieces(name))

    def links(self, name: str) -> dict[str, Link]:
        """Return the relationships of a part by their ids. Those that lead out of the archive are left out."""
        folder, _, file = name.rpartition("/")
        found = _Links(folder)
        self.read(posixpath.join(folder, "_rels", f"{file}.rels"), found)
        return found.links

    def document(self, usual: str) -> str:
        """Return the name of the main part. usual: where it is if nothing says so."""
        found = _Links("")
        self.read("_rels/.rels", found)
        return next((link.target for link in found.links.values() if link.kind == "officeDocument"), usual)

    def title(self) -> str:
        """Return the title in the properties of an office document."""
        properties = _Properties()
        self.read("docProps/core.xml", properties)
        return properties.title

    def _pieces(self, name: str) -> Iterator[bytes]:
        with self._archive.open(name) as file:
            while piece := file.read(65536):
                self._left -= len(piece)
                if self._left < 0:
                    raise TooLarge(f"unpacked, its parts up to {name[:100]} have over {UNPACKED_BYTES} bytes")
                yield piece


@contextmanager
def open_package(data: bytes, kind: str, older: str = "") -> Iterator[Package]:
    """Open an archive.

    Args:
        data: The file.
        kind: What it should be, as messages call it: `Word document`.
        older: Suffix of the older format in whose container files with a password are kept; "" if there is none.

    Raises:
        InvalidDocument: The file is none, is damaged or has a password.
        TooLarge: Its parts have over UNPACKED_BYTES.
    """
    if older and data.startswith(_OLE):
        raise InvalidDocument(f"it has a password, or is an old {older}; save it as {older}x without one")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield Package(archive)
    except zipfile.BadZipFile as error:
        raise InvalidDocument(f"it is no {kind}, or a damaged one: {error}") from None
    except expat.ExpatError as error:
        raise InvalidDocument(f"it is a damaged {kind}: {error}") from None
    except NotImplementedError as error:
        raise InvalidDocument(f"it is packed in a way that is not supported: {error}") from None
    except RuntimeError as error:
        if "encrypted" not in str(error):
            raise
        raise InvalidDocument("it has a password; save it without one") from None


def target_of(folder: str, target: str) -> str:
    """Return the name of the part that a relative or absolute path inside the archive leads to."""
    return posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")


def diagrams_of(links: Mapping[str, Link]) -> list[str]:
    """Return the parts with the texts of diagrams (SmartArt): as they are drawn, or what is said of them."""
    drawn, said = (
        [link.target for link in links.values() if link.kind == kind] for kind in ("diagramDrawing", "diagramData")
    )
    return drawn or said


class _Links(PartHandler):
    def __init__(self, folder: str) -> None:
        self.links: dict[str, Link] = {}
        self._folder = folder

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "Relationship" and attributes.get("TargetMode") != "External":
            kind = attributes.get("Type", "").rpartition("/")[2]
            target = target_of(self._folder, attributes.get("Target", ""))
            self.links[attributes.get("Id", "")] = Link(kind, target)


class _Properties(PartHandler):
    def __init__(self) -> None:
        self.title = ""
        self._inside = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._inside = tag == "title"

    def end(self, tag: str) -> None:
        self._inside = False

    def text(self, text: str) -> None:
        if self._inside and len(self.title) < MAX_TITLE:
            self.title += text


class _LocalTags(dict[str, str]):
    """Local names of tags, of which a part has few."""

    def __missing__(self, name: str) -> str:
        local = self[name] = name.rpartition(" ")[2]
        return local


class _LocalKeys(_LocalTags):
    """Local names of attributes."""

    def __missing__(self, name: str) -> str:
        if name.endswith("/relationships id"):
            return LINK
        return super().__missing__(name)


def _refuse(*declared: Any) -> NoReturn:
    raise InvalidDocument("its XML declares a document type, as entity bombs do and office programs never do")
