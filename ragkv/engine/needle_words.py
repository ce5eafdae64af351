"""Words of generated documents: subjects with their relations, names, and sentences that answer nothing."""

from __future__ import annotations

import random
import re
from typing import NamedTuple


class Topic(NamedTuple):
    """A kind of subject.

    Attributes:
        noun: The noun for the subject.
        intro: First sentence of a document about the subject {e}.
        relations: Triples (kind of the answer {v}, sentence about the subject {e}, question).
    """

    noun: str
    intro: str
    relations: tuple[tuple[str, str, str], ...]


FACTS = """
firm | {e} is a firm that most people in the valley know by name. | \
person chief executive, treasurer, chief engineer; firm supplier; animal emblem
money | {e} had a revenue of {v} last year. | What was the revenue of {e}?
person | {e} was founded by {v} after a long career elsewhere. | Who founded {e}?
town | {e} is based in {v}. | Where is {e} based?
product | {e} makes {v}. | What does {e} make?
count | {e} employs {v} people in good years and bad. | How many people does {e} employ?
year | {e} was established in {v}. | When was {e} established?
firm | {e} was bought by {v} after months of talks. | Who bought {e}?
town | {e} opened a factory in {v} to be nearer the railway. | Where did {e} open a factory?
town | {e} has its warehouse in {v}. | Where is the warehouse of {e}?

person | {e} is often asked to tell the story again. |
town | {e} was born in {v}, in a house beside the church. | Where was {e} born?
job | {e} works as a {v} and would not change. | What does {e} work as?
person | {e} is married to {v}. | Who is {e} married to?
person | {e} was taught by {v}, who was strict but fair. | Who taught {e}?
town | {e} lives in {v}. | Where does {e} live?
firm | {e} worked for {v} until the workshop closed. | Which company did {e} work for?
prize | {e} won {v} and kept quiet about it. | Which prize did {e} win?
book | {e} wrote {v} in a single summer. | Which book did {e} write?
town | {e} moved to {v} after the flood. | Where did {e} move to?
language | {e} speaks {v} at home. | Which language does {e} speak?
machine | {e} invented {v} in a garden shed. | What did {e} invent?
subject | {e} studied {v}. | What did {e} study?
town | {e} studied in {v} for four years. | Where did {e} study?
year | {e} was born in {v}. | When was {e} born?

town | {e} is a small town with a long memory. | \
person librarian, doctor, harbour master; town twin town; animal emblem; food favourite dish
length | The altitude of {e} is {v}. | What is the altitude of {e}?
area | The area of {e} is {v}, most of it meadow. | What is the area of {e}?
person | The mayor of {e} is {v}, now in a second term. | Who is the mayor of {e}?
town | {e} lies on the river {v}. | Which river flows through {e}?
count | {e} has {v} inhabitants, counting the farms. | How many inhabitants does {e} have?
product | {e} is known for its {v}. | What is {e} known for?
year | {e} was founded in {v}. | When was {e} founded?
town | {e} lies in the region of {v}. | In which region does {e} lie?

ship | {e} is a ship that still turns heads in any harbour. | \
person captain, cook, first mate; product usual cargo; animal figurehead
speed | {e} has a top speed of {v}. | What is the top speed of {e}?
firm | {e} was built by {v}. | Who built {e}?
town | {e} was built in {v}. | Where was {e} built?
year | {e} was launched in {v}. | When was {e} launched?
count | {e} carries {v} passengers. | How many passengers does {e} carry?
length | {e} is {v} long. | How long is {e}?
person | {e} was designed by {v}, who was quite unknown then. | Who designed {e}?
firm | {e} is owned by {v}. | Who owns {e}?
town | {e} sails to {v} every week. | Where does {e} sail to?
"""
"""Per topic: a row (noun | introduction | nouns for sentences "The noun of {e} is {v}."), then rows of relations."""


def _topic(block: str) -> Topic:
    (noun, intro, traits), *rows = (re.split(r" \| ?", row) for row in block.splitlines())
    relations = [(kind, sentence, question) for kind, sentence, question in rows]
    for kind, nouns in (trait.split(" ", 1) for trait in traits.split("; ") if trait):
        ask = "Who" if kind in ("person", "firm") else "What"
        relations += [(kind, f"The {n} of {{e}} is {{v}}.", f"{ask} is the {n} of {{e}}?") for n in nouns.split(", ")]
    return Topic(noun, intro, tuple(relations))


TOPICS = tuple(_topic(block) for block in FACTS.strip().split("\n\n"))


