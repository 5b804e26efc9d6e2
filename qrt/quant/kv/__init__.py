"""KV formats, one line per format; `--kv` takes these names."""

from qrt.quant.kv.base import KVFormat
from qrt.registry import Registry

KV_FORMATS: Registry[KVFormat] = Registry(
    "KV format",
    {
        "fp16": "qrt.quant.kv.fp16.format:FP16",
        "int8": "qrt.quant.kv.int8.format:INT8",
        "int4": "qrt.quant.kv.int4.format:INT4",
        "k8v4": "qrt.quant.kv.k8v4.format:K8V4",
    },
)

__all__ = ["KV_FORMATS", "KVFormat"]
