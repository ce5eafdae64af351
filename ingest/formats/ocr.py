"""Text of scanned pages: PDFium renders the page, and RapidOCR reads the picture.

The package rapidocr (Apache-2.0) holds its models (PP-OCRv6, Apache-2.0), so nothing is fetched. They compute with
onnxruntime, in one thread. Both are the extra `ragkv[ocr]`.

The size of the picture is bounded, whatever the size of the page. With it time and memory are bounded, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pypdfium2 import PdfPage

from ragkv.errors import InvalidDocument

MOST_PIXELS = 1_800_000
"""Pixels of a picture, about those of A4 at 137 dpi. Detecting lines needs about 250 bytes for each."""
LONGEST_SIDE = 2000
SHORTEST_SIDE = 736
"""A narrower picture gets a white margin, because the detector would enlarge it to this size."""
CERTAIN = 0.8
"""Least certainty of a page that is taken as it stands. Below, it may be upside down, and is read so as well."""
_SCALE = 150 / 72
"""Most pixels for a point of a page: 150 dpi."""
_NO_MEMORY = ("bad_alloc", "Insufficient memory", "Failed to allocate", "Cannot allocate", "failed to map segment")
"""How onnxruntime, OpenCV and the loader of libraries say that memory is short."""


@dataclass(frozen=True)
class Found:
    """What was read in a picture.

    Attributes:
        extents: Top and bottom of each text, line by line.
        texts: The texts.
        certainty: Mean of their scores, 0 to 1.
    """

    extents: Sequence[tuple[float, float]]
    texts: Sequence[str]
    certainty: float


class Reader:
    """Reads pictures of pages. The models are loaded once."""

    def __init__(self) -> None:
        """Load the packages and the models.

        Raises:
            InvalidDocument: A package cannot be imported.
            MemoryError: There is not enough memory.
        """
        try:
            self._engine = _engine()
        except Exception as error:
            _raise_if_no_memory(error)
            raise InvalidDocument(f"OCR does not start ({error}); install ragkv[ocr] again") from None

    def read(self, page: PdfPage) -> str:
        """Return the lines of a page from top to bottom; "" where there is no text.

        Raises:
            InvalidDocument: The page cannot be read.
            MemoryError: There is not enough memory.
        """
        try:
            picture = _picture(page)
            found = self._found(picture)
            if found and found.certainty < CERTAIN:
                turned = self._found(picture[::-1, ::-1].copy())
                found = max(found, turned or found, key=lambda each: each.certainty)
        except Exception as error:
            _raise_if_no_memory(error)
            raise InvalidDocument(f"OCR failed: {type(error).__name__}") from None
        return _lines(found) if found else ""

    def _found(self, picture: Any) -> Found | None:
        """Return the texts of a picture, None where there are none."""
        read = self._engine(picture)
        if read.boxes is None or not read.txts:
            return None
        extents = [(float(box[:, 1].min()), float(box[:, 1].max())) for box in read.boxes]
        return Found(extents, read.txts, sum(read.scores) / len(read.scores))


def _engine() -> Any:
    """Make the engine. It gets the paths of its models, because it would fetch those that it does not find."""
    import cv2
    import rapidocr

    cv2.setNumThreads(1)
    logging.disable()  # the engine tells which files it uses
    models = Path(rapidocr.__file__).parent / "models"
    threads = "EngineConfig.onnxruntime"
    return rapidocr.RapidOCR(
        params={
            f"{threads}.intra_op_num_threads": 1,
            f"{threads}.inter_op_num_threads": 1,
            f"{threads}.enable_cpu_mem_arena": False,
            "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
            "Global.use_cls": False,  # it turns some upright lines of small print upside down
            "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
            "Rec.rec_batch_num": 1,  # six lines at a time need half a gigabyte more and are no quicker in one thread
        }
    )


def scale_of(width: float, height: float) -> float:
    """Return how many pixels a point of a page of this size, in points, gets."""
    width, height = max(width, 1.0), max(height, 1.0)
    return min(_SCALE, math.sqrt(MOST_PIXELS / (width * height)), LONGEST_SIDE / max(width, height))


def _picture(page: PdfPage) -> Any:
    """Render a page, [height, width, blue green red]."""
    import numpy as np

    drawn = page.render(scale=scale_of(*page.get_size()), rev_byteorder=False, prefer_bgrx=False).to_numpy()
    height, width = drawn.shape[:2]
    picture = np.full((max(height, SHORTEST_SIDE), max(width, SHORTEST_SIDE), 3), 255, np.uint8)
    picture[:height, :width] = drawn.reshape(height, width, -1)[:, :, :3]  # one channel counts for all three
    return picture


def _lines(found: Found) -> str:
    """Join what stands side by side."""
    lines: list[str] = []
    low = high = 0.0
    for (top, bottom), text in zip(found.extents, found.texts, strict=True):
        middle = (top + bottom) / 2
        if lines and low < middle < high and top < (low + high) / 2 < bottom:
            lines[-1] = f"{lines[-1]} {text}"
        else:
            lines.append(text)
            low, high = top, bottom
    return "\n".join(lines)


def _raise_if_no_memory(error: Exception) -> None:
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        raise MemoryError from None
