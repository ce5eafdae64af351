"""Block tables: which blocks the requests of a step read in place, as `kernels/paged_attention.py` reads them.

Tables change when a request comes or goes, not from step to step. Requests with a chunk in common share tiles; a tile
is built again only when its requests change. Units and bounds are built again when the rows of the step change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.kernels.paged_attention import LANE_FIELDS, UNIT_FIELDS, PagedBlocks, lanes_of, segment_blocks
from ragkv.kernels.transfer import TransferFormat
from ragkv.model.decoder import DecoderModel
from ragkv.types import Shape

Numbers = NDArray[np.int64]

LEAST = 512
"""Units and parts for which there is room at first. Where room grows, twofold, graphs are recorded again."""
ANGLES = 4096
"""Positions whose cos and sin are there at first."""


@dataclass(frozen=True, eq=False)
class PagedChunk:
    """Blocks of one chunk that one request reads in place.

    Attributes:
        key: the same for all requests that read the same chunk.
        tokens: tokens of the chunk.
        start: position of its first token in the request's context.
        addresses: [L, B]. Address of each block on the device; 0 where the request does not read it.
    """

    key: Hashable
    tokens: int
    start: int
    addresses: Numbers


@dataclass(eq=False)
class PagedContext:
    """All blocks that one request reads in place. The other rows of its context lie in its own cache.

    A step reads them by their addresses, so they must stay until the last step is launched.

    Attributes:
        chunks: the blocks, chunk by chunk.
        rows: rows of each layer in these blocks.
        release: unpins the blocks; `close` calls it once.
    """

    chunks: Sequence[PagedChunk]
    rows: Sequence[int]
    release: Callable[[], None] | None = None

    def close(self) -> None:
        """Allow that the blocks are removed; no further step reads them. Nothing happens the second time."""
        release, self.release = self.release, None
        if release is not None:
            release()


@dataclass(frozen=True, eq=False)
class BlockPoolMemory:
    """Memory in which blocks lie.

    Attributes:
        data: [slots, bytes] uint8, on the model's device. A block begins at the start of its slot.
        form: format of all blocks.
    """

    data: Tensor
    form: TransferFormat


@dataclass(eq=False)
class _Tile:
    """Blocks of a chunk that some requests read. members: these requests, bit by bit, each with its start."""

    members: tuple[tuple[PagedContext, PagedChunk], ...]
    entries: int = 0
    segments: int = 0
    data: Tensor | None = None


class BlockTables:
    """Tables of one model on one device. Not thread-safe."""

    def __init__(self, model: DecoderModel, memory: BlockPoolMemory, width: int, versions: Iterator[int]):
        """Allocate the tables.

        Args:
            model: the model.
            memory: where all blocks lie.
            width: most rows of a step.
            versions: gives versions to tables at new addresses.
        """
        self._model, self._shape, self._memory, self._width = model, model.shape, memory, width
        self._lanes = lanes_of(model.shape)
        self._members: dict[Hashable, list[tuple[PagedContext, PagedChunk]]] = {}
        self._tiles: dict[Hashable, list[_Tile]] = {}
        self._contexts: list[PagedContext] = []
        self._rows: tuple[PagedContext | None, ...] = ()
        self._versions = versions
        self.paged = self._allocate(LEAST, LEAST, ANGLES)

    @torch.inference_mode()
    def update(self, rows: Sequence[PagedContext | None], positions: int) -> PagedBlocks:
        """Return the tables of a step. They change in place unless they have to grow.

        Args:
            rows: what each row of the step reads in place, if anything. Several rows may belong to one request.
            positions: positions for which cos and sin are needed.
        """
        if positions > self.paged.cos.shape[0]:
            size = 1 << (positions - 1).bit_length()
            self.paged = self._allocate(self.paged.units.shape[0], self.paged.parts.shape[0], size)
            self._rows = ()
        rows = tuple(rows)
        if len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True)):
            return self.paged
        self._exchange(list(dict.fromkeys(each for each in rows if each is not None)))
        self._upload_tiles()
        self._write_units(rows)
        self._rows = rows
        return self.paged

    def _exchange(self, contexts: list[PagedContext]) -> None:
        """Let requests come and go, and note which tiles have other members now."""
        before, now = set(self._contexts), set(contexts)
        leaving = [(each, chunk) for each in self._contexts if each not in now for chunk in each.chunks]
        joining = [(each, chunk) for each in contexts if each not in before for chunk in each.chunks]
        for pair in leaving:  # the last one takes the place, so at most two tiles change
            members = self._members[pair[1].key]
            members[members.index(pair)] = members[-1]
            members.pop()
        for pair in joining:
            self._members.setdefault(pair[1].key, []).append(pair)
        self._contexts = contexts
        for key in dict.fromkeys(chunk.key for _, chunk in (*leaving, *joining)):
            members, same = self._members[key], {tile.members: tile for tile in self._tiles.get(key, ())}
            groups = [tuple(members[i : i + self._lanes]) for i in range(0, len(members), self._lanes)]
            self._tiles[key] = [same.get(group) or _Tile(group) for group in groups]
            if not members:
                del self._members[key], self._tiles[key]

    def _upload_tiles(self) -> None:
        """Build the tiles that are new, and copy them to the device at once."""
        new = [tile for tiles in self._tiles.values() for tile in tiles if tile.data is None]
        if not new:
            return
        parts = [self._build(tile) for tile in new]
        whole = self._to_device(np.concatenate(parts))
        for tile, data in zip(new, whole.split([len(part) for part in parts]), strict=True):
            tile.data = data

    def _build(self, tile: _Tile) -> Numbers:
        """Return the numbers of a tile."""
        addresses = np.stack([chunk.addresses for _, chunk in tile.members])
        masks = ((addresses != 0) << np.arange(len(tile.members))[:, None, None]).sum(0)
        # The same block may lie at two addresses for a while, after its first copy was dropped. Both are pinned.
        union, kept = addresses.max(0), masks != 0
        counts = kept.sum(1)
        tile.entries = int(counts.sum())
        tile.segments = -(-int(counts.max()) // segment_blocks(self._memory.form.block))
        marks = (np.broadcast_to(np.arange(kept.shape[1]) << 32, kept.shape) | masks)[kept]
        return np.concatenate([[0], counts.cumsum(), union[kept], marks])

    def _write_units(self, rows: Sequence[PagedContext | None]) -> None:
        """Build units and bounds for the rows of a step."""
        rows_of: dict[int, list[int]] = {}
        for row, context in enumerate(rows):
            if context is not None:
                rows_of.setdefault(id(context), []).append(row)
        units, owners = list[list[int]](), list[list[int]]()
        for tile in (tile for tiles in self._tiles.values() for tile in tiles):
            assert tile.data is not None
            lanes = [
                (row, bit, chunk.start)
                for bit, (context, chunk) in enumerate(tile.members)
                for row in rows_of[id(context)]
            ]
            fields = [tile.data.data_ptr(), tile.entries, tile.members[0][1].tokens]
            for segment in range(tile.segments):
                for at in range(0, len(lanes), self._lanes):
                    some = lanes[at : at + self._lanes]
                    some += [(-1, 0, 0)] * (self._lanes - len(some))
                    owned, bits, starts = zip(*some, strict=True)
                    units.append([*fields, segment, *owned, *bits, *starts])
                    owners.append(list(owned))
        self._copy_units(
            np.array(units, dtype=np.int64).reshape(-1, UNIT_FIELDS + 3 * self._lanes),
            np.array(owners, dtype=np.int64).reshape(-1, self._lanes),
        )

    def _copy_units(self, units: Numbers, owners: Numbers) -> None:
        """Number the parts row by row, and copy units and bounds to the device. owners: row of each lane, or -1."""
        flat = owners.ravel()
        used = np.flatnonzero(flat >= 0)
        part = np.zeros_like(flat)
        part[used[flat[used].argsort(kind="stable")]] = np.arange(len(used))
        bounds = np.zeros(self._width + 2, dtype=np.int64)
        bounds[0] = len(units)
        bounds[2:] = np.bincount(flat[used], minlength=self._width).cumsum()
        paged = self.paged
        if len(units) > paged.units.shape[0] or len(used) > paged.parts.shape[0]:
            room = _grown(paged.units.shape[0], len(units)), _grown(paged.parts.shape[0], len(used))
            self.paged = self._allocate(*room, paged.cos.shape[0])
        if len(units):
            table = np.concatenate([units, part.reshape(owners.shape)], axis=1)
            self.paged.units[: len(units)].copy_(self._to_device(table))
        self.paged.bounds.copy_(self._to_device(bounds))
        self.paged.tiles.clear()
        every = [tile.data for tiles in self._tiles.values() for tile in tiles if tile.data is not None]
        self.paged.tiles.update({data.data_ptr(): data for data in every})

    def _allocate(self, units: int, parts: int, positions: int) -> PagedBlocks:
        """Return empty tables with room for so many units, parts and positions."""
        shape, device = self._shape, self._model.device
        rotary = self._model.rotary(torch.arange(positions, device=device))
        return PagedBlocks(
            torch.zeros(units, UNIT_FIELDS + LANE_FIELDS * self._lanes, dtype=torch.int64, device=device),
            torch.zeros(self._width + 2, dtype=torch.int64, device=device),
            torch.zeros(parts, shape.q_heads, shape.head_dim, dtype=torch.float32, device=device),
            torch.zeros(parts, shape.q_heads, dtype=torch.float32, device=device),
            rotary.cos,
            rotary.sin,
            self._lanes,
            shape,
            self._memory.form,
            next(self._versions),
            self._memory.data,
            {},
        )

    def _to_device(self, numbers: Numbers) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(numbers))
        if self._model.device.type == "cuda":
            return host.pin_memory().to(self._model.device, non_blocking=True)
        return host


def _grown(room: int, needed: int) -> int:
    """Return room for what is needed, a power of two where it grows."""
    return max(room, 1 << (needed - 1).bit_length())


def rows_in_blocks(chunks: Sequence[PagedChunk], shape: Shape, block: int) -> list[int]:
    """Return how many rows of each layer lie in the blocks of some chunks."""
    rows = np.zeros(shape.layers, dtype=np.int64)
    for chunk in chunks:
        begin = np.arange(chunk.addresses.shape[1]) * block
        rows += np.where(chunk.addresses != 0, np.minimum(chunk.tokens - begin, block), 0).sum(1)
    found: list[int] = rows.tolist()
    return found
