"""Responses of OpenAI's API as turns of conversations.

A response is a turn: its id has the name of the conversation and the number of the turn. A response that continues the
latest turn becomes the next one, so the conversation's KV is reused. One that continues an earlier turn is a branch:
the turns up to that one are copied into a conversation of its own.

Greetings and the like are answered by rules, and no conversation keeps them. They are continued where they stand.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from ragkv.catalog.models import StoredTurn
from ragkv.engine.engine import Engine
from ragkv.errors import NotFound

_ID = re.compile(r"resp_([0-9a-f]{24})_([0-9]{1,4})(r?)_([0-9a-f]{8})")


@dataclass(frozen=True)
class ResponseId:
    """The id of a response.

    Attributes:
        key: Names the conversation.
        turns: How many turns the conversation has with it.
        by_rule: Whether a rule answered it, so that it is none of them.
        salt: Tells responses by rule after the same turn from each other.
    """

    key: str = field(default_factory=lambda: secrets.token_hex(12))
    turns: int = 1
    by_rule: bool = False
    salt: str = field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def after(cls, key: str, turns: int, by_rule: bool) -> ResponseId:
        """Return the id of the response that comes after so many turns."""
        return cls(key, turns if by_rule else turns + 1, by_rule)

    @classmethod
    def parse(cls, text: str) -> ResponseId:
        """Read an id. Raises NotFound: No response has such an id."""
        found = _ID.fullmatch(text)
        if found is None:
            raise _missing()
        return cls(found[1], int(found[2]), bool(found[3]), found[4])

    @property
    def conversation(self) -> str:
        """Name of the conversation."""
        return f"resp_{self.key}"

    def __str__(self) -> str:
        return f"{self.conversation}_{self.turns}{'r' if self.by_rule else ''}_{self.salt}"


def next_response(engine: Engine, collection: str, previous: ResponseId, by_rule: bool) -> ResponseId:
    """Return the id of the response that continues another one, and copy the turns of a branch.

    Args:
        engine: The engine, whose thread calls this.
        collection: Collection of the conversation.
        previous: What is continued.
        by_rule: Whether a rule answers.

    Raises:
        NotFound: The conversation was deleted, or belongs to another collection.
    """
    turns = _turns(engine, collection, previous)
    if len(turns) == previous.turns:
        return ResponseId.after(previous.key, len(turns), by_rule)
    branch = ResponseId()
    copied = _copy(engine, collection, branch.conversation, turns[: previous.turns])
    return ResponseId.after(branch.key, copied, by_rule)


def earlier_turns(engine: Engine, collection: str, previous: ResponseId) -> list[tuple[str, str]]:
    """Return (question, answer) of a response and of those before it, for a request that no conversation keeps.

    Raises:
        NotFound: As `next_response`.
    """
    turns = _turns(engine, collection, previous)[: previous.turns]
    return [(turn.question, turn.answer) for turn in turns if not turn.removed]


def turn_of(engine: Engine, collection: str, id: ResponseId) -> StoredTurn:
    """Return the turn of a response.

    Raises:
        NotFound: It was not stored, was deleted, or belongs to another collection.
    """
    if id.by_rule or not id.turns:
        raise _missing()
    return _turns(engine, collection, id)[id.turns - 1]


def _turns(engine: Engine, collection: str, id: ResponseId) -> list[StoredTurn]:
    turns = engine.catalog.turns(collection, id.conversation)
    if len(turns) < id.turns:
        raise _missing()
    return turns


def _copy(engine: Engine, collection: str, name: str, turns: list[StoredTurn]) -> int:
    """Copy turns into a new conversation, up to the first whose answer was removed; return how many."""
    rows, read = list[int](), set[int]()
    for turn in turns:
        if turn.removed:
            break
        read |= {row for row, _ in turn.joined}
        row = engine.catalog.add_turn(collection, name, rows, turn, read)
        if row is None:
            break
        rows.append(row)
    return len(rows)


def _missing() -> NotFound:
    return NotFound(
        "there is no such response in this collection: it was deleted, or not stored; send the whole conversation as "
        "`input` instead"
    )
