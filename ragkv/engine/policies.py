"""The policies a long input can be read with, and those an answer can be decoded with, by name, with a model's profile
filled in.

A policy is asked for as NAME or NAME:FIELD=VALUE,… — `critiprefill:budget=512`, `loopserve:alpha=0.995` to prefill,
`psa:threshold=0.98`, `lfps:share=0.05,reach=-1/1` to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ragkv.engine.spec import fields_of, parse
from ragkv.errors import InputError
from ragkv.model.profile import Profile
from ragkv.sparse.base import DecodePolicy, PrefillPolicy
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.lfps import Lfps
from ragkv.sparse.loopserve import LoopServe
from ragkv.sparse.psa import Psa
from ragkv.sparse.reselect import LoopServeDecode
from ragkv.sparse.topk import TopBlocks

DENSE = "dense"
"""Every key is read: exact, and no policy."""

Kind = TypeVar("Kind", PrefillPolicy, DecodePolicy)


@dataclass(frozen=True)
class PolicySpec(Generic[Kind]):
    """kind: the policy's dataclass · given: what the model's profile says of its fields."""

    kind: Callable[..., Kind]
    given: Callable[[Profile], dict[str, Any]]


def _critiprefill(p: Profile) -> dict[str, Any]:
    return {"segment": p.segment, "block": p.prefill_block, "budget": p.budget, "threshold": p.threshold}


def _loopserve(p: Profile) -> dict[str, Any]:
    return {"threshold": p.threshold}


def _decode(p: Profile) -> dict[str, Any]:
    return {"above": p.decode_threshold}


def _psa(p: Profile) -> dict[str, Any]:
    return {"above": p.decode_threshold, "block": p.decode_block, "least": p.decode_least, "part": p.decode_part}


def _topk(p: Profile) -> dict[str, Any]:
    return {"above": p.decode_threshold, "block": p.decode_block, "count": p.decode_count}


PREFILLS: dict[str, PolicySpec[PrefillPolicy]] = {
    "critiprefill": PolicySpec(CritiPrefill, _critiprefill),
    "loopserve": PolicySpec(LoopServe, _loopserve),
}

DECODES: dict[str, PolicySpec[DecodePolicy]] = {
    "psa": PolicySpec(Psa, _psa),
    "lfps": PolicySpec(Lfps, _decode),
    "loopserve": PolicySpec(LoopServeDecode, _decode),
    "topk": PolicySpec(TopBlocks, _topk),
}

PREFILL_NAMES = (DENSE, *PREFILLS)
DECODE_NAMES = (DENSE, *DECODES)


def make_prefill_policy(spec: str, profile: Profile) -> PrefillPolicy | None:
    """The prefill policy NAME[:FIELD=VALUE,…] with a model's profile; None: dense. Raises InputError."""
    return _make(spec, profile, "prefill policy", PREFILLS)


def check_prefill_policy(spec: str) -> str:
    """The specification itself. Raises InputError telling what there is, when it is none."""
    parse(spec, "prefill policy", _known(PREFILLS))
    return spec


def make_decode_policy(spec: str, profile: Profile) -> DecodePolicy | None:
    """The decode policy NAME[:FIELD=VALUE,…] with a model's profile; None: dense. Raises InputError."""
    return _make(spec, profile, "decode policy", DECODES)


def check_decode_policy(spec: str) -> str:
    """As `check_policy`, of a decode policy."""
    parse(spec, "decode policy", _known(DECODES))
    return spec


def _make(spec: str, profile: Profile, what: str, ways: Mapping[str, PolicySpec[Kind]]) -> Kind | None:
    name, chosen = parse(spec, what, _known(ways))
    if name == DENSE:
        return None
    way = ways[name]
    try:
        return way.kind(**{**way.given(profile), **chosen})
    except ValueError as error:
        raise InputError(f"{what} {name}: {error}") from None


def _known(ways: Mapping[str, PolicySpec[Kind]]) -> dict[str, dict[str, Any]]:
    return {DENSE: {}, **{name: fields_of(way.kind) for name, way in ways.items()}}
