"""4-bit weights whose group scales are steps of one scale a channel; int8 activations scaled by token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight.w4a8.rows import Int8Rows
from qrt.quant.weight.w4a16.scheme import W4A16Scheme
from qrt.quant.weight.w8a8.scheme import W8A8


class W4A8Scheme(W4A16Scheme):
    """y = (xq @ Wq.T) * sx * c + bias with xq, sx from `affine.quantize_tokens`, or given.

    Wq = (code - zero) * step and c are those of `qrt.quant.progressive`, so the sums over all inputs are
    int32. The groups and the codes are w4a16's, and its kernels multiply the same tiles by 16-bit x.

    Run-time tensors: a `TiledWeight` with `steps` and `channel`, or on a CPU an `Int8Rows`.
    """

    name = "w4a8"
    spec = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=128, progressive=True)
    int8_tokens = True
    head, method = "w8a8", "awq-yaqa"
    packed = Int8Rows

    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self.linear_int8_ref(QuantizedTokens.of(x), tensors, bias)

    def linear_int8_ref(self, x: QuantizedTokens, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        if self._is_packed(tensors):
            return Int8Rows(*tensors).multiply_int8(x, bias)
        weight = self.tiles_for(x.codes, tensors)
        x = x._replace(codes=weight.gather(x.codes))
        codes = weight.int8_codes(x.codes.shape[1])
        return Int8Rows(codes, weight.channel, weight.arrivals).multiply_int8(x, bias)

    def explain_cpu(self, tensors: Sequence[Tensor]) -> str:
        return W8A8.explain_cpu(tensors) if self._is_packed(tensors) else super().explain_cpu(tensors)


W4A8 = W4A8Scheme()
