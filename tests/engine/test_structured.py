"""Answers that follow a JSON schema: which tokens may come next, and what comes of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import pytest
import torch

from ragkv.engine.engine import Engine
from ragkv.engine.generation import Sampling, sample
from ragkv.engine.logits import StepLogits
from ragkv.engine.structured import SCHEMA_CHARACTERS, Grammars, Guide, values_of
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.types import AskOptions
from tests.engine.schemas import SCHEMAS

COLOURS = {"enum": ["red", "reddish", "green", 'a "quoted" blue', None, 12]}
WHO = {
    "type": "object",
    "properties": {"builder": {"type": "string"}, "year": {"type": ["integer", "null"]}},
    "required": ["builder", "year"],
    "additionalProperties": False,
}


class Known(Grammars):
    """Grammars of questions that all have a schema."""

    def guide(self, schema: Mapping[str, Any] | None, most: int) -> Guide:
        guide = super().guide(schema, most)
        assert guide is not None
        return guide


@pytest.fixture(scope="module")
def grammars(model: DecoderModel) -> Known:
    return Known(model)


def test_an_answer_without_a_schema_has_no_guide(model: DecoderModel) -> None:
    assert Grammars(model).guide(None, 64) is None


def decode(guide: Guide, model: DecoderModel, most: int, seed: int, favoured: str = "") -> str:
    """Decode from random logits, which favour tokens of these characters alone."""
    chance, said, size = torch.Generator().manual_seed(seed), list[int](), len(model.tokenizer)
    bonus = torch.zeros(size)
    if favoured:
        bonus = torch.tensor([10.0 * bool(set(model.tokenizer.decode([t])) <= set(favoured)) for t in range(size)])
    while len(said) < most and not guide.complete:
        row = StepLogits(torch.randn(1, size, generator=chance) + bonus).rows()[0]
        token = sample(row, said, Sampling(), chance, guide)
        if token in model.stop_ids:
            break
        said.append(token)
        guide.accept(token)
    return str(model.tokenizer.decode(said))


def test_a_mask_allows_what_a_plain_look_at_all_valid_answers_allows(model: DecoderModel, grammars: Known) -> None:
    """The reference: a token may come next if the text with it begins one of the valid answers."""
    answers = [json.dumps(value, separators=(",", ":")) for value in COLOURS["enum"]]
    texts = [model.tokenizer.decode([token]) for token in range(len(model.tokenizer))]
    branches = 0
    for answer in answers:
        guide, said = grammars.guide(COLOURS, 512), ""
        for token in model.tokenizer.encode(answer, add_special_tokens=False):
            allowed = (guide.masked(torch.zeros(len(texts))) == 0).nonzero().flatten().tolist()
            expected = [t for t, text in enumerate(texts) if text and any(a.startswith(said + text) for a in answers)]
            ends = sorted(model.stop_ids) if said in answers else []
            rests = [answer[len(said) :] for answer in answers if answer.startswith(said)]
            if len({rest[:1] for rest in rests}) == 1 and rests[0]:  # forced: as the tokenizer has it
                assert set(allowed) <= set(expected), said
                assert allowed, said
            else:
                assert allowed == sorted({*expected, *ends}), said
                branches += 1
            guide.accept(token)
            said += texts[token]
    assert branches > 6


@pytest.mark.parametrize(("name", "schema"), SCHEMAS.items(), ids=SCHEMAS)
def test_whatever_the_logits_are_the_answer_follows_the_schema(
    model: DecoderModel, grammars: Known, name: str, schema: Mapping[str, Any]
) -> None:
    for seed in range(2):
        answer = decode(grammars.guide(schema, 256), model, 256, seed)
        jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize("most", [24, 40, 100])
@pytest.mark.parametrize("favoured", ["abcdefghijklmnopqrstuvwxyz", "0123456789", ",", '[{"'])
def test_an_answer_that_would_go_on_is_ended_in_time(
    model: DecoderModel, grammars: Known, favoured: str, most: int
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer"},
            "c": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    jsonschema.validate(json.loads(decode(grammars.guide(schema, most), model, most, 1, favoured)), schema)


def test_what_is_forced_is_what_the_answer_gets(model: DecoderModel, grammars: Known) -> None:
    guide = grammars.guide(WHO, 64)
    forced = guide.forced(64)
    assert model.tokenizer.decode(forced) == '{"builder":"'[: len(model.tokenizer.decode(forced))]
    assert len(forced) > 3
    assert guide.forced(2) == forced[:2]
    assert guide.forced(0) == ()
    for token in forced:
        row = StepLogits(torch.randn(1, len(model.tokenizer))).rows()[0]
        assert sample(row, [], Sampling(temperature=1.0), torch.Generator(), guide) == token
        guide.accept(token)


def test_the_most_likely_token_needs_no_mask_where_it_is_allowed(model: DecoderModel, grammars: Known) -> None:
    guide = grammars.guide({"type": "string"}, 256)
    guide.accept(model.tokenizer.encode('"', add_special_tokens=False)[0])
    letter, newline = (model.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "\n"))
    logits = torch.zeros(2, len(model.tokenizer))
    logits[0, letter] = logits[1, newline] = 5.0
    allowed, refused = StepLogits(logits).rows()
    assert guide.allows(allowed)
    assert not guide.allows(refused), "a line break ends a string of JSON"
    assert sample(refused, [], Sampling(), torch.Generator(), guide) != newline
    assert guide.masked(logits[1])[newline] == -math.inf


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nothing"}, "not understood"),
        ({"$ref": "#/nowhere"}, "not understood"),
        ({"type": "object", "not": {"type": "string"}}, "not understood"),
        ({"description": "x" * SCHEMA_CHARACTERS}, "characters, the limit is"),
    ],
    ids=["unknown type", "lost reference", "unknown keyword", "too long"],
)
def test_a_schema_that_is_not_understood_is_refused(grammars: Known, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        grammars.guide(schema, 64)
    assert grammars.guide(WHO, 64).forced(1), "the next one is"


def letters(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f".*{chr(97 + number)}.*"} for number in range(count)]


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for part in letters(count):
        schema = part | {"anyOf": [schema]}
    return schema


def chained(count: int) -> dict[str, Any]:
    defs = {f"d{n}": part | {"$ref": f"#/$defs/d{n + 1}"} for n, part in enumerate(letters(count))}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs | {f"d{count}": {}}}


@pytest.mark.parametrize("made", [lambda count: {"allOf": letters(count)}, nested, chained], ids=["all", "any", "refs"])
def test_a_schema_that_would_take_minutes_to_understand_is_refused_at_once(
    grammars: Known, made: Callable[[int], dict[str, Any]]
) -> None:
    began = time.thread_time()
    with pytest.raises(InputError, match="a string with 40 patterns, the limit is 8"):
        grammars.guide(made(40), 64)
    assert time.thread_time() - began < 1
    fields = {f"f{number}": part for number, part in enumerate(letters(26))}
    assert grammars.guide({"type": "object", "properties": fields}, 64), "one pattern each is no matter"


def test_a_schema_that_leads_back_to_itself_or_is_very_deep_is_no_trap(grammars: Known) -> None:
    assert grammars.guide(
        {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}, 8
    )
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        deep = {"allOf": [deep]}
    with pytest.raises(InputError):
        grammars.guide(deep, 8)


def test_a_grammar_that_fails_on_its_way_fails_the_answer(grammars: Known, model: DecoderModel) -> None:
    guide = grammars.guide(WHO, 64)
    with pytest.raises(InputError, match="not understood"):
        guide.accept(model.tokenizer.encode("word", add_special_tokens=False)[0])


def test_values_are_what_passages_can_hold() -> None:
    assert values_of('{"a":"Ada Brook","b":[1889,null,true],"c":{"d":"stone"}}') == "Ada Brook 1889 stone"
    assert values_of('"Ada"') == "Ada"
    assert values_of('{"a":"Ada') == '{"a":"Ada', "what is cut is no JSON"


def ask(library: Engine, question: str = "Who designed the Skerrow Light?", **more: Any) -> Any:
    return library.answer(question, AskOptions(**({"answer_schema": WHO} | more)))


def test_a_question_is_answered_by_json_that_cites_its_values(library: Engine) -> None:
    answer = ask(library)
    jsonschema.validate(json.loads(answer.answer), WHO)
    assert answer.report.decoding.ended == "stop"
    assert (answer.report.confidence, answer.report.abstained) == (None, False)
    marked = [
        citation.text[mark.start - citation.start : mark.end - citation.start]
        for citation in answer.citations
        for mark in citation.marks
    ]
    assert all('"' not in words for words in marked)
    drafts = answer.report.decoding.speculation
    assert drafts is None or drafts.drafted == drafts.accepted


def test_drafts_of_what_is_forced_change_no_answer(library: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_drafts = ask(library)
    monkeypatch.setattr(Guide, "forced", lambda self, most: ())
    assert json.loads(ask(library).answer).keys() == json.loads(with_drafts.answer).keys()
    monkeypatch.undo()
    monkeypatch.setattr("ragkv.engine.structured.GrammarDrafter.propose", lambda *_: ())
    without = ask(library)
    assert without.answer == with_drafts.answer
    assert without.report.decoding.steps > with_drafts.report.decoding.steps


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"beginning": "Ada"}, "begins with nothing else"),
        ({"answer_schema": {"type": "nothing"}}, "not understood"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(
    library: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(type(library.retriever), "search", lambda *_: pytest.fail("it was searched"))
    with pytest.raises(InputError, match=words):
        ask(library, **more)


def test_a_structured_answer_is_not_withheld_by_a_confidence_that_it_has_not(grammars: Known) -> None:
    with pytest.raises(InputError, match="no confidence"):
        grammars.limits(AskOptions(answer_schema=WHO, abstain_below=0.5), 64)


def test_a_rule_answers_no_question_that_has_a_schema(library: Engine) -> None:
    answer = ask(library, "List the documents.")
    assert answer.report.rule == ""
    jsonschema.validate(json.loads(answer.answer), WHO)


def test_a_short_limit_is_kept_and_told(library: Engine) -> None:
    answer = ask(library, max_tokens=3)
    assert answer.report.decoding.ended == "length"
    assert answer.report.tokens.generated == 3
