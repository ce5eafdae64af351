"""Character sets: labels are read as browsers and mail programs read them, and nothing that is not sure is guessed."""

from __future__ import annotations

import base64

import pytest

from ragkv.cli.ingest_output import reader_warnings
from ragkv.errors import InvalidDocument
from ragkv.ingest import loader
from ragkv.ingest.formats import charsets, csv, eml, epub, html
from tests.growth import grows_linearly
from tests.ingest.formats.packages import epub as book

LIMIT = 100_000
CASES = [
    ("gb2312", "陶喆和朱镕基住在深圳".encode("gb18030"), "陶喆和朱镕基住在深圳"),
    ("x-gbk", "陶喆".encode("gbk"), "陶喆"),
    ("hz-gb-2312", "起重机".encode("hz"), "起重机"),
    ("x-sjis", "①髙橋".encode("cp932"), "①髙橋"),
    ("windows-31j", "①髙橋".encode("cp932"), "①髙橋"),
    ("x-euc-jp", b"\xad\xa1" + "東京".encode("euc_jp") + b"\xfc\xe2\x8e\xb1", "①東京髙ｱ"),
    ("iso-2022-jp", b"\x1b$B-!Ec\x1b(B ok \x1b(I1\x1b(B", "①塔 ok ｱ"),
    ("euc-kr", "똠방각하".encode("cp949"), "똠방각하"),
    ("ks_c_5601-1987", "똠방".encode("cp949"), "똠방"),
    ("x-windows-949", "똠방".encode("cp949"), "똠방"),
    ("iso-2022-kr", "한국".encode("iso2022_kr"), "한국"),
    ("big5", "㗎嘅".encode("big5hkscs"), "㗎嘅"),
    ("big5-hkscs", "香港".encode("big5hkscs"), "香港"),
    ("us-ascii", b"the \x93crane\x94 \x96 5 \x80", "the “crane” – 5 €"),
    ("us-ascii", "Jürgen".encode(), "Jürgen"),
    ("iso-8859-1", b"\x93crane\x94", "“crane”"),
    ("latin1", "Grüße".encode("cp1252"), "Grüße"),
    ("iso-8859-9", b"\x93\xdd\xf0\xfe\x94", "“İğş”"),
    ("windows-1250", "Łódź".encode("cp1250"), "Łódź"),
    ("iso-8859-2", "Łódź".encode("iso8859_2"), "Łódź"),
    ("x-cp1251", "Привет".encode("cp1251"), "Привет"),
    ("koi8-ru", b"\xf0\xd2\xc9\xd7\xa6\xd4 \xae", "Привіт ў"),
    ("x-mac-ukrainian", b"\x8f\xf0\xe8\xb4\xf2 \xb6", "Приіт ґ"),
    ("x-mac-roman", "Größe".encode("mac_roman"), "Größe"),
    ("ibm866", "Привет".encode("cp866"), "Привет"),
    ("cp850", "Größe".encode("cp850"), "Größe"),
    ("dos-874", "เครน".encode("cp874"), "เครน"),
    ("win-1251", "Привет".encode("cp1251"), "Привет"),
    ("windows1251", "Привет".encode("cp1251"), "Привет"),
    ("cp-1251", "Привет".encode("cp1251"), "Привет"),
    ("koi8r", "Привет".encode("koi8_r"), "Привет"),
    ("dos-866", "Привет".encode("cp866"), "Привет"),
    ("cp-850", "Größe".encode("cp850"), "Größe"),
    ("gb-18030", "陶喆".encode("gb18030"), "陶喆"),
    ("tis-620", "เครน".encode("cp874"), "เครน"),
    ("iso-8859-8-e", "המנוף".encode("iso8859_8"), "המנוף"),
    ("iso-8859-8-i", "המנוף".encode("iso8859_8"), "המנוף"),
    ("iso-8859-6", "رافعة".encode("iso8859_6"), "رافعة"),
    ("windows-1253", "γερανός".encode("cp1253"), "γερανός"),
    ("utf-7", "Größe".encode("utf-7"), "Größe"),
    ("nonsense", "Größe".encode(), "Größe"),
    ("unknown-8bit", "倉庫".encode("iso2022_jp"), "倉庫"),
]


