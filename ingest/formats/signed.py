"""What a signed e-mail says: the content of S/MIME (CMS, RFC 5652) and of text between the marks of OpenPGP.

    ContentInfo  { kind, [0] SignedData { version, digests, { kind, [0] OCTET STRING }, certificates, signers } }

Signatures are not checked. Of the grammar (BER) only that much is read which leads to the content.
"""

from __future__ import annotations

from typing import NamedTuple

from ragkv.errors import InvalidDocument

KINDS = {"application/pkcs7-mime", "application/x-pkcs7-mime"}
"""Types of parts that may be signed, encrypted or hold nothing but certificates."""

_SIGNED, _COMPRESSED = b"\x2a\x86\x48\x86\xf7\x0d\x01\x07\x02", b"\x2a\x86\x48\x86\xf7\x0d\x01\x09\x10\x01\x09"
_ENVELOPED, _AUTHENTICATED = b"\x2a\x86\x48\x86\xf7\x0d\x01\x07\x03", b"\x2a\x86\x48\x86\xf7\x0d\x01\x09\x10\x01\x17"
_NAMES = {
    "enveloped-data": _ENVELOPED,
    "authenveloped-data": _AUTHENTICATED,
    "signed-data": _SIGNED,
    "compressed-data": _COMPRESSED,
}
_ENCRYPTED = "it is encrypted; save it without encryption"
_UNREADABLE = "it is signed in a way that cannot be read (S/MIME); save its text without the signature"
_FAULTS = {
    _SIGNED: _UNREADABLE,
    _ENVELOPED: _ENCRYPTED,
    _AUTHENTICATED: _ENCRYPTED,
    _COMPRESSED: "it is compressed (S/MIME); save its text without compression",
}
_UNKNOWN = "it is signed or encrypted (S/MIME), and its kind cannot be read; save its text without either"
_DEEPEST = 16
_OID, _OCTETS, _SEQUENCE, _CONSTRUCTED = 0x06, 0x04, 0x30, 0x20
_OPEN = 0x80
"""In place of a length: the element has none."""
_PGP_SIGNED, _PGP_SIGNATURE = "-----BEGIN PGP SIGNED MESSAGE-----", "-----BEGIN PGP SIGNATURE-----"
_PGP_END = "-----END PGP SIGNATURE-----"
_PGP_ENCRYPTED = "-----BEGIN PGP MESSAGE-----"


class _Value(NamedTuple):
    """An element. Its content begins at `start`; `end` is None where marks end it that are yet to be found."""

    tag: int
    start: int
    end: int | None


def content_of(data: bytes, kind: str) -> bytes:
    """Return the message inside a signed one. kind: what its header says it is (`smime-type`).

    Raises:
        InvalidDocument: It is encrypted or compressed, or cannot be read.
    """
    found = _NAMES.get(kind.strip().lower(), b"")
    try:
        info = _value(data, 0)
        name = _value(data, info.start)
        if name.tag == _OID:
            found = data[name.start : name.end]
        if found == _SIGNED:
            return b"".join(_pieces(data, _content(data, name), 0))
    except IndexError:
        pass
    raise InvalidDocument(_FAULTS.get(found, _UNKNOWN))


def plain_of(text: str) -> str:
    """Return a text without the marks of OpenPGP around it. Raises InvalidDocument where it is encrypted."""
    if text.lstrip().startswith(_PGP_ENCRYPTED):
        raise InvalidDocument(_ENCRYPTED)
    before, mark, signed = text.partition(_PGP_SIGNED)
    if not mark or (before and not before.endswith("\n")):
        return text
    _, _, signed = signed.partition("\n\n")
    signed, _, rest = signed.partition(_PGP_SIGNATURE)
    after = rest.partition(_PGP_END)[2]
    lines = (line.removeprefix("- ") for line in signed.split("\n"))
    return before + "\n".join(lines) + after.removeprefix("\n")


def _content(data: bytes, name: _Value) -> _Value:
    """Return the octets of the content of SignedData, which follows the name of its kind."""
    version = _value(data, _value(data, _value(data, _next(data, name)).start).start)
    inner = _value(data, _next(data, _value(data, _next(data, version))))
    kind = _value(data, inner.start)
    octets = _value(data, _value(data, _next(data, kind)).start)
    if inner.tag != _SEQUENCE or kind.tag != _OID or octets.tag & 0x1F != _OCTETS:
        raise IndexError
    return octets


def _pieces(data: bytes, value: _Value, depth: int) -> list[bytes]:
    """Return the pieces of a string of octets, which may consist of others."""
    if not value.tag & _CONSTRUCTED:
        return [data[value.start : value.end]]
    pieces, at = list[bytes](), value.start
    while value.end is None or at < value.end:
        piece = _value(data, at)
        if piece.tag == 0:
            break
        if depth > _DEEPEST:
            raise IndexError
        pieces += _pieces(data, piece, depth + 1)
        at = _next(data, piece)
    return pieces


def _value(data: bytes, at: int) -> _Value:
    """Read the element at an offset. Raises IndexError where there is none."""
    tag, size, start = data[at], data[at + 1], at + 2
    if size == _OPEN:
        return _Value(tag, start, None)
    if size > _OPEN:
        count = size - _OPEN
        size, start = int.from_bytes(data[start : start + count], "big"), start + count
    if start + size > len(data):
        raise IndexError
    return _Value(tag, start, start + size)


def _next(data: bytes, value: _Value) -> int:
    """Return the offset behind an element. One without a length ends where as many ended as were opened."""
    if value.end is not None:
        return value.end
    at, depth = value.start, 1
    while depth:
        inner = _value(data, at)
        if inner.end is None:
            at, depth = inner.start, depth + 1
        else:
            at, depth = inner.end, depth - (inner.tag == 0)
    return at
