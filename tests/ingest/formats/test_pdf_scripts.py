"""PDF: text above and below the line keeps figures and words what they are."""

from __future__ import annotations

import pytest

from ragkv.ingest.formats.pdf import parse
from tests.growth import grows_linearly
from tests.ingest.formats.files import IMAGE, pdf, stream

LIMIT = 1 << 24
Run = tuple[str, int, int]
"""Text, size of its font, and how far it is raised."""


def on(text: str) -> Run:
    return text, 12, 0


def up(text: str) -> Run:
    return text, 8, 5


def low(text: str) -> Run:
    return text, 8, -3


def painted(*runs: Run) -> str:
    return " ".join(f"/F1 {size} Tf {rise} Ts ({text}) Tj" for text, size, rise in runs)


def shown(*runs: Run) -> str:
    return parse(pdf(stream(f"BT 72 720 Td {painted(*runs)} ET".encode())), LIMIT).text


FIGURES = [
    ((on("holds 10"), up("6"), on(" litres")), "holds 10^6 litres"),
    ((on("10"), up("-6"), on(" mol")), "10^-6 mol"),
    ((on("H"), low("2"), on("O only")), "H2O only"),
    ((on("in 1987"), up("3"), on(".")), "in 1987 [3]."),
    ((on("in"), ((") Tj 0 -20 Td (1987"), 12, 0), up("3"), on(".")), "in\n1987 [3]."),
    ((on("the year 1987 and 12"),), "the year 1987 and 12"),
    ((on("Room 12"), ("34", 8, 0)), "Room 1234"),
    ((on("5 m"), up("2"), on(" of land")), "5 m^2 of land"),
    ((on("x"), low("1"), on(" and x"), low("2")), "x_1 and x_2"),
    ((on("holds 10"), ("6", 12, 5), on(" litres")), "holds 10^6 litres"),
]
LETTERS = [
    ((on("the 1"), up("st"), on(" of May")), "the 1st of May"),
    ((on("at 20 "), up("o"), on("C it is")), "at 20 °C it is"),
    ((on("x"), up("n"), on(" is")), "x^n is"),
    ((on("x"), low("i"), on(" is")), "x_i is"),
    ((on("a"), low("ij"), on(" is")), "a_ij is"),
    ((on("v"), low("max"), on(" is 5")), "v_max is 5"),
    ((on("x"), up("n+1"), on(" is")), "x^(n+1) is"),
    ((on("x"), low("i"), up("2"), on(" is")), "x_i^2 is"),
    ((on("e"), up("-x"), on(" dx")), "e^-x dx"),
    ((on("M"), up("me"), on(" Brook")), "Mme Brook"),
    ((on("Tarn"), up("TM"), on(" is")), "TarnTM is"),
    ((on("Na"), up("+"), on(" and SO"), low("4"), up("2-"), on(" ions")), "Na^+ and SO4^2- ions"),
    ((on("said"), up("*"), on(" that")), "said [*] that"),
    ((on("in 1987"), up("a"), on(".")), "in 1987 [a]."),
    ((on("cost 120"), up("b"), on(" crowns")), "cost 120 [b] crowns"),
    ((on("in 1987"), up("3,4"), on(".")), "in 1987 [3,4]."),
    ((on("in 10 "), up("6"), on(" cases")), "in 10^6 cases"),
    ((up("3"), on(" See there.")), "[3] See there."),
]
LEVEL = [
    ((on("wor"), ("dy", 8, 0), on(" is")), "wordy is"),
    (((("H", 14, 0)), ("EADING", 10, 0)), "HEADING"),
    ((("T", 40, 0), ("he harbour of Tarn", 12, 20)), "T he harbour of Tarn"),
    ((on("wide"), (") Tj 200 0 Td (column", 8, 4)), None),
    ((on("wide"), up("a note that is far too long for a mark")), None),
]


