"""What a document may have beside its text, measured without recursion."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from ragkv.catalog import limits
from ragkv.catalog.limits import MAX_DEPTH, MAX_METADATA_BYTES, MAX_METADATA_KEYS, PRUNED, check_metadata, fitting
from ragkv.passages import MAX_LABEL, headings, shortened


def nested(levels: int) -> Any:
    """Metadata of so many levels, its own included."""
    value: Any = "x"
    for _ in range(levels - 1):
        value = [value]
    return {"key": value}


@pytest.mark.parametrize("levels", [1, 2, MAX_DEPTH])
def test_metadata_within_the_limits_passes(levels: int) -> None:
    check_metadata(nested(levels))
    check_metadata({str(n): n for n in range(MAX_METADATA_KEYS)})
    check_metadata({"a": [2**63 - 1, -(2**63), 2**53 + 1, 1e300, True, str(2**64)]})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (nested(500_000), "nested deeper"),
        ({"a": [{"b": nested(MAX_DEPTH)}, 1]}, "nested deeper"),
        ({str(n): n for n in range(MAX_METADATA_KEYS + 1)}, "keys"),
        ({"a": "é" * MAX_METADATA_BYTES}, "bytes"),
        ({"a": float("nan")}, "not JSON"),
        ({"a": 2**63}, "64 bits, such as 9223372036854775808; send them as text"),
        ({"a": [{"b": [-(2**63) - 1]}]}, "64 bits"),
        ({"a": object()}, "not JSON"),
        ({"a": "\ud800"}, "surrogates"),
    ],
)
def test_metadata_beyond_a_limit_is_refused_with_the_limit(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_metadata(metadata)


def test_of_the_metadata_of_a_file_is_kept_what_fits() -> None:
    found = {"format": "pdf", "deep": nested(100), "pages": list(range(9000)), "nothing": float("inf"), "n": 2**64}
    assert fitting(found) == {"format": "pdf"}
    many = {str(n): "x" * n for n in range(2 * MAX_METADATA_KEYS)}
    assert list(fitting(many)) == [str(n) for n in range(MAX_METADATA_KEYS)]
    check_metadata(fitting({str(n): "x" * 5000 for n in range(9)}))


def test_stored_metadata_is_shown_down_to_the_deepest_level() -> None:
    deep = {"text": 'a "quoted [[[[ {{{{\\', "list": [[n] for n in range(50)], **nested(MAX_DEPTH)}
    assert limits.read_metadata(json.dumps(deep)) == deep
    beyond = limits.read_metadata(json.dumps({"before": 1, **nested(900), "after": [2, {"a": 3}]}))
    assert (beyond["before"], beyond["after"]) == (1, [2, {"a": 3}])
    value, levels = beyond["key"], 1
    while isinstance(value, list):
        value, levels = value[0], levels + 1
    assert (value, levels) == (PRUNED, MAX_DEPTH)


def test_stored_metadata_of_any_depth_is_read_in_a_thread_with_a_small_stack() -> None:
    text, found = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", list[Any]()
    before = threading.stack_size(256 * 1024)
    try:
        reader = threading.Thread(target=lambda: found.append(limits.read_metadata(text)))
        reader.start()
        reader.join()
    finally:
        threading.stack_size(before)
    assert found


def test_a_long_heading_is_cut_with_an_ellipsis() -> None:
    (first, second) = headings(f"# {'word ' * 40_000}\n\ntext\n\n## Short\n")
    assert len(first[1]) <= MAX_LABEL
    assert first[1].endswith("…")
    assert second[1] == "Short"
    assert shortened("x" * MAX_LABEL) == "x" * MAX_LABEL
