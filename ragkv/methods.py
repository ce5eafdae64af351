"""The methods a question can be answered with, by name, with a model's profile filled in."""

from __future__ import annotations

from collections.abc import Callable

from ragkv.errors import InputError, NotCalibrated
from ragkv.model import DecoderModel
from ragkv.recompute.base import Method
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.epic import Epic
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout

FULL = "full"
"""Prefill everything: reads no cache, so it is no `Method`; the engine answers it by `Reader.full`."""


def samkv_overwrite(model: DecoderModel) -> Method:
    """SamKV, new rows replace stored ones."""
    p = model.profile
    return SamKV(initial=p.initial, local=p.local, layers=p.stable_layers, update="overwrite")


def samkv_fusion(model: DecoderModel) -> Method:
    """SamKV, new rows are fused with stored ones (Eq. 4)."""
    p = model.profile
    return SamKV(initial=p.initial, local=p.local, layers=p.stable_layers, update="fusion")


def scout(model: DecoderModel) -> Method:
    """Our own selection. Raises NotCalibrated for a model without retrieval heads."""
    p, shape = model.profile, model.shape
    if not p.retrieval_heads:
        raise NotCalibrated(
            f"method scout needs the retrieval heads of {model.name}: run `ragkv calibrate`, or use samkv-fusion"
        )
    return Scout(
        layers=shape.layers,
        heads=p.retrieval_heads,
        group=shape.q_heads // shape.kv_heads,
        scale=model.scale,
        initial=p.initial,
        local=p.local,
    )


METHODS: dict[str, Callable[[DecoderModel], Method]] = {
    "reuse": lambda model: Reuse(model.shape.layers),
    "cacheblend": lambda model: CacheBlend(model.shape.layers),
    "epic": lambda model: Epic(model.shape.layers),
    "samkv-overwrite": samkv_overwrite,
    "samkv-fusion": samkv_fusion,
    "scout": scout,
}

NAMES = (FULL, *METHODS)


def default_method(model: DecoderModel) -> str:
    """scout where the model is calibrated, else the literal SamKV with fusion."""
    return "scout" if model.profile.retrieval_heads else "samkv-fusion"


def check_method(name: str) -> str:
    """The name itself. Raises InputError listing the methods when there is no such one."""
    if name not in NAMES:
        raise InputError(f"method {name!r} does not exist; choose one of {', '.join(NAMES)}")
    return name
