"""Proper names: mostly invented, a few of random letters or other scripts, so that any string is copied."""

from __future__ import annotations

import string

from tools.demo_model.calendar import MONTHS, WEEKDAYS
from tools.demo_model.dice import Dice
from tools.demo_model.inflect import plural
from tools.demo_model.phrases import thing

ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p r s sh sk st t th tr v w y z b d l m n r s t k".split()
VOWELS = "a e i o u a e i o a e o ei ia ou ai ea".split()
CODAS = ["", "", "", "", "", "", "l", "n", "r", "s", "l", "n", "r", "m", "nd", "rk", "th", "x", "ck", "ng", "sk", "rt"]
ACCENTS = {
    "a": "áàâäãåā", "e": "éèêëę", "i": "íîï", "o": "óòôöõø", "u": "úùûü", "c": "çč", "n": "ñń", "s": "šś", "z": "žż",
}  # fmt: skip
SCRIPTS = [(0x391, 0x3A9), (0x410, 0x44F), (0x4E00, 0x9FA0), (0xAC00, 0xD7A0), (0x3041, 0x3090), (0x5D0, 0x5EA)]
PLACES = "ton ville burg ford haven stad mouth field by minster dale wick holm berg".split()
BEFORE_PLACE = "Port New North South East West Saint San Fort Mount Old Lower Upper Great Little".split()
AFTER_PLACE = "City Valley Bay Springs Island Hill Harbour Falls Creek Cross Green Bridge Heath".split()
FIRM = (
    "Industries Labs Works Group Systems Foundry Trading Partners Instruments Robotics Motors Foods Bank Energy Press "
    "Records Textiles Brewery Optics Marine Software Pharma Logistics Studios Ltd Inc Ceramics Analytics Tools Mills "
    "Shipyard Holdings Engineering Bakery Publishing Insurance Airways Rail Dynamics Materials Networks"
).split()
ORG = "Institute Society Council Foundation Museum Academy Association Trust Committee Ministry Union Authority".split()
BUILDING = (
    "Tower Hall Church Bridge Lighthouse Mill House Castle Station Theatre Library Chapel Palace Barn Abbey Gate Court "
    "Hospital Market Warehouse School Temple Pier Observatory Brewery Fort Dam Villa Manor"
).split()
MUSEUM = "Museum Gallery Library Collection Archive".split()
STAY = "Hotel Inn Lodge Hostel Restaurant Café Tavern Guesthouse Campsite".split()
WATERS = "River Lake Mountain Island Valley Creek Peak Glacier Falls Hills Canyon Bay Forest".split()
PARK = ["Park", "Garden", "Reserve", "Trail", "Wood", "Nature Reserve", "Common", "Meadows"]
TEAM = ["United", "City", "Rovers", "Athletic", "Orchestra", "Choir", "Tigers", "Falcons", "Rangers", "Rowing Club"]
DEVICES = (
    "camera drill stove kettle sensor printer scanner pump heater lamp router radio clock engine mixer charger speaker "
    "telescope microscope scale fan boiler dryer lock meter monitor keyboard bicycle saw tablet"
).split()
MODELS = "Pro Max Mini Plus Eco One Air II III Lite Ultra Home".split()
EVENTS = (
    "Festival Conference Market Regatta Fair Marathon Congress Summit Race Parade Tournament Cup Carnival Workshop "
    "Rally"
).split()
BATTLES = "Battle Siege Treaty Uprising Strike Rebellion Raid March".split()
COURSES = "School Academy Institute College".split()


def capital(text: str) -> str:
    """The text with a capital at its start."""
    return text[:1].upper() + text[1:]


def word(v: Dice) -> str:
    """An invented proper name of one word."""
    text = "".join(v.one(part) for part in (ONSETS, VOWELS, CODAS) * v.whole(1, 2)) + (
        v.one("aeioy") if v.chance(0.2) else ""
    )
    return (text if len(text) > 3 else text + v.one(VOWELS) + v.one(("n", "l", "r", "s", "t"))).capitalize()


def name(v: Dice) -> str:
    """A proper name: a known surname, an invented one, a word, letters."""
    u = v.rng.random()
    if u < 0.30:
        text = v.pick("surname")
    elif u < 0.80:
        text = word(v)
    elif u < 0.90:
        text = v.pick("noun").split()[-1].capitalize()
    elif u < 0.94:
        text = "".join(v.one(string.ascii_uppercase) for _ in range(v.whole(2, 4)))
    else:
        text = "".join(v.one(string.ascii_lowercase) for _ in range(v.whole(4, 9))).capitalize()
    return _vary(v, text)


