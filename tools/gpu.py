"""All measurements on a GPU: the tables of docs/results/gpu.md and of the last sections of decode.md.

    PYTHONPATH=. python tools/gpu.py FOLDER [kernels first small large tiers tokens pool split stitched shapes]

It needs torch, transformers, triton and xxhash but none of the project's other packages, so that it runs without an
installed service. Each part writes FOLDER/PART.md and prints how long it took. If a part fails, its error is printed
and the others still run. With REDIS_URL set, `tiers` measures that server too.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import decode_pool, decode_speed, kernels, stitched, ttft_table
from benchmarks.decode import Named
from benchmarks.decode_pool import PoolParams
from benchmarks.decode_speed import SpeedParams
from benchmarks.grid import titled
from benchmarks.kernels import KernelParams
from benchmarks.shapes import find_shape, random_model, random_tokens
from benchmarks.stitched import StitchedParams
from benchmarks.ttft_shape import ShapeParams, ttft_shape
from ragkv.engine.policies import make_decode_policy
from ragkv.model.decoder import DecoderModel

SHAPE, OTHERS = "llama-3.1-8b", ("mistral-7b", "qwen2.5-3b")
FEW = ("scout", "gated")
POLICIES = ("psa", "topk", "lfps", "loopserve:first=0")
SPLIT = ("lfps", "lfps:split=64", "lfps:split=1024", "psa")


class Parts:
    """The parts, by name; each yields Markdown."""

    def __init__(self) -> None:
        self._model: DecoderModel | None = None

    @property
    def model(self) -> DecoderModel:
        """Random weights, made on first use."""
        self._model = self._model or random_model(SHAPE, "cuda")
        return self._model

    def kernels(self) -> Iterator[str]:
        """Our kernels compared with their rooflines."""
        at, rows = kernels.measure(find_shape(SHAPE), KernelParams(), "cuda", _quiet)
        yield titled(f"{SHAPE}, {torch.cuda.get_device_name()}", kernels.grid(rows), [str(at)])

    def first(self) -> Iterator[str]:
        """16 chunks, every method; then scout with larger blocks."""
        yield self._first_tokens(ShapeParams(split=2))
        for block in (32, 64):
            yield self._first_tokens(ShapeParams(methods=("scout",), split=1, block=block))

    def small(self) -> Iterator[str]:
        """Short contexts, for which the gate matters."""
        for chunks, tokens in ((4, 1024), (2, 1024), (1, 1024), (1, 512)):
            yield self._first_tokens(ShapeParams(chunks, tokens, methods=FEW, split=1))

    def large(self) -> Iterator[str]:
        """64 chunks."""
        yield self._first_tokens(ShapeParams(64, methods=("scout",), warmup=1, split=1))

    def tiers(self) -> Iterator[str]:
        """Blocks in other tiers than host memory."""
        asked = ShapeParams(methods=("scout",), split=1)
        url = os.environ.get("REDIS_URL", "")
        for tier in ("gpu", "disk", *(["redis"] if url else [])):
            yield self._first_tokens(replace(asked, tier=tier, store=url))

    def tokens(self) -> Iterator[str]:
        """Decoding: dense, recorded, and under the policies."""
        policies = self._policies(POLICIES)
        for batch, named in ((1, policies), (4, policies), (16, [])):
            params = SpeedParams((16384,), (batch,), steps=16)
            rows = decode_speed.measure(self.model, params, named, _quiet, random_tokens)
            yield titled(f"{SHAPE}, {batch} requests", decode_speed.grid(rows))

    def pool(self) -> Iterator[str]:
        """PSA with a quarter of the KV on the GPU."""
        for params in (PoolParams(4096, 4, steps=8, warmup=4), PoolParams()):
            rows = decode_pool.measure(self.model, params, _quiet, random_tokens)
            yield titled(f"{SHAPE}, {params.batch} requests of {params.length} keys", decode_pool.grid(rows))

    def split(self) -> Iterator[str]:
        """Keys in host memory: LFPS with a split context beside LFPS on the GPU, and PSA over a pool."""
        for batch in (1, 4):
            params = SpeedParams((16384,), (batch,), steps=16, warmup=32, pool=0.25)
            rows = decode_speed.measure(self.model, params, self._policies(SPLIT), _quiet, random_tokens)
            yield titled(f"{SHAPE}, {batch} requests, {torch.get_num_threads()} threads", decode_speed.grid(rows))

    def stitched(self) -> Iterator[str]:
        """Prefill policies on stitched contexts: 64 chunks of CacheBlend, and what `auto` does."""
        for params in (StitchedParams(policies=("critiprefill", "auto")), StitchedParams(16, policies=("auto",))):
            rows = stitched.measure(self.model, params, _quiet)
            title = f"{SHAPE}, {params.method}, {params.chunks} chunks of {params.chunk_tokens} tokens"
            yield titled(title, stitched.grid(rows))

    def shapes(self) -> Iterator[str]:
        """16 chunks, other models."""
        for name in OTHERS:
            yield self._first_tokens(ShapeParams(methods=("scout",), split=1), random_model(name, "cuda"))

    def _policies(self, names: Sequence[str]) -> list[Named]:
        made = [(name, make_decode_policy(name, self.model.profile)) for name in names]
        return [(name, each) for name, each in made if each is not None]

    def _first_tokens(self, params: ShapeParams, model: DecoderModel | None = None) -> str:
        result = ttft_shape(model or self.model, params, _quiet)
        times = titled(ttft_table.title(result), ttft_table.times(result), ttft_table.notes(result))
        return times + "\n" + titled("of which, ms, and floors, ms", ttft_table.steps(result))


def _quiet(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def main(folder: Path, names: list[str]) -> int:
    """Run the named parts, or all. Returns 1 if one failed."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, failed = Parts(), 0
    for name in names or (
        "kernels",
        "first",
        "small",
        "large",
        "tiers",
        "tokens",
        "pool",
        "split",
        "stitched",
        "shapes",
    ):
        start, path = time.perf_counter(), folder / f"{name}.md"
        path.write_text("")
        try:
            for text in getattr(parts, name)():
                with path.open("a") as file:
                    file.write(text + "\n")
                print(text, flush=True)
        except Exception:
            failed = 1
            print(traceback.format_exc(), flush=True)
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
