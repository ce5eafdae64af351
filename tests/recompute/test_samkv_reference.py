"""The whole of SamKV, from stored chunks to logits, against the naive reference. Layers keep different blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile
from ragkv.model.rotary import rotate
from ragkv.recompute.samkv import SamKV
from ragkv.timing import StepTimer
from tests import tiny
from tests.recompute import naive_samkv
from tests.recompute.naive_digest import NaiveChunk, encode
from tests.recompute.naive_model import Cache, NaiveModel, Vector
from tests.recompute.naive_samkv import NaivePlan

BLOCK, LAYERS = 4, (2, 3)
PREFIX, QUESTION = tiny.tokens(3, 99), tiny.tokens(5, 54)
CHUNKS = [tiny.tokens(n, n + 300) for n in (30, 26, 41)]
STARTS = [3, 33, 59]
END = 100


def rotate_at(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return rotate(x, real_model().rotary(positions))


METHODS = {
    "fusion": SamKV(layers=LAYERS, extremes="dynamic"),
    "overwrite": SamKV(layers=LAYERS, extremes="dynamic", update="overwrite"),
    "static extremes": SamKV(layers=LAYERS),
    "one stable layer": SamKV(layers=(1,), extremes="dynamic"),
    "cosine by head": SamKV(layers=LAYERS, extremes="dynamic", cosine="head"),
    "scores from 0 to 1": SamKV(layers=LAYERS, extremes="dynamic", normalise="min_max"),
    "all blocks count": SamKV(layers=(0, 1, 2, 3), extremes="dynamic", total="all"),
    "no bias": SamKV(layers=LAYERS, extremes="dynamic", bias=False),
    "after RoPE": SamKV(layers=LAYERS, extremes="dynamic", compare="after", rotate=rotate_at),
    "anchor over tokens": SamKV(layers=LAYERS, extremes="dynamic", anchor="tokens"),
    "rounded to the nearest": SamKV(layers=LAYERS, extremes="dynamic", rounding="nearest"),
    "rounded down": SamKV(layers=LAYERS, extremes="dynamic", rounding="down"),
    "theta by token": SamKV(layers=LAYERS, extremes="dynamic", theta="token"),
    "two initial blocks, one local": SamKV(layers=LAYERS, extremes="dynamic", initial=2, local=1),
}


@dataclass(frozen=True)
class Expected:
    """What the naive reference computes."""

    chunks: list[NaiveChunk]
    q_que: list[Vector]
    plan: NaivePlan
    repaired: Cache
    logits: Vector


class Norm(torch.nn.Module):
    """RMSNorm in float64. That of transformers computes in float32, whatever the weights are."""

    def __init__(self, norm: torch.nn.Module):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rope(torch.nn.Module):
    """cos and sin in float64, likewise."""

    def __init__(self, theta: float, d: int):
        super().__init__()
        self.frequencies = theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)

    def forward(self, _: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


@cache
def real_model() -> DecoderModel:
    weights = tiny.weights()
    for layer in weights.model.layers:
        layer.input_layernorm = Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Norm(layer.post_attention_layernorm)
    weights.model.norm = Norm(weights.model.norm)
    weights.model.rotary_emb = Rope(weights.config.rope_parameters["rope_theta"], weights.config.head_dim)
    return DecoderModel(weights)


@cache
def naive_model() -> NaiveModel:
    return NaiveModel(tiny.weights())


@cache
def naive_chunks(local: int) -> list[NaiveChunk]:
    return [
        encode(naive_model(), PREFIX, tokens, start, local, BLOCK) for tokens, start in zip(CHUNKS, STARTS, strict=True)
    ]


@cache
def expected(name: str) -> Expected:
    """Run the naive reference from the composite pass to the logits."""
    method, model = METHODS[name], naive_model()
    chunks = naive_chunks(method.local)
    composite = [[naive_samkv.fixed(chunk, method) for chunk in chunks]] * model.layers
    cache = naive_samkv.context(model, PREFIX, chunks, composite)
    q_que = naive_samkv.generic_query(cache, model, QUESTION, END, method)
    plan = naive_samkv.plan(model, chunks, q_que, method)
    repaired = naive_samkv.repair(model, PREFIX, chunks, plan, method)
    answer = [dict(layer) for layer in repaired]
    hidden = model.append(answer, {END + i: token for i, token in enumerate(QUESTION)}).hidden
    return Expected(chunks, q_que, plan, repaired, model.logits(hidden[END + len(QUESTION) - 1]))


def prefiller(local: int) -> Prefiller:
    model = real_model()
    model.profile = Profile(block=BLOCK, initial=1, local=local, stable_layers=LAYERS)
    return Prefiller(model, PREFIX)


@cache
def actual(name: str) -> tuple[PrefilledContext, list[InMemoryChunk]]:
    method = METHODS[name]
    r = prefiller(method.local)
    sources = [InMemoryChunk(r.encode(c), BLOCK, exact=i == 0) for i, c in enumerate(CHUNKS)]
    return r.prefill_sparse(sources, QUESTION, method, StepTimer(), PrefillOptions(8)), sources


def as_lists(chosen):
    return [[list(part) for part in layer] for layer in chosen]


def assert_near(found: torch.Tensor, values: Sequence[Any], atol: float = 1e-10) -> None:
    torch.testing.assert_close(found.double(), torch.from_numpy(np.array(values)), rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["fusion", "two initial blocks, one local"])
def test_the_digest_of_every_chunk_is_that_of_the_reference(name):
    for chunk, source in zip(expected(name).chunks, actual(name)[1], strict=True):
        digest = source.piece.digest
        assert_near(digest.mean_keys, chunk.mean_keys)
        assert_near(digest.local_query, chunk.local_query)
        assert digest.representative.tolist() == chunk.representative
        assert_near(digest.unimportance, chunk.unimportance, 1e-6)
        assert_near(digest.alpha, chunk.alpha, 1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_is_that_of_the_reference(name):
    plan, wanted = actual(name)[0].plan, expected(name).plan
    assert as_lists(plan.kept) == wanted.kept
    assert as_lists(plan.recompute) == wanted.recompute
    assert as_lists(plan.padding) == wanted.padding


@pytest.mark.parametrize("name", METHODS)
def test_repaired_rows_are_those_of_the_reference(name):
    found, wanted = actual(name)[0].cache, expected(name).repaired
    for layer, rows in enumerate(wanted):
        slots = {at: slot for slot, at in enumerate(found.positions(layer).tolist()) if at < END}
        assert sorted(slots) == sorted(rows)
        for number, side in enumerate((found.k(layer), found.v(layer))):
            assert_near(side[[slots[at] for at in rows]], [row[number] for row in rows.values()])


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_reference(name):
    assert_near(actual(name)[0].logits, expected(name).logits, 1e-9)


def test_the_example_covers_what_it_is_for():
    """Layers keep different blocks, tokens pass through layers that do not keep them, and every parameter matters."""
    plan = expected("fusion").plan
    assert len({repr(layer) for layer in plan.kept}) == len(plan.kept)
    assert any(part for layer in plan.padding for part in layer)
    assert any(len(a[i]) > len(r[i]) for a, r in zip(plan.alive, plan.recompute, strict=True) for i in range(3))
    fusion = expected("fusion")
    for name in METHODS.keys() - {"fusion"}:
        other = expected(name)
        assert (other.plan.kept == fusion.plan.kept) == (name in ("overwrite", "theta by token"))
        assert np.abs(other.logits - fusion.logits).max() > 1e-3
