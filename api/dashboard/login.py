"""The way to the dashboard: from `/`, and login and logout for services with API keys."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from ragkv.api.dashboard.guard import COOKIE, LOGIN, ROOT, TICKET_SECONDS, accepts_html, login_page, prefix_of
from ragkv.api.middleware.authenticator import Authenticator

router = APIRouter(include_in_schema=False)


@router.get("/")
async def root(request: Request) -> Response:
    """Send a browser that opens the address of the service to the dashboard."""
    if not request.app.state.settings.dashboard:
        raise HTTPException(404, "there is nothing here; /openapi.json describes the API")
    return RedirectResponse(f"{ROOT}/", 307)


@router.post(LOGIN)
async def login(request: Request) -> Response:
    """Exchange a key or a token for a ticket."""
    authenticator: Authenticator = request.app.state.authenticator
    key = (await request.form()).get("key")
    caller = await authenticator.caller_of(key.strip()) if isinstance(key, str) else None
    if caller is None:
        if accepts_html(request.headers):
            return login_page(prefix_of(request.scope), wrong=True)
        raise HTTPException(401, "this API key is not known", {"WWW-Authenticate": 'Bearer realm="ragkv"'})
    response = RedirectResponse(ROOT, 303)
    secure = request.url.scheme == "https"
    ticket = authenticator.tickets.issue(caller)
    path = prefix_of(request.scope) or "/"
    response.set_cookie(COOKIE, ticket, TICKET_SECONDS, path=path, httponly=True, samesite="strict", secure=secure)
    return response


@router.post(f"{ROOT}/logout")
async def logout(request: Request) -> Response:
    """Delete the ticket."""
    response = RedirectResponse(ROOT, 303)
    response.delete_cookie(COOKIE, prefix_of(request.scope) or "/")
    return response
