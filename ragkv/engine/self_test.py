"""Self-test: a model may reuse stored KV only after a test on a few dozen tokens has shown that reuse is sound.

    layer loop    our layer loop gives the same logits as the model's own forward
    stored rows   S and two chunks, encoded alone, rotated to their positions and not repaired, have the same K and V as
                  one dense prefill wherever no context is missing: in layer 0, and with a shared prefix in every layer
                  of S and of the first chunk
    recompute     the same context with every token recomputed in place gives the logits of the dense prefill. A model
                  with states cannot do that: the question behind the first chunk, from its stored rows and states,
                  gives the logits of the dense prefill of both

Each check computes the mean error of its rows, relative to their size. It passes if rounding explains the error. For a
model that does not pass, the method `full` answers every question, and nothing is stored.

A pass is recorded in the data folder, with the fingerprint and the versions of the libraries. A failure is never
recorded, so that a repaired library or a newer ragkv is tested at the next start.
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

from ragkv import __version__
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext
from ragkv.model.agreement import TOLERANCE, centred, relative_error
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.placement import SPREAD
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import SamKV
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class SelfTestResult:
    """Result of the three checks.

    Attributes:
        layer_loop: Relative error of the layer loop.
        stored_rows: Relative error of the stored rows.
        recompute: Relative error of the recomputed context.
        tolerance: Largest error that passes.
        fault: The exception that ended the test; "" if there was none.
    """

    layer_loop: float = math.nan
    stored_rows: float = math.nan
    recompute: float = math.nan
    tolerance: float = math.nan
    fault: str = ""

    @property
    def reason(self) -> str:
        """Why stored KV must not be reused; "" if it may be."""
        if self.fault:
            return f"model not qualified: its self-test ended with {self.fault}"
        # The comparison is written so that NaN fails.
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
    """Run the self-test, unless `folder` has a record of a pass.

    Args:
        prefiller: Prefills with the model.
        fingerprint: Fingerprint of the model and its settings; it names the record.
        folder: Folder of the records.

    Returns:
        Why this model must not reuse stored KV; "" if it may.
    """
    path = folder / f"{fingerprint}.json"
    environment = _environment(prefiller)
    if _has_passed(path, environment):
        return ""
    result = self_test(prefiller)
    if not result.reason:
        with suppress(OSError):  # without a record, the next start runs the test again
            _record_pass(path, result, environment)
    return result.reason


def self_test(prefiller: Prefiller) -> SelfTestResult:
    """Run the three checks."""
    try:
        return _run_checks(prefiller)
    except RuntimeError as error:  # raised by torch: a shape or dtype does not match, or memory ran out
        first = next(iter(str(error).splitlines()), "")
        return SelfTestResult(fault=f"{type(error).__name__}: {first}")


def _run_checks(prefiller: Prefiller) -> SelfTestResult:
    model, prefix = prefiller.model, prefiller.prefix_tokens
    block = model.profile.block
    first, second, question = _tokens(model.config.vocab_size, (block + 5, block // 2 + 3, 8))
    whole = [*prefix, *first, *second, *question]
    cache = ContextCache(model.shape, len(whole), model.dtype, model.devices)
    ours = model.forward([append(cache, whole, 0, outputs=len(whole))])[0]
    timer = StepTimer(model.device)
    shared = prefiller.mode == "shared"
    sources = [
        InMemoryChunk(prefiller.encode(first), block, exact=shared),
        InMemoryChunk(prefiller.encode(second), block),
    ]
    dense = prefiller.prefill_full([first, second], question, timer)
    stored = prefiller.prefill_sparse(sources, question, Reuse(model.shape.layers), timer)
    alone = len(prefix) + len(first) if shared else 0
    if model.states.bytes:  # rows of the first layer with attention depend on what stands before them, too
        rows = _stored_rows_error(stored, dense, alone, alone)
        again = _continued_error(prefiller, sources[0], question, timer) if shared else 0.0
    else:
        everything = SamKV(layers=model.profile.stable_layers, middle="all", repair="kept", update="overwrite")
        recomputed = prefiller.prefill_sparse(sources, question, everything, timer)
        rows = _stored_rows_error(stored, dense, len(whole) - len(question), alone)
        again = relative_error(centred(recomputed.logits[None]), centred(dense.logits[None]))
    return SelfTestResult(
        layer_loop=relative_error(centred(ours), centred(model.own_logits(whole))),
        stored_rows=rows,
        recompute=again,
        tolerance=TOLERANCE[model.dtype],
    )


def _continued_error(prefiller: Prefiller, source: InMemoryChunk, question: tuple[int, ...], timer: StepTimer) -> float:
    """Return the error of logits behind the stored rows and states of the first chunk, which are exact."""
    stored = prefiller.prefill_sparse([source], question, Reuse(prefiller.model.shape.layers), timer)
    dense = prefiller.prefill_full([source.tokens], question, timer)
    return relative_error(centred(stored.logits[None]), centred(dense.logits[None]))


def _tokens(vocabulary: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Draw token ids; they are always the same for one vocabulary size."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(vocabulary, (size,), generator=generator).tolist()) for size in sizes]


def _stored_rows_error(stored: PrefilledContext, dense: PrefilledContext, context: int, alone: int) -> float:
    """Return the largest error of stored K and V.

    Layer 0 compares all `context` positions; the layers above compare the first `alone` positions.
    """
    worst = 0.0
    for layer in range(stored.cache.shape.layers):
        count = alone if layer else context
        positions = stored.cache.positions(layer)
        here = (positions < count).nonzero()[:, 0]  # layers with a window hold the last ones alone
        if len(here):
            rows, at = (each.to(stored.cache.devices[layer]) for each in (here, positions[here]))
            for computed, expected in (
                (stored.cache.k(layer)[rows], dense.cache.k(layer)[at]),
                (stored.cache.v(layer)[rows], dense.cache.v(layer)[at]),
            ):
                error = relative_error(computed.flatten(1), expected.flatten(1))
                worst = error if not error <= worst else worst
    return worst


def _environment(prefiller: Prefiller) -> dict[str, str]:
    """Return the versions and the device, which the fingerprint does not contain."""
    return {
        "ragkv": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": SPREAD if prefiller.model.spread else prefiller.model.device.type,
    }


def _has_passed(path: Path, environment: dict[str, str]) -> bool:
    """Return whether the test has passed in this environment. Only passes are recorded; an unreadable file is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and environment.items() <= record.items()


def _record_pass(path: Path, result: SelfTestResult, environment: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({**environment, **asdict(result)}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
