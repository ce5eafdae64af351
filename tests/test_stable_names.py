"""The names that docs/compatibility.md calls stable are still there. Version 1.0 had these; more may join them.

A test that fails here found a change that needs a major version.
"""

from __future__ import annotations

from typing import Any

import pytest

import ragkv.client
from ragkv.config import Settings
from tests.test_docs import command_options
from tools.docs_site.openapi import read_schema

ROUTES = """
GET /v1/documents · POST /v1/documents · GET /v1/documents/{document_id} · PUT /v1/documents/{document_id}
DELETE /v1/documents/{document_id} · GET /v1/documents/{document_id}/text · GET /v1/documents/{document_id}/chunks
GET /v1/jobs · GET /v1/jobs/{job_id} · POST /v1/jobs/{job_id}/cancel · GET /v1/jobs/{job_id}/events
GET /v1/collections · DELETE /v1/collections/{name} · POST /v1/search · POST /v1/answers · GET /v1/answers
GET /v1/answers/{answer_id} · GET /v1/answers/{answer_id}/map · GET /v1/conversations/{conversation_id}
DELETE /v1/conversations/{conversation_id} · POST /v1/chat/completions · GET /v1/models · GET /v1/models/{model_id}
GET /healthz · GET /readyz · GET /metrics
"""

FIELDS = {
    "QuestionIn": "abstain_below collection conversation_id deadline_s decode filter max_tokens method prefill "
    "question speculation stream top_k",
    "SearchIn": "collection documents filter query top_k",
    "DocumentIn": "collection id metadata text title",
    "Answer": "answer citations question report",
    "Citation": "chunk chunk_id document_id end heading marks page score start text title version",
    "Report": "abstained bytes cache chunks confidence decode decoding evidence method model prefill prefilling ratios "
    "timings_ms tokens",
    "Ratios": "cache_hit load recompute sequence",
    "Timings": "decode load open plan prefill repair retrieve total ttft",
    "TokenCounts": "context generated history kept prefilled question recomputed",
    "CacheReport": "chunks fallbacks hits misses",
    "ByteCounts": "context_kv heads loaded",
    "ChunkReport": "blocks chunk_id document_id kept recomputed_tokens title tokens",
    "ShownDocument": "bytes chunks collection created hash id kv_bytes metadata stored_bytes text title tokens updated "
    "version",
    "IngestJob": "collection counts created documents done error eta_seconds finished id last_error stage started "
    "status total updated",
}
"""Fields of the bodies that clients meet first."""

COMMANDS = {
    "ingest": "--collection --data --device --model --store --url",
    "ask": "--abstain-below --collection --conversation --data --decode --device --file --filter --json --max-tokens "
    "--method --model --prefill --speculation --store --top-k --url",
    "search": "--collection --data --document --filter --json --top-k --url",
    "ls": "--collection --data --desc --long --search --sort --url",
    "show": "--chunks --collection --data --json --text --url",
    "rm": "--collection --data --device --model --store --url",
    "reindex": "--data --device --model --store",
    "doctor": "--data --device --model --store --url",
    "gc": "--data --dry-run --fingerprints --grace --json --store",
    "backup": "--data --store --with-kv",
    "restore": "--data --force --store",
    "serve": "--data --device --host --model --port --store",
    "mcp": "--data --device --model --store --url",
    "top": "--interval --key --once --url",
    "key": "--bytes --requests --stored --tokens",
    "calibrate": "--collection --confidence --data --device --documents --model --store --top-k --unanswerable",
    "tune": "--adapter --contexts --data --device --gold --length --model --out --questions --rank --rate --steps "
    "--tokens --workers",
}

SETTINGS = """
url key host port hosts public_url api_keys tenant_requests tenant_tokens tenant_bytes tenant_stored operators
connections dashboard batch batch_bytes queue deadline history log log_level traces embedder reranker ingest_prefill
chunk_tokens group_tokens prefix max_document_bytes parse_seconds parse_bytes collection_bytes method gate prefill
decode pool_bytes speculation top_k max_tokens max_question_tokens conversation_bytes store store_body store_secret
store_ttl store_bytes store_timeout host_bytes gpu_bytes model adapter model_cache device dtype threads graphs data
"""

CLIENT = """
answers ask cancel chunks close collections conversation document documents follow forget job jobs map metrics page put
ready recall remove remove_collection search send stream text upload wait
"""

EXPORTED = """
AnswerMap AsyncClient Brief Briefs ChunkMap Cited Client Collection Conversation Done Event Job JobCounts JobDocument
JobError Page Recalled Refused RemoteChunk RemoteChunks RemoteDocument RemoteText Reported Retrieved Said Turn
Unreachable
"""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return read_schema()


def test_the_routes_of_1_0_are_there(schema: dict[str, Any]) -> None:
    known = {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}
    wanted = {route.strip() for line in ROUTES.strip().splitlines() for route in line.split("·")}
    assert len(wanted) == 26
    assert not wanted - known


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_of_1_0_are_there(schema: dict[str, Any], name: str) -> None:
    assert not set(FIELDS[name].split()) - schema["components"]["schemas"][name]["properties"].keys()


def test_requests_need_no_more_fields_than_in_1_0(schema: dict[str, Any]) -> None:
    needed = {name: schema["components"]["schemas"][name].get("required") for name in FIELDS if name.endswith("In")}
    assert needed == {"QuestionIn": ["question"], "SearchIn": ["query"], "DocumentIn": ["id", "text"]}


def test_the_commands_of_1_0_are_there_with_their_options() -> None:
    known = command_options()
    assert not {name: lost for name, options in COMMANDS.items() if (lost := set(options.split()) - known[name])}


def test_the_settings_of_1_0_are_there() -> None:
    assert not set(SETTINGS.split()) - Settings.model_fields.keys()


def test_the_client_of_1_0_is_there() -> None:
    assert not set(EXPORTED.split()) - set(ragkv.client.__all__)
    for kind in (ragkv.client.Client, ragkv.client.AsyncClient):
        assert not [name for name in CLIENT.split() if not callable(getattr(kind, name, None))]
