"""KV formats, one line per format; `--kv` takes these names.

A format is imported when it is first used, and torch with it.
"""

from typing import TYPE_CHECKING, Any

from qrt.registry import Registry

if TYPE_CHECKING:
    from qrt.quant.kv.base import KVFormat

KV_FORMATS: Registry["KVFormat"] = Registry(
    "KV format",
    {
        "fp16": "qrt.quant.kv.fp16.format:FP16",
        "int8": "qrt.quant.kv.int8.format:INT8",
        "int4": "qrt.quant.kv.int4.format:INT4",
        "k8v4": "qrt.quant.kv.k8v4.format:K8V4",
    },
)
UNQUANTIZED_KV = ("auto", "bf16")  # other names of fp16, which stores K and V in the model dtype

__all__ = ["KV_FORMATS", "UNQUANTIZED_KV", "KVFormat"]


def __getattr__(name: str) -> Any:
    if name == "KVFormat":
        from qrt.quant.kv.base import KVFormat

        return KVFormat
    raise AttributeError(name)
