"""`lfps:split=…` of a request: the answer is that of `lfps`, and its report says where the keys lay."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragkv.types import AskOptions
from tests.engine.test_session_manager import QUESTIONS, fill
from tests.quick import quick_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def facts(answer):
    decoding = answer.report.decoding
    return answer.answer, answer.report.decode, decoding.steps, decoding.read, decoding.present, decoding.why_dense


def test_a_split_answer_is_that_of_lfps_and_says_what_lay_in_host_memory(tmp_path: Path) -> None:
    with fill(quick_engine(tmp_path)) as engine:
        for question in QUESTIONS[:2]:
            whole, split = (
                engine.answer(question, AskOptions(decode=spec, max_tokens=16, method="reuse", top_k=4))
                for spec in ("lfps:least=8", "lfps:least=8,split=5")
            )
            assert facts(split) == facts(whole)
            assert whole.report.decoding.in_host == 0
            decoding = split.report.decoding
            end = decoding.present + (decoding.steps - 1) / 2
            assert decoding.in_host == pytest.approx(end - 4 - 5), "all but the sinks and the newest"


def test_a_conversation_goes_on_after_a_split_answer(tmp_path: Path) -> None:
    with fill(quick_engine(tmp_path / "a")) as engine, fill(quick_engine(tmp_path / "b")) as other:
        for question in QUESTIONS[:3]:
            whole, split = (
                each.answer(question, AskOptions(decode=spec, max_tokens=12, conversation="talk", top_k=2))
                for each, spec in ((engine, "lfps:least=8"), (other, "lfps:least=8,split=5"))
            )
            assert facts(split) == facts(whole)
            assert split.report.tokens == whole.report.tokens
            assert split.report.decoding.in_host > 0
