"""`ragkv calibrate`: heads from the user's own documents, and the confidence from questions with known answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ragkv.cli import run
from tests.tune.tiny_folder import passages

KEEPERS = ("Ada Brook", "Otto Lindqvist", "Ida Falk", "Sten Berg", "Ola Krus")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with five lamps in `default`, and a page about tea in `other`."""
    folder = tmp_path_factory.mktemp("filled")
    lines = [
        {"id": f"lamp{n}", "title": f"Lamp {n}", "text": f"The lamp of Tarn {n} is kept by {name}."}
        for n, name in enumerate(KEEPERS)
    ]
    (folder / "lamps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "tea.md").write_text("# Tea\n\nTea is grown on hills. It is picked by hand in spring.")
    for file, collection in (("lamps.jsonl", "default"), ("tea.md", "other")):
        where = ["--data", str(folder / "d"), "--collection", collection]
        assert run(["ingest", str(folder / file), *where]) == 0
    return folder / "d"


@pytest.fixture
def data(filled: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(filled, tmp_path / "d")


def calibrate(data: Path, questions: list[dict[str, object]], *more: str) -> int:
    file = data.parent / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)))
    return run(["calibrate", "--confidence", str(file), "--top-k", "1", "--data", str(data), *more])


def test_the_profile_gets_coefficients_and_the_next_answer_a_confidence(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [
        {"q": f"Who keeps the lamp of Tarn {n}?", "a": ["somebody else" if n == 4 and again else name]}
        for again in range(2)
        for n, name in enumerate(KEEPERS)
    ]
    questions.append({"q": "hello", "a": ["hello"]})  # a rule answers, so it teaches nothing
    assert calibrate(data, questions, "--unanswerable", "other") == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("questions          20", "calibration error", "AUROC", "precision 90%"))
    (profile,) = (data / "profiles").glob("*.json")
    assert len(json.loads(profile.read_text())["confidence"]) == 7
    asked = ["ask", "Who keeps the lamp of Tarn 0?", "--data", str(data), "--top-k", "1", "--json"]
    assert run([*asked, "--abstain-below", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0 < answer["report"]["confidence"] < 1
    assert (answer["answer"], answer["report"]["abstained"]) == ("unknown", True)


@pytest.mark.parametrize(
    ("questions", "message"),
    [([{"q": "Who?"}], "no question has gold answers"), ([{"q": "Who keeps it?", "a": ["x"]}], "needs 20 answers")],
)
def test_questions_that_teach_nothing_are_refused_and_no_profile_is_saved(
    data: Path, capsys: pytest.CaptureFixture[str], questions: list[dict[str, object]], message: str
) -> None:
    assert calibrate(data, questions) == 1
    assert message in capsys.readouterr().err
    assert not (data / "profiles").exists()


def test_documents_give_heads_a_reach_and_a_cap_that_the_next_answer_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, passage in enumerate(passages(12)):
        (tmp_path / f"{number}.md").write_text(f"# {passage.title}\n\n{passage.text}")
    data = tmp_path / "d"
    assert run(["calibrate", "--documents", str(tmp_path), "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("questions ", "reach ", "cap ", "of the answers with 6% of the blocks"))
    assert "points of F1 to full (" in printed
    (saved,) = (data / "profiles").glob("*.json")
    profile = json.loads(saved.read_text())
    assert profile["retrieval_heads"]
    assert profile["scout_reach"] in (4, 8, 16)
    assert run(["ingest", str(tmp_path / "0.md"), "--data", str(data)]) == 0
    capsys.readouterr()
    assert run(["ask", "Who?", "--data", str(data), "--method", "scout", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["selection"]["agreement"] == profile["agreement"][1]
    assert len(profile["agreement"]) == 4
    assert run(["ask", "Who?", "--data", str(data), "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["report"]["method"]
    assert profile["method"] in (asked, "full") or asked == "full", "unless the gate prefers a full prefill"


def test_documents_without_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["calibrate", "--documents", str(tmp_path / "empty"), "--data", str(tmp_path / "d")]) == 1
    assert "no text in these documents" in capsys.readouterr().err
    assert not (tmp_path / "d" / "profiles").exists()
