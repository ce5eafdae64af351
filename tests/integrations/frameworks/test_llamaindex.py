"""LlamaIndex's contracts: retrieval, query engines, callbacks and instrumentation, against a running service."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("llama_index.core")
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, QueryBundle
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import FilterCondition, MetadataFilter, MetadataFilters

from ragkv.client import Client, Refused
from ragkv.errors import InputError
from ragkv.integrations.llamaindex import RagkvNodeRetriever, RagkvQueryEngine
from tests.integrations.frameworks.conftest import KEY, QUESTION

pytestmark = [pytest.mark.integrations, pytest.mark.anyio]


def filters(*conditions, condition=FilterCondition.AND):
    made = [MetadataFilter(key=key, operator=operator, value=value) for key, operator, value in conditions]
    return MetadataFilters(filters=made, condition=condition)


def test_nodes_tell_their_place(service):
    (found,) = RagkvNodeRetriever(service.url, top_k=1).retrieve(QUESTION)
    node = found.node
    with Client(service.url, KEY) as client:
        text = client.text("harbour").text
    assert node.text == text[node.start_char_idx : node.end_char_idx]
    assert (node.ref_doc_id, node.metadata["document_id"], node.metadata["title"]) == ("harbour", "harbour", "Tarn")
    assert node.node_id == node.metadata["chunk_id"]
    assert found.score > 0
    assert node.get_content(MetadataMode.LLM) == f"title: Tarn\n\n{node.text}", "a prompt has no ids and scores"


def test_a_bundle_is_a_query(service):
    bundle = QueryBundle(QUESTION)
    assert RagkvNodeRetriever(service.url, top_k=1).retrieve(bundle)[0].node.ref_doc_id == "harbour"
    assert "Brook" in str(RagkvQueryEngine(service.url).query(bundle))


async def test_nodes_are_awaited(service):
    retriever = RagkvNodeRetriever(service.url, top_k=2)
    one, other = await asyncio.gather(retriever.aretrieve(QUESTION), retriever.aretrieve(QUESTION))
    assert [each.node_id for each in one] == [each.node_id for each in other]
    assert [each.node_id for each in one] == [each.node_id for each in retriever.retrieve(QUESTION)]


def test_filters_narrow_searches_and_answers(service):
    year = filters(("year", "==", 1931))
    found = RagkvNodeRetriever(service.url, filters=year).retrieve(QUESTION)
    assert {each.node.ref_doc_id for each in found} == {"bridge", "mill"}
    nested = MetadataFilters(filters=[year, filters(("kind", "in", ["mill", "kiln"]))])
    answer = RagkvQueryEngine(service.url, filters=nested).query("Who built the mill of Orm?")
    assert {each.node.ref_doc_id for each in answer.source_nodes} == {"mill"}
    assert {each.node.ref_doc_id for each in RagkvNodeRetriever(service.url, documents=["kiln"]).retrieve("kiln")} == {
        "kiln"
    }


@pytest.mark.parametrize(
    "wrong",
    [
        filters(("year", ">", 1900)),
        filters(("year", "==", 1931), ("kind", "==", "mill"), condition=FilterCondition.OR),
        filters(("year", "==", 1931), ("year", "==", 1950)),
    ],
)
def test_a_filter_that_ragkv_does_not_have_is_an_error(wrong):
    with pytest.raises(InputError, match="filters of ragkv do not have"):
        RagkvNodeRetriever(filters=wrong)
    with pytest.raises(InputError, match="joined by AND"):
        RagkvQueryEngine(filters=wrong)


def test_a_response_has_sources_and_a_report(service):
    response = RagkvQueryEngine(service.url, top_k=2, method="full").query(QUESTION)
    assert isinstance(response, Response)
    assert "Brook" in response.response
    cited = response.source_nodes[0].node
    mark = cited.metadata["marks"][0]
    assert cited.text[mark["start"] : mark["end"]] in response.response
    assert response.metadata["report"]["method"] == "full"
    assert "harbour" in response.get_formatted_sources()


async def test_a_response_is_awaited(service):
    engine = RagkvQueryEngine(service.url)
    assert (await engine.aquery(QUESTION)).response == engine.query(QUESTION).response


def test_a_response_is_streamed(service):
    response = RagkvQueryEngine(service.url, streaming=True, top_k=1).query(QUESTION)
    assert isinstance(response, StreamingResponse)
    assert [each.node.ref_doc_id for each in response.source_nodes] == ["harbour"], "known before the first piece"
    pieces = list(response.response_gen)
    assert len(pieces) > 1
    assert "".join(pieces).strip() == RagkvQueryEngine(service.url, top_k=1).query(QUESTION).response
    assert response.source_nodes[0].node.metadata["marks"]
    assert response.metadata["report"]["tokens"]["generated"] > 1


def test_an_asynchronous_response_is_streamed_in_every_loop(service):
    engine = RagkvQueryEngine(service.url, streaming=True, top_k=1)

    async def asked():
        response = await engine.aquery(QUESTION)
        assert isinstance(response, AsyncStreamingResponse)
        pieces = [piece async for piece in response.async_response_gen()]
        return response, pieces

    for _ in range(2):
        response, pieces = asyncio.run(asked())
        assert len(pieces) > 1
        assert "Brook" in "".join(pieces)
        assert response.metadata["report"]["cache"]["chunks"] == 1


def test_refusals_reach_the_caller(service):
    with pytest.raises(Refused, match="has no documents"):
        RagkvNodeRetriever(service.url, collection="none").retrieve(QUESTION)
    with pytest.raises(Refused, match="method"):
        RagkvQueryEngine(service.url, streaming=True, method="guess").query(QUESTION)
    with pytest.raises(Refused) as refused:
        RagkvQueryEngine(service.url, api_key="wrong").query(QUESTION)
    assert refused.value.status == 401


class Heard(BaseEventHandler):
    """The names of all events of LlamaIndex's instrumentation."""

    names: list[str]

    def handle(self, event, **_):
        self.names.append(type(event).__name__)


def test_callbacks_and_instrumentation_hear_of_it(service):
    debug, heard, dispatcher = LlamaDebugHandler(print_trace_on_end=False), Heard(names=[]), get_dispatcher()
    callbacks = CallbackManager([debug])
    dispatcher.add_event_handler(heard)
    try:
        nodes = RagkvNodeRetriever(service.url, callback_manager=callbacks).retrieve(QUESTION)
        response = RagkvQueryEngine(service.url, callback_manager=callbacks).query(QUESTION)
    finally:
        dispatcher.event_handlers.remove(heard)
    (retrieved,) = debug.get_event_pairs(CBEventType.RETRIEVE)
    (asked,) = debug.get_event_pairs(CBEventType.QUERY)
    assert retrieved[1].payload["nodes"] == nodes
    assert asked[1].payload["response"] is response
    assert heard.names == ["RetrievalStartEvent", "RetrievalEndEvent", "QueryStartEvent", "QueryEndEvent"]


def test_they_work_in_llamaindex_own_engines_and_tools(service):
    engine = RetrieverQueryEngine.from_args(RagkvNodeRetriever(service.url, top_k=1), llm=MockLLM())
    assert "harbour of Tarn" in str(engine.query(QUESTION)), "the mock repeats the prompt with the passage"
    tool = QueryEngineTool.from_defaults(RagkvQueryEngine(service.url), name="notes", description="Asks the notes.")
    assert "Brook" in tool.call(QUESTION).content
