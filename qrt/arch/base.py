"""`Arch`: what one model family looks like; `ModelConfig`: the sizes of one checkpoint of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qrt.errors import CheckpointError, UnsupportedError

# What a config.json may ask for, before anything is allocated for it.
MAX_SIZE, MAX_LAYERS = 2**24, 2**12


@dataclass(frozen=True)
class Smooth:
    """Channel scales that move without changing the function: `source` output / s, `readers` input * s.

    Names are relative to a decoder layer. `source` is a norm, or a projection whose output the readers read.
    `routers` read it too; they are never quantized, but take the scales.
    """

    source: str
    readers: tuple[str, ...]
    routers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arch:
    """One decoder family: y = x + attention(norm(x)); z = y + mlp(norm(y)), with RMSNorm, RoPE and SwiGLU.

    `qkv_bias`, `o_bias` and `mlp_bias` take the raw config and say whether those projections have a bias;
    `sliding_window` gives the window in tokens when any layer slides one, else None.
    `fuse` maps a fused projection to the checkpoint's projections it stacks, in order. In a mixture `experts`
    is the module that holds the experts, `expert_parts` are the names in each, and all experts' projections
    of a kind are listed as one: engines run them so.
    """

    name: str
    qkv_bias: Callable[[Mapping[str, Any]], bool] = lambda config: bool(config.get("attention_bias", False))
    o_bias: Callable[[Mapping[str, Any]], bool] = lambda config: bool(config.get("attention_bias", False))
    mlp_bias: Callable[[Mapping[str, Any]], bool] = lambda config: bool(config.get("mlp_bias", False))
    sliding_window: Callable[[Mapping[str, Any]], int | None] = lambda config: None
    qk_norm: bool = False
    fuse: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.o_proj", ("self_attn.o_proj",)),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.down_proj", ("mlp.down_proj",)),
    )
    smooth: tuple[Smooth, ...] = (
        Smooth("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Smooth("self_attn.v_proj", ("self_attn.o_proj",)),
        Smooth("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        Smooth("mlp.up_proj", ("mlp.down_proj",)),
    )
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    experts: str | None = None
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def routers(self) -> tuple[str, ...]:
        """Modules that choose among experts."""
        return tuple(name for pair in self.smooth for name in pair.routers)

    def is_expert(self, name: str) -> bool:
        """Whether the module `name` of a layer belongs to an expert that only some tokens are sent to, or is
        all of them fused."""
        return self.experts is not None and name.startswith(f"{self.experts}.")

    @property
    def projections(self) -> tuple[str, ...]:
        """The checkpoint's Linear names inside a decoder layer, in fuse order."""
        return tuple(part for _, parts in self.fuse for part in parts)


@dataclass(frozen=True)
class Mixture:
    """A decoder family whose mlp is a mixture of experts, each a SwiGLU of its own; the rest is `dense`'s.

    `counts` are the config's entries that may say how many experts there are, `width` is that of their inner
    size; `all_sparse` takes the raw config and says whether every layer is a mixture. `shared` is an expert
    that all tokens go through.
    """

    name: str
    dense: Arch
    width: str
    all_sparse: Callable[[Mapping[str, Any]], bool]
    counts: tuple[str, ...] = ("num_experts", "num_local_experts")  # the second as transformers 5 saves it
    routers: tuple[str, ...] = ("mlp.gate",)
    experts: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str | None = None

    def arch(self, config: Mapping[str, Any]) -> tuple[Arch, Mapping[str, Any]]:
        """The architecture of one checkpoint with its experts by name, and `config` with their inner size."""
        if not self.all_sparse(config):
            raise UnsupportedError(
                f"config.json: some layers of this {self.name} are dense; qrt-calibrate takes mixtures in all"
            )
        count = next((name for name in self.counts if name in config), self.counts[0])
        each = [f"{self.experts}.{number}" for number in range(_positive(config, count, most=MAX_LAYERS))]
        inner = tuple(f"{expert}.{part}" for expert in each for part in self.parts[:2])
        pairs = [(f"{expert}.{self.parts[1]}", f"{expert}.{self.parts[2]}") for expert in each]
        down = tuple(reader for _, reader in pairs)
        fuse = [
            *self.dense.fuse[:2],
            (f"{self.experts}.gate_up_proj", inner),
            (f"{self.experts}.down_proj", down),
        ]
        if self.shared is not None:
            gate, up, last = (f"{self.shared}.{part}" for part in self.parts)
            fuse += [(f"{self.shared}.gate_up_proj", (gate, up)), (f"{self.shared}.down_proj", (last,))]
            inner, pairs = (*inner, gate, up), [*pairs, (up, last)]
        smooth = (
            *self.dense.smooth[:2],
            Smooth(self.dense.smooth[2].source, inner, self.routers),
            *(Smooth(source, (reader,)) for source, reader in pairs),
        )
        arch = replace(
            self.dense,
            name=self.name,
            fuse=tuple(fuse),
            smooth=smooth,
            experts=self.experts,
            expert_parts=self.parts,
        )
        return arch, {**config, "intermediate_size": _positive(config, self.width)}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/D), rescaled by `kind`: "default", "linear", "llama3", "yarn".

    `truncate` (yarn): the band between kept and stretched channels begins and ends at whole channels.
    `length` is what cos and sin are multiplied by.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    truncate: bool = True
    length: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and facts of one checkpoint, read from its config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], arch: Arch) -> ModelConfig:
        """Read a Hugging Face config.json; CheckpointError names a missing or impossible entry."""
        heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedError(f"config.json: hidden_act {config['hidden_act']!r}; qrt runs 'silu'")
        layers = _positive(config, "num_hidden_layers", most=MAX_LAYERS)  # before windows, which compare it
        window = arch.sliding_window(config)
        if window is not None:
            window = _positive({"sliding_window": window}, "sliding_window")
        rope, max_position = _rope(config, _positive(config, "max_position_embeddings"))
        return cls(
            architecture=arch.name,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_positive(config, "num_key_value_heads", heads),
            head_dim=_positive(config, "head_dim", hidden // heads),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_position=max_position,
            rope=rope,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=arch.qkv_bias(config),
            o_bias=arch.o_bias(config),
            mlp_bias=arch.mlp_bias(config),
            qk_norm=arch.qk_norm,
            sliding_window=window,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            eos_token_ids=_token_ids(config, "eos_token_id"),
        )

    @property
    def context(self) -> int:
        """Most tokens of a request. Within its first `sliding_window` tokens a sliding layer is a full one:
        qrt runs that far and no further."""
        return min(self.max_position, self.sliding_window or self.max_position)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise UnsupportedError(
                f"config.json: head_dim {self.head_dim} is odd; RoPE turns pairs of channels"
            )


def optional(config: Mapping[str, Any], key: str, kind: type) -> Any:
    """An entry that may be missing or null: None then; CheckpointError where it is no `kind`."""
    value = config.get(key)
    if not isinstance(value, kind | None):
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted null or of type {kind.__name__}")
    return value


def _positive(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted a positive integer")
    if value > most:
        raise CheckpointError(f"config.json: {key} is {str(value)[:20]}, wanted at most {most:,}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted a positive number")
    return float(value)


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One or a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) for token in ids):
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted a token id or a list of them")
    return tuple(ids)


