"""Test the tool that executes PTX: what instructions do, and that it finds faults."""

import numpy as np
import pytest
import torch

from backends import PTX, PTX_SM
from ptx import launch
from ptx.grid import Grid, Order
from ptx.operations import OPERATIONS
from ptx.tensors import Descriptor, Tensors, swizzled
from ptx.text import parse
from ptx.values import Fault
from qrt.kernels.decode_attention import kernel as decode_attention
from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.kv_write import kernel as kv_write
from qrt.kernels.rmsnorm.kernel import rmsnorm
from qrt.quant.kv import KV_FORMATS

KERNEL = """
.visible .entry kernel(.param .u64 kernel_param_0, .param .align 64 .b8 kernel_param_1[128])
.reqntid %d
{
    .reg .pred %%p<20>; .reg .b16 %%rs<20>; .reg .b32 %%r<40>; .reg .b64 %%rd<20>;
    ld.param.b64 %%rd1, [kernel_param_0];
    mov.u32 %%r1, %%tid.x;
    mov.u32 %%r2, %%ctaid.x;
    mov.b64 %%rd2, kernel_param_1;
    mad.wide.s32 %%rd3, %%r1, 4, %%rd1;
    %s
    ret;
}
"""
STORE = "st.global.b32 [%rd3], %r9;"
FIRST_WARP = "setp.lt.s32 %p1, %r1, 32;"
SWIZZLED = 64  # bytes of a line of `source`


def run(body, out, threads=32, programs=1, source=None, written=(), **options):
    """Execute `body` and return `out`.

    %rd1 holds the address of `out`, %rd3 that of the thread's word of it, %r1 the thread, %r2 the program,
    and %rd2 the descriptor of boxes of 8 x 32 of `source`. The kernel before has `written` these tensors.
    """
    before = {(x.data_ptr(), x.data_ptr() + x.nbytes): np.ones(x.nbytes, bool) for x in written}
    tensors = Tensors(before)
    tensors.add(out.data_ptr(), out.nbytes, "out")
    box = None
    if source is not None:
        rows, columns = source.shape
        box = Descriptor(source.data_ptr(), [rows, columns], [columns * 2, 2], [8, 32], 2, SWIZZLED)
    code, order = parse(KERNEL % (threads, body)), Order(**options)
    Grid(code, OPERATIONS, (programs,), [out.data_ptr(), box], tensors, 4096, order).run()
    return out


