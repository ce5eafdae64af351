"""Times vLLM's engine in its own environment, which needs nothing of ragkv.

    python vllm_worker.py < question.json      {"model": FOLDER, "prefill": [1024], "decode": [[16384, 4]], …}

The folder has a configuration and no weights: vLLM fills them with small random numbers. The engine has its defaults:
compiled, CUDA graphs, prefix caching; VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps it in this process. The last line of the
output is one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from itertools import count, pairwise
from typing import Any

WARM_UP = 8
"""Tokens of each answer that are not timed."""


class VllmEngine:
    """vLLM's engine, driven step by step."""

    def __init__(self, asked: dict[str, Any]):
        """Start the engine. asked: see `main`."""
        import vllm

        self.version, self._parameters = vllm.__version__, vllm.SamplingParams
        self._engine = vllm.LLM(
            model=asked["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=asked["quantization"] or None,
            max_model_len=asked["longest"],
            gpu_memory_utilization=asked["memory"],
            max_num_seqs=asked["requests"],
        ).llm_engine
        self._ids, self._random, self._vocabulary = count(), random.Random(0), asked["vocabulary"]

    def tokens(self, size: int) -> list[int]:
        """Return token ids that no prompt had before."""
        return [self._random.randrange(2, self._vocabulary) for _ in range(size)]

    def add(self, tokens: list[int], answer: int) -> str:
        """Add a request; return its id."""
        name = str(next(self._ids))
        parameters = self._parameters(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
        return name

    def step(self) -> dict[str, int]:
        """Run a step; return how many tokens the answers have that grew, by id."""
        return {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._engine.has_unfinished_requests())

    def first_token(self, size: int) -> float:
        """Return the milliseconds to the first token of a prompt without a known prefix."""
        tokens, started = self.tokens(size), time.perf_counter()
        self.add(tokens, 1)
        while self.busy:
            self.step()
        return 1000 * (time.perf_counter() - started)

    def between_tokens(self, size: int, requests: int, steps: int) -> float:
        """Return the median milliseconds between two tokens of requests that decode together.

        Args:
            size: tokens of each prompt.
            requests: number of requests.
            steps: tokens of each that are timed.
        """
        names = [self.add(self.tokens(size), WARM_UP + steps) for _ in range(requests)]
        reached, moments = dict.fromkeys(names, 0), list[float]()
        while self.busy:
            reached |= self.step()
            if min(reached.values()) >= WARM_UP and max(reached.values()) < WARM_UP + steps:
                moments.append(time.perf_counter())
        return 1000 * statistics.median(after - before for before, after in pairwise(moments))

    def serve(self, load: list[dict[str, Any]], documents: list[list[int]], answer: int) -> list[float]:
        """Return the milliseconds from each request's arrival to its first token.

        Args:
            load: requests in order: seconds to `at`, numbers of `documents`, `question` in token ids.
            documents: token ids of each.
            answer: tokens of an answer.
        """
        waiting, asked_at, first = list(load), dict[str, float](), dict[str, float]()
        started = time.perf_counter()
        while waiting or self.busy:
            while waiting and time.perf_counter() - started >= waiting[0]["at"]:
                request = waiting.pop(0)
                tokens = [token for number in request["documents"] for token in documents[number]]
                asked_at[self.add([*tokens, *request["question"]], answer)] = request["at"]
            if not self.busy:
                time.sleep(max(0.0, waiting[0]["at"] - (time.perf_counter() - started)))
                continue
            for name in self.step():
                first.setdefault(name, time.perf_counter() - started)
        return [1000 * (first[name] - at) for name, at in asked_at.items()]


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure.

    Args:
        asked: `model` (folder), `quantization` ("" or fp8), `longest` (tokens of a context), `memory` (share of the
            GPU's), `requests` (most at a time), `vocabulary`, `prefill` (lengths), `decode` ([length, requests]),
            `steps`, `repeat`, and `loads`: lists as `VllmEngine.serve` takes them, with `documents` and `answer`.

    Returns:
        `version`; milliseconds by length (`prefill`), by case (`decode`), and of each request (`loads`).
    """
    engine = VllmEngine(asked)
    engine.first_token(512)  # the first call compiles
    prefill = {size: [engine.first_token(size) for _ in range(asked["repeat"])] for size in asked["prefill"]}
    decode = {f"{size} {rows}": engine.between_tokens(size, rows, asked["steps"]) for size, rows in asked["decode"]}
    loads = [engine.serve(load, asked["documents"], asked["answer"]) for load in asked["loads"]]
    return {
        "version": engine.version,
        "prefill": {size: statistics.median(times) for size, times in prefill.items()},
        "decode": decode,
        "loads": loads,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))), flush=True)
