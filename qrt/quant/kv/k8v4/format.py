"""k8v4 KV: K as int8, V as int4. K decides which tokens are attended to, so its error costs more."""

from __future__ import annotations

from qrt.quant.kv.int4.format import INT4
from qrt.quant.kv.int8.format import INT8
from qrt.quant.kv.planes import PlaneFormat


class K8V4Format(PlaneFormat):
    """K words of two planes, V words of four."""

    name = "k8v4"
    k = INT8.k
    v = INT4.v


K8V4 = K8V4Format()
