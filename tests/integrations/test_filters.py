"""Filters of other frameworks become those of ragkv, or an error that says what there is."""

from __future__ import annotations

import pytest

from ragkv.errors import InputError
from ragkv.integrations.filters import filter_of


def test_conditions_become_one_filter():
    assert filter_of([("year", "==", 1889), ("kind", "in", ("mill", None))]) == {"year": 1889, "kind": ["mill", None]}
    assert filter_of([]) == {}


@pytest.mark.parametrize(
    ("conditions", "named"),
    [([("year", ">", 1889)], "the operator '>'"), ([("year", "==", 1), ("year", "==", 2)], "two conditions on 'year'")],
)
def test_what_ragkv_does_not_have_is_named(conditions, named):
    with pytest.raises(InputError, match=rf"do not have {named}; use '==' and 'in', each key once, joined by AND"):
        filter_of(conditions)