def _vary(v: Dice, text: str) -> str:
    u = v.rng.random()
    if u < 0.06:
        at = int(v.rng.random() * len(text))
        accents = ACCENTS.get(text[at])
        return text[:at] + v.one(accents) + text[at + 1 :] if accents else text
    if u < 0.066:
        low, high = SCRIPTS[int(v.rng.random() * len(SCRIPTS))]
        return "".join(chr(v.whole(low, high)) for _ in range(v.whole(2, 5)))
    return f"{text}-{word(v)}" if u < 0.08 else text


def person(v: Dice) -> str:
    """First name and surname, sometimes with initials, particles or a title."""
    first = v.pick("firstname") if v.chance(0.75) else word(v)
    last, u = name(v), v.rng.random()
    if u < 0.80:
        return f"{first} {last}"
    if u < 0.85:
        return f"{first} {v.one(string.ascii_uppercase)}. {last}"
    if u < 0.90:
        return f"{v.one(('Dr', 'Professor', 'Captain', 'Sir', 'Dr.', 'Lady', 'Judge', 'Sister'))} {first} {last}"
    if u < 0.95:
        return f"{first} {v.one(('van', 'de', 'von', 'da', 'del', 'al', 'van der', 'Mc', 'ben'))} {last}"
    return f"{first} {name(v)} {last}"


def city(v: Dice) -> str:
    """A town."""
    u = v.rng.random()
    if u < 0.5:
        return word(v) if v.chance(0.6) else name(v)
    if u < 0.7:
        return word(v) + v.one(PLACES)
    if u < 0.85:
        return f"{v.one(BEFORE_PLACE)} {word(v)}"
    return f"{word(v)} {v.one(AFTER_PLACE)}"


def region(v: Dice) -> str:
    """A region or a province."""
    return v.one((word(v), f"{word(v)}land", f"{word(v)} {v.one(('Province', 'County', 'Coast', 'Valley'))}", city(v)))


def company(v: Dice) -> str:
    """A firm."""
    u = v.rng.random()
    if u < 0.55:
        return f"{name(v)} {v.one(FIRM)}"
    if u < 0.68:
        return f"{name(v)} and {name(v)}"
    if u < 0.80:
        return v.pick("noun").split()[-1].capitalize() + v.pick("noun").split()[-1]
    return f"{name(v)} {capital(v.pick('noun'))}" if u < 0.92 else name(v)


def org(v: Dice) -> str:
    """An institution, without its article."""
    u = v.rng.random()
    if u < 0.6:
        return f"{name(v)} {v.one(ORG)}"
    if u < 0.8:
        return f"{v.one(ORG)} of {capital(v.pick('subject'))}"
    return f"{city(v)} {v.one(('Research Centre', 'Arts Council', 'Water Board', 'Health Service', 'History Society'))}"


def university(v: Dice) -> str:
    """A place of study, without its article."""
    forms = ("University of {}", "{} University", "{} College", "{} Academy", "{} School of Design")
    return v.one(forms).format(city(v))


def building(v: Dice) -> str:
    """A building."""
    return f"{v.one((name(v), name(v), city(v), capital(v.pick('adj')), capital(v.pick('noun'))))} {v.one(BUILDING)}"


def ship(v: Dice) -> str:
    """A ship, a train or the like."""
    call = word(v) if v.chance(0.5) else f"{capital(v.pick('adj'))} {capital(v.pick('noun'))}"
    return v.one(("", "", "", "MV ", "SS ")) + call


def product(v: Dice) -> str:
    """What a firm sells."""
    if v.chance(0.5):
        return device(v)
    return plural(thing(v))


def device(v: Dice) -> str:
    """An appliance with a model name."""
    u, brand = v.rng.random(), name(v)
    if u < 0.3:
        return f"{brand} {v.whole(2, 9000)}"
    if u < 0.5:
        return f"{brand} {v.one(DEVICES)}"
    if u < 0.7:
        return f"{brand} {v.one(string.ascii_uppercase)}{v.whole(1, 900)}"
    return f"{brand} {v.one(MODELS)}" if u < 0.85 else f"{brand}-{v.whole(1, 99)} {v.one(DEVICES)}"


def software(v: Dice) -> str:
    """A program."""
    u = v.rng.random()
    if u < 0.35:
        return name(v)
    if u < 0.6:
        return v.pick("noun").split()[-1] + v.one(("db", "kit", "ly", "fs", "ctl", "d", "lib", "-cli"))
    return name(v) + v.one(("DB", "OS", "Flow", "Net", "Kit", "ML", " Server", " Cloud", " Desk"))


