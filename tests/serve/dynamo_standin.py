"""What qrt uses of ai-dynamo 1.6, for machines without it: the same names, fields and rules.

`test_dynamo.py` compares it with the package where that is installed.
"""

from __future__ import annotations

import argparse
import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class Context:
    """A request's id, and whether its client has left."""

    def __init__(self, id: str | None = None) -> None:
        self._id, self._stopped = id or "none", False

    def id(self):
        return self._id

    def is_stopped(self):
        return self._stopped

    def stop_generating(self):
        self._stopped = True


class LLMEngine(ABC):
    """The base of workers: four methods are theirs, the others have defaults."""

    @classmethod
    @abstractmethod
    async def from_args(cls, argv=None): ...

    @abstractmethod
    async def start(self, worker_id): ...

    @abstractmethod
    async def generate(self, request, context): ...

    @abstractmethod
    async def cleanup(self): ...

    async def abort(self, context):
        return None

    async def health_check_payload(self):
        return None

    async def kv_event_sources(self):
        return []


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: LlmRegistration | None = None


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    structural_tag: dict[str, object] | None = field(default_factory=dict)

    @classmethod
    def from_runtime_config(cls, runtime_cfg, model_name, served_model_name=None, **overrides):
        own = {name: getattr(runtime_cfg, name) for name in ("endpoint_types", "discovery_backend")}
        return cls(model_name=model_name, served_model_name=served_model_name, **{**own, **overrides})


class DynamoRuntimeArgGroup:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("Dynamo Runtime Options")
        group.add_argument("--namespace", default="dynamo")
        group.add_argument("--endpoint", default=None)
        group.add_argument("--endpoint-types", default="chat,completions")
        group.add_argument("--discovery-backend", default="etcd")


class DynamoRuntimeConfig:
    @classmethod
    def from_cli_args(cls, args):
        own = cls()
        own.__dict__.update(vars(args))
        return own

    def validate(self) -> None:
        return None


class DynamoException(Exception): ...


class InvalidArgument(DynamoException): ...


class EngineShutdown(DynamoException): ...


class Unknown(DynamoException): ...


class HttpError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"HTTP {code}: {message}")
        self.code, self.message = code, message


def token_ids_to_list(value):
    return value if value is None else list(value)


def parse_endpoint(endpoint: str) -> tuple[str, str, str]:
    namespace, component, name = endpoint.removeprefix("dyn://").split(".")
    return namespace, component, name


def bos_token_id_or(tokenizer, default: int = 1) -> int:
    own = getattr(tokenizer, "bos_token_id", None)
    return default if own is None else int(own)


def build_health_check_payload(bos_token_id: int) -> dict[str, Any]:
    stop = {"max_tokens": 1, "ignore_eos": True}
    request = {"token_ids": [bos_token_id], "stop_conditions": stop, "sampling_options": {"temperature": 0.0}}
    return {**request, "_HEALTH_CHECK": True}


def run(engine_cls, argv=None):
    engine, _ = asyncio.run(engine_cls.from_args(argv))
    return engine


PARTS = {
    "common.backend": (LLMEngine, EngineConfig, LlmRegistration, WorkerConfig),
    "common.backend.run": (run,),
    "common.backend.health_check": (bos_token_id_or, build_health_check_payload),
    "common.configuration.groups.runtime_args": (DynamoRuntimeArgGroup, DynamoRuntimeConfig),
    "common.utils.runtime": (parse_endpoint,),
    "common.utils.token_ids": (token_ids_to_list,),
    "llm.exceptions": (InvalidArgument, EngineShutdown, Unknown, HttpError),
}


def modules() -> dict[str, ModuleType]:
    """The modules by name, for `sys.modules`."""
    made = {}
    for name, parts in PARTS.items():
        made[f"dynamo.{name}"] = module = ModuleType(f"dynamo.{name}")
        for part in parts:
            setattr(module, part.__name__, part)
    return made
