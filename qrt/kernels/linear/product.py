"""What `choose` is asked and answers: what becomes of x @ W.T + bias, which kernel computes it, and why."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class Epilogue(Enum):
    """What becomes of the product x @ W.T + bias, [T, N]."""

    PLAIN = "the product"
    ACT_MUL = "act(gate) * up of the product"
    PARTIAL_SUMS = "the product's sums over each split of K"


class Kernel(Enum):
    """A kernel, by what it does."""

    NOTHING = "no kernel runs"
    DIGITS = "int8 tensor cores multiply 4-bit codes by activations split into two int8 digits"
    FUSED = "one kernel unpacks every weight once, in registers"
    WIDE = "Hopper's kernel unpacks the next plane of weights under the product of the last one"
    DEQUANTIZE = "the weight is dequantized block by block, and torch multiplies"
    WIDE_INT8 = "Hopper's kernel unpacks the next plane of weights to int8 under the product of the last one"
    TILES_INT8 = "the kernel of any GPU unpacks weights to int8 and multiplies codes by codes"
    INT8_HOPPER = "Hopper's int8 kernel multiplies codes by codes"
    INT8_BLOCK = "the int8 kernel of any GPU multiplies codes by codes"
    ROWS = "the kernel of any GPU multiplies weights row by row"
    FEW_16_BIT = "Hopper's 16-bit kernel streams the weight past a few tokens"
    TORCH = "torch multiplies"
    DEFINITION = "the scheme's definition (linear_ref) multiplies, in fp32"


class Product(NamedTuple):
    """What `choose` decides.

    kernel    the kernel that multiplies
    why       why this kernel and no other
    plan      how it is launched; None where the kernel has but one way
    measured  whether the plan was measured (`qrt.kernels.tuned`), or is a rule of thumb
    joined    whether the kernel applies the epilogue too
    epilogue  as asked for
    """

    kernel: Kernel
    why: str
    plan: Any = None
    measured: bool = False
    joined: bool = False
    epilogue: Epilogue = Epilogue.PLAIN

    def explain(self) -> str:
        """Return one or two sentences: which kernel runs and why."""
        parts = []
        if self.plan is not None:
            sizes = ", ".join(f"{name} {value}" for name, value in self.plan._asdict().items())
            parts.append(f"its plan ({sizes}) {'was measured' if self.measured else 'is a rule of thumb'}")
        if self.epilogue is Epilogue.ACT_MUL:
            parts.append(f"act(gate) * up is {'part of it' if self.joined else 'a kernel of its own'}")
        sentences = f"{self.kernel.value}, because {self.why}", "; ".join(parts)
        return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)
