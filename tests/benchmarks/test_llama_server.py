"""The peer of `ragkv bench ttft`: started, asked, stopped. A small script stands in for llama.cpp's server."""

import sys
from pathlib import Path

import pytest

from benchmarks.llama_server import LlamaParams, LlamaServer, PeerTiming, completion_of
from benchmarks.ttft import TtftRow, _peer_row
from ragkv.errors import ConfigError

FAKE = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["cache_prompt"] is False and body["n_predict"] == 1
        self.reply({{"timings": {{"prompt_n": len(body["prompt"]), "prompt_ms": 12.5}}}})
    def reply(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(folder: Path, text: str) -> LlamaParams:
    path = folder / "llama-server"
    path.write_text(text)
    path.chmod(0o755)
    return LlamaParams(path, folder / "model.gguf", 1, 512)


@pytest.mark.timeout(600)
def test_the_server_is_started_asked_and_stopped(tmp_path):
    with LlamaServer(program(tmp_path, FAKE.format(python=sys.executable))) as server:
        found = server.first_token([1, 2, 3])
        process = server._process
    assert (found.prompt_tokens, found.prompt_ms) == (3, 12.5)
    assert found.ms > 0
    assert process.poll() is not None


@pytest.mark.timeout(600)
def test_a_server_that_cannot_start_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ConfigError, match="status 3"):
        LlamaServer(program(tmp_path, "#!/bin/sh\nexit 3\n"))
    with pytest.raises(ConfigError, match="No such file"):
        LlamaServer(LlamaParams(tmp_path / "none", tmp_path, 1, 512))


@pytest.mark.parametrize(
    "found", [{}, [], {"timings": {"prompt_n": 3}}, {"timings": {"prompt_n": "x", "prompt_ms": 1}}]
)
def test_a_response_without_timings_is_an_error(found):
    with pytest.raises(ConfigError, match="without timings"):
        completion_of(found, 1.0)


def test_ratios_are_the_peers_time_over_ours():
    rows = [TtftRow(name, "auto", ms, ms, 1, 1, 1, 1, 1, 0, {}) for name, ms in (("full", 50.0), ("reuse", 10.0))]
    peer = _peer_row([PeerTiming(ms, 9, ms) for ms in (90.0, 100.0, 130.0)], rows)
    assert (peer.ttft, peer.tokens) == (100.0, 9)
    assert peer.ratios == {"full": 2.0, "reuse": 10.0}
