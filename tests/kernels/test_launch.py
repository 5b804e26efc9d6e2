"""`launch`: what a `Variant` hands to CUDA is what Triton would, for every kind of argument."""

import ast
import gc
import threading
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from qrt.kernels import descriptor, launch
from qrt.kernels.act_mul.kernel import act_mul
from qrt.kernels.rmsnorm import ref
from qrt.kernels.rmsnorm.kernel import rmsnorm

HERE = torch.empty(0).get_device()  # the number of the device that the tests' tensors are on
STREAM = 77
Kernel = namedtuple("Kernel", "function run metadata packed_metadata launch_metadata")
Metadata = namedtuple("Metadata", "tensordesc_meta")
Started = namedtuple("Started", "grid stream function values")
started: list[Started] = []  # by kernels of this file


class Driver:
    """As much of one as Triton and `launch` ask for."""

    device = HERE

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return STREAM


class Launcher:
    """Triton's of a kernel. Called, it has what the user gave; its `launch` has what C takes."""

    launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, True, 0, 0

    def __init__(self, signature, described):
        self.arg_annotations = self.kernel_signature = self.signature = list(signature.values())
        launcher = self._launch  # the closure of Triton's has this name

        def with_descriptors(*args):
            raise AssertionError(f"{launcher}: descriptors are made already")

        self.launch = with_descriptors if described else launcher

    def __call__(self, x, y, z, stream, function, packed, metadata, before, after, *args):
        started.append(Started((x, y, z), stream, function, [*self._plain(self.signature, args)]))

    def _launch(self, x, y, z, stream, function, cooperative, pdl, packed, *rest):
        *nothing, _, _, values = rest
        assert (cooperative, pdl, nothing) == (False, True, [None] * 5)
        wide = [part for kind in self.signature for part in self._expanded(kind)]
        assert len(values) == len(wide)
        started.append(Started((x, y, z), stream, function, [*self._plain(wide, values)]))

    @staticmethod
    def _expanded(kind):
        rank = kind.partition("[")[2].partition("]")[0].count(",") + 1 if "tensordesc" in kind else 0
        return ["map"] + ["i64"] * 2 * rank if rank else [kind]

    def _plain(self, signature, values):
        """What the kernel's parameters are."""
        for kind, value in zip(signature, values, strict=True):
            if isinstance(kind, tuple):
                yield from self._plain(kind, value)
            elif kind.startswith("tensordesc"):
                yield from descriptor.make_tensordesc_arg(value, meta_of(value))
            elif kind != "constexpr":
                yield value.data_ptr() if isinstance(value, torch.Tensor) else value


def meta_of(desc):
    return {"block": list(desc.block_shape), "swizzle": desc.layout.swizzle_byte_width}


class Compiled(JITFunction):
    """Its kernels are named after what they are compiled for; nothing is."""

    scratch = 0

    def run(self, *args, **options):
        self.asked.append(args)
        return super().run(*args, **options)

    def _do_compile(self, key, signature, device, constexprs, options, attrs, warmup):
        described = [kind for kind in signature.values() if str(kind).startswith("tensordesc")]
        run = Launcher(signature, described)
        run.global_scratch_size = self.scratch
        name = repr((device, signature, constexprs, options, attrs))
        meta = Metadata([self.meta[kind] for kind in described])
        kernel = Kernel(name, run, meta, (4, 1, 0), lambda grid, stream, *args: None)
        self.device_caches[device][0][key] = kernel
        self.compiled.append(kernel)
        return kernel


def kernel_of(function, **options):
    made = Compiled(function, **options)
    made.compiled, made.asked = [], []
    made.meta = {name: meta_of(boxed.for_triton) for name, boxed in DESCRIPTORS.items()}
    return made


def body(a, b, c, plain, N: triton.language.constexpr, launch_pdl: triton.language.constexpr):
    pass


def _descriptors():
    memory = torch.zeros(64, 64, dtype=torch.int8)
    found = {}
    for rows, layout in ((8, gl.NVMMASharedLayout(64, 8, 2)), (16, gl.NVMMASharedLayout(32, 8, 2))):
        made = descriptor.descriptor_of(memory, descriptor.box(torch.int8, (rows, 64), layout))
        found[type_of(made)] = made
    return found


