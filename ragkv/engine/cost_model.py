"""What encoding and loading cost on this machine, measured once: KV is loaded only where that is quicker.

Prefilling a chunk again is the rival of every cache. On a slow link, or with a small model, it wins; then what the
store holds is left where it is. Repair and question cost the same either way, so two straight lines decide:

    encode(tokens) = a + b tokens        load(bytes) = c + d bytes        milliseconds

What a full prefill of a question's context would take is said beside what its answer took, and nothing is decided by
it. Contexts are longer than what can be measured at a start, and attention grows with their square, which short ones do
not show: so the weight w of n² against n is the model's own arithmetic (`DecoderModel.pair_weight`).

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

from ragkv.engine.prefill import Prefiller
from ragkv.errors import StoreError
from ragkv.store.base import KVStore, Range
from ragkv.timing import StepTimer
from ragkv.types import Key

SHORT, LONG = 32, 128
"""Tokens of the chunks that are encoded to measure."""
LONGEST = 384
"""Tokens that are prefilled to measure what a long context takes, beside LONG."""
SMALL, LARGE = 2**14, 2**21
"""Bytes that are read to measure."""
TURNS = 3


@dataclass(frozen=True)
class LinearCost:
    """fixed + each · n, in milliseconds."""

    fixed: float
    each: float

    def at(self, n: float) -> float:
        """The cost of n."""
        return self.fixed + self.each * n


@dataclass(frozen=True)
class QuadraticCost:
    """fixed + each · n + square · n², in milliseconds."""

    fixed: float
    each: float
    square: float

    def at(self, n: float) -> float:
        """The cost of n."""
        return self.fixed + self.each * n + self.square * n * n


ZERO_COST = QuadraticCost(0, 0, 0)


@dataclass(frozen=True)
class CostModel:
    """encode: by tokens of a chunk · load: by bytes read from the store · prefill: by tokens of chunks and question."""

    encode: LinearCost
    load: LinearCost
    prefill: QuadraticCost = ZERO_COST

    def full(self, tokens: float) -> float:
        """Milliseconds of a full prefill of so many tokens, chunks and question: the time to the first token of `full`
        but for the retrieval. 0 before anything was measured."""
        return self.prefill.at(tokens)

    def why_not_load(self, size: int, tokens: int) -> str:
        """Why `size` bytes of a chunk of so many tokens are not worth loading; "" when they are."""
        loading, encoding = self.load.at(size), self.encode.at(tokens)
        if loading <= encoding:
            return ""
        return f"encoding is quicker: {encoding:.0f} ms predicted, {loading:.0f} ms to load {size} bytes"


FREE = CostModel(LinearCost(0, 1), LinearCost(0, 0))
"""Always load: before anything was measured."""


def measure_costs(prefiller: Prefiller, store: KVStore, folder: Path, machine: str) -> CostModel:
    """Measured in an earlier run, or now. machine: tells model, device and store, since each has its own costs; only
    its hash is written, because a store's URL may hold a password.

    A store that does not answer leaves everything to be loaded, and to be measured another time.
    """
    path = folder / f"{hashlib.sha256(machine.encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return CostModel(LinearCost(**known["encode"]), LinearCost(**known["load"]), QuadraticCost(**known["prefill"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        found = CostModel(_encoding(prefiller), _loading(store), _prefilling(prefiller))
    except StoreError:
        return FREE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # A folder that cannot be written costs the next start a measurement.
    return found


def fit_quadratic(short: tuple[int, float], long: tuple[int, float], weight: float) -> QuadraticCost:
    """Through (tokens, milliseconds) of two prefills. weight: of n² against n."""
    (few, low), (many, high) = ((tokens + weight * tokens**2, spent) for tokens, spent in (short, long))
    each = max(0.0, high - low) / (many - few)
    return QuadraticCost(max(0.0, low - each * few), each, each * weight)


def _encoding(reader: Prefiller) -> LinearCost:
    def encode(tokens: int) -> float:
        watch = StepTimer(reader.model.device)
        reader.encode([0] * tokens)
        return watch.total()

    return _line(encode, SHORT, LONG)


def _prefilling(reader: Prefiller) -> QuadraticCost:
    """Through the best of two times each of two lengths, long enough that the weights are read once for many tokens."""

    def prefill(tokens: int) -> float:
        watch = StepTimer(reader.model.device)
        reader.prefill_full([[0] * tokens], (), watch)
        return watch.total()

    low, high = (min(prefill(tokens) for _ in range(2)) for tokens in (LONG, LONGEST))
    return fit_quadratic((LONG, low), (LONGEST, high), reader.model.pair_weight)


def _loading(store: KVStore) -> LinearCost:
    """With an entry of its own, removed afterwards."""
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
    """Through the best times of two sizes: what else the machine does meanwhile only ever adds."""
    cost(few)
    low, high = (min(cost(n) for _ in range(TURNS)) for n in (few, many))
    each = max(0.0, high - low) / (many - few)
    return LinearCost(max(0.0, low - each * few), each)
