"""The documents and questions of `ragkv demo`: one coast, its people and its boats, all invented for this project.

`NN-slug.md` starts with a `# Title` line. `questions.jsonl` has one object per line: "q" the question, "a" the accepted
answers, "kind" "one", "two" (needs two documents) or "none" (answer "unknown"), "documents" the file names without
ending that hold the answer.
"""

from importlib.resources import files
from pathlib import Path


def folder() -> Path:
    """The installed folder with the documents and `questions.jsonl`."""
    return Path(str(files(__name__)))
