"""KV transfer: copies pinned blocks into a context cache while the model computes.

On a GPU the copies run on a stream of their own. They run in the order of the layers, a few layers at a time, and each
launch is followed by an event. The model waits for a layer's event when it reaches the layer
(`ContextCache.wait_ready`); the host does not wait. The memory that is read and written stays reserved until the last
event has passed. A background thread waits for that event and then releases the blocks.
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

LEAST = 2**22
"""Bytes of the first launch, at least, which the model waits for. Launching a kernel takes Python about as long as the
bus takes for so many."""
GROWTH, MOST = 4, 2**26
"""Each launch has so many times the bytes of the one before, up to `MOST`: the bus takes a millisecond for them. A
layer is computed more slowly than what a question keeps of it is copied, so the model does not wait again."""
LAUNCHES = 8
"""A transfer of more than so many times `MOST` bytes has about so many launches, each of more bytes than `MOST`."""

THREADS = 4
"""Chunks that are fetched from the store at the same time."""

PendingPin = Callable[[], PinnedBlocks | None]
"""Waits for blocks that are being pinned. Call it once, in the thread that asked for them. The blocks stay pinned until
they are released. None means that they have to be loaded as rows."""


def acquire(pending: Mapping[int, PendingPin], pins: ExitStack) -> dict[int, PinnedBlocks]:
    """Wait for pending pins.

    Args:
        pending: The pins, by chunk index.
        pins: Receives the release of every pinned chunk.

    Returns:
        The pinned blocks by chunk index, without the chunks that have to be loaded as rows.
    """
    pinned: dict[int, PinnedBlocks] = {}
    waiting = dict(pending)
    try:
        for i in pending:
            blocks = waiting.pop(i)()
            if blocks is not None:
                pinned[i] = blocks
                pins.callback(blocks.release)
    finally:
        for wait in waiting.values():  # after a fault, blocks that are still being fetched must not stay pinned
            with suppress(Exception):
                blocks = wait()
                if blocks is not None:
                    blocks.release()
    return pinned


def make_kv_transfer(model: DecoderModel) -> KVTransfer | None:
    """Return a KV transfer for a model on one GPU with Triton, and None otherwise: blocks are then loaded as rows.

    All layers must turn keys alike and have the heads of stored rows, because one kernel turns them all.
    """
    one = not model.spread and model.turns_alike and model.compares_heads
    if not one or model.device.type != "cuda" or model.dtype == torch.float64 or not find_spec("triton"):
        return None
    from ragkv.kernels import triton_transfer

    return KVTransfer(model, triton_transfer.transfer_blocks)


class KVTransfer:
    """Copies pinned blocks into context caches. Not thread-safe.

    Attributes:
        threads: Threads that fetch the blocks of several chunks into memory at the same time.
    """

    def __init__(self, model: DecoderModel, kernel: TransferKernel):
        """Create the streams and threads.

        Args:
            model: The model whose caches are filled.
            kernel: Reads addresses on the model's device. On a CPU the copy is complete when `transfer` returns.
        """
        self._kernel, self._device = kernel, model.device
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._releasing = ThreadPoolExecutor(1, thread_name_prefix="release")
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pin")

    def transfer(
        self,
        stitch: Stitch,
        pieces: Sequence[Piece],
        pinned: Mapping[int, PinnedBlocks],
        release: Callable[[], None],
    ) -> None:
        """Copy pinned blocks to the rows that are reserved for them.

        Args:
            stitch: Holds the cache and the positions of the chunks.
            pieces: All chunks.
            pinned: Blocks by chunk index. Their formats may differ only in `near`.
            release: Releases all blocks. It is called when they have been read, or when that fails.
        """
        try:
            table, stops = _table(stitch, pieces, pinned)
            forms = [blocks.form for blocks in pinned.values()]
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
        """Launch the copies. `table` and `stops` are as `_table` returns them."""
        cache, rotary, layers = stitch.cache, stitch.rotary, len(stops) - 1
        if self._stream is None:
            self._kernel(TransferTable(table), 0, stops[-1], rotary.cos, rotary.sin, form)
            release()
            return
        ready = None
        # The model's stream may still be using the memory of the cache.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            entries = TransferTable(table.pin_memory().to(self._device, non_blocking=True))
            for layer, above in pairwise([*launch_layers(stops, form.block_bytes), layers]):
                count = stops[above] - stops[layer]
                if count:
                    self._kernel(entries, stops[layer], count, rotary.cos, rotary.sin, form)
                    ready = torch.cuda.Event(blocking=True)
                    ready.record(self._stream)
                    for number in range(layer, above):
                        cache.record_event(number, ready)
        if ready is None:
            release()
            return
        in_use = (entries, rotary, cache.tensors)
        self._releasing.submit(_release_after, ready, release, in_use)


def launch_layers(stops: Sequence[int], block_bytes: int) -> list[int]:
    """Return the layers with which launches begin, 0 first. stops: as `_table` returns them."""
    most, size, begin = max(MOST, stops[-1] * block_bytes // LAUNCHES), LEAST, [0]
    for layer in range(1, len(stops) - 1):
        if (stops[layer] - stops[begin[-1]]) * block_bytes >= size:
            begin.append(layer)
            size = min(GROWTH * size, most)
    return begin


def _release_after(ready: torch.cuda.Event, release: Callable[[], None], in_use: object) -> None:
    """Release blocks after an event. `in_use` keeps the memory of the copies from being reused before."""
    ready.synchronize()
    release()


def _table(stitch: Stitch, pieces: Sequence[Piece], pinned: Mapping[int, PinnedBlocks]) -> tuple[Tensor, list[int]]:
    """Return the transfer table [FIELDS, E] on the CPU, layer by layer, and the entries below each layer (L + 1)."""
    chunks = list(pinned.values())
    layers = np.concatenate([chunk.layers.numpy() for chunk in chunks])
    order = layers.argsort(kind="stable")
    layers = layers[order]
    addresses = np.concatenate([chunk.addresses.numpy() for chunk in chunks])[order]
    blocks = np.concatenate([chunk.blocks.numpy() for chunk in chunks])[order]
    places = np.array([(pieces[i].tokens, stitch.starts[i]) for i in pinned])
    tokens, starts = places.repeat([len(chunk.blocks) for chunk in chunks], axis=0)[order].T
    block = chunks[0].form.block
    begin = blocks * block
    positions = begin + starts
    rows = np.minimum(tokens - begin, block)
    table = np.stack([addresses, rows, *stitch.addresses(layers, positions), positions])
    stops = np.bincount(layers, minlength=stitch.cache.shape.layers).cumsum().tolist()
    return torch.from_numpy(table), [0, *stops]
