"""Every prefill and decode policy on stitched requests: it acts, and its report says what was read.

What was read is counted anew: pairs key by key from the indexes that attention is given, keys from the rows that a
decode policy gathers, or from the arithmetic of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ragkv.engine.decoding import generate
from ragkv.engine.engine import Engine
from ragkv.ingest.pipeline import ingest
from ragkv.sparse import prefill, psa, topk
from ragkv.sparse.blocks import BlockDigests
from ragkv.sparse.lfps_chosen import CandidateScores
from ragkv.types import AskOptions, Document
from tests.quick import quick_engine

QUESTION = "Which harbour master kept the lantern of the north pier?"
LONG = {"temperature": 9.0, "max_tokens": 12}
"""Tokens by chance, so that no answer of random weights ends early."""
METHODS = ("reuse", "cacheblend", "epic", "scout:cap=0.5", "samkv-fusion", "multi-infllm", "full")
PREFILLS = ("critiprefill:segment=32,block=8,budget=32,skip=0", "loopserve:alpha=0.4,tile=16,sample=16,dense=1")
DECODES = (
    "psa:block=8,least=4",
    "lfps:bypass=1,least=8",
    "loopserve:first=2,every=2,budget=32",
    "topk:block=8,count=4",
)
EVERYTHING = (
    ("critiprefill:segment=32,block=8,budget=8192,skip=0", "psa:threshold=1,block=8"),
    ("loopserve:alpha=0.999999999999,tile=16,dense=1", "lfps:beta=-inf,share=1,bypass=1"),
    ("dense", "loopserve:first=0,every=2,budget=100000"),
    ("dense", "topk:count=100000"),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Engine]:
    """More than 24 chunks of at most 64 tokens."""
    with quick_engine(tmp_path_factory.mktemp("stages"), max_tokens=12) as made:
        for number in range(8):
            text = " ".join(f"The harbour master of pier {number} kept lantern {i} of the north." for i in range(14))
            ingest(made, Document(f"d{number}", f"Pier {number}", text))
        yield made


class PairSpy:
    """Counts the pairs that attention is given, one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.read = self.dense = 0
        for name in ("attend", "attend_block_sparse"):
            monkeypatch.setattr(prefill, name, self.wrapped(getattr(prefill, name)))

    def wrapped(self, attention):
        def spy(q, k, v, q_pos, k_pos, index=None, *, scale):
            before = (k_pos[None, :] <= q_pos[:, None]).sum(1)
            self.dense += q.shape[1] * int(before.sum())
            if index is None:
                self.read += q.shape[1] * int(before.sum())
                return attention(q, k, v, q_pos, k_pos, scale=scale)
            heads, tiles = index.counts.shape
            for head in range(heads):
                for tile in range(tiles):
                    rows = q_pos[max(0, tile * index.tile - index.offset) : (tile + 1) * index.tile - index.offset]
                    keys = k_pos[index.keys(head, tile, k.shape[0])]
                    self.read += q.shape[1] // heads * int((keys[None, :] <= rows[:, None]).sum())
            return attention(q, k, v, q_pos, k_pos, index, scale=scale)

        return spy


@pytest.mark.parametrize("top_k", [6, 24])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spec", PREFILLS)
def test_a_prefill_policy_acts_on_a_stitched_request(engine, monkeypatch, method, spec, top_k):
    spy = PairSpy(monkeypatch)
    report = engine.answer(QUESTION, AskOptions(method=method, top_k=top_k, max_tokens=1, prefill=spec)).report
    assert report.cache.chunks == top_k
    assert report.prefill == spec.partition(":")[0]
    assert (report.prefilling.pairs_read, report.prefilling.pairs_dense) == (spy.read, spy.dense)
    if "critiprefill" in spec:
        assert spy.read < spy.dense
        assert not report.prefilling.why_dense


