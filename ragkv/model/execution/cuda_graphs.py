"""CUDA graphs of a model's work: recorded at their first use, then replayed with one call.

Launching hundreds of small kernels one by one from Python takes longer than the GPU needs to run them. A recorded graph
reads its inputs from one tensor, so everything that differs between two replays must be a number in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

GRAPHS = 32
"""Largest number of graphs in a pool. The least recently used graph is dropped."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Recording:
    """A graph, the inputs that a replay reads and the result that it overwrites."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    result: Any


class CUDAGraphPool:
    """Graphs of one model on one GPU that share a memory pool. Not thread-safe."""

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._pool: Any = torch.cuda.graph_pool_handle()
        # One stream for all recordings: libraries keep a workspace for every stream that they see.
        self._stream = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, host: Tensor, work: Callable[[Tensor], Result]) -> Result:
        """Run `work` as a graph over a copy of the inputs `host` on the GPU.

        A new key records a graph. The work then runs twice as a warm-up, and once more by the replay. It must depend on
        nothing but its inputs and the key.

        Returns:
            The result of `work`. The next replay of any graph overwrites it.
        """
        with torch.cuda.device(self._device):
            if key not in self._graphs:
                self._graphs[key] = self._capture(host.to(self._device), work)
            self._graphs.move_to_end(key)
            recording = self._graphs[key]
            # PyTorch does not reuse pinned memory before the copy out of it is done.
            recording.inputs.copy_(host.pin_memory(), non_blocking=True)
            recording.graph.replay()
            result: Result = recording.result
            return result

    def run_again(self, key: Hashable, change: Callable[[Tensor], None]) -> Any:
        """Replay a graph over its latest inputs, which `change` changes on the GPU first.

        Returns:
            The result, as `run` returns it; None where there is no such graph any more.
        """
        if key not in self._graphs:
            return None
        with torch.cuda.device(self._device):
            recording = self._graphs[key]
            change(recording.inputs)
            recording.graph.replay()
            return recording.result

    def _capture(self, inputs: Tensor, work: Callable[[Tensor], Result]) -> _Recording:
        while len(self._graphs) >= GRAPHS:
            self._graphs.popitem(last=False)
        graph, result = capture(lambda: work(inputs), self._stream, self._pool)
        return _Recording(graph, inputs, result)


def capture(work: Callable[[], Result], stream: Any, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run `work` twice as a warm-up, then record it.

    Args:
        work: launches kernels; must not wait for the device.
        stream: the stream of all recordings.
        pool: handle of the memory pool that graphs share.

    Returns:
        The graph and the result that a replay overwrites.
    """
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads load KV to the GPU at the same time. Their calls must not affect the recording.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result
