"""Quantize a model by AutoRound on the given windows."""

from __future__ import annotations

import torch
from auto_round import AutoRound
from record import Record, arguments, read_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP = 64
# recipe -> (label, grid, settings)
RECIPES = {
    "asym": ("200 iterations", "asym", {"sym": False, "iters": 200}),
    "sym": ("200 iterations", "sym", {"sym": True, "iters": 200}),
    "asym-50": ("50 iterations", "asym", {"sym": False, "iters": 50}),
}


def main() -> None:
    """Run one recipe and save the checkpoint, in AWQ's layout or (symmetric) in GPTQ's."""
    flags = arguments(__doc__, RECIPES)
    label, grid, settings = RECIPES[flags.recipe]
    windows = read_windows(flags.windows)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype="auto")
    record = Record("auto-round", label)
    tool = AutoRound(
        model,
        tokenizer=AutoTokenizer.from_pretrained(flags.model),
        bits=4,
        group_size=GROUP,
        dataset=list(windows.split(1)),
        nsamples=len(windows),
        seqlen=windows.shape[1],
        batch_size=8,
        device_map="cuda:0" if torch.cuda.is_available() else "cpu",
        **settings,
    )
    # GPTQ's first layout, the only one of the two that it writes, cannot hold a zero point of 0
    tool.quantize_and_save(str(flags.out), format="auto_gptq" if settings["sym"] else "auto_awq")
    saved = next(flags.out.glob("*/config.json")).parent  # a folder that it names
    for file in saved.iterdir():
        file.rename(flags.out / file.name)
    saved.rmdir()
    record.write(flags.out, len(windows), f"w4a16 g{GROUP} {grid}")


if __name__ == "__main__":
    main()
