"""`define`, which registers an operator `qrt::name` from its reference and its Triton launcher."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from qrt.config import ENV, KernelBackend

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("qrt", "FRAGMENT")


class Operator(NamedTuple):
    """The two implementations of an operator. Both take the same parameters."""

    ref: Callable[..., Any]
    launcher: Lazy


OPERATORS: dict[str, Operator] = {}  # by name


def define(
    ref: Callable[P, R], *, triton: str, fake: Callable[..., Any] | None = None, mutates: Sequence[str] = ()
) -> Callable[P, R]:
    """Register the operator `qrt::<name of ref>`, and return a function that calls it.

    ref       the reference in torch, which runs CPU tensors; its annotations are the operator's schema
    triton    the launcher, "module:attribute", which runs CUDA tensors; imported on first use
    fake      makes the outputs without data; it names the parameters it needs; None if nothing is returned
    mutates   the names of the tensors that the operator writes to

    QRT_KERNEL_BACKEND chooses the reference or the launcher for all devices (`config.KernelBackend`). An
    error in a kernel reaches the caller: nothing falls back in silence.

    The returned function calls the launcher directly where torch's dispatcher (`torch.ops.qrt.<name>`) would
    do nothing else: the dispatcher takes 10 us of the host's time.
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


def takes(ref: Callable[P, R]) -> Callable[[Callable[[Any], R]], Callable[P, R]]:
    """Let a launcher be called as `ref` is; it gets one tuple of the arguments, by the names in `ref`."""
    parameters = signature(ref).parameters
    defaults = [one.default for one in parameters.values() if one.default is not Parameter.empty]
    arguments = namedtuple(f"{ref.__name__}_arguments", parameters, defaults=defaults)  # type: ignore[misc]

    def decorate(launcher: Callable[[Any], R]) -> Callable[P, R]:
        @wraps(launcher)
        def call(*args: P.args, **named: P.kwargs) -> R:
            return launcher(arguments(*args, **named))

        call.__signature__ = signature(ref, eval_str=True)  # type: ignore[attr-defined]
        return call

    return decorate


def _by_name(fake: Callable[..., Any] | None, operator: Signature) -> Callable[..., Any]:
    """Return a function that takes the operator's parameters and passes `fake` those that it names."""
    wanted = () if fake is None else signature(fake).parameters

    def call(*args: Any, **named: Any) -> Any:
        bound = operator.bind(*args, **named)
        bound.apply_defaults()
        return fake and fake(**{name: bound.arguments[name] for name in wanted})

    return call


def _is_plain(x: Any) -> bool:
    """Return whether an operator whose first tensor is x can skip torch's dispatcher.

    It can if x is on a GPU, gradients are off, and nothing traces the call: no torch.compile, no torch.func,
    no mode that intercepts operators.
    """
    return (
        type(x) is Tensor
        and x.is_cuda
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class Lazy:
    """A function named by "module:attribute". Its module is imported at the first call."""

    def __init__(self, target: str) -> None:
        self._target = target

    @cached_property
    def function(self) -> Callable[..., Any]:
        module, _, attribute = self._target.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), attribute)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
