"""Methods by name, with a model's profile filled in; policies.py has the policies of prefill and decoding.

A name may carry fields: NAME or NAME:FIELD=VALUE,… Examples are `epic:link=64`, `scout:repair=none,cap=0.2`,
`cacheblend:gradual=0.3/0.2`, `critiprefill:budget=512`, `psa:threshold=0.98`, `lfps:share=0.05,reach=-1/1`. The fields
are those of the method's or policy's dataclass, without those that the model decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ragkv.engine.spec import fields_of, parse
from ragkv.errors import InputError, NotCalibrated
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Method
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.chance import Chance
from ragkv.recompute.epic import Epic
from ragkv.recompute.evidence import WITHOUT_PASS
from ragkv.recompute.multi_infllm import MultiInfLLM
from ragkv.recompute.reuse import Reuse, ReuseEncoded
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout

FULL = "full"
"""Prefill everything. It reads no stored KV, so it is no `Method`: the engine calls `Prefiller.full_passes`."""


@dataclass(frozen=True)
class FullPrefill:
    """Fields of `full`.

    Attributes:
        prefix: Start behind the longest beginning that an earlier question prefilled; see `prefix_cache.py`.
    """

    prefix: bool = False


ALONE = ("multi-infllm",)
"""Methods that answer single questions only: they rotate keys to positions that depend on the question."""

COMPARING = ("multi-infllm", "samkv-overwrite", "samkv-fusion")
"""Methods that compare the queries of every layer with its stored keys."""

DEFAULT = "scout"
"""The method where neither a request nor the settings name one. It needs no calibration (docs/results/quality.md)."""

REPAIRING = ("multi-infllm", "cacheblend", "epic")
"""Methods that always recompute tokens in the middle of the context, or go through the layers one by one."""

MODEL_DECIDES = ("layers", "heads", "group", "scale", "rotate", "means")


@dataclass(frozen=True)
class MethodSpec:
    """How a method is made.

    Attributes:
        kind: The method's dataclass.
        given: The fields that the model and the name decide.
    """

    kind: Callable[..., Method]
    given: Callable[[DecoderModel], dict[str, Any]]

    def fields(self) -> dict[str, Any]:
        """Return the fields that a request may set, with their types."""
        return fields_of(self.kind, MODEL_DECIDES)


def _layers(model: DecoderModel) -> dict[str, Any]:
    return {"layers": model.shape.layers}


READING: dict[str, Any] = {"compare": "after", "extremes": "dynamic", "total": "all", "shared": True}
"""Fields of `samkv-*` where the paper is silent: the best reading on development sets (docs/results/quality.md).

The literal reading, the defaults of `SamKV`, selects next to nothing and scores 3 of 100.
"""


def _samkv(update: str) -> Callable[[DecoderModel], dict[str, Any]]:
    def given(model: DecoderModel) -> dict[str, Any]:
        p = model.profile
        ends = {"initial": p.initial, "local": p.local, "means": p.key_means}
        return {**READING, **ends, "layers": p.stable_layers, "update": update, "rotate": model.turned}

    return given


def _scout(model: DecoderModel) -> dict[str, Any]:
    p, shape = model.profile, model.shape
    evidence = (*WITHOUT_PASS, "attention") if p.retrieval_heads else WITHOUT_PASS
    selection = {"evidence": evidence, "reach": p.scout_reach, "cap": p.scout_cap, "chunks": p.scout_chunks}
    given = {"layers": shape.layers, "heads": p.retrieval_heads, "group": shape.q_heads // shape.kv_heads}
    return {**given, "scale": model.scale, "repair": p.scout_repair, **selection}


METHODS: dict[str, MethodSpec] = {
    "reuse": MethodSpec(Reuse, _layers),
    "reuse-encoded": MethodSpec(ReuseEncoded, _layers),
    "multi-infllm": MethodSpec(MultiInfLLM, _layers),
    "cacheblend": MethodSpec(CacheBlend, _layers),
    "epic": MethodSpec(Epic, _layers),
    "samkv-overwrite": MethodSpec(SamKV, _samkv("overwrite")),
    "samkv-fusion": MethodSpec(SamKV, _samkv("fusion")),
    "random": MethodSpec(Chance, _scout),
    "scout": MethodSpec(Scout, _scout),
}

METHOD_NAMES = (FULL, *METHODS)
BASELINES = ("reuse", "reuse-encoded", "random")
"""Methods to compare others with, and not to work with."""


def make_method(spec: str, model: DecoderModel, collection: str = "") -> Method:
    """Make the method NAME[:FIELD=VALUE,…] for a model, and for the wrapper tokens of a collection.

    Raises:
        InputError: There is no such method or field, or a value is out of range.
        NotCalibrated: `attention` is asked for as evidence, and the model's profile has no retrieval heads.
    """
    name, chosen = parse(spec, "method", _known_methods())
    method = METHODS[name]
    if name in COMPARING and not model.compares_heads:
        raise InputError(f"method {name} compares queries with stored keys, and layers of {model.name} differ in heads")
    if "attention" in chosen.get("evidence", ()) and not model.profile.retrieval_heads:
        raise NotCalibrated(
            f"attention as evidence needs the retrieval heads of {model.name}, which are not calibrated",
            "run `ragkv calibrate`, or leave it out of `evidence`",
        )
    if model.states.bytes:
        chosen = _without_repair(name, method, chosen)
    elif chosen.get("states") == "composed":
        raise InputError(f"states are composed where layers have one, and {model.name} has none: leave `states` out")
    try:
        return method.kind(**{**method.given(model), **_taught(method, model, collection), **chosen})
    except ValueError as error:
        raise InputError(f"method {name}: {error}") from None


def _taught(method: MethodSpec, model: DecoderModel, collection: str) -> dict[str, Any]:
    """Return what the collection's wrapper tokens change: scout may leave out repair for them."""
    wrapper = model.wrappers.find(collection)
    return {"repair": wrapper.scout_repair} if wrapper and method.kind is Scout else {}


def _without_repair(name: str, method: MethodSpec, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a method for a model with states, which cannot recompute tokens inside of a context.

    A state behind a token depends on all tokens before it. Raises InputError.
    """
    repairs = "repair" in method.fields()
    if name in REPAIRING or (repairs and chosen.get("repair", "none") != "none"):
        others = ", ".join(other for other in METHOD_NAMES if other not in REPAIRING)
        raise InputError(
            f"method {name} recomputes tokens inside of the context, which layers with a state cannot do; "
            f"ask with one of {others}, and without `repair`"
        )
    return {**chosen, "repair": "none"} if repairs else chosen


def full_prefill(spec: str) -> FullPrefill | None:
    """Return the fields of `full[:FIELD=VALUE]`; None for another method. Raises InputError."""
    name, chosen = parse(spec, "method", _known_methods())
    return FullPrefill(**chosen) if name == FULL else None


def check_method(spec: str) -> str:
    """Return the specification; raise InputError, which lists what there is, where it is none."""
    parse(spec, "method", _known_methods())
    return spec


def check_sessions(spec: str) -> None:
    """Raise InputError for a method that cannot continue a conversation."""
    name = spec.partition(":")[0]
    if name in ALONE:
        others = ", ".join(other for other in METHOD_NAMES if other not in ALONE)
        raise InputError(
            f"method {name} answers single questions only, because it rotates keys to positions that depend on the "
            f"question; hold conversations with one of {others}"
        )


def _known_methods() -> dict[str, dict[str, Any]]:
    return {FULL: fields_of(FullPrefill), **{name: method.fields() for name, method in METHODS.items()}}
