"""Log probabilities of an answer's tokens: the model's own, however the tokens were chosen and decoded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ragkv.engine import speculation
from ragkv.engine.decoding import generate
from ragkv.engine.drafting import Drafter, DraftParams
from ragkv.engine.engine import Engine
from ragkv.engine.logits import MOST_LIKELY, StepLogits
from ragkv.engine.loop import ServingLoop
from ragkv.engine.request import AnswerListener, Request
from ragkv.engine.token_scores import LEAST, AnswerScores, TokenScore
from ragkv.ingest.pipeline import ingest
from ragkv.types import AskOptions, Document
from tests.quick import quick_engine, quick_model
from tests.tiny import weights

QUESTION = "Who built the harbour?"
SCHEMA = {
    "type": "object",
    "properties": {"builder": {"type": "string", "maxLength": 12}, "year": {"type": "integer"}},
    "required": ["builder", "year"],
    "additionalProperties": False,
}
CHOSEN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "top_p": 0.8, "seed": 3},
    "penalised": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    "schema": {"answer_schema": SCHEMA},
    "schema, sampled": {"answer_schema": SCHEMA, "temperature": 1.0, "seed": 1},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with quick_engine(tmp_path_factory.mktemp("scores"), max_tokens=40) as opened:
        for name in ("harbour", "bridge"):
            ingest(opened, Document(name, name.title(), f"The {name} of Tarn was built in 1889 by Ada {name.title()}."))
        yield opened


def decoded(engine: Engine, **options: Any) -> tuple[Request, Sequence[TokenScore]]:
    """One answer, with the scores of all its tokens."""
    request = engine.prefill(QUESTION, AskOptions(**{"method": "full", "top_log_probabilities": 5} | options))
    list(generate(engine.model, request.sequence))
    return request, request.detokenizer.scores_of(request.detokenizer.text)


def expected(engine: Engine, request: Request) -> list[tuple[float, list[tuple[int, float]]]]:
    """The reference: transformers' own forward of the whole prompt with the answer, and a softmax."""
    own = weights(layers=2, vocabulary=len(engine.model.tokenizer), max_positions=4096, seed=len("quick"))
    chunks = [token for hit in request.session.hits for token in hit.chunk.tokens]
    said = request.sequence.tokens
    prompt = [*engine.prefiller.prefix_tokens, *chunks, *request.question_tokens]
    with torch.no_grad():
        rows = own(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    best = [row.topk(5) for row in rows]
    return [
        (float(row[token]), list(zip(likely.indices.tolist(), likely.values.tolist(), strict=True)))
        for row, token, likely in zip(rows, said, best, strict=True)
    ]


def assert_expected(engine: Engine, request: Request, scores: Sequence[TokenScore]) -> None:
    text = request.sequence.tokens
    assert len(text) == len(scores) > 8
    tokenizer = quick_model().tokenizer
    for token, score, (log_probability, likely) in zip(text, scores, expected(engine, request), strict=True):
        assert score.text.decode("utf-8", "replace") == tokenizer.decode([token])
        assert score.log_probability == pytest.approx(log_probability, abs=1e-4)
        assert [found.decode("utf-8", "replace") for found, _ in score.likely] == tokenizer.batch_decode(
            [[each] for each, _ in likely]
        )
        assert [value for _, value in score.likely] == pytest.approx([value for _, value in likely], abs=1e-4)


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_they_are_those_of_the_models_own_forward_however_a_token_was_chosen(
    engine: Engine, chosen: dict[str, Any]
) -> None:
    request, scores = decoded(engine, **chosen)
    assert_expected(engine, request, scores)
    if "seed" in chosen:
        assert any(score.likely[0][0] != score.text for score in scores), "not every token is the most likely one"


def test_drafted_tokens_have_theirs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, scores = decoded(engine, speculation=False)
    copied = [token if at % 6 else 3 for at, token in enumerate(plain.sequence.tokens, 1)]  # some are rejected
    eager = DraftParams(shortest=1, first=4, pause=1)
    monkeypatch.setattr(speculation, "Drafter", lambda texts, never: Drafter([copied], never, eager))
    drafted, found = decoded(engine, speculation=True)
    assert isinstance(drafted.sequence.drafter, Drafter)
    assert 0 < drafted.sequence.drafter.accepted < drafted.sequence.drafter.drafted
    assert [score.text for score in found] == [score.text for score in scores]
    assert_expected(engine, drafted, found)


def test_what_a_schema_forces_is_drafted_and_has_the_models_own_opinion(engine: Engine) -> None:
    request, scores = decoded(engine, answer_schema=SCHEMA, speculation=True)
    assert request.sequence.drafter is not None
    assert request.sequence.drafter.accepted
    assert_expected(engine, request, scores)
    assert min(score.log_probability for score in scores) < -5, "a random model says no JSON by itself"


class Listener(AnswerListener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[TokenScore, ...]]] = []
        self.whole: Sequence[TokenScore] | None = None
        self.text = ""

    def said(self, request: Request) -> None:
        text = request.detokenizer.stable_text()
        self.heard.append((text, request.detokenizer.scores_of(text)))

    def scored(self, tokens: Sequence[TokenScore]) -> None:
        assert not self.text, "they come before the answer"
        self.whole = tokens

    def answered(self, answer: Any, *_: Any) -> None:
        self.text = answer.answer


