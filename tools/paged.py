"""Measure answers that read stored blocks in place beside answers with caches of their own, in the same run.

    python -m tools.paged speed --shape llama-3.1-8b --requests 1 --requests 16     milliseconds of a decode step
    python -m tools.paged needles --model models/tiny                               answers that stay the same

`speed` needs a GPU. Every request reads 16 of 64 chunks of random tokens, drawn by Zipf's law, and asks its own
question. Where contexts of their own do not fit into the GPU's memory, only requests that share blocks are measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.fitted import fitted
from benchmarks.shapes import random_model, random_tokens
from benchmarks.tiered import TieredBenchStore, tiered_bench_store
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.decoding import decode_step, generate
from ragkv.engine.generation import Sampling
from ragkv.engine.generation import Sequence as Decoded
from ragkv.engine.paging import page_context
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import make_method
from ragkv.evaluation.score import exact_match
from ragkv.evaluation.sets import needle_sets
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.timing import StepTimer

CHUNKS, READ, TOKENS, QUESTION = 64, 16, 1024, 32
STEPS, WARM = 24, 6
METHODS = ("reuse", "scout:repair=none,promise=1,cap=0.1,growth=1")
NEEDLES = ("reuse", "scout:repair=none", "scout", "cacheblend")
ROOM = 64
"""Rows of an answer."""


@dataclass(frozen=True)
class Bench:
    """A model with chunks in one tier, and a decoder that reads them there."""

    model: DecoderModel
    prefiller: Prefiller
    stored: TieredBenchStore
    decoder: GraphDecoder

    def ask(self, chunks: Sequence[Sequence[int]], question: Sequence[int], method: str, in_place: bool) -> Decoded:
        """Prefill a question over stored chunks."""
        sources: list[StoredChunk] = [self.stored.open(tokens, i == 0) for i, tokens in enumerate(chunks)]
        state, timer = self.prefiller.new_state(), StepTimer(self.model.device)
        made = make_method(method, self.model)
        context = self.prefiller.prefill_sparse(sources, question, made, timer, PrefillOptions(ROOM), state)
        sequence = Decoded(context.cache, context.logits, context.position, Sampling(ROOM))
        if in_place and context.plan is not None:
            sequence.paged = page_context(context.cache, context.plan, sources, state.stitch.starts, ROOM)
        return sequence


@contextmanager
def bench(model: DecoderModel, chunks: Sequence[Sequence[int]], body: str) -> Iterator[Bench]:
    """Encode chunks and put them into memory of the model's device."""
    prefix = random_tokens(model, 16, 0) if model.tokenizer is None else model.prompt.prefix
    encoder = Prefiller(model, prefix)
    with tiered_bench_store(model, "gpu" if model.device.type == "cuda" else "host", body=body) as stored:
        for tokens in chunks:
            stored.put(encoder.encode(tokens))
        stored.fill_tier()
        tiers = stored.tiers
        decoder = GraphDecoder(model, memory=BlockPoolMemory(tiers.resident, tiers.resident_format))
        yield Bench(model, Prefiller(model, prefix, graph_decoder=decoder), stored, decoder)


def measure_speed(shape: str, requests: Sequence[int], body: str) -> None:
    """Print the milliseconds of a decode step for each method and number of requests, in place and with own caches."""
    name, _, form = shape.partition(":")
    model = fitted(random_model(name, "cuda", form=form or "exact"), 0)
    chunks = [random_tokens(model, TOKENS, 1 + i) for i in range(CHUNKS)]
    print(f"{torch.cuda.get_device_name()}, {shape}, {body} blocks of {model.profile.block} tokens")
    print(f"{'method':40} requests  keys kept  in place: ms, tokens/s, GiB  own caches: ms, tokens/s, GiB")
    with bench(model, chunks, body) as made:
        for method in METHODS:
            for count in requests:
                rows = [_steps(made, chunks, method, count, in_place) for in_place in (True, False)]
                kept = next(row.kept for row in rows if row is not None)
                print(f"{method:40} {count:8} {kept:10.0f}  " + "  ".join(map(_cells, rows)), flush=True)