class RowSpy:
    """Counts the rows of keys that a decode policy gathers, over kv heads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows = 0
        for module in (psa, topk):
            monkeypatch.setattr(module, "gather_blocks", self.counting(module.gather_blocks, 2))
        monkeypatch.setattr(BlockDigests, "near_rows", self.counting(BlockDigests.near_rows, 2, (0, 1)))
        monkeypatch.setattr(CandidateScores, "_gather", self.counting(CandidateScores._gather, 1, (0,)))

    def counting(self, gather, times, axes=(0, 1)):
        """times: how often the same rows are gathered: once for keys, once for values."""

        def spy(*args):
            found = gather(*args)
            self.rows += torch.Size(found.shape[axis] for axis in axes).numel() / times
            return found

        return spy


def kept_by_loopserve(first, every, budget, present):
    """Keys read by steps with so many keys each: a selection reads all, the steps behind it what was selected."""
    read = selected = 0
    for step, rows in enumerate(present):
        if step < first or (step - first) % every == 0:
            read += rows
            selected = rows - min(rows, budget + every)
        else:
            read += rows - selected
    return read


@pytest.mark.parametrize("top_k", [6, 24])
@pytest.mark.parametrize("method", ["reuse", "scout:cap=0.5", "full"])
@pytest.mark.parametrize("spec", DECODES)
def test_a_decode_policy_acts_on_a_stitched_request(engine, monkeypatch, method, spec, top_k):
    request = engine.prefill(QUESTION, AskOptions(method=method, top_k=top_k, decode=spec, **LONG))
    spy = RowSpy(monkeypatch)
    lengths = list(request.context.cache.lengths)
    for _ in generate(engine.model, request.sequence):
        pass
    report, heads = engine.finalize(request).report, engine.model.shape.kv_heads
    steps = report.decoding.steps
    assert steps >= 5
    assert report.decode == spec.partition(":")[0]
    present = [[length + 1 + step for step in range(steps)] for length in lengths]
    lists = steps * len(lengths)
    assert report.decoding.present == sum(map(sum, present)) / lists
    if report.decode == "loopserve":
        expected = sum(kept_by_loopserve(2, 2, 32, layer) for layer in present)
    elif report.decode == "lfps":
        expected = spy.rows / heads + 4 * lists
    else:
        expected = spy.rows / heads
    assert report.decoding.read == pytest.approx(expected / lists)
    assert report.decoding.read < report.decoding.present
    assert not report.decoding.why_dense


@pytest.mark.parametrize("top_k", [6, 24])
@pytest.mark.parametrize("method", METHODS)
def test_policies_that_keep_everything_give_the_logits_of_dense_attention(engine, method, top_k):
    def logits(prefill, decode):
        request = engine.prefill(
            QUESTION, AskOptions(method=method, top_k=top_k, prefill=prefill, decode=decode, **LONG)
        )
        seen = [request.context.logits]
        accept = request.sequence.accept
        request.sequence.accept = lambda row: (seen.append(row[0].logits), accept(row))
        for _ in generate(engine.model, request.sequence):
            pass
        report = engine.finalize(request).report
        return torch.stack(seen), report

    exact, plain = logits("dense", "dense")
    assert plain.prefilling.why_dense == plain.decoding.why_dense == "dense was asked for"
    for prefill_spec, decode_spec in EVERYTHING:
        found, report = logits(prefill_spec, decode_spec)
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-9)
        assert (report.prefill, report.decode) == (prefill_spec.partition(":")[0], decode_spec.partition(":")[0])
        assert report.prefilling.pairs_read == report.prefilling.pairs_dense
        assert report.decoding.read == report.decoding.present


def test_bare_names_act_whatever_the_size(library):
    for top_k in (2, 6):
        for name in ("critiprefill", "loopserve"):
            options = AskOptions(method="reuse", top_k=top_k, max_tokens=1, prefill=name)
            report = library.answer(QUESTION, options).report
            reading = report.prefilling
            assert report.prefill == name or reading.why_dense.startswith("loopserve read everything: the lines")
            assert bool(reading.why_dense) == (reading.pairs_read == reading.pairs_dense)
        for name in ("psa", "lfps", "topk"):
            report = library.answer(QUESTION, AskOptions(method="reuse", top_k=top_k, decode=name)).report
            assert report.decode == name
            assert report.decoding.read < report.decoding.present


def test_loopserve_says_that_an_answer_was_too_short_for_it(engine):
    report = engine.answer(QUESTION, AskOptions(method="reuse", decode="loopserve")).report
    assert report.decode == "dense"
    assert report.decoding.why_dense == (
        "loopserve read everything: its first 16 steps are dense, and the answer has no more"
    )


def test_auto_is_the_default_and_says_why_it_is_dense_here(engine):
    assert (engine.settings.prefill, engine.settings.decode) == ("auto", "auto")
    report = engine.answer(QUESTION, AskOptions(method="reuse", top_k=2)).report
    assert (report.prefill, report.decode) == ("dense", "dense")
    assert report.prefilling.pairs_read is report.prefilling.pairs_dense is None
    assert report.prefilling.why_dense.startswith("auto: no policy was measured to prefill faster than dense")
    assert report.decoding.why_dense.endswith("keys a layer; lfps was measured to be faster from 65536 keys on")


def test_turns_of_a_conversation_are_read_sparsely_too(engine):
    for turn in range(2):
        options = AskOptions(conversation="c", method="reuse", top_k=6 + turn, prefill=PREFILLS[0], decode=DECODES[0])
        report = engine.answer(f"{QUESTION} {turn}", options).report
        assert (report.prefill, report.decode) == ("critiprefill", "psa")
        assert report.prefilling.pairs_read < report.prefilling.pairs_dense
