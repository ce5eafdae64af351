"""Chunks fit, are even, end where the text pauses, and together hold the whole text."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ragkv.errors import ConfigError, InvalidDocument
from ragkv.ingest import chunker as chunk_module
from ragkv.ingest.chunker import LEAST_ROOM, split, split_steps
from ragkv.ingest.progress import IngestStep
from ragkv.types import Chunk, Document

SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400)
PROSE = st.lists(
    st.sampled_from(
        [
            "The boat sailed. ",
            "It rained! ",
            "word ",
            "\n\n",
            "\n",
            "# Head\n",
            "x" * 90,
            "👩‍👩‍👧",
            "你好。",
            "- item\n",
        ]
    ),
    min_size=1,
    max_size=120,
).map("".join)


class DemoPrompt:
    """The bundled model's tokenizer and wrapper."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        piece = f"Document: {title}\n{text}\n"
        return tuple(self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"])


@pytest.fixture(scope="module")
def prompt(tiny_folder: Path) -> DemoPrompt:
    from transformers import AutoTokenizer

    return DemoPrompt(AutoTokenizer.from_pretrained(tiny_folder))


def squeezed(text: str) -> str:
    return "".join(text.split())


def check(document: Document, chunks: list[Chunk], prompt: DemoPrompt, limit: int) -> None:
    assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.id for chunk in chunks] == [f"{document.id}#{n}" for n in range(len(chunks))]
    for chunk in chunks:
        assert chunk.tokens == prompt.chunk(chunk.title, chunk.text)
        assert len(chunk.tokens) <= limit
        assert chunk.text == chunk.text.strip() != ""
        assert chunk.document_id == document.id
    assert squeezed("".join(chunk.text for chunk in chunks)) == squeezed(document.text)


@SLOW
@given(st.one_of(TEXT, PROSE), TEXT, st.integers(40, 300), st.sampled_from(["a.txt", "a.md"]))
def test_chunks_fit_and_lose_nothing(prompt: DemoPrompt, text: str, title: str, limit: int, name: str) -> None:
    assume(text.strip())
    document = Document(name, title, text)
    check(document, split(document, prompt, limit), prompt, limit)


@SLOW
@given(PROSE.map(lambda text: text * 5), st.integers(20, 200))
def test_sections_do_not_change_the_text(prompt: DemoPrompt, text: str, section: int) -> None:
    assume(text.strip())
    document = Document("a.txt", "Title", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_module, "SECTION", section)
        check(document, split(document, prompt, 60), prompt, 60)


def sentences(count: int) -> str:
    return " ".join(
        f"The {n} boat of the northern fleet left the harbour in the year {1800 + n}." for n in range(count)
    )


def test_a_text_that_fits_stays_one_chunk(prompt: DemoPrompt) -> None:
    (chunk,) = split(Document("a.txt", "Boats", sentences(5)), prompt, 256)
    assert (chunk.title, chunk.text) == ("Boats", sentences(5))


@pytest.mark.parametrize("count", [12, 14, 20, 23, 41, 100])
def test_chunks_are_even_and_end_with_sentences(prompt: DemoPrompt, count: int) -> None:
    chunks = split(Document("a.txt", "Boats", sentences(count)), prompt, 256)
    sizes = [len(chunk.tokens) for chunk in chunks]
    assert len(sizes) > 1
    assert min(sizes) > 0.7 * max(sizes)
    assert max(sizes) > 0.5 * 256
    assert all(chunk.text.endswith(".") for chunk in chunks)


def test_a_chunk_ends_at_a_paragraph_rather_than_a_sentence(prompt: DemoPrompt) -> None:
    text = "\n\n".join(sentences(count) for count in (4, 3, 5, 4, 3, 4, 5, 4))
    chunks = split(Document("a.txt", "Boats", text), prompt, 256)
    assert len(chunks) > 2
    assert "\n\n".join(chunk.text for chunk in chunks) == text


@pytest.mark.parametrize("name", ["a.md", "a.txt"])
def test_a_heading_stays_with_the_text_under_it(prompt: DemoPrompt, name: str) -> None:
    text = "\n\n".join(f"## Part {n}\n\n{sentences(7)}" for n in range(12))
    chunks = split(Document(name, "Boats", text), prompt, 200)
    assert len(chunks) > 10
    assert not [chunk.text for chunk in chunks if chunk.text.splitlines()[-1].startswith("#")]


def test_markdown_is_detected_by_name_or_format(prompt: DemoPrompt) -> None:
    text = "\n".join(f"| row {n} | {n * 37} |" for n in range(80))
    table = "| a | b |\n|---|---|\n" + text
    ways = [("a.md", {}), ("a", {"format": "markdown"})]
    first, second = ([c.text for c in split(Document(name, "T", table, data), prompt, 150)] for name, data in ways)
    assert first == second
    assert all(line.count("|") == 3 for text in first for line in text.splitlines())


def test_a_long_title_is_shortened_and_leaves_room(prompt: DemoPrompt) -> None:
    document = Document("a.txt", "A very long title " * 50, sentences(30))
    chunks = split(document, prompt, 128)
    check(document, chunks, prompt, 128)
    title = chunks[0].title
    assert title.endswith("…")
    assert title.removesuffix("…") in document.title
    assert len(prompt.chunk(title, "")) < 0.35 * 128
    assert {chunk.title for chunk in chunks} == {title}


