"""`ragkv key`: make an API key."""

from __future__ import annotations

from typing import Annotated

import typer

from ragkv.cli.common import out


def key(tenant: Annotated[str, typer.Argument(help="Tenant of the key: letters, digits and hyphens.")]) -> int:
    """Make an API key for a tenant. It is shown once; the settings hold its hash."""
    from api.middleware.keys import make_key

    made, pair = make_key(tenant)
    console = out()
    console.print(f"key       {made}")
    console.print(f"setting   {pair}")
    console.print("Give the key to the tenant; nobody can find it out from the setting. Put the setting into")
    console.print("RAGKV_API_KEYS, behind a comma where there are others, or as a line of the file it names.")
    return 0
