"""Objects of S3, and of stores that speak its protocol, by fsspec.

Credentials, region and endpoint are those of the user, where the AWS tools look for them: `AWS_*` variables, profiles
in ~/.aws, or the role of the machine. Without any, nothing is read; nothing is asked for anonymously.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ragkv.errors import ConfigError, InputError
from ragkv.ingest.source_files import SourceFile, has_known_suffix

_CREDENTIALS = "credentials come from AWS_PROFILE, the other AWS_* variables or ~/.aws, as for the aws command"


def open_bucket(address: str) -> Iterator[SourceFile]:
    """Yield the objects under an address `s3://bucket/prefix`, in order. Those of other formats are left out.

    Raises:
        InputError: They cannot be listed.
        ConfigError: The packages are missing.
    """
    inside = address.removeprefix("s3://").strip("/")
    if not inside:
        raise InputError(f"{address}: name a bucket, as in s3://bucket/prefix")
    try:
        import fsspec
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise _missing(error) from None
    try:
        store: Any = fsspec.filesystem("s3", anon=False, skip_instance_cache=True)
        found: dict[str, dict[str, Any]] = store.find(inside, detail=True)
    except ImportError as error:
        raise _missing(error) from None
    except (OSError, BotoCoreError, ClientError) as error:
        raise InputError(f"{address} cannot be listed: {_reason(error)}") from None
    if not found:
        raise InputError(f"{address}: there is nothing there")
    for key, facts in sorted(found.items()):
        relative = key.removeprefix(inside).strip("/") or PurePosixPath(key).name
        if facts.get("type") == "file" and has_known_suffix(relative):
            yield SourceFile(f"s3://{key}", int(facts.get("size") or 0), partial(_fetch, store, key), remote=True)


def _fetch(store: Any, key: str, folder: Path) -> Path:
    """Copy an object into a folder. Its name on this machine is not its own. Raises InputError."""
    from botocore.exceptions import BotoCoreError, ClientError

    path = folder / f"object{PurePosixPath(key).suffix}"
    try:
        store.get_file(key, os.fspath(path))
    except (OSError, BotoCoreError, ClientError) as error:
        raise InputError(f"s3://{key} cannot be read: {_reason(error)}") from None
    return path


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"s3:// needs {error.name or 's3fs'}, which is not installed: pip install 'fsspec>=2026.2,<2027' "
        "'s3fs>=2026.2,<2027', which are the extra ragkv[sources]"
    )


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if "Credential" in name or "Token" in name:
        return f"there are no credentials; {_CREDENTIALS}"
    if isinstance(error, PermissionError):
        return f"access is denied; {_CREDENTIALS}"
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket or object"
    return " ".join(str(error).split())[:300] or name
