"""Segments: outputs of tokens pooled over the bytes of a text, kept as int8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.passages import byte_offsets
from ragkv.retrieval import Embedder
from ragkv.retrieval.segments import WINDOW_BYTES, embed_windows, pool_tokens, quantise, segment_count
from ragkv.types import SEGMENT_BYTES
from tests.ingest.reader import WordEmbedder


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_offsets_count_the_bytes_before_each_character(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert byte_offsets(text).tolist() == [len(text[:end].encode()) for end in range(len(text) + 1)]


def test_each_token_counts_in_the_segment_that_it_begins_in() -> None:
    outputs = np.eye(4, 6, dtype=np.float32)
    starts = np.array([0, SEGMENT_BYTES - 1, SEGMENT_BYTES, -1])
    found = pool_tokens(outputs, starts, 2 * SEGMENT_BYTES + 1, np.full(6, 0.5, np.float32))
    assert found.tolist() == [[127, 127, 0, 0, 0, 0], [0, 0, 127, 0, 0, 0], [127] * 6], "the last one has no token"


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=16).filter(lambda row: max(map(abs, row)) > 1e-3))
@settings(max_examples=100, deadline=None)
def test_int8_keeps_the_direction(row: list[float]) -> None:
    vector = np.array(row, np.float32)
    kept = quantise(vector[None])[0].astype(np.float64)
    assert kept @ vector / np.linalg.norm(kept) / np.linalg.norm(vector) > 0.99


def test_windows_stand_for_their_segments_where_an_embedder_gives_no_tokens() -> None:
    text = "harbour " * 20 + "crane " * 40 + "é"
    (found,) = embed_windows(WordEmbedder().encode, [("Tarn", text)])
    assert len(found) == segment_count(len(text.encode()))
    per_window = WINDOW_BYTES // SEGMENT_BYTES
    assert (found[:per_window] == found[0]).all()
    assert (found[per_window] != found[0]).any()
    (empty,) = embed_windows(WordEmbedder().encode, [("Tarn", "")])
    assert len(empty) == 1


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


PASSAGES = [
    ("Tarn", "The harbour was built in 1889. " * 3 + "A crane lifts granite from the quarry. " * 40),
    ("Ålesund", "Größe und Gewicht. " * 9),
    ("", ""),
]


def test_a_passage_has_the_same_vector_with_its_segments_as_alone(embedder: Embedder) -> None:
    read = embedder.encode_passages(PASSAGES)
    alone = embedder.encode([f"{title}\n{text}" for title, text in PASSAGES])
    np.testing.assert_allclose(read.vectors, alone, atol=2e-3)
    assert [len(each) for each in read.segments] == [segment_count(len(text.encode())) for _, text in PASSAGES]
    assert read.part(1, 3).segments[0] is read.segments[1]
    assert embedder.encode_passages([]).segments == ()


def test_what_looks_the_same_is_embedded_the_same_and_segments_keep_their_places(embedder: Embedder) -> None:
    seen = "The warehouse is in the office. " * 4 + "A café lies behind it."
    hidden = "The ware\xadhouse is in the o\ufb03ce. " * 4 + "A cafe\u0301 lies be\u200bhind it."
    read, same = embedder.encode_passages([("The o\ufb03ce", hidden)]), embedder.encode(["The office\n" + seen])
    np.testing.assert_allclose(read.vectors, same, atol=2e-3)
    np.testing.assert_allclose(embedder.encode_queries([hidden]), embedder.encode_queries([seen]))
    assert len(read.segments[0]) == segment_count(len(hidden.encode()))
    cafe = read.segments[0] @ embedder.encode_queries(["What lies behind the warehouse? A café"])[0]
    assert cafe.argmax() == len(hidden[: hidden.index("cafe")].encode()) // SEGMENT_BYTES


def test_a_segment_is_nearest_to_what_stands_in_it(embedder: Embedder) -> None:
    """Also behind the first window, where a text is longer than the model reads at once."""
    (segments,) = embedder.encode_passages(PASSAGES[:1]).segments
    rows = segments / np.linalg.norm(segments.astype(np.float32), axis=1, keepdims=True)
    harbour, crane = (
        rows @ embedder.encode_queries([question])[0]
        for question in ("When was the harbour built?", "What does the crane lift?")
    )
    assert harbour[0] > harbour[5:].max() + 0.1
    assert crane[-5:].min() > crane[0] + 0.1, "no mean of the whole passage"
