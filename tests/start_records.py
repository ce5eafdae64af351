"""What a start of ragkv writes down about model and machine, for tests that start on a new data folder.

A start on an empty folder tests the model (self_test.py) and measures costs (cost_model.py), which takes two seconds of
CPU time. Tests about something else begin with the records that one start in this process wrote: they start as a
restarted service does. A start with another model, store or seal does not find its records, and tests and measures.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ragkv.config import load_settings
from ragkv.engine.engine import Engine

RECORDS = ("costs", "qualified")
TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


@cache
def _recorded() -> Path:
    """A data folder on which the bundled model was started once."""
    folder = Path(tempfile.mkdtemp(prefix="ragkv-records-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Engine.open(load_settings(data=folder, model=str(TINY), dtype="float32", device="cpu", threads=1)).close()
    return folder


def with_records(data: Path) -> Path:
    """Copy the records to a data folder that has none; returns the folder."""
    for name in RECORDS:
        if not (data / name).exists():
            shutil.copytree(_recorded() / name, data / name)
    return data
