"""The terms of the overview, explained for people who have not read about the methods."""

from __future__ import annotations

from nicegui.element import Element

TERMS = {
    "Cache hits": "Retrieved chunks whose KV was found in the cache or the store, so that it was not computed again.",
    "Recomputed": "Tokens of the retrieved chunks that the model computed again, to connect chunk with chunk.",
    "Kept": "Tokens of the retrieved chunks whose KV the model read. The method left out the others as not needed.",
    "Loaded": "Bytes of stored KV that were read, of those that the whole chunks would have taken.",
    "Bytes saved": "Bytes of KV that did not have to be read, because only the needed blocks were.",
    "First token": "Time from the question to the first word of the answer: half of the questions were quicker than the"
    " first number, 95% than the second. Below: what it would have taken to read the chunks as text, estimated from the"
    " speed of this machine.",
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
