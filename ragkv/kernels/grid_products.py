"""Products of a few rows on a CPU with weights of 4 bits, and with two such planes where 4 bits lose something.

    plane    codes [out, in] 0 … 15; scale and centre [out, in / 32] bfloat16, one each for 32 weights of a row
    weight   (code - 8) * scale + centre, summed over the planes

The product of a row takes as long as reading the weights, so a quarter of the bytes is a quarter of the time. Weights
that a file holds in 4 bits (Q4_0, Q4_1, Q4_K) lie on such a grid, and one plane holds them as bfloat16 does. For other
weights a second plane holds what the first one leaves, 8 bits together. Either way a matrix differs from the one that
was given by about `LOSS`, and bfloat16 rows lose more than that.

torch's operator dequantises for every four rows, so more rows are multiplied with the weights as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Weights that share a scale. Those of the GGUF types of 4 bits are 32, too."""
MULTIPLE = 16
"""Rows of a matrix must be a multiple of this, and columns one of `GROUP`."""
LOSS = 1 / 256
"""Largest error of one plane, as a share of the norm of the matrix. Two planes leave about as much."""
_LEVELS, _FEWEST = 15, 6
"""Steps between the least and the largest weight of a group: 15, or fewer where its codes do not reach both ends."""
_ON_GRID = 0.08
"""Share of a step by which weights may miss the grid that they were made on: scales have 8 bits in bfloat16."""
_SAMPLE, _CHUNK = 16, 1 << 19
"""Rows that tell whether a second plane is needed; weights that are packed at a time, which fit into a cache."""
BLOCK = 64
"""Rows that torch's order interleaves; what is packed apart in such blocks is packed as a whole."""


@dataclass(frozen=True)
class Grid:
    """A matrix as codes.

    Attributes:
        codes: [planes, out, in] uint8, 0 to 15.
        scale: [planes, out, in / 32] bfloat16.
        centre: [planes, out, in / 32] bfloat16.
    """

    codes: Tensor
    scale: Tensor
    centre: Tensor

    def restored(self) -> Tensor:
        """Return the matrix [out, in] float32 that the codes stand for."""
        steps = self.codes.unflatten(-1, (-1, GROUP))
        return _values(steps, self.scale, self.centre).flatten(-2).sum(0)


@dataclass(frozen=True)
class PackedGrid:
    """A matrix in the order in which torch's operator reads it.

    Attributes:
        codes: opaque, half a byte a code. The planes are columns behind each other.
        scales: [planes * in / 32, out, 2] bfloat16: scale and centre.
        planes: 1 or 2.
    """

    codes: Tensor
    scales: Tensor
    planes: int


def supports_grid() -> bool:
    """Return whether torch has the operators."""
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return all(hasattr(torch, name) for name in names)


def fits_grid(weight: Tensor) -> bool:
    """Return whether a matrix [out, in] has a size that the operators take."""
    return not (weight.shape[0] % MULTIPLE or weight.shape[1] % GROUP)


def quantise(weight: Tensor) -> Grid:
    """Quantise a matrix [out, in] of finite weights, with as few planes as it needs."""
    return _quantise(weight, _needed(weight))


def pack(weight: Tensor) -> PackedGrid:
    """Quantise a matrix [out, in] as `quantise` does, for `linear`. Whole blocks of rows at a time bound the memory."""
    planes, rows = _needed(weight), max(BLOCK, _CHUNK // weight.shape[1] // BLOCK * BLOCK)
    codes, scales = list[Tensor](), list[Tensor]()
    for part in weight.split(rows):
        grid = _quantise(part, planes)
        codes.append(torch._convert_weight_to_int4pack_for_cpu(torch.cat(list(grid.codes), -1).int(), 1))
        scales.append(torch.stack([torch.cat(list(each), -1).T for each in (grid.scale, grid.centre)], -1))
    return PackedGrid(torch.cat(codes), torch.cat(scales, 1), planes)


def linear(x: Tensor, weight: PackedGrid, bias: Tensor | None) -> Tensor:
    """Multiply rows x [T, in] bfloat16 with a matrix; return [T, out] bfloat16. Sums are float32."""
    wide = x if weight.planes == 1 else torch.cat((x, x), -1)
    out: Tensor = torch._weight_int4pack_mm_for_cpu(wide, weight.codes, GROUP, weight.scales)
    return out if bias is None else out.add_(bias)


def linear_reference(x: Tensor, weight: Grid, bias: Tensor | None) -> Tensor:
    """Compute `linear` in plain torch, with the codes as they are."""
    out = (x.float() @ weight.restored().T).to(x.dtype)
    return out if bias is None else out + bias


def _quantise(weight: Tensor, planes: int) -> Grid:
    codes, scale, centre = _planes(weight.float().unflatten(1, (-1, GROUP)), planes)
    return Grid(codes.flatten(-2), scale, centre)


def _needed(weight: Tensor) -> int:
    """Return how many planes a matrix needs. Its first rows tell, so that most matrices are quantised once."""
    groups = weight[:_SAMPLE].float().unflatten(1, (-1, GROUP))
    error = _values(*_on_grid(groups)) - groups
    return 1 if error.norm() <= LOSS * groups.norm() else 2


def _planes(groups: Tensor, planes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups [rows, count, 32] float32; return codes, scales and centres, plane by plane."""
    if planes == 1:
        return tuple(each[None] for each in _on_grid(groups))  # type: ignore[return-value]
    coarse = _plane(groups, _LEVELS)
    fine = _plane(groups - _values(*coarse), _LEVELS)
    return tuple(torch.stack(pair) for pair in zip(coarse, fine, strict=True))  # type: ignore[return-value]


def _on_grid(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the grid of each group: the number of steps between its ends with which all of its weights lie on it.

    A group that lies on none is rounded to the finest one.
    """
    flat = groups.flatten(0, 1)
    found = _plane(flat, _LEVELS)
    left = _misses(flat, found).nonzero()[:, 0]
    for levels in range(_LEVELS - 1, _FEWEST - 1, -1):
        if not left.shape[0]:
            break
        some = flat[left]
        tried = _plane(some, levels)
        missed = _misses(some, tried)
        for parts, new in zip(found, tried, strict=True):
            parts[left[~missed]] = new[~missed]
        left = left[missed]
    codes, scale, centre = (each.unflatten(0, groups.shape[:2]) for each in found)
    return codes, scale, centre


def _misses(groups: Tensor, plane: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return which groups [n, 32] have a weight that lies between the codes of a plane: [n]."""
    return (_values(*plane) - groups).abs().amax(-1) > _ON_GRID * plane[1].float()


def _plane(groups: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups [..., 32] to codes uint8, with scales and centres [...] bfloat16 of `levels` steps between ends."""
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / levels).bfloat16()
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # weights that are alike have none
    codes = ((groups - low[..., None]) / step).round_().clamp_(0, _LEVELS).to(torch.uint8)
    # Anchored in the middle, so that what the rounding of the scale costs is least at both ends.
    return codes, scale, ((low + high) / 2 + (8 - levels / 2) * scale.float()).bfloat16()


def _values(codes: Tensor, scale: Tensor, centre: Tensor) -> Tensor:
    return (codes.float() - 8) * scale.float()[..., None] + centre.float()[..., None]
