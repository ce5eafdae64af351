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

from ragkv.catalog import Catalog, Turn
from ragkv.errors import InputError, NotFound
from ragkv.methods import check_talks
from ragkv.reader import Context, Reader
from ragkv.recompute.base import Method
from ragkv.sources import StoredChunk
from ragkv.sparse.base import Decoder, Policy
from ragkv.talk import Talk
from ragkv.types import Chunk, Hit
from ragkv.watch import Watch

MAX_NAME = 512
"""Characters of a conversation's name."""

Open = Callable[[Chunk, str, bool], StoredChunk]
"""(chunk, collection, whether it stands right after S) -> where its KV comes from."""


@dataclass
class Conversation:
    """One conversation, or one question that is in none: then `name` is empty.

    hits: chunks that stand in it, in their order · turns: rows of its turns in the catalogue · joined: of the hits, how
    many came with the turn being read · sources: where the KV of the hits comes from, during one request · replayed:
    tokens that were read in this request to have earlier turns again.
    """

    collection: str
    name: str
    method: str
    talk: Talk
    hits: list[Hit] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    joined: int = 0
    sources: list[StoredChunk] = field(default_factory=list)
    replayed: float = 0.0

    def unknown(self, hits: Sequence[Hit]) -> list[Hit]:
        """Those hits whose chunks do not stand in it yet."""
        rows = {hit.row for hit in self.hits}
        return [hit for hit in hits if hit.row not in rows]


class Memory:
    """States between their turns: the least recently used go when `limit` bytes are passed."""

    def __init__(self, limit: int):
        self.limit = limit
        self._states: OrderedDict[tuple[str, str], Conversation] = OrderedDict()

    def get(self, collection: str, name: str) -> Conversation | None:
        """The state, which stays here, or None."""
        return self._states.get((collection, name))

    def put(self, state: Conversation) -> None:
        """Keep the state, if it fits."""
        self._states[state.collection, state.name] = state
        self._states.move_to_end((state.collection, state.name))
        while sum(each.talk.bytes for each in self._states.values()) > self.limit:
            self._states.popitem(last=False)

    def drop(self, collection: str, name: str) -> None:
        """Forget the state, if it is here."""
        self._states.pop((collection, name), None)

    def states(self) -> list[Conversation]:
        """All that is here, the least recently used first."""
        return list(self._states.values())