def test_answers_that_are_decoded_together_have_their_own(engine: Engine) -> None:
    wanted = {0: {}, 3: {"temperature": 1.1, "seed": 2}, MOST_LIKELY: {"answer_schema": SCHEMA}}
    alone = {top: decoded(engine, top_log_probabilities=top, **more)[1] for top, more in wanted.items()}
    loop, listeners = ServingLoop(engine), {top: Listener() for top in (*wanted, None)}
    for top, listener in listeners.items():
        options = AskOptions(method="full", top_log_probabilities=top, **wanted.get(top, {}))  # type: ignore[arg-type]
        loop.start(Request(QUESTION, options, listener))
    while loop.count:
        loop.step()
    assert listeners.pop(None).whole == (), "nobody asked"  # type: ignore[call-overload]
    for top, listener in listeners.items():
        assert listener.whole is not None
        assert [score.text for score in listener.whole] == [score.text for score in alone[top]]
        assert {len(score.likely) for score in listener.whole} == {top}
        for score, other in zip(listener.whole, alone[top], strict=True):
            assert score.log_probability == pytest.approx(other.log_probability, abs=1e-4)


def test_a_stream_hears_of_each_token_once_its_text_stands_and_at_the_end_of_all(engine: Engine) -> None:
    loop, listener = ServingLoop(engine), Listener()
    loop.start(Request(QUESTION, AskOptions(method="full", top_log_probabilities=1), listener))
    while loop.count:
        loop.step()
    assert len(listener.heard) > 8
    assert listener.whole
    for text, scores in listener.heard:
        assert list(scores) == list(listener.whole)[: len(scores)]
        said = [score.text for score in scores]
        assert text in b"".join(said).decode("utf-8", "replace"), "the tokens of the text are there"
        assert not text or text not in b"".join(said[:-1]).decode("utf-8", "replace"), "and no more"


class Decoded:
    """A sequence that has said these tokens, each the number of a text."""

    def __init__(self, *tokens: int):
        self.tokens = list(tokens)

    def scores(self, start: int) -> list[tuple[float, list[tuple[int, float]]]]:
        scored = [(-float(token), [(token, -float(token))]) for token in self.tokens[start:]]
        return [*scored, (-math.inf, [(0, -math.inf)])]  # of the stop token


class Texts:
    """Bytes of the tokens."""

    PIECES = (b" ", b"Ada", b" Bro", b"ok", b".\n", b"\xf0\x9f", b"\x99\x82")

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.PIECES[token] for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "text", "made_of"),
    [
        ([1, 2, 3], "Ada Brook", [1, 2, 3]),
        ([0, 1, 2, 3, 0], "Ada Brook", [1, 2, 3]),
        ([1, 2, 3, 4], "Ada Brook.", [1, 2, 3, 4]),
        ([1, 2, 3, 4], "Ada Brook", [1, 2, 3]),
        ([1, 2, 3], "Ada B", [1, 2]),
        ([1, 0, 5, 6], "Ada 🙂", [1, 0, 5, 6]),
        ([1, 0, 5], "Ada", [1]),
        ([1, 5, 2, 3], "Ada\ufffd Brook", [1, 5, 2, 3]),
        ([1, 5], "Ada\ufffd", [1, 5]),
        ([1, 2, 3], "", []),
        ([0, 1, 1], "AdaAda", [1, 1]),
        ([0, 1, 3], "renders as something else", [1, 3]),
    ],
)
def test_a_text_is_made_of_the_tokens_that_have_a_part_in_it(tokens: list[int], text: str, made_of: list[int]) -> None:
    scores = AnswerScores(Decoded(*tokens), Texts())  # type: ignore[arg-type]
    assert [-score.log_probability for score in scores.of(text)] == made_of


def test_no_token_is_more_than_certain_and_an_improbable_one_has_a_number_that_json_has() -> None:
    sequence = Decoded(1)
    sequence.scores = lambda start: [(-math.inf, [(2, 1e-7), (3, -math.inf)])]  # type: ignore[method-assign]
    (score,) = AnswerScores(sequence, Texts()).of("Ada")  # type: ignore[arg-type]
    assert (score.log_probability, score.likely) == (LEAST, ((b" Bro", 0.0), (b"ok", LEAST)))


def test_the_most_likely_tokens_of_a_row_are_the_first_of_its_softmax() -> None:
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.9], [5.0, 0.0, 1.0, -2.0]])
    for row, whole in zip(StepLogits(logits).rows(), logits.log_softmax(-1), strict=True):
        found, ids = row.most_likely(3)
        assert ids.tolist() == whole.argsort(descending=True)[:3].tolist()
        torch.testing.assert_close(found, whole[ids])
    assert row.most_likely(MOST_LIKELY)[1].shape == (4,), "there are no more"
