"""`python -m tools.sync_client` writes ragkv/client/synchronous.py, the asynchronous client without `await`.

Whoever changes a method changes `asynchronous.py` and runs this; a test compares the two files.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parents[1] / "ragkv" / "client"
SOURCE, TARGET = CLIENT / "asynchronous.py", CLIENT / "synchronous.py"

RULES = (
    (
        r"^\"\"\"The asynchronous client: .*\"\"\"",
        '"""The synchronous client. `tools/sync_client.py` makes it of asynchronous.py."""',
    ),
    (r"An asynchronous client of one service, for one event loop\.", "A client of one service. Thread-safe."),
    (r"\(await ([^()]*\([^()]*\))\)", r"\1"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\b(?:Async(?=Iterator|Client|BaseTransport)|a(?=iter\(|read\(|close\(|synccontextmanager))", ""),
    (r"\bsynccontextmanager\b", "contextmanager"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"for (\w+) in (page\.\w+):\n +yield \1$", r"yield from \2"),
)
"""(what stands in the asynchronous client, what stands in the other), applied in this order."""


def synchronous(text: str) -> str:
    """Return the synchronous client for the text of the asynchronous one, formatted."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the file."""
    TARGET.write_text(synchronous(SOURCE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
