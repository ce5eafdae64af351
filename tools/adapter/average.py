"""Average two adapters of one base: `python -m tools.adapter.average FIRST SECOND --out FOLDER`.

The mean of two trainings is often better than either, and keeps what one of them gave up: Wortsman et al., "Model
soups" (2022). What is averaged are the changes of the weights, B A. Adapters that started from different factors have
nothing else in common. The mean has the sum of both ranks; its best approximation of the first one's rank is kept.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter.average", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="weight of the second")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    kept = average(chosen.first, chosen.second, chosen.share, chosen.out)
    print(f"{100 * kept:.1f}% of the mean's squared norm is kept")


def average(first: Path, second: Path, share: float, out: Path) -> float:
    """Write (1 - share) · first + share · second, with the configuration and rank of the first, in bfloat16.

    Both adapters must have the same alpha / rank.

    Returns:
        The part of the squared norm of the mean that its approximation keeps, the mean over all matrices.

    Raises:
        ValueError: The adapters change different matrices.
    """
    one, other = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    if one.keys() != other.keys():
        raise ValueError("the adapters change different matrices")
    mixed: dict[str, Tensor] = {}
    kept: list[float] = []
    for a in sorted(name for name in one if "lora_A" in name):
        b = a.replace("lora_A", "lora_B")
        left = torch.cat([(1 - share) * one[b].float(), share * other[b].float()], dim=1)
        right = torch.cat([one[a].float(), other[a].float()])
        mixed[b], mixed[a], part = cut_to_rank(left, right, one[a].shape[0])
        kept.append(part)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.bfloat16().contiguous() for name, value in mixed.items()}, out / WEIGHTS, {"format": "pt"})
    for file in first.glob("*.json"):
        shutil.copy(file, out)
    return sum(kept) / len(kept)


def cut_to_rank(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Approximate left right by factors of a smaller rank: the truncated singular value decomposition.

    Args:
        left: [out, R].
        right: [R, in].
        rank: At most R.

    Returns:
        Factors [out, rank] and [rank, in], and the part of the squared norm that they keep.
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(r_left @ r_right.T)
    root = s[:rank].sqrt()
    part = float(s[:rank].square().sum() / s.square().sum())
    return q_left @ u[:, :rank] * root, root[:, None] * v[:rank] @ q_right.T, part


if __name__ == "__main__":
    main()
