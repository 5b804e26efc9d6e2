"""Define qrt-serve's flags in groups, by vLLM's names, with LightLLM's as aliases."""

from __future__ import annotations

import argparse
import json
from typing import Any

from qrt.cli import add_hub_flags
from qrt.config import (
    ADMISSIONS,
    ALL_REDUCE_DTYPES,
    ALL_REDUCES,
    GENERATION_CONFIGS,
    LOAD_FORMATS,
    POLICIES,
    EngineConfig,
)
from qrt.quant.kv import KV_FORMATS
from qrt.serve.command.pooling_flags import add_pooling
from qrt.serve.settings import MAX_PROMPTS, ServerConfig
from qrt.text.reasoning import FORMATS as REASONING
from qrt.text.tool_calls import FORMATS, NO_NOTATION

LIGHTLLM_KV = {"None": "auto", "int8kv": "int8", "int4kv": "int4"}
SUFFIXES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
SERVER = ServerConfig(model_names=("",))
ENGINE = EngineConfig(model="")
MAX_NUM_QUEUED_REQS = MAX_PROMPTS  # so that a body of as many is taken
MAX_NUM_QUEUED_TOKENS = 2**22  # their ids take about 160 MB in an API process


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default=SERVER.host, help="address to listen on")
    group.add_argument("--port", type=int, default=SERVER.port, help="TCP port; 0 means any free port")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead (default: none)")
    group.add_argument(
        "--api-server-count",
        "--httpserver-workers",
        type=int,
        metavar="N",
        help="number of processes for HTTP and text (default: one for each engine, as far as there are cores "
        "beside the engines')",
    )
    group.add_argument(
        *("--data-parallel-size", "-dp", "--dp-size", "--dp"),
        type=int,
        default=SERVER.data_parallel_size,
        metavar="N",
        help="number of engines, each with all of the model and GPUs of its own, counted from --device on; a "
        "request goes to the engine that has its prefix, or to the one with the least to do",
    )
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="prefix of all paths, such as /llm; a proxy may strip or forward it (default: none)",
    )
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="private key in PEM; serves HTTPS (default: HTTP)"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate in PEM (default: none)")
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=SERVER.shutdown_timeout,
        metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM",
    )
    group.add_argument(
        "--watchdog-timeout",
        type=float,
        default=SERVER.watchdog_timeout,
        metavar="SECONDS",
        help="stop the server if a step takes longer than this",
    )