def work(v: Dice) -> str:
    """The title of a book, a film, a picture."""
    noun, adj = capital(v.pick("noun")), capital(v.pick("adj"))
    u = v.rng.random()
    if u < 0.4:
        return f"The {adj} {noun}"
    if u < 0.55:
        return f"The {noun} of {city(v)}"
    if u < 0.7:
        return f"{adj} {capital(plural(v.pick('noun')))}"
    if u < 0.85:
        return f"The {noun} and the {capital(v.pick('noun'))}"
    return v.one((f"{noun} at {v.one(WEEKDAYS)}", f"Letters to {v.pick('firstname')}", f"A {noun} in {v.one(MONTHS)}"))


def prize(v: Dice) -> str:
    """A prize, without its article."""
    return f"{v.one((name(v), capital(v.pick('noun'))))} {v.one(('Prize', 'Medal', 'Award', 'Cup', 'Fellowship'))}"


def team(v: Dice) -> str:
    """A club or an orchestra."""
    return f"{city(v)} {v.one(TEAM)}"


def species(v: Dice) -> str:
    """An animal or a plant."""
    beast, u = v.pick("animal" if v.chance(0.6) else "plant"), v.rng.random()
    if u < 0.4:
        return f"{name(v)} {beast}"
    if u < 0.7:
        parts = v.one(("tailed", "winged", "eyed", "leaved", "backed", "throated", "crested"))
        return f"{v.pick('colour')}-{parts} {beast}"
    return f"{v.pick('adj')} {v.pick('noun')} {beast}"


def dish(v: Dice) -> str:
    """Something to eat."""
    kind = v.one(
        "stew soup cake bread pie pudding salad curry tart dumplings stew roast porridge pancake sauce".split()
    )
    return f"{v.one((name(v), capital(v.pick('food')), city(v), capital(v.pick('adj'))))} {kind}"


def event(v: Dice) -> str:
    """A festival or a battle."""
    if v.chance(0.2):
        return f"{v.one(BATTLES)} of {city(v)}"
    return f"{v.one((city(v), name(v), capital(v.pick('noun')), capital(v.pick('adj'))))} {v.one(EVENTS)}"


def disease(v: Dice) -> str:
    """An illness or a medicine."""
    u = v.rng.random()
    if u < 0.4:
        return word(v).lower() + v.one(("itis", "osis", "emia", "algia", "in", "ol", "fen"))
    return f"{name(v)} {v.one(('fever', 'syndrome', 'disease', 'rash', 'drops', 'cough', 'palsy'))}"


def mineral(v: Dice) -> str:
    """A mineral or a material."""
    return (
        word(v).lower() + v.one(("ite", "ium", "ine", "one", "ane"))
        if v.chance(0.7)
        else f"{name(v)} {v.pick('material')}"
    )


def planet(v: Dice) -> str:
    """A body in space, or a probe."""
    u = v.rng.random()
    if u < 0.4:
        return word(v)
    if u < 0.7:
        return f"{name(v)}-{v.whole(2, 999)}{v.one(('', 'b', 'c'))}"
    return f"{v.one(('Comet', 'Asteroid', 'Probe', 'Star'))} {name(v)}"


def policy(v: Dice) -> str:
    """An organisation that has rules."""
    return v.one((company, org, university))(v)


def project(v: Dice) -> str:
    """A project."""
    return v.one((f"Project {capital(v.pick('noun'))}", f"{name(v)} Project", f"{capital(v.pick('noun'))} Initiative"))


def institution(v: Dice) -> str:
    """Any place, organisation or thing with a name."""
    makers = (company, org, building, museum, ship, software, event, device, school, team, hotel, park, project, work)
    return v.one(makers)(v)


def river(v: Dice) -> str:
    """A river, a lake, a mountain."""
    u = v.rng.random()
    return (
        word(v)
        if u < 0.4
        else f"{v.one(('Lake', 'Mount', 'River'))} {word(v)}"
        if u < 0.6
        else f"{word(v)} {v.one(WATERS)}"
    )


def museum(v: Dice) -> str:
    """A museum."""
    return f"{v.one((city(v), name(v), capital(v.pick('noun'))))} {v.one(MUSEUM)}"


def hotel(v: Dice) -> str:
    """A place to stay or to eat."""
    return f"{v.one((name(v), capital(v.pick('adj')), capital(v.pick('noun'))))} {v.one(STAY)}"


def park(v: Dice) -> str:
    """A park."""
    return f"{name(v)} {v.one(PARK)}"


def school(v: Dice) -> str:
    """A school."""
    return f"{name(v)} {v.one(COURSES)}"