@pytest.mark.parametrize(("label", "data", "text"), CASES)
def test_a_label_means_what_programs_write_under_it(label: str, data: bytes, text: str) -> None:
    assert charsets.decode(data, label) == (text, "")


WRITTEN = [case for case in CASES if case[0] not in ("utf-7", "hz-gb-2312", "iso-2022-kr")]


@pytest.mark.parametrize(("label", "data", "text"), WRITTEN)
def test_pages_messages_and_books_are_in_any_character_set(label: str, data: bytes, text: str) -> None:
    page = f"<meta charset={label}><p>".encode() + data
    assert html.parse(page, LIMIT).text == text
    old = f'<meta http-equiv="Content-Type" content="text/html; charset={label}"><p>'.encode() + data
    assert html.parse(old, LIMIT).text == text
    head = f"Subject: =?{label}?B?{base64.b64encode(data).decode()}?=\r\nFrom: a@b.example\r\n"
    message = f"{head}Content-Type: text/plain; charset={label}\r\n\r\n".encode() + data
    parsed = eml.parse(message, LIMIT)
    assert (parsed.title, parsed.text.rpartition("\n\n")[2]) == (text, text)
    chapter = f'<?xml version="1.0" encoding="{label}"?><html><body><p>'.encode() + data + b"</p></body></html>"
    assert epub.parse(book({"a.xhtml": chapter}), LIMIT).text == text


@pytest.mark.parametrize(
    ("label", "data", "text"),
    [
        ("big-5", "香港".encode("big5"), "香港"), ("GB 2312", "陶喆".encode("gbk"), "陶喆"),
        ("latin-9", b"5 \xa4", "5 €"), ("ansi-1251", "Кран".encode("cp1251"), "Кран"),
        ("x-unicode-2-0-utf-7", "Łódź".encode("utf-7"), "Łódź"),
        ("iso-8859-7", "Γεια “σας”".encode("cp1253"), "Γεια “σας”"),
        ("iso-8859-2", "„Wąż”".encode("cp1250").replace(b"\xb9", b"\xb1"), "„Wąż”"),
        ("iso-8859-2", "Wąż śpi".encode("cp1250"), "Wąż śpi"),
    ],
)  # fmt: skip
def test_labels_are_known_as_they_are_spelled_and_mean_the_set_of_windows(label: str, data: bytes, text: str) -> None:
    assert charsets.decode(data, label)[0] == text


@pytest.mark.parametrize("label", ["nonsense", "x-unknown", "rot13", "unicode_escape", "iso-2022-cn"])
def test_a_label_that_is_not_known_is_refused_and_never_guessed(label: str) -> None:
    data = "Привет".encode("cp1251")
    with pytest.raises(InvalidDocument, match=f"its character set '{label}' is not known; save it as UTF-8"):
        charsets.decode(data, label)
    with pytest.raises(InvalidDocument, match="is not known"):
        html.parse(f"<meta charset={label}><p>".encode() + data, LIMIT)


@pytest.mark.parametrize(
    "data",
    [
        "Привет из порта".encode("cp1251"), "東京".encode("cp932"), "陶喆".encode("gbk"),
        "Powódź w Łęgach, wąż".encode("cp852"), "γερανός".encode("cp1253"), "Jürgen aus Köln".encode("mac_roman"),
    ],
)  # fmt: skip
def test_words_that_no_western_language_has_are_refused_without_a_label(data: bytes) -> None:
    with pytest.raises(InvalidDocument, match="names no character set"):
        html.parse(b"<p>" + data, LIMIT)


def test_western_text_without_a_label_is_read() -> None:
    words = "Grüße – “so” kostet’s 5 € à Orléans"
    assert html.parse(f"<p>{words}".encode("cp1252"), LIMIT).text == words


def test_more_than_one_in_a_hundred_that_cannot_be_read_is_refused() -> None:
    def message(count: int) -> bytes:
        head = b"Subject: a\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
        return head + b"\xff" * count + b"a" * (200 - count)

    assert eml.parse(message(2), LIMIT).text.count("\ufffd") == 2
    with pytest.raises(InvalidDocument, match="not text in utf-8"):
        eml.parse(message(3), LIMIT)


def test_a_page_that_declares_its_set_in_a_comment_does_not_declare_it() -> None:
    assert html.parse("<!-- <meta charset=koi8-r> --><p>Größe".encode(), LIMIT).text == "Größe"


