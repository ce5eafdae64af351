"""What `ragkv search` shows of a passage."""

from __future__ import annotations

from ragkv.cli.search import excerpt


def test_the_part_with_most_words_of_the_query_is_shown() -> None:
    far = "The motor is new. " * 60
    text = f"{far}Replace the impeller\nof the motor every 300 hours. {far}"
    shown = excerpt(text, "motor IMPELLER hours")
    assert "Replace the impeller of the motor every 300 hours." in shown
    assert shown.startswith("…")
    assert shown.endswith("…")
    assert excerpt(text, "sail") == f"{' '.join(text.split())[:400]}…", "the beginning, where no word occurs"


def test_a_short_passage_is_shown_whole() -> None:
    assert excerpt("Replace the\nimpeller.", "impeller") == "Replace the impeller."
