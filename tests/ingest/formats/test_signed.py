"""Signed messages are read, and what is refused is refused for what it is."""

from __future__ import annotations

import base64

import pytest

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats.eml import parse
from ragkv.ingest.formats.signed import content_of

LIMIT = 100_000
DATA, SIGNED = "2a864886f70d010701", "2a864886f70d010702"
ENVELOPED, COMPRESSED = "2a864886f70d010703", "2a864886f70d0109100109"
INNER = b"Content-Type: text/plain; charset=utf-8\r\n\r\nThe crane lifts nine tons.\r\n"


def element(tag: int, content: bytes, open_ended: bool = False) -> bytes:
    """Make an element, with its length or with an end."""
    if open_ended:
        return bytes((tag, 0x80)) + content + b"\0\0"
    size = len(content)
    length = bytes((size,)) if size < 128 else b"\x83" + size.to_bytes(3, "big")
    return bytes((tag,)) + length + content


def name(kind: str) -> bytes:
    return element(6, bytes.fromhex(kind))


def signed(content: bytes, open_ended: bool = False) -> bytes:
    """Make a signed message without signers. open_ended: as programs write that do not know the length."""
    octets = element(4, content)
    if open_ended:
        octets = element(0x24, element(4, content[:9]) + element(4, content[9:]), True)
    inner = element(0x30, name(DATA) + element(0xA0, octets, open_ended), open_ended)
    body = element(2, b"\1") + element(0x31, b"", open_ended) + inner + element(0x31, b"")
    return element(0x30, name(SIGNED) + element(0xA0, element(0x30, body, open_ended), open_ended), open_ended)


def message(data: bytes, more: str = "; smime-type=signed-data", kind: str = "application/pkcs7-mime") -> bytes:
    head = f"From: a@b.example\r\nSubject: Crane\r\nContent-Type: {kind}{more}\r\nContent-Transfer-Encoding: base64"
    return f"{head}\r\n\r\n".encode() + base64.encodebytes(data)


@pytest.mark.parametrize("open_ended", [False, True])
@pytest.mark.parametrize("more", ["", "; smime-type=signed-data", "; smime-type=enveloped-data"])
@pytest.mark.parametrize("kind", ["application/pkcs7-mime", "application/x-pkcs7-mime"])
def test_a_signed_message_is_read(open_ended: bool, more: str, kind: str) -> None:
    text = parse(message(signed(INNER, open_ended), more, kind), LIMIT).text
    assert text.endswith("From: a@b.example\n\nThe crane lifts nine tons.")


def test_a_signed_message_may_be_a_file_of_no_kind() -> None:
    made = message(signed(INNER), '; name="smime.p7m"', "application/octet-stream")
    assert parse(made, LIMIT).text.endswith("nine tons.")


def test_what_is_signed_may_have_parts_and_be_signed() -> None:
    parts = b"--b\r\nContent-Type: text/plain\r\n\r\nNine tons.\r\n--b--\r\n"
    many = b"Content-Type: multipart/mixed; boundary=b\r\n\r\n" + parts
    twice = message(signed(message(signed(many))))
    assert parse(twice, LIMIT).text.endswith("Nine tons.")


def test_messages_that_are_signed_without_end_are_refused() -> None:
    made = INNER
    for _ in range(18):
        made = message(signed(made))
    with pytest.raises(InvalidDocument, match="over 16 signed messages"):
        parse(made, LIMIT)


def test_certificates_are_an_attachment() -> None:
    head = b"Subject: a\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n\r\nNine tons.\r\n--b\r\n"
    part = b"Content-Type: application/pkcs7-mime; smime-type=certs-only; name=smime.p7c\r\n\r\nAAAA\r\n--b--\r\n"
    assert parse(head + part, LIMIT).text.endswith("Nine tons.\n\nAttachments: smime.p7c")


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (element(0x30, name(ENVELOPED)), "", "it is encrypted; save it without encryption"),
        (element(0x30, name(ENVELOPED)), "signed-data", "it is encrypted"),
        (element(0x30, name(COMPRESSED)), "", "it is compressed"),
        (element(0x30, name(SIGNED)), "", "it is signed in a way that cannot be read"),
        (signed(INNER)[:60], "signed-data", "it is signed in a way"),
        (b"", "signed-data", "it is signed in a way"),
        (b"", "enveloped-data", "it is encrypted"),
        (b"\0\0\0", "", "it is signed or encrypted"),
        (b"\x30\x80" * 50_000, "", "it is signed or encrypted"),
        (b"\x30\xff" + b"\xff" * 200, "", "it is signed or encrypted"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words_that_are_true(data: bytes, kind: str, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        content_of(data, kind)


def test_text_between_the_marks_of_openpgp_is_read_without_them() -> None:
    made = (
        "Subject: a\r\n\r\n-----BEGIN PGP SIGNED MESSAGE-----\r\nHash: SHA256\r\n\r\n- -- Ada\r\nNine tons.\r\n"
        "-----BEGIN PGP SIGNATURE-----\r\n\r\niQEz\r\n-----END PGP SIGNATURE-----\r\n"
    )
    assert parse(made.encode(), LIMIT).text == "# a\n\n-- Ada\nNine tons."
    with pytest.raises(InvalidDocument, match="it is encrypted"):
        parse(b"Subject: a\r\n\r\n-----BEGIN PGP MESSAGE-----\r\n\r\nhQEM\r\n-----END PGP MESSAGE-----\r\n", LIMIT)
