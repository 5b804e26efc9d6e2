"""k8v2 KV: K as int8, V as int2. No `device.py` lies beside it."""

from int2.format import INT2
from qrt.quant.kv.int8.format import INT8
from qrt.quant.kv.planes import PlaneFormat


class K8V2Format(PlaneFormat):
    """K words of two planes, V words of eight."""

    name = "k8v2"
    k = INT8.k
    v = INT2.v


K8V2 = K8V2Format()
