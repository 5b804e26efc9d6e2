"""transformers' answer, qrt's model, and the distance between them."""

from pathlib import Path

import torch
import transformers

from qrt.model.decoder import Decoder
from qrt.model.loader import load_model


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """max |ours - truth| / max |truth|."""
    return ((ours - truth).abs().max() / truth.abs().max()).item()


def theirs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [T, V] of a whole sequence."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def ours(folder: Path) -> Decoder:
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
