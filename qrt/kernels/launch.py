"""`variant`, from which every Triton and Gluon kernel of `qrt.kernels` is launched.

    variant(_rmsnorm, K=4096, num_warps=8).launch((rows,), x, weight, y)

does what `_rmsnorm[(rows,)](x, weight, y, K=4096, num_warps=8)` does, in a fraction of the host's time.
At every launch Triton binds all arguments by name, builds a string of all constants to find the compiled
kernel, and compares the globals that the kernel reads. A `Variant` goes through Triton only for arguments of
a kind it has not seen. It keeps the compiled kernel of each kind, and passes plain addresses and numbers to
the C function that launches it.

The kind of an argument is everything that Triton compiles for. For a tensor that is its dtype, and whether it
begins at a multiple of 16 bytes; for an int its width, and whether it is 1 or a multiple of 16; for a TMA
descriptor its dtype, block and layout; for a tuple the kinds of its elements. Kinds may be finer than
Triton's, never coarser.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from qrt.gc import garbage_left
from qrt.kernels.descriptor import Descriptor

logger = logging.getLogger(__name__)

Grid = Sequence[int]
Start = Callable[[int, int, int, int, list[Any]], None]  # grid, stream, values
COMPILED = not triton.knobs.runtime.interpret  # False if Triton interprets kernels, for tests on a CPU
_BASE_16, _INT_32, _INT_64 = 15, 1 << 31, 1 << 63


@cache
def variant(kernel: Any, **constants: Any) -> Variant:
    """Return the `Variant` of a kernel with these constants and compile options (num_warps, maxnreg, ...).

    It is kept for ever, so pass what differs from step to step to `launch`, not here.
    """
    return Variant(kernel, constants)


class Variant:
    """A kernel with its constants and compile options. Its other parameters must come first."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._constants = constants
        self._is_compiled = isinstance(kernel, JITFunction)  # else Triton interprets it
        self._known: dict[tuple[Any, ...], Start | None] = {}  # by device and kinds; None: only Triton can
        varying = [name for name in kernel.arg_names if name not in constants]
        if varying != kernel.arg_names[: len(varying)]:
            raise ValueError(f"{kernel.__name__}: expected the parameters {varying} before its constants")
        self._rest = [None] * (len(kernel.arg_names) - len(varying))  # the C function ignores constants

    def launch(self, grid: Grid, *args: Any) -> None:
        """Launch the kernel over a grid of one to three sizes on the thread's current device and stream."""
        if (compiler := _compiler.get()) is not None:
            compiler.take(self, grid, args)
            return
        if not self._is_compiled or _is_watched():
            self._through_triton(grid, args)
            return
        gpu: Any = driver.active
        device = gpu.get_current_device()
        kinds: list[Any] = [device]
        values: list[Any] = []
        if not read(args, device, kinds, values):
            self._through_triton(grid, args)
            return
        key = tuple(kinds)
        start = self._known.get(key)
        if start is None:
            self._meet(key, grid, args)
            return
        x, y, z = (*grid, 1, 1)[:3]
        start(x, y, z, gpu.get_current_stream(device), values + self._rest)

    def _meet(self, key: tuple[Any, ...], grid: Grid, args: Sequence[Any]) -> None:
        """Launch with arguments of a kind that is new, and remember how."""
        kernel = self._through_triton(grid, args)
        if key not in self._known:
            self._known[key] = start_of(kernel, args)

    def compile(self, grid: Grid, args: Sequence[Any]) -> None:
        """Compile the kernel for arguments of this kind."""
        self._kernel.warmup(*map(_for_triton, args), grid=tuple(grid), **self._constants)

    def _through_triton(self, grid: Grid, args: Sequence[Any]) -> Any:
        """Launch through Triton, and return the compiled kernel."""
        return self._kernel[tuple(grid)](*map(_for_triton, args), **self._constants)


def _for_triton(arg: Any) -> Any:
    return arg.for_triton if type(arg) is Descriptor else arg


def _is_watched() -> bool:
    """Return whether a hook, such as a profiler's, is called at every launch."""
    runtime: Any = triton.knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def read(args: Sequence[Any], device: int, kinds: list[Any], values: list[Any]) -> bool:  # noqa: C901 -- a branch a type
    """Append each argument's kind to `kinds`, and what the C function takes for it to `values`.

    Return False if an argument is not on this GPU, or has a type that only Triton knows.
    """
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.get_device() != device:
                return False
            address = arg.data_ptr()
            kinds.append((arg.dtype, "odd") if address & _BASE_16 else arg.dtype)
            values.append(address)
        elif kind is int:
            kinds.append(_kind_of_int(arg))
            values.append(arg)
        elif arg is None:
            kinds.append(None)
            values.append(None)
        elif kind is Descriptor:
            if arg.device != device:
                return False
            kinds.append(arg.box)
            values += arg.values
        elif kind is float or kind is bool:
            kinds.append(kind)
            values.append(arg)
        elif kind is tuple:
            inner: list[Any] = [tuple]
            parts: list[Any] = []
            if not read(arg, device, inner, parts):
                return False
            kinds.append(tuple(inner))
            values.append(tuple(parts))
        else:
            return False
    return True


