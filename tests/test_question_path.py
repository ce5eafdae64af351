"""The two paths that docs/architecture.md lists: one question by function, one KV byte range by hand.

Both are recorded while a real service answers one question over HTTP, with a disk store and nothing in memory. A
function is on the question's path if it is on the stack while a piece of work is called. A hand is a file that is on
the stack, from the chunk source down, while the bytes are read.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.api.conftest import BRIDGE, HARBOUR, serving, settings

ROOT = Path(__file__).resolve().parent.parent
MOST_FUNCTIONS, MOST_HANDS = 40, 5
WORK = {
    "ragkv.engine.scheduler:TenantQueue.enqueue",
    "ragkv.retrieval.retriever:Retriever.search",
    "ragkv.engine.chunk_source:StoredChunk.load",
    "ragkv.recompute.scout:Scout.plan",
    "ragkv.model.decoder:DecoderModel.forward",
    "ragkv.engine.generation:sample",
    "ragkv.api.runtime.answer_channel:AnswerChannel.publish",
}
"""What a question needs done: a place in the queue, chunks, their KV, a plan, passes, a token, and its way out."""
FIRST_TOKEN = "ragkv.api.runtime.answer_channel:AnswerChannel.publish"
LOAD = "ragkv.engine.chunk_source:StoredChunk.load"


class CallRecorder:
    """Sees every call of the project's functions while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.path: list[str] = []
        self.work: set[str] = set()
        self.hands: set[tuple[str, ...]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on:
            return
        if event == "c_call" and argument is os.preadv:
            self._record_hands(frame)
        if event != "call" or FIRST_TOKEN in self.work or name_of(frame) not in WORK:
            return
        self.work.add(str(name_of(frame)))
        self.path += [name for name in reversed(stack(frame)) if name not in self.path]

    def _record_hands(self, frame: FrameType) -> None:
        names = stack(frame)
        if LOAD in names:
            below = names[: 1 + names.index(LOAD)]
            self.hands.add(tuple(dict.fromkeys(name.partition(":")[0] for name in reversed(below))))


def name_of(frame: FrameType) -> str | None:
    """`module:qualified name` of one of the project's functions, None for others."""
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(ROOT) or file.relative_to(ROOT).parts[0] not in ("ragkv", "api", "ingest"):
        return None
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return f"{module}:{frame.f_code.co_qualname}"


def stack(frame: FrameType | None) -> list[str]:
    """The project's functions on the stack, the innermost first."""
    found = []
    while frame is not None:
        name = name_of(frame)
        if name is not None and "<" not in name:
            found.append(name)
        frame = frame.f_back
    return found


@contextmanager
def recording(calls: CallRecorder) -> Iterator[None]:
    """Threads that begin in here are recorded."""
    threading.setprofile(calls)
    try:
        yield
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> CallRecorder:
    """One streamed question, after another one that has warmed everything up."""
    calls = CallRecorder()
    asked = {"question": "Who built the harbour of Tarn?", "stream": True}
    with recording(calls), serving(settings(tmp_path_factory.mktemp("path"))) as service:
        assert service.post("/v1/documents?wait=true", {"documents": [HARBOUR, BRIDGE]}).status_code == 200
        assert service.post("/v1/answers", asked).status_code == 200
        calls.on = True
        assert "Ada" in service.post("/v1/answers", asked).text
        calls.on = False
    assert sys.getprofile() is None
    return calls


def listed(heading: str) -> list[str]:
    """The code spans of the numbered list below a heading of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


def test_one_question_takes_few_functions_and_they_are_listed(recorded: CallRecorder) -> None:
    assert recorded.work == WORK, "all work was seen"
    assert len(recorded.path) <= MOST_FUNCTIONS, "\n".join(recorded.path)
    assert listed("The functions of one question") == recorded.path


def test_one_byte_range_passes_few_hands_and_they_are_listed(recorded: CallRecorder) -> None:
    assert recorded.hands, "bytes were read"
    (hands,) = recorded.hands
    assert len(hands) <= MOST_HANDS, hands
    assert tuple(listed("The hands of one KV byte range")) == hands
