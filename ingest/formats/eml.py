"""E-mail messages (RFC 5322) to text: subject, people, date, the text, and the names of what is attached.

Of a text that is there as plain text and as HTML, the plain one is read, unless it lacks what HTML raises or strikes
out. Of a signed message the content is read. A message that was forwarded inside another is read under a heading of its
own. Attachments are named and not opened.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import EmailPolicy
from typing import Any, cast

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats import charsets, signed
from ragkv.ingest.formats.base import Parsed, TextRoom, one_line, without_controls, without_headings
from ragkv.ingest.formats.flowed import enriched, flowed
from ragkv.ingest.formats.mail_headers import readable
from ragkv.ingest.wrapping import unwrapped

HEADER_CHARACTERS = 32768
"""Most characters of a header that are read: a list of a thousand people. Its grammar is slow, at worst quadratic."""
_PEOPLE = ("From", "To", "Cc", "Date")
_NEEDED = ("From", "To", "Subject", "Date")
_DECLARED = re.compile(rb"\bcharset\s{0,3}=\s{0,3}[\"']?([\w.:-]{1,40})", re.IGNORECASE)
"""The character set of the first text, in which headers are that say nothing of theirs."""
_DECLARED_WITHIN = 65536
_SINGLE_QUOTED = re.compile(r"=\s?'([\w.:-]{1,40})'")
"""A parameter as some programs quote it: `charset='gb2312'`."""
_DEEPEST = 16
"""Most signed messages inside each other."""
_STUB = 300
"""Most characters of a plain text that says no more than where to read the message."""
_ADDRESS = re.compile(r"<[^<>\s]*+>|https?://\S++")
_BETWEEN = "\n\n"
_KINDS = {"application/xhtml+xml": "text/html"}
_MARKED = re.compile(r"<(?:su[bp]|s|del|strike)[\s>]")
_RAISED = re.compile(r"vertical-align\s?:\s?su[bp]")
"""What plain text has no words for: raised, lowered and struck out text."""


class _BoundedHeaders(EmailPolicy):
    """Reads headers as the usual policy does, but a longer one as plain text, and no more of it than may be read.

    Attributes:
        declared: The character set of headers that do not say it.
    """

    declared = ""

    def header_fetch_parse(self, name: str, value: str) -> Any:
        """Return the value of a header that the message has."""
        if "='" in value and name.lower() == "content-type":
            value = _SINGLE_QUOTED.sub(r'="\1"', value[:HEADER_CHARACTERS])
        readable_value = readable(value[:HEADER_CHARACTERS], self.declared)
        if len(value) <= HEADER_CHARACTERS:
            return super().header_fetch_parse(name, readable_value)
        return " ".join(readable_value.split())


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a message. The title is its subject.

    Raises:
        InvalidDocument: The file is no message, or is encrypted.
        TooLarge: The text has over `limit` bytes.
    """
    message = _message(data.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n"))
    if not any(_header(message, name) for name in _NEEDED):
        raise InvalidDocument("it is no e-mail message: it names no sender, receiver, subject or date")
    reader = _Reader(TextRoom(limit))
    reader.write_message(message, "# ")
    facts = {name.lower(): value for name in ("From", "Date") if (value := one_line(_header(message, name)))}
    if reader.encodings:
        facts["encoding"] = ", ".join(sorted(reader.encodings))
    title = one_line(_header(message, "Subject"))
    return Parsed(title, without_controls(_BETWEEN.join(reader.blocks)), {"format": "eml", **facts})


def _message(data: bytes) -> EmailMessage:
    found = _DECLARED.search(data, 0, _DECLARED_WITHIN)
    declared = found[1].decode(errors="replace") if found else ""
    if not charsets.name_of(declared) and not data.isascii():
        declared = charsets.shown(data)
    policy = cast("Any", _BoundedHeaders)(declared=declared)
    return cast("EmailMessage", BytesParser(policy=policy).parsebytes(data))


class _Reader:
    """Writes messages into blocks of text.

    Attributes:
        blocks: What was written.
        encodings: Character sets of texts that do not declare them, as their characters show them.
    """

    def __init__(self, room: TextRoom):
        self.blocks: list[str] = []
        self.encodings = set[str]()
        self._room = room
        self._signed = 0

    def write_message(self, message: EmailMessage, mark: str) -> None:
        """Write a message. mark: of its heading."""
        attached: list[str] = []
        self._write(f"{mark}{one_line(_header(message, 'Subject')) or 'Message'}")
        people = ((name, " ".join(_header(message, name).split())) for name in _PEOPLE)
        self._write("\n".join(f"{name}: {value}" for name, value in people if value))
        self._write_part(message, attached)
        if attached:
            self._write(f"Attachments: {', '.join(attached)}")

    def _write_part(self, part: EmailMessage, attached: list[str]) -> None:
        kind = _KINDS.get(kind := part.get_content_type(), kind)
        if kind == "multipart/encrypted":
            raise InvalidDocument("it is encrypted; save it without encryption")
        if _may_be_signed(part, kind):
            self._write_signed(part, attached)
        elif kind == "message/rfc822" and part.is_multipart():
            for inner in _parts(part):
                self.write_message(inner, "## ")
        elif kind == "multipart/alternative":
            self._write_best(list(_parts(part)), attached)
        elif part.is_multipart():
            for inner in _parts(part):
                self._write_part(inner, attached)
        elif part.get_content_disposition() == "attachment" or part.get_filename() or not kind.startswith("text/"):
            attached.append(one_line(part.get_filename() or kind))
        else:
            text, encoding = _text(part, kind)
            self._write(text)
            if encoding:
                self.encodings.add(encoding)

    def _write_signed(self, part: EmailMessage, attached: list[str]) -> None:
        """Write the message that a signature encloses. Certificates alone are an attachment."""
        smime = str(part.get_param("smime-type", "")).lower()
        if smime == "certs-only" or part.get_filename("").lower().endswith(".p7c"):
            attached.append(one_line(part.get_filename(part.get_content_type())))
            return
        self._signed += 1
        if self._signed > _DEEPEST:
            raise InvalidDocument(f"over {_DEEPEST} signed messages are inside each other")
        self._write_part(_message(signed.content_of(_bytes_of(part), smime)), attached)
        self._signed -= 1

    def _write_best(self, parts: list[EmailMessage], attached: list[str]) -> None:
        """Write one of several forms of a text: the plain one if it says all, else the last, the richest one."""
        plain = [part for part in parts if part.get_content_type() == "text/plain" and _says(part, len(parts) > 1)]
        marked = [part for part in parts if plain and _is_marked(part)]
        for part in marked[-1:] or plain[:1] or parts[-1:]:
            self._write_part(part, attached)

    def _write(self, text: str) -> None:
        if text := text.rstrip().lstrip("\n"):  # a line that is indented begins with spaces
            self.blocks.append(self._room.take(text))


def _says(part: EmailMessage, is_one_of_several: bool) -> bool:
    """Whether a plain text says more than that there is another one in HTML, as those of some newsletters do."""
    text = _text(part, "text/plain")[0].strip()
    return bool(text) and not (is_one_of_several and len(text) <= _STUB and "html" in _ADDRESS.sub("", text).lower())


def _is_marked(part: EmailMessage) -> bool:
    """Whether HTML says what plain text would change: `10<sup>6</sup>` is 106 there."""
    if part.is_multipart():
        return any(map(_is_marked, _parts(part)))
    headers = {name.lower(): str(value).lower() for name, value in part.raw_items()}  # parsing them takes long
    if "html" not in headers.get("content-type", ""):
        return False
    page = str(part.get_payload()).lower()
    if "base64" in headers.get("content-transfer-encoding", ""):
        page = _bytes_of(part).decode("latin-1").lower()
    return bool("line-through" in page or _MARKED.search(page) or ("vertical-align" in page and _RAISED.search(page)))


def _parts(part: EmailMessage) -> Iterator[EmailMessage]:
    payload: Any = part.get_payload()
    yield from (each for each in payload if isinstance(each, EmailMessage))


def _text(part: EmailMessage, kind: str) -> tuple[str, str]:
    """Return the text of a part, and its character set where its characters show that and it does not declare it.

    Raises:
        InvalidDocument: Its character set is not known, or not its own.
    """
    data = _bytes_of(part)
    label = part.get_content_charset("")
    if kind == "text/html":
        from ragkv.ingest.formats import html, page_source  # messages of plain text start sooner without them

        source, encoding = charsets.decode(data, label) if label else page_source.decode(data)
        return html.parse_text(source, max(len(data) * 4, 1)).text, encoding
    text, encoding = charsets.decode(data, label) if label else charsets.detect(data)
    text = signed.plain_of(text.replace("\r\n", "\n").replace("\r", "\n"))
    if kind in ("text/enriched", "text/richtext"):
        whole = enriched(text)
    elif str(part.get_param("format", "")).lower() == "flowed":
        whole = flowed(text, str(part.get_param("delsp", "")).lower() == "yes")
    else:
        whole = unwrapped(text, markdown=kind == "text/markdown")
    return without_headings("\n".join(line.rstrip() for line in whole.split("\n"))), encoding


def _bytes_of(part: EmailMessage) -> bytes:
    payload: Any = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b""


def _may_be_signed(part: EmailMessage, kind: str) -> bool:
    """Whether a part is S/MIME: signed, encrypted, or certificates. Some programs call it a file of any kind."""
    if kind in signed.KINDS:
        return True
    return kind == "application/octet-stream" and part.get_filename("").lower().endswith(".p7m")


def _header(message: EmailMessage, name: str) -> str:
    """Return a header as text; empty where there is none or it is malformed beyond reading."""
    try:
        return str(message[name] or "")
    except Exception:  # the parser of headers raises whatever its grammar stumbles over
        return ""
