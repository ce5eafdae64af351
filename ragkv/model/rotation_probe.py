"""Finds out how a layer turns its queries and keys, by turning a few random rows with codes.

Each code is a row of cos and sin whose entries are powers of two: the digits of the entry's number. What a dimension
was multiplied by is the number of its entry, and what cos = 0, sin = 1 leaves in its place is its partner. The result
is used only if it explains every row of queries and keys exactly.
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
SAMPLES = 4
"""Random rows that each code turns."""


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
    """Find out how queries were turned.

    Args:
        coded: [S, C, d]. Each sample under each code.
        codes: the codes.

    Returns:
        None where no turning of pairs explains the rows.
    """
    rows, half = coded.double(), codes.cos.shape[0] // 2
    base, turned = rows[:, 0], rows[:, half]
    still = (rows == base[:, None]).all(0).all(0)
    # Some models have dimensions that are 0 for every token. Their entry shows in what they take from their partner.
    entry = torch.where(base.any(0), _entries(base, rows[:, 1:half]), _entries(turned, rows[:, half + 1 :]))
    told = turned.any(0)
    same, opposite = ((turned[:, :, None] == each[:, None]).all(0) & told[:, None] for each in (base, -base))
    sign = same.any(1).double() - opposite.any(1).double()
    partner = (same | opposite).int().argmax(1)
    for dimension in (~told & ~still).nonzero().flatten().tolist():
        others = ((partner == dimension) & told & ~still).nonzero().flatten().tolist()
        if len(others) == 1:
            partner[dimension], sign[dimension] = others[0], -sign[others[0]]
    if bool(((sign == 0) & ~still).any()) or not bool((entry.isfinite() | still).all()):
        return None
    own = torch.arange(len(entry), device=rows.device)
    found = Turning(
        torch.where(still, -1, entry.nan_to_num()).long(), torch.where(still, own, partner), torch.where(still, 0, sign)
    )
    return found if explains(found, coded, codes) else None


def _entries(rows: Tensor, scaled: Tensor) -> Tensor:
    """Return the number of each dimension's entry [d], from rows [S, d] and what the digits made of them [S, n, d]."""
    digits = scaled.shape[1]
    strongest = rows.abs().argmax(0, keepdim=True)
    levels = scaled.gather(0, strongest[:, None].expand(1, digits, -1))[0] / rows.gather(0, strongest)
    places = BASE ** torch.arange(digits, device=rows.device)[:, None]
    return (levels.abs().log2().neg().round() * places).sum(0)


def explains(turning: Turning, coded: Tensor, codes: Codes) -> bool:
    """Return whether rows [S, C, d] are those of the first code, turned."""
    width = codes.cos.shape[1]
    if len(turning.entry) != coded.shape[2] or bool((turning.entry >= width).any()):
        return False
    rows, base = coded.double(), coded[:, :1].double()
    entry, partner, sign = (each.to(rows.device) for each in (turning.entry, turning.partner, turning.sign))
    cos, sin = (each.to(rows.device)[:, entry.clamp(min=0)] for each in (codes.cos, codes.sin))
    expected = torch.where(entry < 0, base, base * cos + sign * base[..., partner] * sin)
    return torch.equal(rows, expected)


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
