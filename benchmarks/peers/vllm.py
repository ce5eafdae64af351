"""`python -m benchmarks.peers.vllm`: vLLM and ragkv one after the other on the same shape, GPU and host.

    python -m benchmarks.peers.vllm --python .venv-vllm/bin/python --shape llama-3.1-8b --out peers.json

vLLM runs in its own environment (`--python`) with random weights. Of ragkv and of vLLM the command measures a full
prefill, the time between two tokens by requests and context, with exact weights and with FP8, and a load of questions
over stored documents with vLLM's prefix caching on. Of ragkv alone it measures the first token over stored chunks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.asked import CHUNKS, drawn
from benchmarks.fitted import fitted
from benchmarks.grid import TextGrid, markdown
from benchmarks.peers.load import LoadedQuestion, in_time, poisson_load
from benchmarks.peers.own_engine import OwnServer, between_tokens
from benchmarks.shapes import SHAPES, model_config, random_model, random_tokens
from benchmarks.tiered import tiered_bench_store
from benchmarks.ttft_shape import ShapeParams, ttft_shape
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import make_method
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import make_graph_decoder

DECODE = ((16384, 1), (16384, 4), (16384, 16), (1640, 1), (1640, 16), (1640, 64))
"""Tokens of a context, and requests."""
SELECTING = "scout:evidence=meaning/words,repair=none"
TENTH = f"{SELECTING},promise=1,cap=0.1,growth=1"
"""Keeps a tenth, as scout does of natural text. Random weights would keep next to nothing."""
ENVIRONMENT = ("VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_NO_USAGE_STATS=1")
CHUNK, DOCUMENTS, ANSWER, LIMIT = 1024, 64, 128, 1000.0
"""Tokens of a chunk, documents of the load, tokens of an answer, and milliseconds that a first token may take."""
OWN, PEER = "ragkv", "vllm"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print tables in Markdown."""
    asked = _arguments().parse_args(arguments)
    figures: dict[str, Any] = {PEER: {}, OWN: {}}
    for form in asked.form:
        loads = {OWN: _loads(asked.rate), PEER: _loads(asked.peer_rate)} if form == "exact" else {OWN: [], PEER: []}
        figures[PEER][form] = _of_vllm(asked, form, loads[PEER])
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:  # gives the GPU back, too
            figures[OWN][form] = process.submit(_of_ragkv, asked, form, loads[OWN]).result()
        if asked.out:
            Path(asked.out).write_text(json.dumps(figures, indent=1))
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    print(tables(figures, asked.rate, asked.peer_rate))


def tables(figures: dict[str, Any], rates: Sequence[float], peer_rates: Sequence[float]) -> str:
    """Return the measured figures as tables in Markdown.

    Args:
        figures: by engine and form of the weights, as `vllm_worker.main` returns them.
        rates: questions a second of ragkv's loads.
        peer_rates: likewise, of vLLM's.
    """
    decode = [
        (f"{case.split()[1]} behind {case.split()[0]}", form, f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.2f}")
        for form, peer in figures[PEER].items()
        for case, theirs in peer["decode"].items()
        for ours in [figures[OWN][form]["decode"][case]]
    ]
    exact, peer = figures[OWN].get("exact"), figures[PEER].get("exact")
    found = [markdown(TextGrid(("requests", "weights", "vLLM, ms", "ragkv, ms", "times as fast"), tuple(decode)))]
    if exact and peer:
        first = [
            (size, name, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.1f}")
            for size, theirs in peer["prefill"].items()
            for name, ours in exact["first"].get(str(size), {}).items()
        ]
        served = [
            (name, f"{rate:g}", f"{in_time(times, LIMIT):.0%}", f"{sorted(times)[len(times) // 2]:.0f}")
            for name, engine, all_rates in ((PEER, peer, peer_rates), (OWN, exact, rates))
            for rate, times in zip(all_rates, engine["loads"], strict=True)
        ]
        heads = ("tokens", "ragkv's method", "vLLM's full prefill, ms", "ragkv, ms", "times sooner")
        found += [markdown(TextGrid(heads, tuple(first), words=2))]
        found += [markdown(TextGrid(("engine", "questions a second", "first token in time", "p50, ms"), tuple(served)))]
    return "\n".join(found)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="vLLM and ragkv on the same shape, GPU and host")
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with vLLM")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--form", nargs="+", default=["exact", "fp8"], choices=["exact", "fp8"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 4, 16, 64], help="chunks of 1,024 tokens")
    parser.add_argument("--rate", nargs="*", type=float, default=[9, 12], help="questions a second, of ragkv's loads")
    parser.add_argument("--peer-rate", nargs="*", type=float, default=[0.6, 0.9], help="the same, of vLLM's")
    parser.add_argument("--repeat", type=int, default=5, help="first tokens of a length")
    parser.add_argument("--steps", type=int, default=64, help="tokens of an answer that are timed")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory for vLLM")
    parser.add_argument("--out", default="", help="file for all figures")
    return parser


