"""The engine on the bundled model: exactness end to end, what is loaded, and faults that cost time only."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ragkv.cli.samples import samples_folder
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.cost_model import LinearCost, QuadraticCost
from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.needles import make_needles
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.question import prompt_order
from ragkv.engine.registry import METHODS, make_method
from ragkv.engine.reuse_policy import ReusePolicy
from ragkv.errors import InputError, NotCalibrated, NotFound
from ragkv.ingest.pipeline import ingest
from ragkv.recompute.samkv import SamKV
from ragkv.report import Answer
from ragkv.store.format.codec import pack
from ragkv.store.format.layout import Layout
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Document
from tests.libraries import ANSWER, QUESTION, open_copy, open_engine, open_library
from tests.redis_server import redis_server

TWO = ("01", "02")


def questions():
    return [json.loads(line)["q"] for line in (samples_folder() / "questions.jsonl").read_text().splitlines()]


def files(engine):
    return sorted((engine.settings.data / "kv").glob("*/*.kv"))


@pytest.mark.timeout(400)
def test_full_equals_generate_token_for_token_on_sample_questions(library, model):
    import transformers

    own = transformers.AutoModelForCausalLM.from_pretrained(
        Path(model.config._name_or_path), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    for n, question in enumerate(questions()[::4]):
        hits = prompt_order(library.retriever.search(question, "default", 3 if n % 5 == 0 else 1))
        ids = [
            *library.prefiller.prefix_tokens,
            *(t for h in hits for t in h.chunk.tokens),
            *model.prompt.question(question),
        ]
        generated = own.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
        expected = [t for t in generated if t not in model.stop_ids]
        context = library.prefiller.prefill_full(
            [h.chunk.tokens for h in hits], model.prompt.question(question), StepTimer(), PrefillOptions(16)
        )
        got = list(decode(model, context.cache, context.logits, context.position, Sampling(16)))
        assert got == expected, question


def test_samkv_with_everything_kept_and_recomputed_equals_full(library, model):
    everything = SamKV(layers=model.profile.stable_layers, middle="all", repair="kept", update="overwrite")
    for question, top_k in zip(questions()[:4], (2, 3, 2, 4), strict=True):
        asked = model.prompt.question(question)
        hits = prompt_order(library.retriever.search(question, "default", top_k))
        sources = [library.chunks.open(hit.chunk, "default", first=i == 0) for i, hit in enumerate(hits)]
        assert all(source.hit for source in sources)
        full = library.prefiller.prefill_full(
            [hit.chunk.tokens for hit in hits], asked, StepTimer(), PrefillOptions(16)
        )
        sparse = library.prefiller.prefill_sparse(sources, asked, everything, StepTimer(), PrefillOptions(16))
        torch.testing.assert_close(sparse.logits, full.logits, rtol=1e-4, atol=1e-4)
        answers = [list(decode(model, c.cache, c.logits, c.position, Sampling(16))) for c in (full, sparse)]
        assert answers[0] == answers[1], question


def test_a_short_context_is_prefilled_where_that_is_predicted_to_be_quicker_and_nobody_asked_otherwise(library):
    question, quick, slow = questions()[0], LinearCost(0, 0), LinearCost(10**6, 0)

    def ask(**options: str) -> Answer:
        return library.answer(question, AskOptions(max_tokens=1, **options))

    assert library.reuse_policy is None, "on a CPU there is none"
    assert ask().report.method == "scout"
    try:
        library.reuse_policy = ReusePolicy(full=QuadraticCost(0, 0, 0), sparse=slow)
        assert ask().report.method == "full"
        assert ask(method="scout").report.method == "scout"
        assert ask(conversation="goes on as it began").report.method == "scout"
        library.reuse_policy = ReusePolicy(full=QuadraticCost(10**6, 0, 0), sparse=quick)
        assert ask().report.method == "scout"
    finally:
        library.reuse_policy = None


@pytest.mark.parametrize("picks", [(2, 0, 1), (1, 1), (3, 0, 3)])
def test_chunks_in_any_order_and_more_than_once_equal_full_when_all_is_recomputed(library, model, picks):
    """Everything is found in the store: the same entry serves every place in which its chunk stands."""
    asked = model.prompt.question(QUESTION)
    hits = prompt_order(library.retriever.search(QUESTION, "default", 6))
    chunks = [hits[pick].chunk for pick in picks]
    sources = [library.chunks.open(chunk, "default", first=i == 0) for i, chunk in enumerate(chunks)]
    assert all(source.hit for source in sources)
    everything = make_method("samkv-overwrite:middle=all,repair=kept", model)
    full = library.prefiller.prefill_full([chunk.tokens for chunk in chunks], asked, StepTimer(), PrefillOptions(1))
    sparse = library.prefiller.prefill_sparse(sources, asked, everything, StepTimer(), PrefillOptions(1))
    torch.testing.assert_close(sparse.logits, full.logits, rtol=1e-4, atol=1e-4)


def test_the_report_says_what_was_done(library):
    answer = library.answer(QUESTION, AskOptions(method="scout", top_k=4))
    report = asdict(answer.report)
    assert set(report) == {
        "method", "prefill", "decode", "model", "tokens", "ratios", "cache", "bytes", "prefilling", "decoding",
        "timings_ms", "chunks", "confidence", "evidence", "abstained", "removed_turns", "selection", "held",
        "rule",
    }  # fmt: skip
    assert report["tokens"]["context"] == sum(chunk["tokens"] for chunk in report["chunks"])
    kept = sum(sum(c["kept"]) * 16 for c in report["chunks"])
    assert kept - 16 * 4 <= report["tokens"]["kept"] <= kept
    assert report["ratios"]["sequence"] == report["tokens"]["kept"] / report["tokens"]["context"] < 0.35
    assert report["ratios"]["cache_hit"] == 1.0
    assert report["cache"] == {"chunks": 4, "hits": {"gpu": 0, "host": 0, "store": 4}, "misses": 0, "fallbacks": ()}
    timings = report["timings_ms"]
    steps = sum(timings[name] for name in ("retrieve", "open", "plan", "load", "repair", "prefill"))
    assert steps <= timings["ttft"] <= timings["total"]
    full = library.answer(QUESTION, AskOptions(method="full", top_k=4)).report
    assert (full.ratios.sequence, full.ratios.recompute, full.ratios.load) == (1.0, 1.0, 0.0)
    assert answer.answer == ANSWER
    assert {c.document_id[:2] for c in answer.citations} >= {"01", "02"}


def test_chunks_of_one_document_stay_adjacent_and_in_order(library):
    for question in questions()[:12]:
        hits = prompt_order(library.retriever.search(question, "default", 6))
        seen = [hit.chunk.document_id for hit in hits]
        assert len(dict.fromkeys(seen)) == 1 + sum(a != b for a, b in itertools.pairwise(seen))
        for a, b in itertools.pairwise(hits):
            assert a.chunk.document_id != b.chunk.document_id or a.chunk.ordinal < b.chunk.ordinal


@pytest.mark.parametrize("method", list(METHODS))
def test_bytes_loaded_are_the_ranges_of_the_kept_blocks_that_are_read(library, model, method):
    """S14. SamKV's padding (rows that stand in during repair) is read too, and counted; other methods have none.
    What is computed again and written over is not read, but by the composite pass."""
    for question in questions()[:3]:
        hits = prompt_order(library.retriever.search(question, "default", 4))
        sources = [library.chunks.open(hit.chunk, "default", first=i == 0) for i, hit in enumerate(hits)]
        how = make_method(method, model)
        context = library.prefiller.prefill_sparse(
            sources, model.prompt.question(question), how, StepTimer(), PrefillOptions(8)
        )
        plan = context.plan
        pieces = [source.piece for source in sources]
        attending = how.composite_layers(12) - 1
        for i, source in enumerate(sources):
            layout = Layout(model.shape, len(source.tokens), 16, model.dtype)
            read = [{*plan.kept[layer][i], *plan.padding[layer][i]} for layer in range(12)]
            if method == "multi-infllm":  # any block may be asked for at any layer
                read = [set(range(layout.blocks))] * 12
            elif plan.blend is None and plan.refinement is None:
                for layer in range(12):
                    done = {b for b in read[layer] if {*pieces[i].span(b)} <= {*plan.recompute[layer][i]}}
                    read[layer] -= done - {b for look in context.looks for b in look[i] if layer < attending}
            ranges = [layout.range(layer, block).size for layer, blocks in enumerate(read) for block in blocks]
            assert source.loaded_bytes == sum(ranges)
        if method in ("reuse", "epic", "scout"):
            assert not any(any(layer) for layer in plan.padding)
    report = library.answer(QUESTION, AskOptions(method="scout:repair=none")).report
    everything = round(report.tokens.kept * 12) * 1024  # K and V, 2 kv heads of 64, float32
    assert report.bytes.loaded == everything
    assert 0 < library.answer(QUESTION, AskOptions(method="scout")).report.bytes.loaded < everything


def test_bytes_loaded_are_the_bytes_that_left_redis(tmp_path, model, embedder):
    import redis

    with redis_server() as server, open_library(tmp_path, model, embedder, TWO, store=server.url) as engine:
        engine.answer(QUESTION)
        client = redis.Redis(port=server.port)

        def sent():
            stats, calls = client.info("stats"), client.info("commandstats")
            asked = {
                name: calls[f"cmdstat_{name}"]["calls"] for name in ("get", "getrange") if f"cmdstat_{name}" in calls
            }
            return stats["total_net_output_bytes"], sum(asked.values())

        idle = sent()[0]
        idle = sent()[0] - idle  # what one call of sent() itself costs
        before, calls_before = sent()
        report = engine.answer(QUESTION).report
        after, calls_after = sent()
        payload, replies = report.bytes.loaded + report.bytes.heads, calls_after - calls_before
        framing = after - before - idle - payload
        assert report.ratios.cache_hit == 1.0
        assert 0 < report.bytes.loaded < round(report.tokens.kept * 12) * 1024, "what is overwritten is not read"
        assert 0 < framing <= 16 * replies + 64  # "$<length>\r\n…\r\n" around every value, and nothing else
        client.close()


def test_a_stored_chunk_gives_the_same_logits_bit_for_bit(library, model):
    hits = prompt_order(library.retriever.search(QUESTION, "default", 3))
    stored = [library.chunks.open(hit.chunk, "default", first=i == 0) for i, hit in enumerate(hits)]
    fresh = []
    for i, hit in enumerate(hits):
        kv = library.prefiller.encode(hit.chunk.tokens)
        fresh.append(InMemoryChunk(replace(kv, digest=stored[i].piece.digest), 16, exact=i == 0))
    asked = model.prompt.question(QUESTION)
    method = SamKV(layers=model.profile.stable_layers, extremes="dynamic")
    a = library.prefiller.prefill_sparse(stored, asked, method, StepTimer(), PrefillOptions(8))
    b = library.prefiller.prefill_sparse(fresh, asked, method, StepTimer(), PrefillOptions(8))
    assert a.plan.kept == b.plan.kept
    assert torch.equal(a.logits, b.logits)


def test_restarting_keeps_everything(tmp_path, model, embedder):
    with open_library(tmp_path, model, embedder, TWO) as engine:
        first = engine.answer(QUESTION)
    with open_engine(tmp_path, model, embedder) as engine:
        second = engine.answer(QUESTION)
    assert second.answer == first.answer
    assert second.report.cache.hits.store == second.report.cache.chunks
    assert second.report.chunks == first.report.chunks


@pytest.mark.parametrize("damage", ["missing", "head", "body", "truncated", "foreign"])
def test_a_damaged_entry_is_encoded_again_and_reported(two_documents, tmp_path, model, embedder, damage):
    asked = AskOptions(top_k=4, method="scout:repair=none,cap=0.5")  # reads blocks of every chunk
    with open_copy(two_documents, tmp_path / "data", model, embedder) as engine:
        expected = engine.answer(QUESTION, asked)
        victim, other = files(engine)[:2]
        data = bytearray(victim.read_bytes())
        if damage == "missing":
            victim.unlink()
        elif damage == "foreign":
            victim.write_bytes(other.read_bytes())
        else:
            if damage == "truncated":
                data = data[: len(data) // 2]
            elif damage == "head":
                data[600] ^= 1
            else:  # one bit in every page of the body, so that whatever is read is hit
                for at in range(len(data) // 4, len(data), 1024):
                    data[at] ^= 1
            victim.write_bytes(data)
        answer = engine.answer(QUESTION, asked)
        assert answer.answer == expected.answer
        assert [f.chunk_id[:2] for f in answer.report.cache.fallbacks] in (["01"], ["02"])
        assert answer.report.cache.misses == 1
        assert answer.report.ratios.cache_hit == 0.75
        healed = engine.answer(QUESTION, asked)
        assert healed.report.cache.misses == 0, "what was encoded again is stored again"
        assert healed.report.chunks == expected.report.chunks


def test_a_redis_that_is_down_costs_time_only(tmp_path, model, embedder):
    with redis_server() as server:
        url = server.url
    with open_library(tmp_path, model, embedder, TWO, store=url) as engine:
        assert engine.health()["status"] == "degraded"
        answer = engine.answer(QUESTION)
        assert answer.answer == ANSWER
        assert all(f.reason == "unavailable" for f in answer.report.cache.fallbacks)
        assert len(answer.report.cache.fallbacks) == answer.report.cache.chunks


def test_a_redis_killed_between_questions_costs_time_only(tmp_path, model, embedder):
    with redis_server() as server, open_library(tmp_path, model, embedder, TWO, store=server.url) as engine:
        expected = engine.answer(QUESTION)
        assert expected.report.ratios.cache_hit == 1.0
        server.process.kill()
        server.process.wait()
        answer = engine.answer(QUESTION)
        assert answer.answer == expected.answer
        assert answer.report.ratios.cache_hit == 0.0


def test_another_collection_never_reads_this_ones_entries(library, tmp_path, model, embedder):
    tokens = library.catalog.chunks_of("default", "01-skerrow-light.md")[0].tokens
    mine, theirs = (ChunkStore(library.tiers, model, library.fingerprint, name) for name in ("default", "other"))
    assert mine.key(tokens) != theirs.key(tokens)
    assert StoredChunk(mine, tokens, False, lambda: library.prefiller.encode_passes(tokens)).hit
    source = StoredChunk(theirs, tokens, False, lambda: library.prefiller.encode_passes(tokens))
    assert not source.hit
    with pytest.raises(NotFound):
        library.answer(QUESTION, AskOptions(collection="other"))


@pytest.mark.parametrize("forgery", ["layers", "heads", "dtype", "retrieval"])
def test_a_well_made_entry_of_another_shape_is_a_miss(two_documents, tmp_path, model, embedder, forgery):
    """Checksums, tokens, fingerprint and key are right; the tensors are another model's."""
    with open_copy(two_documents, tmp_path / "data", model, embedder) as engine:
        chunk = engine.catalog.chunks_of("default", "01-skerrow-light.md")[0]
        kv = engine.encode(chunk)
        d = kv.digest
        if forgery == "layers":
            parts = {n: getattr(d, n)[:11] for n in d.__dataclass_fields__ if n != "retrieval_keys"}
            forged = replace(kv, k=kv.k[:11], v=kv.v[:11], digest=replace(d, **parts))
        elif forgery == "heads":
            digest = replace(d, mean_keys=d.mean_keys[:, :, :1])
            forged = replace(kv, k=kv.k[:, :, :1].contiguous(), v=kv.v[:, :, :1].contiguous(), digest=digest)
        elif forgery == "dtype":
            forged = replace(kv, k=kv.k.half(), v=kv.v.half())
        else:
            forged = replace(kv, digest=replace(d, retrieval_keys=d.retrieval_keys[:1]))
        key = engine.chunks.store("default").key(chunk.tokens)
        engine.store.put(key, *pack(forged, 16, engine.fingerprint))
        answer = engine.answer(QUESTION, AskOptions(top_k=4))
        assert answer.answer == ANSWER
        assert [f.chunk_id for f in answer.report.cache.fallbacks] == [chunk.id]


