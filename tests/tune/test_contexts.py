"""Contexts fit their room, keep a document's chunks in order, and ask what their chunks hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from ragkv.errors import InputError
from ragkv.tune.contexts import Context, Mixture, ProseParams, ProseSource, TextPassage, read_passages
from ragkv.tune.needles import NeedleSource
from tests.tune.tiny_folder import passages


def words(chunk: tuple[str, str]) -> int:
    return len(f"{chunk[0]} {chunk[1]}".split())


@pytest.mark.parametrize("seed", range(5))
def test_a_context_of_prose_fits_and_keeps_the_order_of_a_document(seed: int) -> None:
    source = ProseSource(passages(36), words, ProseParams(split=0.0))
    found = source.context(Random(seed), 400)
    assert 150 < sum(map(words, found.chunks)) <= 400
    places = {(each.title, each.text): (each.document, number) for number, each in enumerate(passages(36))}
    shown = [places[chunk] for chunk in found.chunks]
    for (document, place), (after, later) in pairwise(shown):
        if document == after and later > place:
            assert later == place + 1
    for asked in found.asked:
        if asked.chunk >= 0 and asked.answer not in ("yes", "no"):
            assert asked.answer in found.chunks[asked.chunk][1]


def test_a_context_depends_on_its_random_numbers_alone() -> None:
    source = ProseSource(passages(36), words)
    assert source.context(Random(1), 300) == source.context(Random(1), 300)
    assert source.context(Random(1), 300) != source.context(Random(2), 300)


def test_long_chunks_are_split_after_sentences() -> None:
    text = " ".join(f"The mill of Tarn was built in {1800 + number} by Ada Brook." for number in range(40))
    source = ProseSource([TextPassage("", "mill", "Mill", text)], words, ProseParams(split=1.0, words=(20, 20)))
    found = source.context(Random(0), 500)
    assert len(found.chunks) > 3
    assert all(chunk[1].startswith("The mill") and chunk[1].endswith(".") for chunk in found.chunks)


def test_a_mixture_draws_by_weight() -> None:
    class Fixed:
        def __init__(self, title: str):
            self._title = title

        def context(self, rng: Random, tokens: int) -> Context:
            return Context(((self._title, ""),), ())

    mixed = Mixture([(Fixed("often"), 3.0), (Fixed("seldom"), 1.0), (Fixed("never"), 0.0)])
    drawn = [mixed.context(Random(seed), 10).chunks[0][0] for seed in range(400)]
    assert "never" not in drawn
    assert 0.65 < drawn.count("often") / 400 < 0.85


def test_needles_are_answered_by_their_chunk() -> None:
    found = NeedleSource(lambda text: len(text.split())).context(Random(3), 1024)
    assert found.asked
    assert all(asked.answer in found.chunks[asked.chunk][1] for asked in found.asked)


def test_passages_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_text('{"package": "p", "document": "d", "title": "T", "text": "x"}\n{"text": "y"}\n', encoding="utf-8")
    assert read_passages(file) == [TextPassage("p", "d", "T", "x"), TextPassage("", "", "", "y")]
    file.write_text('{"text": "x"}\n{"title": "no text"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="line 2"):
        read_passages(file)
    with pytest.raises(InputError, match="no text to tune with"):
        ProseSource([], words)
