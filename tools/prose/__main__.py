"""Makes `passages.jsonl` and `synonyms.json`: `python -m tools.prose build/prose`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tools.prose import entries, readers
from tools.prose.packages import Source, files, sources, text, unpacked
from tools.prose.passages import Passage, passages
from tools.prose.sections import Section
from tools.prose.synonyms import write_synonyms

READERS: Mapping[str, Callable[[str, str, str], Iterator[Section]]] = {
    "html": readers.html,
    "pod": readers.pod,
    "plain": readers.plain,
    "dictionary": entries.dictionary,
    "devil": entries.devil,
    "ruleset": entries.ruleset,
    "described": entries.described,
    "planets": entries.planets,
    "strings": entries.strings,
    "hacks": entries.hacks,
}


def read(source: Source, folder: Path) -> Iterator[Passage]:
    """All passages of a source in order."""
    root = unpacked(source, folder)
    for path in files(source, root):
        document = str(path.relative_to(root))
        if source.reader == "sword":
            sections = entries.sword(document, path, source.book)
        else:
            sections = READERS[source.reader](document, text(path), source.book)
        yield from passages(sections, source.least)


def sampled(source: Source, found: list[Passage]) -> list[Passage]:
    """At most `source.most` kilobytes of passages, the same ones every time, in order."""
    size = sum(len(each.text) for each in found)
    share = min(1.0, source.most * 1000 / max(1, size))
    return [each for each in found if _draw(each) < share]


def _draw(passage: Passage) -> float:
    """A number in [0, 1) for every run of passages of one title."""
    return int.from_bytes(hashlib.sha256(f"{passage.document}\n{passage.title}".encode()).digest()[:6], "big") / 2**48


def main(folder: Path) -> None:
    """Writes the passages and says how much each package gave."""
    sizes = Counter[str]()
    seen: set[str] = set()
    folder.mkdir(parents=True, exist_ok=True)
    write_synonyms(folder, folder / "synonyms.json")
    with (folder / "passages.jsonl").open("w", encoding="utf-8") as out:
        for source in sources():
            for passage in sampled(source, list(read(source, folder))):
                key = re.sub(r"\W+", "", passage.text.lower())[:200]
                if key in seen:
                    continue
                seen.add(key)
                row = {"package": source.package, "version": source.version, "document": passage.document}
                out.write(json.dumps({**row, "title": passage.title, "text": passage.text}, ensure_ascii=False) + "\n")
                sizes[source.package] += len(passage.text.encode())
    for package, size in sizes.most_common():
        print(f"{size / 1e6:7.2f} MB  {package}")
    print(f"{sizes.total() / 1e6:7.2f} MB  in {len(seen)} passages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
