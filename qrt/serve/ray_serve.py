"""Run replicas behind Ray Serve, which routes, scales and restarts them (`pip install 'qrt[serve,ray]'`).

    serve run qrt.serve.ray_serve:app model=Qwen/Qwen3-8B kv=int8 replicas=2 gpus=1

Each replica is an engine in a thread with the same routes as qrt-serve. The first replica of each machine
downloads a model of the Hub. Beside `replicas` and `gpus` (of one replica; by default tensor_parallel_size
where that is given) the arguments are settings of EngineConfig and ServerConfig.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from qrt.errors import ConfigError, UnsupportedError
from qrt.model_files.location import EXPECTED, api_name
from qrt.offline.llm import engine_config
from qrt.registry import nearest
from qrt.serve.async_llm import AsyncLLM
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.settings import ServerConfig

try:
    from fastapi import FastAPI
    from ray import serve

    from qrt.serve.http.service import Service
    from qrt.serve.routes.app import create_app
except ImportError as error:
    raise UnsupportedError(f"{error.name} is not installed; pip install 'qrt[serve,ray]'") from error

SERVER_FIELDS = {field.name for field in fields(ServerConfig)}


def app(arguments: dict[str, Any]) -> serve.Application:
    """Make the application for `serve run` and `serve.run`; ConfigError for wrong arguments."""
    given = {name: _value(value) for name, value in arguments.items()}
    replicas, gpus = int(given.pop("replicas", 1)), _gpus(given)
    model = given.pop("model", None)
    if model is None:
        raise ConfigError(f"model: expected {EXPECTED}, got none")
    own = {name: given.pop(name) for name in list(given) if name in SERVER_FIELDS}
    for name in ("model_names", "api_keys", "allowed_origins"):
        if name in own:
            own[name] = (own[name],) if isinstance(own[name], str) else tuple(own[name])
    server = ServerConfig(**{"model_names": (api_name(str(model)),), **own})
    if server.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size: expected 1, got {server.data_parallel_size}; replicas=N starts N engines"
        )
    try:
        engine_config(model, given)  # find mistakes here, not in every replica
    except ConfigError as error:
        names = [*SERVER_FIELDS, "replicas", "gpus"]
        hint = next((nearest(name, names) for name in given if nearest(name, names)), "")
        raise ConfigError(f"{error}{hint}") from error

    def build() -> FastAPI:
        return _replica(model, given, server)

    deployment = serve.deployment(serve.ingress(build)())
    options = {"num_replicas": replicas, "ray_actor_options": {"num_gpus": gpus}}
    return deployment.options(name="qrt", **options).bind()


def _gpus(given: dict[str, Any]) -> float:
    """Take `gpus` out of the arguments; ConfigError if a replica's ranks need more."""
    ranks = int(given.get("tensor_parallel_size", 1))
    on_gpus = ranks > 1 and not str(given.get("device", "")).startswith("cpu")
    gpus = float(given.pop("gpus", ranks if on_gpus else 0))
    if on_gpus and gpus < ranks:
        raise ConfigError(f"gpus: expected at least tensor_parallel_size {ranks}, got {gpus:g}")
    return gpus


def _replica(model: str, settings: dict[str, Any], server: ServerConfig) -> FastAPI:
    """Load the model and make its routes, in the replica's process."""
    llm = AsyncLLM(model, **settings)
    llm.client.router.metrics.names = MetricNames(server.model_names[0], server.metrics_prefix)
    app = create_app(Service(llm.client, llm.tokenizer, server))
    app.state.llm = llm  # keep it: without a reference the engine would end
    return app


def _value(value: Any) -> Any:
    """Read an argument; `serve run` passes text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
