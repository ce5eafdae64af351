"""Haystack's contract of components: pipelines, serialisation, asynchronous runs and streaming."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("haystack")
from haystack import Document, GeneratedAnswer, Pipeline
from haystack.components.joiners import DocumentJoiner
from haystack.core.component import Component
from haystack.core.errors import DeserializationError
from haystack.core.serialization import component_from_dict, component_to_dict
from haystack.utils import Secret

from ragkv.client import Client, Refused
from ragkv.errors import InputError
from ragkv.integrations.haystack import RagkvGenerator, RagkvPassageRetriever
from tests.integrations.frameworks.conftest import KEY, QUESTION

pytestmark = [pytest.mark.integrations, pytest.mark.anyio]


def streamed_to(chunk):
    """A callback that can be saved, because it has a name."""
    STREAMED.append(chunk)


STREAMED: list = []


def at(key, operator, value):
    return {"field": f"meta.{key}", "operator": operator, "value": value}


def test_they_are_components(service):
    assert isinstance(RagkvPassageRetriever(), Component)
    assert isinstance(RagkvGenerator(), Component)


def test_documents_tell_their_place(service):
    (found,) = RagkvPassageRetriever(service.url, top_k=1).run(QUESTION)["documents"]
    with Client(service.url, KEY) as client:
        text = client.text("harbour").text
    assert isinstance(found, Document)
    assert found.content == text[found.meta["start"] : found.meta["end"]]
    assert (found.meta["document_id"], found.meta["title"]) == ("harbour", "Tarn")
    assert found.id == found.meta["chunk_id"]
    assert found.score > 0
    assert Document.from_dict(found.to_dict()) == found


def test_filters_narrow_searches_and_answers(service):
    retriever = RagkvPassageRetriever(service.url, filters=at("year", "==", 1931))
    assert {each.meta["document_id"] for each in retriever.run(QUESTION)["documents"]} == {"bridge", "mill"}
    both = {"operator": "AND", "conditions": [at("year", "==", 1931), at("kind", "in", ["mill", "kiln"])]}
    assert [each.meta["document_id"] for each in retriever.run(QUESTION, filters=both)["documents"]] == ["mill"]
    answered = RagkvGenerator(service.url, filters=both).run("Who built the mill of Orm?")
    assert {each.meta["document_id"] for each in answered["documents"]} == {"mill"}


@pytest.mark.parametrize(
    "wrong",
    [
        at("year", ">", 1900),
        {"operator": "OR", "conditions": [at("year", "==", 1931), at("kind", "==", "mill")]},
        {"operator": "AND", "conditions": [at("year", "==", 1931), at("year", "==", 1950)]},
        {"year": 1931},
    ],
)
def test_a_filter_that_ragkv_does_not_have_is_an_error(wrong):
    with pytest.raises(InputError, match="joined by AND"):
        RagkvPassageRetriever().run(QUESTION, filters=wrong)
    with pytest.raises(InputError, match="filters of ragkv do not have"):
        RagkvGenerator(filters=wrong).run(QUESTION)


def test_an_answer_has_documents_and_a_report(service):
    output = RagkvGenerator(service.url, top_k=2, method="full").run(QUESTION)
    (answer,) = output["answers"]
    assert isinstance(answer, GeneratedAnswer)
    assert (answer.query, answer.documents) == (QUESTION, output["documents"])
    assert "Brook" in answer.data
    cited = answer.documents[0]
    mark = cited.meta["marks"][0]
    assert cited.content[mark["start"] : mark["end"]] in answer.data
    assert answer.meta["report"]["method"] == "full"
    assert GeneratedAnswer.from_dict(answer.to_dict()) == answer


def test_a_run_may_name_its_own_options(service):
    generator = RagkvGenerator(service.url, top_k=4)
    first = generator.run(QUESTION, top_k=1, conversation_id="haystack")["answers"][0]
    second = generator.run("When was it built?", top_k=1, conversation_id="haystack")["answers"][0]
    assert len(first.documents) == 1
    assert second.meta["report"]["tokens"]["history"] > 0


def test_an_answer_is_streamed(service):
    chunks = []
    output = RagkvGenerator(service.url, top_k=1).run(QUESTION, streaming_callback=chunks.append)
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks).strip() == output["answers"][0].data
    assert [chunk.start for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
    assert chunks[-1].finish_reason in ("stop", "length")
    assert chunks[0].component_info.type.endswith("haystack.RagkvGenerator")


async def test_runs_are_awaited_and_streamed(service):
    heard = []

    async def hear(chunk):
        heard.append(chunk.content)

    generator = RagkvGenerator(service.url, top_k=1)
    retriever = RagkvPassageRetriever(service.url, top_k=2)
    plain, streamed, found = await asyncio.gather(
        generator.run_async(QUESTION),
        generator.run_async(QUESTION, streaming_callback=hear),
        retriever.run_async(QUESTION),
    )
    assert plain["answers"][0].data == streamed["answers"][0].data == "".join(heard).strip()
    assert [each.id for each in found["documents"]] == [each.id for each in retriever.run(QUESTION)["documents"]]


def test_a_coroutine_is_no_callback_of_a_synchronous_run(service):
    async def hear(chunk):
        pass

    with pytest.raises(ValueError, match="coroutine"):
        RagkvGenerator(service.url).run(QUESTION, streaming_callback=hear)


def pipeline(service):
    made = Pipeline()
    made.add_component("retriever", RagkvPassageRetriever(service.url, top_k=1, filters=at("year", "==", 1889)))
    made.add_component("more", RagkvPassageRetriever(service.url, collection="books", top_k=1))
    made.add_component("joiner", DocumentJoiner())
    made.add_component("answerer", RagkvGenerator(service.url, top_k=1, streaming_callback=streamed_to))
    made.connect("retriever.documents", "joiner.documents")
    made.connect("more.documents", "joiner.documents")
    return made


ASKED = {name: {"query": QUESTION} for name in ("retriever", "more", "answerer")}


def check(output):
    assert {each.meta["document_id"] for each in output["joiner"]["documents"]} == {"harbour", "lights.md"}
    assert "Brook" in output["answerer"]["answers"][0].data


def test_a_pipeline_runs_is_saved_and_loaded(service):
    made = pipeline(service)
    check(made.run(ASKED))
    saved = made.dumps()
    assert KEY not in saved
    assert "RAGKV_KEY" in saved
    with pytest.raises(DeserializationError, match="allowlist"):
        Pipeline.loads(saved)
    loaded = Pipeline.loads(saved, allowed_modules=["ragkv.integrations.*", "tests.*"])
    assert loaded.to_dict()["components"] == made.to_dict()["components"]
    STREAMED.clear()
    check(loaded.run(ASKED))
    assert STREAMED, "the callback was loaded"
    loaded.close()
    check(loaded.run(ASKED))


def test_an_asynchronous_pipeline_runs_in_every_loop(service):
    made = pipeline(service)
    for _ in range(2):
        check(asyncio.run(made.run_async(ASKED)))


def test_a_pipeline_streams_its_answer(service):
    async def streamed():
        made = Pipeline()
        made.add_component("answerer", RagkvGenerator(service.url, top_k=1))
        handle = made.stream({"answerer": {"query": QUESTION}})
        return [chunk.content async for chunk in handle], handle.result["answerer"]["answers"][0].data

    pieces, answer = asyncio.run(streamed())
    assert len(pieces) > 1
    assert "".join(pieces).strip() == answer


def test_a_component_is_the_same_after_a_round_trip(service, monkeypatch):
    secret = Secret.from_env_var("ANOTHER_KEY", strict=False)
    monkeypatch.setenv("HAYSTACK_DESERIALIZATION_ALLOWLIST", "tests.*")
    for made in (
        RagkvPassageRetriever(service.url, secret, "books", 3, at("year", "==", 1), 5.0, 1),
        RagkvGenerator(service.url, secret, at("year", "in", [1, 2]), streamed_to, 5.0, 1, method="full", top_k=3),
    ):
        written = component_to_dict(made, "it")
        assert component_to_dict(component_from_dict(type(made), written, "it"), "it") == written
    with pytest.raises(ValueError, match="token"):
        RagkvPassageRetriever(service.url, Secret.from_token("secret")).to_dict()


def test_refusals_reach_the_caller(service):
    with pytest.raises(Refused) as refused:
        RagkvPassageRetriever(service.url, Secret.from_token("wrong")).run(QUESTION)
    assert refused.value.status == 401
    with pytest.raises(Refused, match="method"):
        RagkvGenerator(service.url, method="guess").run(QUESTION, streaming_callback=streamed_to)
