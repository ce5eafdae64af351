"""Conversations of one engine: turns are kept in the catalogue, the state they lead to in memory, as long as it fits.

    recall    the state as the last turn left it; read again from the turns where it is not in memory, or not valid
    read      a turn: chunks that join and the question
    keep      the turn into the catalogue, the state into memory

A state is valid as long as the catalogue has exactly its turns, all its chunks are still there, and the question comes
with the method of the last one. Otherwise the turns are read again with the method that is asked for, as if it had been
so from the beginning, without the chunks that are gone. So a restart, an eviction or a fault costs time only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragkv.catalog import Catalog, StoredTurn
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.methods import check_sessions
from ragkv.engine.prefill import PrefilledContext, Prefiller
from ragkv.engine.session import SessionState
from ragkv.errors import InputError, NotFound
from ragkv.recompute.base import Method
from ragkv.sparse.base import DecodePolicy, PrefillPolicy
from ragkv.timing import StepTimer
from ragkv.types import Chunk, Hit

MAX_NAME = 512
"""Characters of a conversation's name."""

OpenChunk = Callable[[Chunk, str, bool], StoredChunk]
"""(chunk, collection, whether it stands right after S) -> where its KV comes from."""


@dataclass
class Session:
    """One conversation, or one question that is in none: then `name` is empty.

    hits: chunks that stand in it, in their order · turns: rows of its turns in the catalogue · joined: of the hits, how
    many came with the turn being read · sources: where the KV of the hits comes from, during one request · replayed:
    tokens that were read in this request to have earlier turns again.
    """

    collection: str
    name: str
    method: str
    state: SessionState
    hits: list[Hit] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    joined: int = 0
    sources: list[StoredChunk] = field(default_factory=list)
    replayed: float = 0.0

    def unknown(self, hits: Sequence[Hit]) -> list[Hit]:
        """Those hits whose chunks do not stand in it yet."""
        rows = {hit.row for hit in self.hits}
        return [hit for hit in hits if hit.row not in rows]


class SessionCache:
    """States between their turns: the least recently used go when `limit` bytes are passed."""

    def __init__(self, limit: int):
        self.limit = limit
        self._states: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def get(self, collection: str, name: str) -> Session | None:
        """The state, which stays here, or None."""
        return self._states.get((collection, name))

    def put(self, session: Session) -> None:
        """Keep the state, if it fits."""
        self._states[session.collection, session.name] = session
        self._states.move_to_end((session.collection, session.name))
        while sum(each.state.bytes for each in self._states.values()) > self.limit:
            self._states.popitem(last=False)

    def drop(self, collection: str, name: str) -> None:
        """Forget the state, if it is here."""
        self._states.pop((collection, name), None)

    def states(self) -> list[Session]:
        """All that is here, the least recently used first."""
        return list(self._states.values())