@pytest.mark.parametrize(
    ("head", "subject"),
    [
        (b"Subject: M\xfcller zahlt\r\nContent-Type: text/plain; charset=iso-8859-1", "Müller zahlt"),
        (b"Subject: \xd0\xcb\xc1\xce\r\nContent-Type: text/plain; charset=koi8-r", "пкан"),
        ("Subject: Müller".encode(), "Müller"),
        (b"Subject: =?x-sjis?B?k4yL?= =?x-sjis?B?nik=?=", "東京)"),
        (b"Subject: a =?windows-874?Q?=E0=A4?= b =?x-cp1251?Q?=CF=F0_=E8?=", "a เค b Пр и"),
        (b"Subject: =?iso-8859-1?B?k2NyYW5llCCWIDUggA==?=", "“crane” – 5 €"),
    ],
)
def test_headers_are_in_any_character_set(head: bytes, subject: str) -> None:
    assert eml.parse(head + b"\r\n\r\nJa", LIMIT).title == subject


def test_names_of_attachments_are_in_any_character_set() -> None:
    part = b"--b\r\nContent-Type: application/pdf\r\nContent-Disposition: attachment; filename*=windows-874''%E0%A4\r\n"
    head = b"Subject: a\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n"
    assert eml.parse(head + part + b"\r\nx\r\n--b--\r\n", LIMIT).text.endswith("Attachments: เค")
    for name in (
        b"*0*=windows-874''%E0%A4;\r\n filename*1*=%C3%B9; filename*2=\" 5.pdf\"",
        b"*0*=utf-8''%E0; filename*1*=%B9%80",
    ):
        more = part.replace(b"*=windows-874''%E0%A4", name)
        assert eml.parse(head + more + b"\r\nx\r\n--b--\r\n", LIMIT).text.endswith(("เครน 5.pdf", "Attachments: เ"))


