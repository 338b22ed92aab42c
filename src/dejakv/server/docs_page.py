"""`/docs`: Swagger UI over `/openapi.json`, from files on this machine, so that it works without a network."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
"""Files of Swagger UI (Apache-2.0) in the package fastapi-offline (MIT), and their types."""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(http: HttpRequest) -> HTMLResponse:
    """The page that lists the endpoints and tries them."""
    root = http.scope.get("root_path", "")
    return get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="DejaKV: endpoints",
        swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/swagger-ui.css",
        swagger_favicon_url=f"{root}/docs/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # it would send the document to another host
    )


def _serve(name: str, kind: str) -> None:
    @router.get(f"/docs/{name}")
    def asset() -> Response:
        content = files("fastapi_offline").joinpath("static", name).read_bytes()
        return Response(content, media_type=kind, headers={"Cache-Control": "max-age=86400"})


for _name, _kind in ASSETS.items():
    _serve(_name, _kind)
