"""vLLM answers questions over the KV of a ragkv service: a connector of vLLM's engine.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "RagkvConnector", "kv_connector_module_path": "ragkv.integrations.vllm",
        "kv_role": "kv_consumer", "kv_connector_extra_config": {"url": "http://127.0.0.1:8000"}}'

A request carries what `POST /v1/handovers` of the service returned: token ids, `cache_salt` and `kv_transfer_params`.
The first tokens are rows of stored chunks. vLLM reserves blocks for them, this connector loads them from the service,
and vLLM prefills the rest and decodes. Other requests pass untouched.

    scheduler   get_num_new_matched_tokens: how many tokens the service has   build_connector_meta: what to load
    worker      start_load_kv: threads ask the service   get_transfer_results: what came is written into vLLM's cache

Loading is asynchronous: requests that are being answered go on meanwhile. A request whose rows cannot be loaded fails;
vLLM never prefills its tokens instead, because a selection is no text that it could read. After a preemption vLLM asks
again. vLLM loads this module, so it imports nothing that vLLM's environment lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from ragkv.errors import ConfigError, InputError, MissingPackage

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
    )
    from vllm.logger import init_logger
    from vllm.model_executor.models.utils import extract_layer_index
except ImportError as error:
    raise MissingPackage("ragkv.integrations.vllm is a part of vLLM's engine, which is not installed here") from error

from ragkv.client import Client
from ragkv.client.calls import TIMEOUT
from ragkv.integrations.connection import URL

logger = init_logger("vllm.ragkv")

NAME = "ragkv"
"""Member of a request's `kv_transfer_params` that is for this connector."""
THREADS = 4
"""Most requests whose rows are loaded at the same time."""


