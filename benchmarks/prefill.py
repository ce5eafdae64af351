"""`ragkv bench prefill`: whole prefills, dense against the sparse policies, at given lengths.

    end to end   `DecoderModel.forward` of one pass over all tokens, until the last row's logits are computed
    split        a separate pass that times choosing the keys and attending; its synchronisations take some time
    errors       of the split pass, relative to the dense pass

Times are cache-ready: the KV cache is allocated before timing starts, and no store is involved. Policies take turns, so
that a slow moment of the machine affects all of them. The dense run is the model's own layer loop over torch's fused
attention. `Backend` rows give the time of its attention with each FlashAttention-class kernel.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.backends import BACKENDS, Backend, backend_times, chosen_backend, preferring, unless_full
from benchmarks.roofline import device_name
from benchmarks.shapes import random_tokens
from ragkv.errors import InputError
from ragkv.kernels.attention import attend
from ragkv.kernels.block_index import BlockSparseIndex
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Capture, append
from ragkv.sparse.prefill import PrefillPolicy, PrefillState, SparsePrefill
from ragkv.timing import StepTimer

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""
Tokens = Callable[[DecoderModel, int], Sequence[int]]
"""Token ids of an input of the given length."""
Named = tuple[str, PrefillPolicy]
"""(name of a policy as given, policy)"""

DENSE = "dense"
OUT_OF_MEMORY = "out of memory"
NO_USE = "does not apply at this length"
_ROWS = 8192  # rows compared at a time


@dataclass(frozen=True)
class PrefillParams:
    """What is measured.

    Attributes:
        lengths: tokens of the inputs.
        policies: policies besides dense.
        repeat: timed runs of each, after `warmup` untimed ones.
        backend: which of BACKENDS computes dense attention; "": torch's choice.
    """

    lengths: tuple[int, ...]
    policies: tuple[Named, ...]
    repeat: int = 3
    warmup: int = 1
    backend: str = ""


@dataclass(frozen=True)
class PrefillRow:
    """One policy at one length. Times are in milliseconds. A figure is None if it could not be measured; see `note`.

    Attributes:
        ms: end to end, median.
        p90: end to end, 90th percentile.
        ratio: `ms` of dense / `ms`.
        scoring: time to choose keys, in the split pass.
        attention: time to attend, in the split pass.
        rest: everything else, in the split pass.
        read: query-key pairs computed / those of dense attention.
        logits_error: relative L2 error of the last row's logits.
        hidden_error: relative L2 error of the hidden states that enter the last layer, mean over rows.
        peak_bytes: peak device memory, weights and cache included; None on a CPU.
        note: why figures are missing.
    """

    length: int
    policy: str
    ms: float | None = None
    p90: float | None = None
    ratio: float | None = None
    scoring: float | None = None
    attention: float | None = None
    rest: float | None = None
    read: float | None = None
    logits_error: float | None = None
    hidden_error: float | None = None
    peak_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class PrefillResult:
    """All rows, and the machine that they were measured on. backend: torch's name of the kernel of dense attention."""

    model: str
    layers: int
    dtype: str
    device: str
    threads: int
    torch: str
    backend: str
    repeat: int
    warmup: int
    rows: tuple[PrefillRow, ...]
    backends: tuple[Backend, ...]


@dataclass(frozen=True)
class Split:
    """Times and results of a split pass: logits [vocabulary], hidden [n, hidden size]."""

    scoring: float
    attention: float
    rest: float
    read: float
    logits: Tensor
    hidden: Tensor


def measure(
    model: DecoderModel, params: PrefillParams, progress: Progress, tokens: Tokens = random_tokens
) -> PrefillResult:
    """Measure every policy at every length. A row notes if the policy does not apply or memory is too small.

    Raises:
        InputError: a length does not fit the model, or the backend is unknown.
    """
    for length in params.lengths:
        if not 1 < length <= model.max_positions:
            raise InputError(f"length {length}: {model.name} reads 2 to {model.max_positions} tokens")
    if params.backend and params.backend not in BACKENDS:
        raise InputError(f"backend {params.backend!r} does not exist; choose one of {', '.join(BACKENDS)}")
    rows: list[PrefillRow] = []
    backends: list[Backend] = []
    with preferring(params.backend):
        default = chosen_backend(model, min(params.lengths))
        for number, length in enumerate(params.lengths):
            progress(f"{length} tokens", number, len(params.lengths))
            rows += _at_length(model, params, tokens(model, length))
            backends += backend_times(model, length)
    progress("done", len(params.lengths), len(params.lengths))
    return PrefillResult(
        model=model.name,
        layers=model.shape.layers,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(model),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        backend=default,
        repeat=params.repeat,
        warmup=params.warmup,
        rows=tuple(rows),
        backends=tuple(backends),
    )