@pytest.mark.parametrize("instruction, a, b, c, want", [
    ("prmt.b32 %r9, %r3, %r4, %r5", 0x44332211, 0x88776655, 0x0F74, 0x11FF8855),
    ("lop3.b32 %r9, %r3, %r4, %r5, 0x6a", 0xFF00FF00, 0x0F0F0F0F, 0x80808080, 0x8F808F80),
    ("bfe.u32 %r9, %r3, 4, 8", 0x12345678, 0, 0, 0x67),
    ("bfe.s32 %r9, %r3, 4, 8", 0x00000F80, 0, 0, 0xFFFFFFF8),
    ("bfi.b32 %r9, %r3, %r4, 8, 8", 0xAB, 0x11223344, 0, 0x1122AB44),
    ("shf.l.wrap.b32 %r9, %r3, %r4, 8", 0x11223344, 0x55667788, 0, 0x66778811),
    ("shr.s32 %r9, %r3, 40", 0x80000000, 0, 0, 0xFFFFFFFF),
    ("shl.b32 %r9, %r3, 32", 1, 0, 0, 0),
    ("popc.b32 %r9, %r3", 0x80F00001, 0, 0, 6),
    ("mul.hi.u32 %r9, %r3, %r4", 0x80000000, 6, 0, 3),
    ("rem.s32 %r9, %r3, %r4", -7, 3, 0, -1),
    ("min.s32 %r9, %r3, %r4", -1, 1, 0, -1),
    ("min.u32 %r9, %r3, %r4", -1, 1, 0, 1),
    ("add.rn.f32 %r9, %r3, %r4", 0x3F800000, 0x33800000, 0, 0x3F800000),  # 1 + 2^-24: ties to even
    ("add.rp.f32 %r9, %r3, %r4", 0x3F800000, 0x33000000, 0, 0x3F800001),
    ("add.rm.f32 %r9, %r3, %r4", 0xBF800000, 0xB3000000, 0, 0xBF800001),
    ("fma.rn.f32 %r9, %r3, %r3, %r4", 0x3F800001, 0xBF800002, 0, 0x28800000),  # (1 + e)^2 - (1 + 2 e) = e^2
    ("max.f32 %r9, %r3, %r4", 0x7FC00000, 0x3F800000, 0, 0x3F800000),
    ("max.NaN.f32 %r9, %r3, %r4", 0x7FC00000, 0x3F800000, 0, 0x7FC00000),
    ("cvt.rn.bf16x2.f32 %r9, %r3, %r4", 0x3F808000, 0x3F818000, 0, 0x3F803F82),  # both ties
    ("cvt.rzi.s32.f32 %r9, %r3", 0xC0200000, 0, 0, -2),
    ("cvt.rni.s32.f32 %r9, %r3", 0x40200000, 0, 0, 2),
    ("mul.bf16x2 %r9, %r3, %r4", 0x40003F80, 0x40403FC0, 0, 0x40C03FC0),  # 2 * 3, 1 * 1.5
    ("add.s16x2 %r9, %r3, %r4", 0x7FFF0001, 0x0001FFFF, 0, 0x80000000),
    ("add.f16x2 %r9, %r3, %r4", 0x3C003C00, 0x3C004000, 0, 0x40004200),  # 1 + 1, 1 + 2
])  # fmt: skip
def test_arithmetic(instruction, a, b, c, want):
    inputs = "".join(f"mov.b32 %r{r}, {value};" for r, value in zip((3, 4, 5), (a, b, c), strict=True))
    out = run(f"{inputs} {instruction}; {STORE}", torch.zeros(32, dtype=torch.int32))
    assert {int(word) for word in out.numpy().view(np.uint32)} == {want & 0xFFFFFFFF}


def test_threads_of_a_warp():
    """Sum in a tree; branch with half of the threads; set a predicate in one."""
    body = """
    shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1; add.s32 %r9, %r1, %r3;
    setp.lt.s32 %p1, %r1, 16; @%p1 bra $low;
    add.s32 %r9, %r9, 100;
    $low:
    elect.sync %r4|%p2, -1; @%p2 add.s32 %r9, %r9, 1000;
    """
    out = run(body + STORE, torch.zeros(32, dtype=torch.int32)).tolist()
    assert out == [t + (t ^ 16) + 100 * (t >= 16) + 1000 * (t == 0) for t in range(32)]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_programs_and_barriers(seed):
    """Pass a word through four warps in shared memory; count with two programs in one place."""
    body = """
    mov.b32 %r3, global_smem; mad.lo.s32 %r4, %r1, 4, %r3; st.shared.b32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r5, %r1, 127; mad.lo.s32 %r4, %r5, 4, %r3; ld.shared.b32 %r9, [%r4];
    mad.lo.s32 %r5, %r2, 128, %r1; mad.wide.s32 %rd3, %r5, 4, %rd1;
    st.global.b32 [%rd3], %r9;
    atom.global.gpu.acq_rel.add.u32 %r6, [%rd1+1024], 1;
    """
    out = run(body, torch.zeros(257, dtype=torch.int32), 128, 2, seed=seed).tolist()
    assert out == [*range(127, -1, -1)] * 2 + [256]


FETCH = """
    mov.b32 %r3, global_smem; add.s32 %r4, %r3, 2048;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], BYTES;
    mov.b32 %r5, 0; mov.b32 %r6, FIRST;
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r3], [%rd2, {%r5, %r6}], [%r4];
"""
WAIT = """
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r4], PARITY;
      @!done bra again; }
"""


