"""Documents as MCP resources: `ragkv://documents/{collection}/{id}` is the text of a document."""

from __future__ import annotations

from urllib.parse import quote, unquote

from mcp import types
from mcp.shared.exceptions import MCPError

from ragkv.api.runtime.tool_backend import ToolBackend
from ragkv.api.schemas.tools import URI_TEMPLATE, DocumentSummary, ListArguments, read_document_uri
from ragkv.errors import NotFound

PAGE = 100
"""Most documents of a page."""
MIME_TYPE = "text/plain"
TEMPLATE = types.ResourceTemplate(
    name="document",
    title="Document",
    uri_template=URI_TEMPLATE,
    description="The text of a document. A slash in an id is written as %2F.",
    mime_type=MIME_TYPE,
)


async def list_documents(backend: ToolBackend, cursor: str | None) -> types.ListResourcesResult:
    """List the documents of all collections, collection by collection. A page has documents of one collection.

    Args:
        backend: Whose documents they are.
        cursor: The `next_cursor` of the previous page; None for the first.

    Raises:
        MCPError: The cursor is not of a page.
        RagkvError: The documents cannot be listed.
    """
    start, slash, after = (cursor or "/").partition("/")
    if not slash:
        raise MCPError(types.INVALID_PARAMS, "cursor: send the next cursor of a page, or leave it out")
    start = unquote(start)
    names = [each.name for each in (await backend.collections()).collections if each.name >= start]
    if not names:
        return types.ListResourcesResult(resources=[])
    # If the collection of the cursor was deleted meanwhile, the next one is listed from its start.
    arguments = ListArguments(collection=names[0], limit=PAGE, after=after if names[0] == start else "")
    page = await backend.documents(arguments)
    following = f"{quote(names[1], safe='')}/" if len(names) > 1 else None
    if page.after is not None:
        following = f"{quote(names[0], safe='')}/{page.after}"
    return types.ListResourcesResult(resources=[_resource(each) for each in page.documents], next_cursor=following)


async def read_document(backend: ToolBackend, uri: str) -> types.ReadResourceResult:
    """Return the text of a document.

    Raises:
        NotFound: The address is no document's.
        ValidationError: The collection or the id in it is no name.
        RagkvError: The document cannot be read.
    """
    document = read_document_uri(uri)
    if document is None:
        raise NotFound(f"there is no resource {uri!r}; documents are {URI_TEMPLATE}")
    text = await backend.text(document)
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=MIME_TYPE, text=text)])


def _resource(document: DocumentSummary) -> types.Resource:
    return types.Resource(
        name=document.id,
        title=document.title,
        uri=document.uri,
        description=f"Document of the collection {document.collection}.",
        mime_type=MIME_TYPE,
        size=document.bytes,
    )
