"""Carrier: lent blocks into a context cache, beside what the model does.

On a GPU it has a stream of its own. Layers are carried in order, a few at a time, with an event behind them: the model
waits for a layer's event when it comes to that layer (`ContextCache.settle`), and the host waits for none. What is read
and written stays where it is until the last event has passed: a thread sees to that, and then lets the blocks go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ragkv.engine.stitch import Stitch
from ragkv.kernels.transfer import PinnedBlocks, TransferFormat, TransferKernel, TransferTable
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Piece

LAYERS = 4
"""Layers of a launch, but for the first, which the model waits for. Starting a kernel takes Python about as long as a
layer of a question's blocks takes the bus."""


THREADS = 4
"""Chunks that are fetched from the store at once."""

PendingPin = Callable[[], PinnedBlocks | None]
"""Waits for blocks that are being lent, to be called once, in the thread that asked: they stay where they lie until
they are released. None where they have to be loaded."""


def acquire(begun: Mapping[int, PendingPin], held: ExitStack) -> dict[int, PinnedBlocks]:
    """What is lent in the end, by the chunk's number. held: releases all of it."""
    lent: dict[int, PinnedBlocks] = {}
    waiting = dict(begun)
    try:
        for i in begun:
            loan = waiting.pop(i)()
            if loan is not None:
                lent[i] = loan
                held.callback(loan.release)
    finally:
        for wait in waiting.values():  # after a fault: what others still bring must not stay pinned
            with suppress(Exception):
                loan = wait()
                if loan is not None:
                    loan.release()
    return lent


def make_kv_transfer(model: DecoderModel) -> KVTransfer | None:
    """For a model on one GPU, where Triton is; None otherwise: blocks are then loaded as rows."""
    if model.spread or model.device.type != "cuda" or model.dtype == torch.float64 or not find_spec("triton"):
        return None
    from ragkv.kernels import triton_transfer

    return KVTransfer(model, triton_transfer.transfer_blocks)


class KVTransfer:
    """See the module. Not thread-safe. threads: that bring blocks into memory, for several chunks at once."""

    def __init__(self, model: DecoderModel, kernel: TransferKernel):
        """kernel: reads addresses, on the model's device. On a CPU all is done when `carry` returns."""
        self._kernel, self._device = kernel, model.device
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._ending = ThreadPoolExecutor(1, thread_name_prefix="carrier")
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lend")

    def transfer(
        self,
        stitch: Stitch,
        pieces: Sequence[Piece],
        pinned: Mapping[int, PinnedBlocks],
        release: Callable[[], None],
    ) -> None:
        """Bring the blocks lent of chunks, all of one form but for where they lie, to the rows reserved for them.

        release: lets all of them go; called when they have been read, or when that fails.
        """
        try:
            table, stops = _table(stitch, pieces, pinned)
            forms = [each.form for each in pinned.values()]
            form = replace(forms[0], near=all(each.near for each in forms))
            self._launch(stitch, table, stops, form, release)
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()
            release()
            raise

    def _launch(
        self, stitch: Stitch, table: Tensor, stops: Sequence[int], form: TransferFormat, release: Callable[[], None]
    ) -> None:
        """stops [L + 1]: entries of layers below each."""
        cache, at, layers = stitch.cache, stitch.rotary, len(stops) - 1
        if self._stream is None:
            self._kernel(TransferTable(table), 0, stops[-1], at.cos, at.sin, form)
            release()
            return
        ready = None
        # The memory of the cache may be in use on the model's stream until now.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            entries = TransferTable(table.pin_memory().to(self._device, non_blocking=True))
            for layer, above in pairwise([0, *range(1, layers, LAYERS), layers]):
                if stops[above] > stops[layer]:
                    self._kernel(entries, stops[layer], stops[above] - stops[layer], at.cos, at.sin, form)
                    ready = torch.cuda.Event(blocking=True)
                    ready.record(self._stream)
                    for number in range(layer, above):
                        cache.record_event(number, ready)
        if ready is None:
            release()
            return
        used = (entries, at, cache.tensors)
        self._ending.submit(_end, ready, release, used)


def _end(ready: torch.cuda.Event, release: Callable[[], None], used: object) -> None:
    """used: memory that must not be another's before."""
    ready.synchronize()
    release()


def _table(stitch: Stitch, pieces: Sequence[Piece], lent: Mapping[int, PinnedBlocks]) -> tuple[Tensor, list[int]]:
    """([FIELDS, E] as in `Entries`, on the CPU, layer by layer; entries of layers below each, L + 1 numbers)."""
    loans = list(lent.values())
    layers = np.concatenate([loan.layers.numpy() for loan in loans])
    order = layers.argsort(kind="stable")
    layers = layers[order]
    numbers = np.concatenate([loan.addresses.numpy() for loan in loans])[order]
    blocks = np.concatenate([loan.blocks.numpy() for loan in loans])[order]
    chunks = np.array([(pieces[i].tokens, stitch.starts[i]) for i in lent])
    sizes, starts = chunks.repeat([len(loan.blocks) for loan in loans], axis=0)[order].T
    block = loans[0].form.block
    begin = blocks * block
    positions = begin + starts
    table = np.stack([numbers, np.minimum(sizes - begin, block), *stitch.addresses(layers, positions), positions])
    stops = np.bincount(layers, minlength=stitch.cache.shape.layers).cumsum().tolist()
    return torch.from_numpy(table), [0, *stops]
