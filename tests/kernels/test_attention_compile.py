"""The attention-side kernels compile for a GPU, on a machine that has none."""

import pytest
import torch
from offline_cuda import compiled

BF16, FP16 = torch.bfloat16, torch.float16
CODE = """
import torch
from qrt.kernels import gpu
gpu.overlaps = lambda device: True  # as on the GPU that is compiled for
from qrt.kernels.decode_attention.kernel import decode_attention
from qrt.kernels.kv_write.kernel import kv_write
from qrt.kernels.prefill_attention import hopper_kernel
from qrt.kernels.prefill_attention.kernel import prefill_attention
from qrt.kernels.token_inputs.kernel import token_inputs
from qrt.quant.kv import KV_FORMATS

index, table = torch.zeros(48, dtype=torch.int32), torch.zeros(4, 1024, dtype=torch.int32)
parts = torch.zeros(60, 8, dtype=torch.int32)
for name, dtype, Hq, Hkv, D, attend_cache in CASES:
    qkv = torch.zeros(48, (Hq + 2 * Hkv) * D, dtype=dtype).unflatten(-1, (-1, D))
    q, k, v = qkv.split((Hq, Hkv, Hkv), 1)
    kv = [spec.zeros("cpu") for spec in KV_FORMATS[name].buffers(1024, Hkv, D, dtype).values()]
    angles, smooth = torch.zeros(64, D // 2), torch.zeros(3, Hkv, D)
    kv_write(q, k, v, angles, angles, index, index, kv, smooth if name != "fp16" else None, name)
    out = torch.empty(q.shape, dtype=dtype)
    decode_attention(q, kv, table, index, index, parts, out, name, 0.1)
    chunk = index[:4], index[:5], index[:5], index[:16].view(8, 2), out, 64, attend_cache
    for hopper in (False, True):
        hopper_kernel.is_hopper = lambda device: hopper
        prefill_attention(q, k, v, kv, table, *chunk, name, 0.1)
        if hopper and D == 64:
            prefill_attention(q, k, v, kv, table, *chunk, name, 0.1, 4096)
        elif hopper and name in ("int8", "fp16"):
            prefill_attention(q, k, v, kv, table, *chunk, name, 0.1, 4096 if name == "int8" else 0, 50.0)
rule = 64, 30.0, torch.ones(Hq)  # of the last case above
decode_attention(q, kv, table, index, index, parts, out, name, 0.1, False, *rule)
prefill_attention(q, k, v, kv, table, *chunk, name, 0.1, *rule)
for n in (1, 48):
    for decodes in (n, 0):
        token_inputs(index[:n].repeat(3, 1), index, index.long(), table, decodes, 8, 12, [0], [0])
"""
SOME = ("int8", BF16, 32, 8, 128, False), ("int4", FP16, 6, 6, 80, True)
ALL = (
    ("fp16", BF16, 32, 8, 128, False), ("int8", BF16, 32, 8, 128, False), ("int4", BF16, 32, 8, 128, False),
    ("k8v4", BF16, 32, 8, 128, False), ("int8", FP16, 14, 2, 64, True), ("int4", FP16, 6, 6, 80, True),
)  # fmt: skip


COUNTS = "_kv_write_kernel", "_attend_kernel", "_gather_kernel", "_prefill_kernel", "_hopper_prefill"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for the GPU that is here")
@pytest.mark.parametrize(
    "cases, counts",
    [
        pytest.param(SOME, (2, 3, 2, 3, 2), id="some"),
        pytest.param(ALL, (6, 7, 6, 5, 6), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_attention_kernels_compile(cases, counts):
    """int8 and int4 share what they can."""
    wanted = dict(zip(COUNTS, counts, strict=True)) | {"_token_inputs": 4}
    assert compiled(f"import torch\nCASES = {cases}\n{CODE}") == wanted
