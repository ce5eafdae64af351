"""The history at the side of the conversation: the latest questions of a tenant are searched, opened and deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from anyio import to_thread
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from ragkv.api.dashboard.buttons import confirm_deletion
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.request_context import Origin
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.history import QUESTION_CHARS

LATEST = 30
"""Questions at the side."""
_PAGE: Origin = "page"
_WORDS = 200
"""Characters of the words that are sought."""


class HistoryList(Element, component="history.js"):
    """The latest questions, drawn by history.js, which names the properties and events."""

    def __init__(self) -> None:
        super().__init__()
        self._props["items"] = []

    def show(self, **props: Any) -> None:
        """Change some properties."""
        self._props.update(props)


class HistoryPanel:
    """The history of a tenant."""

    def __init__(
        self,
        engine_thread: EngineThread,
        tenant: Tenant,
        on_open: Callable[[str], Any],
        on_removed: Callable[[str], Any],
    ):
        """Add the list to the current element.

        Args:
            engine_thread: Has the history.
            tenant: Whose history it is.
            on_open: Shows the answer of this id.
            on_removed: Is told the id of an answer that the user has deleted.
        """
        self._engine_thread, self._tenant, self._on_removed = engine_thread, tenant, on_removed
        self._words, self._origin = "", _PAGE
        self._shown: object = None
        self._list = HistoryList()
        self._list.on("open", lambda event: on_open(str(event.args)))
        self._list.on("search", self._search)
        self._list.on("remove", self._remove)

    def mark(self, id: str) -> None:
        """Mark the answer that the page shows; "" for none."""
        self._list.show(shown=id)

    async def refresh(self) -> None:
        """Show the latest questions, if there are others than before."""
        sought = partial(matches, self._origin, self._words.casefold().split())
        answers = self._engine_thread.catalog_service.answers
        found = await to_thread.run_sync(answers, self._tenant.name, LATEST, inf, sought)
        state = [(each.when, each.rating) for each in found]
        if state != self._shown:
            self._shown = state
            self._list.show(items=[_item(each) for each in found])

    async def _search(self, event: GenericEventArguments) -> None:
        asked = event.args if isinstance(event.args, dict) else {}
        origin: Origin = "api" if asked.get("origin") == "api" else "page"
        self._words, self._origin = str(asked.get("words", ""))[:_WORDS], origin
        await self.refresh()

    async def _remove(self, event: GenericEventArguments) -> None:
        id = str(event.args)
        found = self._engine_thread.history.find(self._tenant.name, id)
        if found is None:
            return await self.refresh()
        kept = " Its conversation still remembers it; “Delete conversation” removes that." if found.conversation else ""
        if await confirm_deletion(f"Delete this question and its answer from the history?{kept}"):
            gone = partial(_is, self._tenant.name, id)
            await to_thread.run_sync(self._engine_thread.history.remove, gone)
            self._on_removed(id)
            await self.refresh()


def matches(origin: Origin, words: Sequence[str], recorded: RecordedAnswer) -> bool:
    """Whether an answer was asked for there, and it has each of these words, folded, together with its question."""
    if recorded.origin != origin:
        return False
    text = f"{recorded.answer.question}\n{recorded.answer.answer}".casefold() if words else ""
    return all(word in text for word in words)


def _is(tenant: str, id: str, recorded: RecordedAnswer) -> bool:
    return (recorded.tenant, recorded.id) == (tenant, id)


def _item(recorded: RecordedAnswer) -> dict[str, Any]:
    answer = recorded.answer
    return {
        "id": recorded.id,
        "when": recorded.when,
        "question": answer.question[:QUESTION_CHARS],
        "answer": answer.answer[:QUESTION_CHARS],
        "rating": recorded.rating,
    }
