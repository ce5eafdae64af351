"""What is found out of a model and a machine before anything is served: may it reuse stored KV, and is that quicker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ragkv.config import Settings
from ragkv.engine.chunk_encoder import ChunkEncoder
from ragkv.engine.cost_model import FREE, CostModel, measure_costs
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import full_prefill, make_method
from ragkv.engine.reuse_policy import MEASURED, ReusePolicy, measure_gate
from ragkv.engine.self_test import failed_self_test
from ragkv.store.base import KVStore


class UnmeasuredEngine(Protocol):
    """What the tests and measurements need of an engine (engine.py)."""

    settings: Settings
    store: KVStore
    prefiller: Prefiller
    chunks: ChunkEncoder
    fingerprint: str
    method: str


@dataclass(frozen=True)
class EngineMeasurements:
    """What is known of a model on a machine.

    Attributes:
        reuse_refused: Why the model must not reuse stored KV (self_test.py); "" when it may.
        costs: What loading and encoding cost here.
        reuse_policy: Decides whether stored KV is quicker than a full prefill, where neither the request nor the
            settings name a method; None where that was not measured.
    """

    reuse_refused: str = ""
    costs: CostModel = FREE
    reuse_policy: ReusePolicy | None = None


UNMEASURED = EngineMeasurements()


def measure_engine(engine: UnmeasuredEngine, asks: bool) -> EngineMeasurements:
    """Test and measure, or read what an earlier start found.

    Args:
        engine: The engine; nothing of it changes.
        asks: Questions will be asked. Otherwise what they need is not measured.
    """
    settings = engine.settings
    refused = failed_self_test(engine.prefiller, engine.fingerprint, settings.data / "qualified")
    if not asks:
        return EngineMeasurements(refused)
    model, folder, policy = engine.prefiller.model, settings.data / "costs", None
    machine = f"{engine.fingerprint} {model.device_names} {torch.get_num_threads()} {settings.store}"
    costs = measure_costs(engine.prefiller, engine.store, folder, machine)
    if settings.gate and not (settings.method or refused or full_prefill(engine.method)):
        method, chunks = make_method(engine.method, model), engine.chunks.store(MEASURED)
        policy = measure_gate(engine.prefiller, chunks, method, costs, folder, machine)
    return EngineMeasurements(refused, costs, policy)
