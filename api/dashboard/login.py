"""Coming in and leaving, where there are keys."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from api.dashboard.guard import COOKIE, LOGIN, ROOT, TICKET_SECONDS, LoginTickets, form, wants_page

router = APIRouter(include_in_schema=False)


@router.post(LOGIN)
async def login(request: Request) -> Response:
    """A key for a ticket."""
    tickets = LoginTickets(request.app.state.keys)
    given = (await request.form()).get("key")
    tenant = tickets.keys.whose(given.strip()) if isinstance(given, str) else None
    if tenant is None:
        if wants_page(request.headers):
            return form(wrong=True)
        raise HTTPException(401, "this key is not known here", {"WWW-Authenticate": 'Bearer realm="ragkv"'})
    response = RedirectResponse(ROOT, 303)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, tickets.make(tenant), TICKET_SECONDS, httponly=True, samesite="strict", secure=secure)
    return response


@router.post(f"{ROOT}/logout")
async def logout() -> Response:
    """The ticket is given back."""
    response = RedirectResponse(ROOT, 303)
    response.delete_cookie(COOKIE)
    return response
