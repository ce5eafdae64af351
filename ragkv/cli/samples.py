"""The documents and questions of `ragkv demo`: one coast, its people and its boats, all invented for this project.

The data folder `ragkv/samples` holds them. `NN-slug.md` starts with a `# Title` line. `questions.jsonl` has one object
per line:

    q           the question
    a           the accepted answers
    kind        "one", "two" (the answer needs two documents) or "none" (the answer is "unknown")
    documents   file names, without their ending, of the documents that hold the answer
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def samples_folder() -> Path:
    """The installed folder with the documents and `questions.jsonl`."""
    return Path(str(files("ragkv"))) / "samples"