def fetching(asked=512, parity=0, first=0):
    fetch = FETCH.replace("BYTES", str(asked)).replace("FIRST", str(first))
    return fetch + WAIT.replace("PARITY", str(parity))


def fetched(body, **options):
    source = torch.arange(1, 16 * 32 + 1, dtype=torch.int16).view(16, 32)
    body += "mad.lo.s32 %r7, %r1, 4, %r3; ld.shared.b32 %r9, [%r7];" + STORE
    out = run(body, torch.zeros(128, dtype=torch.int32), 128, source=source, **options)
    return out.numpy().view(np.int16), source.numpy()


@pytest.mark.parametrize("options", [{}, {"copies": "early"}, {"seed": 3}])
def test_boxes_come_swizzled_and_zero_beyond_the_tensor(options):
    got, source = fetched(fetching(first=12), **options)
    want = np.zeros((8, 32), np.int16)
    want[:4] = source[12:]
    place = swizzled(np.arange(0, 512, 2), SWIZZLED)
    assert (got[place // 2] == want.reshape(-1)).all()
    assert sorted(place) == [*range(0, 512, 2)] and (place[32 * 2 : 32 * 3] != np.arange(128, 192, 2)).any()


def test_copy_has_not_arrived_before_its_wait():
    got, _ = fetched(fetching(parity=1))  # of the phase before
    assert (got == -1).all()  # how shared memory begins


def product(wait, early):
    """Multiply 64 x 32 ones by shared memory, which threads change after the wait, or too early."""
    store = "mov.b32 %r8, 0x02020202; st.shared.b32 [%r7], %r8;"
    return f"""
    mov.b32 %r3, global_smem; mad.lo.s32 %r7, %r1, 4, %r3; mov.b32 %r8, 0x01010101; st.shared.b32 [%r7], %r8;
    bar.sync 0;
    bfe.u32 %r6, %r3, 4, 14; cvt.u64.u32 %rd4, %r6; or.b64 %rd4, %rd4, 0xC000001000000000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8
        {{%r10, %r11, %r12, %r13}}, {{%r8, %r8, %r8, %r8}}, %rd4, 0;
    wgmma.commit_group.sync.aligned;
    {store if early else ""}
    wgmma.wait_group.sync.aligned {wait};
    bar.sync 0;
    {store}
    mov.b32 %r9, %r13; {STORE}
    """


def test_a_product_of_a_warp_group():
    assert (run(product(0, False), torch.zeros(128, dtype=torch.int32), 128) == 32).all()


@pytest.mark.parametrize("body, threads, why", [
    ("ld.global.b32 %r9, [%rd3+128];" + STORE, 32, "in none of out"),
    ("ld.global.v2.b32 {%r9, %r10}, [%rd3];" + STORE, 32, "8 bytes at"),
    ("mov.b32 %r3, 8192; ld.shared.b32 %r9, [%r3];" + STORE, 32, "shared"),
    ("bar.sync 0, 64;", 32, "1 warps for barrier 0 0"),
    ("bar.sync 0, 32;", 64, None),
    ("setp.eq.s32 %p1, %r1, 0; @%p1 bar.sync 0;", 32, "not all threads of a warp"),
    ("setp.lt.s32 %p1, %r1, 32; @%p1 ret; bar.sync 0, 64;", 64, "deadlock"),
    (product(0, True), 128, "written that another warp has read"),
    ("st.shared.b32 [global_smem], %r1;", 64, "two warps write different values"),
    ("mov.b32 %r3, 7; st.shared.b32 [global_smem], %r3;", 64, None),
    ("shr.u32 %r3, %r1, 5; add.s32 %r3, %r3, 8;" + FIRST_WARP + "@%p1 st.shared.b32 [global_smem], %r3;"
     "@!%p1 st.shared.b32 [global_smem], %r3;", 64, "written that another warp has written"),
    ("mov.b32 %r3, global_smem; mad.lo.s32 %r3, %r1, 4, %r3; st.shared.b32 [%r3], %r1; xor.b32 %r3, %r3, 128;"
     "ld.shared.b32 %r9, [%r3];", 64, "read that another warp has written"),
    (fetching(516, 0), 128, "for mbarrier 0"),
    (fetching(512, 1), 128, None),
    (fetching().replace("[%r3]", "[%r3+64]"), 128, "128 bytes at"),
    (fetching(512, 0) + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r4], 2;", 128, "more arrivals"),
])  # fmt: skip
def test_faults(body, threads, why):
    source, out = torch.ones(8, 32, dtype=torch.int16), torch.zeros(threads, dtype=torch.int32)
    if why is None:
        run(body, out, threads, source=source)
        return
    with pytest.raises(Fault, match=why):
        run(body, out, threads, source=source)


WAITS = "griddepcontrol.wait;"


@pytest.mark.parametrize("body, why", [
    ("mov.b32 %r9, 1;" + WAITS + STORE, None),
    ("mov.b32 %r9, 1;" + STORE + WAITS, "written before the kernel before is waited for"),
    ("ld.global.b32 %r9, [%rd3];" + WAITS, "is read before"),
    (FIRST_WARP + "@%p1 griddepcontrol.wait; bar.sync 0; ld.global.b32 %r9, [%rd3];" + STORE, None),
    (FIRST_WARP + "bar.sync 0; @%p1 griddepcontrol.wait; ld.global.b32 %r9, [%rd3];", "is read"),
    ("mov.b32 %r9, 1;", "no thread waits for the kernel before"),
    (fetching(), "is copied before"),
    (WAITS + fetching(), None),
])  # fmt: skip
def test_kernels_that_start_early(body, why):
    """They start before the kernel before is done, and have to wait for it."""
    source, out = torch.ones(8, 32, dtype=torch.int16), torch.zeros(64, dtype=torch.int32)
    settings = {"threads": 64, "source": source, "written": (source, out)}
    run(body, out, **settings)
    if why is None:
        run(body, out, overlaps=True, **settings)
    else:
        with pytest.raises(Fault, match=why):
            run(body, out, overlaps=True, **settings)


def test_unwritten_bytes_may_be_read_early():
    body = FIRST_WARP + "@%p1 ld.global.b32 %r9, [%rd3];" + WAITS + STORE
    out = torch.zeros(64, dtype=torch.int32)
    run(body, out, threads=64, written=(out[32:],), overlaps=True)
    with pytest.raises(Fault, match="is read before"):
        run(body, out, threads=64, written=(out[31:],), overlaps=True)


def launched(body, out, programs=1, overlaps=True):
    """Execute like `run`, after the launches before."""
    tensors = Tensors()
    tensors.add(out.data_ptr(), out.nbytes, "out")
    code = parse(KERNEL % (64, body))
    launch.run(code, (programs,), [out.data_ptr(), None], tensors, 4096, overlaps)


WRITE, READ = WAITS + STORE, "ld.global.b32 %r9, [%rd3];" + WAITS
LETS = "griddepcontrol.launch_dependents;"
SECOND = "setp.eq.s32 %p1, %r2, 1;"  # of two programs


@pytest.mark.parametrize("between, fence", [
    (LETS + WAITS, False),
    (WAITS + LETS, True),
    (WAITS, True),
    (LETS + WAITS + LETS, False),
    (SECOND + "@%p1 griddepcontrol.wait;" + LETS + WAITS, True),  # all must let it start
    (SECOND + "@%p1 ret;" + LETS + WAITS, False),
    (SECOND + "@%p1 ret;" + WAITS, True),
    (FIRST_WARP + "@%p1 griddepcontrol.wait;" + LETS + WAITS, False),  # a thread of a program is enough
    (FIRST_WARP + "@%p1 griddepcontrol.wait; bar.sync 0;" + LETS, True),
])  # fmt: skip
def test_older_kernels_may_still_run(between, fence):
    """They may, unless the one between has waited for them before it let the next one start."""
    out, other = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for times in 1, 2:
        launched(WRITE, out)
        for _ in range(times):
            launched(between + STORE, other, programs=2)
        if fence:
            launched(READ, out)
        else:
            with pytest.raises(Fault, match="is read before"):
                launched(READ, out)


def test_kernel_that_starts_late_is_a_fence():
    out, other = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    launched(WRITE, out)
    launched(LETS + WRITE, other, overlaps=False)
    launched(READ, out)


def test_writes_of_two_kernels_both_stay_pending():
    out = torch.zeros(128, dtype=torch.int32)
    for changes in False, True:
        launched("mov.b32 %r9, 7;" + WRITE, out)
        launched(LETS + WAITS + "mov.b32 %r9, 8; st.global.b32 [%rd3+128], %r9;", out)
        assert out.tolist() == [7] * 32 + [8] * 64 + [0] * 32
        if changes:
            out.zero_()  # by torch
            launched(READ, out)
        else:
            with pytest.raises(Fault, match="is read before"):
                launched(FIRST_WARP + "@%p1 ld.global.b32 %r9, [%rd3];" + WAITS, out)


@pytest.mark.ptx
@pytest.mark.skipif(not PTX or PTX_SM != 90, reason="executes kernels compiled for Hopper")
@pytest.mark.parametrize("between", [False, True])
def test_pending_tokens_are_not_loaded_ahead(monkeypatch, between):
    """decode_attention is told that only the newest tokens are pending, but all of them are.

    kv_write has just written the whole chunk, with or without a kernel between the two.
    """
    monkeypatch.setattr(kv_write, "multiprocessors", lambda device: 132)
    count, dtype, fmt = 72, torch.bfloat16, KV_FORMATS["fp16"]
    q, k, v = torch.randn(count, 8, 64, dtype=dtype).split((4, 2, 2), 1)
    buffers = [spec.zeros("cpu") for spec in fmt.buffers(count, 2, 64, dtype).values()]
    angles, slots = torch.ones(count, 32), torch.arange(count, dtype=torch.int32)
    rows, lens = torch.zeros_like(slots), slots + 1
    block = decode_attention.block_of(decode_attention.measured_block(fmt, count, 4, 2), 64, dtype)
    parts = plan_kv_splits(rows, lens, 2, block.heads_per_sm)

    def attend(newest):
        kv_write.kv_write(q, k, v, angles, angles, slots, slots, buffers, None, "fp16")
        if between:
            rmsnorm(torch.ones(4, 128, dtype=dtype), torch.ones(128, dtype=dtype), 1e-5)
        held = buffers, slots[None], rows, lens
        decode_attention.decode_attention(
            q, *held, parts, torch.empty(count, 4, 64, dtype=dtype), "fp16", 0.125, newest
        )

    attend(newest=False)
    with pytest.raises(Fault, match="is read before"):
        attend(newest=True)


def test_written_bytes_are_known():
    out = torch.zeros(8, dtype=torch.int32)
    tensors = Tensors()
    tensors.add(out.data_ptr(), out.nbytes, "out")
    for _, data, place in tensors.find(np.array([out[2].data_ptr()]), 4, write=True):
        data[place] = 1
    written = tensors.left()
    ((there, _),) = written.values()
    assert there.nonzero()[0].tolist() == [8, 9, 10, 11]

    following = Tensors()
    following.add(out[2:].data_ptr(), out[2:].nbytes, "some of it")
    following.follow(written)
    assert [there.nonzero()[0].tolist() for there in following.before.values()] == [[0, 1, 2, 3]]
    out[2] = 5  # by torch
    following.before.clear()
    following.follow(written)
    assert not following.before