def test_other_facts_about_the_model_are_another_fingerprint(tmp_path, library, model, embedder):
    with open_engine(tmp_path / "a", model, embedder, prefix="isolated") as isolated:
        assert isolated.fingerprint != library.fingerprint
    other = replace(model.profile, block=32)
    weights = model
    kept, weights.profile = weights.profile, other
    try:
        with open_engine(tmp_path / "b", weights, embedder) as blocks:
            assert blocks.fingerprint != library.fingerprint
    finally:
        weights.profile = kept


def test_isolated_chunks_answer_too(tmp_path, model, embedder):
    with open_library(tmp_path, model, embedder, TWO, prefix="isolated") as engine:
        assert engine.answer(QUESTION, AskOptions(method="samkv-fusion")).report.ratios.cache_hit == 1.0
        assert engine.answer(QUESTION).answer == ANSWER


def test_identical_text_is_stored_once_and_forgotten_last(tmp_path, model, embedder):
    with open_engine(tmp_path, model, embedder) as engine:
        text = "The Calloway Yard was founded by Edda Calloway. It builds ferries."
        ingest(engine, Document("a", "Yard", text))
        ingest(engine, Document("b", "Yard", text))
        assert len(files(engine)) == 1
        engine.evict(engine.catalog.remove("default", "a"))
        assert len(files(engine)) == 1
        engine.evict(engine.catalog.remove("default", "b"))
        assert files(engine) == []


