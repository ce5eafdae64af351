"""The serving loop: passes of several questions share forwards, and each question fails, leaves and expires alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from ragkv.engine.answer_alone import answer_alone
from ragkv.engine.engine import Engine
from ragkv.engine.loop import ServingLoop
from ragkv.engine.request import Request
from ragkv.errors import Expired, OutOfMemory, Stopping
from ragkv.model.layer_pass import Pass
from ragkv.report import Answer
from ragkv.types import AskOptions, Key
from tests.api.runtime.mixed_requests import open_small
from tests.engine.listening import FutureListener, future_of


def start(loop: ServingLoop, question: str, options: AskOptions) -> Future[Answer]:
    """Begin with a question; return its future."""
    request = Request(question, options, FutureListener())
    loop.start(request)
    return future_of(request)


@contextmanager
def forward_by(engine: Engine, forward: Callable[[Sequence[Pass]], list[Tensor]]) -> Iterator[None]:
    """Run passes by another function."""
    engine.model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.model.forward


def small_loop(engine: Engine, questions: Sequence[str], tokens: int = 6) -> tuple[ServingLoop, list[Future[Answer]]]:
    """A loop that has begun with these questions, and their futures."""
    loop, options = ServingLoop(engine), AskOptions(method="reuse", top_k=3, max_tokens=tokens)
    return loop, [start(loop, question, options) for question in questions]


def test_chunks_that_several_questions_miss_are_encoded_once_beside_a_running_answer(tmp_path: Path) -> None:
    asked = [f"Who built the {name} of Tarn?" for name in ("harbour", "bridge", "mill", "quay")]
    with open_small(tmp_path) as engine:
        expected = [engine.answer(each, AskOptions(method="reuse", top_k=3, max_tokens=6)) for each in asked]
        loop, (running,) = small_loop(engine, asked[:1], tokens=60)
        while not loop._running:
            loop.step()
        keys = engine.catalog.keys()
        for key in keys:
            engine.tiers.drop(key)
            engine.store.delete(key)
        encoded: list[int] = []
        beside: list[bool] = []
        stored: list[Key] = []
        forward, put = engine.model.forward, engine.store.put

        def note_write(key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
            stored.append(key)
            put(key, head, body)

        def note_encodings(passes: Sequence[Pass]) -> list[Tensor]:
            captures = [each for each in passes if each.capture is not None and each.capture.keys_too]
            encoded.extend(hash(tuple(each.tokens.tolist())) for each in captures)
            beside.extend([len(passes) > len(captures)] * bool(captures))
            return forward(passes)

        engine.store.put = note_write  # type: ignore[method-assign]
        with forward_by(engine, note_encodings):
            options = AskOptions(method="reuse", top_k=3, max_tokens=6)
            futures = [start(loop, question, options) for question in asked]
            while loop.count:
                loop.step()
        assert [each.result().answer for each in futures] == [each.answer for each in expected]
        assert len(encoded) == len(set(encoded)) >= 4
        assert len(stored) == len(set(stored)) == len(encoded), "and stored once"
        assert all(beside), "the running answer gets its token in the same forward"
        misses = [each.result().report.cache.misses for each in futures]
        assert sum(misses) >= len(encoded)
        assert running.result().answer


def test_a_fault_of_a_first_pass_ends_no_running_answer(tmp_path: Path) -> None:
    with open_small(tmp_path) as engine:
        loop, (running,) = small_loop(engine, ["Who built the harbour of Tarn?"], tokens=30)
        alone = engine.answer("Who built the harbour of Tarn?", AskOptions(method="reuse", top_k=3, max_tokens=30))
        while not loop._running:
            loop.step()
        bad = start(loop, "Who built the mill?", AskOptions(method="reuse", top_k=2))
        forward = engine.model.forward

        def without_room(passes: Sequence[Pass]) -> list[Tensor]:
            if any(len(each.tokens) > 1 for each in passes):
                raise MemoryError
            return forward(passes)

        with forward_by(engine, without_room):
            while loop.count:
                loop.step()
        assert isinstance(bad.exception(), OutOfMemory)
        assert running.result().answer == alone.answer


@pytest.mark.parametrize("method", ["cacheblend", "multi-infllm"])
def test_every_forward_of_a_plan_that_is_completed_on_the_run_decodes_the_running_answer(
    tmp_path: Path, method: str
) -> None:
    with open_small(tmp_path) as engine:
        loop, (running,) = small_loop(engine, ["Who built the harbour of Tarn?"], tokens=120)
        while not loop._running:
            loop.step()
        beside, forward = list[int](), engine.model.forward

        def note(passes: Sequence[Pass]) -> list[Tensor]:
            beside.append(sum(len(each.tokens) == 1 for each in passes))
            return forward(passes)

        asked = start(loop, "Who built the mill?", AskOptions(method=method, top_k=3, max_tokens=2))
        with forward_by(engine, note):
            while not asked.done():
                loop.step()
        assert len(beside) > engine.model.shape.layers, "one pass a layer"
        assert not running.done()
        assert min(beside) == 1, "no forward leaves the running answer without a token"


def test_of_questions_that_share_a_forward_which_fails_only_the_one_at_fault_ends(tmp_path: Path) -> None:
    asked = ["Who built the harbour of Tarn?", "Who built the bridge of Tarn?", "Who built the mill of Tarn?"]
    with open_small(tmp_path) as engine:
        expected = [engine.answer(each, AskOptions(method="reuse", top_k=3, max_tokens=6)).answer for each in asked]
        loop, futures = small_loop(engine, asked)
        forward, bad = engine.model.forward, set(engine.model.prompt.question(asked[1]))
        bad -= set(engine.model.prompt.question(asked[0])) | set(engine.model.prompt.question(asked[2]))
        sizes = list[int]()

        def without_room(passes: Sequence[Pass]) -> list[Tensor]:
            sizes.append(len(passes))
            if any(bad & set(each.tokens.tolist()) for each in passes if len(each.tokens) > 1):
                raise MemoryError
            return forward(passes)

        with forward_by(engine, without_room):
            while loop.count:
                loop.step()
        assert bad
        assert sizes[:2] == [3, 1], "together, and then each alone"
        assert [futures[i].result().answer for i in (0, 2)] == [expected[i] for i in (0, 2)]
        assert isinstance(futures[1].exception(), OutOfMemory)


def test_a_pass_that_several_questions_wait_for_and_that_fails_ends_them_once(tmp_path: Path) -> None:
    with open_small(tmp_path) as engine:
        keys = engine.catalog.keys()
        for key in keys:
            engine.tiers.drop(key)
            engine.store.delete(key)
        loop, futures = small_loop(engine, ["Who built the harbour of Tarn?", "When was the harbour of Tarn built?"])
        forward = engine.model.forward

        def fail(passes: Sequence[Pass]) -> list[Tensor]:
            if any(each.capture is not None and each.capture.keys_too for each in passes):
                raise MemoryError
            return forward(passes)

        with forward_by(engine, fail):
            for _ in range(20):
                loop.step()
        assert [type(each.exception(0)) for each in futures] == [OutOfMemory] * 2


def test_deadlines_are_those_of_the_clock_that_is_given(tmp_path: Path) -> None:
    with open_small(tmp_path) as engine:
        now = [5.0]
        loop = ServingLoop(engine, clock=lambda: now[0])
        options = AskOptions(method="reuse", top_k=2, max_tokens=40)
        early, late = (
            Request("Who built the mill of Tarn?", options, FutureListener(), deadline=end) for end in (6.0, 60.0)
        )
        for request in (early, late):
            loop.start(request)
        while not loop._running:
            loop.step()
        assert loop.count == 2
        now[0] = 6.0
        loop.step()
        assert isinstance(future_of(early).exception(0), Expired)
        assert loop.count == 1
        while loop.count:
            loop.step()
        assert future_of(late).result(0).answer


def test_a_question_alone_ends_at_its_deadline_or_when_it_is_stopped(tmp_path: Path) -> None:
    with open_small(tmp_path) as engine:
        question, options = "Who built the mill of Tarn?", AskOptions(method="reuse", top_k=2, max_tokens=40)
        with pytest.raises(Expired):
            answer_alone(engine, question, options, deadline=0.0)
        calls = iter((False, False, True))
        with pytest.raises(Stopping):
            answer_alone(engine, question, options, stopped=lambda: next(calls))
        assert next(calls, None) is None, "it was asked before every step"
