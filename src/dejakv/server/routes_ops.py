"""`/health`, `/ready` and `/metrics`, for the operator."""

from fastapi import APIRouter, Depends, Response
from starlette.requests import Request as HttpRequest

from dejakv.server.access import operator_only, service_of
from dejakv.server.service import Service

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The process responds."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "The engine's thread has ended or the server shuts down."}})
async def ready(response: Response, service: Service = Depends(service_of)) -> dict[str, str]:
    """The model is loaded and accepts requests."""
    if not service.worker.alive:
        response.status_code = 503
        return {"status": "not ready"}
    return {"status": "ready", "model": service.model_name}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(http: HttpRequest, _: None = Depends(operator_only)) -> Response:
    """Prometheus' text format. Figures of the whole process, without any partition's name. Where API keys are required,
    only the operator's key opens it: a tenant could subtract its own figures and infer the others'."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(http.app.state.registry), media_type=CONTENT_TYPE_LATEST)