@pytest.mark.parametrize(
    ("question", "options", "error", "word"),
    [
        ("", {}, InputError, "empty"),
        (" \n\t", {}, InputError, "empty"),
        ("Who? " * 10_000, {}, InputError, "2048"),
        ("Who?", {"method": "magic"}, InputError, "samkv-fusion"),
        ("Who?", {"collection": "nowhere"}, NotFound, "nowhere"),
        ("Who?", {"max_tokens": 8_000}, InputError, "8192"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_to_do(library, question, options, error, word):
    with pytest.raises(error, match=word) as refusal:
        library.answer(question, AskOptions(**options))
    assert "\n" not in str(refusal.value)


def test_what_nobody_sees_of_a_question_is_not_read_by_the_model(library):
    seen, hidden = "Who founded Calloway Yard?", "Who foun\xadded Callo\u200bway \u2066Yard\u2069?"
    assert library.prefill(hidden).question_tokens == library.prefill(seen).question_tokens
    assert library.answer(hidden).answer == library.answer(seen).answer


def test_attention_asks_for_calibration_where_there_is_none(library, model):
    kept, model.profile = model.profile, replace(model.profile, retrieval_heads=())
    try:
        with pytest.raises(NotCalibrated, match="ragkv calibrate"):
            library.answer(QUESTION, AskOptions(method="scout:evidence=attention"))
        assert library.answer(QUESTION, AskOptions(method="scout")).report.ratios.sequence < 1
    finally:
        model.profile = kept


def test_stop_strings_and_temperature(library):
    whole = library.answer("Who founded Calloway Yard?").answer
    assert library.answer("Who founded Calloway Yard?", AskOptions(stop=[" Calloway"])).answer == whole.split()[0]
    assert library.answer("Who founded Calloway Yard?", AskOptions(temperature=0.7, top_p=1e-6)).answer == whole


def test_an_answer_goes_on_from_what_it_begins_with(library):
    question = "Who founded Calloway Yard?"
    whole = library.answer(question)
    first, _, rest = whole.answer.partition(" ")
    assert rest
    made = library.answer(question, AskOptions(beginning=first))
    assert made.answer == whole.answer
    assert made.report.tokens.generated < whole.report.tokens.generated
    assert made.report.tokens.question > whole.report.tokens.question
    other = library.answer(question, AskOptions(beginning="Calloway Yard was founded by", max_tokens=12)).answer
    assert other.startswith("Calloway Yard was founded by")
    stopped = library.answer(question, AskOptions(beginning=first, stop=[first, rest])).answer
    assert stopped == first, "a stop string counts behind the beginning only"


def test_needles_of_one_seed_are_read_the_same_way_every_time(model):
    needles = make_needles(3, 2, 120, 2, lambda text: len(model.prompt.plain(text)))
    reader = Prefiller(model, model.prompt.prefix)
    a, b = (reader.encode(model.prompt.chunk(d.title, d.text)) for d in (needles.documents[0],) * 2)
    assert torch.equal(a.k, b.k)
    assert torch.equal(a.digest.retrieval_keys, b.digest.retrieval_keys)