def type_of(made):
    """Triton's name of it."""
    return f"tensordesc<i8{list(made.box.block)},{made.box.layout!r}>"


DESCRIPTORS = _descriptors()
MEMORY = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.int32)}
TENSORS = [memory[at:] for memory in MEMORY.values() for at in (0, 1, 8, 64)]
TENSORS.append(torch.nn.Parameter(MEMORY[torch.float16][8:]))
INTS = [0, 1, 2, 15, 16, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63), -(2**31) - 1]
ONE = [*TENSORS, *INTS, None, True, False, 0.5, 1.0]
several = st.recursive(
    st.sampled_from(ONE), lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=4
)
arguments = several | st.sampled_from(list(DESCRIPTORS.values()))


@pytest.fixture
def gpu(monkeypatch):
    """A driver that only notes what is launched; on it the kernels of this file are compiled at once."""
    made = Driver()
    monkeypatch.setattr(launch.driver, "_active", made)
    monkeypatch.setattr(descriptor, "make_tensordesc_arg", lambda desc, meta: (
        [(desc.base.data_ptr(), tuple(meta["block"]), meta["swizzle"]), *desc.shape, *desc.strides]
    ))  # fmt: skip
    started.clear()
    return made


def by_triton(kernel, grid, args, **constants):
    """What a launch by Triton alone starts."""
    plain = [arg.for_triton if isinstance(arg, descriptor.Descriptor) else arg for arg in args]
    kernel[grid](*plain, **constants)
    return started.pop()


def by_variant(variant, grid, args):
    variant.launch(grid, *args)
    return started.pop()


def few(kernel, args):
    """Some arguments, `plain` an int, with a variant of the kernel."""
    return launch.Variant(kernel, {"N": 4, "launch_pdl": True}), (*args, 5)


@pytest.mark.usefixtures("gpu")
def test_arguments_of_any_kind_start_what_triton_starts():
    kernel, alone = (kernel_of(body, do_not_specialize=["plain"]) for _ in range(2))
    variant = launch.Variant(kernel, {"N": 4, "launch_pdl": True, "num_warps": 2})
    kinds = set()

    def check(args):
        want = by_triton(alone, (3, 2), args, N=4, launch_pdl=True, num_warps=2)
        kinds.add(want.function)
        for _ in range(2):
            assert by_variant(variant, (3, 2), args) == want
        asked = len(kernel.asked)
        assert by_variant(variant, [3, 2], args) == want and len(kernel.asked) == asked

    for value in (*ONE, *DESCRIPTORS.values()):
        check((value, 3, None, 5))
    for value in ONE:
        check(((value, 3), None, 4, 5))
        check((((value,), 3), None, 4, 5))
    for value in INTS:
        check((3, 4, 5, value))
    check(((2, (3,)), 4, None, 5))
    check(((2,), (3, 4), None, 5))
    given(st.tuples(arguments, arguments, arguments, st.sampled_from(INTS)))(check)()
    assert len(kinds) > 20 and {made.function for made in kernel.compiled} == kinds


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)])
def test_grids(grid):
    variant, args = few(kernel_of(body), [1, 2, 3])
    for _ in range(2):
        assert by_variant(variant, grid, args).grid == (*grid, 1, 1)[:3]


def test_kernels_of_one_device_are_not_started_on_another(gpu):
    kernel = kernel_of(body)
    variant, args = few(kernel, [1, 2, 3])
    for device in (0, 1, 0, 1):
        gpu.device = device
        assert by_variant(variant, (1,), args).function.startswith(f"({device},")
    assert len(kernel.asked) == 2


def test_tensors_of_another_device_go_through_triton(gpu):
    kernel = kernel_of(body)
    gpu.device = HERE + 1
    for odd in (torch.zeros(4), next(iter(DESCRIPTORS.values())), (torch.zeros(4),)):
        variant, args = few(kernel, [1, odd, 3])
        kernel.asked.clear()
        for _ in range(2):
            by_variant(variant, (1,), args)
        assert len(kernel.asked) == 2


