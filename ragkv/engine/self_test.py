"""Qualify: a model reuses stored KV only after it has shown, on a few dozen tokens, that reuse is sound for it.

    layer loop    our layer loop against the model's own forward: the same logits
    stored rows   S and two chunks read alone, turned to their places and left as they are, against one dense prefill:
                  the same K and V where no context is missing. That is layer 0; and with a shared prefix every layer of
                  S and of the first chunk
    recompute     the same context with every token recomputed in place: the dense prefill's logits

Each check gives the mean error of its rows, relative to their size, and passes below what rounding explains. A model
that does not pass is answered by `full`, and nothing of it is stored.

A pass is remembered in the data folder, for the fingerprint and for what computed it; a failure never is, so that a
repaired library or a newer ragkv is tried at its next start.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ragkv import __version__
from ragkv.engine.chunk_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.placement import SPREAD
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import SamKV
from ragkv.timing import StepTimer

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
"""Relative error by what the model computes in. Random models of 36 and 64 layers gave up to 2e-6, 0.003 and 0.03 in
the last three, chaotic ones (weights far too large) up to five times that; a wrong rotation gave 0.7."""


@dataclass(frozen=True)
class SelfTestResult:
    """Relative errors of the three checks (see above), and what they had to stay under. fault: what ended the test."""

    layer_loop: float = math.nan
    stored_rows: float = math.nan
    recompute: float = math.nan
    tolerance: float = math.nan
    fault: str = ""

    @property
    def reason(self) -> str:
        """Why stored KV must not be reused; "" when it may be."""
        if self.fault:
            return f"model not qualified: its self-test ended with {self.fault}"
        # Written so that NaN fails.
        failed = [
            f"{words} differs by {error:.2g}"
            for words, error in (
                ("the layer loop from the model's own forward", self.layer_loop),
                ("stored KV from a prefill", self.stored_rows),
                ("a recomputed context from a prefill", self.recompute),
            )
            if not error <= self.tolerance
        ]
        return f"model not qualified: {', '.join(failed)} (at most {self.tolerance:g})" if failed else ""


def failed_self_test(prefiller: Prefiller, fingerprint: str, folder: Path) -> str:
    """Why this model must not reuse stored KV, "" when it may. Runs the test unless `folder` remembers a pass."""
    path = folder / f"{fingerprint}.json"
    circumstances = _circumstances(prefiller)
    if _remembered(path, circumstances):
        return ""
    found = self_test(prefiller)
    if not found.reason:
        with suppress(OSError):  # a folder that cannot be written costs the next start the test
            _remember(path, found, circumstances)
    return found.reason


def self_test(prefiller: Prefiller) -> SelfTestResult:
    """Run the three checks."""
    try:
        return _measured(prefiller)
    except RuntimeError as error:  # torch's own: a shape, a dtype or memory that does not fit
        first = next(iter(str(error).splitlines()), "")
        return SelfTestResult(fault=f"{type(error).__name__}: {first}")


def _measured(reader: Prefiller) -> SelfTestResult:
    model, prefix = reader.model, reader.prefix_tokens
    block = model.profile.block
    first, second, question = _tokens(model.config.vocab_size, (block + 5, block // 2 + 3, 8))
    whole = [*prefix, *first, *second, *question]
    cache = ContextCache(model.shape, len(whole), model.dtype, model.devices)
    ours = model.forward([append(cache, whole, 0, outputs=len(whole))])[0]
    watch = StepTimer(model.device)
    shared = reader.mode == "shared"
    sources = [InMemoryChunk(reader.encode(first), block, exact=shared), InMemoryChunk(reader.encode(second), block)]
    dense = reader.prefill_full([first, second], question, watch)
    stored = reader.prefill_sparse(sources, question, Reuse(model.shape.layers), watch)
    everything = SamKV(layers=model.profile.stable_layers, middle="all", repair="kept", update="overwrite")
    recomputed = reader.prefill_sparse(sources, question, everything, watch)
    alone = len(prefix) + len(first) if shared else 0
    return SelfTestResult(
        layer_loop=_apart(_centred(ours), _centred(model.own_logits(whole))),
        stored_rows=_rows_apart(stored, dense, len(whole) - len(question), alone),
        recompute=_apart(_centred(recomputed.logits[None]), _centred(dense.logits[None])),
        tolerance=TOLERANCE[model.dtype],
    )


def _tokens(vocabulary: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Token ids, always the same for one vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(vocabulary, (size,), generator=generator).tolist()) for size in sizes]


def _rows_apart(stored: PrefilledContext, dense: PrefilledContext, context: int, alone: int) -> float:
    """Error of stored K and V: of all `context` positions in layer 0, of the first `alone` in the layers above."""
    worst = 0.0
    for layer in range(stored.cache.shape.layers):
        count = alone if layer else context
        if count:
            order = stored.cache.positions(layer).argsort()[:count].to(stored.cache.devices[layer])
            for found, expected in (
                (stored.cache.k(layer)[order], dense.cache.k(layer)[:count]),
                (stored.cache.v(layer)[order], dense.cache.v(layer)[:count]),
            ):
                error = _apart(found.flatten(1), expected.flatten(1))
                worst = error if not error <= worst else worst
    return worst


def _apart(found: Tensor, expected: Tensor) -> float:
    """Distance of two rows [n, m] relative to their size: the mean over n."""
    sizes = expected.double().norm(dim=-1)
    return float(((found.double() - expected.double()).norm(dim=-1) / sizes.clamp(min=float(sizes.mean()))).mean())


def _centred(logits: Tensor) -> Tensor:
    """Logits [n, vocabulary] without their mean, which no probability sees."""
    return logits.double() - logits.double().mean(dim=-1, keepdim=True)


def _circumstances(reader: Prefiller) -> dict[str, str]:
    """What computes, beside what the fingerprint names."""
    return {
        "ragkv": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": SPREAD if reader.model.spread else reader.model.device.type,
    }


def _remembered(path: Path, circumstances: dict[str, str]) -> bool:
    """Whether the test has passed here: only a pass is ever written. A file that cannot be read is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and circumstances.items() <= record.items()


def _remember(path: Path, found: SelfTestResult, circumstances: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({**circumstances, **asdict(found)}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
