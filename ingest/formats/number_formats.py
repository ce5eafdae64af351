"""How a cell of a workbook shows its number: `00000` → 01067, `[h]:mm` → 36:00, `0.00" EUR"` → 1250.00 EUR.

Dates and times read in one order, whatever theirs is: 2019-05-03 13:30:00. Digits are not grouped.

    positive ; negative ; zero ; text       sections of a format
    [>99]0.0                                a section with a condition of its own
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal

from ragkv.ingest.formats.number_sections import Section, read_section, split_format

_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<>": operator.ne,
}
_LATEST = 2_958_466
"""First serial number behind the year 9999."""
_LEAP = 60
"""The serial number of 29 February 1900, a day that only spreadsheets know."""
_EXACT = 10**15
"""Whole numbers from here on have more than the 15 digits that others are rounded to."""
_GREATEST = 10**20
"""Numbers from here on are written with an exponent."""
_MONTH = 32
_DAYS = re.compile(r"dd?(?=h)(?!.*[ye])")
"""Letters of days and hours without months and years: how long something took, up to the days of a month."""
_NAME = re.compile("d{3,4}|m{3,4}")
"""Letters of a day of the week, or of a month, alone."""
_PERIOD = re.compile("[ye]+m*|m+[ye]+")
"""Letters of a year, or of a month of one."""
_LONGEST = 255
"""Characters of a format that are read. Programs allow no more."""
_BUILT_IN = {
    **dict.fromkeys((1, 37, 38), "0"),
    **dict.fromkeys((2, 4, 7, 8, 39, 40, 43, 44), "0.00"),
    **dict.fromkeys((3, 5, 6, 41, 42), "0"),
    9: "0%",
    10: "0.00%",
    11: "0.00E+00",
    12: "# ?/?",
    13: "# ??/??",
    48: "##0.0E+0",
    49: "@",
    **dict.fromkeys((14, 15, 16, *range(27, 37), *range(50, 59)), "yyyy-mm-dd"),
    17: "mmm-yy",
    18: "h:mm",
    19: "h:mm:ss",
    20: "h:mm",
    21: "h:mm:ss",
    22: "yyyy-mm-dd h:mm",
    45: "mm:ss",
    46: "[h]:mm:ss",
    47: "mm:ss.0",
}


def built_in(number: int) -> str:
    """Return the format of a number below 164; empty for General."""
    return _BUILT_IN.get(number, "")


class NumberFormat:
    """A format of numbers."""

    def __init__(self, code: str):
        self._sections = [read_section(part) for part in split_format(code[:_LONGEST])] if code else []
        self._of_text = next((section for section in self._sections[:4] if section.has_text), None)
        if len(self._sections) > 1 and self._of_text is self._sections[-1]:
            self._sections.pop()

    def shown(self, number: float, epoch: datetime) -> str:
        """Return a number as it is shown, empty where it is not. epoch: the day 0 of the workbook."""
        if not self._sections:
            return f"{number:.15g}"
        section = self._section_of(number)
        if section.kind == "hidden":
            return ""
        if section.kind in ("date", "elapsed"):
            shown = _moment(section, number, epoch)
            return shown if section.said is None else _said(section.said, shown)
        if section.kind == "text":
            return _with_text(section, f"{number:.15g}") if section.has_text else section.before
        text = f"{abs(number):.15g}" if section.kind == "general" else _digits(section, abs(number))
        sign = "-" if number < 0 and text.strip("0.,%") and not self._says_so(section) else ""
        return sign + _around(section, text, number < 0)

    def _says_so(self, section: Section) -> bool:
        """Whether words or signs (`▼`) say that a number is negative, as brackets and colours do not."""
        if len(self._sections) < 2 or section is not self._sections[1]:
            return False
        words, others = (side.before + side.behind for side in (section, self._sections[0]))
        if words == others or any(sign in words for sign in "-("):
            return False
        return any(letter.isalpha() or unicodedata.category(letter) in ("So", "Sm") for letter in words)

    def text(self, text: str) -> str:
        """Return a text as it is shown."""
        if len(self._sections) > 3:
            return "" if self._sections[3].kind == "hidden" else text
        return _with_text(self._of_text, text) if self._of_text is not None else text

    def _section_of(self, number: float) -> Section:
        """Return the section of a number."""
        sections = self._sections[:3]
        for at, section in enumerate(sections):
            if section.condition is None:
                continue
            if _holds(section.condition, number):
                return section
            if at + 1 == len(sections):
                return Section("general")
        if sections[0].condition is not None:
            return sections[-1]
        if number < 0 and len(sections) > 1:
            return sections[1]
        return sections[2 if number == 0 and len(sections) > 2 else 0]


def _holds(condition: tuple[str, float], number: float) -> bool:
    sign, limit = condition
    return _COMPARED[sign](number, limit)


def _said(words: tuple[str, str], shown: str) -> str:
    """Return a date with the words around it, where it does not have them."""
    before, behind = words
    before = "" if shown.startswith(before.strip()) else before
    return f"{before}{shown}{'' if shown.endswith(behind.strip()) else behind}".strip()


def _with_text(section: Section, text: str) -> str:
    return f"{section.before}{text}{section.behind}".strip() if section.has_text else text


def _around(section: Section, text: str, negative: bool) -> str:
    """Put the words of a format around a number. The sign and the brackets of a negative one are left out."""
    before, behind = section.before, section.behind
    if negative:
        before = before.replace("-", "").replace("(", "")
        behind = behind.replace(")", "")
    return f"{before}{text}{behind}".strip()


def _digits(section: Section, number: float) -> str:
    """Return the digits of a number that is not negative."""
    if section.is_simple and (plain := _plain(section, number)):
        return plain
    value = Decimal(f"{number:.{17 if number >= _EXACT else 15}g}") * 100**section.percents / 1000**section.thousands
    if section.divisor.strip("/"):
        return _fraction(section, value)
    decimals = section.decimals or ""
    if section.exponent:
        return _scientific(section, value, len(decimals))
    if abs(value) >= _GREATEST:
        return f"{number:.15g}"
    rounded = f"{value.quantize(Decimal(1).scaleb(-len(decimals)), ROUND_HALF_UP):f}"
    whole, _, part = rounded.partition(".")
    part = part[: decimals.count("0")] + part[decimals.count("0") :].rstrip("0")
    if section.blanks:
        whole = _placed(section.blanks, whole)
    else:
        whole = whole.lstrip("0").zfill(section.whole.count("0"))
    if not whole and not part and section.whole.strip("?"):
        whole = "0"
    return f"{whole}{'.' if part else ''}{part}"


def _scientific(section: Section, value: Decimal, decimals: int) -> str:
    """Return a number with an exponent of as many digits as the format has: `1.23E+06`."""
    digits, _, exponent = f"{value:.{decimals}E}".partition("E")
    sign = exponent[0] if exponent[0] == "-" or section.has_plus else ""
    return f"{digits}E{sign}{exponent[1:].zfill(len(section.exponent))}"


def _plain(section: Section, number: float) -> str:
    """Return the digits of a number of which none has to be rounded, in a format of nothing but zeros; else nothing."""
    whole, _, part = f"{number:.15g}".partition(".")
    zeros = len(section.decimals or "")
    if len(part) > zeros or not (whole + part).isdigit() or len(whole) > 15:
        return ""
    return (
        f"{whole.zfill(section.whole.count('0'))}.{part.ljust(zeros, '0')}"
        if zeros
        else whole.zfill(section.whole.count("0"))
    )


def _placed(blanks: list[str], digits: str) -> str:
    """Put digits into placeholders between which words stand, from the right: `000-0000`."""
    left, parts = digits.lstrip("0"), list[str]()
    for at, place in enumerate(reversed(blanks)):
        if at % 2:
            parts.append(place)
            continue
        taken = left if at == len(blanks) - 1 else left[len(left) - min(len(left), len(place)) :]
        left = left[: len(left) - len(taken)]
        parts.append(taken.rjust(place.count("0"), "0") if place.count("0") else taken)
    return "".join(reversed(parts))


def _fraction(section: Section, value: Decimal) -> str:
    """Return a number as a whole number and a fraction: `1 1/2`."""
    from fractions import Fraction  # few workbooks need it

    divisor = section.divisor
    if divisor.isdigit() and divisor.strip("0"):
        above, fixed = round(value * int(divisor)), int(divisor)
        whole, above = divmod(above, fixed) if section.blanks else (0, above)
        return f"{whole or ''} {above}/{fixed}".strip() if above or not whole else str(whole)
    part = Fraction(value).limit_denominator(10 ** min(len(divisor), 3) - 1)
    whole, rest = divmod(part, 1) if section.blanks else (0, part)
    shown = f"{rest.numerator}/{rest.denominator}" if rest else ""
    return f"{whole if whole or not shown else ''} {shown}".strip()


def _moment(section: Section, number: float, epoch: datetime) -> str:
    """Return a date, a time or both, or how long something took. Seconds have the parts that the format shows."""
    dates = section.dates
    if section.kind == "elapsed":
        return _elapsed(section, number)
    if not 0 <= number < _LATEST:
        return f"{number:.15g}"
    if number < _MONTH and (
        ("h" in dates and _DAYS.match(dates)) or (dates == "d" and any(map(str.isalpha, section.behind)))
    ):
        return _elapsed(section, number)
    has_time = "h" in dates or "s" in dates
    has_date = "y" in dates or "d" in dates or "e" in dates or not has_time
    if len(dates) < 5 and _NAME.fullmatch(dates):
        return f"{epoch + timedelta(days=int(number)):{'%A' if 'd' in dates else '%B'}}"
    if 0 < number < _LEAP and epoch.year < 1900 and has_date:
        number += number >= 1
    seconds, part = _seconds(section, number)
    moment = epoch + timedelta(seconds=seconds)
    if has_date and (number >= 1 or not has_time):
        if "d" not in dates and _PERIOD.fullmatch(dates):  # a month or a year
            return f"{moment.year}-{moment.month:02}" if "m" in dates else str(moment.year)
        is_day = not (moment.hour or moment.minute or moment.second)
        return moment.date().isoformat() if is_day else f"{moment.isoformat(' ')}{part}"
    unit = section.behind.rstrip() if any(map(str.isalpha, section.behind)) else ""
    if "h" not in dates:
        return f"{moment:{'%M:%S' if 'm' in dates else '%S'}}{part}{unit}"
    return f"{moment:%H:%M:%S}{part}{unit}" if "s" in dates or has_date else f"{moment:%H:%M}{unit}"


def _seconds(section: Section, number: float) -> tuple[int, str]:
    """Return days as seconds, rounded to what the format shows, and what follows their point: `.35`."""
    if not section.parts:
        return round(abs(number) * 86400), ""
    whole, _, part = f"{abs(number) * 86400:.{section.parts}f}".partition(".")
    return int(whole), f".{part}" if part.strip("0") else ""


def _elapsed(section: Section, number: float) -> str:
    """Return how long something took: `36:00`. The first letters count all of it, the others what is left."""
    left, part = _seconds(section, number)
    says_so = any("-" in words for words in section.spans[::2])
    parts = ["-" if number < 0 and left and not says_so else ""]
    for words, letters in zip(section.spans[::2], section.spans[1::2], strict=True):
        unit = {"d": 86400, "h": 3600, "m": 60, "s": 1}.get(letters[0], 0)
        count, left = divmod(left, unit) if unit else (0, left)
        parts += [words, str(count).zfill(2 if words == ":" else len(letters)) if unit else ""]
    return "".join([*parts, part, section.behind]).strip()
