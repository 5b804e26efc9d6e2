"""Quantized test checkpoints: every Linear of the layers rounded to nearest, written by qrt's writer."""

from pathlib import Path

from qrt.quant import affine
from qrt.quant.checkpoint import CheckpointWriter, open_checkpoint
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WeightData


def rtn_checkpoint(
    source: Path, out: Path, scheme: str, spec: QuantSpec, ignore: tuple[str, ...] = ()
) -> Path:
    """Quantize `source` but for lm_head and `ignore` into `out`; returns `out`."""
    checkpoint, ignore = open_checkpoint(source), ("lm_head", *ignore)
    names = checkpoint.names()
    with CheckpointWriter(out, checkpoint, scheme=scheme, spec=spec, ignore=ignore, metadata={}) as writer:
        for name in names:
            module, tensor = name.removesuffix(".weight"), checkpoint.tensor(name)
            if name.endswith("_proj.weight") and module not in ignore:
                bias = checkpoint.tensor(f"{module}.bias") if f"{module}.bias" in names else None
                scale, zero = affine.choose_qparams(tensor, spec, tensor.dtype)
                codes = affine.quantize(tensor, scale, zero, spec)
                writer.add_linear(module, WeightData(codes, scale, zero, bias=bias, bits=spec.bits))
            elif not name.endswith("_proj.bias") or name.removesuffix(".bias") in ignore:
                writer.add_tensor(name, tensor)
    return out
