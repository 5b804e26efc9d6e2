"""`Arch`: one checkpoint's architecture as a value. Its defaults are Llama's; families state what differs.

Every family computes, with norms that may be absent,

    y = x + m * attention_out(attention(attention_in(x)))
    z = y + m * mlp_out(mlp(mlp_in(x if parallel else y)))        m: residual_scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qrt.arch.experts import Experts
from qrt.arch.layer import Layer, QScale, Reach
from qrt.arch.rope import RopeConfig
from qrt.errors import CheckpointError, UnsupportedError

POOLING_HEADS = ("score.", "classifier.", "v_head.")  # of models that classify, in transformers and InternLM2


@dataclass(frozen=True)
class Smooth:
    """Channel scales that move without changing the function: `source` output / s, `readers` input * s.

    Names are relative to a decoder layer. `source` is a norm, or a projection whose output the readers read:
    the rows of its `part`, "v" or "up", where it stacks several. `routers` read it too; they are never
    quantized, but take the scales.
    """

    source: str
    readers: tuple[str, ...]
    routers: tuple[str, ...] = ()
    part: str | None = None


@dataclass(frozen=True)
class Norm:
    """What the norms of a model compute.

    kind    "rms": x / rms(x) * weight; "layer": the same of x - mean(x), plus a bias if one is stored;
            "unit": "layer" without a weight
    plus    added to the stored weight, in the dtype that it multiplies in: 1.0 where checkpoints store
            weights around zero
    wide    of "rms": the weight, in fp32, multiplies before the result is rounded to the model's dtype, not
            after. "layer" always multiplies before
    """

    eps: float = 1e-6
    kind: str = "rms"
    plus: float = 0.0
    wide: bool = False


@dataclass(frozen=True)
class Names:
    """The checkpoint's names of a model's parts, by role; None: the model has no such part.

    From `q` on they are relative to a decoder layer. `qkv` and `gate_up` name the projection that stacks
    those parts: in the checkpoint where `Arch.qkv` or `Arch.gate_up` says so, else only in other engines.
    `sinks` is a tensor, a score of each head that joins the softmax and has no value.
    """

    embed: str = "model.embed_tokens"
    positions: str | None = None
    embed_norm: str | None = None
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = "self_attn.qkv_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None

    def outer(self, change: Callable[[str], str]) -> Names:
        """Return the names with `change` of the body's parts; the head and parts of layers keep theirs."""
        body = ("embed", "positions", "embed_norm", "layers", "norm")
        given = {role: name for role in body if (name := getattr(self, role)) is not None}
        return replace(self, **{role: change(name) for role, name in given.items()})