def _rope(config: Mapping[str, Any], max_position: int) -> tuple[RopeConfig, int]:
    """The embedding, and the context that it is stretched to.

    transformers 5 writes `rope_parameters`; older checkpoints `rope_theta` and `rope_scaling`.
    """
    own = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: rope_scaling is {own!r}, wanted an object, or null")
    if any(isinstance(value, Mapping) for value in own.values()):
        raise UnsupportedError("config.json: rope_parameters differ between layers, which qrt does not run")
    entry = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | own
    if config.get(original := "original_max_position_embeddings") is not None:  # it wins, as in transformers
        entry[original] = config[original]
    kind = entry.get("rope_type") or entry.get("type") or "default"
    if _number(entry, "partial_rotary_factor", 1.0) != 1:
        raise UnsupportedError("config.json: partial_rotary_factor other than 1 is not run by qrt")
    theta = _number(entry, "rope_theta", 10000.0)
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta is {theta}, wanted more than 1")
    match kind:
        case "default":
            return RopeConfig(theta), max_position
        case "linear":
            factor = _number(entry, "factor")
            return RopeConfig(theta, kind, factor), _stretched(max_position, factor)
        case "llama3":
            rope = RopeConfig(
                theta,
                kind,
                factor=_number(entry, "factor"),
                low_freq_factor=_number(entry, "low_freq_factor"),
                high_freq_factor=_number(entry, "high_freq_factor"),
                original_max_position=_positive(entry, "original_max_position_embeddings", max_position),
            )
            return rope, max_position
        case "yarn":
            rope = _yarn(entry, theta, max_position)
            return rope, _stretched(rope.original_max_position, rope.factor)
    raise UnsupportedError(
        f"config.json: RoPE type {kind!r}; qrt runs 'default', 'linear', 'llama3' and 'yarn'"
    )


def _yarn(entry: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    """YaRN (Peng et al., arXiv:2309.00071) as transformers reads it."""
    original = _positive(entry, "original_max_position_embeddings", max_position)
    factor = _number(entry, "factor", max_position / original)
    stretch = 0.1 * math.log(max(factor, 1.0))
    length = 1 + stretch
    if entry.get("mscale") and entry.get("mscale_all_dim"):
        length = 1 + stretch * _number(entry, "mscale")
        length /= 1 + stretch * _number(entry, "mscale_all_dim")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        low_freq_factor=_number(entry, "beta_slow", 1.0),
        high_freq_factor=_number(entry, "beta_fast", 32.0),
        original_max_position=original,
        truncate=bool(entry.get("truncate", True)),
        length=_number(entry, "attention_factor", length),
    )


def _stretched(max_position: int, factor: float) -> int:
    context = int(max_position * factor)
    if context > MAX_SIZE:
        raise CheckpointError(
            f"config.json: RoPE stretches the context to {context:,} tokens, wanted at most {MAX_SIZE:,}"
        )
    return context
