"""`ragkv bench ingest --shape`: what encoding chunks costs beside their prefill, without documents and without a store.

    prefill           one chunk after S, in one forward pass that keeps nothing
    encode            the same chunk with its digest and with K and V on the host
    batched prefill   as many chunks in one forward pass as are encoded together
    encode together   the same chunks encoded, which leaves K and V on the device (`Prefiller.encode_on_device`)
    and pack          and made the bytes of their entries (store/format/codec.py)

The five take turns, and medians count. Tokens are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.roofline import device_name
from benchmarks.shapes import random_tokens
from ragkv.engine.chunk_encoder import group_tokens
from ragkv.engine.prefill import Prefiller
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Pass, append
from ragkv.store.format.codec import begin_packing, pack_bytes
from ragkv.timing import StepTimer

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


@dataclass(frozen=True)
class EncodeParams:
    """What is measured.

    Attributes:
        tokens: tokens of a chunk.
        together: tokens that are encoded together; 0: as many as the engine takes on this device.
        repeat: timed rounds, after one untimed.
        prefix: tokens of the prefix.
        seed: seed of all tokens.
    """

    tokens: int = 200
    together: int = 0
    repeat: int = 5
    prefix: int = 16
    seed: int = 0


@dataclass(frozen=True)
class EncodeResult:
    """Medians. Shares are of the tokens/s of the batched prefill.

    Attributes:
        tokens: tokens of a chunk.
        chunks: chunks of a group.
        prefill: milliseconds to prefill one chunk.
        encode: milliseconds to encode one chunk.
        over_prefill: `encode` / `prefill`.
        batched: tokens/s of the batched prefill.
        encoded: tokens/s of encoding together.
        packed: tokens/s of encoding together and packing.
        encoded_share: `encoded` / `batched`.
        packed_share: `packed` / `batched`.
    """

    model: str
    device: str
    dtype: str
    threads: int
    torch: str
    tokens: int
    chunks: int
    prefill: float
    encode: float
    over_prefill: float
    batched: float
    encoded: float
    packed: float
    encoded_share: float
    packed_share: float


def encode_shape(model: DecoderModel, params: EncodeParams, progress: Progress) -> EncodeResult:
    """Measure a model of a known shape.

    Raises:
        InputError: a chunk does not fit the model.
    """
    if min(params.tokens, params.prefix, params.repeat) < 1 or params.prefix + params.tokens > model.max_positions:
        raise InputError(f"chunks of {params.tokens} tokens do not fit {model.name}")
    return measure_encoding(Prefiller(model, random_tokens(model, params.prefix, params.seed)), params, progress)


def measure_encoding(prefiller: Prefiller, params: EncodeParams, progress: Progress) -> EncodeResult:
    """Measure chunks of random tokens."""
    model = prefiller.model
    count = max(1, (params.together or group_tokens(model.device)) // params.tokens)
    chunks = [random_tokens(model, params.tokens, params.seed + 1 + i) for i in range(count)]

    def pack_all() -> None:
        begun = [begin_packing(kv, model.profile.block) for kv in prefiller.encode_on_device(chunks)]
        for packing in begun:
            pack_bytes(packing, "bench")

    work: dict[str, Callable[[], object]] = {
        "prefill": lambda: prefill_together(prefiller, chunks[:1]),
        "encode": lambda: prefiller.encode(chunks[0]),
        "batched prefill": lambda: prefill_together(prefiller, chunks),
        "encode together": lambda: prefiller.encode_on_device(chunks),
        "and pack": pack_all,
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(params.repeat + 1):
        for name, stage in work.items():
            timer = StepTimer(model.device)
            stage()
            times[name] += [timer.total()] if turn else []  # the first round chooses and compiles kernels
        progress("encode", turn, params.repeat)
    ms = {name: statistics.median(each) for name, each in times.items()}
    batched, encoded, packed = (
        1000 * count * params.tokens / ms[name] for name in ("batched prefill", "encode together", "and pack")
    )
    return EncodeResult(
        model=model.name,
        device=device_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        tokens=params.tokens,
        chunks=count,
        prefill=ms["prefill"],
        encode=ms["encode"],
        over_prefill=ms["encode"] / ms["prefill"],
        batched=batched,
        encoded=encoded,
        packed=packed,
        encoded_share=encoded / batched,
        packed_share=packed / batched,
    )


def prefill_together(prefiller: Prefiller, chunks: Sequence[Sequence[int]]) -> None:
    """Prefill chunks in one forward pass, each after S, and keep nothing."""
    model, start = prefiller.model, len(prefiller.prefix_tokens)
    passes = list[Pass]()
    for tokens in chunks:
        cache = ContextCache(model.shape, start + len(tokens), model.dtype, model.devices)
        cache.extend(prefiller.prefix)
        passes.append(append(cache, tokens, start, outputs=0))
    model.forward(passes)
