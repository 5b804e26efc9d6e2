"""Compile kernels that are launched on CPU tensors for a GPU, and execute them with `Grid`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ptx.grid import Grid, Order
from ptx.operations import OPERATIONS
from ptx.tensors import Descriptor, Tensors
from ptx.text import Code, parse

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # the most that a program may have, by capability
SMS = 4  # of the GPU that is imitated
_codes: dict[str, Code] = {}  # by the kernel's hash
settings: dict[str, Any] = {}  # for the Order of every Grid: copies, seed
reached: list[Any] = []  # tensors that kernels find by addresses in other tensors
written: dict[tuple[int, int], Any] = {}  # `Tensors.left` of launches that may still run


class Driver:
    """Stand in for the driver, as far as the compiler asks it."""

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
    """Make launches compile their kernel and call `compiled` with function, kernel, grid and arguments."""
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
    """Make launches execute their compiled kernel on the CPU.

    The device that launchers ask about is then a GPU of this capability.
    """
    import triton

    from qrt.kernels import gpu

    triton.knobs.nvidia.disable_ptxas_opt = True  # its output is not executed
    triton.knobs.compilation.disable_line_info = True  # ptxas may crash on it
    vars(gpu).update(
        is_hopper=lambda device: capability == 90,
        overlaps=lambda device: capability == 90,
        multiprocessors=lambda device: SMS,
        shared_bytes=lambda device: SHARED_BYTES[capability],
    )
    compile_only(capability, _execute)


def _execute(function: Any, kernel: Any, shape: Any, arguments: Any) -> None:
    args, options = arguments
    *_, bind = function.device_caches[0]
    bound = bind(*args, **{"debug": False, **options})[0]
    parameters: list[Any] = []
    tensors = Tensors()
    for name, kind in kernel.src.signature.items():
        _add(kind, bound[name], name, parameters, tensors)
    for tensor in reached:
        tensors.add(tensor.data_ptr(), tensor.nbytes, "reached")
    if kernel.hash not in _codes:
        _codes[kernel.hash] = parse(kernel.asm["ptx"])
    code, shape = _codes[kernel.hash], shape(bound) if callable(shape) else shape
    parameters += [0] * (len(code.parameters) - len(parameters))  # two pointers that no kernel follows
    about = kernel.metadata
    run(code, shape, parameters, tensors, about.shared, about.launch_pdl)


def run(
    code: Code, shape: Sequence[int], parameters: list[Any], tensors: Tensors, shared: int, overlaps: bool
) -> None:
    """Execute a launch after those before it.

    If it `overlaps`, the one before may still run, and so may older ones, back to a fence.
    """
    tensors.follow(written)
    order = Order(overlaps=overlaps, **settings)
    grid = Grid(code, OPERATIONS, shape, parameters, tensors, shared, order)
    grid.run()
    if grid.is_fence():
        written.clear()
        tensors.before.clear()
    written.update(tensors.left())


def _add(kind: Any, value: Any, name: str, parameters: list[Any], tensors: Tensors) -> None:
    """Turn an argument of this kind into parameters of the compiled kernel."""
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
    box = [*outer, min(line, swizzle // size or line)]  # a wider block takes several copies
    strides = [stride * size for stride in tensor.strides]
    return Descriptor(tensor.base.data_ptr(), list(tensor.shape), strides, box, size, swizzle)
