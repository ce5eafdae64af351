"""LangChain's standard suites and ragkv's own promises, against a running service."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest

pytest.importorskip("langchain_tests")
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ragkv.client import Client, Refused, Unreachable
from ragkv.integrations.langchain import ChatRagkv, RagkvAnswers, RagkvRetriever
from tests.integrations.frameworks.conftest import KEY, QUESTION

pytestmark = [pytest.mark.integrations, pytest.mark.anyio]


class TestRetrieverStandard(RetrieversIntegrationTests):
    """The suite of LangChain for retrievers."""

    @pytest.fixture(autouse=True)
    def _at(self, service):
        self.url = service.url

    @property
    def retriever_constructor(self):
        return RagkvRetriever

    @property
    def retriever_constructor_params(self):
        return {"url": self.url}

    @property
    def retriever_query_example(self):
        return QUESTION

    @property
    def num_results_arg_name(self):
        return "top_k"


class _Chat:
    """What ChatRagkv can do, for both suites."""

    @pytest.fixture(autouse=True)
    def _at(self, service):
        self.url, self.name = service.url, service.model

    @property
    def chat_model_class(self):
        return ChatRagkv

    @property
    def chat_model_params(self):
        return {"url": self.url, "api_key": KEY}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False

    @property
    def supports_json_mode(self):
        return False

    @property
    def model_override_value(self):
        return f"{self.name}:full"


class TestChatStandard(_Chat, ChatModelIntegrationTests):
    """The suite of LangChain for chat models."""

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        model = ChatRagkv(**self.chat_model_params)
        if not stream:
            return model.invoke(QUESTION)
        first, *rest = model.stream(QUESTION)
        return sum(rest, first)


class TestChatUnit(_Chat, ChatModelUnitTests):
    """The suite of LangChain for what chat models do without a service."""

    @property
    def standard_chat_model_params(self):
        return {**super().standard_chat_model_params, "api_key": "test"}

    @property
    def chat_model_params(self):
        return {"url": self.url}

    @property
    def init_from_env_params(self):
        return {"RAGKV_KEY": "secret"}, {}, {"api_key": "secret", "url": "http://127.0.0.1:8000"}

    @pytest.mark.xfail(reason='with "all", LangChain loads only the classes that it lists itself', raises=ValueError)
    def test_serdes(self, model, snapshot):
        super().test_serdes(model, lambda name: dumpd(model))


class Recorded(BaseCallbackHandler):
    """What callbacks were told."""

    def __init__(self):
        self.told: list[tuple[str, Any]] = []

    def on_retriever_end(self, documents, **_):
        self.told.append(("retrieved", documents))

    def on_retriever_error(self, error, **_):
        self.told.append(("failed", error))

    def on_llm_new_token(self, token, **_):
        self.told.append(("token", token))

    def on_chain_end(self, outputs, **_):
        self.told.append(("answered", outputs))


def test_documents_tell_their_place(service):
    (found,) = RagkvRetriever(url=service.url, top_k=1).invoke(QUESTION)
    with Client(service.url, KEY) as client:
        text = client.text("harbour").text
    assert isinstance(found, Document)
    metadata = found.metadata
    assert found.page_content == text[metadata["start"] : metadata["end"]]
    assert (metadata["document_id"], metadata["title"], metadata["page"]) == ("harbour", "Tarn", None)
    assert found.id == metadata["chunk_id"]
    assert metadata["score"] > 0
    assert 0 < metadata["similarity"] <= 1


def test_a_heading_is_metadata(service):
    (found,) = RagkvRetriever(url=service.url, collection="books").invoke("Who kept the light?")
    assert found.metadata["heading"] == "Skerrow"


def test_a_search_is_narrowed_by_metadata_and_by_documents(service):
    retriever = RagkvRetriever(url=service.url, filter={"year": 1931})
    assert {each.metadata["document_id"] for each in retriever.invoke(QUESTION)} == {"bridge", "mill"}
    chosen = retriever.invoke(QUESTION, filter={"kind": ["kiln", "mill"], "year": [1950, 1931]})
    assert {each.metadata["document_id"] for each in chosen} == {"kiln", "mill"}
    one = RagkvRetriever(url=service.url, documents=["bridge"])
    assert [each.metadata["document_id"] for each in one.invoke(QUESTION)] == ["bridge"]


def test_callbacks_hear_of_documents_and_of_failures(service):
    heard = Recorded()
    found = RagkvRetriever(url=service.url).invoke(QUESTION, {"callbacks": [heard]})
    assert heard.told == [("retrieved", found)]
    with pytest.raises(Refused, match="has no documents"):
        RagkvRetriever(url=service.url, collection="none").invoke(QUESTION, {"callbacks": [heard]})
    assert heard.told[-1][0] == "failed"


def test_a_wrong_key_and_a_missing_service_are_errors(service):
    with pytest.raises(Refused) as refused:
        RagkvRetriever(url=service.url, api_key="wrong").invoke(QUESTION)
    assert refused.value.status == 401
    with pytest.raises(Refused, match="key"):
        ChatRagkv(url=service.url, api_key="wrong").invoke(QUESTION)
    with pytest.raises(Unreachable):
        RagkvAnswers(url="http://127.0.0.1:1").invoke(QUESTION)


def test_an_unknown_field_is_an_error():
    with pytest.raises(ValueError, match="topk"):
        RagkvRetriever(topk=3)


def test_an_answer_has_citations_and_a_report(service):
    answer = RagkvAnswers(url=service.url, top_k=2, method="full").invoke(QUESTION)
    assert answer["question"] == QUESTION
    assert "Brook" in answer["answer"]
    cited = answer["citations"][0]
    assert cited.metadata["document_id"] == "harbour"
    mark = cited.metadata["marks"][0]
    assert cited.page_content[mark["start"] : mark["end"]] in answer["answer"]
    assert answer["report"]["method"] == "full"


def test_a_stream_adds_up_to_the_answer(service):
    answers = RagkvAnswers(url=service.url, top_k=2)
    parts = list(answers.stream(QUESTION))
    assert len([part for part in parts if "answer" in part]) > 1
    first, *rest = parts
    whole, asked = sum(rest, first), answers.invoke(QUESTION)
    assert {name: whole[name] for name in ("question", "citations")} == {
        name: asked[name] for name in ("question", "citations")
    }
    assert whole["answer"].strip() == asked["answer"]
    assert whole["report"]["tokens"] == asked["report"]["tokens"]


class EndlessHandler(BaseHTTPRequestHandler):
    """A service whose answer has one piece and does not end, until the client hangs up."""

    left: Queue[bytes]

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b'event: token\ndata: {"text": "Ada"}\n\n')
        self.left.put(self.connection.recv(1))

    def log_message(self, format, *args):
        pass


@pytest.fixture
def endless():
    """(url, queue that gets b"" for each client that hung up)."""
    handler = type("Handler", (EndlessHandler,), {"left": Queue()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.left
        server.shutdown()
        thread.join()


def test_who_leaves_a_stream_hangs_up(endless):
    url, left = endless
    parts = RagkvAnswers(url=url).stream(QUESTION)
    assert next(parts) == {"answer": "Ada"}
    parts.close()
    assert left.get(timeout=30) == b""

    async def leave():
        async for part in RagkvAnswers(url=url).astream(QUESTION):
            return part

    assert asyncio.run(leave()) == {"answer": "Ada"}
    assert left.get(timeout=30) == b""


def test_the_asynchronous_answers_are_the_same_in_every_loop(service):
    answers = RagkvAnswers(url=service.url, top_k=2)

    async def asked():
        one, many = await answers.ainvoke(QUESTION), await answers.abatch([QUESTION, "Who built the mill of Orm?"])
        return one, many, [part async for part in answers.astream(QUESTION)]

    for _ in range(2):
        one, many, parts = asyncio.run(asked())
        assert one["answer"] == many[0]["answer"] == answers.invoke(QUESTION)["answer"]
        assert "Falk" in many[1]["answer"]
        assert "".join(part.get("answer", "") for part in parts).strip() == one["answer"]


def test_answers_are_traced_and_bound(service):
    heard = Recorded()
    bound = RagkvAnswers(url=service.url).bind(method="full", top_k=1)
    answer = bound.invoke(QUESTION, {"callbacks": [heard]})
    assert ("answered", answer) in heard.told
    assert len(answer["citations"]) == 1
    assert answer["report"]["method"] == "full"


def test_a_conversation_goes_on(service):
    answers = RagkvAnswers(url=service.url, conversation_id="langchain", top_k=1)
    answers.invoke(QUESTION)
    assert answers.invoke("When was it built?")["report"]["tokens"]["history"] > 0


def test_chains_are_made_of_the_parts(service):
    retriever = RagkvRetriever(url=service.url, top_k=1)
    chain = retriever | RunnableLambda(lambda found: found[0].page_content)
    assert chain.invoke(QUESTION).startswith("The harbour")
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer shortly."), ("user", "Who built the {thing} of Tarn?")]
    )
    spoken = (prompt | ChatRagkv(url=service.url) | StrOutputParser()).stream({"thing": "harbour"})
    assert "Brook" in "".join(spoken)


def test_a_chat_answer_has_citations_and_counts(service):
    heard = Recorded()
    answer = ChatRagkv(url=service.url, top_k=1, streaming=True).invoke(QUESTION, {"callbacks": [heard]})
    assert "Brook" in answer.text
    assert [each["document_id"] for each in answer.response_metadata["citations"]] == ["harbour"]
    assert answer.response_metadata["report"]["cache"]["chunks"] == 1
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata["output_tokens"] == answer.response_metadata["report"]["tokens"]["generated"]
    assert len([told for told in heard.told if told[0] == "token"]) > 1


async def test_the_asynchronous_chat_reads_earlier_turns(service):
    chat = ChatRagkv(url=service.url, top_k=1)
    turns = [HumanMessage(QUESTION), await chat.ainvoke(QUESTION), HumanMessage("When was it built?")]
    answer = await chat.ainvoke(turns)
    assert answer.response_metadata["citations"][0]["document_id"] == "harbour"


def test_what_the_service_cannot_do_is_refused(service):
    with pytest.raises(NotImplementedError):
        ChatRagkv(url=service.url).bind_tools([lambda: 1])
    with pytest.raises(Refused, match="temperature"):
        ChatRagkv(url=service.url, temperature=9.0).invoke(QUESTION)
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
    with pytest.raises(Refused):
        ChatRagkv(url=service.url).invoke([picture])


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_objects_are_written_without_their_key_and_loaded(service):
    kinds = [RagkvRetriever, RagkvAnswers, ChatRagkv]
    for kind in kinds:
        made = kind(url=service.url, top_k=3, filter={"year": 1889})
        written = dumpd(made)
        assert KEY not in str(written)
        assert written["kwargs"]["api_key"] == {"lc": 1, "type": "secret", "id": ["RAGKV_KEY"]}
        loaded = load(written, valid_namespaces=["ragkv"], allowed_objects=kinds, secrets_from_env=True)
        assert loaded == made
        assert loaded.invoke(QUESTION)
