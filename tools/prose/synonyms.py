"""Words that mean the same, from WordNet (Debian's package wordnet-base): base forms with their commonest synonyms.

synonyms.json   {"noun": {"city": ["metropolis", …]}, "verb": {…}, "adjective": {…}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tools.prose.packages import Source, unpacked

WORDNET = Source(
    package="wordnet-base",
    version="1:3.0-37",
    sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
    licence="WordNet 3.0",
    reader="",
    book="",
    most=0,
    least=0,
    files=(),
)
PARTS = {"noun": "n", "verb": "v", "adjective": "a"}
MOST = 2
"""Most synonyms of a word."""

Synonyms = dict[str, dict[str, list[str]]]


def write_synonyms(folder: Path, out: Path) -> None:
    """Fetch WordNet into `folder` and write the synonyms of its words."""
    root = unpacked(WORDNET, folder) / "usr/share/wordnet"
    found: Synonyms = {}
    for name, part in PARTS.items():
        suffix = "adj" if name == "adjective" else name
        words = (root / f"data.{suffix}").read_bytes()
        found[name] = dict(_read((root / f"index.{suffix}").read_text("ascii"), words, part))
    out.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


def _read(index: str, data: bytes, part: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words that were seen in texts, each with the single words of its commonest sense."""
    for line in index.splitlines():
        if line.startswith(" "):
            continue  # the licence
        fields = line.split()
        lemma, senses, pointers = fields[0], int(fields[2]), int(fields[3])
        tagged, first = int(fields[5 + pointers]), int(fields[6 + pointers])
        # A word of many meanings is rarely meant in its first one.
        if not lemma.isalpha() or len(lemma) < 4 or not tagged or senses > (12 if part == "v" else 8):
            continue
        same = [word for word in _synset(data, first) if word != lemma and word.isalpha() and word.islower()]
        if same:
            yield lemma, same[:MOST]


def _synset(data: bytes, offset: int) -> list[str]:
    """Return the words of the synset at a byte offset of a data file: `offset lexfile type count word id word id …`."""
    fields = data[offset : data.index(b"\n", offset)].decode("ascii").split()
    count = int(fields[3], 16)
    return [fields[4 + 2 * number].split("(")[0] for number in range(count)]
