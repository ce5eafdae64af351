"""The methods a question can be answered with, by name, with a model's profile filled in.

A method is asked for as NAME or NAME:FIELD=VALUE,… — `epic:link=64`, `scout:repair=none,cap=0.2`,
`cacheblend:gradual=0.3/0.2`. The fields are those of the method's dataclass, but for what the model decides.
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
from ragkv.recompute.multi_infllm import MultiInfLLM
from ragkv.recompute.reuse import Reuse, ReuseEncoded
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout

FULL = "full"
"""Prefill everything: reads no cache, so it is no `Method`; the engine answers it by `Reader.full`."""

ALONE = ("multi-infllm",)
"""Methods that answer single questions only: where they turn a key to, the next question would want it elsewhere."""

MODEL_DECIDES = ("layers", "heads", "group", "scale")


@dataclass(frozen=True)
class MethodSpec:
    """kind: the method's dataclass · given: what model and name decide of its fields."""

    kind: Callable[..., Method]
    given: Callable[[DecoderModel], dict[str, Any]]

    def fields(self) -> dict[str, Any]:
        """What a request may set: name -> type."""
        return fields_of(self.kind, MODEL_DECIDES)


def _layers(model: DecoderModel) -> dict[str, Any]:
    return {"layers": model.shape.layers}


def _samkv(update: str) -> Callable[[DecoderModel], dict[str, Any]]:
    def given(model: DecoderModel) -> dict[str, Any]:
        p = model.profile
        return {"initial": p.initial, "local": p.local, "layers": p.stable_layers, "update": update}

    return given


def _scout(model: DecoderModel) -> dict[str, Any]:
    p, shape = model.profile, model.shape
    if not p.retrieval_heads:
        raise NotCalibrated(
            f"scout needs the retrieval heads of {model.name}: run `ragkv calibrate`, or use samkv-fusion"
        )
    group = shape.q_heads // shape.kv_heads
    ends = {"initial": p.initial, "local": p.local}
    return {"layers": shape.layers, "heads": p.retrieval_heads, "group": group, "scale": model.scale, **ends}


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


def make_method(spec: str, model: DecoderModel) -> Method:
    """The method NAME[:FIELD=VALUE,…] for a model. Raises InputError, and NotCalibrated where it needs retrieval heads
    that the model has not."""
    name, chosen = parse(spec, "method", _known())
    way = METHODS[name]
    try:
        return way.kind(**{**way.given(model), **chosen})
    except ValueError as error:
        raise InputError(f"method {name}: {error}") from None


def default_method(model: DecoderModel) -> str:
    """scout where the model is calibrated, else the literal SamKV with fusion."""
    return "scout" if model.profile.retrieval_heads else "samkv-fusion"


def usable(model: DecoderModel) -> tuple[str, ...]:
    """The methods that a model can be asked with: those that need retrieval heads only where they are known."""
    return tuple(name for name in METHOD_NAMES if name not in ("random", "scout") or model.profile.retrieval_heads)


def check_method(spec: str) -> str:
    """The specification itself. Raises InputError telling what there is, when it is none."""
    parse(spec, "method", _known())
    return spec


def check_sessions(spec: str) -> None:
    """Raises InputError for a method that cannot go on with a conversation."""
    name = spec.partition(":")[0]
    if name in ALONE:
        others = ", ".join(other for other in METHOD_NAMES if other not in ALONE)
        raise InputError(f"method {name} answers single questions only; hold conversations with one of {others}")


def _known() -> dict[str, dict[str, Any]]:
    return {FULL: {}, **{name: way.fields() for name, way in METHODS.items()}}