@dataclass(frozen=True)
class _Row:
    """What was measured: keys of a request and layer, milliseconds of a step, bytes of the requests' own caches."""

    kept: float
    ms: float
    count: int
    bytes: int


def _cells(row: _Row | None) -> str:
    if row is None:
        return "does not fit"
    return f"{row.ms:8.2f} {1000 * row.count / row.ms:8.0f} {row.bytes / 2**30:6.2f}"


def _steps(made: Bench, chunks: Sequence[list[int]], method: str, count: int, in_place: bool) -> _Row | None:
    """Time decode steps; None where the requests do not fit into memory. The requests do not depend on `in_place`."""
    model, rng = made.model, np.random.default_rng(count)
    share = 1 / np.arange(1, CHUNKS + 1)
    sequences, times = list[Decoded](), list[float]()
    try:
        for i in range(count):
            read = rng.choice(CHUNKS, READ, replace=False, p=share / share.sum())
            question = random_tokens(model, QUESTION, 1000 + i)
            sequences.append(made.ask([chunks[c] for c in read], question, method, in_place))
        own = sum(each.cache.bytes for each in sequences)
        kept = [each.cache.lengths[0] + (each.paged.rows[0] if each.paged else 0) for each in sequences]
        for _ in range(STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for sequence in sequences:
                sequence.sample(frozenset())
            decode_step(model, sequences, made.decoder)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - started))
    except torch.OutOfMemoryError:
        return None
    finally:
        for sequence in sequences:
            sequence.close()
        sequences.clear()
        torch.cuda.empty_cache()
    return _Row(statistics.fmean(kept), statistics.median(times[WARM:]), count, own)


def compare_needles(
    path: str, device: str, body: str, sets: int, questions: int, documents: int = 8, methods: Sequence[str] = NEEDLES
) -> None:
    """Print how many answers to needle questions are the same in place and with own caches, and their exact match."""
    model = DecoderModel.load(path, device=device, dtype="bfloat16" if device == "cuda" else "float32")
    asked_sets = needle_sets(sets, documents, 256, questions, 201, lambda text: len(model.prompt.plain(text)))
    for method in methods:
        same, right, in_place, total = 0, [0.0, 0.0], 0.0, 0
        for asked in asked_sets:
            chunks = [model.prompt.chunk(title, text) for title, text in asked.chunks]
            with bench(model, chunks, body) as made:
                for question in asked.questions:
                    answers = list[str]()
                    for place in (True, False):
                        sequence = made.ask(chunks, model.prompt.question(question.text), method, place)
                        answers.append(_text(model, list(generate(model, sequence, made.decoder))))
                        in_place += sum(sequence.paged.rows) / model.shape.layers if sequence.paged else 0.0
                    same, total = same + (answers[0] == answers[1]), total + 1
                    right = [n + exact_match(text, question.gold) for n, text in zip(right, answers, strict=True)]
        em = " and ".join(f"{100 * each / total:.1f}" for each in right)
        print(f"{method:20} {body:6} same {same} of {total}, EM {em}, keys in place {in_place / total:.0f}", flush=True)


def _text(model: DecoderModel, tokens: Sequence[int]) -> str:
    text: str = model.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "needles"))
    parser.add_argument("--shape", default="llama-3.1-8b", help="NAME, or NAME:fp8 for weights in FP8")
    parser.add_argument("--requests", type=int, action="append", help="requests that decode together; may repeat")
    parser.add_argument("--body", default="exact", choices=("exact", "int8", "fp8"))
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sets", type=int, default=4)
    parser.add_argument("--questions", type=int, default=25, help="of each set")
    asked = parser.parse_args()
    with torch.inference_mode():
        if asked.what == "speed":
            measure_speed(asked.shape, asked.requests or [1, 16, 64], asked.body)
        else:
            compare_needles(asked.model, asked.device, asked.body, asked.sets, asked.questions)


if __name__ == "__main__":
    main()
