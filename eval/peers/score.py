"""Score quantized checkpoints against their original: perplexity, KL, share of the same likeliest token.

Runs in qrt's environment. qrt reads the checkpoints (plain, compressed-tensors, GPTQ, AWQ) and dequantizes
them in fp32; transformers computes with them in fp32. The text is cut as GPTQ does: joined, disjoint
windows. Linears of W8A8 and W4A8 round their inputs to int8 per token, as qrt does.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import FILE
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from qrt.quant.affine import quantize_tokens
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.text import load_text
from qrt_eval.quality.protocol import PROTOCOLS


@dataclass
class Bits:
    """Counts the bits that quantized Linears take, with scales and zero points."""

    bits: int = 0
    weights: int = 0

    def add(self, weight: WeightData) -> None:
        """Count one Linear; an unquantized one in its own dtype."""
        self.weights += weight.values.numel()
        self.bits += weight.values.numel() * (weight.bits or 8 * weight.values.element_size())
        if weight.scale is not None:
            self.bits += weight.scale.numel() * 8 * weight.scale.element_size()
        if weight.zero is not None:
            self.bits += weight.zero.numel() * weight.bits


def round_inputs(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Round a Linear's inputs to int8, one scale per token."""
    codes, scale = quantize_tokens(inputs[0])
    return (codes.float() * scale,)


def load(folder: Path) -> tuple[nn.Module, float]:
    """Return a transformers model with a checkpoint's dequantized weights, and its bits per weight."""
    source = open_checkpoint(folder)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32
    ).eval()
    head = model.get_output_embeddings()
    bits = Bits()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                scheme, weight = source.linear(name)
                module.weight.copy_(weight.dequantize())
                bits.add(weight)
                if WEIGHT_SCHEMES[scheme].int8_tokens:
                    module.register_forward_pre_hook(round_inputs)
            else:
                for part, parameter in module.named_parameters(recurse=False):
                    if module is not head or source.has(f"{name}.{part}"):
                        parameter.copy_(source.tensor(f"{name}.{part}"))
    return model, bits.bits / bits.weights


@torch.no_grad()
def logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return log-probabilities [tokens - 1, vocabulary] of a window's tokens but the first."""
    logits: Tensor = model(ids[None, :-1]).logits[0]
    return logits.log_softmax(-1)


def compare(found: Tensor, exact: Tensor, ids: Tensor) -> Tensor:
    """Return a window's mean loss, mean KL to the original's log-probabilities, and share of equal argmax."""
    loss = -found.gather(1, ids[1:, None]).mean()
    kl = (exact.exp() * (exact - found)).sum(-1).mean()
    same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    return torch.stack([loss, kl, same]).double()


def figures(model: nn.Module, exact: Sequence[Tensor], windows: Tensor) -> dict[str, float]:
    """Compare a model with the original's log-probabilities; means over windows, as in GPTQ's protocol."""
    rows = [compare(logprobs(model, ids), kept, ids) for ids, kept in zip(windows, exact, strict=True)]
    loss, kl, same = torch.stack(rows).mean(0).tolist()
    return {"kl": round(kl, 5), "ppl": round(math.exp(loss), 3), "same_top1": round(same, 4)}


def exact_logprobs(original: Path, windows: Tensor, cache: Path) -> list[Tensor]:
    """Return the original's log-probabilities, kept in the file `cache` from the first call on."""
    if not cache.exists():
        model, _ = load(original)
        found = {str(i): logprobs(model, ids) for i, ids in enumerate(windows)}
        save_file(found | {"windows": windows}, cache)
    kept = load_file(cache)
    if not torch.equal(kept.pop("windows"), windows):
        raise SystemExit(f"{cache}: expected the log-probabilities of these windows, got others'; remove it")
    return [kept[str(i)] for i in range(len(windows))]


def original_ppl(exact: Sequence[Tensor], windows: Tensor) -> float:
    """Return the original's perplexity."""
    losses = [-rows.gather(1, ids[1:, None]).mean() for rows, ids in zip(exact, windows, strict=True)]
    return round(math.exp(torch.stack(losses).mean().item()), 3)


def row(folder: Path, exact: Sequence[Tensor], windows: Tensor) -> dict[str, Any]:
    """Score one checkpoint; its peer.json says what made it and may count the bits itself."""
    model, bits = load(folder)
    facts = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else {"by": folder.name}
    found = figures(model, exact, windows)
    return {"run": folder.name, "bits_per_weight": round(bits, 4), **facts, **found}


def main() -> None:
    """Score the folders, print a line each, and put the rows into the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", required=True, type=Path)
    parser.add_argument("--text", required=True, help="wiki.test.raw")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--limit", type=int, default=10, help="windows (default: %(default)s)")
    parser.add_argument(
        "--json", required=True, type=Path, help="rows are added or, by folder name, replaced"
    )
    parser.add_argument("--cache", required=True, type=Path, help="file of the original's log-probabilities")
    parser.add_argument("folders", nargs="*", type=Path)
    flags = parser.parse_args()
    text = load_text("wikitext", flags.text)
    cut = PROTOCOLS["gptq"].windows(text, Tokenizer(flags.original), flags.seqlen, None, flags.limit)
    windows = torch.tensor([window.ids for window in cut])
    exact = exact_logprobs(flags.original, windows, flags.cache)
    whole = json.loads(flags.json.read_text()) if flags.json.exists() else {"rows": []}
    whole["original_ppl"] = original_ppl(exact, windows)
    for folder in flags.folders:
        new = row(folder, exact, windows)
        whole["rows"] = [kept for kept in whole["rows"] if kept["run"] != new["run"]] + [new]
        flags.json.write_text(json.dumps(whole, indent=2) + "\n")
        print(
            folder.name, {key: new[key] for key in ("bits_per_weight", "kl", "ppl", "same_top1")}, flush=True
        )


if __name__ == "__main__":
    main()
