"""Which part of an answer may be shown while it is decoded: only what no later token takes back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ragkv.engine.decoding import decode_step
from ragkv.engine.detokenizer import StopChecker
from ragkv.engine.engine import Engine
from ragkv.types import AskOptions
from tests.libraries import ANSWER, QUESTION

LETTERS = st.text(alphabet="ab \n\té€🦆\u00a0\ufffd", max_size=14)
STOPS = st.lists(st.text(alphabet="ab \né🦆", min_size=1, max_size=4), max_size=3)


@given(LETTERS, STOPS)
@example("Ada \n Brook\n\nEnd", ["\n\nEnd"])
@example("a €", ["€b"])
@example("a 🦆 b", [])
def test_what_was_shown_is_how_the_answer_begins(text: str, stop: list[str]) -> None:
    data = text.encode()
    shown = ""
    for size in range(len(data) + 1):  # a token may be a piece of a character
        said, stopped = StopChecker(stop).cut(data[:size].decode(errors="replace"))
        if stopped:
            final = said.strip()
            break
        now = StopChecker(stop).stable_text(said)
        assert now.startswith(shown)
        shown = now
    else:
        final = text.strip()
    assert final.startswith(shown)


@given(st.text(alphabet="ab", max_size=10))
def test_nothing_is_held_back_without_a_reason(text: str) -> None:
    assert StopChecker(()).stable_text(text) == text
    assert StopChecker(("c", "cab")).stable_text(text) == text


def test_half_a_character_white_space_and_the_start_of_a_stop_string_wait() -> None:
    assert StopChecker(()).stable_text("Ada\ufffd") == "Ada"
    assert StopChecker(()).stable_text(" Ada \ufffd ") == "Ada"
    assert StopChecker(("\nQuestion",)).stable_text("Ada\nQues") == "Ada"
    assert StopChecker(("Brooklyn", "ok!")).stable_text("Ada Brook") == "Ada"
    assert StopChecker(()).stable_text("Ada\ufffdBrook") == "Ada\ufffdBrook"


def test_a_speech_knows_what_is_sure_and_how_it_ended(library: Engine) -> None:
    begun = library.prefill(QUESTION)
    seen = []
    while begun.sequence.sample(library.model.stop_ids) is not None:
        seen.append(begun.detokenizer.stable_text())
        if begun.sequence.finished:
            break
        decode_step(library.model, [begun.sequence])
    answer = library.finalize(begun)
    assert answer.answer == ANSWER
    assert all(ANSWER.startswith(text) for text in seen)
    assert len(set(seen)) > 1
    assert answer.report.decoding.ended == "stop"
    assert library.answer(QUESTION, AskOptions(max_tokens=1)).report.decoding.ended == "length"


def test_a_seed_decides_what_is_drawn(library: Engine) -> None:
    def drawn(seed: int) -> str:
        return library.answer(QUESTION, AskOptions(temperature=3.0, max_tokens=6, seed=seed, top_k=1)).answer

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1
