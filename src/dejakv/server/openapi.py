"""The OpenAPI document: FastAPI's, with the bodies that the server reads itself."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


def install(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Adds the schemas of `bodies` to the document of `app`."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, definitions = models_json_schema(
                [(model, "validation") for model in bodies], ref_template="#/components/schemas/{model}"
            )
            found = plain()
            found.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return plain()

    app.openapi = document
