"""Sessions between their turns, and what is known of one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.passes import Passes
from ragkv.engine.session import SessionState
from ragkv.errors import InputError
from ragkv.recompute.base import Method
from ragkv.recompute.evidence import BlockEvidence, Kind
from ragkv.types import Chunk, Hit

MAX_NAME = 512
"""Longest name of a conversation, in characters."""
FindEvidence = Callable[[str, Sequence[Hit], Sequence[Kind]], list[BlockEvidence]]
"""`(question, hits, kinds) -> evidence` of these kinds in the chunk of each hit."""
OpenChunks = Callable[[Sequence[tuple[Chunk, bool]], str], Passes[list[StoredChunk]]]
"""`(chunks, collection) -> sources`: opens the KV of chunks, each with whether it stands right after S."""


@dataclass(frozen=True)
class MethodChoice:
    """A method by name, with the object that carries it out; None for `full`, which reads no stored KV."""

    name: str
    method: Method | None


@dataclass
class Session:
    """One conversation, or one question that belongs to none.

    Attributes:
        collection: Collection of the conversation.
        name: Name of the conversation; "" for a single question.
        method: Name of the method.
        state: What the context cache holds.
        hits: Chunks in the context, in their order.
        turns: Rows of its turns in the catalogue.
        joined: How many of the hits came with the present turn.
        sources: Where the KV of the hits comes from, during one request.
        left_out: Retrieved chunks that did not join, during one request.
        sought: What the present turn searches for: its question, with an earlier one where it refers to that.
        removed: How many of its turns lost their answers with a document.
        replayed: Tokens that this request prefilled to have earlier turns again.
    """

    collection: str
    name: str
    method: str
    state: SessionState
    hits: list[Hit] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    joined: int = 0
    sources: list[StoredChunk] = field(default_factory=list)
    left_out: list[Hit] = field(default_factory=list)
    sought: str = ""
    removed: int = 0
    replayed: float = 0.0

    def unknown(self, hits: Sequence[Hit]) -> list[Hit]:
        """Return the hits whose chunks are not in the context yet."""
        rows = {hit.row for hit in self.hits}
        return [hit for hit in hits if hit.row not in rows]

    @property
    def rows(self) -> frozenset[int]:
        """Rows of all chunks that an answer, or its report, may tell of."""
        return frozenset(hit.row for hit in (*self.hits, *self.left_out))


class SessionCache:
    """Sessions between their turns. The least recently used are dropped when `limit` bytes are exceeded."""

    def __init__(self, limit: int):
        self.limit = limit
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def get(self, collection: str, name: str) -> Session | None:
        """Return the session, which stays in the cache, or None."""
        return self._sessions.get((collection, name))

    def put(self, session: Session) -> None:
        """Keep the session, if it fits."""
        self._sessions[session.collection, session.name] = session
        self._sessions.move_to_end((session.collection, session.name))
        while sum(each.state.bytes for each in self._sessions.values()) > self.limit:
            self._sessions.popitem(last=False)

    def drop(self, collection: str, name: str) -> None:
        """Remove the session, if it is here."""
        self._sessions.pop((collection, name), None)

    def drop_where(self, gone: Callable[[Session], bool]) -> None:
        """Remove the sessions that something is the case of."""
        for session in self.sessions():
            if gone(session):
                self.drop(session.collection, session.name)

    def clear(self) -> None:
        """Remove all sessions."""
        self._sessions.clear()

    def sessions(self) -> list[Session]:
        """Return all sessions, the least recently used first."""
        return list(self._sessions.values())


def check_name(name: str) -> None:
    """Raise InputError where a conversation may not have this name."""
    if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
        raise InputError(f"a conversation's name must be 1 to {MAX_NAME} printable characters")
