"""Steps that are launched before their tokens are read give what steps one after another give."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence as Many

import pytest
import torch

from ragkv.engine.batch import Batch
from ragkv.engine.decoding import PrefillGroup, decode_step, generate
from ragkv.engine.drafting import Drafter
from ragkv.engine.generation import Sampling, Sequence
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import WIDEST, GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (9, 4, 17)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return tiny.model(layers=2)


class Counted(GraphDecoder):
    """Notes the rows of steps that it began when asked, and of those that it launched ahead."""

    def __init__(self, model: DecoderModel):
        super().__init__(model)
        self.asked, self.launched = list[int](), list[int]()

    def decode(self, caches, tokens, positions, paged=()):  # type: ignore[no-untyped-def]
        before = self._ahead
        logits = super().decode(caches, tokens, positions, paged)
        if before is None or not any(before.has(cache) for cache in caches):
            self.asked.append(len(caches))
        return logits

    def decode_ahead(self, tokens, known):  # type: ignore[no-untyped-def]
        super().decode_ahead(tokens, known)
        if self._ahead is not None:
            self.launched.append(len(tokens))


def filled(model: DecoderModel, lengths: Many[int], room: int = 12) -> list[ContextCache]:
    caches = [ContextCache(model.shape, length + room, model.dtype) for length in lengths]
    model.forward(
        [
            append(cache, tiny.tokens(length, length), 0, outputs=0)
            for cache, length in zip(caches, lengths, strict=True)
        ]
    )
    return caches


def forward(model: DecoderModel, caches: Many[ContextCache], tokens: Many[int], positions: Many[int]) -> torch.Tensor:
    rows = zip(caches, tokens, positions, strict=True)
    return torch.cat(model.forward([append(cache, [token], position) for cache, token, position in rows]))


def check(cache: ContextCache, other: ContextCache) -> None:
    assert cache.lengths == other.lengths
    for layer in range(cache.shape.layers):
        assert torch.equal(cache.positions(layer), other.positions(layer))
        torch.testing.assert_close(cache.k(layer), other.k(layer), rtol=0, atol=1e-10)
        torch.testing.assert_close(cache.v(layer), other.v(layer), rtol=0, atol=1e-10)


def test_a_chain_of_steps_is_that_of_the_forward(model: DecoderModel) -> None:
    decoder, caches = GraphDecoder(model), filled(model, LENGTHS)
    expected, tokens, positions = copy.deepcopy(caches), [5, 6, 7], list(LENGTHS)
    for _ in range(6):
        own = forward(model, expected, tokens, positions)
        logits = decoder.decode(caches, tokens, positions)
        torch.testing.assert_close(logits, own, rtol=0, atol=1e-10)
        likeliest = logits.argmax(-1)
        decoder.decode_ahead(likeliest, likeliest.tolist)
        assert all(decoder.is_ahead(cache) for cache in caches)
        tokens, positions = likeliest.tolist(), [position + 1 for position in positions]
    for cache, other in zip(caches, expected, strict=True):
        check(cache, other)


@pytest.mark.parametrize("rows", [[0, 2], [2, 0], [1]])
def test_requests_that_go_on_take_their_rows_of_it(model: DecoderModel, rows: list[int]) -> None:
    decoder, caches = GraphDecoder(model), filled(model, LENGTHS)
    expected = copy.deepcopy(caches)
    own = forward(model, expected, [5, 6, 7], LENGTHS)
    best = decoder.decode(caches, [5, 6, 7], LENGTHS).argmax(-1)
    decoder.decode_ahead(best, best.tolist)
    tokens, positions = [int(own[row].argmax()) for row in rows], [LENGTHS[row] + 1 for row in rows]
    second = forward(model, [expected[row] for row in rows], tokens, positions)
    logits = decoder.decode([caches[row] for row in rows], tokens, positions)
    torch.testing.assert_close(logits, second, rtol=0, atol=1e-10)
    assert not any(decoder.is_ahead(cache) for cache in caches)
    third = forward(model, [expected[rows[0]]], [3], [positions[0] + 1])
    torch.testing.assert_close(decoder.decode([caches[rows[0]]], [3], [positions[0] + 1]), third, rtol=0, atol=1e-10)
    for cache, other in zip(caches, expected, strict=True):
        check(cache, other)


def test_other_tokens_than_were_fed_are_computed_as_if_nothing_had_been(model: DecoderModel) -> None:
    decoder, caches = GraphDecoder(model), filled(model, LENGTHS)
    expected = copy.deepcopy(caches)
    best = decoder.decode(caches, [5, 6, 7], LENGTHS).argmax(-1)
    forward(model, expected, [5, 6, 7], LENGTHS)
    decoder.decode_ahead(best, best.tolist)
    tokens, positions = [int(best[0]), (int(best[1]) + 1) % tiny.VOCABULARY, int(best[2])], [10, 5, 18]
    own = forward(model, expected, tokens, positions)
    torch.testing.assert_close(decoder.decode(caches, tokens, positions), own, rtol=0, atol=1e-10)
    for cache, other in zip(caches, expected, strict=True):
        check(cache, other)


def test_nothing_is_launched_where_a_cache_would_have_to_grow(model: DecoderModel) -> None:
    decoder, (small, large) = GraphDecoder(model), filled(model, (9, 9), room=1)
    large.make_room(5)
    best = decoder.decode([small, large], [5, 6], [9, 9]).argmax(-1)
    decoder.decode_ahead(best, best.tolist)
    assert not decoder.is_ahead(large)
    assert small.bytes < large.bytes


@pytest.mark.parametrize("count", [2, WIDEST + 1], ids=["rows of one request", "more rows than a graph has"])
def test_nothing_is_launched_behind_a_step_that_is_not_one_row_a_request(model: DecoderModel, count: int) -> None:
    decoder, caches = GraphDecoder(model), filled(model, [3] * count)
    caches = [caches[0]] * count if count == 2 else caches
    positions = [3, 4] if count == 2 else [3] * count
    best = decoder.decode(caches, [5] * count, positions).argmax(-1)
    decoder.decode_ahead(best, best.tolist)
    assert not decoder.is_ahead(caches[0])


def test_a_step_keeps_no_cache_alive(model: DecoderModel) -> None:
    decoder = Counted(model)
    (sequence,) = sequences(model, [20])
    for _ in range(2):
        sequence.sample(frozenset())
        decode_step(model, [sequence], decoder)
    assert decoder.launched == [1, 1]
    cache = weakref.ref(sequence.cache)
    del sequence
    decoder._latest = None  # without a GPU the step itself refers to the memory
    decoder._ahead = None
    gc.collect()
    assert cache() is None


def sequences(model: DecoderModel, longest: Many[int], **sampling: float) -> list[Sequence]:
    new = []
    for seed, tokens in enumerate(longest):
        prompt = tiny.tokens(6 + seed, seed)
        cache = ContextCache(model.shape, len(prompt) + tokens + 2, model.dtype)
        logits = model.forward([append(cache, prompt, 0)])[0][-1]
        new.append(Sequence(cache, logits, len(prompt), Sampling(tokens, **sampling)))
    return new


def alone(model: DecoderModel, longest: Many[int], **sampling: float) -> list[list[int]]:
    return [list(generate(model, sequence)) for sequence in sequences(model, longest, **sampling)]


def test_a_batch_that_changes_says_what_each_sequence_says_alone(model: DecoderModel) -> None:
    longest = (9, 3, 6, 12, 1)
    decoder, new = Counted(model), sequences(model, longest)
    batch = Batch(model, 8, 2**30, decoder)
    for sequence in new[:2]:
        batch.join(sequence)
    for step in range(40):
        if step in (2, 3):
            batch.join(new[step])
        if step == 5:
            batch.join(new[4])
        batch.step()
        if step > 6 and not batch.busy:
            break
    assert [sequence.tokens for sequence in new] == alone(model, longest)
    scores = [sequence.log_probabilities for sequence in new]
    for sequence, own, tokens in zip(sequences(model, longest), scores, longest, strict=True):
        list(generate(model, sequence))
        assert own == pytest.approx(sequence.log_probabilities)
        assert len(own) == tokens
    assert sum(decoder.launched) > 10
    assert len(decoder.asked) < 8, "steps that begin because the requests have changed"


def test_a_sequence_that_joins_waits_for_the_step_that_it_is_not_in(model: DecoderModel) -> None:
    decoder, (first, second) = Counted(model), sequences(model, (9, 9))
    first.sample(frozenset())
    decode_step(model, [first], decoder)
    for sequence in (first, second):
        sequence.sample(frozenset())
    decode_step(model, [first, second], decoder)
    assert (first.ready, second.ready) == (True, False)
    first.sample(frozenset())
    decode_step(model, [first, second], decoder)
    assert (first.ready, second.ready) == (True, True), "nothing is launched ahead while one waits"
    second.sample(frozenset())
    assert second.tokens == alone(model, (9, 9))[1][:2]


@pytest.mark.parametrize(
    "reason", ["temperature", "penalty", "likely tokens", "a waiting pass", "the last token", "a draft"]
)
def test_no_step_is_launched_ahead_where_it_may_be_of_no_use(model: DecoderModel, reason: str) -> None:
    decoder = Counted(model)
    sampling = {
        "temperature": {"temperature": 1.0},
        "penalty": {"frequency_penalty": 1.0},
        "likely tokens": {"top_log_probabilities": 2},
    }.get(reason, {})
    (sequence,) = sequences(model, (2 if reason == "the last token" else 9,), **sampling)
    group = None
    if reason == "a waiting pass":
        other = ContextCache(model.shape, 4, model.dtype)
        group = PrefillGroup([append(other, [3, 4], 0)])
    if reason == "a draft":
        sequence.drafter = Drafter([alone(model, (9,))[0] * 2])
        sequence.drafter.propose = lambda tokens, limit: (5, 6)[:limit]  # type: ignore[method-assign]
    sequence.sample(frozenset())
    decode_step(model, [sequence], decoder, group)
    assert decoder.launched == []


def test_a_quote_is_drafted_as_soon_as_without_steps_ahead(model: DecoderModel) -> None:
    """Steps that run ahead have one row a sequence, so they end where a draft may come."""
    said = alone(model, (30,))[0]
    decoder, (sequence,) = Counted(model), sequences(model, (30,))
    sequence.drafter, slow = Drafter([said]), Drafter([said])
    ahead, drafted = 0, list[int]()
    while (token := sequence.sample(frozenset())) is not None:
        assert token == said[len(sequence.tokens) - 1]
        if sequence.ready or sequence.finished:
            continue
        before = len(decoder.launched)
        decode_step(model, [sequence], decoder)
        ahead += len(decoder.launched) - before
        drafted.append(len(sequence.tokens) if sequence.draft else 0)
    first = next(length for length in drafted if length)
    assert slow.propose(said[:first], 8)
    assert not Drafter([said]).propose(said[: first - 1], 8), "no draft could have come sooner"
    assert ahead == first - 2, "all steps but those whose next token may complete what is looked up"
    assert sequence.drafter.accepted > 8


def test_a_drafter_is_not_asked_behind_a_step_that_runs_already(model: DecoderModel) -> None:
    decoder, (sequence,) = Counted(model), sequences(model, (9,))
    sequence.sample(frozenset())
    decode_step(model, [sequence], decoder)
    sequence.drafter = Drafter([])
    sequence.drafter.propose = lambda tokens, limit: pytest.fail("its draft would be lost")  # type: ignore[method-assign]
    sequence.sample(frozenset())
    decode_step(model, [sequence], decoder)
    assert decoder.launched == [1, 1]
