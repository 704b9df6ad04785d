"""The web page at `/`: three files of the package, which load nothing from other hosts."""

from __future__ import annotations

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


_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}


def _add(path: str, name: str, kind: str) -> None:
    content = (_FOLDER / name).read_bytes()
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}

    @router.get(path)
    @public
    async def file() -> Response:
        return Response(content, media_type=kind, headers=headers)


for path, (name, kind) in _FILES.items():
    _add(path, name, kind)
