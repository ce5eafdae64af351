"""A model folder for tests of tuning: two layers of random weights behind the tiny model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from ragkv.tune.contexts import TextPassage
from tests.quick import TINY
from tests.tiny import weights

NAMES = ("Ada Brook", "Otto Lund", "Mira Stone", "Paul Kerr", "Ines Vale", "Tom Hale")
TOWNS = ("Tarn", "Lindmouth", "Skerrow", "Averby", "Holm", "Norby")


def tiny_folder(folder: Path) -> Path:
    """Write the model. Returns its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    with torch.random.fork_rng():
        made = weights(layers=2, vocabulary=len(tokenizer), max_positions=4096, seed=7)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    profile = json.loads((TINY / "profile.json").read_text(encoding="utf-8"))
    profile |= {"retrieval_heads": [[0, 0], [1, 3]], "stable_layers": [1], "chunk_tokens": 256, "block": 8}
    (folder / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    return folder


def passages(count: int) -> list[TextPassage]:
    """Return passages about towns, two of each document."""
    found = []
    for number in range(count):
        name, town = NAMES[number % 6], TOWNS[number // 6 % 6]
        text = (
            f"The harbour of {town} was built in {1800 + number} by {name}. {name} was born in {town} and wrote a book."
        )
        found.append(TextPassage("towns", f"town{number // 2}", f"{town} {number}", text))
    return found
