"""`ragkv key`: make an API key."""

from __future__ import annotations

from typing import Annotated

import typer

from ragkv.cli.common import out


def key(
    tenant: Annotated[str, typer.Argument(help="Tenant of the key: letters, digits and hyphens.")],
    requests: Annotated[int | None, typer.Option(min=0, help="Requests a minute that the tenant may send.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens a minute, of prompts and answers.")] = None,
    bytes: Annotated[int | None, typer.Option("--bytes", min=0, help="Bytes of documents a minute.")] = None,
    reader: Annotated[bool, typer.Option("--reader", help="The key may search, ask and read, but not change.")] = False,
    stored: Annotated[int | None, typer.Option(min=0, help="Bytes of KV and kept files of all its documents.")] = None,
) -> int:
    """Make an API key for a tenant. It is shown once; the settings hold its hash.

    Limits given here replace RAGKV_TENANT_REQUESTS, _TOKENS, _BYTES and _STORED for this tenant; 0 is no limit.
    """
    from ragkv.api.middleware.keys import make_key, name_of_key
    from ragkv.api.runtime.callers import Role

    given = {"requests": requests, "tokens": tokens, "bytes": bytes, "stored": stored}
    role: Role = "reader" if reader else "writer"
    made, pair = make_key(tenant, {name: value for name, value in given.items() if value is not None}, role)
    console = out()
    console.print(f"key       {made}")
    console.print(f"setting   {pair}")
    console.print(f"name      {name_of_key(pair.partition('=')[2].partition(';')[0])}, in the audit log")
    console.print("Give the key to the tenant; nobody can find it out from the setting. Put the setting into")
    console.print("RAGKV_API_KEYS, behind a comma where there are others, or as a line of the file it names.")
    return 0
