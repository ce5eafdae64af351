"""Numbers, dates and measures."""

from __future__ import annotations

import string

from tools.demo_model.calendar import MONTHS
from tools.demo_model.dice import Dice, Make
from tools.demo_model.names import word

CENTURIES = "tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth".split()
SMALL = "two three four five six seven eight nine ten eleven twelve fifteen twenty".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth twelfth twentieth".split()
ROOMS = ["east wing", "basement", "attic", "ground floor", "north tower", "courtyard", "cellar", "hall", "library"]
UNITS = {
    "length": "metres m kilometres km centimetres cm millimetres mm feet miles inches yards".split(),
    "weight": "kilograms kg grams g tonnes pounds kilos tons ounces".split(),
    "duration": "minutes hours days weeks months years seconds days weeks months years".split(),
    "area": ["hectares", "square kilometres", "acres", "square metres", "square miles"],
    "volume": ["litres", "L", "ml", "gallons", "cubic metres", "millilitres", "barrels", "cups"],
    "speed": ["km/h", "knots", "miles per hour", "rpm", "metres per second", "kilometres per hour", "Mbps"],
    "temperature": ["degrees", "°C", "degrees Celsius", "degrees Fahrenheit", "°F"],
    "percent": ["%", "percent", "per cent", "%"],
    "memory": ["MB", "GB", "KB", "TB", "gigabytes", "megabytes", "MiB"],
    "power": ["watts", "W", "kW", "kilowatts", "volts", "megawatts", "horsepower"],
}
CURRENCIES = "dollars euros pounds crowns francs rupees yen marks pesos shillings".split()


def number(v: Dice) -> str:
    """An integer, in digits with or without separators, or in words."""
    u = v.rng.random()
    if u < 0.12:
        return v.one(SMALL)
    n = v.whole(*v.one(((2, 20), (10, 99), (100, 999), (1000, 9999), (10000, 900000))))
    return f"{n:,}" if n > 999 and v.chance(0.6) else str(n)


def small(v: Dice) -> str:
    """2 to 20."""
    return v.one(SMALL) if v.chance(0.5) else str(v.whole(2, 20))


