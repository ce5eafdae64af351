"""What encoding and loading cost on this machine, measured once. KV is loaded only where that is quicker than encoding.

On a slow link, or with a small model, encoding a chunk again is quicker than loading its KV. Repair and question cost
the same either way, so two straight lines decide:

    encode(tokens) = a + b tokens        load(bytes) = c + d bytes        milliseconds

The report also estimates what a full prefill of the context would take; this decides nothing. Contexts are longer than
what can be measured at start, and attention grows with the square of their length, which short prefills do not show. So
the weight w of n² against n comes from the model's arithmetic (`DecoderModel.pair_weight`):

    full(n) = a + b (n + w n²)
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ragkv.engine.prefill import Prefiller
from ragkv.errors import StoreError
from ragkv.store.base import KVStore, Range
from ragkv.timing import StepTimer
from ragkv.types import Key

Known = TypeVar("Known")

SHORT, LONG = 32, 128
"""Tokens of the chunks that are encoded for the measurement."""
LONGEST = 384
"""Tokens that are prefilled, beside LONG, to measure a long context."""
SMALL, LARGE = 2**14, 2**21
"""Bytes that are read for the measurement."""
TURNS = 3


@dataclass(frozen=True)
class LinearCost:
    """fixed + each · n, in milliseconds."""

    fixed: float
    each: float

    def at(self, n: float) -> float:
        """Return the cost of n."""
        return self.fixed + self.each * n


@dataclass(frozen=True)
class QuadraticCost:
    """fixed + each · n + square · n², in milliseconds."""

    fixed: float
    each: float
    square: float

    def at(self, n: float) -> float:
        """Return the cost of n."""
        return self.fixed + self.each * n + self.square * n * n


ZERO_COST = QuadraticCost(0, 0, 0)


@dataclass(frozen=True)
class CostModel:
    """Predicted costs in milliseconds.

    Attributes:
        encode: By tokens of a chunk.
        load: By bytes read from the store.
        prefill: By tokens of chunks and question.
    """

    encode: LinearCost
    load: LinearCost
    prefill: QuadraticCost = ZERO_COST

    def full(self, tokens: float) -> float:
        """Return the milliseconds of a full prefill of chunks and question: the TTFT of `full` without retrieval.

        0 before anything was measured.
        """
        return self.prefill.at(tokens)

    def why_not_load(self, size: int, tokens: int) -> str:
        """Return why `size` bytes of a chunk of `tokens` tokens are not worth loading; "" when they are."""
        loading, encoding = self.load.at(size), self.encode.at(tokens)
        if loading <= encoding:
            return ""
        return f"encoding is quicker: {encoding:.0f} ms predicted, {loading:.0f} ms to load {size} bytes"


FREE = CostModel(LinearCost(0, 1), LinearCost(0, 0))
"""Always load; used before anything was measured."""


def measure_costs(prefiller: Prefiller, store: KVStore, folder: Path, machine: str) -> CostModel:
    """Return the costs of this machine: those of an earlier run, or measured now.

    If the store does not answer, everything is loaded, and a later start measures.

    Args:
        prefiller: Encodes and prefills.
        store: Is written to and read from.
        folder: Keeps the measurement.
        machine: Names model, device and store, because each has its own costs; see `remembered`.
    """

    def measure() -> dict[str, Any] | None:
        try:
            return asdict(CostModel(_encoding(prefiller), _loading(store), _prefilling(prefiller)))
        except StoreError:
            return None

    def read(known: Any) -> CostModel:
        return CostModel(LinearCost(**known["encode"]), LinearCost(**known["load"]), QuadraticCost(**known["prefill"]))

    return remembered(folder, machine, measure, read) or FREE


def remembered(
    folder: Path, machine: str, measure: Callable[[], dict[str, Any] | None], read: Callable[[Any], Known]
) -> Known | None:
    """Return a measurement of an earlier run, or measure now and keep it.

    Args:
        folder: Keeps the measurement.
        machine: Names what was measured. Only its hash is written: the URL of a store may hold a password.
        measure: Returns what is written, as JSON; None where nothing can be measured now, and nothing is kept.
        read: Makes the result of it. It may raise ValueError, KeyError or TypeError for a damaged record.
    """
    path = folder / f"{hashlib.sha256(machine.encode()).hexdigest()[:32]}.json"
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = measure()
    if found is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.write_text(json.dumps(found) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # A folder that cannot be written costs the next start a measurement.
    return read(found)


def fit_quadratic(short: tuple[int, float], long: tuple[int, float], weight: float) -> QuadraticCost:
    """Fit a curve through (tokens, milliseconds) of two prefills; weight: of n² against n."""
    (few, low), (many, high) = ((tokens + weight * tokens**2, spent) for tokens, spent in (short, long))
    each = max(0.0, high - low) / (many - few)
    return QuadraticCost(max(0.0, low - each * few), each, each * weight)


def _encoding(prefiller: Prefiller) -> LinearCost:
    def encode(tokens: int) -> float:
        timer = StepTimer(prefiller.model.device)
        prefiller.encode([0] * tokens)
        return timer.total()

    return _line(encode, SHORT, LONG)


def _prefilling(prefiller: Prefiller) -> QuadraticCost:
    """Fit through the best of two runs at two lengths, both long enough to amortise reading the weights."""

    def prefill(tokens: int) -> float:
        timer = StepTimer(prefiller.model.device)
        prefiller.prefill_full([[0] * tokens], (), timer)
        return timer.total()

    low, high = (min(prefill(tokens) for _ in range(2)) for tokens in (LONG, LONGEST))
    return fit_quadratic((LONG, low), (LONGEST, high), prefiller.model.pair_weight)


def _loading(store: KVStore) -> LinearCost:
    """Measure with an entry of its own, which is removed afterwards."""
    key = Key(secrets.token_hex(32))
    out = memoryview(bytearray(LARGE))

    def load(size: int) -> float:
        start = time.perf_counter()
        store.read(key, [Range(0, 0, size)], out[:size])
        return 1000 * (time.perf_counter() - start)

    store.put(key, b"a measurement", [secrets.token_bytes(LARGE)])
    try:
        return _line(load, SMALL, LARGE)
    finally:
        store.delete(key)


def _line(cost: Callable[[int], float], few: int, many: int) -> LinearCost:
    """Fit a line through the best times of two sizes. Other load on the machine only adds time, so the best counts."""
    cost(few)
    low, high = (min(cost(n) for _ in range(TURNS)) for n in (few, many))
    each = max(0.0, high - low) / (many - few)
    return LinearCost(max(0.0, low - each * few), each)
