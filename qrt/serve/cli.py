"""`qrt-serve`: the OpenAI-compatible server's command line."""

from __future__ import annotations

import logging
from argparse import Namespace, _ArgumentGroup
from dataclasses import fields
from pathlib import Path

from qrt.cli import ArgumentParser, run_main
from qrt.config import ENV, EngineConfig
from qrt.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parser() -> ArgumentParser:
    """vLLM's flag names where they exist."""
    top = ArgumentParser(prog="qrt-serve", description="Serve a model over an OpenAI-compatible API.")
    top.add_argument("model_path", nargs="?", metavar="MODEL", help="checkpoint folder, or 'tiny'")
    top.add_argument("--model", help="the same as a flag")
    _add_server(top.add_argument_group("server"))
    _add_engine(top.add_argument_group("model and engine"))
    return top


def _add_server(group: _ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    group.add_argument("--api-key", default=ENV.api_key, help="wanted of every request (or QRT_API_KEY)")
    group.add_argument("--served-model-name", nargs="+", help="names of the model in the API")
    group.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def _add_engine(group: _ArgumentGroup) -> None:
    default = EngineConfig(model="")
    group.add_argument("--tokenizer", help="folder of the tokenizer (default: the model's)")
    group.add_argument(
        "--kv",
        "--kv-cache-dtype",
        default=default.kv,
        choices=("auto", "fp16", "bf16", "int8", "int4"),
        help="KV format (default: unquantized)",
    )
    group.add_argument(
        "--dtype",
        default=default.dtype,
        help="default: as stored; on a CPU float32, but bf16 of quantized checkpoints",
    )
    group.add_argument("--device", help="cuda, cuda:N or cpu (default: cuda where there is one)")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="prompt and output together")
    group.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens, metavar="TOKENS"
    )
    group.add_argument("--gpu-memory-utilization", type=float, default=default.gpu_memory_utilization)
    group.add_argument("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="size of the KV pool")
    group.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    group.add_argument("--enforce-eager", action="store_true", help="record no CUDA graphs")
    group.add_argument(
        "--cudagraph-capture-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="decodes of a recorded step (default: 1, 2, 4, then every 8 to 256)",
    )
    group.add_argument("--seed", type=int, default=default.seed, help="of requests that bring none")


def engine_config(arguments: Namespace) -> EngineConfig:
    """The engine's part of the command line; ConfigError without a model, or with two."""
    if (arguments.model_path is None) == (arguments.model is None):
        raise ConfigError("model: give one checkpoint folder, as the first argument or with --model")
    given = {
        field.name: getattr(arguments, field.name)
        for field in fields(EngineConfig)
        if field.name in arguments
    }
    return EngineConfig(**{**given, "model": arguments.model or arguments.model_path})


def serve(arguments: Namespace) -> None:
    """Load the model and serve until SIGINT or SIGTERM."""
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(levelname)s %(asctime)s [%(name)s] %(message)s"
    )
    config = engine_config(arguments)
    try:
        import uvicorn

        from qrt.serve.openai import Service, create_app
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed; pip install 'qrt[serve]'") from error
    from qrt.engine.engine import Engine
    from qrt.serve.async_engine import AsyncEngine
    from qrt.serve.tokenizer import Tokenizer

    if arguments.host not in LOOPBACK and not arguments.api_key:
        logger.warning("%s is reachable from outside and no --api-key is set", arguments.host)
    tokenizer = Tokenizer(config.tokenizer or config.model)
    engine = Engine(config, eos_token_ids=tokenizer.eos_token_ids)
    names = tuple(arguments.served_model_name or (Path(config.model).name,))
    service = Service(AsyncEngine(engine), tokenizer, names, arguments.api_key)
    uvicorn.run(create_app(service), host=arguments.host, port=arguments.port, log_level=arguments.log_level)


def main(argv: list[str] | None = None) -> int:
    """Entry point of `qrt-serve`; returns the exit code."""
    arguments = parser().parse_args(argv)
    return run_main(lambda: serve(arguments))
