"""Average two adapters of one shape: `python -m tools.adapter.average FIRST SECOND --out FOLDER`.

The second training learned other people's prose and gave up some of what the first could. Between the two weights lies
an adapter that keeps most of both: Wortsman et al., "Robust fine-tuning of zero-shot models" (2022). That works where
the second training went on from the first.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter.average", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="weight of the second")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    average(chosen.first, chosen.second, chosen.share, chosen.out)


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write (1 - share) · first + share · second, with the configuration of the second, in bfloat16.

    Raises:
        ValueError: The adapters have different tensors.
    """
    one, other = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        raise ValueError("the adapters have different tensors")
    out.mkdir(parents=True, exist_ok=True)
    mixed = {name: (1 - share) * value.float() + share * other[name].float() for name, value in one.items()}
    save_file({name: value.bfloat16() for name, value in mixed.items()}, out / WEIGHTS, metadata={"format": "pt"})
    for file in second.glob("*.json"):
        shutil.copy(file, out)


if __name__ == "__main__":
    main()
