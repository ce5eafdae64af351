"""Sessions of one engine: turns are kept in the catalogue, the state they lead to in memory, as long as it fits.

    recall        the session as its last turn left it; prefilled again from the turns where memory has no valid state
    screen        which of the new chunks join the context
    passes        a turn: its new chunks and the question, prefilled
    finish_turn   the turn into the catalogue, the state into memory

A state is valid while the catalogue has exactly its turns, all its chunks are still there, and the question comes with
the method of the last turn. Otherwise the turns are prefilled again with the method that is asked for, without the
chunks that are gone. So a restart, an eviction or a fault costs time only.

A turn whose answer was removed, with a document that it may quote (ragkv/catalog/turns.py), is in no prompt any more:
neither its question nor its chunks. Chunks that are still there can be retrieved again.

HTTP and the command line call a session a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ragkv.catalog import Catalog, StoredTurn
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.passes import Passes
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.prefix_cache import PrefixCache
from ragkv.engine.registry import check_sessions, full_prefill
from ragkv.engine.retokenise import with_own_tokens
from ragkv.engine.session_cache import FindEvidence, MethodChoice, OpenChunks, Session, SessionCache, check_name
from ragkv.errors import InputError, NotFound
from ragkv.recompute.base import Method
from ragkv.retrieval.follow_up import search_text
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.timing import StepTimer
from ragkv.types import Chunk, Hit

MAX_TURNS = 128
"""Most turns of a conversation. All are prefilled again where its state is lost."""


class SessionManager:
    """The sessions of one engine. Not thread-safe.

    Attributes:
        cache: States between their turns.
        prefixes: What full prefills have in common.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        catalog: Catalog,
        open_chunks: OpenChunks,
        fingerprint: str,
        limit: int,
        prefixes: PrefixCache,
        evidence: FindEvidence,
    ):
        """Set up the manager.

        Args:
            prefiller: Prefills turns.
            catalog: Keeps turns.
            open_chunks: Opens the KV of chunks.
            fingerprint: Of the model whose tokens turns hold.
            limit: Bytes of memory for states between turns.
            prefixes: What `full:prefix=true` has prefilled.
            evidence: Finds evidence in chunks.
        """
        self._evidence = evidence
        self.prefixes = prefixes
        self.cache = SessionCache(limit)
        self._prefiller, self._catalog, self._open_all, self._fingerprint = prefiller, catalog, open_chunks, fingerprint

    def check(self, name: str | None, choice: MethodChoice) -> None:
        """Raise InputError where the name, the method or the chat template allows no conversation."""
        if name is None:
            return
        check_name(name)
        check_sessions(choice.name)
        _ = self._prefiller.model.prompt.between  # raises before any work where a template has no second turn

    def recall(
        self,
        collection: str,
        name: str | None,
        choice: MethodChoice,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None = None,
    ) -> Passes[Session]:
        """Return the session to continue, or a fresh one where there is no name; yield the passes of earlier turns.

        Args:
            collection: Collection of the conversation.
            name: Name of the conversation; None for a single question.
            choice: The method that is asked for.
            timer: Steps of the request.
            prefill_policy: How earlier turns are prefilled again, if they have to be.

        Raises:
            InputError: The conversation has as many turns as one may have.
        """
        fresh = Session(collection, name or "", choice.name, self._prefiller.new_state())
        if name is None:
            return fresh
        turns = self._catalog.turns(collection, name)
        if len(turns) >= MAX_TURNS:
            raise InputError(f"conversation {name!r} has {MAX_TURNS} turns, the limit; start a new one")
        fresh.turns, fresh.removed = [turn.row for turn in turns], sum(turn.removed for turn in turns)
        there = [turn for turn in turns if not turn.removed]
        chunks = self._catalog.chunks(collection, [row for turn in there for row, _ in turn.joined])
        cached = self.cache.get(collection, name)
        if (
            cached
            and (cached.method, cached.turns, cached.removed) == (choice.name, fresh.turns, fresh.removed)
            and all(h.row in chunks for h in cached.hits)
        ):
            return cached
        self.cache.drop(collection, name)
        said = [(turn.question, turn.answer) for turn in turns]  # a removed answer is empty
        for number, turn in enumerate(turns):
            if not turn.removed:
                fresh.sought = search_text(turn.question, said[:number])
                yield from self._replay(fresh, turn, chunks, choice.method, timer, prefill_policy)
        return fresh

    def screen(self, session: Session, hits: Sequence[Hit], method: Method | None, timer: StepTimer) -> list[Hit]:
        """Return those of the retrieved hits that join the context. The session notes the others.

        A turn stores what joined, so a state that is prefilled again has the same chunks.

        Args:
            session: The session.
            hits: Chunks that are not in its context.
            method: Says how many may join, and which; None takes all.
            timer: Gets the step plan.
        """
        if method is None or not 0 < method.chunks < len(hits):
            return list(hits)
        with timer.step("plan"):
            chosen = method.screen(self._evidence(session.sought, hits, method.evidence))
        session.left_out = [hit for i, hit in enumerate(hits) if i not in chosen]
        return [hits[i] for i in chosen]

    def passes(
        self,
        session: Session,
        hits: Sequence[Hit],
        question: Sequence[int],
        method: Method | None,
        timer: StepTimer,
        options: PrefillOptions,
    ) -> Passes[PrefilledContext]:
        """Prefill the new chunks of a turn and a question behind them; yield the passes.

        The session is in no cache until `finish_turn`, so a fault on the way leaves no session that is half a turn
        further.
        """
        self.cache.drop(session.collection, session.name)
        session.joined = len(hits)
        session.hits += hits
        state = session.state
        if method is None or not session.hits:  # where all chunks are gone a method has nothing to choose from
            context = yield from self._full_passes(session, hits, question, timer, options)
            return context
        yield from self.open_sources(session, method, timer)
        context = yield from self._prefiller.sparse_passes(session.sources, question, method, timer, options, state)
        return context

    def open_sources(self, session: Session, method: Method, timer: StepTimer) -> Passes[None]:
        """Open the KV of the hits that have no source yet, and give every piece the evidence that the method wants.

        A chunk that has to be encoded again yields its pass.
        """
        with timer.step("open"):
            session.sources += yield from self._open(session, session.hits[len(session.sources) :])
        if method.evidence:
            with timer.step("plan"):
                found = self._evidence(session.sought, session.hits, method.evidence)
                for source, evidence in zip(session.sources, found, strict=True):
                    source.piece = replace(source.piece, evidence=evidence)

    def _full_passes(
        self,
        session: Session,
        hits: Sequence[Hit],
        question: Sequence[int],
        timer: StepTimer,
        options: PrefillOptions,
    ) -> Passes[PrefilledContext]:
        """Prefill new chunks and a question, behind what an earlier question prefilled where the method asks for it."""
        chunks, collection, known = [hit.chunk for hit in hits], session.collection, 0
        asked = full_prefill(session.method)
        # States behind a prefix are not kept, so a model with states reads everything again.
        stateless = not self._prefiller.model.states.bytes
        shares = asked is not None and asked.prefix and not session.state.started and stateless
        if shares:
            with timer.step("load"):
                known = self.prefixes.restore(session.state, chunks, collection)
        new = [chunk.tokens for chunk in chunks[known:]]
        context = yield from self._prefiller.full_passes(new, question, timer, options, session.state)
        # A chunk may have been deleted meanwhile. One that is deleted from now on is dropped with the others.
        if shares and context.sparse is None and self.is_current(session):
            self.prefixes.keep(context.cache, chunks, collection)
        return context

    def finish_turn(
        self, session: Session, question: tuple[str, Sequence[int]], tokens: Sequence[int], text: str
    ) -> None:
        """Write the turn to the catalogue and keep its state.

        Args:
            session: The session whose turn was answered.
            question: As it was asked, and its token ids.
            tokens: Token ids of the answer, as they were decoded.
            text: Their text, up to where it was cut.

        Raises:
            Outdated: A chunk of its context is gone.
        """
        if not session.name:
            return
        kept, then = self._prefiller.model.prompt.answered(tokens, text)
        session.state.append_answer(kept, then)
        joined = tuple((hit.row, hit.chunk.id) for hit in session.hits[len(session.hits) - session.joined :])
        asked, asked_tokens = question
        turn = StoredTurn(
            asked, text.strip(), tuple(asked_tokens), (*kept, *then), joined, session.method, self._fingerprint
        )
        row = self._catalog.add_turn(session.collection, session.name, session.turns, turn, session.rows)
        if row is not None:
            session.turns.append(row)
            session.sources, session.left_out, session.replayed = [], [], 0.0
            self.cache.put(session)

    def is_current(self, session: Session) -> bool:
        """Whether all its chunks are still in the catalogue: none was deleted or replaced."""
        return self._catalog.standing(session.collection, session.rows) == session.rows

    def turns(self, collection: str, name: str) -> list[StoredTurn]:
        """Return the turns of a conversation. Raises NotFound."""
        found = self._catalog.turns(collection, name)
        if not found:
            raise NotFound(f"collection {collection!r} has no conversation {name!r}")
        return found

    def remove(self, collection: str, name: str) -> None:
        """Delete a conversation: its turns and its state. Raises NotFound."""
        self.cache.drop(collection, name)
        self._catalog.remove_conversation(collection, name)

    def forget_states(self) -> None:
        """Drop all that is kept in memory. Turns stay in the catalogue."""
        self.cache.clear()
        self.prefixes.clear()

    def drop_chunks(self, gone: Callable[[Chunk, str], bool]) -> None:
        """Drop the cached states that hold a chunk which left its collection."""
        self.prefixes.drop_chunks(gone)
        self.cache.drop_where(lambda kept: any(gone(hit.chunk, kept.collection) for hit in kept.hits))

    def drop_outdated(self, collections: Set[str]) -> None:
        """Drop the cached states of these collections that hold a chunk which is gone."""
        self.cache.drop_where(lambda kept: kept.collection in collections and not self.is_current(kept))

    def _open(self, session: Session, hits: Sequence[Hit]) -> Passes[list[StoredChunk]]:
        """Open the KV of hits, the last ones of the session's. The first chunk of a session stands right after S."""
        first = session.state.first == len(self._prefiller.prefix_tokens) and not session.sources
        new = [(hit.chunk, first and i == 0) for i, hit in enumerate(hits)]
        sources = yield from self._open_all(new, session.collection)
        return sources

    def _replay(
        self,
        session: Session,
        turn: StoredTurn,
        chunks: dict[int, Chunk],
        method: Method | None,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None,
    ) -> Passes[None]:
        """Prefill a stored turn again, with those of its chunks that are still there.

        The answer becomes pending tokens, so the next turn prefills it. Tokens of another model are made anew from the
        texts.
        """
        prompt = self._prefiller.model.prompt
        own = turn.reader == self._fingerprint
        question = turn.asked if own else prompt.question(turn.question.strip())
        answer = turn.written if own else prompt.retold(turn.answer)
        stored = [Hit(chunks[row], 0.0, row) for row, _ in turn.joined if row in chunks]
        reader, wrapped = (self._catalog, prompt, self._fingerprint), method is not None
        hits = session.unknown(with_own_tokens(stored, session.collection, *reader, wrapped=wrapped))
        options = PrefillOptions(prefill_policy=prefill_policy)
        context = yield from self.passes(session, hits, question, method, timer, options)
        session.replayed += context.prefilled_tokens
        session.state.append_answer((), answer)
