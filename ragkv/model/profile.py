"""Model profiles: what ragkv knows about a model beyond its weights.

A profile is `profile.json` beside the weights, or a file that `ragkv calibrate` writes to the data folder. Fields that
it does not set have the defaults below.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ragkv.errors import ConfigError

# SamKV appendix A.2, 0-based, by (layers, hidden size): Qwen2.5-3B, Mistral-7B, Llama-3.1-8B.
_PUBLISHED = {(36, 2048): range(31, 36), (32, 4096, "mistral"): range(27, 32), (32, 4096, "llama"): range(28, 32)}

Repair = Literal["kept", "none"]
"""The values of scout's parameter `repair`."""

Axis = Literal["row", "distance"]
"""The values of `importance_axis`."""

Constant = Literal["free", "common", "origin"]
"""The values of `importance_constant`."""

KeyMeans = Literal["plain", "rotated"]
"""The values of `key_means`."""

RETIRED = frozenset({"scout_prior", "threshold"})
"""Fields of profiles that earlier releases saved, and that mean nothing any more."""

SCOUT_BLOCK = 16
"""Tokens of a block, where nothing is said. With SamKV's 64, the three blocks that it always keeps are 19% of a chunk
of 1,024 tokens, which leaves little to select. With 16 they are 5%."""
EARLIER_BLOCK = 64
"""What it was for models without calibration in earlier releases. Their KV is read with it (engine/fingerprint.py)."""

AGREEMENT = 4
"""Numbers of `agreement`."""
COEFFICIENTS = (4, 7)
"""Numbers of `confidence`: those of earlier releases, which lack the last features, and of this one."""


@dataclass(frozen=True)
class Profile:
    """Settings of one model.

    Attributes:
        block: tokens of a block.
        initial: blocks that are always kept at the start of a chunk.
        local: blocks that are always kept at the end of a chunk.
        stable_layers: N* of SamKV, 0-based.
        importance_axis: axis of the power law that says how important a block is to SamKV: the number of keys that a
            `row` sees, or its `distance` to the block's token (paper silent). It is fitted when a chunk is encoded.
        importance_constant: constant of that law: `free` for each block, `common` to all blocks of a layer, or none, so
            that the law goes through the `origin` (paper silent).
        key_means: what the mean keys are of that SamKV compares: keys as they are before RoPE (`plain`), or as a cache
            has them, `rotated` to their positions in the chunk (paper silent). They are made when a chunk is encoded.
        retrieval_heads: (layer, query head) pairs that scout scores with; empty until calibrated.
        scout_repair: which tokens scout recomputes where a request does not say it; `none` is for models that were
            trained to read chunks that were encoded alone.
        scout_reach: `reach` of scout where a request does not say it.
        scout_cap: `cap` of scout, likewise.
        scout_chunks: `chunks` of scout, likewise.
        chunk_tokens: tokens of the longest chunk, its prompt piece included.
        prefix: prompt piece before the chunks; "" takes the tokenizer's chat template.
        chunk: prompt piece around a chunk, likewise.
        question: prompt piece around the question, likewise.
        stop: strings that end an answer.
        segment: segment size of CritiPrefill.
        prefill_block: block size of CritiPrefill.
        budget: token budget of CritiPrefill.
        decode_threshold: a layer with at most this many keys is decoded densely under any policy.
        decode_block: keys of a ranked block.
        decode_least: number of blocks that PSA always reads.
        decode_part: share of all blocks that PSA always reads.
        decode_count: number of blocks that `topk` reads.
        extractive: the model was trained to quote spans, so it can neither summarise nor list: rules answer that
            (engine/service_rules.py).
        method: default method of the model where the settings name none; "" is scout.
        agreement: what `ragkv calibrate --documents` measured of that method: questions, its F1 minus that of `full` in
            points, and the ends of the 95% interval; empty until measured.
        confidence: coefficients of the confidence of an answer (engine/confidence.py): bias and one weight a feature;
            empty until measured.
    """

    block: int = SCOUT_BLOCK
    initial: int = 1
    local: int = 2
    stable_layers: tuple[int, ...] = ()
    importance_axis: Axis = "row"
    importance_constant: Constant = "free"
    key_means: KeyMeans = "plain"
    retrieval_heads: tuple[tuple[int, int], ...] = ()
    scout_repair: Repair = "kept"
    scout_reach: int = 8
    scout_cap: float = 0.17
    scout_chunks: int = 0
    chunk_tokens: int = 1024
    prefix: str = ""
    chunk: str = ""
    question: str = ""
    stop: tuple[str, ...] = ()
    segment: int = 512
    prefill_block: int = 32
    budget: int = 1024
    decode_threshold: int = 4096
    decode_block: int = 16
    decode_least: int = 32
    decode_part: float = 0.25
    decode_count: int = 128
    extractive: bool = False
    method: str = ""
    agreement: tuple[float, ...] = ()
    confidence: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scout_repair not in get_args(Repair):
            raise ValueError(f"scout_repair {self.scout_repair!r}: choose one of {', '.join(get_args(Repair))}")
        if self.scout_reach < 0:
            raise ValueError(f"scout_reach {self.scout_reach}: tokens, 0 or more")
        if not 0 < self.scout_cap <= 1:
            raise ValueError(f"scout_cap {self.scout_cap}: a share above 0, at most 1")
        if self.scout_chunks < 0:
            raise ValueError(f"scout_chunks {self.scout_chunks}: chunks, 0 or more")
        choices = {"importance_axis": Axis, "importance_constant": Constant, "key_means": KeyMeans}
        for name, kinds in choices.items():
            if (value := getattr(self, name)) not in get_args(kinds):
                raise ValueError(f"{name} {value!r}: choose one of {', '.join(get_args(kinds))}")
        if len(self.agreement) not in (0, AGREEMENT):
            raise ValueError(f"agreement: {AGREEMENT} numbers or none")
        numbers = [type(each) in (int, float) and math.isfinite(each) for each in self.confidence]
        if len(numbers) not in (0, *COEFFICIENTS) or not all(numbers):
            raise ValueError(f"confidence: {' or '.join(map(str, COEFFICIENTS))} numbers or none")

    @property
    def quality(self) -> str:
        """What was measured of the default method's answers, in words; "" where nothing was."""
        if not self.agreement:
            return ""
        questions, delta, low, high = self.agreement
        told = f"{delta:+.1f} points of F1 to full ({low:+.1f} … {high:+.1f}), {questions:.0f} questions"
        return f"{self.method or 'scout'}: {told} about your documents"

    def save(self, path: Path) -> None:
        """Write the profile as JSON, replacing the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def load_profile(path: Path, defaults: Profile) -> Profile:
    """Load a profile; fields that it does not set come from `defaults`.

    Raises:
        ConfigError: the file has unknown fields or wrong types.
    """
    try:
        given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = {name: _tuples(value) for name, value in given.items() if name not in RETIRED}
        return dataclasses.replace(defaults, **given)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a model profile ({error})") from None


def default_profile(layers: int, hidden: int, kind: str) -> Profile:
    """Return the profile of an uncalibrated model.

    Stable layers are the published ones, else the last max(1, round(L/8)) (paper silent).
    """
    known = _PUBLISHED.get((layers, hidden)) or _PUBLISHED.get((layers, hidden, kind))
    return Profile(stable_layers=tuple(known or range(layers - max(1, round(layers / 8)), layers)))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
