"""CSV: each row is a paragraph that names its own cells."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.csv import DELIMITERS, parse

LIMIT = 100_000


def paragraphs(data: str) -> list[str]:
    return parse(data.encode(), LIMIT).text.split("\n\n")


def test_each_row_names_its_cells() -> None:
    parsed = parse(b'name,town,"born in"\nAda, Tarn ,1890\n\nBob,,\n"Cy ""C""","a\r\n\r\nb",1,extra\n', LIMIT)
    assert parsed.metadata == {"format": "csv", "rows": 3}
    assert parsed.title == ""
    assert parsed.text.split("\n\n") == [
        "name: Ada\ntown: Tarn\nborn in: 1890",
        "name: Bob",
        'name: Cy "C"\ntown: a\nb\nborn in: 1\ncolumn 4: extra',
    ]


@pytest.mark.parametrize("delimiter", DELIMITERS)
def test_the_delimiter_is_the_one_that_makes_rows_alike(delimiter: str) -> None:
    rows = [["name", "note"], ["Ada", "one, two; three"], ["Bob", "a|b, c; d"]]
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(rows)
    assert paragraphs(out.getvalue()) == ["name: Ada\nnote: one, two; three", "name: Bob\nnote: a|b, c; d"]


def test_one_column_is_a_table_too() -> None:
    assert paragraphs("word\none two\nthree, four\n") == ["word: one two", "word: three\ncolumn 2: four"]


def test_columns_without_a_name_have_a_number() -> None:
    assert paragraphs(",town,2019\n0,Tarn,7\n") == ["column 1: 0\ntown: Tarn\n2019: 7"]


@pytest.mark.parametrize("first", ["1890,2", "Ada,Ada", "3.5%,1.000,50"])
def test_a_first_row_that_names_nothing_is_a_row(first: str) -> None:
    assert paragraphs(f"{first}\nBob,Low\n")[-1] == "column 1: Bob\ncolumn 2: Low"
    assert len(paragraphs(f"{first}\nBob,Low\n")) == 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("# made in 2026, by Timo\nName,Town\nVala,Orrin\nTimo,Lume\n",
         "    # made in 2026 | by Timo\n\nName: Vala\nTown: Orrin\n\nName: Timo\nTown: Lume"),
        ("Name,Town\nVala,Orrin,east\nTimo\n", "Name: Vala\nTown: Orrin\ncolumn 3: east\n\nName: Timo"),
        ("p,q\nx,y,z\nw\n", "p | q\n\nx: w\n\nx | y | z"),
        ('Name,Said\nVala,"a \\"b\\", c"\n', 'Name: Vala\nSaid: a "b", c'),
        ('Name,Path\nVala,"a\\"\n', "Name: Vala\nPath: a\\"),
        ('"Name" , "Town"\n"Vala" , "Orrin"\n', "Name: Vala\nTown: Orrin"),
        ("Konto;Ort;1 234,56\n1;Orrin;-5,00\n2;Tarn;7,00\n",
         "Konto: 1\nOrt: Orrin\n1 234,56: -5,00\n\nKonto: 2\nOrt: Tarn\n1 234,56: 7,00"),
        ("List\n-----------\n| Part | No |\n-----------\n| Rope | 7 |\n+---+---+\n", "List\n\nPart: Rope\nNo: 7"),
        ("'Name','Town'\n'Vala','Orrin, East'\n", "Name: Vala\nTown: Orrin, East"),
        ("sep = ;\nName;Town\nVala;Orrin\n", "Name: Vala\nTown: Orrin"),
        ("sep=\\t\nName\tTown\nVala\tOrrin\n", "Name: Vala\nTown: Orrin"),
        ("A,A (2),A,B\n1,2,3,4\n", "A: 1\nA (2): 2\nA (3): 3\nB: 4"),
    ],
)  # fmt: skip
def test_comments_short_names_and_quotation_marks(data: str, text: str) -> None:
    assert parse(data.encode(), LIMIT).text == text


def test_a_file_in_utf_16_needs_no_mark() -> None:
    for codec in ("utf-16-le", "utf-16-be"):
        parsed = parse("Name\tTown\nJürgen\tKöln\n".encode(codec), LIMIT)
        assert (parsed.text, parsed.metadata["encoding"]) == ("Name: Jürgen\nTown: Köln", "utf-16")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a,b\n1,2\nx,\"open\n\n", "line 3 .to 4.: unexpected end of data"),
        (b'a,b\n"x"y,2\n', "line 2 .to 2.: .* expected after"),
        (b"a,b\n\xe9\xe8\xe7\xe9,1\n", "byte 4 is not UTF-8 text; save it as CSV UTF-8"),
        (b"a,b\n\0,1\n", "NUL"),
        (b"a,b\n", "no rows under its header"),
        (b" , \n\n", "empty"),
    ],
)  # fmt: skip
def test_faults_name_their_line(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_a_header_that_many_rows_repeat_is_too_large_in_time() -> None:
    with pytest.raises(TooLarge, match="100000 bytes"):
        parse(("x" * 50_000 + ",b\n" + "1,2\n" * 10_000).encode(), LIMIT)


CELLS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"], exclude_characters="\ufffd"), min_size=1).filter(
    lambda cell: cell.strip() == cell
)


@settings(deadline=None)
@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=2, max_size=6), st.sampled_from(DELIMITERS))
def test_no_cell_is_lost(rows: list[list[str]], delimiter: str) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([["p", "q", "r"], *rows])
    text = parse(out.getvalue().encode(), LIMIT).text
    assert text.removeprefix("\ufeff") == "\n\n".join(
        "\n".join(f"{name}: {cell}" for name, cell in zip("pqr", row, strict=True)) for row in rows
    )
