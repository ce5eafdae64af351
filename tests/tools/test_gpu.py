"""The script that measures everything on a GPU: what it does where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_architecture import HEAVY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures, where there is a GPU")
def test_a_part_that_fails_is_told_and_nothing_of_the_service_is_needed(tmp_path: Path) -> None:
    program = (
        f"import sys; from pathlib import Path; sys.modules.update(dict.fromkeys({sorted(HEAVY - {'xxhash'})}));"
        f"from tools.gpu import main; sys.exit(main(Path({str(tmp_path)!r}), ['kernels']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "kernels are measured on a GPU" in done.stdout
    assert "kernels: " in done.stdout.splitlines()[-1]
    assert (tmp_path / "kernels.md").read_text() == ""
