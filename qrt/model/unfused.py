"""What the fused kernels of `qrt.model.fused` do not compute: such a decoder runs one operator at a time."""

from __future__ import annotations

from operator import attrgetter

from qrt.layers.attention import Attention
from qrt.layers.experts import ExpertLinear, MoE
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import LayerNorm, RMSNorm
from qrt.model.decoder import Decoder, DecoderLayer

# the parts of a layer that the kernels compute, by their exact classes: a subclass computes something else
KNOWN_PARTS: dict[str, tuple[type, ...]] = {
    "norms.attention_in": (RMSNorm, LayerNorm, type(None)),
    "attention": (Attention,),
    "attention.qkv": (Linear,),
    "attention.o": (Linear,),
    "norms.attention_out": (RMSNorm, type(None)),
    "norms.mlp_in": (RMSNorm, LayerNorm, type(None)),
    "mlp": (MLP, MoE),
    "mlp.gate_up": (Linear, ExpertLinear),
    "mlp.down": (Linear, ExpertLinear),
    "norms.mlp_out": (RMSNorm, type(None)),
}


def unfused_part(decoder: Decoder) -> str | None:
    """Return the first fact of a layer that the fused kernels do not compute, None if they compute all."""
    for i, layer in enumerate(decoder.layers):
        if type(layer) is not DecoderLayer:
            return f"layer {i}: it is a {type(layer).__name__}"
        for name, known in KNOWN_PARTS.items():
            part = attrgetter(name)(layer)
            if type(part) not in known:
                return f"layer {i}: {name} is a {type(part).__name__}"
    if type(decoder.norm) not in (RMSNorm, LayerNorm):
        return f"the last norm is a {type(decoder.norm).__name__}"
    return None
