"""LMCache's `lmcache bench engine`, its workload `rag-qa-quality` for a service that brings its own documents and
answers in a few words: the question is sent alone, and the whole reply is the answer. Sending, timing and scoring
stay LMCache's.

    python tests/soak/bare_lmcache.py bench engine --workload rag-qa-quality …
"""

from __future__ import annotations

from lmcache.cli.commands.bench.engine_bench.workloads import rag_qa_quality as workload
from lmcache.cli.main import main


def asked(system: str, passages: list[str], question: str) -> list[dict[str, str]]:
    """The messages of one question."""
    return [{"role": "user", "content": question}]


if __name__ == "__main__":
    workload.compose_qa_messages = asked
    workload.extract_final_answer = str.strip
    main()
