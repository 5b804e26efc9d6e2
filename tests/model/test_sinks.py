"""Attention sinks in a whole model, beside transformers with the attention of its gpt-oss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from hand_steps import Requests
from qrt import EngineConfig, SamplingParams
from qrt.engine.engine import Engine
from qrt.model.smoothing import fit_smoothing
from qrt.quant.kv import KV_FORMATS
from truth import ours, prompt, relative
from zoo import make

PROMPT = prompt(40)


@pytest.fixture
def pair(tmp_path):
    """transformers' model and qrt's, with the same sinks; windows in some layers, biases of q, k and v."""
    theirs = make("qwen2", tmp_path)
    ALL_ATTENTION_FUNCTIONS.register("sinks", eager_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("sinks", eager_mask)
    theirs.set_attn_implementation("sinks")
    decoder = ours(tmp_path)
    random = torch.Generator().manual_seed(3)
    for their, own in zip(theirs.model.layers, decoder.layers, strict=True):
        sinks = 2 * torch.randn(4, generator=random)
        their.self_attn.sinks = sinks
        own.attention.scores = replace(own.attention.scores, sinks=sinks)
    return theirs, decoder


@torch.inference_mode()
def truth(theirs, tokens):
    return theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def test_chunks_and_decodes(pair):
    theirs, decoder = pair
    requests = Requests(decoder)
    logits = [requests.run([(0, PROMPT[:19])])[0], requests.run([(0, PROMPT[19:30])])[0]]
    logits += [requests.run([(0, [token])])[0] for token in PROMPT[30:]]
    want = truth(theirs, PROMPT)
    assert relative(torch.cat(logits), want) < 1e-4
    theirs.set_attn_implementation("eager")
    assert relative(truth(theirs, PROMPT), want) > 0.05, "the sinks weigh something"


def test_quantized_k_is_not_shifted(pair):
    """A shift moves all scores of a query but the sink's: the softmax would change."""
    theirs, decoder = pair
    assert not any(table[2].any() for table in fit_smoothing(decoder, [KV_FORMATS["int8"]] * 4))
    engine = Engine(
        EngineConfig("sinks", kv="int8", attend_cache=True, kv_cache_memory_bytes=1 << 20, max_model_len=64),
        decoder,
    )
    engine.add("a", PROMPT, SamplingParams(prompt_logprobs=0), generate=False)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    got = np.concatenate([delta.prompt_scores.logprobs for delta in deltas if delta.prompt_scores])
    scores = truth(theirs, PROMPT)[:-1].log_softmax(-1)
    want = scores.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert (torch.from_numpy(got) - want).abs().mean() < 0.02
