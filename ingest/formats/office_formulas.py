"""Formulas of Word and PowerPoint (OMML), as their elements are met between those of the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragkv.ingest.formats.formulas import Formula


class OfficeFormulas:
    """Follows the elements of formulas.

    Attributes:
        present: The open formula, which takes the text; None outside of formulas.
    """

    def __init__(self) -> None:
        self.present: Formula | None = None
        self._depth = 0

    def has(self, tag: str) -> bool:
        """Whether an element that begins belongs to a formula."""
        return self._depth > 0 or tag == "oMath"

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Begin an element of a formula."""
        self._depth += tag == "oMath"
        if self.present is not None:
            self.present.start_office(tag, attributes)
            return
        from ragkv.ingest.formats.formulas import Formula  # most documents have none

        self.present = Formula()

    def end(self, tag: str) -> Formula | None:
        """End an element of the open formula. Returns the formula where that was its last one."""
        whole = self.present
        self._depth -= tag == "oMath"
        if self._depth:
            if whole is not None:
                whole.end()
            return None
        self.present = None
        return whole
