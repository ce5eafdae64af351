"""Decode policies end to end: what each is at its identity setting, what it saves otherwise, what the report says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragkv.cli.samples import samples_folder
from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.policies import DECODE_NAMES, check_decode_policy, make_decode_policy, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.question import prompt_order
from ragkv.errors import ConfigError, InputError
from ragkv.model.layer_pass import append
from ragkv.model.profile import Profile
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.multi_infllm import MultiInfLLM
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout
from ragkv.sparse.base import DecodeState, QueryObserver
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.lfps import Lfps
from ragkv.sparse.psa import Psa
from ragkv.sparse.reselect import LoopServeDecode
from ragkv.sparse.topk import TopBlocks
from ragkv.timing import StepTimer
from ragkv.types import AskOptions
from tests import tiny
from tests.libraries import ANSWER, QUESTION, open_engine

EVERYTHING = (
    "psa:threshold=1,above=0",
    "lfps:beta=-inf,share=1,bypass=1,above=0",
    "loopserve:first=0,every=3,budget=100000,above=0",
    "topk:count=100000,above=0",
)
"""Every policy, reading all there is."""

DECODERS = (
    Psa(1.0, block=4),
    Lfps(beta=float("-inf"), share=1.0, bypass=1.0),
    LoopServeDecode(first=2, every=3, budget=1000),
    TopBlocks(1000, block=4),
)
PREFIX, ASKED = tiny.tokens(3, 99), tiny.tokens(7, 50)
HEADS = ((2, 1), (3, 5))
CHUNKS = [tiny.tokens(n, n) for n in (30, 26, 41)]


def questions(count):
    lines = (samples_folder() / "questions.jsonl").read_text().splitlines()
    return [json.loads(line)["q"] for line in lines[:count]]


# The identity settings


def test_everything_on_and_nothing_sparse_says_what_generate_says(library, model):
    import transformers

    own = transformers.AutoModelForCausalLM.from_pretrained(
        Path(model.config._name_or_path), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    policy = make_prefill_policy("critiprefill:threshold=0,budget=8192", model.profile)
    for question in questions(1):
        hits = prompt_order(library.retriever.search(question, "default", 1))
        asked, chunks = model.prompt.question(question), [hit.chunk.tokens for hit in hits]
        ids = [*library.prefiller.prefix_tokens, *(t for chunk in chunks for t in chunk), *asked]
        generated = own.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
        expected = [token for token in generated if token not in model.stop_ids]
        for spec in EVERYTHING:
            decoder = make_decode_policy(spec, model.profile)
            context = library.prefiller.prefill_full(
                chunks, asked, StepTimer(), PrefillOptions(16, prefill_policy=policy, decode_policy=decoder)
            )
            place = context.cache, context.logits, context.position
            assert list(decode(model, *place, Sampling(16), context.decoding)) == expected, (spec, question)
            assert context.decoding.keys_read == context.decoding.keys_present > 0


@pytest.mark.parametrize("method", ["full", "scout", "samkv-fusion"])
def test_a_policy_that_reads_everything_answers_as_dense_decoding_does(library, method):
    dense = library.answer(QUESTION, AskOptions(method=method, top_k=2, max_tokens=20))
    assert dense.report.decode == "dense"
    for spec in EVERYTHING:
        answer = library.answer(QUESTION, AskOptions(method=method, top_k=2, max_tokens=20, decode=spec))
        assert answer.answer == dense.answer, spec
        assert answer.report.decode == spec.partition(":")[0]
        decoding, plain = answer.report.decoding, dense.report.decoding
        assert decoding.why_dense.startswith(f"{answer.report.decode} read everything: ")
        same = {"why_dense": "", "speculation": None}
        assert replace(decoding, **same) == replace(plain, **same)


def tiny_reader():
    return Prefiller(tiny.model(profile=Profile(block=4, initial=1, local=2, retrieval_heads=HEADS)), PREFIX)


def logits_of(reader, method, decoder, policy=None, count=8):
    """Of the first token and of `count` more, decoded greedily over what the method keeps."""
    if method is None:
        context = reader.prefill_full(
            CHUNKS, ASKED, StepTimer(), PrefillOptions(count, prefill_policy=policy, decode_policy=decoder)
        )
    else:
        sources = [InMemoryChunk(reader.encode(chunk), 4, exact=i == 0) for i, chunk in enumerate(CHUNKS)]
        context = reader.prefill_sparse(
            sources, ASKED, method, StepTimer(), PrefillOptions(count, prefill_policy=policy, decode_policy=decoder)
        )
    seen = [context.logits]
    for step in range(count):
        token = int(seen[-1].argmax())
        row = append(context.cache, [token], context.position + step, attention=context.decoding)
        seen.append(reader.model.forward([row])[0][-1])
    return torch.stack(seen), context


def methods():
    kept = {"layers": (2, 3)}
    return {
        "samkv": SamKV(**kept),
        "samkv all repaired": SamKV(**kept, repair="kept", update="overwrite"),
        "scout": Scout(4, HEADS, 4, 8**-0.5, floor=1, cap=0.1),
        "cacheblend": CacheBlend(4),
        "multi-infllm": MultiInfLLM(4),
        "full": None,
    }


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: type(decoder).__name__)
def test_over_what_a_method_keeps_the_identity_is_full_attention(decoder, name):
    reader = tiny_reader()
    dense, _ = logits_of(reader, methods()[name], None)
    sparse, context = logits_of(reader, methods()[name], decoder)
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-10)
    assert context.decoding.keys_read == context.decoding.keys_present
    assert len(context.decoding.key_counts) == 8 * 4, "every row of the answer was a step, in every layer"


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: type(decoder).__name__)
def test_a_question_that_is_prefilled_sparsely_is_looked_at_as_well(decoder):
    reader, policy = tiny_reader(), CritiPrefill(8, 4, 16, threshold=0)
    dense, _ = logits_of(reader, None, None, policy)
    sparse, context = logits_of(reader, None, decoder, policy)
    assert context.sparse.selected
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-10)


# What a state sees of the question


class Looking(DecodeState):
    """Reads everything and remembers what it was shown."""

    query_rows = 5

    def __init__(self):
        super().__init__()
        self.shown = {}

    def learn(self, layer, q, k, v, q_pos, k_pos, *, scale):
        assert layer not in self.shown
        self.shown[layer] = q, q_pos.tolist(), k.clone(), k_pos.clone()

    def step(self, layer, q, k, v, k_pos, *, scale):
        raise AssertionError("no token was decoded")


class Lookout(Psa):
    def start(self):
        return Looking()


@pytest.mark.parametrize("name", methods())
def test_a_state_is_shown_the_questions_rows_and_all_keys_as_they_stay(name):
    reader = tiny_reader()
    _, context = logits_of(reader, methods()[name], Lookout(), count=0)
    start = context.position - len(ASKED)
    for layer in range(4):
        q, at, k, k_pos = context.decoding.shown[layer]
        requested = len(ASKED) if layer < 3 else Looking.query_rows
        first = at.index(context.position - requested)
        assert at[first:] == list(range(context.position - requested, context.position))
        if name != "full":
            assert first == 0, "repaired rows are nobody's question"
            assert at[0] >= start
        assert len(q) == len(at)
        torch.testing.assert_close(k, context.cache.k(layer), rtol=0, atol=0)
        assert torch.equal(k_pos, context.cache.positions(layer))


def test_an_observed_pass_attends_as_an_unobserved_one():
    reader = tiny_reader()
    plain, _ = logits_of(reader, methods()["scout"], None, count=0)
    looked, _ = logits_of(reader, methods()["scout"], Lookout(), count=0)
    torch.testing.assert_close(looked, plain, rtol=0, atol=1e-12)
    assert QueryObserver(Looking(), None, 0).prefill is None


# What is read


@pytest.mark.parametrize("spec", ["psa:least=8", "lfps", "topk:count=8", "loopserve:first=0,every=8,budget=128"])
def test_a_report_says_how_many_of_the_keys_were_read(library, spec):
    report = library.answer(QUESTION, AskOptions(method="full", top_k=4, max_tokens=40, decode=spec)).report
    assert report.decode == spec.partition(":")[0]
    assert report.decoding.read < 0.9 * report.decoding.present
    assert report.decoding.present > report.tokens.context
    assert report.tokens.generated - 1 <= report.decoding.steps <= report.tokens.generated
    assert report.decoding.pulled == 0


LONG = [("psa:least=8", 0.9), ("lfps", 0.5), ("topk:count=8", 0.5), ("loopserve:budget=128", 0.8)]


@pytest.mark.parametrize(("spec", "share"), LONG)
def test_a_long_answer_reads_fewer_keys_than_there_are(library, model, spec, share):
    """40 tokens, whatever the model would end with."""
    hits = prompt_order(library.retriever.search(QUESTION, "default", 3))
    chunks, asked = [hit.chunk.tokens for hit in hits], model.prompt.question(QUESTION)
    context = library.prefiller.prefill_full(
        chunks, asked, StepTimer(), PrefillOptions(40, decode_policy=make_decode_policy(spec, model.profile))
    )
    logits = context.logits
    for step in range(40):
        row = append(context.cache, [int(logits.argmax())], context.position + step, attention=context.decoding)
        logits = model.forward([row])[0][-1]
    assert context.decoding.keys_read < share * context.decoding.keys_present


@pytest.mark.parametrize("question", [QUESTION, *questions(3)])
def test_sample_questions_are_answered_as_with_dense_decoding(library, question):
    dense = library.answer(question, AskOptions(top_k=4)).answer
    for spec in ("psa:least=0,above=0", "lfps:above=0", "topk:above=0", "loopserve:first=0,budget=256,above=0"):
        assert library.answer(question, AskOptions(top_k=4, decode=spec)).answer == dense, spec


def test_contexts_below_a_threshold_that_is_asked_for_are_read_densely(library):
    small = library.answer(QUESTION, AskOptions(method="scout", top_k=2, decode="topk:count=1,above=2000")).report
    assert small.decode == "dense"
    assert small.decoding.read == small.decoding.present
    assert small.decoding.why_dense.endswith("keys a layer, above=2000 asks for more")
    sparse = library.answer(QUESTION, AskOptions(method="scout", top_k=2, decode="topk:count=1")).report
    assert sparse.tokens.kept < 512
    assert sparse.decode == "topk"
    assert sparse.decoding.read < sparse.decoding.present == pytest.approx(small.decoding.present, abs=20)
    assert not sparse.decoding.why_dense


def test_dense_decoding_reads_all_keys_of_every_step(library):
    report = library.answer(QUESTION, AskOptions(method="full", top_k=2, max_tokens=6)).report
    prefix = len(library.prefiller.prefix_tokens)
    first = prefix + report.tokens.context + report.tokens.question + 1
    assert report.decoding.steps > 0
    assert report.decoding.read == report.decoding.present == first + (report.decoding.steps - 1) / 2
    one = library.answer(QUESTION, AskOptions(method="full", top_k=2, max_tokens=1)).report
    assert (one.decoding.steps, one.decoding.read, one.decoding.present) == (0, 0.0, 0.0)


def test_every_turn_of_a_conversation_has_a_state_of_its_own(library):
    turns = (QUESTION, *questions(1))
    said = {
        spec: [library.answer(q, AskOptions(conversation=spec, top_k=1, decode=spec)).answer for q in turns]
        for spec in ("dense", *EVERYTHING)
    }
    for spec in EVERYTHING:
        library.sessions.remove("default", spec)
        assert said[spec] == said["dense"]
    library.sessions.remove("default", "dense")


# Names


def test_the_setting_is_taken_unless_the_request_says_otherwise(model, embedder, library):
    with open_engine(library.settings.data, model, embedder, decode="psa:threshold=0.98,least=8") as engine:
        answer = engine.answer(QUESTION, AskOptions(method="full", top_k=4))
        assert (answer.report.decode, answer.answer) == ("psa", ANSWER)
        assert engine.answer(QUESTION, AskOptions(method="full", top_k=4, decode="dense")).report.decode == "dense"


def test_a_setting_that_names_nothing_is_refused_at_the_start(tmp_path, model, embedder):
    with pytest.raises(ConfigError, match=r"RAGKV_DECODE.*psa"):
        open_engine(tmp_path, model, embedder, decode="quest")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quest", "dense, psa, lfps, loopserve, topk"),
        ("dense:above=3", "no fields"),
        ("psa:budget=3", "threshold"),
        ("psa:threshold=2", "at most 1"),
        ("lfps:reach=0.5", "a whole number"),
        ("loopserve:evict=never", "view, evict"),
    ],
)
def test_a_policy_that_there_is_not_is_told_what_there_is(library, model, spec, words):
    with pytest.raises(InputError, match=words):
        library.answer(QUESTION, AskOptions(decode=spec))
    with pytest.raises(InputError, match=words):
        make_decode_policy(spec, model.profile)


def test_names_and_fields_make_policies(model):
    assert DECODE_NAMES == ("dense", "psa", "lfps", "loopserve", "topk")
    assert make_decode_policy("dense", model.profile) is None
    assert make_decode_policy("lfps:reach=-1/1,heads=kv", model.profile) == Lfps(reach=(-1, 1), heads="kv")
    assert make_decode_policy("psa:micro=2,least=8", model.profile) == Psa(micro=2, block=16, least=8, part=0.25)
    assert make_decode_policy("loopserve:evict=evict,budget=7,above=9", model.profile) == LoopServeDecode(
        evict="evict", budget=7, above=9
    )
    assert check_decode_policy("psa:threshold=0.98") == "psa:threshold=0.98"
