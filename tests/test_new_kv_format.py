"""A new KV format is one folder and one line: int2 (tests/support/int2) works wherever a format is named.

k8v2 beside it has other bits for V than for K, and the tests over the registry take it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from int2.format import INT2
from qrt.errors import UnsupportedError
from qrt.kernels.decode_attention import decode_attention
from qrt.kernels.decode_attention.blocks import MEASURED, measured_block
from qrt.kernels.kv_write import many_kernel
from qrt.mem.storage import KVStorage
from qrt.offline.llm import LLM
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.planes import Grid
from qrt.request.sampling import SamplingParams

LINE = "int2.format:INT2"
ROOT = Path(__file__).parents[1]
OVER_THE_REGISTRY = [
    *("tests/quant/test_kv_formats.py", "tests/mem/test_kv_storage.py", "tests/mem/test_kv_sizing.py"),
    *("tests/kernels/test_kv_write.py", "tests/kernels/test_decode_attention.py"),
    *("tests/kernels/test_append_attention.py", "tests/kernels/test_prefill_attention.py"),
    *("tests/kernels/test_scores.py", "tests/eval/test_eval_flags.py"),
    "tests/eval/quality/test_long_context.py",
]
TEXT = "The Python interpreter reads a file, compiles it and runs the code. " * 8


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Add the line to the registry."""
    monkeypatch.setitem(KV_FORMATS._entries, "int2", LINE)


def loss(kv: str) -> float:
    llm = LLM("tiny", kv=kv, attend_cache=True, dtype="float32", max_model_len=512)
    return float(llm.score([llm.tokenizer.encode(TEXT)])[0].mean())


def test_the_model_reads_two_bits_of_every_value():
    """More is lost than by int4, but the text is still far likelier than at random (ln 4096 is 8.3)."""
    exact, int4, int2 = loss("fp16"), loss("int4"), loss("int2")
    assert abs(int4 - exact) < abs(int2 - exact) and int2 < 6


def test_generation_does_not_depend_on_the_batch():
    llm = LLM("tiny", kv="int2", attend_cache=True, dtype="float32", max_model_len=256)
    params = SamplingParams(max_tokens=8, temperature=0)
    prompts = ["The list", "import sys", "A class is"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone and all(len(ids) == 8 for ids in together)
    assert {format.name for format in llm.engine.formats} == {"int2"}


def test_the_pool_holds_twice_the_tokens_of_int4():
    """A head of 64 takes 2 x 16 bytes of codes and 8 of scales, with int4 2 x 32 and 8."""
    pools = {}
    for kv in ("int4", "int2"):
        engine = LLM("tiny", kv=kv, max_model_len=256, kv_cache_memory_bytes=4 << 20).engine
        pools[kv] = engine.pool.num_slots
    assert INT2.bytes_per_slot(1, 64, torch.float32) == 40
    assert pools["int2"] / pools["int4"] == pytest.approx(72 / 40, rel=0.01)


def test_attention_reads_what_was_stored():
    """`decode_attention` equals attention in fp64 over the decoded cache in the model's basis."""
    gen = torch.Generator().manual_seed(1)
    storage = KVStorage([INT2], 40, 2, 64, torch.float32, "cpu")
    buffers, slots = storage.layer(0).buffers, torch.randperm(40, generator=gen)[:9]
    k, v = torch.randn(2, 9, 2, 64, generator=gen)
    INT2.encode_ref(INT2.to_basis(k), INT2.to_basis(v), buffers, slots)
    q = torch.randn(1, 4, 64, generator=gen)
    table, rows, lens = slots.int()[None], torch.zeros(1, dtype=torch.int32), torch.tensor([9]).int()
    out, parts = torch.empty(1, 4, 64), torch.zeros(1, 8, dtype=torch.int32)
    decode_attention(INT2.to_basis(q), buffers, table, rows, lens, parts, out, "int2", 0.125)
    read = [INT2.from_basis(x).double().repeat_interleave(2, 1) for x in INT2.decode_ref(buffers, slots)]
    scores = torch.einsum("hd,khd->hk", q[0].double(), read[0]) * 0.125
    wanted = torch.einsum("hk,khd->hd", scores.softmax(1), read[1])
    torch.testing.assert_close(out[0].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hands_in", [(), ("k",), ("v",)])
def test_long_prompts_use_the_formats_own_encoder(monkeypatch, hands_in):
    """The kernel for many tokens takes a format whose two grids hand in an encoder, and no other."""
    monkeypatch.setattr(many_kernel, "ASM", True)
    assert many_kernel.fits(KV_FORMATS["k8v4"], 128)
    for name in hands_in:
        monkeypatch.setattr(type(INT2), name, Grid(4, 7.5, INT2.k.quantize, KV_FORMATS["int4"].k.many))
    assert not many_kernel.fits(INT2, 128)


def test_unmeasured_width_gets_a_one_head_block():
    assert INT2.widths not in MEASURED
    for requests in (1, 16, 300):
        block = measured_block(INT2, requests, 32, 8)
        assert (block.heads, block.ahead, block.appends) == (1, False, False)


def test_block_of_equal_width_appends_only_if_the_format_can(monkeypatch):
    monkeypatch.setattr(type(INT2), "widths", (8, 8))
    wanted = measured_block(KV_FORMATS["int8"], 5, 32, 8)
    assert wanted.appends and measured_block(INT2, 5, 32, 8) == wanted._replace(appends=False)


def test_flags_and_evaluators_know_it(tmp_path):
    """With the line in the registry before anything reads it, as in the source."""
    out = tmp_path / "ppl.json"
    command = f"""
import sys
from qrt.quant.kv import KV_FORMATS
KV_FORMATS._entries["int2"] = {LINE!r}
from qrt_eval.cli import main
sys.exit(main({["ppl", "pydoc", "--model", "tiny", "--kv", "int2", "--seqlen", "128", "--limit", "2",
                "--json", str(out)]!r}))
"""  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, env=environment)
    assert (result := json.loads(out.read_text()))["kv"] == "int2"
    assert result["kv_bytes_per_token"] == 6 * 2 * 40


@pytest.mark.slow
def test_the_tests_over_the_registry_take_it():
    """Where a format lacks the Triton functions, those of kernels skip it and say so."""
    known = "k8v2 or kv_error_command or remedy or every_kv_format"
    command = [sys.executable, "-m", "pytest", "-p", "k8v2.line", "-p", "no:cacheprovider", "-n", "0", "-rs"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "-k", known, *OVER_THE_REGISTRY], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "KV format k8v2 has no device.py; references alone run it" in done.stdout


def test_a_gpu_asks_for_the_functions_of_the_format():
    assert not INT2.has_device and KV_FORMATS["k8v4"].has_device
    with pytest.raises(UnsupportedError, match="int2: expected Triton functions in int2.device.*run it on a"):
        INT2.device  # noqa: B018


def test_a_name_without_a_line_is_refused(monkeypatch):
    monkeypatch.delitem(KV_FORMATS._entries, "int2")
    with pytest.raises(UnsupportedError, match="int2"):
        LLM("tiny", kv="int2")
