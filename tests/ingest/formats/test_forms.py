"""Forms, sums beside a table, and tables without names read as they are shown."""

from __future__ import annotations

import pytest

from ragkv.ingest.formats import csv
from tests.ingest.formats.test_sheets import LIMIT, STAFF, merged, rows, text


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (("Staff form", "", "Name: | Vala", "Town: | Orrin"), "Staff form\n\nName: Vala\nTown: Orrin"),
        (("Name: | Vala | Town: | Orrin", "", *STAFF), "Name: Vala\nTown: Orrin\n\nName: Vala\nTown: Orrin\nPay: 10"),
        (("Name | : | Vala", "Town | : | Orrin"), "Name: Vala\nTown: Orrin"),
        (("Invoice | R7", "Customer | Vala", "", *STAFF),
         "Invoice: R7\nCustomer: Vala\n\nName: Vala\nTown: Orrin\nPay: 10"),
        (("Invoice | R7", "Customer | Vala", *STAFF),
         "Invoice: R7\nCustomer: Vala\n\nName: Vala\nTown: Orrin\nPay: 10"),
        (("Bolt | 5", "Nut | 6"), "Bolt: 5\nNut: 6"),
        (("Price | 2026", "Town | 5"), "Price: Town\n2026: 5"),
        (("Setting | Value", "Name | 7", "Town | 8"), "Setting: Name\nValue: 7\n\nSetting: Town\nValue: 8"),
        (("Motor | electric", "Lifts | 40 t", "Reach | 32 m"), "Motor: electric\nLifts: 40 t\nReach: 32 m"),
        (("Name | Vala", "Place | Mill 3", " | Orrin", "Phone | +49 1"),
         "Name: Vala\nPlace: Mill 3\n\nOrrin\n\nPhone | +49 1"),
        (("Name | Hours", "Vala | 5", "", "Made by: | Timo", "Date: | 3 May"),
         "Name: Vala\nHours: 5\n\nMade by: Timo\nDate: 3 May"),
        (("Name | Hours", "Vala | 5", "", "Total: | 5", "Mean: | 5"),
         "Name: Vala\nHours: 5\n\nName: Total:\nHours: 5\n\nName: Mean:\nHours: 5"),
        (("Assets | 31/12/2025", "Cash | 500"), "Assets: Cash\n31/12/2025: 500"),
        (("Name: | Town:", "Vala | Orrin"), "Name:: Vala\nTown:: Orrin"),
    ],
)  # fmt: skip
def test_labels_beside_their_values_are_no_names_of_columns(lines: tuple[str, ...], shown: str) -> None:
    assert text(rows(*lines)) == shown
    table = "\n".join(",".join(value.strip() for value in line.split("|")) for line in lines)
    assert csv.parse(table.encode(), LIMIT).text == shown


def test_names_in_three_rows_are_joined_and_sections_are_titles() -> None:
    made = rows("Site | 2024", "| H1 | | H2", "| Q1 | Q2 | Q3 | Q4", "Orrin | 1 | 2 | 3 | 4")
    shown = "Site: Orrin\n2024 H1 Q1: 1\n2024 H1 Q2: 2\n2024 H2 Q3: 3\n2024 H2 Q4: 4"
    assert text(made, after=merged("A1:A3", "B1:E1", "B2:C2", "D2:E2")) == shown
    made = rows("Item | Plan | Real", "Income", "Sales | 10 | 11")
    assert text(made, after=merged("A2:C2")) == "Income\n\nItem: Sales\nPlan: 10\nReal: 11"
    made = rows("Sum of Sales | Column Labels", "Row Labels | 2024 | 2025 | All", "North | 1 | 2 | 3")
    assert text(made) == "Sum of Sales | Column Labels\n\nRow Labels: North\n2024: 1\n2025: 2\nAll: 3"


def test_a_long_form_stays_a_form() -> None:
    many = text(rows(*(f"Name: | Vala {at}" for at in range(30))))
    assert many.replace("\n\n", "\n") == "\n".join(f"Name: Vala {at}" for at in range(30))


def test_a_number_beside_a_table_is_not_lost() -> None:
    made = rows("Name | Pay | | Sum | 30", "Vala | 10", "Timo | 20")
    assert text(made) == "Name: Vala\nPay: 10\n\nName: Timo\nPay: 20\n\nSum | 30"
    made = rows("Name | Pay | | Sum | 30", "Vala | 10 | | Count | 2", "Timo | 20")
    assert text(made) == "Name: Vala\nPay: 10\n\nName: Timo\nPay: 20\n\nSum: 30\nCount: 2"
    made = rows("Name | Pay | | Bonus | 2025", "Vala | 10 | | Team | 2")
    assert text(made) == "Name: Vala\nPay: 10\nBonus: Team\n2025: 2"


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ("2026-01-02,Orrin,5\n2026-01-03,Lume,6\n",
         "column 1: 2026-01-02\ncolumn 2: Orrin\ncolumn 3: 5\n\ncolumn 1: 2026-01-03\ncolumn 2: Lume\ncolumn 3: 6"),
        ("Country,2019,2020\nTarn,5,6\n", "Country: Tarn\n2019: 5\n2020: 6"),
        ("Bolts,10,20,30\nM6,5,6,7\n", "Bolts: M6\n10: 5\n20: 6\n30: 7"),
        ("Bolts,1,2\nM6,5,6\n", "Bolts: M6\n1: 5\n2: 6"),
        ("Bolts,2026-01,2026-02\nM6,5,6\n", "Bolts: M6\n2026-01: 5\n2026-02: 6"),
        ("A,2024,2024\n,plan,real\nBolt,1,2\n", "A: Bolt\n2024 plan: 1\n2024 real: 2"),
        ("Name,Pay\nVala,5\nSource: the office\n* estimated\n",
         "Name: Vala\nPay: 5\n\nSource: the office\n\n* estimated"),
        ("Month, \"Place, town\"\nMay, \"Orrin, north\"\n", "Month: May\nPlace, town: Orrin, north"),
        ('Code,Name\n="01067",Vala\n"=""02""",Timo\n', "Code: 01067\nName: Vala\n\nCode: 02\nName: Timo"),
    ],
)  # fmt: skip
def test_a_table_is_read_as_programs_write_it(table: str, shown: str) -> None:
    assert csv.parse(table.encode(), LIMIT).text == shown
