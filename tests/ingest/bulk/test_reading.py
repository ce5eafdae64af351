"""What travels to a worker of bulk ingestion is what was read."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument
from ragkv.ingest.document_ids import Rejected
from ragkv.types import Document

pytestmark = pytest.mark.scale


def test_a_document_arrives_with_its_pages_source_and_file() -> None:
    from ragkv.ingest.bulk.reading import decode_item, encode_item

    document = Document("a.pdf", "A", "Tea.", {"n": [1]}, "c", ((0, 2),), "/a.pdf", b"%PDF-\x00\xff")
    assert decode_item(encode_item(document)) == document


def test_a_refusal_arrives_with_its_reason() -> None:
    from ragkv.ingest.bulk.reading import decode_item, encode_item

    assert decode_item(encode_item(Rejected("a.pdf", InvalidDocument("it is empty")))) == "it is empty"
