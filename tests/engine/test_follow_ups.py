"""A question that refers to an earlier turn is read with the name that it means, where the model quotes spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.types import AskOptions, Document
from tests.start_records import with_records

TURN = ("Who built the harbour of Tarn?", "Ada Brook")
TEXT = "The harbour of Tarn was built in 1889 by Ada Brook. Ada Brook was born in Lindmouth."


@pytest.fixture
def engine(model: DecoderModel, tmp_path: Path) -> Iterator[Engine]:
    before = model.profile
    with Engine.open(Settings(data=with_records(tmp_path), device="cpu")) as engine:
        ingest(engine, Document("tarn", "Tarn", TEXT))
        yield engine
    model.profile = before


def test_a_question_that_comes_with_its_turns_is_read_alone_with_its_name(engine: Engine) -> None:
    request = engine.prefill("Where was she born?", AskOptions(history=(TURN,)))
    assert (request.read, request.sought) == ("Where was Ada Brook born?",) * 2
    assert request.question_tokens == engine.model.prompt.question("Where was Ada Brook born?")
    alone = engine.prefill("Who built the mill?", AskOptions(history=(TURN,)))
    assert alone.question_tokens == engine.model.prompt.question("Who built the mill?", (TURN,))


def test_a_conversation_reads_the_name_and_keeps_the_question(engine: Engine) -> None:
    first = engine.answer(TURN[0], AskOptions(conversation="a"))
    assert first.answer == TURN[1]
    second = engine.answer("Where was she born?", AskOptions(conversation="a"))
    assert (second.question, second.answer) == ("Where was she born?", "Lindmouth")
    turn = engine.catalog.turns("default", "a")[-1]
    assert turn.question == "Where was she born?"
    assert turn.asked == engine.model.prompt.question("Where was Ada Brook born?")


def test_a_model_that_does_more_than_quote_reads_the_question_and_its_turns(engine: Engine) -> None:
    engine.model.profile = replace(engine.model.profile, extractive=False)
    request = engine.prefill("Where was she born?", AskOptions(history=(TURN,)))
    assert request.read == "Where was she born?"
    assert request.question_tokens == engine.model.prompt.question("Where was she born?", (TURN,))
