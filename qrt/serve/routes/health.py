"""Routes that tell load balancers and Kubernetes whether the server is healthy."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from qrt.request.pooling import PoolingParams
from qrt.request.sampling import SamplingParams
from qrt.serve.http.openapi import errors
from qrt.serve.http.service import Service


def health_routes(service: Service) -> APIRouter:
    """Make the routes. All but /health_generate are cheap: they generate nothing.

    While some of a server's engines live, the server is healthy; the body then names the dead ones.
    """
    routes = APIRouter()

    @routes.get("/health", include_in_schema=False)
    @routes.get("/healthz", include_in_schema=False)
    @routes.get("/ping", include_in_schema=False)
    @routes.post("/ping", include_in_schema=False)
    async def health() -> Response:
        service.check_running_or_draining()
        _check_engine(service)
        return JSONResponse({"dead": dead}) if (dead := service.client.dead) else Response()

    @routes.get("/liveness", include_in_schema=False)
    async def liveness() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get("/readiness", include_in_schema=False)
    async def readiness() -> Response:
        service.check_running()
        _check_engine(service)
        return JSONResponse({"status": "ready"} | ({"dead": dead} if (dead := service.client.dead) else {}))

    @routes.get("/health_generate", responses=errors())
    async def health_generate() -> dict[str, str]:
        service.check_running()
        if service.client.info.pooling is None:
            params = SamplingParams(temperature=0, max_tokens=1)
            stream = await service.client.submit([service.collector(None, [0], params)])
        else:
            stream = await service.client.submit([service.pooled([0], PoolingParams())], whole=True)
        async for _ in stream:
            pass
        return {"status": "ok"}

    return routes


def _check_engine(service: Service) -> None:
    """Raise HTTPException 503 if no engine would generate anything."""
    if service.client.stopped:
        raise HTTPException(503, str(service.client.stopped))
    if service.client.silent_seconds > service.config.watchdog_timeout / 2:
        raise HTTPException(503, "the engine is stuck in a step")
