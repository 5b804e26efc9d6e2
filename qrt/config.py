"""Every setting, validated when it is made or changed; the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import wraps
from typing import Any, TypeGuard, TypeVar

from qrt.errors import ConfigError
from qrt.peer_fields import refuse_arguments


class KernelBackend(Enum):
    """Which implementation an op runs."""

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
            raise ConfigError(f"QRT_KERNEL_BACKEND: got {name!r}, wanted one of {', '.join(known)}")
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
DTYPES = ("auto", "float32", "float16", "bfloat16")  # of activations
LOAD_FORMATS = ("auto", "safetensors", "dummy")  # the first two are one: qrt reads nothing else
GENERATION_CONFIGS = ("auto", "vllm")
ADMISSIONS = ("aggressive", "conservative")
MAX_TOKENS_LISTED = 1024  # of logit_bias and allowed_token_ids; a request cannot ask for work without bound
MAX_NUM_SEQS = 2**16  # requests at once, each a row of `max_model_len` tokens on the device
MAX_BAD_WORDS = 128  # as text; each is one or two lists of tokens to the engine
MAX_LOGPROBS = 20  # per token, as OpenAI and vLLM: a request cannot ask for a whole vocabulary per position
GREEDY_TEMPERATURE = 1e-5  # below this, logits / temperature overflows where it still changes anything
LARGEST = 2**63 - 1  # integer that messages between processes and tensors hold
LARGE = 1e30  # beyond it a factor or divisor of logits leaves fp32


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. `None` and "auto" are settled by the engine from model and device.

    model                    checkpoint folder, ORG/NAME[@REVISION] of the Hugging Face Hub, or "tiny", the
                             bundled model
    tokenizer                where the tokenizer is, in the same forms (None: with the model)
    revision                 branch, tag or commit of `model` on the Hub; tokenizer_revision of `tokenizer`
    download_dir             folder that keeps models of the Hub (None: HF_HUB_CACHE or HF_HOME)
    kv                       KV format: "auto" (unquantized), "bf16", or a name in KV_FORMATS ("int8", "k8v4")
    kv_skip_layers           layers whose K and V are stored unquantized
    load_format              "dummy": random weights of the sizes and schemes that the folder's config.json
                             names, no tensor is read (to measure speed without a checkpoint)
    generation_config        default sampling: "auto" the checkpoint's generation_config.json, "vllm" neutral
    dtype                    activations: "auto" is the checkpoint's on a GPU; on a CPU float32, or bf16 for a
                             quantized checkpoint that is stored in it where the CPU multiplies it fast
    max_model_len            most tokens of one request, prompt and output together
    max_num_seqs             most requests that run at once (None: 256, on a GPU up to 1,024 by what the
                             KV pool holds: `mem.sizing.default_num_seqs`)
    max_num_batched_tokens   most tokens of one step; longer prompts are prefilled in chunks
    max_num_queued_reqs      most requests that wait; more are refused (None: no limit)
    max_num_queued_tokens    most tokens that wait in them; a prompt alone may always wait (None: no limit)
    scheduling_policy        "fcfs": in order of arrival; "priority": the smallest `priority` first
    admission                "aggressive" lets requests in by how long outputs are so far, and pauses one when
                             slots run out; "conservative" keeps room for all of `max_tokens`: no pauses
    overlap                  prepare and launch a step while the one before it runs (None: on a GPU)
    gpu_memory_utilization   share of the GPU's memory that weights, activations and KV may take
    kv_cache_memory_bytes    KV memory, instead of what `gpu_memory_utilization` leaves
    attend_cache             prefill reads the chunk's own K/V back from the cache too: a perplexity includes
                             the KV format's loss, and a cached prefix does not change an answer (by default a
                             prompt attends its own chunk's K/V before they are rounded)
    enforce_eager            record no CUDA graphs: slower steps, an earlier start
    cudagraph_capture_sizes  decodes of a recorded step (None: 1, 2, 4, then every 8 to 256, and wider)
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    kv: str = "auto"
    kv_skip_layers: tuple[int, ...] = ()
    load_format: str = "auto"
    generation_config: str = "auto"
    dtype: str = "auto"
    device: str | None = None
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

    def __post_init__(self) -> None:
        _folder("model", self.model, "qrt.quantize(model, tokenizer) makes one of a model in memory")
        if self.tokenizer is not None:
            _folder("tokenizer", self.tokenizer, "tokenizer.save_pretrained(FOLDER) makes one")
        if self.download_dir is not None:
            _folder("download_dir", self.download_dir, "give the path of one")
        for name in ("revision", "tokenizer_revision"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"{name}: expected a branch, a tag or a commit, got {value!r}")
        if not isinstance(self.kv, str):
            raise ConfigError(f"kv: got {self.kv!r}, wanted the name of a KV format")
        for name in ("kv_skip_layers", "cudagraph_capture_sizes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _listed(name, getattr(self, name)))
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", {"half": "float16", "float": "float32"}.get(dtype, dtype))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        _one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        _one_of("admission", self.admission, ADMISSIONS)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_seqs is not None:
            _at_least("max_num_seqs", self.max_num_seqs, 1)
            _at_most("max_num_seqs", self.max_num_seqs, MAX_NUM_SEQS)
        for layer in self.kv_skip_layers:
            _at_least("kv_skip_layers", layer, 0)
        for name in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for size in self.cudagraph_capture_sizes or ():
            _at_least("cudagraph_capture_sizes", size, 1)
        for name in ("enable_prefix_caching", "attend_cache", "enforce_eager"):
            _yes_or_no(name, getattr(self, name))
        if self.overlap is not None:
            _yes_or_no("overlap", self.overlap)
        share = self.gpu_memory_utilization
        if not _is_number(share) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization: got {share!r}, wanted above 0 and at most 1")
        _check_seed(self.seed)


Params = TypeVar("Params")


def _for_vllm_users(cls: type[Params]) -> type[Params]:
    """Let vLLM's users make and change a frozen dataclass as they are used to.

    The constructor also takes vLLM's other arguments if their values ask for nothing. An assignment
    (`params.max_tokens = 5`) checks all fields as the constructor does.
    """
    make, names = cls.__init__, [each.name for each in fields(cls)]  # type: ignore[arg-type]

    @wraps(make)
    def init(self: Params, *args: Any, **given: Any) -> None:
        others = {name: given.pop(name) for name in [*given] if name not in names}
        refuse_arguments(cls.__name__, others, names, given)
        make(self, *args, **given)

    def assign(self: Params, name: str, value: Any) -> None:
        checked = replace(self, **{name: value})  # type: ignore[type-var]
        for each in names:
            object.__setattr__(self, each, getattr(checked, each))

    setattr(cls, "__init__", init)  # noqa: B010 -- mypy takes a plain assignment for a mistake
    setattr(cls, "__setattr__", assign)  # noqa: B010
    return cls


@_for_vllm_users
@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded; vLLM's names and meanings.

    n, best_of      completions: the `n` likeliest (by cumulative log-probability) of `best_of`, or n
    temperature     0 is greedy
    top_k           the k likeliest tokens (0 or -1: off)
    top_p           of those, the fewest likeliest whose probability reaches p (1: off)
    min_p           tokens at least this share of the likeliest one's probability (0: off); before the other
                    two
    seed            makes a request reproducible whatever it is batched with (None or -1: none)
    max_tokens      None: all that the context leaves
    min_tokens      nothing that ends the text is drawn before
    stop            strings that end the text, which is cut before them unless `include_stop_str_in_output`
    stop_token_ids  tokens that end it like EOS; with `ignore_eos` EOS does not
    detokenize      False: no text is made, outputs have token ids alone
    logprobs        log-probability of every output token (0: its own only, n: also the n likeliest), of the
                    model, before anything below and temperature
    prompt_logprobs the same for the prompt

    What changes the logits, in this order: `allowed_token_ids` (no other tokens), `logit_bias` (token id ->
    value added), `bad_words` (texts, or token ids, that are not continued to their end), `repetition_penalty`
    (divides positive logits of tokens in prompt or output and multiplies negative ones; Keskar et al.,
    arXiv:1909.05858), `frequency_penalty` and `presence_penalty` (subtracted per occurrence, or once, of a
    token in the output), `exponential_decay_length_penalty` (start, factor): from `start` output tokens on,
    EOS gains |its logit| * (factor^(tokens beyond start) - 1).
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = field(default=())
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    exponential_decay_length_penalty: tuple[int, float] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] | list[str] = field(default=())
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _plain(getattr(self, each.name)))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", _listed("stop", stop))
        for name in ("stop_token_ids", "bad_words"):
            object.__setattr__(self, name, _listed(name, getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", _listed("allowed_token_ids", self.allowed_token_ids)
            )
        if not isinstance(self.logit_bias or {}, Mapping):
            raise ConfigError(
                f"logit_bias: got {self.logit_bias!r}, wanted a value for each of some token ids"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_numbers()
        self._check_counts()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _yes_or_no(name, getattr(self, name))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0, LARGE),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            _between(name, getattr(self, name), low, high)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: got {self.top_p!r}, wanted above 0 and at most 1")
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 1 / LARGE <= penalty <= LARGE:
            raise ConfigError(f"repetition_penalty: got {penalty!r}, wanted above 0")
        if (decay := self.exponential_decay_length_penalty) is not None:
            start, factor = decay if isinstance(decay, (tuple, list)) and len(decay) == 2 else (None, None)
            if not _is_integer(start) or start < 0 or not _is_number(factor) or not 1 <= factor <= LARGE:
                raise ConfigError(
                    f"exponential_decay_length_penalty: got {decay!r}, wanted (tokens, factor of at least 1)"
                )
            object.__setattr__(self, "exponential_decay_length_penalty", (start, float(factor)))
        for token, bias in self.logit_bias.items():
            _at_least("logit_bias", token, 0)
            _between(f"logit_bias of token {token}", bias, -100, 100)

    def _check_counts(self) -> None:
        _at_least("n", self.n, 1)
        if self.best_of is not None:
            _at_least("best_of", self.best_of, self.n)
            if self.best_of > self.n and self.greedy:
                raise ConfigError(
                    f"best_of: got {self.best_of} with temperature 0, where all completions are the same"
                )
        _at_least("top_k", self.top_k, -1)
        if self.seed is not None:
            _check_seed(self.seed)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ConfigError(
                    f"min_tokens: got {self.min_tokens}, wanted at most max_tokens {self.max_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
                _at_most(name, getattr(self, name), MAX_LOGPROBS)

    def _check_lists(self) -> None:
        _at_most("logit_bias: number of tokens", len(self.logit_bias), MAX_TOKENS_LISTED)
        words = sum(isinstance(word, str) for word in self.bad_words)
        _at_most("bad_words: number", words, MAX_BAD_WORDS)
        _at_most("bad_words: number of token lists", len(self.bad_words) - words, 2 * MAX_BAD_WORDS)
        for token in self.stop_token_ids:
            _at_least("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None:
            _at_most("allowed_token_ids: number", len(self.allowed_token_ids), MAX_TOKENS_LISTED)
            if not self.allowed_token_ids:
                raise ConfigError("allowed_token_ids: got none, wanted at least one token id, or None")
            for token in self.allowed_token_ids:
                _at_least("allowed_token_ids", token, 0)
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ConfigError(f"stop: got {self.stop!r}, wanted non-empty strings")
        if self.stop_strings and not self.detokenize:
            raise ConfigError(
                f"stop: expected none with detokenize=False, got {self.stop!r}; they are looked for in the "
                "text; leave detokenize out, or use stop_token_ids"
            )
        for word in self.bad_words:
            if not isinstance(word, (str, tuple)) or not word:
                raise ConfigError(f"bad_words: got {word!r}, wanted non-empty strings")
            for token in word if isinstance(word, tuple) else ():
                _at_least("bad_words", token, 0)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this one."""
        return replace(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever it was given as."""
        return tuple(self.stop or ())


def _folder(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name}: got {type(value).__name__}, wanted a folder; {remedy}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _at_least(name: str, value: object, low: int) -> None:
    if not _is_integer(value) or value < low:
        raise ConfigError(f"{name}: got {value!r}, wanted an integer of at least {low}")
    _at_most(name, value, LARGEST)


def _check_seed(value: object) -> None:
    if not _is_integer(value) or not -LARGEST - 1 <= value <= LARGEST:
        raise ConfigError(f"seed: got {value!r}, wanted an integer of 64 bits")


def _at_most(name: str, value: int, high: int) -> None:
    if value > high:
        raise ConfigError(f"{name}: got {value}, wanted at most {high}")


def _between(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:
        raise ConfigError(f"{name}: got {value!r}, wanted {low} to {high}")


def _yes_or_no(name: str, value: object) -> None:
    """A text, such as "false", is neither."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{name}: got {value!r}, wanted True or False")


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """A list as a tuple; a text is none."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}: got {value!r}, wanted a list")
    return tuple(map(_plain, value))


def _plain(value: Any) -> Any:
    """A number or an array of numpy or torch as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}: got {value!r}, wanted one of {', '.join(known)}")
