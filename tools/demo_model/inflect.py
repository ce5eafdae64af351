"""English word forms, as far as the generator needs them: plurals, verb forms, articles."""

from __future__ import annotations

import re

_FORMS = """
give gave given; take took taken; make made made; build built built; sell sold sold; buy bought bought; bring
brought brought; keep kept kept; hold held held; find found found; write wrote written; draw drew drawn; sing sang
sung; wear wore worn; choose chose chosen; send sent sent; lend lent lent; lose lost lost; win won won; teach taught
taught; catch caught caught; throw threw thrown; break broke broken; steal stole stolen; hide hid hidden; ride rode
ridden; drive drove driven; eat ate eaten; drink drank drunk; grow grew grown; know knew known; see saw seen; hear
heard heard; meet met met; leave left left; lead led led; feed fed fed; pay paid paid; spend spent spent; tell told
told; forget forgot forgotten; forgive forgave forgiven; begin began begun; sink sank sunk; hang hung hung; strike
struck struck; shake shook shaken; tear tore torn; bind bound bound; burn burnt burnt; spill spilt spilt; mend
mended mended; sweep swept swept; dig dug dug; cut cut cut; put put put; set set set; shut shut shut; split split
split; read read read; fight fought fought; seek sought sought; weave wove woven; bite bit bitten; blow blew blown;
swear swore sworn; shoot shot shot; leave behind left behind left behind; take apart took apart taken apart; give
away gave away given away; pick up picked up picked up; put off put off put off; set up set up set up; bring back
brought back brought back; look after looked after looked after; pay for paid for paid for; look for looked for
looked for; wait for waited for waited for; ask for asked for asked for; drop dropped dropped; stop stopped stopped;
plan planned planned; prefer preferred preferred; wrap wrapped wrapped; trap trapped trapped; grab grabbed grabbed;
admit admitted admitted; permit permitted permitted; step over stepped over stepped over; refer to referred to
referred to
"""
IRREGULAR: dict[str, tuple[str, str]] = {}
"""Past and participle by base form; doubled consonants and phrasal verbs count as irregular."""
for _entry in " ".join(_FORMS.split()).split("; "):
    _words, _third = _entry.split(), len(_entry.split()) // 3
    _base, _past, _participle = (" ".join(_words[i * _third : (i + 1) * _third]) for i in range(3))
    IRREGULAR[_base] = (_past, _participle)


def plural(phrase: str) -> str:
    """The plural of a noun phrase."""
    if phrase.endswith(("s", "x", "z", "ch", "sh")):
        return phrase + "es"
    return phrase[:-1] + "ies" if phrase.endswith("y") and phrase[-2:-1] not in "aeiou" else phrase + "s"


def past(verb: str) -> str:
    """The past tense."""
    return IRREGULAR[verb][0] if verb in IRREGULAR else _ed(verb)


def participle(verb: str) -> str:
    """The past participle."""
    return IRREGULAR[verb][1] if verb in IRREGULAR else _ed(verb)


def gerund(verb: str) -> str:
    """The -ing form."""
    first, *rest = verb.split(" ")
    doubled = verb in IRREGULAR and IRREGULAR[verb][0].startswith(first + first[-1])
    if doubled or first in ("cut", "put", "set", "shut", "split", "sit", "dig", "win", "begin", "forget"):
        first += first[-1]
    elif first.endswith("e") and not first.endswith("ee"):
        first = first[:-1]
    return " ".join([first + "ing", *rest])


def third(verb: str) -> str:
    """The third person singular."""
    first, *rest = verb.split(" ")
    return " ".join([plural(first), *rest])


def _ed(verb: str) -> str:
    first, *rest = verb.split(" ")
    if first.endswith("e"):
        first += "d"
    else:
        first = first[:-1] + "ied" if first.endswith("y") and first[-2:-1] not in "aeiou" else first + "ed"
    return " ".join([first, *rest])


def article(phrase: str) -> str:
    """The phrase with "a" or "an"."""
    return ("an " if phrase[:1].lower() in "aeiou" else "a ") + phrase


def tidy(text: str) -> str:
    """ "a" before vowels becomes "an"; where two articles met, one stays."""
    text = re.sub(r"\b([Aa]) ([aeiouAEIO]\w)", r"\1n \2", text)
    return re.sub(r"\b([Tt]he) (?:[Tt]he|an?) ", r"\1 ", text)


FORMS = {"ed": past, "en": participle, "ing": gerund, "plural": plural, "a": article}


def inflect(slot: str, value: str) -> str:
    """The form that a slot asks for: "verb+ed", "noun+s" (plural, or third person of a verb), "animal+a"."""
    base, _, form = slot.partition("+")
    if form == "s":
        return third(value) if base.rstrip("0123456789") == "verb" else plural(value)
    return FORMS[form](value)
