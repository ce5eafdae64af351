"""What the settings allow a parser. OCR is off by default, and needs packages that are not always installed."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from ragkv.api.app import create_app
from ragkv.cli import run
from ragkv.cli.doctor_service import limits
from ragkv.cli.findings import Findings
from ragkv.config import IngestSettings, load_settings
from ragkv.errors import MissingPackage
from ragkv.ingest.sandbox import Allowance, allowance_of


def test_without_ocr_its_packages_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    assert allowance_of(load_settings(parse_seconds=7).part(IngestSettings)) == Allowance(seconds=7.0)


@pytest.mark.parametrize("package", ["rapidocr", "onnxruntime"])
def test_ocr_without_its_packages_is_an_error_that_says_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"RAGKV_OCR needs .*{package}.*: pip install 'rapidocr>=.*' 'onnxruntime>=.*extra ragkv\[ocr\]"
    settings = load_settings(ocr=True, data=tmp_path, dashboard=False)
    with pytest.raises(MissingPackage, match=said):
        allowance_of(settings.part(IngestSettings))
    with pytest.raises(MissingPackage, match=said):
        create_app(settings)
    limits(settings, findings := Findings())
    assert findings.wrong == 1
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


def test_ingest_without_the_packages_ends_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    monkeypatch.setenv("RAGKV_OCR", "true")
    (tmp_path / "a.txt").write_text("Tea")
    assert run(["ingest", str(tmp_path / "a.txt"), "--data", str(tmp_path / "data")]) == 2
    assert "pip install 'rapidocr>=" in " ".join(capsys.readouterr().err.split())


def test_the_settings_name_the_packages_as_the_project_does(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ocr"]
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(MissingPackage) as error:
        allowance_of(load_settings(ocr=True).part(IngestSettings))
    assert " ".join(f"'{requirement}'" for requirement in wanted) in str(error.value)
