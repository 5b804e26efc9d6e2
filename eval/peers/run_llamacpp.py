"""Quantize a model by llama.cpp with an importance matrix; write the dequantized weights.

Needs gguf, numpy, safetensors and transformers, and a llama.cpp built in LLAMA_CPP/build: its converter,
llama-imatrix and llama-quantize are run. Embedding and head stay in bf16. The importance matrix reads the
windows as text, in chunks of 512 tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from record import FILE, arguments, read_windows
from safetensors.torch import save_file

RECIPES = {name: name for name in ("Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "IQ4_XS", "IQ4_NL")}
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "token_embd": "embed_tokens", "output_norm": "norm",
}  # fmt: skip


def call(*command: str | Path) -> None:
    """Run a program and stop where it fails."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def made(path: Path, *command: str | Path) -> Path:
    """Run a program that makes the file `path` unless it is there."""
    if not path.exists():
        call(*command)
    return path


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
    return f"model.{NAMES[parts[0]]}.weight"


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order of rows that llama.cpp's rotary embedding takes."""
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, rows, 2, -1).transpose(1, 2).reshape(weight.shape)


def main() -> None:
    """Convert, collect the importance matrix, quantize, and dequantize into a plain checkpoint."""
    flags = arguments(__doc__, RECIPES)
    root, model, windows = Path(os.environ["LLAMA_CPP"]), Path(flags.model), Path(flags.windows)
    config = json.loads((model / "config.json").read_text())
    work = flags.out.parent / "gguf"
    work.mkdir(exist_ok=True)
    bf16 = work / "bf16.gguf"
    made(bf16, sys.executable, root / "convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", bf16)
    start = time.monotonic()
    matrix, binaries = work / f"{windows.name}.imatrix.gguf", root / "build/bin"
    text = windows / "windows.txt"
    made(matrix, binaries / "llama-imatrix", "-m", bf16, "-f", text, "-o", matrix, "-c", "512", "-t", "1")
    quantized = work / f"{flags.out.name}.gguf"
    plain = ("--token-embedding-type", "bf16", "--output-tensor-type", "bf16")
    call(binaries / "llama-quantize", "--imatrix", matrix, *plain, bf16, quantized, flags.recipe, "1")
    seconds = round(time.monotonic() - start)
    flags.out.mkdir()
    tensors, types, bits, weights = {}, Counter(), 0, 0
    for tensor in GGUFReader(quantized).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).float()
        name = hf_name(tensor.name)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                weight = unpermuted(weight, config[heads])
        if "_proj" in name:
            types[tensor.tensor_type.name] += 1
            bits, weights = bits + 8 * int(tensor.n_bytes), weights + weight.numel()
        tensors[name] = weight.contiguous()
    save_file(tensors, flags.out / "model.safetensors", metadata={"format": "pt"})
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, flags.out)
    facts = {
        "by": f"llama.cpp {os.environ['LLAMA_CPP_VERSION']}, {flags.recipe}, importance matrix",
        "grid": ", ".join(f"{kind} x {count}" for kind, count in types.most_common()),
        "windows": len(read_windows(str(windows))),
        "seconds": seconds,
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "bits_per_weight": round(bits / weights, 4),
    }
    (flags.out / FILE).write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