@dataclass(frozen=True)
class Arch:
    """One checkpoint's sizes and everything that its decoder computes, read from its config.json.

    name             the architecture that config.json names
    layers           what differs between layers, one each
    ropes            the rotary embeddings of the layers, by `Layer.rope`
    max_position     tokens that the positions reach
    qkv              how the checkpoint stores q, k and v: "parts", "stacked" in one weight, or "grouped":
                     stacked for each KV head
    gate_up          how it stores the mlp's first weights: "parts", "stacked", or "plain": there is no gate
    transposed       the layers' weights are stored [in, out]
    qk_norm          a norm over q and k: "head" over each head, "each" the same with a weight for every head,
                     "modules" the same, each weight in a module of its own, "whole" over all heads at once,
                     "after" over each head behind RoPE, "unit" the same without a weight, if there is RoPE;
                     None: there is none
    attention_scale  of q k^T; None: head_dim ** -0.5
    softcap          c of c * tanh(score / c), on scaled scores; logit_cap: the same, on logits
    clip             q, k and v are clamped to at most this magnitude
    alibi            what each head's scores lose for each token of distance, or empty
    q_scale          what q is multiplied by in layers with `Layer.q_scaled`; None: nothing
    positions        the learned position of a request's first token; None: there are none
    unit_head        rows of the head are normalized to length 1
    experts          the mixture that sparse layers have in place of the mlp
    headless         there is no head of a vocabulary: what stands for one is the embedding's table, never run
    ignored          beginnings of names of tensors that the model does not read, wherever its body lies
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    ropes: dict[str, RopeConfig]
    max_position: int
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    names: Names = Names()
    norm: Norm = Norm()
    parallel: bool = False
    qkv: str = "parts"
    gate_up: str = "parts"
    transposed: bool = False
    act: str = "silu"
    qk_norm: str | None = None
    attention_scale: float | None = None
    softcap: float | None = None
    clip: float | None = None
    alibi: tuple[float, ...] = ()
    q_scale: QScale | None = None
    embed_scale: float = 1.0
    positions: int | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    unit_head: bool = False
    experts: Experts | None = None
    headless: bool = False
    ignored: tuple[str, ...] = field(default=())

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

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    def of_layers(self, count: int) -> Arch:
        """Return the architecture with `count` layers, the first ones again where it has fewer."""
        again = -(-count // len(self.layers))
        return replace(self, layers=(self.layers * again)[:count])

    def without_head(self) -> Arch:
        """Return the body alone, for a model that pools; a stored head of any kind is not read."""
        ignored = (*self.ignored, f"{self.names.head}.", *POOLING_HEADS)
        body = replace(self, headless=True, ignored=ignored, tied_embeddings=True)
        return replace(body, head_bias=False, unit_head=False)

    def at(self, index: int) -> Arch:
        """Return the architecture as layer `index` has it: without experts where it is not sparse."""
        return self if self.layers[index].sparse or self.experts is None else replace(self, experts=None)

    @property
    def qk_norm_after_rope(self) -> bool:
        """Whether q and k turn before their norms, not behind them."""
        return self.qk_norm in ("after", "unit")

    def reach(self, index: int) -> Reach:
        """Return how far back layer `index` attends: all tokens, too, if that holds the context."""
        layer = self.layers[index]
        return Reach(*(n if n and n < self.max_position else 0 for n in (layer.window, layer.segment)))

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """How far back the layers attend, each once."""
        return tuple(dict.fromkeys(self.reach(index) for index in range(len(self.layers))))

    @property
    def long_rope_switch(self) -> int:
        """The most tokens of a request that uses `RopeConfig.short_factors`; 0: all use one table."""
        return max(
            (rope.original_max_position for rope in self.ropes.values() if rope.short_factors), default=0
        )

    @property
    def fuse(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The projections that engines run as one: a name, and the checkpoint's names of the parts in order.

        They are those of a layer; `at` a layer that is not sparse they are others. All experts' projections
        of a kind are listed as one.
        """
        names = self.names
        qkv = (names.q, names.k, names.v) if self.qkv == "parts" else (names.qkv,)
        fused: list[tuple[str, tuple[str, ...]]] = [(names.qkv, qkv), (names.o, (names.o,))]
        if self.experts is None:
            gate_up = {"parts": (names.gate, names.up), "stacked": (names.gate_up,), "plain": (names.up,)}
            return (*fused, (names.gate_up, gate_up[self.gate_up]), (names.down, (names.down,)))
        own = self.experts
        fused += [
            (f"{own.module}.gate_up_proj", tuple(part for expert in own.all for part in expert[:2])),
            (f"{own.module}.down_proj", tuple(expert[2] for expert in own.all)),
        ]
        if own.shared_parts:
            *inside, down = own.shared_parts
            fused += [(f"{own.shared}.gate_up_proj", tuple(inside)), (f"{own.shared}.down_proj", (down,))]
        return tuple(fused)

    @property
    def smooth(self) -> tuple[Smooth, ...]:
        """The pairs whose channel scales move between them without changing the function.

        Scales that are powers of two change it in no bit. Norms that store their weight less one would round
        it, and clipped values and activations that are not linear in their input do not keep a scale.
        """
        names = self.names
        pairs = []
        if self.norm.kind != "unit" and not self.norm.plus:
            readers: dict[str, list[str]] = {}
            for reader, norm in self.readers.items():
                if norm is not None:
                    readers.setdefault(norm, []).append(reader)
            routers = {names.mlp_in: self.routers}
            pairs = [Smooth(norm, tuple(own), routers.get(norm, ())) for norm, own in readers.items()]
        if self.clip is None:
            whole = self.qkv == "parts"
            pairs.append(Smooth(names.v if whole else names.qkv, (names.o,), part=None if whole else "v"))
        if self.experts is not None:
            gated = [*self.experts.all, *([parts] if (parts := self.experts.shared_parts) else [])]
            pairs += [
                Smooth(inner[-1], (down,), part="up" if len(inner) == 1 else None)
                for *inner, down in gated
                if self.act != "swiglu_oai"
            ]
        elif self.gate_up == "stacked":
            pairs.append(Smooth(names.gate_up, (names.down,), part="up"))
        elif self.gate_up == "parts" or self.act == "relu":
            pairs.append(Smooth(names.up, (names.down,)))
        return tuple(pairs)

    @property
    def readers(self) -> dict[str, str | None]:
        """The projections that read the stream, and the norm through which they do, or None."""
        (_, qkv), _, (_, inner), *_ = self.fuse
        shared = () if self.experts is None else self.experts.shared_parts[:-1]
        found: dict[str, str | None] = dict.fromkeys(qkv, self.names.attention_in)
        return found | dict.fromkeys((*inner, *shared), self.names.mlp_in)

    @property
    def routers(self) -> tuple[str, ...]:
        """Modules that choose among experts."""
        return () if self.experts is None else self.experts.routers

    def is_expert(self, name: str) -> bool:
        """Return whether the module `name` of a layer is part of the experts, which see only some tokens."""
        return self.experts is not None and name.startswith(f"{self.experts.module}.")

    @property
    def projections(self) -> tuple[str, ...]:
        """The checkpoint's Linear names inside a decoder layer, in the order of `fuse`."""
        return tuple(part for _, parts in self.fuse for part in parts)
