"""Layers that read the KV of others, and inputs of each layer: what is stored, run and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.gemma4 import modeling_gemma4

from ragkv.engine.prefill import Prefiller
from ragkv.errors import ModelUnsupported
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_kinds import LayerKind
from ragkv.model.layer_pass import Attention, Capture, Pass, Step, append
from ragkv.model.profile import Profile
from ragkv.model.shared_kv import SharedKV
from ragkv.types import AskOptions, Document
from tests import families
from tests.libraries import open_engine
from tests.model.test_placement import spread
from tests.places import places

NEAR = {"rtol": 0, "atol": 1e-4}
IDS = families.tokens(40)


def prefill(model: DecoderModel, outputs: int = 40, attention: Attention | None = None) -> torch.Tensor:
    cache = ContextCache(model.shape, 8, model.dtype)
    return model.forward([append(cache, IDS, 0, outputs=outputs, attention=attention)])[0]


def own_model(name: str, **fields: object) -> DecoderModel:
    return DecoderModel(families.weights(name, **fields), profile=Profile(block=4))


def test_readers_follow_the_owners_and_no_kv_of_theirs_is_counted():
    model = families.model("gemma4_small")
    assert (model.shape.layers, model.readers, len(model.kinds), len(model.body.layers)) == (4, 4, 4, 8)
    assert [reader.owner for reader in model._layers.readers] == [2, 3, 2, 3]
    assert [reader.kind for reader in model._layers.readers] == 2 * [*model.kinds[2:]]
    stored = Prefiller(model, IDS[:3]).encode(IDS[3:])
    assert len(stored.k) == len(stored.v) == 4
    assert model.token_bytes == 2 * 4 * 4 * 16 * 4


def test_shared_kv_alone_gives_the_logits_of_the_models_own_forward(monkeypatch):
    # Some versions of transformers take rows of inputs that such a model lacks; real ones have both.
    whole = lambda _, *given, **named: given[:4]  # noqa: E731
    monkeypatch.setattr(modeling_gemma4.Gemma4TextModel, "_maybe_slice_kv_shared_inputs", whole, raising=False)
    alone = {"hidden_size_per_layer_input": 0}
    with torch.inference_mode():
        own = families.weights("gemma4_small", **alone)(torch.tensor([IDS])).logits[0]
    model = own_model("gemma4_small", **alone)
    assert (model.readers, model._layers.reads) == (4, "")
    torch.testing.assert_close(prefill(model), own, **NEAR)


@pytest.mark.parametrize("wrong", [[0, 1, 2, 3], [2, 3, 0, 3], [2, 1, 2, 3]])
def test_the_owner_of_every_reader_matters(wrong):
    model = own_model("gemma4_small")
    right, layers = prefill(model), model._layers
    readers = [replace(reader, owner=owner) for reader, owner in zip(layers.readers, wrong, strict=True)]
    model._layers = replace(layers, readers=tuple(readers))
    assert (prefill(model) - right).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gemma4_inputs", "gemma4_small"])
def test_the_input_of_every_layer_matters(name):
    model = own_model(name)
    right, ends = prefill(model), model._layers.ends
    embed, count = ends.embed, len(model.body.layers)
    for layer in range(count):
        order = list(range(count))
        order[layer] = (layer + 1) % count
        ends.embed = lambda tokens, order=order: (embed(tokens)[0], embed(tokens)[1][order])
        assert (prefill(model) - right).abs().max() > 0.1, layer


def test_only_rows_that_give_logits_run_through_readers():
    model, seen = own_model("gemma4_small"), []

    def counting(number, body):
        def run(hidden, *given):
            seen.append((number, len(hidden)))
            return body(hidden, *given)

        return run

    bodies = [counting(number, body) for number, body in enumerate(model._layers.bodies)]
    whole, model._layers = prefill(model), replace(model._layers, bodies=bodies)
    torch.testing.assert_close(prefill(model, outputs=3), whole[-3:], **NEAR)
    assert seen == [(number, 40) for number in range(4)] + [(number, 3) for number in range(4, 8)]
    seen.clear()
    prefill(model, outputs=0)
    assert seen == [(number, 40) for number in range(4)]


def test_sparse_attention_is_asked_for_owners_alone():
    model, asked = families.model("gemma4_small"), []

    def dense(layer, q, k, v, q_pos, k_pos, *, scale):
        asked.append(layer)
        return plain(layer, q, k, v, q_pos, k_pos, scale=scale)

    def plain(layer, q, k, v, q_pos, k_pos, *, scale):
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(groups, 1)) * scale
        scores = scores.masked_fill(k_pos[None, None] > q_pos[None, :, None], float("-inf"))
        return torch.einsum("htn,nhd->thd", scores.softmax(-1), v.repeat_interleave(groups, 1))

    torch.testing.assert_close(prefill(model, attention=dense), prefill(model), **NEAR)
    assert asked == [1, 3]


@pytest.mark.parametrize("name", ["gemma4_inputs", "gemma4_small"])
def test_a_pass_goes_on_where_another_stopped_with_inputs_of_its_tokens(name):
    model, capture = families.model(name), Capture()
    whole = prefill(model)
    cache, layers = ContextCache(model.shape, 40, model.dtype), model.shape.layers
    model.forward([append(cache, IDS, 0, capture=capture, depth=2)])
    at = torch.arange(40)
    slots = [at if layer == 1 else cache.reserve(layer, at) for layer in range(1, layers)]
    steps = [Step(None, each) for each in slots]
    found = model.forward([Pass(torch.tensor(IDS), at, cache, steps, start=1, hidden=capture.entered)])[0]
    torch.testing.assert_close(found, whole, **NEAR)


def test_a_question_of_a_small_gemma_loads_each_kv_once(tmp_path, tiny_folder, embedder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    fields = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    made = families.weights("gemma4_small", **fields, sliding_window=64, max_position_embeddings=4096)
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = DecoderModel.load(str(tmp_path / "model"), "cpu", "float32")
    text = " ".join(f"The harbour of Tarn number {n} was built in {1800 + n} by Edda." for n in range(90))
    with open_engine(tmp_path / "data", model, embedder, chunk_tokens=512) as engine:
        assert engine.reuse_refused == ""
        ingest(engine, Document("tarn", "Tarn", text))
        report = engine.answer("Who built it?", AskOptions(method="reuse", max_tokens=2)).report
    read = report.bytes
    assert read.context_kv == report.tokens.context * model.token_bytes
    assert read.loaded - read.windows == read.context_kv // 2, "the two full layers that own KV"
    assert 0 < read.windows < read.context_kv // 4


def test_what_is_shared_in_another_way_is_refused():
    plain, heads = LayerKind(0, 1.0), (4, 2, 16)
    kv, shared = torch.zeros(3, 2, 1, 16), SharedKV()
    with pytest.raises(ModelUnsupported, match="no layer before it leaves"):
        shared["full"]
    shared.layer = 0
    shared["full"] = kv, kv
    shared.layer = 1
    assert [each.shape for each in shared["full"]] == 2 * [(1, 2, 0, 16)]
    assert shared.check([(plain, heads)] * 2, False) == 1
    for layers, states in (
        ([(plain, heads)] * 3, False),  # an owner behind a reader
        ([(plain, heads)] * 2, True),
        ([(plain, heads), (LayerKind(0, 1.0, 8), heads)], False),
        ([(plain, heads), (plain, (8, 2, 16))], False),
    ):
        with pytest.raises(ModelUnsupported, match="layer 1 of the model"):
            shared.check(layers, states)


def test_layers_that_share_kv_run_on_one_device():
    with places(), pytest.raises(ModelUnsupported, match="on one GPU"):
        DecoderModel(spread(families.weights("gemma4_small"), 2))
