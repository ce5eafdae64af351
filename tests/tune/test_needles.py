"""Generated documents as training contexts."""

from __future__ import annotations

from random import Random

from ragkv.tune.needles import NeedleSource


def test_a_long_context_of_few_documents_asks_what_they_hold() -> None:
    """One document cannot hold the answers of so many questions; fewer are asked then."""
    source = NeedleSource(lambda text: len(text.split()))
    asked = [len(source.context(Random(seed), 6144).asked) for seed in range(60)]
    assert min(asked) >= 1
