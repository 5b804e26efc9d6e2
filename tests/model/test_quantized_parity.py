"""Quantized weights and quantized KV: the decoder against transformers, or against the definition inside it.

transformers (through compressed-tensors) is the truth for weight-only checkpoints. It divides int8 tokens by
absmax/127.5, qrt by absmax/127, so there the truth is a transformers model whose Linears are replaced by the
definition. For a KV format it is one whose attention reads K and V through that format.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from hand_steps import Requests
from qrt.quant import affine, rotation
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from tiny_models import quantize_checkpoint, random_checkpoint
from truth import ours, prompt, relative, theirs

MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 256, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
}
WEIGHT_ONLY = {
    "w4a16-asym-g128": ("w4a16", QuantSpec(4, False, Granularity.GROUP, 128)),
    "w4a16-sym-g32": ("w4a16", QuantSpec(4, True, Granularity.GROUP, 32)),
    "w8a16-channel": ("w8a16", QuantSpec(8, True, Granularity.CHANNEL)),
}
INT8_TOKENS = {
    "w8a8": ("w8a8", QuantSpec(8, True, Granularity.CHANNEL)),
    "w4a8-asym-g128": ("w4a8", QuantSpec(4, False, Granularity.GROUP, 128, progressive=True)),
    "w4a8-sym-g32": ("w4a8", QuantSpec(4, True, Granularity.GROUP, 32, progressive=True)),
}
TOKENS = prompt(48)


@pytest.fixture(scope="module", params=MODELS)
def plain(request, tmp_path_factory):
    architecture, config = MODELS[request.param]
    return random_checkpoint(tmp_path_factory.mktemp(request.param), architecture, **config)


@pytest.mark.parametrize("grid", WEIGHT_ONLY)
def test_weight_only_checkpoints_agree_with_transformers(plain, grid, tmp_path):
    pytest.importorskip("compressed_tensors", reason="transformers loads such a checkpoint with it")
    scheme, spec = WEIGHT_ONLY[grid]
    quantize_checkpoint(plain, tmp_path, scheme, spec)
    model, truth = ours(tmp_path), theirs(tmp_path, TOKENS)
    assert set(model.schemes) == {scheme}
    logits = Requests(model).run([(0, TOKENS)])[0]
    assert relative(logits, truth) < 1e-4
    assert relative(logits, theirs(plain, TOKENS)) > 1e-3  # it was quantized at all
    tokens, _ = Requests(model).greedy(TOKENS, 16)
    assert theirs(tmp_path, TOKENS + tokens[:-1])[len(TOKENS) - 1 :].argmax(-1).tolist() == tokens


def test_fp8_blocks_agree_with_transformers(plain, tmp_path):
    pytest.importorskip("accelerate", reason="transformers loads such a checkpoint with it")
    folder = fp8_checkpoint(plain, tmp_path / "fp8", 64)
    logits = Requests(ours(folder)).run([(0, TOKENS)])[0]
    assert relative(logits, theirs(folder, TOKENS)) < 1e-4
    assert relative(logits, theirs(plain, TOKENS)) > 1e-3


def fp8_checkpoint(source: Path, out: Path, size: int) -> Path:
    """`source` with its Linears as DeepSeek and Qwen publish fp8; blocks of `size` must divide them."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tensors[name].float().unflatten(1, (-1, size)).unflatten(0, (-1, size))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = blocks / scale[:, None, :, None]
        tensors[name] = codes.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size],
        "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"],
        "dequantize": True,  # for transformers: activations stay as they are
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("grid", INT8_TOKENS)
def test_int8_tokens_are_the_definition(plain, grid, tmp_path):
    scheme, spec = INT8_TOKENS[grid]
    quantize_checkpoint(plain, tmp_path, scheme, spec)
    model = ours(tmp_path)
    assert set(model.schemes) == {scheme}
    truth = by_definition(plain, tmp_path, affine.quantize_tokens)
    texts = [prompt(4, seed) for seed in range(32)]
    with torch.inference_mode():
        expected = truth(torch.tensor(texts)).logits
    ran = Requests(model, num=32, max_len=8).run(list(enumerate(texts)))
    apart = torch.tensor([relative(*pair) for pair in zip(ran, expected, strict=True)])
    # a code on the edge between two may fall either way, which few texts meet and no definition decides
    assert (apart < 1e-5).sum() >= 20 and apart.max() < 0.1
    assert relative(Requests(model).run([(0, TOKENS)])[0], theirs(plain, TOKENS)) > 5e-3


