"""EngineConfig, an engine's settings, and Environment: the only place that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from qrt.checks import at_least, at_most, check_seed, is_number, listed, one_of, yes_or_no
from qrt.errors import ConfigError


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

POLICIES = ("fcfs", "priority")
DTYPES = ("auto", "float32", "float16", "bfloat16")  # dtypes of activations
LOAD_FORMATS = ("auto", "safetensors", "dummy")  # the first two are the same: qrt reads nothing else
GENERATION_CONFIGS = ("auto", "vllm")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify", "reward")
ALL_REDUCES = ("auto", "peer", "nccl")
ALL_REDUCE_DTYPES = ("auto", "int8")
ADMISSIONS = ("aggressive", "conservative")
MAX_NUM_SEQS = 2**16  # most requests at once; each takes a row of `max_model_len` tokens on the device


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. The engine chooses for `None` and "auto", by model and device.

    model                    checkpoint folder, ORG/NAME[@REVISION] of the Hugging Face Hub, or "tiny", the
                             bundled model
    tokenizer                folder or name of the tokenizer, in the same forms (None: the model's)
    revision                 branch, tag or commit of `model` on the Hub; tokenizer_revision of `tokenizer`
    download_dir             folder that keeps models of the Hub (None: HF_HUB_CACHE or HF_HOME)
    runner                   "generate" text, or "pooling": vectors and scores; "auto": by the checkpoint's
                             files
    convert                  what a model that pools answers with: "embed" vectors, "classify" a number for
                             each label, "reward" the same for each token; "auto": by the architecture's name
    pooler_config            replaces what the checkpoint's files say: "pooling_type" (LAST, MEAN, ALL) and
                             "normalize"
    hf_overrides             replaces entries of config.json that say how a model pools
                             (`arch.pooling.OVERRIDES`)
    kv                       KV format: "auto" (unquantized), "bf16", or a name in KV_FORMATS ("int8", "k8v4")
    kv_skip_layers           layers whose K and V are stored unquantized
    load_format              "dummy": random weights with the sizes and schemes of config.json, to measure
                             speed without a checkpoint; no tensor is read
    generation_config        default sampling: "auto" the checkpoint's generation_config.json, "vllm" neutral
    dtype                    dtype of activations: "auto" is the checkpoint's on a GPU. On a CPU it is
                             float32, or bf16 for a quantized checkpoint in bf16 if the CPU has fast bf16
    device                   "cuda", "cuda:1" or "cpu" (None: the GPU if there is one, else the CPU)
    tensor_parallel_size     ranks that share the model, one GPU each, counted from `device` on
    all_reduce               how their GPUs add up what they compute: "peer": few tokens through each other's
                             memory, "nccl", or "auto": what is faster on this machine
    all_reduce_dtype         what crosses their links in long steps: "auto" the dtype of activations, or
                             "int8": groups of 128 with a scale, half the bytes, rounded
    max_model_len            most tokens of one request, prompt and output together
    max_num_seqs             most requests that run at once (None: 256, on a GPU up to 1,024 by what the
                             KV pool holds: `mem.sizing.default_num_seqs`)
    max_num_batched_tokens   most tokens of one step; longer prompts are prefilled in chunks
    max_num_queued_reqs      most requests that wait; more are refused (None: no limit)
    max_num_queued_tokens    most tokens in waiting requests; one prompt may always wait (None: no limit)
    scheduling_policy        "fcfs": in order of arrival; "priority": the smallest `priority` first
    admission                "aggressive" starts requests by the expected length of outputs, and pauses one
                             when slots run out; "conservative" keeps room for all of `max_tokens`: no pauses
    overlap                  prepare and launch a step while the last one runs (None: only on a GPU)
    gpu_memory_utilization   share of the GPU's memory that weights, activations and KV may take
    kv_cache_memory_bytes    KV memory, instead of what `gpu_memory_utilization` leaves
    enable_prefix_caching    reuse the K and V of prompts that start with the same tokens
    attend_cache             prefill reads its own chunk's K/V back from the cache, so that a perplexity
                             includes the KV format's loss, and a cached prefix does not change an answer (by
                             default a prompt attends its own chunk's K/V before they are rounded)
    enforce_eager            record no CUDA graphs: slower steps, an earlier start
    cudagraph_capture_sizes  batch sizes of recorded decode steps (None: 1, 2, 4, then every 8 to 256, wider)
    seed                     seed for requests without one
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: dict[str, Any] | None = field(default=None, hash=False)
    hf_overrides: dict[str, Any] | None = field(default=None, hash=False)
    kv: str = "auto"
    kv_skip_layers: tuple[int, ...] = ()
    load_format: str = "auto"
    generation_config: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    tensor_parallel_size: int = 1
    all_reduce: str = "auto"
    all_reduce_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    admission: str = "aggressive"
    overlap: bool | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    attend_cache: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    seed: int = 0

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
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        one_of("runner", self.runner, RUNNERS)
        one_of("convert", self.convert, CONVERSIONS)
        for name in ("pooler_config", "hf_overrides"):
            if not isinstance(getattr(self, name), dict | None):
                raise ConfigError(f"{name}: expected a dictionary, got {getattr(self, name)!r:.80}")
            object.__setattr__(self, name, getattr(self, name) or None)
        one_of("all_reduce", self.all_reduce, ALL_REDUCES)
        one_of("all_reduce_dtype", self.all_reduce_dtype, ALL_REDUCE_DTYPES)
        one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        one_of("admission", self.admission, ADMISSIONS)
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
