"""What fills a slot: `Values.draw("city")` makes a fresh value. Types: the makers below and the banks' word lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.demo_model.calendar import MONTHS, SEASONS, WEEKDAYS
from tools.demo_model.dice import Dice, Make
from tools.demo_model.inflect import article, plural
from tools.demo_model.measures import (
    CENTURIES,
    ORDINALS,
    SMALL,
    clock,
    code,
    date,
    day,
    email,
    measure,
    money,
    number,
    option,
    path,
    phone,
    role,
    room,
    small,
    url,
    version,
    year,
)
from tools.demo_model.names import (
    building,
    city,
    company,
    device,
    disease,
    dish,
    event,
    hotel,
    institution,
    mineral,
    museum,
    name,
    org,
    park,
    person,
    planet,
    policy,
    prize,
    product,
    project,
    region,
    river,
    school,
    ship,
    software,
    species,
    team,
    university,
    word,
    work,
)
from tools.demo_model.phrases import foods, group, job, listing, thing, things, verbed, verbing


class Values(Dice):
    """Draws values of slot types."""

    def draw(self, slot: str) -> str:
        """A fresh value for a slot: its type and, perhaps, a digit. Raises KeyError for an unknown type."""
        kind = slot.rstrip("0123456789")
        make = MAKERS.get(kind)
        return make(self) if make else self.pick(kind)


def knows(kind: str, lists: Mapping[str, Sequence[str]]) -> bool:
    """Whether a slot of this type can be filled. lists: the banks' word lists."""
    return kind in MAKERS or kind in lists


MAKERS: dict[str, Make] = {
    "name": name, "person": person, "city": city, "region": region, "company": company, "org": org,
    "university": university, "building": building, "ship": ship, "product": product, "device": device,
    "software": software, "work": work, "prize": prize, "team": team, "species": species, "dish": dish,
    "event": event, "disease": disease, "mineral": mineral, "planet": planet, "policy": policy, "project": project,
    "river": river, "museum": museum, "hotel": hotel, "park": park, "school": school, "institution": institution,
    "number": number, "small": small, "year": year, "date": date, "day": day, "time": clock, "money": money,
    "version": version, "phone": phone, "email": email, "url": url, "code": code, "option": option, "path": path,
    "length": measure("length", 2, 3000), "weight": measure("weight", 2, 2000),
    "duration": measure("duration", 2, 300), "area": measure("area", 2, 9000), "volume": measure("volume", 2, 3000),
    "speed": measure("speed", 2, 900), "temperature": measure("temperature", 2, 900),
    "percent": measure("percent", 2, 99), "memory": measure("memory", 2, 900), "power": measure("power", 2, 2000),
    "month": lambda v: v.one(MONTHS), "weekday": lambda v: v.one(WEEKDAYS),
    "season": lambda v: v.one(SEASONS) if v.chance(0.7) else f"{v.one(('early', 'late'))} {v.one(SEASONS)}",
    "decade": lambda v: f"{v.whole(150, 202)}0s", "century": lambda v: f"{v.one(CENTURIES)} century",
    "ordinal": lambda v: v.one(ORDINALS), "age": lambda v: str(v.whole(6, 99)) if v.chance(0.8) else v.one(SMALL),
    "ratio": lambda v: f"{v.whole(1, 9)}:{v.whole(2, 40)}" if v.chance(0.6) else f"{v.whole(1, 9)} to {v.whole(1, 20)}",
    "score": lambda v: f"{v.whole(0, 9)}{v.one(('–', '-', ' to '))}{v.whole(0, 40)}",
    "port": lambda v: str(v.whole(20, 65000)), "room": room, "role": role, "job": job, "group": group,
    "a_job": lambda v: article(job(v)), "thing": thing, "a_thing": lambda v: article(thing(v)), "things": things,
    "nouns": lambda v: plural(v.pick("noun")), "list": listing, "foods": foods, "verbed": verbed, "verbing": verbing,
    "street": lambda v: f"{name(v)} {v.one(('Street', 'Road', 'Lane', 'Square', 'Avenue', 'Quay'))}",
    "ethnic": lambda v: word(v) + v.one(("ian", "ese", "ish", "i", "an")),
    "animals": lambda v: plural(v.pick("animal")),
}  # fmt: skip
