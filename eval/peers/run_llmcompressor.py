"""Quantize a model by llm-compressor on the given windows."""

from __future__ import annotations

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from record import Record, arguments, read_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP = 64


def int4(symmetric: bool) -> dict:
    """Return the arguments for 4-bit weights in groups."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


ASYM, SYM = int4(False), int4(True)
W8A8 = {"targets": "Linear", "scheme": "W8A8", "ignore": ["lm_head"]}
# recipe -> (label, grid, modifiers)
RECIPES = {
    "rtn": ("RTN", "asym", lambda: [QuantizationModifier(**ASYM)]),
    "rtn-sym": ("RTN", "sym", lambda: [QuantizationModifier(**SYM)]),
    "gptq": ("GPTQ", "asym", lambda: [GPTQModifier(**ASYM)]),
    "gptq-sym": ("GPTQ", "sym", lambda: [GPTQModifier(**SYM)]),
    "awq": ("AWQ", "asym", lambda: [AWQModifier(), QuantizationModifier(**ASYM)]),
    "awq-gptq": ("AWQ + GPTQ", "asym", lambda: [AWQModifier(), GPTQModifier(**ASYM)]),
    "w8a8-rtn": ("RTN", "w8a8", lambda: [QuantizationModifier(**W8A8)]),
    "w8a8-gptq": ("GPTQ", "w8a8", lambda: [GPTQModifier(**W8A8)]),
    "w8a8-smoothquant-gptq": (
        "SmoothQuant + GPTQ", "w8a8",
        lambda: [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(**W8A8)],
    ),
}  # fmt: skip


def main() -> None:
    """Run one recipe and save the compressed checkpoint."""
    flags = arguments(__doc__, RECIPES)
    label, grid, modifiers = RECIPES[flags.recipe]
    windows = read_windows(flags.windows)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype="auto")
    if not torch.accelerator.is_available():  # 0.14 pins memory for an accelerator that is not there
        IntermediatesCache.pin_memory = lambda self, index: None
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows.tolist()]
    record = Record("llmcompressor", label)
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(flags.model),
        dataset=Dataset.from_list(rows),
        recipe=modifiers(),
        num_calibration_samples=len(rows),
        max_seq_length=windows.shape[1],
        output_dir=str(flags.out),
    )
    used = 0 if "rtn" in flags.recipe else len(rows)
    record.write(flags.out, used, grid if grid == "w8a8" else f"w4a16 g{GROUP} {grid}")


if __name__ == "__main__":
    main()