class SessionManager:
    """See the module. Not thread-safe."""

    def __init__(self, reader: Prefiller, catalog: Catalog, open_chunk: OpenChunk, fingerprint: str, limit: int):
        """fingerprint: of the model whose tokens are read · limit: bytes of memory between turns."""
        self.cache = SessionCache(limit)
        self._reader, self._catalog, self._open, self._fingerprint = reader, catalog, open_chunk, fingerprint

    def recall(
        self,
        collection: str,
        name: str | None,
        spec: str,
        method: Method | None,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None = None,
    ) -> Session:
        """The state to go on with; a fresh one without a name. spec, way: the method that is asked for, None: full ·
        policy: how long inputs are prefilled, where it comes to that.

        Raises InputError for names, methods and chat templates that no conversation can have.
        """
        fresh = Session(collection, name or "", spec, self._reader.new_state())
        if name is None:
            return fresh
        if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
            raise InputError(f"a conversation's name must be 1 to {MAX_NAME} printable characters")
        check_sessions(spec)
        _ = self._reader.model.prompt.between  # where a template has no second turn, that is said before any work
        turns = self._catalog.turns(collection, name)
        there = self._catalog.chunks(collection, [row for turn in turns for row, _ in turn.joined])
        state = self.cache.get(collection, name)
        known = [turn.row for turn in turns]
        if state and (state.method, state.turns) == (spec, known) and all(hit.row in there for hit in state.hits):
            return state
        self.cache.drop(collection, name)
        for turn in turns:
            self._replay(fresh, turn, there, method, timer, prefill_policy)
        return fresh

    def prefill(
        self,
        session: Session,
        hits: Sequence[Hit],
        question: Sequence[int],
        method: Method | None,
        answer_tokens: int,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None = None,
        decode_policy: DecodePolicy | None = None,
    ) -> PrefilledContext:
        """Read the chunks that join, and a question behind them: see `Reader`. Until `keep` the state is in no memory,
        so a fault on the way leaves none that is half a turn further."""
        self.cache.drop(session.collection, session.name)
        session.joined = len(hits)
        session.hits += hits
        talk = session.state
        if method is None or not session.hits:  # a method has nothing to choose from where all chunks are gone
            return self._reader.prefill_full(
                [hit.chunk.tokens for hit in hits], question, answer_tokens, timer, prefill_policy, talk, decode_policy
            )
        with timer.step("open"):
            for i, hit in enumerate(session.hits[len(session.sources) :], start=len(session.sources)):
                exact = i == 0 and talk.first == len(self._reader.prefix_tokens)
                session.sources.append(self._open(hit.chunk, session.collection, exact))
        return self._reader.prefill_sparse(
            session.sources, question, method, answer_tokens, timer, prefill_policy, talk, decode_policy
        )

    def finish_turn(
        self, session: Session, question: tuple[str, Sequence[int]], tokens: Sequence[int], text: str
    ) -> None:
        """The turn that was read is over. question: as it was asked, and its token ids · tokens: of the answer, as they
        were decoded · text: theirs up to where it was cut."""
        if not session.name:
            return
        kept, then = self._reader.model.prompt.answered(tokens, text)
        session.state.append_answer(kept, then)
        joined = tuple((hit.row, hit.chunk.id) for hit in session.hits[len(session.hits) - session.joined :])
        said, asked = question
        turn = StoredTurn(said, text.strip(), tuple(asked), (*kept, *then), joined, session.method, self._fingerprint)
        row = self._catalog.add_turn(session.collection, session.name, session.turns, turn)
        if row is not None:
            session.turns.append(row)
            session.sources, session.replayed = [], 0.0
            if self._is_current(session):  # what was deleted while the answer was decoded is not kept
                self.cache.put(session)

    def turns(self, collection: str, name: str) -> list[StoredTurn]:
        """The turns of a conversation. Raises NotFound."""
        found = self._catalog.turns(collection, name)
        if not found:
            raise NotFound(f"collection {collection!r} has no conversation {name!r}")
        return found

    def remove(self, collection: str, name: str) -> None:
        """Forget a conversation: its turns and its state. Raises NotFound."""
        self.cache.drop(collection, name)
        self._catalog.remove_conversation(collection, name)

    def drop_chunks(self, gone: Callable[[Chunk, str], bool]) -> None:
        """Drop the states in which a chunk stands that is gone from its collection."""
        for state in self.cache.states():
            if any(gone(hit.chunk, state.collection) for hit in state.hits):
                self.cache.drop(state.collection, state.name)

    def _is_current(self, session: Session) -> bool:
        """Whether all its chunks are still in the catalogue."""
        rows = [hit.row for hit in session.hits]
        return len(self._catalog.chunks(session.collection, rows)) == len(set(rows))

    def _replay(
        self,
        session: Session,
        turn: StoredTurn,
        there: dict[int, Chunk],
        method: Method | None,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None,
    ) -> None:
        """Read a turn again, with the chunks of it that are still there. The answer is carried, so that the next turn
        reads it. Tokens that are another model's are made anew from the texts."""
        prompt = self._reader.model.prompt
        own = turn.reader == self._fingerprint
        asked = turn.asked if own else prompt.question(turn.question.strip())
        written = turn.written if own else prompt.retold(turn.answer)
        hits = session.unknown([Hit(there[row], 0.0, row) for row, _ in turn.joined if row in there])
        session.replayed += self.prefill(session, hits, asked, method, 0, timer, prefill_policy).prefilled_tokens
        session.state.append_answer((), written)
        session.turns.append(turn.row)
