"""Claims of a signed token: what is no time, no name or no audience makes the token invalid, and nothing worse."""

from __future__ import annotations

from contextlib import suppress
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.api.middleware.claims import LATEST, LONGEST_SUBJECT, check_claims

GOOD = {"iss": "https://issuer", "aud": ["ragkv", "other"], "sub": "ada", "exp": 2_000_000_000, "iat": 1.5, "nbf": 0}


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(10**400, id="huge"),
        pytest.param(-(10**400), id="-huge"),
        -1,
        LATEST + 1,
        inf,
        -inf,
        nan,
        1e308,
        True,
        False,
        "2000000000",
        None,
        [],
        {},
    ],
)
def test_a_time_is_a_number_of_the_calendar(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        check_claims({**GOOD, name: value})


@pytest.mark.parametrize(
    "claims",
    [
        *({"sub": subject} for subject in (5, "", None, "a\ud800", "x" * (LONGEST_SUBJECT + 1), ["a"])),
        *({"iss": issuer} for issuer in (1, "\udfff")),
        *({"aud": audience} for audience in (1, {"ragkv": 1}, ["ragkv", None], ["\ud8ff"])),
    ],
)
def test_names_are_strings_that_can_be_written(claims: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is for the log
        check_claims({**GOOD, **claims})


def test_ordinary_claims_pass() -> None:
    check_claims(GOOD)
    check_claims({})
    check_claims({**GOOD, "sub": "x" * LONGEST_SUBJECT, "exp": LATEST, "aud": "ragkv", "anything": 10**400})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(claims=st.dictionaries(st.sampled_from(sorted(GOOD)), VALUES))
def test_no_claim_raises_anything_else_and_times_that_pass_can_be_counted_with(claims: dict[str, Any]) -> None:
    with suppress(ValueError):
        check_claims(claims)
        assert all(0 <= float(claims[name]) <= LATEST for name in ("exp", "nbf", "iat") if name in claims)