class Conversations:
    """See the module. Not thread-safe."""

    def __init__(self, reader: Reader, catalog: Catalog, open_chunk: Open, fingerprint: str, limit: int):
        """fingerprint: of the model whose tokens are read · limit: bytes of memory between turns."""
        self.memory = Memory(limit)
        self._reader, self._catalog, self._open, self._fingerprint = reader, catalog, open_chunk, fingerprint

    def recall(
        self,
        collection: str,
        name: str | None,
        spec: str,
        way: Method | None,
        watch: Watch,
        policy: Policy | None = None,
    ) -> Conversation:
        """The state to go on with; a fresh one without a name. spec, way: the method that is asked for, None: full ·
        policy: how long inputs are prefilled, where it comes to that.

        Raises InputError for names, methods and chat templates that no conversation can have.
        """
        fresh = Conversation(collection, name or "", spec, self._reader.talk())
        if name is None:
            return fresh
        if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
            raise InputError(f"a conversation's name must be 1 to {MAX_NAME} printable characters")
        check_talks(spec)
        _ = self._reader.model.prompt.between  # where a template has no second turn, that is said before any work
        turns = self._catalog.turns(collection, name)
        there = self._catalog.chunks(collection, [row for turn in turns for row, _ in turn.joined])
        state = self.memory.get(collection, name)
        known = [turn.row for turn in turns]
        if state and (state.method, state.turns) == (spec, known) and all(hit.row in there for hit in state.hits):
            return state
        self.memory.drop(collection, name)
        for turn in turns:
            self._replay(fresh, turn, there, way, watch, policy)
        return fresh

    def read(
        self,
        state: Conversation,
        hits: Sequence[Hit],
        question: Sequence[int],
        way: Method | None,
        room: int,
        watch: Watch,
        policy: Policy | None = None,
        decoder: Decoder | None = None,
    ) -> Context:
        """Read the chunks that join, and a question behind them: see `Reader`. Until `keep` the state is in no memory,
        so a fault on the way leaves none that is half a turn further."""
        self.memory.drop(state.collection, state.name)
        state.joined = len(hits)
        state.hits += hits
        talk = state.talk
        if way is None or not state.hits:  # a method has nothing to choose from where all chunks are gone
            return self._reader.full([hit.chunk.tokens for hit in hits], question, room, watch, policy, talk, decoder)
        with watch.step("open"):
            for i, hit in enumerate(state.hits[len(state.sources) :], start=len(state.sources)):
                exact = i == 0 and talk.first == len(self._reader.prefix_tokens)
                state.sources.append(self._open(hit.chunk, state.collection, exact))
        return self._reader.sparse(state.sources, question, way, room, watch, policy, talk, decoder)

    def keep(self, state: Conversation, question: tuple[str, Sequence[int]], tokens: Sequence[int], text: str) -> None:
        """The turn that was read is over. question: as it was asked, and its token ids · tokens: of the answer, as they
        were decoded · text: theirs up to where it was cut."""
        if not state.name:
            return
        kept, then = self._reader.model.prompt.answered(tokens, text)
        state.talk.answered(kept, then)
        joined = tuple((hit.row, hit.chunk.id) for hit in state.hits[len(state.hits) - state.joined :])
        said, asked = question
        turn = Turn(said, text.strip(), tuple(asked), (*kept, *then), joined, state.method, self._fingerprint)
        row = self._catalog.add_turn(state.collection, state.name, state.turns, turn)
        if row is not None:
            state.turns.append(row)
            state.sources, state.replayed = [], 0.0
            if self._stands(state):  # what was deleted while the answer was decoded is not kept
                self.memory.put(state)

    def turns(self, collection: str, name: str) -> list[Turn]:
        """The turns of a conversation. Raises NotFound."""
        found = self._catalog.turns(collection, name)
        if not found:
            raise NotFound(f"collection {collection!r} has no conversation {name!r}")
        return found

    def remove(self, collection: str, name: str) -> None:
        """Forget a conversation: its turns and its state. Raises NotFound."""
        self.memory.drop(collection, name)
        self._catalog.remove_conversation(collection, name)

    def forget(self, gone: Callable[[Chunk, str], bool]) -> None:
        """Drop the states in which a chunk stands that is gone from its collection."""
        for state in self.memory.states():
            if any(gone(hit.chunk, state.collection) for hit in state.hits):
                self.memory.drop(state.collection, state.name)

    def _stands(self, state: Conversation) -> bool:
        """Whether all its chunks are still in the catalogue."""
        rows = [hit.row for hit in state.hits]
        return len(self._catalog.chunks(state.collection, rows)) == len(set(rows))

    def _replay(
        self,
        state: Conversation,
        turn: Turn,
        there: dict[int, Chunk],
        way: Method | None,
        watch: Watch,
        policy: Policy | None,
    ) -> None:
        """Read a turn again, with the chunks of it that are still there. The answer is carried, so that the next turn
        reads it. Tokens that are another model's are made anew from the texts."""
        prompt = self._reader.model.prompt
        own = turn.reader == self._fingerprint
        asked = turn.asked if own else prompt.question(turn.question.strip())
        written = turn.written if own else prompt.retold(turn.answer)
        hits = state.unknown([Hit(there[row], 0.0, row) for row, _ in turn.joined if row in there])
        state.replayed += self.read(state, hits, asked, way, 0, watch, policy).read
        state.talk.answered((), written)
        state.turns.append(turn.row)