PLAIN = {
    "shift_jis": ("cp932", "名前,町\n髙橋,大阪\n"),
    "euc-jp": ("euc_jp", "氏名,部署\n鈴木一郎,総務部\n"),
    "gb18030": ("gb18030", "姓名,城市\n陶喆,深圳\n"),
    "big5": ("big5", "姓名,城市\n陳大文,香港\n"),
    "euc-kr": ("cp949", "이름,도시\n김철수,서울\n"),
    "windows-1251": ("cp1251", "Имя,Город\nПетр,Москва\nАнна,Казань\n"),
    "koi8-u": ("koi8_r", "Имя,Город\nПетр,Москва\nАнна,Казань\n"),
    "ibm866": ("cp866", "Имя,Город\nПетр,Москва\nАнна,Казань\n"),
    "iso-8859-5": ("iso8859_5", "Имя,Город\nПетр,Москва\nАнна,Казань\n"),
    "windows-1253": ("cp1253", "Όνομα,Πόλη\nΓιώργος,Αθήνα\nΜαρία,Πάτρα\n"),
    "windows-1252": ("cp1252", "Name,Ort\nJürgen,Köln\n"),
    "iso-2022-jp": ("iso2022_jp", "名前,町\n高橋,大阪\n"),
    "utf-16": ("utf-16", "Имя,Город\nПетр,Москва\n"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_file_is_in_the_set_that_its_characters_show(name: str) -> None:
    codec, text = PLAIN[name]
    head, first, *_ = (line.split(",") for line in text.split("\n"))
    parsed = csv.parse(text.encode(codec), LIMIT)
    assert parsed.text.startswith("\n".join(f"{key}: {value}" for key, value in zip(head, first, strict=True)))
    assert parsed.metadata["encoding"] == name
    assert name in reader_warnings(parsed.metadata)[0]
    for suffix in (".txt", ".md"):
        (document,) = loader.parse(text.replace("\n", "\r\n").encode(codec), f"a{suffix}", LIMIT)
        assert document.text == text
        assert name in reader_warnings(document.metadata)[0]


PROSE = {
    "cp932": "港の橋は有名な技師アダ・マリア・ブルックによって建てられた。価格は四万八千クローネであった。",
    "euc_jp": "港の橋は有名な技師アダ・マリア・ブルックによって建てられた。価格は四万八千クローネであった。",
    "gbk": "港口的桥是由著名工程师建造的，价格是四万八千克朗。桥的长度是一百米，每天有很多人走过。",
    "big5": "港口的橋是由著名工程師建造的，價格是四萬八千克朗。橋的長度是一百米，每天有很多人走過。",
    "cp949": "항구의 다리는 유명한 기술자가 지었다. 가격은 사만 팔천 크로네였다.",
    "cp1251": "Мост через гавань построил известный инженер, и цена была сорок восемь тысяч крон.",
    "koi8_r": "Мост через гавань построил известный инженер, и цена была сорок восемь тысяч крон.",
    "cp1253": "Η γέφυρα του λιμανιού χτίστηκε από γνωστό μηχανικό και κόστισε σαράντα χιλιάδες.",
    "cp1255": "הגשר מעל הנהר שולם על ידי העיר, והנמל נבנה על ידי המהנדסת.",
    "cp1256": "دفعت المدينة ثمن الجسر فوق النهر، وبنت المهندسة الميناء.",
    "cp1250": "Most přes řeku stál čtyřicet osm tisíc korun, žádný jiný nebyl dražší.",
    "iso8859_2": "Zażółć gęślą jaźń, łódź płynie do Gdańska.",
    "cp1257": "Rīgā ir liela noliktava, kas ļoti plaša.",
}


@pytest.mark.parametrize("codec", PROSE)
def test_prose_in_an_old_character_set_is_read_as_it_was_written(codec: str) -> None:
    (document,) = loader.parse(PROSE[codec].encode(codec), "a.txt", LIMIT)
    assert document.text == PROSE[codec]


@pytest.mark.parametrize("codec", PROSE)
def test_pages_messages_and_books_without_a_known_label_are_read_as_plain_files_are(codec: str) -> None:
    text, data = PROSE[codec], PROSE[codec].encode(codec)
    for label in ("", "<meta charset=x-unknown>", "<meta charset=utf-8>"):
        page = html.parse(f"<html>{label}<p>".encode() + data, LIMIT)
        assert page.text == text
        assert page.metadata["encoding"] in reader_warnings(page.metadata)[0]
    for label in ("", "; charset=x-unknown", "; charset=us-ascii", "; charset=utf-8"):
        message = f"From: a@b.example\r\nSubject: a\r\nContent-Type: text/plain{label}\r\n\r\n".encode() + data
        mail = eml.parse(message, LIMIT)
        assert mail.text.endswith(text)
        assert mail.metadata["encoding"] in reader_warnings(mail.metadata)[0]
    chapter = epub.parse(book({"a.xhtml": b"<html><body><p>" + data + b"</p></body></html>"}), LIMIT)
    assert (chapter.text, chapter.metadata["encoding"]) == (text, page.metadata["encoding"])


@pytest.mark.parametrize("codec", PROSE)
def test_bytes_in_headers_are_in_the_set_that_the_characters_of_the_message_show(codec: str) -> None:
    data = PROSE[codec].encode(codec)
    mail = eml.parse(b"From: a@b.example\r\nSubject: " + PROSE[codec][:4].encode(codec) + b"\r\n\r\n" + data, LIMIT)
    assert mail.title == PROSE[codec][:4].strip()
    jis = eml.parse(b"From: a@b.example\r\nSubject: " + "倉庫".encode("iso2022_jp") + b"\r\n\r\nJa", LIMIT)
    assert jis.title == "倉庫"


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("Jiří Novák, Plzeň", "cp1250"),
        ("Łódź, Żaneta", "iso8859-2"),
        ("Kovács úr Győrből", "cp1250"),
        ("Şi ţara", "cp1250"),
        ("Žemaitė", "cp1257"),
    ],
)
def test_letters_that_no_western_word_has_together_are_those_of_another_language(text: str, codec: str) -> None:
    assert charsets.detect(text.encode(codec)) == (text, codec.replace("iso", "iso-").replace("cp", "windows-"))
    mixed = "Søren Díaz aus Besançon, Él comió 3 ½ kg, Ação e lições, Malmö"
    assert charsets.detect(mixed.encode("cp1252")) == (mixed, "windows-1252")


