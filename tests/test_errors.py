"""Errors say what happened, and hold no password of an address."""

from __future__ import annotations

import pytest

from ragkv.errors import ConfigError, InputError, without_password

HIDDEN = [
    ("http://user:SECRET@host/docs: no such file", "http://***@host/docs: no such file"),
    ("http:/user:SECRET@host/docs", "http:/***@host/docs"),
    ("redis://:SEC/RET@host:6379/0", "redis://***@host:6379/0"),
    (
        "postgresql+psycopg://u:SECRET@host/db and s3://k:SECRET@bucket",
        "postgresql+psycopg://***@host/db and s3://***@bucket",
    ),
]


@pytest.mark.parametrize(("text", "shown"), HIDDEN)
def test_addresses_are_shown_without_their_users_and_passwords(text: str, shown: str) -> None:
    assert without_password(text) == shown


@pytest.mark.parametrize("text", ["mail ada@example.org", "http://host:8000/a@b", "at 10:30/a@b", "a://b c@d"])
def test_what_is_no_user_of_an_address_stays(text: str) -> None:
    assert without_password(text) == text


def test_no_error_holds_a_password() -> None:
    for kind in (InputError, ConfigError):
        error = kind("http://user:SECRET@host/ cannot be read", "look at http://user:SECRET@host/")
        assert "SECRET" not in f"{error} {error.message} {error.hint} {error!r}"
