"""Evidence in retrieved chunks: windows of blocks as bytes of the text, words and segments in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.engine import evidence
from ragkv.engine.evidence import (
    EvidenceFinder,
    JoinedTexts,
    as_hits,
    find_named,
    find_words,
    question_words,
    searched_text,
    window_vectors,
)
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.evidence import title_links
from ragkv.retrieval.segments import segment_count
from ragkv.types import SEGMENT_BYTES, Chunk, Hit
from tests.quick import quick_model

TEXT = "The harbour of Tarn was built in 1889. Ågot Brække designed the café. 港口建于1889年。 It has two cranes."


class Known:
    """A `SegmentFinder` that knows one vector for each question, and random segments."""

    def __init__(self) -> None:
        self.identity, self.asked = "one", list[int]()

    def question_vector(self, question: str) -> np.ndarray:
        return np.eye(8, dtype=np.float32)[0]

    def segments(self, hits: list[Hit]) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        self.asked.append(len(hits))
        return [
            random.integers(-127, 128, (segment_count(len(hit.chunk.text.encode())), 8)).astype(np.int8) for hit in hits
        ]


@pytest.mark.parametrize("title", ["Tarn", "", "Å long title of its own"])
def test_tokens_end_where_their_text_ends(title: str) -> None:
    model = quick_model()
    tokens = model.prompt.chunk(title, TEXT)
    ends = model.prompt.token_ends(title, TEXT, tokens)
    piece = model.prompt.chunk_text(title, TEXT)
    offsets = model.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    start = len(piece[: piece.index(TEXT)].encode())
    whole = [(end, len(piece[:stop].encode()) - start) for end, (_, stop) in zip(ends, offsets, strict=True)]
    exact = [abs(end - stop) <= 3 for end, stop in whole]  # a character of several tokens ends with its last
    assert all(exact), whole


def test_a_window_is_a_block_with_its_neighbours_in_its_own_chunk() -> None:
    model, texts = quick_model(), [("Tarn", TEXT * 3), ("Mill", "Grain.")]
    hits = as_hits(texts, [model.prompt.chunk(*each) for each in texts])
    finder = EvidenceFinder(Known(), model.prompt, 4)
    (first, last), (alone, end) = (finder._windows(hit.chunk) for hit in hits)
    assert len(first) == -(-len(hits[0].chunk.tokens) // 4)
    assert (first[0], last[-1]) == (0, len((TEXT * 3).encode()))
    np.testing.assert_allclose(first[3:], last[:-3])
    assert (alone.min(), end.max()) == (0, len(b"Grain."))
    found = finder.find("Who built the harbour?", hits)
    assert [len(each.meaning) for each in found] == [len(first), len(alone)]


SHARES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6)


@given(st.integers(1, 6), SHARES, st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_window_is_compared_by_the_sum_of_what_lies_in_it(count: int, windows: list, seed: int) -> None:
    random = np.random.default_rng(seed)
    segments = [random.integers(-127, 128, (count, 8)).astype(np.int8), random.integers(-9, 9, (3, 8)).astype(np.int8)]
    bounds = np.sort(np.array(windows).T * count * SEGMENT_BYTES, axis=0)
    question = random.standard_normal(8).astype(np.float32)
    pairs = zip(segments, (bounds, np.array([[0.0], [64.0]])), strict=True)
    found, other = (window_vectors(*pair) @ torch.from_numpy(question) for pair in pairs)
    unit = segments[0] / np.maximum(np.linalg.norm(segments[0], axis=1, keepdims=True), 1e-9)
    for score, (first, last) in zip(found.tolist(), bounds.T, strict=True):
        inside = [max(0.0, min((i + 1) * SEGMENT_BYTES, last) - max(i * SEGMENT_BYTES, first)) for i in range(count)]
        window = np.array(inside) @ unit
        if np.linalg.norm(window) > 1e-3:
            assert score == pytest.approx(window @ question / np.linalg.norm(window), abs=1e-3)
    first_row = segments[1][0]
    if first_row.any():
        assert float(other[0]) == pytest.approx(first_row @ question / np.linalg.norm(first_row), abs=1e-4)


def test_words_are_compared_by_their_beginnings_and_characters_without_spaces_by_pairs() -> None:
    assert question_words("Who BUILT the bridges, and the bridge?") == ("who", "built", "the", "bridg", "and")
    assert question_words("港口何时建成?") == ("港口", "口何", "何时", "时建", "建成")
    assert question_words("1889年建成 Tarn港口") == ("1889", "年建", "建成", "tarn", "港口")
    assert question_words("") == ()
    assert len(question_words(" ".join(f"w{n}" for n in range(500)))) == 64


def found_at(words: tuple[str, ...], text: str, windows: list[tuple[int, int]], title: str = "") -> list[list[bool]]:
    chunk = Chunk("a#0", "a", 0, title, text, ())
    bounds: np.ndarray = np.array(windows, float).T
    return find_words(words, JoinedTexts([searched_text(chunk)], [bounds])).tolist()


def test_a_word_stands_in_the_windows_that_its_beginning_lies_in() -> None:
    text = "Rebuilt? Built by Åse. BUILDERS"
    assert found_at(("built", "build", "zinc"), text, [(0, 9), (9, 15), (15, 40)]) == [
        [False, False, False],
        [True, False, False],
        [False, True, False],
    ], "not inside of another word"
    assert found_at(("港口",), "这个港口很大", [(0, 6), (6, 18)]) == [[False], [True]], "offsets are bytes"
    assert found_at(("1889",), "建于1889年", [(0, 6), (6, 13)]) == [[False], [True]], (
        "a script without spaces ends a word"
    )
    assert found_at(("tarn",), "Nothing.", [(0, 4), (4, 8)], "The Tarn") == [[True], [True]], "a title counts in all"


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("fire", "The exit. The ﬁre exit."),
        ("fi\u200bre", "The exit. The fire exit."),
        ("warehouse", "The exit. The ware\xadhouse."),
        ("48,000", "12 exits. 48\u202f000 crowns."),
        ("48 000", "12 exits. Now 48000 crowns."),
        ("ｃａｆé", "The exit. The cafe\u0301."),
    ],
)
def test_words_and_numbers_are_found_in_any_form_where_they_stand(question: str, text: str) -> None:
    words, end = question_words(question), len(text.encode())
    (first, second) = found_at(words, text, [(0, 10), (10, end)])
    assert not any(first)
    assert second[-1]


def named_at(words: tuple[str, ...], text: str, windows: list[tuple[int, int]], title: str = "") -> list[list[bool]]:
    searched = searched_text(Chunk("a#0", "a", 0, title, text, ()))
    bounds: np.ndarray = np.array(windows, float).T
    return find_named({word: n for n, word in enumerate(words)}, JoinedTexts([searched], [bounds])).tolist()


def test_words_of_titles_are_found_in_texts_by_the_same_beginnings() -> None:
    text = "Rebuilt? Built by Åse. BUILDERS"
    windows = [(0, 9), (9, 15), (15, 40)]
    assert named_at(("built", "build", "åse"), text, windows) == [
        [False, False, False],
        [True, False, False],
        [False, True, True],
    ]
    assert named_at(("tarn",), "Nothing.", [(0, 8)], "The Tarn") == [[False]], "a title is not its text"
    assert named_at(("港口", "1889", "48000"), "这个港口建于1889年，有48,000人。", [(0, 6), (6, 18), (18, 60)]) == [
        [False, False, False],
        [True, False, False],
        [False, True, True],
    ]


LETTERS = "ab Åß港口1,0.-_ﬁ\u00ad"


@given(st.lists(st.tuples(st.text(LETTERS, max_size=9), st.text(LETTERS, max_size=40)), min_size=2, max_size=4))
@settings(max_examples=100, deadline=None)
def test_in_several_chunks_at_once_words_are_found_as_in_each_of_them(chunks: list[tuple[str, str]]) -> None:
    searched = [searched_text(Chunk("a#0", "a", 0, title, text, ())) for title, text in chunks]
    ends = [len(text.encode()) for _, text in chunks]
    windows = [np.array([(0, end // 2), (end // 3, end)], float).T for end in ends]
    words = question_words(" ".join(chain(*chunks)))
    names = {word: number for number, word in enumerate(words)}
    together = JoinedTexts(searched, windows)
    alone = [JoinedTexts([own], [bounds]) for own, bounds in zip(searched, windows, strict=True)]
    assert find_words(words, together).equal(torch.cat([find_words(words, one) for one in alone]))
    assert find_named(names, together).equal(torch.cat([find_named(names, one) for one in alone]))


@given(st.text(alphabet=LETTERS, max_size=30))
@settings(max_examples=100, deadline=None)
def test_every_word_of_a_question_is_found_in_its_own_text(text: str) -> None:
    words, whole = question_words(text), [(0, len(text.encode()) + 1)]
    assert named_at(words, text, whole) == [[True] * len(words)]


def test_titles_name_chunks_by_the_words_that_the_question_has_not() -> None:
    model = quick_model()
    texts = [
        ("Tarn harbour", "Designed by Odile Brannock."),
        ("Odile Brannock", "She was born in Lanvrac."),
        ("", "No."),
    ]
    hits = as_hits(texts, [model.prompt.chunk(*pair) for pair in texts])
    found = EvidenceFinder(Known(), model.prompt, 64).find("Where was the designer of Tarn born?", hits)
    assert [each.title.tolist() for each in found] == [
        [True, False, False],  # harbo, odile, brann
        [False, True, True],
        [False, False, False],
    ]
    assert [each.named.tolist() for each in found] == [[[False, True, True]], [[False] * 3], [[False] * 3]]
    assert title_links(found, torch.tensor([1.0, 0.0, 0.0])).tolist() == pytest.approx([0, 1, 0])


def test_a_long_title_has_its_first_words() -> None:
    searched = searched_text(Chunk("a#0", "a", 0, " ".join(f"w{n}" for n in range(99)), "", ()))
    assert searched.title_words == tuple(f"w{n}" for n in range(16))


def test_the_same_evidence_is_found_whatever_model_has_read_the_chunk() -> None:
    """Blocks of other sizes cover the same text, so their best windows overlap."""
    model = quick_model()
    chunk = as_hits([("Tarn", TEXT * 4)], [model.prompt.chunk("Tarn", TEXT * 4)])[0]
    fine, coarse = (EvidenceFinder(Known(), model.prompt, block).find("two cranes", [chunk])[0] for block in (4, 16))
    assert len(fine.meaning) > 3 * len(coarse.meaning)
    assert fine.words[:, 1].any()
    assert coarse.words[:, 1].any()


def test_a_question_without_words_has_evidence_all_the_same() -> None:
    model: DecoderModel = quick_model()
    hit = as_hits([("Tarn", TEXT)], [model.prompt.chunk("Tarn", TEXT)])[0]
    (found,) = EvidenceFinder(Known(), model.prompt, 8).find("?!", [replace(hit, row=3)])
    assert found.words.shape[1] == 0
    assert torch.isfinite(found.meaning).all()


def test_titles_are_looked_for_only_where_links_count() -> None:
    model = quick_model()
    texts = [("Odile Brannock", TEXT), ("Tarn", TEXT + " It was built by Odile Brannock.")]
    hits = as_hits(texts, [model.prompt.chunk(*pair) for pair in texts])
    finder = EvidenceFinder(Known(), model.prompt, 4)
    without = finder.find("Who built it?", hits, ("meaning", "words"))
    assert [(found.named.shape[1], len(found.title)) for found in without] == [(0, 0)] * 2
    assert all("index" not in vars(known.searched) for known in finder._known.values()), "and nothing is made for them"
    linked = finder.find("Who built it?", hits)
    assert linked[1].named.any()
    assert all(torch.equal(one.words, other.words) for one, other in zip(without, linked, strict=True))


def test_what_is_known_of_a_chunk_is_made_once_for_each_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = quick_model(), Known()
    texts = [("Tarn", TEXT * n) for n in (1, 2, 3)]
    hits = as_hits(texts, [model.prompt.chunk(*pair) for pair in texts])
    finder = EvidenceFinder(known, model.prompt, 4)
    first = finder.find("two cranes", hits[:2])
    again = finder.find("two cranes", hits)
    assert known.asked == [2, 1]
    assert all(torch.equal(one.meaning, other.meaning) for one, other in zip(first, again, strict=False))
    known.identity = "another"
    finder.find("two cranes", hits)
    assert known.asked[2:] == [3], "vectors of another embedder are not compared"
    monkeypatch.setattr(evidence, "KNOWN_BYTES", 1)
    finder.find("two cranes", hits[:1])
    finder.find("two cranes", hits[:1])
    assert (known.asked[3:], len(finder._known)) == ([1], 0), "what finds no room is made again"