@pytest.mark.parametrize(("runs", "text"), [*FIGURES, *LETTERS, *LEVEL])
def test_what_is_off_the_line_of_a_page_is_marked(runs: tuple[Run, ...], text: str | None) -> None:
    if text is None:
        assert not {"^", "_", "["} & set(shown(*runs))
    else:
        assert shown(*runs) == text


def test_a_font_that_the_page_scales_has_the_size_that_is_seen() -> None:
    page = "BT /F1 1 Tf 12 0 0 12 72 720 Tm (holds x) Tj 8 0 0 8 115 725 Tm (n) Tj 12 0 0 12 121 720 Tm (of it) Tj ET"
    assert "x^n" in parse(pdf(stream(page.encode())), LIMIT).text
    same = page.replace("8 0 0 8 115 725", "12 0 0 12 115 720")
    assert "^" not in parse(pdf(stream(same.encode())), LIMIT).text


def test_a_form_inside_a_page_is_read_likewise() -> None:
    entries = b"/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Matrix [2 0 0 2 0 0]"
    entries += b" /Resources << /Font << /F1 3 0 R >> >>"
    inner = stream(f"BT 30 300 Td {painted(on('holds 10'), up('6'), on(' litres'))} ET".encode(), entries)
    page = pdf(stream(b"/I1 Do"))
    assert parse(page.replace(IMAGE[:-2] + b">>\nstream\n\0\nendstream", inner), LIMIT).text == "holds 10^6 litres"


def at_places(*letters: tuple[int, int, str]) -> bytes:
    """Make a page that paints each text on its own: left, above the bottom, text."""
    return stream(" ".join(f"BT /F1 12 Tf {x} {y} Td ({text}) Tj ET" for x, y, text in letters).encode())


def test_letters_that_are_painted_one_by_one_are_lines() -> None:
    cells = [(72, 720, "oil"), (200, 720, "5"), (320, 720, "7"), (72, 700, "a"), (200, 700, "8"), (320, 700, "9")]
    assert parse(pdf(at_places(*cells)), LIMIT).text == "oil 5 7\na 8 9"
    column = [(300, 720 - 12 * at, letter) for at, letter in enumerate("CRANES")]
    assert parse(pdf(at_places(*column)), LIMIT).text == "CRANES"


LEFT = ("The harbour of Tarn was built by", "people of the north and", "in the year of the flood.")
RIGHT = ("The crane was bought by the", "town for all of its ships, and", "it is blue.")


@pytest.mark.parametrize(("left", "joined"), [(LEFT, True), (tuple(map(str.title, LEFT)), False)])
def test_columns_that_are_painted_line_by_line_are_read_one_by_one(left: tuple[str, ...], joined: bool) -> None:
    pieces = [
        (x, 720 - 14 * at, text)
        for at, row in enumerate(zip(left, RIGHT if joined else map(str.title, RIGHT), strict=True))
        for x, text in zip((72, 320), row, strict=True)
    ]
    text = parse(pdf(at_places(*pieces)), LIMIT).text
    assert (" ".join(text.split()) == " ".join((*LEFT, *RIGHT))) is joined
    assert (f"{left[0]} The Crane" in text) is not joined


def test_a_script_that_is_painted_letter_by_letter_is_whole() -> None:
    assert shown(on("said"), up("["), up("2"), up("]"), on(" so")) == "said [2] so"
    spaced = (on("2"), up("1"), up("0"), on(" "), on("= 1024"))
    assert shown(*spaced) == "2^10 = 1024"


@pytest.mark.parametrize("runs", [(on("x"), up("n")), (on("x"), low("1"), up("2")), (on("a b"), ("c", 9, 0))])
def test_the_time_grows_with_the_pages(runs: tuple[Run, ...]) -> None:
    page = stream(f"BT 72 720 Td {painted(*runs * 20)} ET".encode())
    assert grows_linearly(lambda pages: parse(pdf(*pages), LIMIT), lambda count: [page] * count, 40)
