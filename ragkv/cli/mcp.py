"""`ragkv mcp`: an MCP server for a client that starts it, such as a desktop application."""

from __future__ import annotations

import os
import sys

from ragkv.cli.common import Data, Device, Model, Store, Url, settings_from, tell


def mcp(data: Data = None, store: Store = None, model: Model = None, device: Device = None, url: Url = None) -> None:
    """Serve search, questions and documents to an MCP client over standard input and output."""
    settings = settings_from(data, store, model, device, url=url)
    from ragkv.api.runtime.mcp_stdio import serve_stdio

    serve_stdio(settings, tell)
    # Clients kill a server that stays for two seconds. The interpreter may need as long to take down torch, and it
    # aborts if a thread still computes.
    sys.stderr.flush()
    os._exit(0)
