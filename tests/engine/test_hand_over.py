"""Hand-overs: another server that reads the rows as its own prefix computes what the engine computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from ragkv.engine.engine import Engine
from ragkv.engine.hand_over import HandedRows, HandOver, KeptChunk, hand_over, handed_rows, salt_of
from ragkv.engine.passes import run_alone
from ragkv.engine.request import Request
from ragkv.errors import InputError, NotFound, Outdated
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.wrapper import Wrapper, Wrappers
from ragkv.retrieval import Embedder
from ragkv.types import AskOptions, Document, Hit
from tests.libraries import open_copy

QUESTION = "Who built the harbour of Tarn?"
SELECTED = "scout:repair=none"


def handed(engine: Engine, question: str = QUESTION, **options: object) -> HandOver:
    chosen = AskOptions(**{"top_k": 4, "method": SELECTED, **options})  # type: ignore[arg-type]
    return run_alone(engine.model, hand_over(engine, question, chosen))


def rows_of(engine: Engine, over: HandOver) -> HandedRows:
    return run_alone(engine.model, handed_rows(engine, "default", over.chunks, over.salt))


def named(engine: Engine, chunks: Sequence[KeptChunk], collection: str = "default") -> HandedRows:
    """The rows that somebody names who knows their salt."""
    salt = salt_of(engine, collection, chunks)
    return run_alone(engine.model, handed_rows(engine, collection, chunks, salt))


def logits_elsewhere(engine: Engine, over: HandOver, rows: HandedRows) -> torch.Tensor:
    """The logits of a server that knows token ids, and K and V of the first of them, and counts positions from 0."""
    model = engine.model
    cache = ContextCache(model.shape, len(over.tokens), model.dtype)
    for layer in range(model.shape.layers):
        cache.put(layer, rows.k[layer], rows.v[layer], torch.arange(over.rows))
    return model.forward([append(cache, over.tokens[over.rows :], over.rows)])[0][-1]


@pytest.fixture
def own(two_documents: Path, tmp_path: Path, model: DecoderModel, embedder: Embedder) -> Iterator[Engine]:
    with open_copy(two_documents, tmp_path / "data", model, embedder) as engine:
        yield engine


@pytest.mark.parametrize("method", [SELECTED, "reuse", "scout:repair=none,cap=0.1,floor=2"])
def test_rows_that_are_handed_over_give_the_logits_of_the_same_plan(library: Engine, method: str) -> None:
    over = handed(library, method=method)
    request = library.prefill(QUESTION, AskOptions(top_k=4, method=method))
    rows = rows_of(library, over)
    torch.testing.assert_close(logits_elsewhere(library, over, rows), request.context.logits, rtol=1e-4, atol=1e-4)
    assert over.rows == rows.tokens.shape[0] == rows.k.shape[1] == rows.v.shape[1]
    assert over.tokens[: over.rows] == tuple(rows.tokens.tolist())


def test_a_selection_hands_over_fewer_tokens_than_the_whole_chunks(library: Engine) -> None:
    some, every = handed(library, method="scout:repair=none,cap=0.1,floor=2"), handed(library, method="reuse")
    assert 0 < some.rows < every.rows / 2
    assert len(some.chunks) == len(every.chunks) == 4
    assert some.salt != every.salt


def test_a_full_prefill_hands_over_a_prompt_and_no_rows(library: Engine) -> None:
    over = handed(library, method="full")
    assert (over.rows, over.chunks) == (0, ())
    assert over.tokens == handed(library, method="reuse").tokens
    assert over.salt == handed(library, "Where is the kiln?", method="full").salt, "exact prefixes may be shared"


@pytest.mark.parametrize("method", ["scout:repair=kept", "cacheblend", "samkv-fusion", "multi-infllm", "reuse-encoded"])
def test_a_method_that_recomputes_or_rotates_by_the_question_is_refused(library: Engine, method: str) -> None:
    with pytest.raises(InputError, match="ask with scout:repair=none or with reuse"):
        handed(library, method=method)


def test_chunks_between_wrapper_tokens_are_not_handed_over(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Wrapper(torch.zeros(1, 8), torch.zeros(1, 8), "ab" * 32)
    monkeypatch.setattr(own.model, "wrappers", Wrappers({"default": tokens}))
    with pytest.raises(InputError, match="wrapper tokens, which no other vocabulary has; ask with method full"):
        handed(own)


def test_the_same_rows_have_the_same_salt_and_others_have_others(library: Engine) -> None:
    one, again, other = handed(library), handed(library), handed(library, top_k=2)
    assert one.salt == again.salt != other.salt


def test_a_document_that_is_removed_meanwhile_is_not_handed_over(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = own.questions.screen

    def removed_then(request: Request) -> list[Hit]:
        own.catalog.remove("default", request.hits[0].chunk.document_id)
        return prepare(request)

    monkeypatch.setattr(own.questions, "screen", removed_then)
    for method in ("full", SELECTED):
        with pytest.raises(Outdated):
            handed(own, method=method)


def test_rows_of_a_removed_document_are_not_found(own: Engine) -> None:
    over = handed(own)
    own.catalog.remove("default", over.citations[0].document_id)
    with pytest.raises(NotFound, match="removed or replaced"):
        rows_of(own, over)


def test_rows_of_a_replaced_document_are_not_found(own: Engine) -> None:
    over = handed(own)
    ingest(own, Document(over.citations[0].document_id, "New", "Another text stands here now."))
    with pytest.raises(NotFound, match="removed or replaced"):
        rows_of(own, over)


def test_rows_are_found_in_their_own_collection_only(library: Engine) -> None:
    over = handed(library)
    with pytest.raises(NotFound):
        named(library, over.chunks, "other:default")


def test_rows_go_out_under_their_own_salt_only(library: Engine) -> None:
    some, every = handed(library), handed(library, method="reuse")
    for chunks, salt in ((some.chunks, every.salt), (some.chunks, ""), (some.chunks[:1], some.salt)):
        with pytest.raises(InputError, match="salt"):
            run_alone(library.model, handed_rows(library, "default", chunks, salt))


@pytest.mark.parametrize("blocks", [(1, 0), (0, 0), (-1,), (0, 1000)])
def test_blocks_that_a_chunk_does_not_have_are_refused(library: Engine, blocks: tuple[int, ...]) -> None:
    row = handed(library).chunks[0].row
    with pytest.raises(InputError, match="name some, in order"):
        named(library, [KeptChunk(row, blocks)])


def test_nothing_is_no_hand_over(library: Engine) -> None:
    with pytest.raises(NotFound):
        named(library, [])


def test_a_chunk_whose_kv_is_lost_is_encoded_again(own: Engine) -> None:
    over = handed(own)
    expected = rows_of(own, over)
    for file in (own.settings.data / "kv").glob("*/*.kv"):
        file.unlink()
    again = rows_of(own, over)
    torch.testing.assert_close(again.k, expected.k, rtol=1e-4, atol=1e-4)


def test_rows_travel_as_safetensors(library: Engine) -> None:
    rows = rows_of(library, handed(library))
    read = load(rows.encode())
    assert torch.equal(read["tokens"], rows.tokens)
    assert torch.equal(read["k"], rows.k)
    assert torch.equal(read["v"], rows.v)