PROSE = """
Not everybody agreed at the time, and the letters of those years are full of objections. The weather has always had its
say in such matters. Older people remember it differently, and they may well be right. In {year} a storm closed the
coast road for more than a week. A drawing made by {person} has since been lost. The newspapers of {town} wrote about it
twice and then forgot it. For a while nothing much happened, and perhaps that was for the best. Some say that {person}
had a hand in it, but there is no proof. What began as a joke became a habit, and then a rule. The letters of {year} are
kept in a box and may be read on request. It took three meetings and a great deal of tea to settle the matter. By {year}
most of the old sheds had been pulled down. A small exhibition in {town} showed photographs from those days. The path is
steep in places, but a handrail was added in {year}. In those days a journey to {town} still took the better part of a
day. There were setbacks too, as the minutes of {year} make plain. A similar case in {town} ended badly, which made
everyone careful. The winter of {year} was so hard that even the ducks walked. Nothing here was simple.
"""


ASIDES = tuple(re.split(r"(?<=\.)\s", " ".join(PROSE.split())))


WOMEN = "Anna Clara Elena Greta Ida Karin Lena Marta Nadia Olga Rosa Sofia Tara Vera Wanda Helen Alice Emma".split()


MEN = "Ben David Frank Hugo Jonas Luis Nils Omar Paul Rafael Stefan Tomas Viktor Peter Henrik Bruno Felix Ivan".split()


ONSETS = "b br c d dr f fl g gr h j k l m n p r s st t tr v w".split()


VOWELS = "a e i o u a e i o ei ia".split()


CODAS = ["", "", "l", "m", "n", "r", "s", "nd", "rk"]


PHRASES = """
town: *
firm: * + Works/Foundry/Trading/Partners/Instruments/Textiles/Brewery/Optics/Industries/Tools/Motors
ship: the + * + Star/Queen/Wind/Spirit/Arrow/Maid/Lantern/Pearl
prize: the + * + Medal/Prize/Cup
product: brass/copper/linen/glass/clay/silver/wool/cork + lanterns/hinges/buttons/kettles/baskets/bells/boxes
food: plum/apple/leek/barley/almond/salmon/cherry/lentil/mushroom/lemon + soup/cake/bread/pie/jam/stew/pudding
animal: a + red/white/blind/sleeping/spotted/lame/dancing + otter/heron/hare/fox/owl/badger/goat/swan/crane
book: The + Silent/Crooked/Patient/Hidden + Orchard/Window/Lantern/Harbour/Mirror/Feather/Compass
machine: the + folding/steam/silent/portable/pocket + ladder/saw/pump/oven/lathe/plough/press
job: baker/carpenter/teacher/nurse/surveyor/gardener/tailor/printer/plumber/weaver/potter/miller
language: Welsh/Finnish/Danish/Polish/Basque/Korean/Turkish/Catalan/Irish/Greek/Dutch/Swahili
subject: botany/geometry/astronomy/medicine/chemistry/geology/navigation/rhetoric/algebra/sculpture
"""


FORMS = {
    "person": f"{'/'.join(WOMEN + MEN)} + *",
    "year": "/".join(str(year) for year in range(1702, 2015)),
    "count": "/".join(f"{count:,}" for count in range(1001, 9890, 7)),
    "money": "/".join(f"{crowns:,} crowns" for crowns in range(2100, 98000, 67)),
    "length": "/".join(f"{metres} metres" for metres in range(31, 980)),
    "speed": "/".join(f"{knots} knots" for knots in range(9, 99)),
    "area": "/".join(f"{hectares:,} hectares" for hectares in range(110, 9000, 13)),
} | dict(row.split(": ") for row in PHRASES.strip().splitlines())
"""Maps a kind of answer to its words, joined by " + ". Each word is a list of alternatives; * is an invented name."""


class Names:
    """Draws values of a kind. No drawn value is part of another one, so each can occur once in a set."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._values: set[str] = set()
        self._words: set[str] = set()

    def draw(self, kind: str) -> str | None:
        """Draw a new value of `kind`; None if the kind has run out."""
        for _ in range(80):
            words = (self.rng.choice(part.split("/")) for part in FORMS[kind].split(" + "))
            value = " ".join(self._word() if word == "*" else word for word in words)
            key = value.lower()
            if not any(key in other or other in key for other in self._values):
                self._values.add(key)
                return value
        return None

    def _word(self) -> str:
        """Invent a proper name that no other name of the set uses."""
        word = ""
        while len(word) < 5 or word in self._words:
            word = "".join(self.rng.choice(part) for part in (ONSETS, VOWELS, CODAS) * 2)
        self._words.add(word)
        return word.capitalize()