def _loads(rates: Sequence[float]) -> list[list[LoadedQuestion]]:
    """Return a load of 25 seconds, or of 24 questions if that is longer, for each rate."""
    question = [*range(100, 132)]
    return [poisson_load(rate, max(24, min(120, int(25 * rate))), DOCUMENTS, 16, question) for rate in rates]


def _of_vllm(asked: argparse.Namespace, form: str, loads: Sequence[Sequence[LoadedQuestion]]) -> dict[str, Any]:
    """Run vLLM in its own process, which gives the GPU back when it ends."""
    sizes, exact = SHAPES[asked.shape], form == "exact"
    with TemporaryDirectory(prefix="ragkv-peer-") as folder:
        model_config(sizes, sizes.layers).save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        config["architectures"] = [f"{sizes.kind}ForCausalLM"]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        question = {
            "model": folder,
            "quantization": "" if exact else "fp8",
            "longest": CHUNK * max(asked.chunks) + 256,
            "memory": asked.memory,
            "requests": max(rows for _, rows in DECODE),
            "vocabulary": sizes.vocabulary,
            "prefill": [CHUNK * chunks for chunks in asked.chunks] if exact else [],
            "decode": DECODE,
            "steps": asked.steps,
            "repeat": asked.repeat,
            "loads": [[asdict(loaded) | {"question": loaded.tokens} for loaded in load] for load in loads],
            "documents": [[*range(number + 2, number + 961)] for number in range(DOCUMENTS)] if loads else [],
            "answer": ANSWER,
        }
        worker = Path(__file__).with_name("vllm_worker.py")
        # The worker's folder holds a `vllm`, too, which -P keeps out of its way.
        command = ["env", *ENVIRONMENT, asked.python, "-P", str(worker)]
        run = subprocess.run(command, input=json.dumps(question).encode(), stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return figures


def _of_ragkv(asked: argparse.Namespace, form: str, loads: Sequence[Sequence[LoadedQuestion]]) -> dict[str, Any]:
    model = fitted(random_model(asked.shape, "cuda" if torch.cuda.is_available() else "cpu", form=form))
    decoder = make_graph_decoder(model)
    decode = {f"{size} {rows}": between_tokens(model, decoder, size, rows, asked.steps) for size, rows in DECODE}
    first = {}
    for chunks in asked.chunks if form == "exact" else ():
        params = ShapeParams(chunks, CHUNK, methods=(SELECTING, "reuse", "cacheblend"), repeat=asked.repeat, split=1)
        rows = ttft_shape(model, params, lambda *_: None).rows
        first[str(CHUNK * chunks)] = {row.method: row.ttft for row in rows if row.ttft is not None}
    return {"decode": decode, "first": first, "loads": _served(model, loads) if loads else []}


def _served(model: DecoderModel, loads: Sequence[Sequence[LoadedQuestion]]) -> list[list[float]]:
    """Answer the loads over documents in host memory."""
    decoder = make_graph_decoder(model)
    prefiller = Prefiller(model, random_tokens(model, 16, 0), graph_decoder=decoder)
    documents = [drawn(model, 959, 0, CHUNKS + number) for number in range(DOCUMENTS)]
    with tiered_bench_store(model, "host") as stored:
        for tokens in documents:
            stored.put(prefiller.encode(tokens))
        stored.fill_tier()
        server = OwnServer(prefiller, stored, documents, make_method(TENTH, model))
        server.serve(poisson_load(1000.0, 80, DOCUMENTS, 16, [*range(100, 132)]), 40, decoder)  # records every width
        return [server.serve(load, ANSWER, decoder) for load in loads]


if __name__ == "__main__":
    main()