def by_definition(plain, quantized, quantize_tokens):
    """transformers' plain model with the weights of a quantized folder, and tokens that are rounded so."""
    checkpoint = open_checkpoint(quantized)
    truth = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name, module in truth.named_modules():
        if name.endswith("_proj"):
            weight = checkpoint.linear(name)[1].dequantize()
            module.forward = per_token_int8(weight, module.bias, quantize_tokens)
    return truth


def per_token_int8(weight, bias, quantize_tokens):
    def forward(x):
        codes, scale = quantize_tokens(x)
        return torch.nn.functional.linear(codes * scale, weight, bias)

    return forward


@pytest.mark.parametrize("grid", INT8_TOKENS)
def test_transformers_rounds_tokens_a_little_otherwise(plain, grid, tmp_path):
    """By absmax/127.5, halves to even: with that rule its logits are those of the definition."""
    pytest.importorskip("compressed_tensors", reason="transformers loads such a checkpoint with it")

    def quantize_tokens(x):
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return (x / scale).round().clamp(-128, 127), scale

    quantize_checkpoint(plain, tmp_path, *INT8_TOKENS[grid])
    got = theirs(tmp_path, TOKENS)
    with torch.inference_mode():
        wanted = by_definition(plain, tmp_path, quantize_tokens)(torch.tensor([TOKENS])).logits[0]
    assert relative(got, wanted) < 1e-4
    assert relative(Requests(ours(tmp_path)).run([(0, TOKENS)])[0], got) < 0.1


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_quantized_kv_is_the_definition(plain, kv):
    """Prefill that attends the cache and decode both equal attention over K and V through the format."""
    ALL_ATTENTION_FUNCTIONS.register(f"qrt_{kv}", attention_through(kv))
    truth = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation=f"qrt_{kv}"
    )
    model = ours(plain)
    with torch.inference_mode():
        expected = truth(torch.tensor([TOKENS]), attention_mask=causal(len(TOKENS))).logits[0]
    prefill = Requests(model, kv, attend_cache=True).run([(0, TOKENS)])[0]
    requests = Requests(model, kv)
    decoded = torch.cat([requests.run([(0, [token])])[0] for token in TOKENS])
    assert relative(prefill, expected) < 2e-3 and relative(decoded, expected) < 2e-3
    loss = relative(Requests(model).run([(0, TOKENS)])[0], expected)
    assert loss > (1e-2 if kv == "int4" else 3e-3)  # the format's own loss is far larger


def causal(n: int) -> torch.Tensor:
    """An additive mask [1, 1, n, n]."""
    return torch.full((n, n), -torch.inf).triu(1)[None, None]


def attention_through(kv: str):
    """transformers' eager attention over the keys and values that a KV format keeps."""
    quantize, center = {"int8": (affine.quantize_midtread8, 128.0), "int4": (affine.quantize_midrise4, 7.5)}[
        kv
    ]

    def kept(x):  # [1, Hkv, T, D]; rotate, quantize by half heads, decode, rotate back
        codes, scale = quantize(rotation.rotate(x), x.shape[-1] // 2)
        return rotation.unrotate(affine.decode_groups(codes, scale, center))

    def attention(module, query, key, value, attention_mask, **options):
        return eager_attention_forward(module, query, kept(key), kept(value), attention_mask, **options)

    return attention