def test_a_title_is_one_line(prompt: DemoPrompt) -> None:
    (chunk,) = split(Document("a.txt", " A\ntitle\twith  space ", "text"), prompt, 64)
    assert chunk.title == "A title with space"
    (chunk,) = split(Document("a.txt", "", "text"), prompt, 64)
    assert chunk.title == "a.txt"


def test_too_small_a_chunk_size_is_a_config_error(prompt: DemoPrompt) -> None:
    with pytest.raises(ConfigError, match=f"{LEAST_ROOM} are needed"):
        split(Document("a.txt", "T", "text"), prompt, len(prompt.chunk("T", "")) + LEAST_ROOM - 1)


def test_white_space_alone_is_no_document(prompt: DemoPrompt) -> None:
    with pytest.raises(InvalidDocument, match="empty"):
        split(Document("a.txt", "T", " \n\u2003\n"), prompt, 64)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 60_000,
        "a b " * 15_000,
        "\n" * 60_000 + "end",
        "> " * 30_000,
        "👩‍👩‍👧" * 8_000,
        "好" * 20_000,
        "[" * 60_000,
    ],
    ids=["no spaces", "no sentences", "line ends", "quotes", "emoji", "no pauses", "brackets"],
)
@pytest.mark.timeout(600)
def test_hostile_texts_take_a_bounded_time(prompt: DemoPrompt, text: str) -> None:
    document = Document("a.md", "T", text)
    check(document, split(document, prompt, 256), prompt, 256)


HOSTILE = {
    "runs of spaces": " " * 1000 + "7\n",
    "shorter runs of spaces": " " * 63 + "7\n",
    "line ends": "\n" * 900 + "x",
    "no spaces": "x",
    "no sentences": "a b ",
    "no pauses": "好",
    "pauses that end no sentence": "好" * 30 + ".a",
    "closing brackets": "]",
    "marks": "#",
    "headings": "# a\n",
    "combining characters": "\u0301",
    "joined emoji": "👩\u200d",
    "letters that are words": "ﷺ",
    "quotes": "> ",
    "table rows": "|a|\n",
}


def steps_of(prompt: DemoPrompt, name: str, text: str) -> tuple[float, float]:
    """Return the processor time of a split, and that of its longest step."""
    steps, durations = split_steps(Document(name, "T", text), prompt, 256), list[float]()
    going = True
    while going:
        start = time.thread_time()
        going = next(steps, None) is not None
        durations.append(time.thread_time() - start)
    return sum(durations), max(durations)


MARKED = ("line ends", "headings", "marks", "quotes", "table rows")


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "a.txt") for kind in HOSTILE), *((kind, "a.md") for kind in MARKED)]
)
def test_the_time_grows_with_the_text_and_no_step_does(prompt: DemoPrompt, kind: str, name: str) -> None:
    part = HOSTILE[kind]
    small, large = (f"{part * (size // len(part))} end" for size in (9_000, 36_000))
    (took, _), (longer, longest) = steps_of(prompt, name, small), steps_of(prompt, name, large)
    assert longer < 1.0 or longer < 10 * took
    assert longest < 0.5, "what lies between two steps keeps questions waiting"


def test_packing_and_locating_pause_between_chunks(prompt: DemoPrompt) -> None:
    steps = split_steps(Document("a.md", "T", "# Part\n\nThe boat sailed.\n\n" * 1000), prompt, 64)
    counted: list[int] = []
    chunks: list[Chunk] | None = None
    while chunks is None:
        try:
            step = next(steps)
        except StopIteration as end:
            chunks = end.value
        else:
            counted.append(step.done)
    assert len(counted) > 2 * len(chunks)


def test_a_long_title_is_not_tokenised_whole(prompt: DemoPrompt) -> None:
    lengths = []

    class Recording(DemoPrompt):
        def chunk(self, title: str, text: str) -> tuple[int, ...]:
            lengths.append(len(title))
            return super().chunk(title, text)

    split(Document("a.txt", "A title " * 100_000, "text"), Recording(prompt.tokenizer), 128)
    assert max(lengths) <= chunk_module.TITLE_CHARS


def test_ordinary_documents_are_cut_as_ever(prompt: DemoPrompt, root: Path) -> None:
    """Other texts would be other chunks, whose KV is not stored. The digests were taken before time was linear."""
    pages = sorted((root / "ragkv" / "samples").glob("*.md"))
    texts = {path.name: path.read_text("utf-8") for path in pages}
    prose = " ".join(" ".join(texts.values()).split())
    cut = {
        f"{name} {limit}": [chunk.text for chunk in split(Document(name, "Title", text), prompt, limit)]
        for limit in (64, 256)
        for name, text in {**texts, "prose.txt": prose, "all.txt": "\n\n".join(texts.values())}.items()
    }
    digest = hashlib.sha256(json.dumps(cut, ensure_ascii=False).encode()).hexdigest()
    assert digest == "63ed3f092a1687bc93630e0fc8d810393780766636672f7cee18e53faaafa94a"


def test_progress_counts_characters_to_the_end(prompt: DemoPrompt) -> None:
    text = sentences(1500)
    steps = list(split_steps(Document("a.txt", "T", text), prompt, 256))
    assert len(steps) > 2
    assert steps == sorted(steps)
    assert steps[-1] == IngestStep("split", len(text), len(text))


def test_token_ids_are_shared_between_chunks(prompt: DemoPrompt) -> None:
    chunks = split(Document("a.txt", "T", sentences(60)), prompt, 128)
    large = [token for chunk in chunks for token in chunk.tokens if token > 256]
    assert len({id(token) for token in large}) == len(set(large))