def _quantity(v: Dice, low: int, high: int) -> str:
    u = v.rng.random()
    n = v.whole(low, high if u < 0.3 else max(low, high // 10))
    if u < 0.65:
        return f"{n:,}" if n > 999 else str(n)
    return f"{n}.{v.whole(1, 9)}" if u < 0.85 else v.one(SMALL) if u < 0.95 else f"{n}.{v.whole(10, 99)}"


def measure(kind: str, low: int, high: int) -> Make:
    units = UNITS[kind]

    def make(v: Dice) -> str:
        unit, amount = v.one(units), _quantity(v, low, high)
        if amount[0].isdigit():
            return amount + ("" if unit in ("%", "°C", "°F") or (len(unit) <= 2 and v.chance(0.25)) else " ") + unit
        return f"{amount} {unit if len(unit) > 2 else units[0] if len(units[0]) > 2 else 'percent'}"

    return make


def year(v: Dice) -> str:
    """A year."""
    return str(v.whole(1500, 1899) if v.chance(0.35) else v.whole(1900, 2030))


def date(v: Dice) -> str:
    """A full date."""
    u, month, day_, year_ = v.rng.random(), v.one(MONTHS), v.whole(1, 31), year(v)
    if u < 0.55:
        return f"{day_} {month} {year_}"
    return (
        f"{month} {day_}, {year_}"
        if u < 0.85
        else f"{month} {year_}"
        if u < 0.95
        else f"{year_}-{v.whole(1, 12):02d}-{day_:02d}"
    )


def day(v: Dice) -> str:
    """Day and month."""
    return f"{v.whole(1, 31)} {v.one(MONTHS)}" if v.chance(0.7) else f"{v.one(MONTHS)} {v.whole(1, 31)}"


def clock(v: Dice) -> str:
    """A time of day."""
    u, hour, minute = v.rng.random(), v.whole(1, 12), v.one(("00", "15", "30", "45", "20", "10", "40"))
    if u < 0.4:
        return f"{v.whole(0, 23)}:{minute}"
    if u < 0.7:
        return f"{hour} {v.one(('a.m.', 'p.m.', 'am', 'pm'))}"
    if u < 0.85:
        return f"{hour}:{minute} {v.one(('a.m.', 'p.m.', 'am', 'pm'))}"
    return v.one(("noon", "midnight", f"{v.one(SMALL[:11])} o'clock", f"half past {v.one(SMALL[:10])}"))


def money(v: Dice) -> str:
    """A sum."""
    u = v.rng.random()
    n = v.whole(*v.one(((1, 99), (100, 999), (1000, 99999))))
    amount = f"{n:,}" if v.chance(0.7) else str(n)
    if u < 0.35:
        return v.one("$€£") + amount + (f".{v.whole(10, 99)}" if n < 100 and v.chance(0.3) else "")
    if u < 0.45:
        return f"{v.one('$€£')}{v.whole(1, 90)} million"
    if u < 0.55:
        return f"{_quantity(v, 2, 900)} {v.one(('million', 'billion', 'thousand'))} {v.one(CURRENCIES)}"
    return f"{amount if v.chance(0.9) else v.one(SMALL)} {v.one(CURRENCIES)}"


def version(v: Dice) -> str:
    """A version number."""
    text = ".".join(str(v.whole(0, 20)) for _ in range(v.whole(2, 3)))
    return f"v{text}" if v.chance(0.15) else text


def phone(v: Dice) -> str:
    """A telephone number."""
    digits = [str(v.whole(0, 9)) for _ in range(8)]
    return v.one(("0", "+44 ", "+1 ", "555-")) + "".join(digits[:4]) + v.one(("-", " ", "")) + "".join(digits[4:])


def email(v: Dice) -> str:
    """An address."""
    who = v.one(("help", "info", "support", "office", "contact", v.pick("firstname").lower()))
    where = v.one((v.pick("noun").replace(" ", ""), word(v).lower()))
    return f"{who}@{where}.{v.one(('com', 'org', 'net', 'example', 'io'))}"


def url(v: Dice) -> str:
    """A web address."""
    page = v.one(("", "/" + v.pick("noun").replace(" ", "-")))
    return f"{v.one(('https://', 'www.', ''))}{word(v).lower()}.{v.one(('com', 'org', 'dev', 'net'))}{page}"


def code(v: Dice) -> str:
    """A part number, an identifier."""
    letters = string.ascii_uppercase
    head = "".join(v.one(letters) for _ in range(v.whole(1, 3)))
    return head + v.one(("", "-", " ")) + "".join(v.one(string.digits + "AX") for _ in range(v.whole(2, 5)))


def option(v: Dice) -> str:
    """The name of a setting."""
    a, b = v.pick("noun").replace(" ", "_"), v.pick("noun").replace(" ", "_")
    return v.one((f"{a}_{b}", f"--{a}-{b}", f"{a}.{b}", f"{a}_{b}".upper()))


def path(v: Dice) -> str:
    """A file path."""
    a, b = v.pick("noun").replace(" ", "_"), v.pick("noun").replace(" ", "-")
    return v.one(
        (
            f"/{a}/{b}.{v.one(('toml', 'yaml', 'json', 'conf', 'log'))}",
            f"/etc/{a}",
            f"{b}.{v.one(('toml', 'yaml', 'ini'))}",
        )
    )


def room(v: Dice) -> str:
    """A place in a building."""
    u = v.rng.random()
    if u < 0.4:
        return f"the {v.one(ORDINALS[:8])} floor"
    if u < 0.6:
        return f"room {v.whole(1, 600)}"
    return f"the {v.one(ROOMS)}"


def role(v: Dice) -> str:
    """An office that one person of a group holds."""
    base, u = v.pick("office"), v.rng.random()
    if u < 0.5:
        return base
    return (
        f"{v.one(('chief', 'head', 'deputy', 'lead', 'senior', 'first', 'assistant'))} {base}"
        if u < 0.8
        else f"{v.pick('noun')} {base}"
    )