class Input:
    """One input and its KV cache, for any number of prefills."""

    def __init__(self, model: DecoderModel, tokens: Sequence[int]):
        """Allocate the cache. Raises torch.OutOfMemoryError."""
        self._model, self._tokens = model, tokens
        self._cache = ContextCache(model.shape, len(tokens), model.dtype, model.devices)
        self.peak = 0

    def run(self, policy: PrefillPolicy | None) -> float:
        """Prefill once and return the milliseconds. Raises torch.OutOfMemoryError."""
        self._cache.truncate([0] * self._model.shape.layers)
        cuda = self._model.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._model.device)
        timer = StepTimer(self._model.device)
        start = timer.total()
        sparse = None if policy is None else SparsePrefill(policy.start(), len(self._tokens))
        self._model.forward([append(self._cache, self._tokens, 0, attention=sparse)])
        elapsed = timer.total() - start
        self.peak = torch.cuda.max_memory_allocated(self._model.device) if cuda else 0
        return elapsed

    def split(self, policy: PrefillPolicy | None) -> Split:
        """Prefill once with its parts timed. Raises torch.OutOfMemoryError."""
        self._cache.truncate([0] * self._model.shape.layers)
        timer = StepTimer(self._model.device)
        sparse = None if policy is None else SparsePrefill(TimedChoice(policy.start(), timer), len(self._tokens))
        # Queries of all layers would be several times the cache: only the hidden states are kept.
        capture, start = Capture(q=_Nothing()), timer.total()
        timed = TimedAttention(sparse, timer)
        logits = self._model.forward([append(self._cache, self._tokens, 0, capture=capture, attention=timed)])[0][-1]
        whole, scoring = timer.total() - start, timer.elapsed("scoring")
        attention = timer.elapsed("attention") - scoring
        if capture.entered is None:
            raise ValueError("the pass ran no layer")
        read = 1.0 if sparse is None else sparse.computed_pairs / sparse.dense_pairs
        return Split(scoring, attention, whole - scoring - attention, read, logits, capture.entered)


class TimedChoice:
    """A choice of keys that is timed as `scoring`."""

    def __init__(self, choice: PrefillState, timer: StepTimer):
        self._choice, self._timer = choice, timer
        self.name, self.read_all = choice.name, choice.read_all

    @property
    def bytes(self) -> int:
        """See `PrefillState.bytes`."""
        return self._choice.bytes

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int | None, scale: float
    ) -> BlockSparseIndex | None:
        """See `Choice`."""
        with self._timer.step("scoring"):
            return self._choice.select(layer, q, k, q_pos, k_pos, end=end, scale=scale)


class TimedAttention:
    """An attention, dense for None, that is timed as `attention`, including the choice of keys inside it."""

    def __init__(self, attention: Attention | None, timer: StepTimer):
        self._attention, self._timer = attention, timer

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """See `Attention`."""
        with self._timer.step("attention"):
            if self._attention is None:
                return attend(q, k, v, q_pos, k_pos, scale=scale)
            return self._attention(layer, q, k, v, q_pos, k_pos, scale=scale)


class _Nothing(list[Tensor]):
    """Keeps nothing."""

    def append(self, item: Tensor) -> None:
        pass


def _at_length(model: DecoderModel, params: PrefillParams, tokens: Sequence[int]) -> list[PrefillRow]:
    length = len(tokens)
    notes = {name: NO_USE if policy.why_dense(length, length) else "" for name, policy in params.policies}
    entries: dict[str, PrefillPolicy | None] = {DENSE: None, **dict(params.policies)}
    given = unless_full(lambda: Input(model, tokens))
    if given is None:
        return [PrefillRow(length, name, note=notes.get(name) or OUT_OF_MEMORY) for name in entries]
    running = {name: policy for name, policy in entries.items() if not notes.get(name)}
    times: dict[str, list[float]] = {name: [] for name in running}
    peaks = dict.fromkeys(running, 0)
    for turn in range(params.warmup + params.repeat):
        for name, policy in list(running.items()):
            elapsed = unless_full(lambda policy=policy: given.run(policy))  # type: ignore[misc]
            if elapsed is None:
                notes[name] = OUT_OF_MEMORY
                del running[name]
            elif turn >= params.warmup:
                times[name].append(elapsed)
                peaks[name] = max(peaks[name], given.peak)
    rows, exact = [], None
    for name in entries:
        if name not in running:
            rows.append(PrefillRow(length, name, note=notes[name]))
            continue
        split = unless_full(lambda name=name: given.split(running[name]))  # type: ignore[misc]
        exact = split if name == DENSE else exact
        base = times[DENSE] if DENSE in running else []
        rows.append(_row(length, name, times[name], base, split, exact, peaks[name]))
    return rows


def _row(
    length: int,
    name: str,
    times: Sequence[float],
    base: Sequence[float],
    split: Split | None,
    exact: Split | None,
    peak: int,
) -> PrefillRow:
    middle = statistics.median(times)
    late = sorted(times)[math.ceil(0.9 * len(times)) - 1]
    ratio = statistics.median(base) / middle if base else None
    if split is None:
        note = f"{OUT_OF_MEMORY} in the split pass"
        return PrefillRow(length, name, middle, late, ratio, peak_bytes=peak or None, note=note)
    return PrefillRow(
        length=length,
        policy=name,
        ms=middle,
        p90=late,
        ratio=ratio,
        scoring=split.scoring,
        attention=split.attention,
        rest=split.rest,
        read=split.read,
        logits_error=None if exact is None else apart(split.logits[None], exact.logits[None]),
        hidden_error=None if exact is None else apart(split.hidden, exact.hidden),
        peak_bytes=peak or None,
    )


def apart(found: Tensor, exact: Tensor) -> float:
    """Mean over rows [n, m] of the relative L2 error."""
    total = 0.0
    for one, other in zip(found.split(_ROWS), exact.split(_ROWS), strict=True):
        difference = (one.double() if one.dtype == torch.float64 else one.float()) - other
        total += float((difference.norm(dim=-1) / other.to(difference.dtype).norm(dim=-1)).sum())
    return total / found.shape[0]
