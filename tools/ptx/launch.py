"""Kernels that are launched on CPU tensors are compiled for a GPU and executed by `Grid`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ptx.grid import Grid
from ptx.memory import Descriptor, Tensors
from ptx.text import Code, parse

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # most that a program may have, by capability
SMS = 4  # of the GPU that is not there
_codes: dict[str, Code] = {}  # by a kernel's hash
settings: dict[str, Any] = {}  # of every Grid from here on: copies, seed
written: dict[tuple[int, int], Any] = {}  # `Tensors.left` of launches that may not be done


class Driver:
    """As much of one as the compiler asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int, compiled: Any) -> None:
    """From here on a launch compiles its kernel and calls `compiled`: function, kernel, grid, arguments."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        shared = kernel.metadata.shared
        assert shared <= SHARED_BYTES[capability], f"{self.__name__}: {shared} bytes of shared memory"
        compiled(self, kernel, grid, (args, options))
        return kernel

    driver.set_active(Driver(capability))
    JITFunction.run = launch


def install(capability: int) -> None:
    """From here on launches are executed; the device that launchers ask about is a GPU of this capability."""
    import triton

    from qrt.kernels import gpu

    triton.knobs.nvidia.disable_ptxas_opt = True  # what it makes is not executed
    triton.knobs.compilation.disable_line_info = True  # with it ptxas may crash there
    gpu.is_hopper = gpu.overlaps = lambda device: capability == 90
    gpu.multiprocessors = lambda device: SMS
    gpu.shared_bytes = lambda device: SHARED_BYTES[capability]
    compile_only(capability, _execute)


def _execute(function: Any, kernel: Any, shape: Any, arguments: Any) -> None:
    args, options = arguments
    *_, bind = function.device_caches[0]
    bound = bind(*args, **{"debug": False, **options})[0]
    parameters: list[Any] = []
    tensors = Tensors()
    for name, kind in kernel.src.signature.items():
        _add(kind, bound[name], name, parameters, tensors)
    if kernel.hash not in _codes:
        _codes[kernel.hash] = parse(kernel.asm["ptx"])
    code, shape = _codes[kernel.hash], shape(bound) if callable(shape) else shape
    parameters += [0] * (len(code.parameters) - len(parameters))  # two pointers, which nobody follows
    about = kernel.metadata
    run(code, shape, parameters, tensors, about.shared, about.launch_pdl)


def run(
    code: Code, shape: Sequence[int], parameters: list[Any], tensors: Tensors, shared: int, overlaps: bool
) -> None:
    """A launch, behind those before it: where it `overlaps` the last of these may still run, and so may older
    ones up to a fence."""
    tensors.follow(written)
    grid = Grid(code, shape, parameters, tensors, shared, overlaps=overlaps, **settings)
    grid.run()
    if grid.is_fence():
        written.clear()
        tensors.before.clear()
    written.update(tensors.left())


def _add(kind: Any, value: Any, name: str, parameters: list[Any], tensors: Tensors) -> None:
    """What an argument of this kind is to the compiled kernel."""
    if isinstance(kind, tuple):
        for part, (of_part, inner) in enumerate(zip(kind, value, strict=True)):
            _add(of_part, inner, f"{name}[{part}]", parameters, tensors)
    elif kind.startswith("tensordesc"):
        parameters += [_descriptor(value), *value.shape, *value.strides]
        last = sum((n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True))
        tensors.add_place(value.base.data_ptr(), (last + 1) * value.base.dtype.itemsize)
    elif kind.startswith("*"):
        storage = value.untyped_storage()
        tensors.add(storage.data_ptr(), storage.nbytes(), name)
        parameters.append(value.data_ptr())
    elif kind != "constexpr":
        parameters.append(value)


def _descriptor(tensor: Any) -> Descriptor:
    size, swizzle = tensor.base.dtype.itemsize, tensor.layout.swizzle_byte_width
    *outer, line = tensor.block_shape
    box = [*outer, min(line, swizzle // size or line)]  # a wider block comes by several copies
    strides = [stride * size for stride in tensor.strides]
    return Descriptor(tensor.base.data_ptr(), list(tensor.shape), strides, box, size, swizzle)