@pytest.mark.usefixtures("gpu")
def test_what_only_triton_knows_goes_through_triton():
    class Tensor(torch.Tensor):
        pass

    kernel = kernel_of(body)
    variant, args = few(kernel, [1, torch.zeros(4).as_subclass(Tensor), 3])
    for _ in range(2):
        by_variant(variant, (1,), args)
    assert len(kernel.asked) == 2


@pytest.mark.usefixtures("gpu")
def test_kernel_that_needs_scratch_memory_goes_through_triton():
    kernel = kernel_of(body)
    kernel.scratch = 128
    variant, args = few(kernel, [1, 2, 3])
    for _ in range(3):
        by_variant(variant, (1,), args)
    assert len(kernel.asked) == 3


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("replaced", [True, False])
def test_hooks_hear_of_every_launch(name, replaced, monkeypatch):
    kernel = kernel_of(body)
    variant, args = few(kernel, [1, 2, 3])
    by_variant(variant, (1,), args)
    if replaced:
        monkeypatch.setattr(triton.knobs.runtime, name, print)
    else:
        monkeypatch.setattr(getattr(triton.knobs.runtime, name), "calls", [print])
    by_variant(variant, (1,), args)
    assert len(kernel.asked) == 2


@pytest.mark.usefixtures("gpu")
def test_boxes_that_kernels_encode_differently_go_through_triton():
    odd = descriptor.descriptor_of(torch.zeros(64, 64, dtype=torch.int8), descriptor.box(
        torch.int8, (32, 64), gl.NVMMASharedLayout(64, 8, 2)
    ))  # fmt: skip
    kernels = [kernel_of(body) for _ in range(2)]
    for swizzle, kernel in zip((64, 128), kernels, strict=True):
        kernel.meta = dict.fromkeys(kernel.meta, None) | {
            type_of(odd): {"block": [32, 64], "swizzle": swizzle}
        }
        variant, args = few(kernel, [odd, 2, 3])
        for _ in range(3):
            by_variant(variant, (1,), args)
    assert [len(kernel.asked) for kernel in kernels] == [1, 3]


def test_constants_must_come_last():
    with pytest.raises(ValueError, match=r"body: expected the parameters \['b', 'c'.*before its constants"):
        launch.Variant(kernel_of(body), {"a": 1, "launch_pdl": True})


def test_variants_are_made_once():
    kernel = kernel_of(body)
    made, again, other = (launch.variant(kernel, N=n, launch_pdl=True) for n in (1, 1, 2))
    assert made is again is not other


