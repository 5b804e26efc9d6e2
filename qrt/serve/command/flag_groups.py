"""Define qrt-serve's flags in groups: those of the configs' fields, and those of peers that have no field."""

from __future__ import annotations

import argparse
import json
from typing import Any

from qrt.cli import add_flags
from qrt.config import EngineConfig
from qrt.quant.kv import KV_FORMATS
from qrt.serve.settings import MAX_PROMPTS, ServerConfig

LIGHTLLM_KV = {"None": "auto", "int8kv": "int8", "int4kv": "int4"}
MAX_NUM_QUEUED_REQS = MAX_PROMPTS  # so that a body of as many is taken
MAX_NUM_QUEUED_TOKENS = 2**22  # their ids take about 160 MB in an API process


def _add_server(group: argparse._ArgumentGroup) -> None:
    names = "host port uds api_server_count data_parallel_size root_path ssl_keyfile ssl_certfile "
    add_flags(group, ServerConfig, names + "shutdown_timeout watchdog_timeout")


def _add_api(group: argparse._ArgumentGroup) -> None:
    add_flags(group, ServerConfig, "model_names api_keys")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="file with API keys, one per line (default: none)"
    )
    add_flags(group, ServerConfig, "allowed_origins", type=_origins)
    add_flags(group, ServerConfig, "chat_template tool_call_parser reasoning_parser")
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="always on; accepted as in vLLM"
    )
    add_flags(group, ServerConfig, "use_tgi_api enable_admin_endpoints enable_request_id_headers")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    text = "maximum number of waiting requests; more get status 429"
    add_flags(group, EngineConfig, "max_num_queued_reqs", default=MAX_NUM_QUEUED_REQS, help=text)
    text = "maximum number of tokens in waiting requests; more get status 429 (default: 4M)"
    add_flags(group, EngineConfig, "max_num_queued_tokens", default=MAX_NUM_QUEUED_TOKENS, help=text)
    add_flags(group, ServerConfig, "max_logprobs request_timeout")


def _add_model(group: argparse._ArgumentGroup) -> None:
    text = "the model, instead of as the first argument (no default: give one of the two)"
    add_flags(group, EngineConfig, "model", help=text)
    names = "revision download_dir tokenizer tokenizer_revision load_format dtype device "
    names += "tensor_parallel_size all_reduce all_reduce_dtype max_model_len generation_config seed"
    add_flags(group, EngineConfig, names)


def _add_pooling(group: argparse._ArgumentGroup) -> None:
    add_flags(group, EngineConfig, "runner convert pooler_config hf_overrides")


def _add_kv(group: argparse._ArgumentGroup) -> None:
    text = f"KV format: auto or bf16 (unquantized), {', '.join(KV_FORMATS)}"
    add_flags(group, EngineConfig, "kv", help=text)
    group.add_argument(
        "--llm-kv-type",
        dest="kv",
        type=_lightllm_kv,
        default=argparse.SUPPRESS,
        help="--kv by LightLLM's names: None, int8kv or int4kv (default: as --kv)",
    )
    names = "kv_skip_layers gpu_memory_utilization kv_cache_memory_bytes enable_prefix_caching attend_cache"
    add_flags(group, EngineConfig, names)
    group.add_argument(
        "--disable-dynamic-prompt-cache",
        dest="enable_prefix_caching",
        action="store_false",
        default=argparse.SUPPRESS,
        help="LightLLM's name for --no-enable-prefix-caching",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add_flags(group, EngineConfig, "max_num_seqs max_num_batched_tokens")
    group.add_argument("--enable-chunked-prefill", action="store_true", help="always on; accepted as in vLLM")
    add_flags(group, EngineConfig, "scheduling_policy admission")
    group.add_argument(
        "--disable-aggressive-schedule",
        dest="admission",
        action="store_const",
        const="conservative",
        default=argparse.SUPPRESS,
        help="LightLLM's name for --admission conservative",
    )
    add_flags(group, EngineConfig, "overlap enforce_eager cudagraph_capture_sizes")


def _add_logs(group: argparse._ArgumentGroup) -> None:
    add_flags(group, ServerConfig, "log_level disable_log_stats metrics_prefix enable_log_requests")


def _origins(text: str) -> list[Any]:
    """Parse one origin, or a JSON list of origins."""
    if not text.startswith("["):
        return [text]
    try:
        return list(json.loads(text))
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f'expected a JSON list such as ["*"], got {text!r}') from None


def _lightllm_kv(text: str) -> str:
    if text not in LIGHTLLM_KV:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(LIGHTLLM_KV)}, got {text!r}")
    return LIGHTLLM_KV[text]


GROUPS = {
    "server": _add_server,
    "api": _add_api,
    "limits": _add_limits,
    "model": _add_model,
    "pooling": _add_pooling,
    "kv": _add_kv,
    "engine": _add_engine,
    "logs": _add_logs,
}
