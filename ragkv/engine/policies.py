"""Prefill and decode policies by name, with a model's profile filled in.

Names carry fields as those of methods do (registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ragkv.engine.crossover import MEASURED, AutoDecode, AutoPrefill, KeyTier
from ragkv.engine.spec import fields_of, parse
from ragkv.errors import InputError
from ragkv.model.profile import Profile
from ragkv.sparse.base import DecodePolicy
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.lfps import Lfps
from ragkv.sparse.loopserve import LoopServe
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.sparse.psa import Psa
from ragkv.sparse.reselect import LoopServeDecode
from ragkv.sparse.topk import TopBlocks

DENSE = "dense"
"""Read every key: exact, and no policy."""
AUTO = "auto"
"""A decode policy where it was measured to be quicker, else dense; see `crossover.py`."""
Kind = TypeVar("Kind", PrefillPolicy, DecodePolicy)
SHORT_CONTEXT = 0.5
"""`most` of a policy whose number of keys is not asked for: the largest share of a short context that the number may
cover. A policy that is asked for by name then leaves something out of any context."""


@dataclass(frozen=True)
class PolicySpec(Generic[Kind]):
    """How a policy is made.

    Attributes:
        kind: The policy's dataclass.
        given: The fields that the model's profile decides.
        number: The field that says how much is read, whatever the size of the context; "" for none.
    """

    kind: Callable[..., Kind]
    given: Callable[[Profile], dict[str, Any]]
    number: str = ""


def _critiprefill(p: Profile) -> dict[str, Any]:
    return {"segment": p.segment, "block": p.prefill_block, "budget": p.budget}


def _nothing(p: Profile) -> dict[str, Any]:
    return {}


def _psa(p: Profile) -> dict[str, Any]:
    return {"block": p.decode_block, "least": p.decode_least, "part": p.decode_part}


def _topk(p: Profile) -> dict[str, Any]:
    return {"block": p.decode_block, "count": p.decode_count}


PREFILLS: dict[str, PolicySpec[PrefillPolicy]] = {
    "critiprefill": PolicySpec(CritiPrefill, _critiprefill),
    "loopserve": PolicySpec(LoopServe, _nothing),
}
DECODES: dict[str, PolicySpec[DecodePolicy]] = {
    "psa": PolicySpec(Psa, _psa, "least"),
    "lfps": PolicySpec(Lfps, _nothing),
    "loopserve": PolicySpec(LoopServeDecode, _nothing, "budget"),
    "topk": PolicySpec(TopBlocks, _topk, "count"),
}
PREFILL_NAMES = (DENSE, *PREFILLS)
DECODE_NAMES = (DENSE, *DECODES)


def make_prefill_policy(spec: str, profile: Profile) -> PrefillPolicy | None:
    """Make the prefill policy NAME[:FIELD=VALUE,…]; None for dense.

    Args:
        spec: Name and fields.
        profile: Decides the fields that the spec does not.

    Raises:
        InputError: There is no such policy or field, or a value is out of range.
    """
    if check_prefill_policy(spec) != AUTO:
        return _make(spec, profile, "prefill policy", PREFILLS)
    return AutoPrefill()


def check_prefill_policy(spec: str) -> str:
    """Return the specification; raise InputError, which lists what there is, where it is none."""
    parse(spec, "prefill policy", _known_policies(PREFILLS))
    return spec


def make_decode_policy(spec: str, profile: Profile, tier: KeyTier = "cpu") -> DecodePolicy | None:
    """Make the decode policy NAME[:FIELD=VALUE,…]; None for dense. See `make_prefill_policy`.

    tier: where keys lie, for `auto`.
    """
    if check_decode_policy(spec) != AUTO:
        return _make(spec, profile, "decode policy", DECODES)
    name, keys = ("lfps", MEASURED.cpu_keys) if tier == "cpu" else ("psa", MEASURED.host_keys)
    policy = _make(name, profile, "decode policy", DECODES)
    assert policy is not None
    return AutoDecode(policy, name, tier, max(keys, profile.decode_threshold))


def check_decode_policy(spec: str) -> str:
    """As `check_prefill_policy`, for a decode policy."""
    parse(spec, "decode policy", _known_policies(DECODES))
    return spec


def _make(spec: str, profile: Profile, what: str, specs: Mapping[str, PolicySpec[Kind]]) -> Kind | None:
    name, chosen = parse(spec, what, _known_policies(specs))
    if name == DENSE:
        return None
    policy = specs[name]
    short = {"most": SHORT_CONTEXT} if policy.number and policy.number not in chosen else {}
    try:
        return policy.kind(**{**policy.given(profile), **short, **chosen})
    except ValueError as error:
        raise InputError(f"{what} {name}: {error}") from None


def _known_policies(specs: Mapping[str, PolicySpec[Kind]]) -> dict[str, dict[str, Any]]:
    return {AUTO: {}, DENSE: {}, **{name: fields_of(policy.kind) for name, policy in specs.items()}}