def test_every_kernel_is_launched_by_a_variant():
    """None as kernel[grid](...), which takes Triton ten times as long."""
    for path in Path(launch.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        kernels = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                assert not (isinstance(called, ast.Name) and called.id in kernels), f"{path}:{node.lineno}"


class Late(JITFunction):
    """Compiled by `compiled`, which Triton calls with what it has of the source."""

    def create_binder(self):
        binder = super().create_binder()
        self.compile = lambda source, **options: self.compiled(source)
        return binder


def late(compiled):
    kernel = Late(body)
    kernel.compiled = lambda source: compiled(source) or kernel_from(source)
    return kernel


def kernel_from(source):
    run = Launcher(source.signature, [])
    return Named(repr(source.signature), run, Metadata([]), (4, 1, 0), lambda *args: None, source)


Named = namedtuple("Named", "function run metadata packed_metadata launch_metadata src")


@pytest.fixture
def compiler(gpu, monkeypatch):
    """Two kernels may compile at a time; the driver's launchers are made beside them."""
    gpu.made = []
    gpu.launcher_cls = lambda source, metadata: gpu.made.append((source, metadata))
    monkeypatch.setattr(launch, "COMPILED", True)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    return gpu


def test_kernels_compile_side_by_side_and_none_is_launched(compiler, caplog):
    caplog.set_level("INFO")
    both = threading.Barrier(2, timeout=20)
    sources = []
    kernel = late(lambda source: sources.append(source) or (both.wait() and None))
    variant, args = few(kernel, [1, 2, 3])
    with launch.compiling():
        for _ in range(2):
            for first in (1, 0.5):
                variant.launch((1,), first, *args[1:])
    assert len(sources) == len(compiler.made) == 2 and not started
    assert "kernels: compiling 2, 2 at a time" in caplog.text
    for first in (1, 0.5, 1, 0.5):
        assert by_variant(variant, (1,), (first, *args[1:])).values[-3:] == [2, 3, 5]
    assert len(sources) == 2


def test_errors_of_compilers_are_raised_once_all_are_done(compiler):
    done = []

    def fail(source):
        if source.signature["a"] == "fp32":
            raise TypeError("no such kernel")
        done.append(source)

    variant, args = few(late(fail), [1, 2, 3])
    with pytest.raises(TypeError, match="no such kernel"), launch.compiling():
        for first in (0.5, 2, 16, 2**40):
            variant.launch((1,), first, *args[1:])
    assert len(done) == 3
    assert by_variant(variant, (1,), (2, *args[1:])).values[0] == 2  # launches again


def test_an_error_while_kernels_are_launched_ends_compiling(compiler):
    variant, args = few(late(lambda source: None), [1, 2, 3])
    with pytest.raises(KeyError), launch.compiling():
        variant.launch((1,), *args)
        raise KeyError
    assert by_variant(variant, (1,), args).values == [2, 3, 5]


def test_no_garbage_is_collected_while_threads_parse(compiler):
    """Python before 3.11.8 fails otherwise; see tests/support/parsing.py."""
    collects = []
    variant, args = few(late(lambda source: collects.append(gc.isenabled())), [1, 2, 3])
    with launch.compiling():
        variant.launch((1,), *args)
    assert collects == [False] and gc.isenabled()


def test_other_threads_launch_while_one_compiles(compiler):
    variant, args = few(late(lambda source: None), [1, 2, 3])
    by_variant(variant, (1,), args)
    with launch.compiling(), ThreadPoolExecutor(1) as other:
        other.submit(variant.launch, (1,), *args).result()
        variant.launch((1,), *args)
    assert len(started) == 1


def test_memory_is_zero_where_kernels_do_not_write(compiler):
    with launch.compiling():
        made = [torch.empty(1000, dtype=torch.int64), torch.empty_like(torch.ones(1000))]
        made.append(torch.ones(3).new_empty(1000))
        assert not any(x.any() for x in made)


def test_filters_of_warnings_stay(compiler):
    before = list(warnings.filters)
    variant, args = few(late(lambda source: warnings.simplefilter("error")), [1, 2, 3])
    with launch.compiling():
        variant.launch((1,), *args)
    assert warnings.filters == before


def test_nothing_is_compiled_where_kernels_are_interpreted(monkeypatch):
    monkeypatch.setattr(launch, "COMPILED", False)
    variant, args = few(kernel_of(body), [1, 2, 3])
    with launch.compiling():
        variant.launch((1,), *args)


@pytest.mark.gpu
def test_launches_without_triton_give_the_same(device, monkeypatch):
    """Of each kind (alignment, a count of 1 or a multiple of 16) Triton launches the first, then nothing: not
    on another stream, nor into a graph."""
    asked = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: asked.append(self) or run(self, *a, **k))
    memory, weight = torch.randn(64 * 272, device=device).half(), torch.rand(272, device=device).half()
    for tokens, width, first in ((1, 272, 0), (16, 272, 0), (17, 272, 1), (17, 256, 8), (33, 200, 3)):
        x = memory[first : first + tokens * width].view(tokens, width)
        for operator in (lambda x: rmsnorm(x, weight[: x.shape[1]], 1e-5), lambda x: act_mul(x, "silu")):
            want = operator(x)
            torch.cuda.synchronize()
            asked.clear()
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                assert torch.equal(operator(x), want)
            with torch.cuda.graph(graph):
                recorded = operator(x)
            recorded.zero_()
            graph.replay()
            assert torch.equal(recorded, want) and not asked


@pytest.mark.gpu
def test_kernels_that_were_compiled_only_run(device, monkeypatch):
    x, weight = torch.randn(5, 1234, device=device).half(), torch.rand(1234, device=device).half()
    with launch.compiling():
        assert not rmsnorm(x, weight, 1e-5).any()
    monkeypatch.setattr(JITFunction, "_do_compile", None)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-5), ref.rmsnorm(x, weight, 1e-5))
