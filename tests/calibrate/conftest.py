"""Random checkpoints with a tokenizer, and a small calibration text."""

import argparse
import inspect

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qrt_calibrate.text.text import read_texts
from tiny_models import random_checkpoint


def save_tokenizer(folder):
    """A byte-level tokenizer of 256 bytes, <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint("LlamaForCausalLM", dtype=..., **config) -> a folder with weights and tokenizer."""

    def make(architecture, **config):
        folder = tmp_path_factory.mktemp(architecture)
        save_tokenizer(random_checkpoint(folder, architecture, **{"dtype": torch.bfloat16, **config}))
        return folder

    return make


@pytest.fixture(scope="session")
def llama(make_checkpoint):
    """A bf16 Llama with grouped-query attention."""
    return make_checkpoint("LlamaForCausalLM")


@pytest.fixture(scope="session")
def calib(tmp_path_factory):
    """A text file of some 100 kB."""
    path = tmp_path_factory.mktemp("text") / "calib.txt"
    path.write_text(inspect.getsource(argparse))
    return path


@pytest.fixture(scope="session")
def default_text():
    """The text that calibration reads unless it is given one, and its name: Python is parsed for it."""
    return read_texts(None, None)
