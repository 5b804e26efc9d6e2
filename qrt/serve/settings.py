"""ServerConfig: the server's settings, and the limits on what one HTTP request may ask for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from qrt.errors import ConfigError
from qrt.request.sampling import MAX_LOGPROBS

# Limits on everything by which a small request could cause much work. Those with a flag are in ServerConfig
# and EngineConfig, those of SamplingParams in qrt.request.sampling.
MAX_BODY_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 64 * 2**10
MAX_HEADERS = 128
MAX_JSON_DEPTH = 64
MAX_PROMPTS = 2048  # OpenAI takes as many inputs
MAX_N = 128
MAX_SCORES = 2**22  # log-probabilities of prompts in one reply; each takes some 250 bytes until then
MAX_LISTED = 2**18  # token ids in lists such as logit_bias, in all requests of one body together
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_DOCUMENTS = 1024
MAX_SECONDS = 10**6  # longest time limit, eleven days; the system's timers do not take every float
MAX_ENGINES = 64
MAX_ECHO_CHARS = 200  # characters of the client's own input that an error repeats
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#*]+")
METRICS_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+")
MAX_SOCKET_PATH_BYTES = 107  # the kernel's sockaddr_un has 108, the last one zero


def check_socket_path(name: str, path: str) -> None:
    """Raise ConfigError for a path that is too long for the kernel; `name` is its setting."""
    if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{name}: expected a socket path of at most {MAX_SOCKET_PATH_BYTES} bytes, got {path} of {size}; "
            "take a shorter folder"
        )


@dataclass(frozen=True)
class ServerConfig:
    """The settings of an HTTP server.

    model_names             names of the model in requests, the main one first
    api_keys                each of them gives access; without any, everybody has access
    allowed_origins         of web pages elsewhere that may ask: "*" (any), or scheme://host
    root_path               prefix of all paths outside of a proxy, which may strip it
    chat_template           Jinja text instead of the checkpoint's
    tool_call_parser        how tool calls are read: "auto" by the chat template, a family's name, or "none"
    reasoning_parser        how thinking is told from the answer: likewise
    data_parallel_size      engines, each with GPUs of its own and all of the model
    api_server_count        processes that speak HTTP (None: one for each engine, as far as there are cores
                            beside the engines')
    metrics_prefix          what the names of metrics begin with, before a colon
    shutdown_timeout        seconds that running requests have after SIGTERM
    watchdog_timeout        seconds after which a step that has not ended ends the server
    request_timeout         seconds that a request may take, its time in the queue included; None: any
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    data_parallel_size: int = 1
    api_server_count: int | None = None
    metrics_prefix: str = "qrt"
    max_logprobs: int = MAX_LOGPROBS
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 300.0
    request_timeout: float | None = None
    use_tgi_api: bool = False
    enable_admin_endpoints: bool = False
    enable_request_id_headers: bool = False
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:  # noqa: C901 -- a flat list of checks
        if not 1 <= self.data_parallel_size <= MAX_ENGINES:
            raise ConfigError(
                f"data_parallel_size: expected 1 to {MAX_ENGINES}, got {self.data_parallel_size}"
            )
        if not METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix: expected letters, digits and _, such as vllm, got {self.metrics_prefix!r}"
            )
        if self.api_server_count is not None and self.api_server_count < 1:
            raise ConfigError(f"api_server_count: expected at least 1, got {self.api_server_count}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs: expected 0 to {MAX_LOGPROBS}, got {self.max_logprobs}")
        if not 0 <= self.shutdown_timeout <= MAX_SECONDS:
            raise ConfigError(
                f"shutdown_timeout: expected 0 to {MAX_SECONDS} seconds, got {self.shutdown_timeout}"
            )
        for name in ("watchdog_timeout", "request_timeout"):
            if (value := getattr(self, name)) is not None and not 0 < value <= MAX_SECONDS:
                raise ConfigError(f"{name}: expected above 0 and at most {MAX_SECONDS} seconds, got {value}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 (any) to 65535, got {self.port}")
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if self.root_path and not ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path: expected a path such as /llm, got {self.root_path!r}")
        if self.uds is not None:
            check_socket_path("uds", self.uds)
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key: expected a key that is not empty, got an empty one")
        for origin in self.allowed_origins:
            if not isinstance(origin, str) or not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: expected * or scheme://host, such as https://a.example, got {origin!r}"
                )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile, ssl_certfile: expected both or neither, got one of the two")
