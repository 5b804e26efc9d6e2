"""ServerConfig: the server's settings, and the limits on what one HTTP request may ask for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from qrt.errors import ConfigError
from qrt.request.sampling import MAX_LOGPROBS
from qrt.setting import documented, setting, told
from qrt.text.reasoning import FORMATS as REASONING
from qrt.text.tool_calls import FORMATS, NO_NOTATION

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


@documented
@dataclass(frozen=True)
class ServerConfig:
    """The settings of an HTTP server."""

    model_names: tuple[str, ...] = field(
        metadata=told(
            "--model-name",
            flag="--served-model-name",
            metavar="NAME",
            help="names of the model in the API, the main one first (default: ORG/NAME, or the folder's)",
        )
    )
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="TCP port; 0 means any free port")
    uds: str | None = setting(None, metavar="PATH", help="listen on a Unix socket instead (default: none)")
    api_keys: tuple[str, ...] = setting(
        (), flag="--api-key", metavar="KEY",
        help="accepted API keys; visible in the process list, so prefer QRT_API_KEY or --api-key-file "
        "(default: QRT_API_KEY, or no key)",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), metavar="ORIGIN",
        help="origins of other web pages that may send requests: * or scheme://host, or a JSON list "
        "(default: none)",
    )  # fmt: skip
    root_path: str = setting(
        "", metavar="PATH",
        help="prefix of all paths, such as /llm; a proxy may strip or forward it (default: none)",
    )  # fmt: skip
    ssl_keyfile: str | None = setting(
        None, metavar="FILE", help="private key in PEM; serves HTTPS (default: HTTP)"
    )
    ssl_certfile: str | None = setting(None, metavar="FILE", help="certificate in PEM (default: none)")
    chat_template: str | None = setting(
        None, metavar="FILE", help="Jinja template (default: the checkpoint's)"
    )
    tool_call_parser: str = setting(
        "auto", choices=("auto", *NO_NOTATION, *FORMATS),
        help="format of the model's tool calls; auto finds it from the chat template",
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto", choices=("auto", "none", *REASONING),
        help="marks of the model's thinking; auto finds them from the chat template",
    )  # fmt: skip
    data_parallel_size: int = setting(
        1, "-dp", "--dp-size", "--dp", metavar="N",
        help="number of engines, each with all of the model and GPUs of its own, counted from --device on; a "
        "request goes to the engine that has its prefix, or to the one with the least to do",
    )  # fmt: skip
    api_server_count: int | None = setting(
        None, "--httpserver-workers", metavar="N",
        help="number of processes for HTTP and text (default: one for each engine, as far as there are cores "
        "beside the engines')",
    )  # fmt: skip
    metrics_prefix: str = setting(
        "qrt", metavar="NAME", help="first part of the names of metrics; with vllm, tools for vLLM find them"
    )
    max_logprobs: int = setting(
        MAX_LOGPROBS, metavar="N",
        help="maximum number of log-probabilities per token that a request may ask for",
    )  # fmt: skip
    shutdown_timeout: float = setting(
        30.0, metavar="SECONDS", help="how long running requests may take to finish after SIGTERM"
    )
    watchdog_timeout: float = setting(
        300.0, metavar="SECONDS", help="stop the server if a step takes longer than this"
    )
    request_timeout: float | None = setting(
        None, metavar="SECONDS",
        help="time limit of a request, including its wait in the queue (default: no limit)",
    )  # fmt: skip
    use_tgi_api: bool = setting(False, help="make /generate behave as in TGI, not as in LightLLM")
    enable_admin_endpoints: bool = setting(False, help="serve /reset_prefix_cache")
    enable_request_id_headers: bool = setting(False, help="send X-Request-Id with replies")
    enable_log_requests: bool = setting(
        False, "--detail-log", help="log one line per request, without its text"
    )
    disable_log_stats: bool = setting(False, help="do not log statistics every 10 seconds")
    log_level: str = setting(
        "info", choices=("debug", "info", "warning", "error"), help="lowest level of the log lines on stderr"
    )

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
