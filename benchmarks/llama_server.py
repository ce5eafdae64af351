"""llama.cpp's server as a peer in `ragkv bench ttft`: the same prompt, token by token, prefilled in its own process."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ragkv.errors import ConfigError

START_S = 120.0
"""Longest time that the server may take to load the model."""
ANSWER_S = 600.0
"""Longest time that one completion may take."""


@dataclass(frozen=True)
class LlamaParams:
    """How the server is started.

    Attributes:
        binary: path of `llama-server`.
        gguf: the model file.
        threads: its threads.
        context: tokens of its context.
    """

    binary: Path
    gguf: Path
    threads: int
    context: int


@dataclass(frozen=True)
class PeerTiming:
    """The time of one completion.

    Attributes:
        ms: milliseconds from request to response.
        prompt_tokens: prompt tokens that were computed.
        prompt_ms: milliseconds of the prompt by the server's own clock.
    """

    ms: float
    prompt_tokens: int
    prompt_ms: float


class LlamaServer:
    """A server on 127.0.0.1 that runs until `close`."""

    def __init__(self, params: LlamaParams):
        """Start the server and wait until it has loaded the model.

        Raises:
            ConfigError: it ends, or it takes too long.
        """
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        arguments = ["-m", params.gguf, "-t", params.threads, "-tb", params.threads, "-c", params.context]
        arguments += ["-np", 1, "--host", "127.0.0.1", "--port", port]
        try:
            self._process = subprocess.Popen(
                [str(params.binary), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ConfigError(f"{params.binary}: {error.strerror}") from None
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LlamaServer:
        """Return the server."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop the server."""
        self.close()

    def first_token(self, tokens: Sequence[int]) -> PeerTiming:
        """Prefill all of a prompt, without what the server remembers, and take one token.

        Raises:
            ConfigError: the server does not answer as llama.cpp's does.
        """
        body = {"prompt": list(tokens), "n_predict": 1, "cache_prompt": False, "temperature": 0}
        start = time.perf_counter()
        found = self._request("/completion", body, ANSWER_S)
        return completion_of(found, 1000 * (time.perf_counter() - start))

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ConfigError(f"llama-server ended with status {self._process.returncode} before it was ready")
            try:
                self._request("/health", None, 5)
            except ConfigError:
                time.sleep(0.1)
            else:
                return
        raise ConfigError(f"llama-server was not ready within {START_S:.0f} s")

    def _request(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as response:
                return json.load(response)
        except (OSError, ValueError) as error:
            raise ConfigError(f"llama-server: {error}") from None


def completion_of(found: Any, ms: float) -> PeerTiming:
    """Read the response of /completion, which took `ms` milliseconds.

    Raises:
        ConfigError: it has no timings.
    """
    try:
        timings = found["timings"]
        return PeerTiming(ms, int(timings["prompt_n"]), float(timings["prompt_ms"]))
    except (KeyError, TypeError, ValueError):
        raise ConfigError("llama-server: a completion without timings") from None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
