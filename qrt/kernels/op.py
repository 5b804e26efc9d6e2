"""`define`: one call registers an operator `qrt::name` from its reference, with its Triton launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from inspect import Signature, signature
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from qrt.config import ENV, KernelBackend

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("qrt", "FRAGMENT")


class Operator(NamedTuple):
    """What an operator is made of; both functions take the same parameters."""

    ref: Callable[..., Any]
    launcher: Lazy


OPERATORS: dict[str, Operator] = {}  # by name


def define(
    ref: Callable[P, R], *, triton: str, fake: Callable[..., Any] | None = None, mutates: Sequence[str] = ()
) -> Callable[P, R]:
    """Register the operator `qrt::<name of ref>`, and return a function that calls it.

    The schema is that of `ref`'s annotations, and the tensors that `mutates` names are written to. `ref` runs
    CPU tensors, `triton` ("module:attribute", imported on first use) runs CUDA tensors with the same
    parameters. QRT_KERNEL_BACKEND overrides (config.KernelBackend). `fake` makes the outputs without data; it
    names the parameters that it needs, and is left out where nothing is returned. An error in a kernel
    propagates: nothing falls back silently.

    The function calls the launcher itself where torch's dispatcher, `torch.ops.qrt.<name>`, would do no more
    than that: it takes 10 us of the host's time.
    """
    name, launcher = ref.__name__, Lazy(triton)
    OPERATORS[name] = Operator(ref, launcher)
    on_cuda = ref if ENV.kernel_backend is KernelBackend.REF else launcher
    _LIBRARY.define(torch.library.infer_schema(ref, op_name=name, mutates_args=mutates))
    _LIBRARY.impl(name, launcher if ENV.kernel_backend is KernelBackend.TRITON else ref, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"qrt::{name}", _by_name(fake, signature(ref)), lib=_LIBRARY)
    operator = getattr(torch.ops.qrt, name).default

    def call(first: Any, *others: Any, **named: Any) -> Any:
        if _is_plain(first[0] if type(first) is list else first):
            return (launcher.function if on_cuda is launcher else ref)(first, *others, **named)
        return operator(first, *others, **named)

    return cast(Callable[P, R], call)


def _by_name(fake: Callable[..., Any] | None, operator: Signature) -> Callable[..., Any]:
    """Return a function of all of the operator's parameters that gives `fake` those it names."""
    wanted = () if fake is None else signature(fake).parameters

    def call(*args: Any, **named: Any) -> Any:
        bound = operator.bind(*args, **named)
        bound.apply_defaults()
        return fake and fake(**{name: bound.arguments[name] for name in wanted})

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


class Lazy:
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
