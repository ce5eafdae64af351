"""What ragkv knows about a model beyond its weights: block sizes, stable layers, retrieval heads, prompt pieces.

A profile is `profile.json` beside the weights, or one written by `ragkv calibrate` into the data folder; fields it does
not give take the defaults below.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

# SamKV appendix A.2, 0-based, by (layers, hidden size): Qwen2.5-3B, Mistral-7B, Llama-3.1-8B.
_PUBLISHED = {(36, 2048): range(31, 36), (32, 4096, "mistral"): range(27, 32), (32, 4096, "llama"): range(28, 32)}


@dataclass(frozen=True)
class Profile:
    """block: tokens of a block · initial, local: blocks always kept at a chunk's start and end · stable_layers: N* of
    SamKV, 0-based · retrieval_heads: (layer, query head) pairs scout scores with; empty until calibrated ·
    chunk_tokens: longest chunk, wrapper included · prefix, chunk, question: prompt pieces ("" takes the tokenizer's
    chat template) · stop: strings that end an answer · segment, prefill_block, budget: CritiPrefill's sizes ·
    threshold: shorter inputs are always read densely · decode_threshold: keys a layer may hold and be decoded over
    densely whatever the policy · decode_block: keys of a block that is ranked · decode_least, decode_part:
    blocks that PSA reads in any case, a number and a part of all · decode_count: blocks that `topk` reads.
    """

    block: int = 64
    initial: int = 1
    local: int = 2
    stable_layers: tuple[int, ...] = ()
    retrieval_heads: tuple[tuple[int, int], ...] = ()
    chunk_tokens: int = 1024
    prefix: str = ""
    chunk: str = ""
    question: str = ""
    stop: tuple[str, ...] = ()
    segment: int = 512
    prefill_block: int = 32
    budget: int = 1024
    threshold: int = 4096
    decode_threshold: int = 4096
    decode_block: int = 16
    decode_least: int = 32
    decode_part: float = 0.25
    decode_count: int = 128

    def save(self, path: Path) -> None:
        """Write as JSON, replacing the file whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def load_profile(path: Path, defaults: Profile) -> Profile:
    """Read a profile over `defaults`. Raises ConfigError for unknown fields or wrong types."""
    try:
        given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = {name: _tuples(value) for name, value in given.items()}
        return dataclasses.replace(defaults, **given)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a model profile ({error})") from None


CALIBRATED_BLOCK = 16
"""Tokens of a block of a model that is calibrated. SamKV's 64 leave little to choose from in a chunk of a thousand
tokens or less, three blocks of which are always kept: at 1,024 tokens 19%, and 5% with these."""


def default_profile(layers: int, hidden: int, kind: str) -> Profile:
    """Profile of an uncalibrated model: published stable layers, else the last max(1, round(L/8)) (paper silent)."""
    known = _PUBLISHED.get((layers, hidden)) or _PUBLISHED.get((layers, hidden, kind))
    return Profile(stable_layers=tuple(known or range(layers - max(1, round(layers / 8)), layers)))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
