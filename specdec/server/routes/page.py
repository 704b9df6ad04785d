"""The page at `/`: three files of the package, which load nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from specdec.server.guards import GuardedRoute, public

router = APIRouter(route_class=GuardedRoute, include_in_schema=False)

_FOLDER = Path(__file__).parents[1] / "page"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src 'self' blob:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


@router.get("/")
@public
async def index() -> Response:
    """The page; it asks for a key where the server wants one."""
    return _file("index.html", "text/html; charset=utf-8")


@router.get("/page/app.js")
@public
async def script() -> Response:
    """What it does."""
    return _file("app.js", "text/javascript; charset=utf-8")


@router.get("/page/style.css")
@public
async def style() -> Response:
    """How it looks."""
    return _file("style.css", "text/css; charset=utf-8")


def _file(name: str, kind: str) -> Response:
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(_content(name), media_type=kind, headers=headers)


@cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
