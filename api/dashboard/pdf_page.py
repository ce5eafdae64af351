"""The pages of a PDF in the viewer, as pictures. The page of a passage comes first, with the passage marked."""

from __future__ import annotations

from base64 import b64encode
from functools import partial

from anyio import to_thread
from nicegui import ui

from ragkv.api.dashboard.answer_text import Place
from ragkv.api.dashboard.buttons import quiet_button
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.catalog import DocumentInfo
from ragkv.errors import NotFound, RagkvError
from ragkv.ingest.page_pictures import PagePicture, page_at

# When the picture has its size. Of a mark that is higher than the window the beginning is shown.
_SHOW_MARK = """({ target }) => {
  const spot = target.nextElementSibling;
  const block = spot.clientHeight > window.innerHeight / 2 ? "start" : "center";
  if (spot.clientHeight) spot.scrollIntoView({ block });
}"""
_GONE = "This document is no longer stored."


class PageView:
    """A page of a document. Built in the current element; `open` draws it."""

    def __init__(self, engine_thread: EngineThread, info: DocumentInfo, place: Place | None):
        self._service, self._info, self._place = engine_thread.catalog_service, info, place
        self._passage, self._number, self._pages = (0, 0), 0, 0
        with ui.row().classes("items-center"):
            self._back = quiet_button("Previous page", lambda: self._show(self._number - 1), "chevron_left")
            self._forth = quiet_button("Next page", lambda: self._show(self._number + 1), "chevron_right")
        self._told = ui.label().classes("note").props("role=status")
        with ui.element("div").classes("sheet") as self._sheet:
            self._picture = ui.element("img").on("load", js_handler=_SHOW_MARK)
            self._spot = ui.element("div")
        self._arrange("")

    async def open(self) -> None:
        """Draw the page of the passage, or the first one. Nothing is done where a page is shown."""
        if self._number:
            return
        self._number = 1
        if self._place is not None:
            try:
                document = await to_thread.run_sync(self._service.original, self._info.collection, self._info.id)
            except NotFound:
                self._arrange(_GONE)
                return
            start, words = self._place
            if document.text.startswith(words, start):  # else it is another version
                self._passage, self._number = (start, start + len(words)), page_at(document, start)
        await self._show(self._number)

    async def _show(self, number: int) -> None:
        self._number = number
        self._arrange(f"Page {number} is being drawn.")
        draw = partial(self._service.picture, self._info.collection, self._info.id, number, self._passage)
        try:
            picture = await to_thread.run_sync(draw, limiter=self._service.drawing)
        except RagkvError as error:
            self._arrange(f"Page {number} cannot be shown: {error.public}")
            return
        if self._number != number:  # another page was asked for meanwhile
            return
        if picture is None:
            self._arrange(_GONE)
            return
        self._picture._props["src"] = f"data:image/png;base64,{b64encode(picture.png).decode()}"
        self._picture._props["alt"] = f"Page {number} of {self._info.title or self._info.id}"
        self._pages = picture.pages
        self._spot.style(replace=_over(picture))
        self._arrange(f"Page {number} of {picture.pages}{self._about(picture)}", drawn=True)

    def _about(self, picture: PagePicture) -> str:
        """Return what is told of the passage."""
        if self._passage == (0, 0):
            return ""
        return ". The passage is marked." if picture.mark else ". The passage was not found here; nothing is marked."

    def _arrange(self, told: str, drawn: bool = False) -> None:
        self._told.set_text(told)
        self._sheet.set_visibility(drawn)
        self._picture.update()
        self._back.set_enabled(self._number > 1)
        self._forth.set_enabled(self._number < self._pages)


def _over(picture: PagePicture) -> str:
    """Return the style of an element that lies over the mark of a picture."""
    if picture.mark is None:
        return "display: none"
    (_, top, _, bottom), (_, height) = picture.mark, picture.size
    return f"top: {100 * top / height:.2f}%; height: {max(100 * (bottom - top) / height, 0.1):.2f}%"
