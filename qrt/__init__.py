"""qrt: a quantization-focused LLM inference runtime.

    from qrt import LLM, SamplingParams
    llm = LLM("tiny", kv="int8")
    print(llm.generate(["The"], SamplingParams(max_tokens=32))[0].outputs[0].text)

Importing this package touches neither CUDA nor Triton; the names below load on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qrt.version import __version__

if TYPE_CHECKING:
    from qrt.answers.output import CompletionOutput, RequestOutput
    from qrt.answers.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from qrt.config import EngineConfig
    from qrt.offline.llm import LLM
    from qrt.request.pooling import PoolingParams
    from qrt.request.sampling import SamplingParams
    from qrt.request.structured_outputs import StructuredOutputsParams
    from qrt.serve.async_llm import AsyncLLM
    from qrt_calibrate.api import calibrate, quantize

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
    "calibrate",
    "quantize",
]
if find_spec("prometheus_client") is None:  # without [serve], `import *` and help() have the rest
    __all__.remove("AsyncLLM")

# The root stands above all floors, the calibrator's too. Apart from the version it imports them on first use.
_LAZY = {
    "LLM": "qrt.offline.llm",
    "AsyncLLM": "qrt.serve.async_llm",
    "ClassificationRequestOutput": "qrt.answers.pooling.outputs",
    "CompletionOutput": "qrt.answers.output",
    "EmbeddingRequestOutput": "qrt.answers.pooling.outputs",
    "EngineConfig": "qrt.config",
    "PoolingParams": "qrt.request.pooling",
    "PoolingRequestOutput": "qrt.answers.pooling.outputs",
    "RequestOutput": "qrt.answers.output",
    "SamplingParams": "qrt.request.sampling",
    "ScoringRequestOutput": "qrt.answers.pooling.outputs",
    "StructuredOutputsParams": "qrt.request.structured_outputs",
    "calibrate": "qrt_calibrate.api",
    "quantize": "qrt_calibrate.api",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "GuidedDecodingParams":  # an AttributeError here would lose its text in an import statement
        raise ImportError("qrt: GuidedDecodingParams is vLLM's former name; import StructuredOutputsParams")
    raise AttributeError(f"module 'qrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List all names, also those not loaded yet, for completion in a notebook."""
    return sorted({*globals(), *__all__})
