"""KVStorage with every registered format: slots do not touch each other, whatever the layout."""

import pytest
import torch

from qrt.errors import QrtError
from qrt.mem.sizing import pool_bytes
from qrt.mem.storage import KVStorage
from qrt.quant.kv import KV_FORMATS

SLOTS, HEADS, DIM = 48, 2, 64
FORMATS = pytest.mark.parametrize("name", list(KV_FORMATS))


def storage(*names, num_slots=SLOTS, dtype=torch.float32):
    return KVStorage([KV_FORMATS[name] for name in names], num_slots, HEADS, DIM, dtype, "cpu")


def random_kv(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, HEADS, DIM, generator=generator).unbind(0)


def read(layer, slots):
    return torch.stack(KV_FORMATS[layer.format].decode_ref(layer.buffers, torch.as_tensor(slots)))


def write(layer, k, v, slots):
    KV_FORMATS[layer.format].encode_ref(k, v, layer.buffers, torch.as_tensor(slots))


@FORMATS
def test_a_write_changes_its_slots_only(name):
    kv = storage(name, name)
    every = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    mine, others = every[:17], every[17:]
    k, v = random_kv(SLOTS)
    for index in range(2):
        write(kv.layer(index), k, v, torch.arange(SLOTS))
    before, elsewhere = read(kv.layer(0), every), [b.clone() for b in kv.layer(1).buffers]
    write(kv.layer(0), *random_kv(17, seed=2), mine)
    assert torch.equal(read(kv.layer(0), others), before[:, 17:])
    assert not torch.isclose(read(kv.layer(0), mine), before[:, :17]).all()
    assert all(torch.equal(a, b) for a, b in zip(elsewhere, kv.layer(1).buffers, strict=True))


@FORMATS
def test_writing_the_pad_slot_changes_no_token(name):
    kv = storage(name)
    assert kv.pad_slot == kv.num_slots == SLOTS
    k, v = random_kv(SLOTS)
    write(kv.layer(0), k, v, torch.arange(SLOTS))
    before = read(kv.layer(0), torch.arange(SLOTS))
    write(kv.layer(0), *random_kv(5, seed=3), torch.full((5,), kv.pad_slot))
    assert torch.equal(read(kv.layer(0), torch.arange(SLOTS)), before)


@FORMATS
def test_a_token_is_the_same_in_every_slot(name):
    kv = storage(name)
    k, v = random_kv(20)
    there, here = torch.arange(20), torch.arange(20, 40).flip(0)
    write(kv.layer(0), k, v, there)
    for token in range(20):  # one by one, as decoding does
        write(kv.layer(0), k[token : token + 1], v[token : token + 1], here[token : token + 1])
    assert torch.equal(read(kv.layer(0), there), read(kv.layer(0), here))


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_sizing_counts_and_zero(name, dtype):
    kv = storage(name, name, name, dtype=dtype)
    buffers = [buffer for index in range(3) for buffer in kv.layer(index).buffers]
    assert len(kv) == 3
    assert kv.num_bytes == sum(b.numel() * b.element_size() for b in buffers)
    assert kv.num_bytes == pool_bytes([KV_FORMATS[name]] * 3, SLOTS, HEADS, DIM, dtype)
    assert not any(buffer.count_nonzero() for buffer in buffers)
    assert torch.isfinite(read(kv.layer(0), [0, kv.pad_slot])).all()
    specs = KV_FORMATS[name].buffers(1, HEADS, DIM, dtype).values()
    assert [b.dtype for b in kv.layer(0).buffers] == [spec.dtype for spec in specs]


def test_layers_may_differ():
    kv = storage("fp16", "int4", "int8")
    assert [kv.layer(i).format for i in range(3)] == ["fp16", "int4", "int8"]
    k, v = random_kv(3)
    for index in range(3):
        write(kv.layer(index), k, v, [7, 40, 2])
        layer_format = KV_FORMATS[kv.layer(index).format]
        got = layer_format.decode_ref(kv.layer(index).buffers, torch.tensor([7, 40, 2]))
        assert (got[0] - k).abs().max() < 0.5 and (got[1] - v).abs().max() < 0.5


def test_only_quantized_layers_have_smoothing():
    formats, tables = [KV_FORMATS[n] for n in ("fp16", "int4", "int4")], torch.ones(3, 3, HEADS, DIM).unbind()
    kv = KVStorage(formats, SLOTS, HEADS, DIM, torch.float32, "cpu", tables)
    assert all(kv.layer(i).smoothing is table for i, table in enumerate((None, *tables[1:])))
    assert kv.heads_per_sm(1, 8) == storage("int4").heads_per_sm(1, 8) != storage("fp16").heads_per_sm(1, 8)


def test_a_pool_too_large_is_one_clear_line():
    with pytest.raises(
        QrtError, match=r"KV pool: expected 2097152.00 GiB free on cpu for \d+ tokens in 2"
    ) as error:
        storage("fp16", "fp16", num_slots=1 << 40)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.alone  # it fills the GPU until nothing more fits
@FORMATS
def test_on_the_gpu(name):
    kv = KVStorage([KV_FORMATS[name]] * 2, 100_000, 8, 128, torch.bfloat16, "cuda")
    assert kv.num_bytes == pool_bytes([KV_FORMATS[name]] * 2, 100_000, 8, 128, torch.bfloat16)
    assert not any(buffer.count_nonzero() for i in range(2) for buffer in kv.layer(i).buffers)
    with pytest.raises(QrtError, match="KV pool: expected .* free on cuda for 100000000 tokens"):
        KVStorage([KV_FORMATS[name]] * 32, 100_000_000, 8, 128, torch.bfloat16, "cuda")
