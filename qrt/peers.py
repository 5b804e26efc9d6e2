"""Settings of other engines that have no equal here, and what to do instead."""

from typing import Any

_ELSEWHERE = {
    "--trust-remote-code": "qrt never runs a model's own code",
    "--load-way": "qrt reads safetensors only",
    "--quantization --quant-type --quant-cfg": "the weight scheme comes from the checkpoint; make one with "
    "qrt-calibrate",
    "--tensor-parallel-size --tp -tp --pipeline-parallel-size -pp --nnodes --node-rank --master-addr "
    "--master-port --nccl-host --nccl-port": "qrt runs on one GPU; run several servers behind a router",
    "--max-total-token-num --num-gpu-blocks-override": "give the pool in bytes with --kv-cache-memory-bytes",
    "--block-size": "KV memory is by the token, not by the block",
    "--kv-group-size --llm-kv-quant-group-size": "each KV format has its groups: one scale a half head",
    "--kv-scales --kv-quant-calibration-config-path": "no KV format needs calibration",
    "--tokenizer-mode": "qrt uses fast tokenizers only",
    "--no-enable-chunked-prefill --disable-chunked-prefill --chunked-prefill-size "
    "--long-prefill-token-threshold": "prompts are prefilled in chunks of what a step of "
    "--max-num-batched-tokens has left",
    "--router-max-wait-tokens --router-token-ratio": "see --admission",
    "--graph-max-batch-size --graph-split-batch-size --graph-grow-step-size": "see --cudagraph-capture-sizes",
    "--structured-outputs-backend --structured-outputs-config --output-constraint-mode": "grammars are not "
    "run; requests that need one are refused",
    "--speculative-config --spec-method --spec-model --spec-tokens --mtp-mode --mtp-draft-model-dir "
    "--mtp-step": "there is no speculative decoding",
    "--reasoning-parser": "reasoning is not told apart from the answer",
    "--stream-interval": "a chunk holds what has come since the last one was sent",
    "--health-monitor": "probe /health, which is red when the engine is stuck; --watchdog-timeout ends it",
    "--metric-gateway": "let Prometheus read /metrics",
    "--diverse-mode": "outputs of one prompt (n) always share it",
    "--token-healing-mode": "there is no token healing",
    "--enable-lora --lora-modules --max-loras --max-lora-rank": "adapters are not run; merge them into the "
    "checkpoint",
    "--swap-space --cpu-offload-gb": "weights and KV stay on the device; take fewer bits, or a smaller pool "
    "with --kv-cache-memory-bytes",
    "--log-config-file": "lines go to stderr; see --log-level",
}
ELSEWHERE = {flag: remedy for flags, remedy in _ELSEWHERE.items() for flag in flags.split()}

# Of those and of vLLM's other settings, the values that ask for what is so anyway.
_ANYWAY: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "tp": 1,
    "pipeline_parallel_size": 1,
    "pp": 1,
    "trust_remote_code": False,
    "quantization": None,
    "tokenizer_mode": "auto",
    "enable_chunked_prefill": True,
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "enable_lora": False,
    "speculative_config": None,
    "disable_log_stats": True,  # of LLM; the server has the flag
}


def is_so_anyway(name: str, value: object) -> bool:
    """Whether this value of a setting, or of the flag of that name, changes nothing here."""
    name = name.lstrip("-").replace("-", "_")
    return name in _ANYWAY and (value == _ANYWAY[name] or value == str(_ANYWAY[name]))
