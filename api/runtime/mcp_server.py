"""The MCP server over any transport: it offers the tools and the documents of a backend.

It is made of the SDK's low-level server. The one above it puts its own words before every error, and sets up logging.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from mcp import types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from ragkv import __version__
from ragkv.api.errors import Fault, fault_of
from ragkv.api.runtime.mcp_resources import TEMPLATE, list_documents, read_document
from ragkv.api.runtime.mcp_tools import TOOLS
from ragkv.api.runtime.request_context import current
from ragkv.api.runtime.tool_backend import ToolBackend, ToolRefused
from ragkv.api.schemas.faults import readable

INSTRUCTIONS = (
    "ragkv answers questions from documents that were ingested before. `search` finds passages, `ask` answers with "
    "citations. A collection holds the documents of one purpose; `list_collections` names them."
)

Context = ServerRequestContext[Any, Any]
BackendOf = Callable[[Context], ToolBackend]
"""Returns the backend that does the work of a request."""

logger = logging.getLogger("ragkv.api")


def make_server(backend_of: BackendOf) -> Server[Any]:
    """Make the server. A transport runs it."""
    handlers = McpHandlers(backend_of)
    server = Server[Any](
        "ragkv",
        title="ragkv",
        version=__version__,
        instructions=INSTRUCTIONS,
        get_tool_input_schema=lambda name: TOOLS[name].input_schema if name in TOOLS else None,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_read_resource=handlers.read_resource,
    )
    # The SDK traces every message, and an environment variable can say where to. RAGKV_TRACES traces requests.
    server.middleware.clear()
    return server


class McpHandlers:
    """Answers the requests of the protocol."""

    def __init__(self, backend_of: BackendOf):
        self._backend_of = backend_of

    async def list_tools(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """List the tools."""
        return types.ListToolsResult(tools=[tool.described() for tool in TOOLS.values()])

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Call a tool. What goes wrong is its result, so that the model that called it can read the reason.

        Raises:
            MCPError: There is no such tool.
        """
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}")
        try:
            backend, progress = self._backend_of(context), context.session.report_progress
            content = await tool.run(backend, dict(params.arguments or {}), progress)
        except Exception as error:
            text = types.TextContent(text=tool_fault(error).detail)
            return types.CallToolResult(content=[text], is_error=True)
        # The same as text, for clients that read no structured content.
        text = types.TextContent(text=json.dumps(content, ensure_ascii=False))
        return types.CallToolResult(content=[text], structured_content=content)

    async def list_resources(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """List the documents. Raises MCPError."""
        try:
            return await list_documents(self._backend_of(context), params.cursor if params else None)
        except Exception as error:
            raise _protocol_error(error) from None

    async def list_templates(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        """List the form of the documents' addresses."""
        return types.ListResourceTemplatesResult(resource_templates=[TEMPLATE])

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        """Return the text of a document. Raises MCPError."""
        try:
            return await read_document(self._backend_of(context), params.uri)
        except Exception as error:
            raise _protocol_error(error) from None


def tool_fault(error: Exception) -> Fault:
    """Convert an exception to what the client may see: the detail is that of the HTTP API's problem."""
    if isinstance(error, ToolRefused):
        fault = error.fault
    elif isinstance(error, ValidationError):
        fault = _of_arguments(error)
    else:
        fault = fault_of(error)
        if fault.status == 500:
            logger.error("an MCP request failed", exc_info=error)
    current().fault = fault.code
    return fault


def _of_arguments(error: ValidationError) -> Fault:
    found = readable([{**each} for each in error.errors(include_url=False)[:20]])
    return Fault(422, "; ".join(f"{each['at']}: {each['message']}" for each in found[:3]), "invalid_request")


def _protocol_error(error: Exception) -> MCPError:
    if isinstance(error, MCPError):
        return error
    fault = tool_fault(error)
    code = types.INVALID_PARAMS if fault.status in (404, 413, 422) else types.INTERNAL_ERROR
    return MCPError(code, fault.detail, {"code": fault.code})
