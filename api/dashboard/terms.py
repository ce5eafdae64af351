"""The terms of the overview, explained for people who have not read about the methods."""

from __future__ import annotations

from nicegui.element import Element

from ragkv.metrics.figures import FIGURES

TERMS = {
    **{figure.name: figure.says for figure in FIGURES},
    "First token": "Time from the question to the first word of the answer, over time: the median, the time that 95% of"
    " the questions kept within, and the estimate of a full prefill.",
    "Tokens a second": "Tokens of answers that were written in the last minute, by second.",
    "Waiting": "Requests in the queue now, and how many it takes. Longer queues are refused.",
    "Ratios": "The four shares above, over time. Without answers there is no line.",
    "Traffic": "Tokens that were written by second, and the requests that waited and ran.",
}
"""Explanation of each term."""


class Term(Element, component="term.js"):
    """A term whose explanation is shown on hover and focus."""

    def __init__(self, name: str):
        super().__init__()
        self._props.update({"name": name, "text": TERMS[name]})
