"""`define`: one call registers an operator `qrt::name` with its reference and its Triton launcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qrt.config import ENV, KernelBackend

_LIBRARY = torch.library.Library("qrt", "FRAGMENT")


def define(
    schema: str, *, ref: Callable[..., Any], triton: str, fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register `qrt::<schema>` and return a function that calls it.

    `ref` runs CPU tensors, `triton` ("module:attribute", imported on first use) CUDA tensors; both take the
    schema's arguments. QRT_KERNEL_BACKEND overrides (config.KernelBackend). `fake` gives output shapes
    without data. An error in a kernel propagates: nothing falls back silently.

    The function calls the launcher itself where torch's dispatcher, `torch.ops.qrt.<name>`, would do no more
    than that: it takes 10 us of the host's time.
    """
    name = schema.partition("(")[0]
    launcher = _Lazy(triton)
    on_cuda = ref if ENV.kernel_backend is KernelBackend.REF else launcher
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, launcher if ENV.kernel_backend is KernelBackend.TRITON else ref, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"qrt::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.qrt, name).default

    def call(first: Any, *others: Any, **named: Any) -> Any:
        if _is_plain(first[0] if type(first) is list else first):
            return (launcher.function if on_cuda is launcher else ref)(first, *others, **named)
        return operator(first, *others, **named)

    return call


def _is_plain(x: Any) -> bool:
    """Return whether an operator whose first tensor is x only has to run on a GPU: gradients are off, and
    nothing traces it (torch.compile, torch.func, a mode that intercepts operators)."""
    return (
        type(x) is Tensor
        and x.is_cuda
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class _Lazy:
    """A function, "module:attribute", whose module is imported when it is first called."""

    def __init__(self, target: str) -> None:
        self._target = target

    @cached_property
    def function(self) -> Callable[..., Any]:
        module, _, attribute = self._target.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), attribute)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
