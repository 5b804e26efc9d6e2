"""EngineConfig, an engine's settings, and Environment: the only place that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from qrt.checks import at_least, at_most, check_seed, is_number, listed, one_of, yes_or_no
from qrt.errors import ConfigError
from qrt.setting import documented, setting, told


class KernelBackend(Enum):
    """The implementation that operators run."""

    AUTO = "auto"  # Triton on CUDA tensors, the torch reference on CPU tensors
    REF = "ref"  # the reference everywhere
    TRITON = "triton"  # Triton everywhere (on CPU tensors: with TRITON_INTERPRET=1)


@dataclass(frozen=True)
class Environment:
    """The environment variables qrt reads, read once. Those of the Hub mean what huggingface_hub documents.

    hub_cache      folder of downloaded models: HF_HUB_CACHE, or "hub" in HF_HOME
    hub_endpoint   HF_ENDPOINT, the Hub or a mirror of it
    hub_offline    HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: make no request, use only the cache
    hub_token      HF_TOKEN; None: huggingface_hub uses the token of `hf auth login`
    """

    kernel_backend: KernelBackend = KernelBackend.AUTO
    data_folder: str | None = None
    api_key: str | None = field(default=None, repr=False)
    hub_cache: str = "~/.cache/huggingface/hub"
    hub_endpoint: str = "https://huggingface.co"
    hub_offline: bool = False
    hub_token: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls) -> Environment:
        """Read os.environ; ConfigError for an unknown QRT_KERNEL_BACKEND."""
        given = os.environ.get
        name = given("QRT_KERNEL_BACKEND", "auto")
        known = [backend.value for backend in KernelBackend]
        if name not in known:
            raise ConfigError(f"QRT_KERNEL_BACKEND: expected one of {', '.join(known)}, got {name!r}")
        home = given("HF_HOME") or f"{given('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        offline = given("HF_HUB_OFFLINE") or given("TRANSFORMERS_OFFLINE") or ""
        return cls(
            KernelBackend(name),
            given("QRT_DATA"),
            given("QRT_API_KEY"),
            hub_cache=os.path.expandvars(given("HF_HUB_CACHE") or f"{home}/hub"),
            hub_endpoint=(given("HF_ENDPOINT") or cls.hub_endpoint).rstrip("/"),
            hub_offline=offline.upper() in ("1", "ON", "YES", "TRUE"),
            hub_token=(given("HF_TOKEN") or given("HUGGING_FACE_HUB_TOKEN") or "").strip() or None,
        )


ENV = Environment.read()

DTYPES = ("auto", "float32", "float16", "bfloat16")  # dtypes of activations
MAX_NUM_SEQS = 2**16  # most requests at once; each takes a row of `max_model_len` tokens on the device


@documented
@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. The engine chooses for `None` and "auto", by model and device."""

    model: str = field(
        metadata=told(
            "--model-dir",
            help="checkpoint folder, ORG/NAME[@REVISION] of the Hugging Face Hub, or tiny, the bundled model",
        )
    )
    tokenizer: str | None = setting(
        None, metavar="MODEL", help="folder or ORG/NAME of the tokenizer (default: the model's)"
    )
    revision: str | None = setting(
        None, metavar="REV", help="branch, tag or commit of a --model from the Hub (default: main)"
    )
    tokenizer_revision: str | None = setting(
        None, metavar="REV", help="branch, tag or commit of a --tokenizer from the Hub (default: main)"
    )
    download_dir: str | None = setting(
        None, metavar="DIR", help="folder for models of the Hub (default: HF_HUB_CACHE, HF_HOME)"
    )
    runner: str = setting(
        "auto", choices=("auto", "generate", "pooling"),
        help="generate text, or serve vectors and scores (pooling); auto: by the checkpoint's files",
    )  # fmt: skip
    convert: str = setting(
        "auto", choices=("auto", "none", "embed", "classify", "reward"),
        help="what a model that pools answers with: vectors (embed), a number for each label (classify), or "
        "the same for each token (reward); auto: by the architecture's name",
    )  # fmt: skip
    pooler_config: dict[str, Any] | None = setting(
        None, metavar="JSON", hash=False,
        help="replaces what the checkpoint's files say: pooling_type (LAST, MEAN, ALL) and normalize, e.g. "
        '{"pooling_type": "MEAN", "normalize": false} (default: none)',
    )  # fmt: skip
    hf_overrides: dict[str, Any] | None = setting(
        None, metavar="JSON", hash=False,
        help='replaces entries of config.json about pooling, e.g. {"is_matryoshka": true} (default: none)',
    )  # fmt: skip
    kv: str = setting(
        "auto", "--kv-cache-dtype", metavar="FORMAT",
        help="KV format: auto or bf16 (unquantized), or one of KV_FORMATS, such as int8 or k8v4",
    )  # fmt: skip
    kv_skip_layers: tuple[int, ...] = setting(
        (), "--kv-cache-dtype-skip-layers", metavar="LAYER",
        help="layers whose K and V stay unquantized (default: none)",
    )  # fmt: skip
    load_format: str = setting(
        "auto", choices=("auto", "safetensors", "dummy"),  # the first two are the same
        help="dummy: random weights with the sizes and schemes of config.json, to measure speed without a "
        "checkpoint",
    )  # fmt: skip
    generation_config: str = setting(
        "auto", choices=("auto", "vllm"),
        help="default sampling settings of requests: the checkpoint's (auto), or neutral ones (vllm)",
    )  # fmt: skip
    dtype: str = setting(
        "auto", "--data-type",
        help="dtype of activations: float32, float16, bfloat16; auto: the checkpoint's on a GPU; on a CPU "
        "float32, or bfloat16 for quantized checkpoints in bfloat16, if the CPU is fast at it",
    )  # fmt: skip
    device: str | None = setting(None, help="cuda, cuda:N or cpu (default: cuda if there is a GPU)")
    tensor_parallel_size: int = setting(
        1, "-tp", "--tp", "--tp-size", metavar="N",
        help="number of GPUs that share the model, counted from the device on",
    )  # fmt: skip
    all_reduce: str = setting(
        "auto", "--exchange", choices=("auto", "peer", "nccl"),  # its name until 0.2
        help="how GPUs that share the model add up what they compute: few tokens through each other's memory "
        "(peer), by NCCL (nccl), or as is faster on this machine (auto)",
    )  # fmt: skip
    all_reduce_dtype: str = setting(
        "auto", "--exchange-dtype", choices=("auto", "int8"),
        help="what crosses their links in long steps: the dtype of activations (auto), or int8 in groups of "
        "128 with a scale, which has half the bytes and is rounded",
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, "--max-req-total-len", metavar="TOKENS",
        help="maximum number of tokens of a request, prompt and output together (default: the model's)",
    )  # fmt: skip
    max_num_seqs: int | None = setting(
        None, "--running-max-req-size", metavar="N",
        help="maximum number of requests that run at once (default: 256; on a GPU up to 1,024 if the KV pool "
        "holds them)",
    )  # fmt: skip
    max_num_batched_tokens: int = setting(
        8192, "--batch-max-tokens", metavar="TOKENS",
        help="maximum number of tokens in one step; longer prompts are prefilled in chunks",
    )  # fmt: skip
    max_num_queued_reqs: int | None = setting(
        None, metavar="N", help="maximum number of waiting requests; more are refused (default: no limit)"
    )
    max_num_queued_tokens: int | None = setting(
        None, metavar="TOKENS",
        help="maximum number of tokens in waiting requests; one prompt may always wait (default: no limit)",
    )  # fmt: skip
    scheduling_policy: str = setting(
        "fcfs", choices=("fcfs", "priority"),
        help="run requests in order of arrival (fcfs), or the smallest `priority` first (priority)",
    )  # fmt: skip
    admission: str = setting(
        "aggressive", choices=("aggressive", "conservative"),
        help="start a request when its expected output fits in memory, and pause one if memory runs out "
        "(aggressive), or only when all of its max_tokens fit (conservative)",
    )  # fmt: skip
    overlap: bool | None = setting(
        None, "--overlap", flag="--async-scheduling",
        help="prepare the next step while the current one runs (default: on for a GPU)",
    )  # fmt: skip
    gpu_memory_utilization: float = setting(
        0.9, "--mem-fraction", metavar="SHARE",
        help="share of the GPU's memory for weights, activations and KV",
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = setting(
        None, metavar="BYTES",
        help="size of the KV pool (default: what --gpu-memory-utilization leaves; 4 GiB on a CPU)",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, help="reuse the K and V of prompts that start with the same tokens"
    )
    attend_cache: bool = setting(
        False,
        help="let prefill read its own chunk's K and V back from the cache, so that a perplexity includes "
        "the KV format's loss, and a cached prefix does not change an answer; slower",
    )  # fmt: skip
    enforce_eager: bool = setting(
        False, "--disable-cudagraph", help="do not record CUDA graphs: slower steps, an earlier start"
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None, metavar="N",
        help="batch sizes of recorded decode steps (default: 1, 2, 4, multiples of 8 up to 256, then wider)",
    )  # fmt: skip
    seed: int = setting(0, help="seed for requests without one")

    def __post_init__(self) -> None:  # noqa: C901 -- a flat list of checks
        _folder("model", self.model, "qrt.quantize(model, tokenizer) makes one of a model in memory")
        if self.tokenizer is not None:
            _folder("tokenizer", self.tokenizer, "tokenizer.save_pretrained(FOLDER) makes one")
        if self.download_dir is not None:
            _folder("download_dir", self.download_dir, "give the path of one")
        for name in ("revision", "tokenizer_revision"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"{name}: expected a branch, a tag or a commit, got {value!r}")
        if not isinstance(self.kv, str):
            raise ConfigError(f"kv: expected the name of a KV format, got {self.kv!r}")
        for name in ("kv_skip_layers", "cudagraph_capture_sizes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, listed(name, getattr(self, name)))
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", {"half": "float16", "float": "float32"}.get(dtype, dtype))
        one_of("dtype", self.dtype, DTYPES)
        for own in fields(self):
            if choices := own.metadata["choices"]:
                one_of(own.name, getattr(self, own.name), choices)
        for name in ("pooler_config", "hf_overrides"):
            if not isinstance(getattr(self, name), dict | None):
                raise ConfigError(f"{name}: expected a dictionary, got {getattr(self, name)!r:.80}")
            object.__setattr__(self, name, getattr(self, name) or None)
        for name in ("tensor_parallel_size", "max_num_batched_tokens"):
            at_least(name, getattr(self, name), 1)
        if self.max_num_seqs is not None:
            at_least("max_num_seqs", self.max_num_seqs, 1)
            at_most("max_num_seqs", self.max_num_seqs, MAX_NUM_SEQS)
        for layer in self.kv_skip_layers:
            at_least("kv_skip_layers", layer, 0)
        for name in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for size in self.cudagraph_capture_sizes or ():
            at_least("cudagraph_capture_sizes", size, 1)
        for name in ("enable_prefix_caching", "attend_cache", "enforce_eager"):
            yes_or_no(name, getattr(self, name))
        if self.overlap is not None:
            yes_or_no("overlap", self.overlap)
        share = self.gpu_memory_utilization
        if not is_number(share) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization: expected above 0 and at most 1, got {share!r}")
        check_seed(self.seed)


def _folder(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name}: expected a folder, got {type(value).__name__}; {remedy}")
