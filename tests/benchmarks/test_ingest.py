"""Documents through the whole ingest: what was ingested, and the share of the batched prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ingest import IngestParams, ingest
from ragkv.cli import run
from ragkv.config import load_settings


def test_every_round_ingests_its_documents_and_prefills_their_chunks(tiny_folder: Path) -> None:
    settings = load_settings(model=str(tiny_folder), device="cpu")
    found = ingest(settings, IngestParams(documents=6, tokens=60, rounds=2), lambda *_: None)
    assert found.documents == 6
    assert 40 < found.tokens <= 60
    assert found.tokens_per_second / found.documents_per_second == pytest.approx(found.tokens, rel=0.2)
    assert 0 < found.share < 1, "ingest does what the prefill does, and more"
    assert found.encode.tokens == round(found.tokens)


def test_layers_are_of_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "ingest", "--layers", "2"]) == 2
    assert "--shape" in capsys.readouterr().err
