"""`qrt-serve`: the server's command line."""

from __future__ import annotations

import logging
import os
import ssl
import sys
from argparse import Namespace
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qrt.cli import run_main, set_up_logging
from qrt.config import ENV, EngineConfig
from qrt.engine.preflight import preflight
from qrt.errors import ConfigError, UnsupportedError
from qrt.model_files.location import EXPECTED, api_name
from qrt.serve.command.flags import parse
from qrt.serve.settings import ServerConfig
from qrt.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

PACKAGES = ("fastapi", "uvicorn", "httptools", "zmq", "prometheus_client")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: list[str] | None = None) -> int:
    """Run `qrt-serve` and return its exit code."""
    return run_main(lambda: serve(parse(sys.argv[1:] if argv is None else argv)))


def serve(arguments: Namespace) -> int:
    """Serve until SIGINT, SIGTERM or a failure; return the exit code."""
    for package in PACKAGES:  # said here and not by every API process; to import them takes time
        if find_spec(package) is None:
            raise UnsupportedError(f"{package} is not installed; pip install 'qrt[serve]'")
    from qrt.serve.processes.supervisor import supervise

    set_up_logging(arguments.log_level, f"qrt-serve pid={os.getpid()}")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs each request to the Hub
    engine, server = engine_config(arguments), server_config(arguments)
    engine = preflight(engine).config
    if server.host not in LOOPBACK and not server.uds and not server.api_keys:
        logger.warning("%s is reachable from outside without a key; set --api-key-file", server.host)
    return supervise(engine, server)


def engine_config(arguments: Namespace) -> EngineConfig:
    """Return the engine's settings of the command line; ConfigError without a model, or with two."""
    return EngineConfig(**{**_given(arguments, EngineConfig), "model": _model(arguments)})


def server_config(arguments: Namespace) -> ServerConfig:
    """Return the server's settings of the command line; ConfigError for files that cannot be read."""
    server = ServerConfig(
        **{
            **_given(arguments, ServerConfig),
            "model_names": tuple(arguments.model_names or (api_name(_model(arguments)),)),
            "api_keys": tuple(_keys(arguments)),
            "allowed_origins": tuple(origin for word in arguments.allowed_origins for origin in word),
            "chat_template": _chat_template(arguments.chat_template),
        }
    )
    if server.ssl_certfile and server.ssl_keyfile:
        _check_certificate(server.ssl_certfile, server.ssl_keyfile)
    return server


def _given(arguments: Namespace, config: type[EngineConfig | ServerConfig]) -> dict[str, Any]:
    """Return the flags that are fields of `config`, by name."""
    return {field.name: getattr(arguments, field.name) for field in fields(config) if field.name in arguments}


def _model(arguments: Namespace) -> str:
    if (arguments.model_path is None) == (arguments.model is None):
        raise ConfigError(f"model: give one, as the first argument or with --model: {EXPECTED}")
    return str(arguments.model or arguments.model_path)


def _keys(arguments: Namespace) -> list[str]:
    keys = list(arguments.api_keys)
    if arguments.api_key_file:
        text = _read("--api-key-file", arguments.api_key_file)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ConfigError(f"--api-key-file {arguments.api_key_file}: expected one key per line, got none")
        keys += lines
    if not keys and ENV.api_key is not None:
        keys = [ENV.api_key]
    return keys


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    text = _read("--chat-template", path)
    try:
        ChatTemplate(text, {})
    except ConfigError as error:
        raise ConfigError(f"--chat-template {path}: {error}") from error
    return text


def _check_certificate(certificate: str, key: str) -> None:
    """Raise ConfigError if the API processes cannot load the pair; a key with a password is refused too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    loads = {
        ("--ssl-certfile", certificate): lambda: context.load_verify_locations(certificate),
        ("--ssl-keyfile", key): lambda: context.load_cert_chain(certificate, key, password=""),
    }
    for (flag, path), load in loads.items():
        _read(flag, path)
        try:
            load()
        except ssl.SSLError as error:
            raise ConfigError(
                f"{flag} {path}: {error}; expected a certificate and its key, in PEM"
            ) from error


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
