"""Claims of a token that its issuer has signed. A signature says who wrote them, and nothing of what they are."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

LONGEST_SUBJECT = 256
"""Most characters of a subject."""
LATEST = 253_402_300_799
"""The last second of the year 9999, in Unix seconds."""
_TIMES = ("exp", "nbf", "iat")


def check_claims(claims: Mapping[str, Any]) -> None:
    """Check the kinds and the ranges of the registered claims (RFC 7519, 4.1) that are there.

    Raises:
        ValueError: A claim cannot mean what its name says.
    """
    for name in _TIMES:
        if name in claims:
            _check_time(name, claims[name])
    audience = claims.get("aud", "")
    named = audience if isinstance(audience, list) else [audience]
    for text in (claims.get("iss", ""), claims.get("sub", "-"), *named):
        if not isinstance(text, str):
            raise ValueError("iss, sub and aud are strings")
        text.encode()  # half of a surrogate pair has no UTF-8 form; its UnicodeEncodeError is a ValueError
    if not 0 < len(claims.get("sub", "-")) <= LONGEST_SUBJECT:
        raise ValueError("sub is empty or too long")


def _check_time(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{name} is not finite")
    if not 0 <= value <= LATEST:
        raise ValueError(f"{name} is out of range")