@dataclass(frozen=True)
class RowLoad:
    """Rows that a request needs in vLLM's cache.

    Attributes:
        request: Id of the request.
        asked: `kv_transfer_params["ragkv"]`.
        salt: The request's `cache_salt`; "" if it has none.
        tokens: Token ids of all rows that are handed over.
        blocks: Ids of the request's blocks in vLLM's cache.
        start: First row that is loaded: vLLM has those before it.
    """

    request: str
    asked: Mapping[str, Any] = field(repr=False)
    salt: str
    tokens: Sequence[int] = field(repr=False)
    blocks: Sequence[int]
    start: int

    def slots(self, block_size: int) -> Tensor:
        """Return the slots [m] int64 of the rows in vLLM's cache, which has `block_size` tokens a block."""
        rows = torch.arange(self.start, len(self.tokens))
        return torch.tensor(self.blocks)[rows // block_size] * block_size + rows % block_size


@dataclass
class RagkvMetadata(KVConnectorMetadata):
    """What the worker begins to load in a step.

    Attributes:
        loads: One of each request.
    """

    loads: list[RowLoad] = field(default_factory=list)


class RagkvConnector(KVConnectorBase_V1):
    """Loads rows that a ragkv service hands over. It saves nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        """Read the settings: `url`, `api_key_file` and `timeout` of `kv_connector_extra_config`.

        Args:
            vllm_config: vLLM's settings.
            role: Whether this is the scheduler's half or a worker's.
            kv_cache_config: vLLM's cache.

        Raises:
            ConfigError: vLLM would prefill what cannot be loaded, or divides the model between several workers; or the
                file of the key cannot be read.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        extra, transfer = self._kv_transfer_config.get_from_extra_config, self._kv_transfer_config
        if transfer.kv_load_failure_policy != "fail":
            raise ConfigError(
                "kv_load_failure_policy must be fail: tokens of a selection are no text that could be prefilled"
            )
        if vllm_config.parallel_config.world_size > 1:
            raise ConfigError(
                "the connector of ragkv needs a model on one worker: leave tensor and pipeline sizes at 1"
            )
        self._url, self._timeout = extra("url", URL), float(extra("timeout", TIMEOUT))
        self._key = _key_of(extra("api_key_file", ""))
        self._block_size: int = vllm_config.cache_config.block_size
        self._waiting: list[RowLoad] = []
        self._layers: list[Any] = []
        self._loading: dict[str, tuple[RowLoad, Future[dict[str, Tensor]]]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "ragkv")

    # The scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens behind those that vLLM has come from the service, and whether they come later."""
        missing = _rows_of(request) - num_computed_tokens
        if missing > 0 and request.skip_reading_prefix_cache:
            logger.warning("%s: prompt_logprobs make vLLM prefill the tokens of its hand-over", request.request_id)
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what has to be loaded into the blocks that the request got."""
        if num_external_tokens > 0:
            tokens = request.prompt_token_ids[: _rows_of(request)]
            self._waiting.append(
                RowLoad(
                    request.request_id,
                    request.kv_transfer_params[NAME],
                    request.cache_salt or "",
                    tokens,
                    blocks.get_block_ids()[0],
                    len(tokens) - num_external_tokens,
                )
            )

    def build_connector_meta(self, scheduler_output: Any) -> RagkvMetadata:
        """Return what the worker begins to load in this step."""
        loads, self._waiting = self._waiting, []
        return RagkvMetadata(loads)

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Learn which layers have a cache. Each writes to its own, whatever form that has on this device."""
        layers = self._vllm_config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in sorted(kv_caches, key=extract_layer_index)]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load, in threads."""
        for row_load in self._get_connector_metadata().loads:
            self._loading[row_load.request] = row_load, self._threads.submit(self._fetch, row_load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Write the rows that came into vLLM's cache. Called behind the model's forward, on the worker's thread."""
        results = KVConnectorTransferResults()
        for name, (row_load, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[name]
            results.finished_recving.add(name)
            try:
                self._write(row_load, future.result())
            except Exception as error:  # whatever it is, one request fails and not the engine
                results.failed_recving.add(name)
                logger.error("%s: its rows cannot be loaded from %s: %s", name, self._url, error)
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: a request runs when all its rows are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing: nothing is saved."""

    def shutdown(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, row_load: RowLoad) -> dict[str, Tensor]:
        """Return tokens [n], k and v [L, n, Hkv, d] from the service. Raises RagkvError."""
        asked = {name: value for name, value in row_load.asked.items() if name != "api_key"}
        with Client(self._url, row_load.asked.get("api_key") or self._key, self._timeout) as client:
            return load(client.handed_rows({**asked, "cache_salt": row_load.salt}))

    @torch.inference_mode()
    def _write(self, row_load: RowLoad, rows: Mapping[str, Tensor]) -> None:
        """Write rows into vLLM's cache.

        Raises:
            RagkvError: They are not those of the prompt, or of another model.
        """
        if rows["tokens"].tolist() != list(row_load.tokens):
            raise InputError("the prompt is not that of its hand-over")
        layers, shape = self._layers, tuple(rows["k"].shape)
        for layer in layers:
            expected = (len(layers), len(row_load.tokens), layer.num_kv_heads, layer.head_size)
            if shape != expected:
                raise InputError(f"KV of the service is {list(shape)}, that of vLLM's model {list(expected)}")
        slots = row_load.slots(self._block_size)
        for number, layer in enumerate(layers):
            cache = layer.kv_cache
            dtype = self._vllm_config.model_config.dtype
            k, v = (rows[side][number, row_load.start :].to(cache.device, dtype) for side in ("k", "v"))
            layer.impl.do_kv_cache_update(layer, k, v, cache, slots.to(cache.device))


def _rows_of(request: Any) -> int:
    """Return how many of a request's first tokens are handed over; 0 for a request without a hand-over.

    At least one token is left to vLLM, which needs its logits. What is malformed fails when it is loaded.
    """
    asked = (request.kv_transfer_params or {}).get(NAME)
    if asked is None or request.prompt_token_ids is None:  # a prompt of embeddings has no tokens to compare
        return 0
    rows = asked.get("rows") if isinstance(asked, Mapping) else None
    return min(rows if isinstance(rows, int) and rows > 0 else request.num_prompt_tokens, request.num_prompt_tokens - 1)


def _key_of(file: str) -> str:
    try:
        return Path(file).read_text().strip() if file else ""
    except OSError as error:
        raise ConfigError(f"api_key_file {file} cannot be read: {error.strerror}") from None
