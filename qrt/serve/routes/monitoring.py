"""Routes for operators: metrics, load, version, settings; and, if enabled, administration."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from qrt.model_files.location import model_commit
from qrt.serve.http.openapi import Responses, errors
from qrt.serve.http.service import Service
from qrt.version import __version__

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
TEXT: Responses = {
    200: {
        "description": "Prometheus' text format",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


def monitoring_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response, responses={**errors(), **TEXT})
    async def metrics() -> Response:
        service.check_running_or_draining()
        return Response(await service.client.ask("metrics"), media_type=EXPOSITION)

    @routes.get("/load", responses=errors())
    async def load() -> dict[str, Any]:
        return await _load(service)

    @routes.get("/token_load", responses=errors())
    async def token_load() -> dict[str, float]:
        load = await _load(service)
        waiting = load["waiting"] and load["waiting_prompt_tokens"] / load["kv_pool_tokens"]
        return {
            "current_load": load["kv_usage"],
            "logical_max_load": load["kv_usage"] + waiting,
            "dynamic_max_load": load["kv_usage"] + waiting,
        }

    @routes.get("/version", responses=errors())
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/get_server_info", responses=errors())
    @routes.get("/get_model_info", include_in_schema=False)
    async def server_info() -> dict[str, Any]:
        service.check_running_or_draining()
        info = msgspec.structs.asdict(service.client.info)
        about = {"models": list(service.config.model_names), "revision": model_commit(info.pop("model"))}
        return {"version": __version__, **about, **info}

    if service.config.enable_admin_endpoints:

        @routes.post("/reset_prefix_cache", responses=errors())
        @routes.post("/flush_cache", include_in_schema=False)
        async def reset_prefix_cache() -> dict[str, str]:
            service.check_running()
            await service.client.ask("reset_prefix_cache")
            return {"status": "ok"}

    return routes


async def _load(service: Service) -> dict[str, Any]:
    service.check_running_or_draining()
    return msgspec.json.decode(await service.client.ask("load"))
