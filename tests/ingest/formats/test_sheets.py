"""Workbooks and CSV say what a reader of them sees: numbers as they are shown, and names where they belong."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import datetime

import pytest

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats import csv, xlsx
from ragkv.ingest.formats.number_formats import NumberFormat, built_in
from tests.growth import grows_linearly
from tests.ingest.formats.packages import cell, row
from tests.ingest.formats.packages import xlsx as workbook

LIMIT = 100_000
FORMATS = [
    ("00000", 1067, "01067"),
    ("00", 0, "00"),
    ("[h]:mm", 1.5, "36:00"),
    ("[hh]:mm:ss", 1.5, "36:00:00"),
    ("[h]:mm", 41.25, "990:00"),
    ("[h]:mm", -0.5, "-12:00"),
    ("[m]:ss", 1, "1440:00"),
    ("[ss]", 1, "86400"),
    ('[h]:mm" h"', 1.5, "36:00 h"),
    ('#,##0.00\\ "EUR"', 1250, "1250.00 EUR"),
    ('#,##0.00\\ "EUR"', -80, "-80.00 EUR"),
    ("[$€-407] #,##0.00", 5, "€ 5.00"),
    ("#,##0.00 [$€-1]", 5, "5.00 €"),
    ("$#,##0.00", 5, "$5.00"),
    ('0" kg"', 5, "5 kg"),
    ("0\\ \\k\\g", 5, "5 kg"),
    ('"No. "0', 7, "No. 7"),
    ('0 "days"', 3, "3 days"),
    ("0.00", 3.14159, "3.14"),
    ("0.00", 2.675, "2.68"),
    ("0.0#", 3, "3.0"),
    ("#,##0", 1234567, "1234567"),
    ("#,##0;[Red]#,##0", -5, "-5"),
    ("#,##0_);(#,##0)", -5, "-5"),
    ('0 "credit";0 "debit"', -5, "5 debit"),
    ("#,##0;▲#,##0", -5, "▲5"),
    ('"yes";"no";"none"', -1, "no"),
    ('"yes";"no";"none"', 0, "none"),
    ('[>=100]"many";0', 150, "many"),
    ('[>=100]"many";0', 50, "50"),
    (";;;", 1234, ""),
    ("0;-0;;@", 0, ""),
    ("0.0%", 0.255, "25.5%"),
    ("# ?/?", 1.5, "1 1/2"),
    ("?/?", 0.5, "1/2"),
    ("000-00-0000", 12345678, "012-34-5678"),
    ("(000) 000-0000", 1234567890, "(123) 456-7890"),
    ('0.0,,"M"', 1234567, "1.2M"),
    ("0.00E+00", 12345, "1.23E+04"),
    ("0.0E-0", 12345, "1.2E4"),
    ('d" days"', 3, "3 days"),
    ('hh:mm" Uhr"', 0.5, "12:00 Uhr"),
    ('"CHF "#,##0.-', 1250, "CHF 1250.-"),
    ("d. mmmm yyyy", 36283, "1999-05-03"),
    ("yyyy-mm-dd hh:mm", 36283.5, "1999-05-03 12:00:00"),
    ("dd/mm/yyyy", 1, "1900-01-01"),
    ("h:mm", 0.5625, "13:30"),
    ("h:mm", 1.5625, "13:30"),
    ("h:mm AM/PM", 0.5625, "13:30"),
    ("mm:ss", 0.01, "14:24"),
    ('General" kg"', 5.5, "5.5 kg"),
    ("0.00", 1e20, "1e+20"),
    ("[h]:mm;[Red]-[h]:mm", -0.5, "-12:00"),
    ("[h]:mm:ss.0", 1.5, "36:00:00"),
    ("[h].mm", 1.5, "36.00"),
    ('d" d "h" h"', 1.125, "1 d 3 h"),
    ('d"d" hh:mm', 12.5, "12d 12:00"),
    ("dd hh:mm", 43588.5, "2019-05-03 12:00:00"),
    ("# ?/8", 0.375, "3/8"),
    ("# ??/16", 2.25, "2 4/16"),
    ("# ?/10", 3, "3"),
    ("mm:ss.00", 62.35 / 86400, "01:02.35"),
    ("[h]:mm:ss.000", 62.35 / 86400, "0:01:02.350"),
    ("ss.0", 9.58 / 86400, "09.6"),
    (built_in(47), 62.34 / 86400, "01:02.3"),
    ("mmm-yy", 36283, "1999-05"),
    ("yyyy", 36283, "1999"),
    ("d mmm", 36283, "1999-05-03"),
    ('"due "d mmm', 36283, "due 1999-05-03"),
    ('"FY"yyyy', 36283, "FY1999"),
    ("TT.MM.JJJJ", 36283, "1999-05-03"),
    ('ggge"年"m"月"d"日"', 36283, "1999-05-03"),
    ("dddd", 2, "Monday"),
    ("mmmm", 36283, "May"),
    ("0.0\\ km/\\h", 5, "5.0 km/h"),
    ('0.00 "EUR"/"kg"', 5, "5.00 EUR/kg"),
    ("0,.0", 12345, "12.3"),
    ("0.0,", 12345, "12.3"),
    ("0", 4111111111111111, "4111111111111111"),
    ("0000 0000 0000 0000", 4111111111111111, "4111 1111 1111 1111"),
    ('"No. "@', 7, "No. 7"),
    ("0.00;@", -5, "-5.00"),
    (built_in(2), 5, "5.00"),
    (built_in(46), 1.5, "36:00:00"),
    (built_in(12), 0.5, "1/2"),
]


@pytest.mark.parametrize(("code", "number", "shown"), FORMATS)
def test_a_number_is_read_as_it_is_shown(code: str, number: float, shown: str) -> None:
    assert NumberFormat(code).shown(number, datetime(1899, 12, 30)) == shown


def test_a_text_is_read_as_it_is_shown() -> None:
    codes = ('"No. "@', ";;;", '0;0;0;"t: "@', "@", "0", '0;"t: "@', '0;0;0;"gone"')
    assert [NumberFormat(code).text("7") for code in codes] == ["No. 7", "", "t: 7", "7", "7", "t: 7", "7"]


@pytest.mark.parametrize(
    "code", ['"' * 300, "[" * 300, "0" * 300, "0.0,;" * 99, "[>1e400]0", "[>1.2.3]0", "\\", "0/" * 9]
)
def test_a_strange_format_shows_something(code: str) -> None:
    for number in (0, 1.5, -1.5, 1e300, -1e-300):
        assert isinstance(NumberFormat(code).shown(number, datetime(1899, 12, 30)), str)


def text(rows: str, before: str = "", after: str = "", **more: str) -> str:
    made = workbook({"S": ""}, **{"xl/worksheets/s0.xml": sheet(rows, before, after), **more})  # type: ignore[arg-type]
    return xlsx.parse(made, LIMIT).text.removeprefix("## S\n\n")


def sheet(rows: str, before: str = "", after: str = "") -> bytes:
    return f"<worksheet>{before}<sheetData>{rows}</sheetData>{after}</worksheet>".encode()


def merged(*areas: str) -> str:
    return "<mergeCells>" + "".join(f'<mergeCell ref="{area}"/>' for area in areas) + "</mergeCells>"


def rows(*lines: str) -> str:
    """Make rows of cells between bars; an empty line is an empty row."""
    made = ""
    for number, line in enumerate(lines, 1):
        cells = [value.strip() for value in line.split("|")]
        placed = (
            cell(float(value) if value.replace(".", "").isdigit() else value, at=f"{'ABCDEF'[at]}{number}")
            for at, value in enumerate(cells) if value
        )  # fmt: skip
        made += f'<row r="{number}">{"".join(placed)}</row>' if line.strip(" |") else ""
    return made


STAFF = ("Name | Town | Pay", "Vala | Orrin | 10")


@pytest.mark.parametrize(
    "before",
    [
        '<cols><col min="3" max="3" hidden="1"/></cols>',
        '<cols><col min="3" max="16384" width="0"/></cols>',
        '<cols><col min="3" max="3" width="0.05" customWidth="1"/></cols>',
        '<sheetFormatPr defaultColWidth="0"/><cols><col min="1" max="2" width="9"/></cols>',
    ],
)
def test_columns_that_cannot_be_seen_are_left_out(before: str) -> None:
    assert text(rows(*STAFF), before) == "Name: Vala\nTown: Orrin"


def test_rows_that_cannot_be_seen_are_left_out() -> None:
    for more in (' ht="0"', ' hidden="true"', ' ht="0.01" customHeight="1"'):
        made = row("Name", "Town") + row("GONE", "x", more=more) + row("Vala", "Orrin")
        assert text(made) == "Name: Vala\nTown: Orrin"
    flat = '<sheetFormatPr zeroHeight="1"/>'
    made = row("a", "b", more=' ht="12"') + row("GONE", "x") + row("c", "d", more=' hidden="0"')
    assert text(made, flat) == "a: c\nb: d"


def test_merged_labels_are_repeated() -> None:
    made = rows("Team | Name", "Harbour | Vala", " | Timo", "Crane | Mara")
    shown = "Team: Harbour\nName: Vala\n\nTeam: Harbour\nName: Timo\n\nTeam: Crane\nName: Mara"
    assert text(made, after=merged("A2:A3")) == shown
    made = rows("Name | a | b | c", "Vala | sick | | 5")
    assert text(made, after=merged("B2:C2")) == "Name: Vala\na: sick\nb: sick\nc: 5"


def test_a_merged_title_is_a_title() -> None:
    made = rows("Staff of 2026", *STAFF, "North", "Timo | Lume | 20")
    shown = "Staff of 2026\n\nName: Vala\nTown: Orrin\nPay: 10\n\nNorth\n\nName: Timo\nTown: Lume\nPay: 20"
    assert text(made, after=merged("A1:C1", "A4:C4")) == shown


def test_names_in_two_rows_are_joined() -> None:
    made = rows("Site | Shift |", " | day | night", "Orrin | 1 | 2")
    shown = "Site: Orrin\nShift day: 1\nShift night: 2"
    assert text(made, after=merged("A1:A2", "B1:C1")) == shown
    assert text(made, after=merged("B1:C1")) == shown
    assert csv.parse(b"Site,Shift,\n,day,night\nOrrin,1,2\n", LIMIT).text == shown
    plain = rows("Name | Contact |", "Vala | a@b | 55")
    assert text(plain, after=merged("B1:C1")) == "Name: Vala\nContact: a@b\nContact (2): 55"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (("Staff list | | 2026", "", *STAFF), "Staff list | 2026\n\nName: Vala\nTown: Orrin\nPay: 10"),
        (("Staff list", "of Orrin", *STAFF), "Staff list\n\nof Orrin\n\nName: Vala\nTown: Orrin\nPay: 10"),
        ((*STAFF, "", "Machine | Bought", "Crane | 2019"),
         "Name: Vala\nTown: Orrin\nPay: 10\n\nMachine: Crane\nBought: 2019"),
        ((*STAFF, "", "Machines", "Machine | Place", "Crane | Orrin"),
         "Name: Vala\nTown: Orrin\nPay: 10\n\nMachines\n\nMachine: Crane\nPlace: Orrin"),
        ((*STAFF, "", "Total | | 10"), "Name: Vala\nTown: Orrin\nPay: 10\n\nName: Total\nPay: 10"),
        ((*STAFF, "", "Timo | Lume | 20", "Mara | Dorn | 30"),
         "Name: Vala\nTown: Orrin\nPay: 10\n\nName: Timo\nTown: Lume\nPay: 20\n\nName: Mara\nTown: Dorn\nPay: 30"),
        ((*STAFF, *STAFF), "Name: Vala\nTown: Orrin\nPay: 10\n\nName: Vala\nTown: Orrin\nPay: 10"),
        (("Name | Pay | Pay", "Vala | 10 | 12"), "Name: Vala\nPay: 10\nPay (2): 12"),
    ],
)  # fmt: skip
def test_names_are_found_where_they_are(lines: tuple[str, ...], shown: str) -> None:
    assert text(rows(*lines)) == shown
    table = "\n".join(",".join(value.strip() for value in line.split("|")) for line in lines)
    assert csv.parse(table.encode(), LIMIT).text == shown


FIRST = "Name: Vala\nTown: Orrin\n\nName: Timo\nTown: Lume"
SECOND = [
    (("Name | Town", "Vala | Orrin", "Timo | Lume", "", "Machine | Place", "Crane | Harbour", "Pump | Mill"),
     f"{FIRST}\n\nMachine: Crane\nPlace: Harbour\n\nMachine: Pump\nPlace: Mill"),
    (("Name | Town", "Vala | Orrin", "Timo | Lume", "", "Name | Role", "Mara | keeper"),
     f"{FIRST}\n\nName: Mara\nRole: keeper"),
    (("Name | Town", "Vala | Orrin", "Timo | Lume", "", "Mara | Orrin", "Jana | Dorn"),
     f"{FIRST}\n\nName: Mara\nTown: Orrin\n\nName: Jana\nTown: Dorn"),
    (("Name | Town", "Vala | Orrin", "Timo | Lume", "", "Mara | Dorn", "Jana | Tarn", "", "Pia | Wick", "Ada | Bray"),
     f"{FIRST}\n\nName: Mara\nTown: Dorn\n\nName: Jana\nTown: Tarn\n\nName: Pia\nTown: Wick\n\nName: Ada\nTown: Bray"),
    (("English | German", "house | Haus", "", "crane | Kran", "pump | Pumpe"),
     "English: house\nGerman: Haus\n\nEnglish: crane\nGerman: Kran\n\nEnglish: pump\nGerman: Pumpe"),
    (("Pier | Quay", "east | old", "", "Machine | Town", "Crane | Orrin"),
     "Pier: east\nQuay: old\n\nMachine: Crane\nTown: Orrin"),
    (("Name | Address", "Vala | vala@orrin.example", "", "Timo | timo@orrin.example", "Mara | mara@orrin.example"),
     "Name: Vala\nAddress: vala@orrin.example\n\nName: Timo\nAddress: timo@orrin.example\n\n"
     "Name: Mara\nAddress: mara@orrin.example"),
    (("Name | Town", "Vala | Orrin", "Timo | Lume", "", "Mara | Dorn"), f"{FIRST}\n\nName: Mara\nTown: Dorn"),
    (("Name | Town | | Name | Role", "Vala | Orrin | | Crane | lifts", "Timo | Lume | | Pump | draws"),
     f"{FIRST}\n\nName: Crane\nRole: lifts\n\nName: Pump\nRole: draws"),
    (("Name | Town | | Machine | Place", "Vala | Orrin | | Crane | Harbour", "Timo | Lume"),
     f"{FIRST}\n\nMachine: Crane\nPlace: Harbour"),
    (("Name | Town", "Vala | Orrin | | Machine | Place", "Timo | Lume | | Crane | Harbour", " | | | Pump | Mill"),
     f"{FIRST}\n\nMachine: Crane\nPlace: Harbour\n\nMachine: Pump\nPlace: Mill"),
    (("Staff | | | Machines", "Name | Town | | Machine | Bought", "Vala | Orrin | | Crane | 2019",
      "Timo | Lume | | Pump | 2020"),
     f"Staff\n\n{FIRST}\n\nMachines\n\nMachine: Crane\nBought: 2019\n\nMachine: Pump\nBought: 2020"),
    (("Name | Town | | May | June", "Vala | Orrin | | 10 | 12", "Timo | Lume | | 20"),
     "Name: Vala\nTown: Orrin\nMay: 10\nJune: 12\n\nName: Timo\nTown: Lume\nMay: 20"),
    (("Week | One | | | Two", "Name | Mon | Tue | | Mon | Tue", "Vala | early | late | | late | early"),
     "Week | One | Two\n\nName: Vala\nMon: early\nTue: late\nMon (2): late\nTue (2): early"),
    (("Name | Pay | | May | June", "Vala | 10 | | 1 | 2", "Timo | 20 | | 3 | 4", "Mara | 30"),
     "Name: Vala\nPay: 10\nMay: 1\nJune: 2\n\nName: Timo\nPay: 20\nMay: 3\nJune: 4\n\nName: Mara\nPay: 30"),
    (("No | Name | | No | Machine", "1 | Vala | | 1 | Crane"),
     "No: 1\nName: Vala\n\nNo: 1\nMachine: Crane"),
    (("Item | Cost | | Person | Cost", "Roof | 10 | | Vala | 20"),
     "Item: Roof\nCost: 10\n\nPerson: Vala\nCost: 20"),
    (("Name | Town | | Post | Role", "Vala | Orrin | | chief | all", "Timo | Lume | | clerk | none"),
     "Name: Vala\nTown: Orrin\nPost: chief\nRole: all\n\nName: Timo\nTown: Lume\nPost: clerk\nRole: none"),
    (("Name | Town | | Name | Role", "Vala | Orrin | | Crane | lifts", "", "Timo | Lume | | Pump | draws"),
     f"{FIRST}\n\nName: Crane\nRole: lifts\n\nName: Pump\nRole: draws"),
    (("Name | Town | | Name | Role", "Vala | Orrin | | Crane | lifts", "", "Item | Unit | Cost", "Roof | piece | 10"),
     "Name: Vala\nTown: Orrin\n\nItem: Roof\nUnit: piece\nCost: 10\n\nName: Crane\nRole: lifts"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "shown"), SECOND)
def test_a_second_table_has_names_of_its_own(lines: tuple[str, ...], shown: str) -> None:
    assert text(rows(*lines)) == shown
    table = "\n".join(",".join(value.strip() for value in line.split("|")) for line in lines)
    assert csv.parse(table.encode(), LIMIT).text == shown


@pytest.mark.parametrize("late", [20, 40])
def test_a_table_beside_may_begin_far_below(late: int) -> None:
    lines = ["Name | Amount", *(f"name{number} | {number}" for number in range(1, 50))]
    lines[late : late + 3] = [
        f"{line} | | {more}"
        for line, more in zip(lines[late:], ("Machine | Place", "Crane | Harbour", "Pump | Mill"), strict=False)
    ]
    shown = text(rows(*lines))
    assert shown.endswith(
        "\n\nName: name49\nAmount: 49\n\nMachine: Crane\nPlace: Harbour\n\nMachine: Pump\nPlace: Mill"
    )
    assert f"\n\nName: name{late}\nAmount: {late}\n\nName: name{late + 1}\n" in shown


@pytest.mark.parametrize(("style", "shown"), [(1, "Timo: Mara\nLume: Dorn"), (0, "Name: Timo\nTown: Lume")])
def test_styles_tell_whether_rows_below_an_empty_one_name_columns(style: int, shown: str) -> None:
    def styled(number: int, style: int, *values: str) -> str:
        return f'<row r="{number}">{"".join(cell(value, style) for value in values)}</row>'

    made = styled(1, 1, "Name", "Town") + styled(2, 0, "Vala", "Orrin") + styled(3, 0, "Ada", "Tarn")
    made += styled(5, style, "Timo", "Lume") + styled(6, 0, "Mara", "Dorn")
    assert text(made).split("\n\n")[2] == shown


def test_any_cells_are_rows() -> None:
    rng = random.Random(7)
    for _ in range(400):
        cells = [[rng.choice(("", "", "Name", "Town", "Vala", "10", "x y", "# a")) for _ in range(7)] for _ in range(9)]
        words = sorted(word for line in cells for cell in line for word in cell.split() if word not in ("Name", "Town"))
        try:
            shown = csv.parse("\n".join(map(",".join, cells)).encode(), LIMIT).text
        except InvalidDocument:
            continue
        assert not (Counter(words) - Counter(re.split(r"[\s|:]+", shown)))  # names alone may be said once, or often


def test_names_without_rows_are_a_line() -> None:
    assert text(rows("Name | Town")) == "Name | Town"


def test_formulas_without_a_result_are_kept_and_said() -> None:
    made = row("Item", "Cost") + row("Roof", 4000)
    made += '<row><c t="inlineStr"><is><t>Total</t></is></c><c><f>SUM(B2:B3)</f></c></row>'
    made += '<row><c t="str"><f>A1</f><v></v></c><c><f>SUM(B2)</f><v>5</v></c></row>'
    made += '<row><c><f t="shared" si="0"/></c><c t="str"><f>A2</f></c></row>'
    parsed = xlsx.parse(workbook({"S": made}), LIMIT)
    assert parsed.text.endswith(
        "Item: Total\nCost: =SUM(B2:B3)\n\nCost: 5\n\nItem: (a formula without a result)\nCost: =A2"
    )
    assert parsed.metadata["warnings"][0].startswith("3 formulas have no stored result")
    assert "warnings" not in xlsx.parse(workbook({"S": row("a", "b") + row(1, 2)}), LIMIT).metadata


def test_what_is_struck_out_raised_or_a_reading_is_none_of_the_text() -> None:
    rich = '<r><rPr><strike/></rPr><t>120</t></r><r><t xml:space="preserve"> 90</t></r>'
    raised = '<r><t>10</t></r><r><rPr><vertAlign val="superscript"/></rPr><t>6</t></r>'
    reading = "<t>東京</t><rPh><t>トウキョウ</t></rPh>"
    inline = "".join(f'<c t="inlineStr"><is>{each}</is></c>' for each in (rich, raised, reading))
    shared = "".join(cell(at, kind="s") for at in range(3))
    styles = '<fonts><font/><font><strike/></font></fonts><cellXfs><xf/><xf numFmtId="0" fontId="1"/></cellXfs>'
    sheets = {"S": row("a", "b", "c", "d") + f"<row>{inline}{cell(5, 1)}</row><row>{shared}</row>"}
    shown = "a: 90\nb: 10^6\nc: 東京"
    assert xlsx.parse(workbook(sheets, [rich, raised, reading], styles), LIMIT).text == f"## S\n\n{shown}\n\n{shown}"


def test_characters_that_a_workbook_writes_by_numbers_are_characters() -> None:
    inline = cell("one_x000D_\ntwo_x0009_three _x00e9_ x_y")
    shown = text(row("a", "b") + f"<row>{inline}{cell('_x0041_', kind='str')}</row>")
    assert shown == "a: one\ntwo\tthree é x_y\nb: A"


def test_a_cell_that_looks_like_a_heading_is_none() -> None:
    assert text(rows("# of units", "# | Name", "1 | Vala")) == "    # of units\n\n#: 1\nName: Vala"


@pytest.mark.parametrize(
    "table",
    [
        "sep=;\r\nName;Town\r\nVala;Orrin\r\n",
        "\ufeffsep=,\r\nName,Town\r\nVala,Orrin\r\n",
        '"sep=|"\nName|Town\nVala|Orrin\n',
        "sep=\t\nName\tTown\nVala\tOrrin\n",
        "sep=;\nName;Town\nVala;Orrin\n",
        "sep=,,\nName,Town\nVala,Orrin\n",
        "sep= ;\nName;Town\nVala;Orrin\n",
    ],
)
def test_the_delimiter_that_a_table_states_is_no_row(table: str) -> None:
    assert csv.parse(table.encode(), LIMIT).text == "Name: Vala\nTown: Orrin"


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ("Staff of 2026\n\nName,Town\nVala,Orrin\nTimo,Lume\n",
         "Staff of 2026\n\nName: Vala\nTown: Orrin\n\nName: Timo\nTown: Lume"),
        ("Staff of 2026,,\nName,Town,Age\nVala,Orrin,31\n", "Staff of 2026\n\nName: Vala\nTown: Orrin\nAge: 31"),
        ("# made in 2026\n# by Ada, Tarn, x\nName,Town\nVala,Orrin\n",
         "    # made in 2026\n\n    # by Ada | Tarn | x\n\nName: Vala\nTown: Orrin"),
        ("Name,Town\nVala,Orrin\n# the end\n", "Name: Vala\nTown: Orrin\n\n    # the end"),
        ("Export of Tarn,2026\nby Ada\n\nName,Town\nVala,Orrin\n",
         "Export of Tarn | 2026\n\nby Ada\n\nName: Vala\nTown: Orrin"),
        ("Staff,2026\n\nName,Town\nVala,Orrin\n", "Staff | 2026\n\nName: Vala\nTown: Orrin"),
        ("#id,name\n1,Vala\n", "#id: 1\nname: Vala"),
        ("Name,Amount,Amount\nVala,10,12\n", "Name: Vala\nAmount: 10\nAmount (2): 12"),
        ("Name,Town\n\nVala,Orrin\n", "Name: Vala\nTown: Orrin"),
    ],
)  # fmt: skip
def test_titles_and_comments_of_a_table_are_no_names(table: str, shown: str) -> None:
    assert csv.parse(table.encode(), LIMIT).text == shown


def test_a_zero_of_a_workbook_that_was_never_calculated_is_no_result() -> None:
    made = row("a", "b") + row("<c><f>SUM(B2:B3)</f><v>0</v></c>", "<c><f>_xlfn.XLOOKUP(1,A1:A2,B1:B2)</f><v>5</v></c>")
    kept = {"properties": '<calcPr calcId="124519" fullCalcOnLoad="1"/>'}
    uncounted = xlsx.parse(workbook({"S": made}, **kept), LIMIT)  # type: ignore[arg-type]
    assert uncounted.text == "## S\n\na: =SUM(B2:B3)\nb: 5"
    assert str(uncounted.metadata["warnings"]).startswith("['1 formulas have no stored result")
    assert xlsx.parse(workbook({"S": made}), LIMIT).text == "## S\n\na: 0\nb: 5"
    newer = "<c><f>_xlfn._xlws.SORT(B1)</f></c>"
    assert text(row("a", "b") + row(newer, "x")) == "a: =SORT(B1)\nb: x"


def test_the_time_grows_with_the_sheet() -> None:
    def read(rows: str) -> object:
        areas = merged(*(f"A{at}:C{at + 9000}" for at in range(1, 300)))
        made = workbook({"S": ""}, **{"xl/worksheets/s0.xml": sheet(rows, after=areas)})
        return xlsx.parse(made, 1 << 30)

    assert grows_linearly(read, lambda n: row("a", "b", "c", "d") * n, 2000)
    assert grows_linearly(lambda table: csv.parse(table.encode(), 1 << 30), lambda n: "# a\n\n" * n + "b\n1\n", 5000)


def test_a_formula_that_cells_share_is_that_of_each_cell() -> None:
    made = '<row r="1"><c r="A1"><v>5</v></c><c r="C1"><f t="shared" si="0">A1*$D$1+LOG10(B1)&amp;"A1"</f></c></row>'
    made += '<row r="2"><c r="D2"><f t="shared" si="0"/></c></row>'
    assert '=A1*$D$1+LOG10(B1)&"A1"' in text(made)
    assert '=B2*$D$1+LOG10(C2)&"A1"' in text(made)


def test_letters_in_a_font_of_signs_are_signs() -> None:
    fonts = '<fonts><font/><font><name val="Wingdings"/></font></fonts><cellXfs><xf/><xf fontId="1"/></cellXfs>'
    rich = '<r><rPr><rFont val="Symbol"/></rPr><t>£</t></r><r><rPr><rFont val="Arial"/></rPr><t> 5</t></r>'
    rows = (
        row("Limit", "Done")
        + f"<row>{cell(0, kind='s')}{cell('þ', 1)}</row><row>{cell(1, 1, 's')}{cell(0, 1, 's')}</row>"
    )
    made = xlsx.parse(workbook({"S": rows}, strings=[rich, "<t>o</t>"], styles=fonts), LIMIT).text
    assert made.endswith("Limit: ≤ 5\nDone: [x]\n\nLimit: [ ]\nDone: ≤ 5")


def test_years_over_two_columns_each_join_the_names_below() -> None:
    rows = '<row r="1"><c r="B1"><v>2025</v></c><c r="D1"><v>2026</v></c></row>'
    rows += row("Site", "plan", "real", "plan", "real", more=' r="2"') + row("Orrin", 1, 2, 3, 4, more=' r="3"')
    assert text(rows, after=merged("B1:C1", "D1:E1")) == (
        "Site: Orrin\n2025 plan: 1\n2025 real: 2\n2026 plan: 3\n2026 real: 4"
    )
