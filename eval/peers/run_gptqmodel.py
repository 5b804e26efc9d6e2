"""Quantize a model by GPTQModel on the given windows."""

from __future__ import annotations

from gptqmodel import GPTQModel, QuantizeConfig
from record import Record, arguments, read_windows
from transformers import AutoTokenizer

GROUP = 64
# recipe -> (label, grid, settings)
RECIPES = {
    "gptq-sym": ("GPTQ", "sym", {"sym": True}),
    "gptq": ("GPTQ", "asym", {"sym": False, "format": "gptq_v2"}),
}


def main() -> None:
    """Run one recipe and save the checkpoint in GPTQ's layout."""
    flags = arguments(__doc__, RECIPES)
    label, grid, settings = RECIPES[flags.recipe]
    windows = read_windows(flags.windows)
    model = GPTQModel.load(flags.model, QuantizeConfig(bits=4, group_size=GROUP, **settings))
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows.tolist()]
    record = Record("gptqmodel", label)
    model.quantize(rows, tokenizer=AutoTokenizer.from_pretrained(flags.model), batch_size=1)
    model.save(str(flags.out))
    record.write(flags.out, len(rows), f"w4a16 g{GROUP} {grid}")


if __name__ == "__main__":
    main()
