"""E-mail messages: the text is read once, attachments are named, and what is no message is refused."""

from __future__ import annotations

from email.message import EmailMessage

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.eml import parse

LIMIT = 100_000
HEAD = b"From: ada@tarn.example\r\nSubject: Harbour\r\n"


def message(subject: str = "Harbour", text: str = "Built in 1889.") -> EmailMessage:
    made = EmailMessage()
    made["Subject"], made["From"], made["To"] = subject, "Ada <ada@tarn.example>", "ben@tarn.example"
    made["Date"] = "Mon, 02 Jan 2006 15:04:05 +0000"
    made.set_content(text)
    return made


def test_subject_people_date_and_text_are_read() -> None:
    parsed = parse(message("Grüße vom Hafen").as_bytes(), LIMIT)
    assert parsed.text == (
        "# Grüße vom Hafen\n\nFrom: Ada <ada@tarn.example>\nTo: ben@tarn.example\n"
        "Date: Mon, 02 Jan 2006 15:04:05 +0000\n\nBuilt in 1889."
    )
    assert parsed.title == "Grüße vom Hafen"
    facts = {"from": "Ada <ada@tarn.example>", "date": "Mon, 02 Jan 2006 15:04:05 +0000"}
    assert parsed.metadata == {"format": "eml", **facts}


def test_of_plain_text_and_html_the_plain_text_is_read() -> None:
    made = message()
    made.add_alternative("<p>GONE</p>", subtype="html")
    assert parse(made.as_bytes(), LIMIT).text.endswith("\n\nBuilt in 1889.")
    empty = message(text=" ")
    empty.add_alternative("<script>GONE</script><p>Ada &amp; Ben</p>", subtype="html")
    assert parse(empty.as_bytes(), LIMIT).text.endswith("\n\nAda & Ben")


def test_a_plain_text_that_only_says_that_there_is_html_is_not_read() -> None:
    made = message(text="Your program does not show HTML. Read this online: https://tarn.example/5")
    made.add_alternative("<p>Built in 1889.</p>", subtype="html")
    assert parse(made.as_bytes(), LIMIT).text.endswith("\n\nBuilt in 1889.")
    short = message(text="Built in 1889: https://tarn.example/a.html")
    short.add_alternative("<p>GONE</p>", subtype="html")
    assert "GONE" not in parse(short.as_bytes(), LIMIT).text


@pytest.mark.parametrize(
    "page", ["<p>10<sup>6</sup> l", "<p><s>120</s> 10^6 l", "<p>10<i style='vertical-align: super'>6</i> l"]
)
def test_html_is_read_where_plain_text_lacks_what_is_off_the_line_or_struck_out(page: str) -> None:
    made = message(text="106 l, 120")
    made.add_alternative(page, subtype="html")
    assert parse(made.as_bytes(), LIMIT).text.endswith("\n\n10^6 l")


def test_empty_lines_above_the_headers_and_pages_of_xml_are_read() -> None:
    page = b"<html xmlns='http://www.w3.org/1999/xhtml'><body><p>10<sup>6</sup> l</p></body></html>"
    mail = b"\r\n\n" + HEAD + b"Content-Type: application/xhtml+xml\r\n\r\n" + page
    assert parse(mail, LIMIT).text.endswith("\n\n10^6 l")


def test_attachments_are_named_and_not_opened() -> None:
    made = message()
    made.add_attachment(b"PK\3\4", maintype="application", subtype="zip", filename="bomb.zip")
    made.add_attachment("GONE", filename="notes.txt")
    made.add_attachment(b"x", maintype="image", subtype="png")
    text = parse(made.as_bytes(), LIMIT).text
    assert text.endswith("Built in 1889.\n\nAttachments: bomb.zip, notes.txt, image/png")


def test_a_forwarded_message_has_its_own_heading() -> None:
    made = message("Outer", "See below.")
    made.add_attachment(message("Inner"))
    text = parse(made.as_bytes(), LIMIT).text
    assert text.index("# Outer") < text.index("See below.") < text.index("## Inner") < text.index("Built in 1889.")


@pytest.mark.parametrize(
    ("kind", "body", "read"),
    [
        (b"text/plain; charset=iso-8859-1", b"Gr\xfc\xdfe", "Grüße"),
        (b"text/plain; charset=nothing", "Grüße".encode(), "Grüße"),
        (b"text/plain; charset=utf-8", b"Gr\xfce" + b" and so on" * 12, "Gr\ufffde" + " and so on" * 12),
        (b"text/html; charset=iso-8859-1", b"<p>Gr\xfc\xdfe", "Grüße"),
        (b"text/plain; charset='windows-1251'", "Привет".encode("cp1251"), "Привет"),
    ],
)
def test_character_sets_are_respected(kind: bytes, body: bytes, read: str) -> None:
    assert parse(HEAD + b"Content-Type: " + kind + b"\r\n\r\n" + body, LIMIT).text.endswith(read)


def test_enriched_text_is_read_without_its_marks() -> None:
    body = b"<bold>Price</bold>\r\n\r\n\r\nIt is <fontfamily><param>Times</param>90</fontfamily>\r\ncrowns << net"
    parsed = parse(HEAD + b"Content-Type: text/enriched\r\n\r\n" + body, LIMIT)
    assert parsed.text.endswith("Price\n\nIt is 90 crowns < net")


def test_a_message_may_begin_with_a_mark_of_its_character_set() -> None:
    assert parse(b"\xef\xbb\xbf" + HEAD + b"\r\nkept", LIMIT).text.endswith("kept")


def test_malformed_headers_do_not_stop_the_rest() -> None:
    raw = b"From: <@@@\r\nTo: =?utf-8?q?=zz?= <\r\nDate: never\r\nSubject: =?x?b?////?=\r\n\r\nkept"
    assert parse(raw, LIMIT).text.endswith("kept")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\0\1\2", "no e-mail message"),
        (b"just text\n\nand more", "no e-mail message"),
        (HEAD + b"Content-Type: application/pkcs7-mime\r\n\r\nAAAA", "encrypted"),
        (HEAD + b'Content-Type: multipart/encrypted; boundary="b"\r\n\r\n--b\r\n\r\nx\r\n--b--', "encrypted"),
    ],
)
def test_other_files_are_refused_with_a_reason(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_a_long_text_is_too_large() -> None:
    with pytest.raises(TooLarge, match="over 1000 bytes"):
        parse(message(text="long " * 300).as_bytes(), 1000)