def _add_api(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        "--model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model in the API (default: ORG/NAME, or the folder's name)",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="accepted API keys; visible in the process list, so prefer QRT_API_KEY or --api-key-file "
        "(default: QRT_API_KEY, or no key)",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="file with API keys, one per line (default: none)"
    )
    group.add_argument(
        "--allowed-origins",
        type=_origins,
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins of other web pages that may send requests: * or scheme://host, or a JSON list "
        "(default: none)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template file (default: the checkpoint's)"
    )
    group.add_argument(
        "--tool-call-parser",
        default=SERVER.tool_call_parser,
        choices=("auto", *NO_NOTATION, *FORMATS),
        help="format of the model's tool calls; auto finds it from the chat template",
    )
    group.add_argument(
        "--reasoning-parser",
        default=SERVER.reasoning_parser,
        choices=("auto", "none", *REASONING),
        help="marks of the model's thinking; auto finds them from the chat template",
    )
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="always on; accepted as in vLLM"
    )
    group.add_argument(
        "--use-tgi-api", action="store_true", help="make /generate behave as in TGI, not as in LightLLM"
    )
    group.add_argument("--enable-admin-endpoints", action="store_true", help="serve /reset_prefix_cache")
    group.add_argument(
        "--enable-request-id-headers", action="store_true", help="send X-Request-Id with replies"
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-queued-reqs",
        type=_number,
        default=MAX_NUM_QUEUED_REQS,
        metavar="N",
        help="maximum number of waiting requests; more get status 429",
    )
    group.add_argument(
        "--max-num-queued-tokens",
        type=_number,
        default=MAX_NUM_QUEUED_TOKENS,
        metavar="TOKENS",
        help="maximum number of tokens in waiting requests; more get status 429 (default: 4M)",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        default=SERVER.max_logprobs,
        metavar="N",
        help="maximum number of log-probabilities per token that a request may ask for",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit of a request, including its wait in the queue (default: no limit)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        "--model-dir",
        help="the model, instead of as the first argument (no default: give one of the two)",
    )
    add_hub_flags(group)
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or ORG/NAME of the tokenizer (default: the model's)"
    )
    group.add_argument(
        "--tokenizer-revision",
        metavar="REV",
        help="branch, tag or commit of a --tokenizer from the Hub (default: main)",
    )
    group.add_argument(
        "--load-format",
        default=ENGINE.load_format,
        choices=LOAD_FORMATS,
        help="dummy: random weights with the sizes and schemes of config.json",
    )
    group.add_argument(
        "--dtype",
        "--data-type",
        default=ENGINE.dtype,
        help="dtype of activations: float32, float16, bfloat16; auto: the checkpoint's on a GPU; on a CPU "
        "float32, or bfloat16 for quantized checkpoints",
    )
    group.add_argument("--device", help="cuda, cuda:N or cpu (default: cuda if there is a GPU)")
    group.add_argument(
        *("--tensor-parallel-size", "-tp", "--tp", "--tp-size"),
        type=int,
        default=ENGINE.tensor_parallel_size,
        metavar="N",
        help="number of GPUs that share the model, counted from --device on",
    )
    group.add_argument(
        "--all-reduce",
        "--exchange",  # its name until 0.2
        default=ENGINE.all_reduce,
        choices=ALL_REDUCES,
        help="how those GPUs add up what they compute: through each other's memory, by NCCL, or the faster",
    )
    group.add_argument(
        "--all-reduce-dtype",
        "--exchange-dtype",
        default=ENGINE.all_reduce_dtype,
        choices=ALL_REDUCE_DTYPES,
        help="what crosses their links in long steps: int8 has half the bytes of auto, and rounds them",
    )
    group.add_argument(
        "--max-model-len",
        "--max-req-total-len",
        type=_number,
        metavar="TOKENS",
        help="maximum number of tokens of a request, prompt and output together, e.g. 32K (default: the "
        "model's)",
    )
    group.add_argument(
        "--generation-config",
        default=ENGINE.generation_config,
        choices=GENERATION_CONFIGS,
        help="default sampling settings of requests: the checkpoint's (auto), or neutral ones (vllm)",
    )
    group.add_argument("--seed", type=int, default=ENGINE.seed, help="seed for requests without one")


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv",
        "--kv-cache-dtype",
        default=ENGINE.kv,
        metavar="FORMAT",
        help=f"KV format: auto or bf16 (unquantized), {', '.join(KV_FORMATS)}",
    )
    group.add_argument(
        "--llm-kv-type",
        dest="kv",
        type=_lightllm_kv,
        default=argparse.SUPPRESS,
        help="--kv by LightLLM's names: None, int8kv or int4kv (default: as --kv)",
    )
    group.add_argument(
        "--kv-skip-layers",
        "--kv-cache-dtype-skip-layers",
        type=int,
        nargs="+",
        default=[],
        metavar="LAYER",
        help="layers whose K and V stay unquantized (default: none)",
    )
    group.add_argument(
        *("--gpu-memory-utilization", "--mem-fraction"),
        type=float,
        default=ENGINE.gpu_memory_utilization,
        metavar="SHARE",
        help="share of the GPU's memory for weights, activations and KV",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=_number,
        metavar="BYTES",
        help="size of the KV pool, e.g. 8G (default: what --gpu-memory-utilization leaves; 4G on a CPU)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=ENGINE.enable_prefix_caching,
        help="reuse the K and V of prompts that start with the same tokens",
    )
    group.add_argument(
        "--attend-cache",
        action="store_true",
        help="let prefill read its own chunk's K and V back from the cache, so that a cached prefix does not "
        "change an answer; slower",
    )
    group.add_argument(
        "--disable-dynamic-prompt-cache",
        dest="enable_prefix_caching",
        action="store_false",
        default=argparse.SUPPRESS,
        help="LightLLM's name for --no-enable-prefix-caching",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        *("--max-num-seqs", "--running-max-req-size"),
        type=_number,
        default=ENGINE.max_num_seqs,
        metavar="N",
        help="maximum number of requests that run at once (default: 256; on a GPU up to 1,024 if the KV pool "
        "holds them)",
    )
    group.add_argument(
        *("--max-num-batched-tokens", "--batch-max-tokens"),
        type=_number,
        default=ENGINE.max_num_batched_tokens,
        metavar="TOKENS",
        help="maximum number of tokens in one step; longer prompts are prefilled in chunks",
    )
    group.add_argument("--enable-chunked-prefill", action="store_true", help="always on; accepted as in vLLM")
    group.add_argument(
        "--scheduling-policy",
        default=ENGINE.scheduling_policy,
        choices=POLICIES,
        help="run requests in order of arrival (fcfs), or the smallest `priority` first (priority)",
    )
    group.add_argument(
        "--admission",
        default=ENGINE.admission,
        choices=ADMISSIONS,
        help="start a request when its expected output fits in memory (aggressive), or only when all of its "
        "max_tokens fit (conservative)",
    )
    group.add_argument(
        "--disable-aggressive-schedule",
        dest="admission",
        action="store_const",
        const="conservative",
        default=argparse.SUPPRESS,
        help="LightLLM's name for --admission conservative",
    )
    group.add_argument(
        "--async-scheduling",
        "--overlap",
        dest="overlap",
        action=argparse.BooleanOptionalAction,
        help="prepare the next step while the current one runs (default: on for a GPU)",
    )
    group.add_argument(
        "--enforce-eager", "--disable-cudagraph", action="store_true", help="do not record CUDA graphs"
    )
    group.add_argument(
        "--cudagraph-capture-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="batch sizes of recorded decode steps (default: 1, 2, 4, multiples of 8 up to 256, then wider)",
    )


def _add_logs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-level",
        default=SERVER.log_level,
        choices=("debug", "info", "warning", "error"),
        help="lowest level of the log lines on stderr",
    )
    group.add_argument(
        "--disable-log-stats", action="store_true", help="do not log statistics every 10 seconds"
    )
    group.add_argument(
        "--metrics-prefix",
        default=SERVER.metrics_prefix,
        metavar="NAME",
        help="first part of the names of metrics; with vllm, tools for vLLM find them",
    )
    group.add_argument(
        "--enable-log-requests",
        "--detail-log",
        action="store_true",
        help="log one line per request, without its text",
    )


def _number(text: str) -> int:
    """Parse an integer with an optional suffix: k, m, g (powers of 1000) or K, M, G (powers of 1024)."""
    factor = SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"expected a number such as 4096, 32k or 32K, got {text!r}"
        ) from None


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
    "pooling": add_pooling,
    "kv": _add_memory,
    "engine": _add_engine,
    "logs": _add_logs,
}
