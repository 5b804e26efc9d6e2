"""`define`: one call registers an operator `qrt::name` with its reference and its Triton launcher."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from qrt.config import ENV, KernelBackend

_LIBRARY = torch.library.Library("qrt", "FRAGMENT")


def define(
    schema: str, *, ref: Callable[..., Any], triton: str, fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register `qrt::<schema>` and return the callable operator.

    `ref` runs CPU tensors, `triton` ("module:attribute", imported on first use) CUDA tensors; both take the
    schema's arguments. QRT_KERNEL_BACKEND overrides (config.KernelBackend). `fake` gives output shapes
    without data. An error in a kernel propagates: nothing falls back silently.
    """
    name = schema.partition("(")[0]
    launcher = _lazy(triton)
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, launcher if ENV.kernel_backend is KernelBackend.TRITON else ref, "CPU")
    _LIBRARY.impl(name, ref if ENV.kernel_backend is KernelBackend.REF else launcher, "CUDA")
    torch.library.register_fake(f"qrt::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.qrt, name).default


def _lazy(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    loaded: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not loaded:
            loaded.append(getattr(import_module(module), attribute))
        return loaded[0](*args, **kwargs)

    return call
