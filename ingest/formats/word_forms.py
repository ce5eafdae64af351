"""Boxes and lists of Word forms: what is ticked and chosen.

checkBox (default, checked), ddList (result, listEntry)     fields of older forms
checkbox (checked)                                          of a content control, which shows signs of its own
"""

from __future__ import annotations

from collections.abc import Mapping

from ragkv.ingest.formats.numbering import whole
from ragkv.ingest.formats.symbols import EMPTY, TICKED
from ragkv.ingest.formats.word_styles import is_on

FORM_TAGS = {"checkBox", "checkbox", "default", "checked", "ddList", "result", "listEntry"}
"""Elements that say something of a form."""
FORM_ENDS = {"checkBox", "ddList", "sdtContent"}
"""Those whose end says something."""


class FormFields:
    """The box, the list and the content control that are open."""

    def __init__(self) -> None:
        self._box: bool | None = None
        self._control: bool | None = None
        self._choices: list[str] | None = None
        self._chosen = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Take what an element says."""
        match tag:
            case "checkBox":
                self._box = False
            case "default" | "checked" if self._box is not None:
                self._box = is_on(attributes)
            case "checkbox":
                self._control = False
            case "checked":
                self._control = is_on(attributes)
            case "ddList":
                self._choices, self._chosen = [], 0
            case "default" | "result" if self._choices is not None:
                self._chosen = max(whole(attributes.get("val"), 0), 0)
            case "listEntry" if self._choices is not None:
                self._choices.append(attributes.get("val", ""))

    def end(self, tag: str) -> str:
        """End an element. Returns what it shows."""
        shown = ""
        if tag == "checkBox" and self._box is not None:
            shown, self._box = TICKED if self._box else EMPTY, None
        elif tag == "ddList" and self._choices is not None:
            shown = self._choices[self._chosen] if self._chosen < len(self._choices) else ""
            self._choices = None
        elif tag == "sdtContent":
            self._control = None
        return shown

    def shown(self, text: str) -> str:
        """Return text of a run, or the box of the content control whose sign it is."""
        if self._control is None or len(text) != 1:
            return text
        box, self._control = TICKED if self._control else EMPTY, None
        return box