def test_turkish_is_not_taken_for_icelandic() -> None:
    turkish, icelandic = (
        "Köprünün ücreti yüksek, kamyonlar geçemez. İğdır, şöyle",
        "Brúin er ekki ódýr fyrir þá á Garðsvík",
    )
    assert charsets.detect(turkish.encode("cp1254")) == (turkish, "windows-1254")
    assert charsets.detect(icelandic.encode("cp1252")) == (icelandic, "windows-1252")


@pytest.mark.parametrize("label", ["iso-8859-1", "windows-1252", "us-ascii", "windows-1251", "koi8-r", "windows-1258"])
def test_utf_8_under_another_label_is_read_as_utf_8_and_said(label: str) -> None:
    words = "Jürgen wohnt in Köln und zahlt 5 € für die Brücke"
    page = html.parse(f"<meta charset={label}><p>{words}".encode(), LIMIT)
    assert page.text == words
    assert page.metadata.get("encoding") == (None if label == "us-ascii" else "utf-8")


def test_a_label_that_fits_is_believed_whatever_the_characters_look_like() -> None:
    for words in ("ÀÈÌÒÙ ÄÖÜß", "àéîõü", "¿Qué? ¡Sí!"):
        page = html.parse(f"<meta charset=iso-8859-1><p>{words}".encode("cp1252"), LIMIT)
        assert (page.text, "encoding" in page.metadata) == (words, False)


def test_a_page_in_one_line_is_detected_by_its_beginning() -> None:
    page = b"<p>" + PROSE["cp932"].encode("cp932") * 2000
    assert html.parse(page, 10 * LIMIT).text == PROSE["cp932"] * 2000


@pytest.mark.parametrize(
    "data",
    [
        "Prénom: Zoé, Noël. Âge: trois ans.".encode("mac_roman"),
        "Powódź w Łęgach, wąż".encode("cp852"), "γερανός".encode("cp1253"), "Привет".encode("cp1251"),
        b"\xed\xa0\x80 half a pair", b"ab\xc3", "é".encode() * 9 + b"\xff",
        bytes(range(128, 256)) * 4,
    ],
)  # fmt: skip
def test_a_plain_file_whose_set_is_not_sure_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidDocument, match="is not UTF-8 text; save it as CSV UTF-8"):
        csv.parse(b"Name,Town\r\n" + data + b",Tarn\r\n", LIMIT)
    with pytest.raises(InvalidDocument, match="is not UTF-8 text; save it as UTF-8"):
        loader.parse(b"The town. " + data, "a.txt", LIMIT)


LATIN = (
    "Prénom,Ville\nZoé,Besançon\n", "Navn,By\nBjørn,Tromsø\nÅse,Ålesund\n", "Nafn,Bær\nÞórður,Höfn\nÆgir,Ísafjörður\n",
    "Prezzo,Nota\n5 £,perché così è più 38 m²\n½ tazza,20 °C ± 5\n",
    "Straße,Größe\nAllee • 5,3 µm ® © – „Zitat“ 10 €\n",
    "A,B\nNAÏVE ÉTÉ,À NOËL\nl’amour d’été,œuvre\n", "Gr,Maß\n1,2\n",
)  # fmt: skip


@pytest.mark.parametrize("text", LATIN)
def test_western_tables_are_taken_for_no_other_language(text: str) -> None:
    assert csv.parse(text.encode("cp1252"), LIMIT).metadata["encoding"] == "windows-1252"


@pytest.mark.parametrize(("line", "codec"), [("港の橋\n", "cp932"), ("Мост\n", "cp1251")])
def test_the_time_to_detect_grows_with_the_file(line: str, codec: str) -> None:
    def read(text: str) -> object:
        return csv.parse(f"a,b\n{text}".encode(codec), 1 << 30)

    assert grows_linearly(read, lambda count: line * count, 9000)


def test_a_table_that_is_not_utf8_says_so() -> None:
    parsed = csv.parse("Name;Ort\r\nJürgen;Köln\r\n".encode("cp1252"), LIMIT)
    assert parsed.text == "Name: Jürgen\nOrt: Köln"
    assert parsed.metadata["encoding"] == "windows-1252"
    assert csv.parse("Name\tOrt\r\nJürgen\tKöln\r\n".encode("utf-16"), LIMIT).text == "Name: Jürgen\nOrt: Köln"
