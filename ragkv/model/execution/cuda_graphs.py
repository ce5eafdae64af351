"""CUDA graphs of a model's work: recorded at their first use, then replayed with one call.

Starting hundreds of small kernels one by one from Python takes longer than a GPU needs for them. A recorded graph reads
its inputs from one place, so whatever differs between two replays has to be numbers in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

GRAPHS = 32
"""Graphs that are kept; the least recently used go."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class _Recording:
    """inputs: read by a replay · made: what it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    made: Any


class CUDAGraphPool:
    """Graphs of one model on one GPU, which share a pool of memory. Not thread-safe."""

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._pool: Any = torch.cuda.graph_pool_handle()
        # One stream for all recordings: libraries keep memory to work in for every stream that they see.
        self._aside = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, host: Tensor, work: Callable[[Tensor], Made]) -> Made:
        """What `work` makes of inputs on the GPU that are those of `host`; the next replay of any graph changes it.

        Recorded where the key is new: then the work is really done twice while warming up, and once more after it. It
        may depend on nothing that is not in its inputs or in the key.
        """
        with torch.cuda.device(self._device):
            if key not in self._graphs:
                self._graphs[key] = self._capture(host.to(self._device), work)
            self._graphs.move_to_end(key)
            recording = self._graphs[key]
            # Memory that is pinned is not used anew before the copy out of it is done.
            recording.inputs.copy_(host.pin_memory(), non_blocking=True)
            recording.graph.replay()
            made: Made = recording.made
            return made

    def _capture(self, inputs: Tensor, work: Callable[[Tensor], Made]) -> _Recording:
        while len(self._graphs) >= GRAPHS:
            self._graphs.popitem(last=False)
        graph, made = capture(lambda: work(inputs), self._aside, self._pool)
        return _Recording(graph, inputs, made)


def capture(work: Callable[[], Made], aside: Any, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Do `work` twice, then record it: (the graph, what a replay leaves its result in). aside: the stream of all
    recordings · pool: what graphs share memory by."""
    here = torch.cuda.current_stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(2):
            work()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads load KV to the GPU meanwhile; what they ask of it is none of the graph's business.
    with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
        result = work()
    return graph, result
