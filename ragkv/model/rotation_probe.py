"""Finds out how a layer turns its queries and keys, by turning a few random rows with codes.

Each code is a row of cos and sin whose entries are powers of two: the digits of the entry's number. What a dimension
was multiplied by is the number of its entry, and what cos = 0, sin = 1 leaves in its place is its partner. The result
is used only if it explains every row of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragkv.model.rotary import Rotation

BASE = 4
"""Digits of a number, each a power of two from 1 down to 1/8: exact in every dtype."""
SAMPLES = 8
"""Random rows that each code turns."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest relative error that is rounding: products of the same row differ by where it stands among the others."""


@dataclass(frozen=True)
class Codes:
    """The codes for `width` entries of cos and sin.

    Attributes:
        cos: [C, width]. The first row is 1, then each digit of the entries' numbers, then as many rows of 0.
        sin: [C, width]. As many rows of 0, then 1, then the digits.
    """

    cos: Tensor
    sin: Tensor

    @property
    def digits(self) -> int:
        """Digits of an entry's number."""
        return self.cos.shape[0] // 2 - 1


def make_codes(width: int) -> Codes:
    """Make the codes for `width` entries of cos and sin, in float64."""
    number, digits = torch.arange(width), max(1, math.ceil(math.log(width, BASE)))
    levels = [0.5 ** (number // BASE**digit % BASE).double() for digit in range(digits)]
    rows = torch.stack([torch.ones(width, dtype=torch.float64), *levels])
    return Codes(torch.cat([rows, 0 * rows]), torch.cat([0 * rows, rows]))


@dataclass(frozen=True)
class Turning:
    """What each dimension of a head becomes: x cos[entry] + sign x[partner] sin[entry].

    Attributes:
        entry: [d]. Entry of cos and sin, -1 for a dimension that does not turn.
        partner: [d]. The other dimension of its pair.
        sign: [d]. -1 for the first of a pair, 1 for the second, 0 for one that does not turn.
    """

    entry: Tensor
    partner: Tensor
    sign: Tensor


def find_turning(coded: Tensor, codes: Codes) -> Turning | None:
    """Find out how queries and keys were turned. A dimension that is 0 in all of them, as some norms make it, is known
    by what its partner leaves in it.

    Args:
        coded: [S, C, d]. Each sample under each code.
        codes: the codes.

    Returns:
        None where no turning of pairs explains the rows.
    """
    rows, half = coded.double(), codes.cos.shape[0] // 2
    base, turned = rows[:, 0], rows[:, half]
    size, turned_size = base.norm(dim=0), turned.norm(dim=0)
    still = ((rows - base[:, None]).norm(dim=0) <= ROUNDING[coded.dtype] * size).all(0)
    digits = (rows[:, 1:half] * base[:, None]).sum(0) + (rows[:, half + 1 :] * turned[:, None]).sum(0)
    levels = (-(digits / (size**2 + turned_size**2)).log2()).round()
    entry = (levels * BASE ** torch.arange(half - 1, device=rows.device)[:, None]).sum(0).nan_to_num(-1, -1, -1)
    likeness = turned.T @ base  # of each dimension and each that may be its partner, over random samples
    partner = (likeness / size.clamp(min=1e-300)).abs().argmax(1)
    sign = likeness.gather(1, partner[:, None])[:, 0].sign()
    for lone in ((turned_size == 0) & ~still).nonzero()[:, 0].tolist():  # what its partner left is 0
        empty = ((partner == lone) & (size == 0)).nonzero()[:, 0]
        if len(empty) == 1:
            partner[lone], sign[lone] = empty[0], -sign[empty[0]]
    own = torch.arange(len(entry), device=rows.device)
    found = Turning(torch.where(still, -1, entry).long(), torch.where(still, own, partner), torch.where(still, 0, sign))
    return found if explains(found, coded, codes) else None


def explains(turning: Turning, coded: Tensor, codes: Codes) -> bool:
    """Return whether rows [S, C, d] are those of the first code, turned, but for rounding."""
    width = codes.cos.shape[1]
    rows, base = coded.double(), coded[:, :1].double()
    entry, partner, sign = (each.to(rows.device) for each in (turning.entry, turning.partner, turning.sign))
    if len(entry) != rows.shape[2] or bool((entry >= width).any()) or bool(((entry < 0) != (sign == 0)).any()):
        return False
    cos, sin = (each.to(rows.device)[:, entry.clamp(min=0)] for each in (codes.cos, codes.sin))
    expected = torch.where(entry < 0, base, base * cos + sign * base[..., partner] * sin)
    size = base[:, 0].norm(dim=0)
    return bool(((rows - expected).norm(dim=0) <= ROUNDING[coded.dtype] * (size + size[partner])).all())


def arrange(turning: Turning, cos: Tensor, sin: Tensor, arguments: tuple[Any, ...]) -> Rotation | None:
    """Return the rotation that brings a turning to our form.

    Args:
        turning: how the layer turns its queries and keys.
        cos: [T, n]. As the model's rotary module returned them for some positions.
        sin: [T, n]. Likewise.
        arguments: as in `Rotation`.

    Returns:
        None where the dimensions are no pairs that turn by one angle.
    """
    entry, partner, sign = turning.entry.tolist(), turning.partner.tolist(), turning.sign.tolist()
    first, still = [i for i, each in enumerate(sign) if each < 0], [i for i, each in enumerate(sign) if not each]
    second = [partner[i] for i in first]
    if len(still) % 2 or sorted([*first, *second, *still]) != list(range(len(entry))):
        return None
    a, b = [entry[i] for i in first], [entry[i] for i in second]
    if not (torch.equal(cos[:, a], cos[:, b]) and torch.equal(sin[:, a], sin[:, b])):
        return None
    middle = len(still) // 2
    order = (*first, *still[:middle], *second, *still[middle:])
    table = (*a, *[-1] * middle, *a, *[-1] * middle)
    if cos.shape[1] == len(order) and tuple(entry[i] for i in order) == tuple(range(len(order))):
        table = tuple(range(len(order)))  # both entries of a pair are the same
    plain = tuple(range(len(order)))
    return Rotation(arguments, None if order == plain else order, None if table == plain else table)
