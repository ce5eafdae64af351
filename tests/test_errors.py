"""What errors say, and what counts as short memory."""

from __future__ import annotations

import errno
import os

import pytest

from ragkv.errors import ConfigError, OutOfMemory, is_out_of_memory, memory_errors, without_password

SECRETS = (
    "http://user:SECRET@host/x",
    "http:/user:SECRET@host/x",
    "redis://:SECRET@host:6379/0",
    "redis://:SEC/SECRET@host:6379/0",
    "redis+cluster://user:SECRET@one:1,user:SECRET@two:1",
    "postgresql+psycopg://user:SECRET#1@host/name",
    "git+https://SECRET@host/repository@main",
)
PLAIN = (
    "http://host:8000/x@y",
    "git+https://host/repository@main#docs",
    "git+file:///folder/repository@main",
    "reader@example.org",
    "http://host/?q=a@b",
)


@pytest.mark.parametrize("address", SECRETS)
def test_no_error_shows_the_password_of_an_address(address: str) -> None:
    error = ConfigError(f"no answer from {address} (refused)", f"give another one than {address}")
    assert "SECRET" not in error.public
    for shown in (str(error), repr(error), error.hint):
        assert "SECRET" not in shown
        assert "***@" in shown
    assert str(error).startswith("no answer from " + address.partition(":/")[0])


@pytest.mark.parametrize("address", PLAIN)
def test_what_is_no_password_stays(address: str) -> None:
    assert without_password(f"see {address}.") == f"see {address}."


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("could not create a primitive"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_whatever_a_library_raises_where_memory_is_short_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemory), memory_errors():
        raise error


def test_any_other_fault_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="can't allocate memory"), memory_errors():
        raise ValueError("can't allocate memory")
    with pytest.raises(RuntimeError, match="shapes"), memory_errors():
        raise RuntimeError("shapes cannot be multiplied")