def _kind_of_int(value: int) -> str:
    if value == 1:
        return "1"
    if -_INT_32 <= value < _INT_32:
        return "i32" if value & _BASE_16 else "16 * i32"
    name = "i64" if -_INT_64 <= value < _INT_64 else "u64"
    return name if value & _BASE_16 else f"16 * {name}"


def start_of(kernel: Any, args: Sequence[Any]) -> Start | None:
    """Return a function that launches a compiled kernel with arguments of this kind.

    Return None where only Triton can launch it: if it needs scratch memory, or the GPU is not NVIDIA's.
    """
    run = kernel.run  # a CudaLauncher
    if not hasattr(run, "launch_pdl") or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, boxes = run.launch, [arg.box for arg in args if type(arg) is Descriptor]
    if boxes:
        for box, encoding in zip(boxes, kernel.metadata.tensordesc_meta, strict=True):
            if not box.has(encoding):
                return None
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]  # the one that takes CUDA's descriptors
    how = kernel.function, run.launch_cooperative_grid, run.launch_pdl
    packed = kernel.packed_metadata
    if hasattr(run, "arg_annotations"):  # Triton 3.7 and later: one function for all kernels
        described = packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature

        def start(x: int, y: int, z: int, stream: int, values: list[Any]) -> None:
            launch(x, y, z, stream, *how, *described, values)

    else:
        unscratched = None, None, packed, None, None, None

        def start(x: int, y: int, z: int, stream: int, values: list[Any]) -> None:
            launch(x, y, z, stream, *how, *unscratched, *values)

    return start


class _Compiler:
    """An executor for Triton's AsyncCompileMode that compiles the kernels launched, in threads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.kernels: list[Future[Any]] = []
        self._threads = threads
        self._taken: set[tuple[Any, ...]] = set()

    def take(self, variant: Variant, grid: Grid, args: Sequence[Any]) -> None:
        """Start to compile a kernel instead of launching it, unless it is compiled already."""
        if not COMPILED:
            return
        gpu: Any = driver.active
        kinds: list[Any] = [variant]
        if read(args, gpu.get_current_device(), kinds, []):
            if (key := tuple(kinds)) in self._taken:
                return
            self._taken.add(key)
        variant.compile(grid, args)

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        """Start a compilation. Triton calls this for a kernel that it does not have in memory."""
        self.kernels.append(self._threads.submit(self._compile, compile))
        return self.kernels[-1]

    @staticmethod
    def _compile(compile: Callable[[], Any]) -> Any:
        kernel, gpu = compile(), driver.active
        gpu.launcher_cls(kernel.src, kernel.metadata)  # Triton 3.6's C function, which it keeps in a file too
        return kernel


class _Zeros(TorchFunctionMode):
    """Makes newly allocated memory zero, since no kernel runs that would write it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in (torch.empty, torch.empty_like, Tensor.new_empty) else made


_compiler: ContextVar[_Compiler | None] = ContextVar("compiler", default=None)  # of this thread


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels that this thread launches in this context, many at a time, and launch none.

    Run a step in it, then run the step again: the second run finds its kernels compiled. Everything but
    kernels runs as usual. What kernels would have written (`torch.empty`) is zero, so that it can serve as an
    index. Leaving the context waits for the compilers, with a progress bar on stderr, and raises the first
    error of one. Threads are enough: four fifths of the time is spent without the interpreter's lock. Nothing
    is compiled where Triton interprets kernels.
    """
    count = len(os.sched_getaffinity(0))
    with (
        warnings.catch_warnings(),  # Triton sets filters
        garbage_left(),
        ThreadPoolExecutor(count, "compile") as threads,
    ):
        compiler = _Compiler(threads)
        with triton.AsyncCompileMode(compiler, ignore_errors=True):
            token = _compiler.set(compiler)
            try:
                with _Zeros():
                    yield
                _wait(compiler.kernels, count)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                _compiler.reset(token)
        for kernel in compiler.kernels:
            kernel.result()


def _wait(kernels: Sequence[Future[Any]], threads: int) -> None:
    if not kernels:
        return
    logger.info("kernels: compiling %d, %d at a time, unless Triton's cache has them", len(kernels), threads)
    for _ in tqdm(as_completed(kernels), "Compiling kernels", len(kernels), unit="kernel", delay=1):
        pass
