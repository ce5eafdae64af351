"""The self-test: sound models pass and reuse stored KV; broken models answer with the method `full`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from ragkv.config import load_settings
from ragkv.engine.engine import Engine
from ragkv.engine.prefill import Prefiller
from ragkv.engine.self_test import failed_self_test, self_test
from ragkv.errors import InputError
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.model.rotary import Rotary
from ragkv.types import AskOptions, Document
from tests import tiny
from tests.libraries import open_engine

PREFIX = tiny.tokens(3, 99)
NAME = "f" * 64
YARD = Document("yard", "Yard", "The Calloway Yard was founded by Edda Calloway. It builds ferries.")


class Backwards(DecoderModel):
    """Rotates in the opposite direction of the model."""

    def rotary(self, positions, layer=0):
        own = super().rotary(positions, layer)
        return Rotary(own.cos, -own.sin)


class Relative(DecoderModel):
    """Rotates by the distance from the first token of the pass: right in every prefill, wrong for stored chunks."""

    def rotary(self, positions, layer=0):
        return super().rotary(positions - positions.min(), layer)


class Stretching(torch.nn.Module):
    """A rotary module of the model whose frequencies depend on the length of the prompt."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, position_ids):
        return self.inner(x, position_ids.double() / (1 + position_ids.max() / 1000))


def broken(kind: type[DecoderModel], sound: DecoderModel) -> DecoderModel:
    """Return `sound` with the behaviour of `kind`. It shares the weights."""
    other = copy.copy(sound)
    other.__class__ = kind
    return other


def make_prefiller(model: DecoderModel, mode: str = "shared") -> Prefiller:
    return Prefiller(model, PREFIX, mode)


@pytest.mark.parametrize("mode", ["shared", "isolated"])
@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_every_supported_family_qualifies(kind, mode):
    result = self_test(make_prefiller(tiny.model(kind), mode))
    assert result.reason == ""
    assert max(result.layer_loop, result.stored_rows, result.recompute) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_errors_pass(dtype):
    for kind in tiny.ARCHITECTURES:
        result = self_test(make_prefiller(DecoderModel(tiny.weights(kind, layers=12).to(dtype))))
        assert result.reason == ""
        assert max(result.layer_loop, result.stored_rows, result.recompute) < result.tolerance / 3


def test_the_bundled_model_qualifies(model):
    assert self_test(Prefiller(model, model.prompt.prefix)).reason == ""


def test_a_layer_loop_that_is_not_the_models_forward_fails():
    assert "layer loop" in self_test(make_prefiller(broken(Backwards, tiny.model()))).reason
    weights = tiny.weights()
    weights.model.layers[2].register_forward_hook(lambda layer, rows, out: 2 * out)  # more than its modules do
    result = self_test(make_prefiller(DecoderModel(weights)))
    assert result.layer_loop > 0.01
    assert "layer loop" in result.reason


def test_rows_at_wrong_positions_fail():
    result = self_test(make_prefiller(broken(Relative, tiny.model())))
    assert result.layer_loop < 1e-12, "a prefill is right, so only reuse shows the error"
    assert "stored KV" in result.reason
    weights = tiny.weights()
    weights.model.rotary_emb = Stretching(weights.model.rotary_emb)
    result = self_test(make_prefiller(DecoderModel(weights)))
    assert result.layer_loop < 1e-12, "the model does the same in its own forward"
    assert "stored KV" in result.reason
    assert "recomputed" in result.reason


def test_nan_fails():
    weights = tiny.weights()
    weights.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    result = self_test(make_prefiller(DecoderModel(weights)))
    assert "nan" in result.reason


def test_a_test_that_cannot_be_run_fails():
    weights = tiny.weights()
    weights.model.layers[1].self_attn.o_proj = torch.nn.Linear(8, 8).double()
    sound = DecoderModel(weights)
    assert "RuntimeError" in self_test(Prefiller(sound, ())).reason


def test_a_pass_is_recorded_and_not_run_again(tmp_path):
    sound = tiny.model()
    assert failed_self_test(make_prefiller(sound), NAME, tmp_path / "q") == ""
    # If the test ran again, it would fail.
    assert failed_self_test(make_prefiller(broken(Backwards, sound)), NAME, tmp_path / "q") == ""
    assert failed_self_test(make_prefiller(broken(Backwards, sound)), "e" * 64, tmp_path / "q") != ""


def test_a_failure_is_not_recorded(tmp_path):
    assert failed_self_test(make_prefiller(broken(Backwards, tiny.model())), NAME, tmp_path) != ""
    assert list(tmp_path.iterdir()) == []
    assert failed_self_test(make_prefiller(tiny.model()), NAME, tmp_path) == ""


@pytest.mark.parametrize("record", ["", "[]", "null", "{}", '{"torch": "1.0"}', "\udcff"])
def test_an_invalid_record_is_not_a_pass(tmp_path, record):
    (tmp_path / f"{NAME}.json").write_text(record, errors="surrogateescape")
    assert failed_self_test(make_prefiller(broken(Backwards, tiny.model())), NAME, tmp_path) != ""


def test_another_library_version_runs_the_test_again(tmp_path):
    assert failed_self_test(make_prefiller(tiny.model()), NAME, tmp_path) == ""
    path = tmp_path / f"{NAME}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "transformers": "5.0.0"}))
    assert failed_self_test(make_prefiller(broken(Backwards, tiny.model())), NAME, tmp_path) != ""


def test_a_folder_that_cannot_be_written_only_loses_the_record(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert failed_self_test(make_prefiller(tiny.model()), NAME, tmp_path / "file" / "q") == ""


def test_an_unqualified_model_answers_with_full_and_reports_why(tmp_path, model, embedder):
    with open_engine(tmp_path, broken(Relative, model), embedder) as engine:
        engine.reuse_refused = failed_self_test(engine.prefiller, engine.fingerprint, tmp_path / "q")
        ingest(engine, YARD)
        expected = engine.answer("Who founded the Calloway Yard?", AskOptions(method="full"))
        for method in (None, "scout", "samkv-fusion", "reuse"):
            answer = engine.answer("Who founded the Calloway Yard?", AskOptions(method=method))
            assert answer.answer == expected.answer
            assert answer.report.method == "full"
            assert answer.report.tokens == expected.report.tokens
            assert [f.chunk_id for f in answer.report.cache.fallbacks] == ["yard#0"]
            assert answer.report.cache.fallbacks[0].reason == "not_qualified"
        assert expected.report.cache.fallbacks == (), "full was asked for, and nothing was refused"
        with pytest.raises(InputError, match="magic"):
            engine.answer("Who?", AskOptions(method="magic"))
        health = engine.health()
        assert health["status"] == "degraded"
        assert "not qualified" in health["reuse"]
        assert list(engine.store.keys()) == [], "KV of such a model is not stored"


def test_an_engine_tests_its_model_when_it_opens(tmp_path, model, monkeypatch):
    settings = load_settings(data=tmp_path, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(DecoderModel, "load", lambda *_: broken(Relative, model))
        with Engine.open(settings) as engine:
            assert "not qualified" in engine.reuse_refused
    with monkeypatch.context() as patched:
        patched.setattr(DecoderModel, "load", lambda *_: model)
        with Engine.open(settings) as engine:
            assert engine.reuse_refused == ""
            assert engine.health()["reuse"] == "on"
            assert Path(tmp_path, "qualified", f"{engine.fingerprint}.json").is_file()
