"""`Arch`: what one model family looks like; `ModelConfig`: the sizes of one checkpoint of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qrt.arch.entries import MAX_LAYERS, number, positive, token_ids, typed
from qrt.arch.rope import RopeConfig, rope
from qrt.errors import CheckpointError, UnsupportedError

# The values of entries that config.json leaves out, as in transformers' LlamaConfig. Families override them.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


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

    `defaults` are the entries with another default than in `DEFAULTS`. `qkv_bias`, `o_bias`
    and `mlp_bias` take the config with defaults filled in and say whether those projections have a bias;
    `sliding_window` gives the window in tokens when any layer slides one, else None.
    `fuse` maps a fused projection to the checkpoint's projections it stacks, in order. In a mixture `experts`
    is the module that holds the experts, `expert_parts` are the names in each, and all experts' projections
    of a kind are listed as one: engines run them so.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: Callable[[Mapping[str, Any]], bool] = lambda config: typed(config, "attention_bias", bool)
    o_bias: Callable[[Mapping[str, Any]], bool] = lambda config: typed(config, "attention_bias", bool)
    mlp_bias: Callable[[Mapping[str, Any]], bool] = lambda config: typed(config, "mlp_bias", bool)
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

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the family's defaults for entries that config.json leaves out; null stays null."""
        return {**DEFAULTS, **self.defaults, **config}

    @property
    def routers(self) -> tuple[str, ...]:
        """Modules that choose among experts."""
        return tuple(name for pair in self.smooth for name in pair.routers)

    def is_expert(self, name: str) -> bool:
        """Return whether the module `name` of a layer is part of the experts, which see only some tokens."""
        return self.experts is not None and name.startswith(f"{self.experts}.")

    @property
    def projections(self) -> tuple[str, ...]:
        """The checkpoint's Linear names inside a decoder layer, in fuse order."""
        return tuple(part for _, parts in self.fuse for part in parts)


@dataclass(frozen=True)
class Mixture:
    """A decoder family whose mlp is a mixture of experts, each a SwiGLU of its own; the rest is `dense`'s.

    `counts` are the config's entries that may give the number of experts, the winning one first; `width` is
    the entry of their inner size. `all_sparse` takes the config with defaults filled in and says whether
    every layer is a mixture. `shared` is an expert that all tokens go through.
    """

    name: str
    dense: Arch
    width: str
    all_sparse: Callable[[Mapping[str, Any]], bool]
    counts: tuple[str, ...] = ("num_experts",)
    routers: tuple[str, ...] = ("mlp.gate",)
    experts: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str | None = None

    def arch(self, config: Mapping[str, Any]) -> tuple[Arch, Mapping[str, Any]]:
        """Return the architecture with the checkpoint's experts, and `config` with their inner size."""
        count = next((name for name in self.counts if name in config), "num_experts")
        config = self.dense.filled(config)
        if not self.all_sparse(config):
            raise UnsupportedError(
                f"config.json: some layers of this {self.name} are dense; "
                "qrt-calibrate needs experts in all layers"
            )
        each = [f"{self.experts}.{index}" for index in range(positive(config, count, most=MAX_LAYERS))]
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
        return arch, {**config, "intermediate_size": positive(config, self.width)}


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
        """Read a Hugging Face config.json; CheckpointError names an impossible entry.

        An entry that is left out has its family's default, as in transformers. null is refused, also as
        there, except for `num_key_value_heads`, and for `head_dim` of a family without a default for it.
        """
        config = arch.filled(config)
        heads = positive(config, "num_attention_heads")
        hidden = positive(config, "hidden_size")
        if config["hidden_act"] not in ("silu", "swish"):  # two names of one function
            raise UnsupportedError(f"config.json: hidden_act: expected 'silu', got {config['hidden_act']!r}")
        if arch.defaults.get("head_dim") is None and config["head_dim"] is None:
            config["head_dim"] = hidden // heads
        if config["num_key_value_heads"] is None:
            config["num_key_value_heads"] = heads
        layers = positive(config, "num_hidden_layers", most=MAX_LAYERS)  # before windows, which compare it
        window = arch.sliding_window(config)
        if window is not None:
            window = positive({"sliding_window": window}, "sliding_window")
        turned, max_position = rope(config, positive(config, "max_position_embeddings"))
        return cls(
            architecture=arch.name,
            vocab_size=positive(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=positive(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=positive(config, "num_key_value_heads"),
            head_dim=positive(config, "head_dim"),
            rms_norm_eps=number(config, "rms_norm_eps"),
            max_position=max_position,
            rope=turned,
            tied_embeddings=typed(config, "tie_word_embeddings", bool),
            qkv_bias=arch.qkv_bias(config),
            o_bias=arch.o_bias(config),
            mlp_bias=arch.mlp_bias(config),
            qk_norm=arch.qk_norm,
            sliding_window=window,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            eos_token_ids=token_ids(config, "eos_token_id"),
        )

    @property
    def context(self) -> int:
        """The most tokens of a request.

        qrt does not slide windows. Within the first `sliding_window` tokens a sliding layer equals a full
        one, so a request may have at most that many.
        """
        return min(self.max_position, self.sliding_window or self.max_position)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads: expected a multiple of num_key_value_heads "
                f"{self.num_kv_heads}, got {self.num_heads}; correct the two"
            )
        if self.head_dim % 2:
            raise UnsupportedError(
                f"config.json: head_dim: expected an even number, as RoPE rotates pairs, got {self.head_dim}"
            )
