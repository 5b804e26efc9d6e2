"""Hold rates that other engines publish, to stand beside those that `qrt-eval throughput` records."""

from __future__ import annotations

# TensorRT-LLM 1.0, Llama-3.1-8B in fp8 on one GPU: output tokens/s when all requests are handed in at once,
# by device and IN/OUT. https://nvidia.github.io/TensorRT-LLM/1.0.0/developer-guide/perf-overview.html
TENSORRT_LLM = "TensorRT-LLM 1.0, fp8"
TENSORRT_LLM_8B: dict[str, dict[str, int]] = {
    "NVIDIA H200": {
        "128/128": 27_911, "128/2048": 26_221, "128/4096": 18_027, "500/2000": 20_770, "1000/1000": 17_744,
        "1000/2000": 16_828, "2048/128": 3_538, "2048/2048": 12_194, "5000/500": 3_902, "20000/2000": 1_804,
    },
    "NVIDIA H100 80GB HBM3": {
        "128/128": 28_312, "128/2048": 22_714, "128/4096": 14_325, "500/2000": 17_660, "1000/1000": 15_220,
        "1000/2000": 13_899, "2048/128": 3_450, "2048/2048": 9_305, "5000/500": 3_459, "20000/2000": 1_351,
    },
}  # fmt: skip
