"""Define the instructions that only compute: opcode -> (function of numpy arrays, types of its operands).

Floats are computed in fp64 and rounded once; so are the functions that a GPU approximates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.values import bits_of, dense, dtype_of, from_half, is_half, to_half

Arithmetic = tuple[Callable[..., np.ndarray], list[str]]


def _of_numbers(function: Callable[..., np.ndarray], count: int) -> Callable[[list[str]], Arithmetic]:
    """Apply `function` to `count` integers, floats, 16-bit floats, or pairs of these."""

    def of(opcode: list[str]) -> Arithmetic:
        kind = opcode[-1]

        def halves(*operands: np.ndarray) -> np.ndarray:
            wide = [from_half(kind, dense(o).view(np.uint16)).astype(np.float64) for o in operands]
            return dense(to_half(kind, function(*wide))).view(operands[0].dtype)

        def pairs(*operands: np.ndarray) -> np.ndarray:
            halves = np.int16 if kind[0] == "s" else np.uint16
            return function(*(dense(o).view(halves) for o in operands)).view(np.uint32)

        def floats(*operands: np.ndarray) -> np.ndarray:
            return _rounded(function(*(o.astype(np.float64) for o in operands)), operands[0].dtype, opcode)

        if is_half(kind):
            return halves, [f"b{bits_of(kind)}"] * count
        if kind in ("s16x2", "u16x2"):
            return pairs, ["b32"] * count
        return floats if kind[0] == "f" else function, [kind] * count

    return of


def _rounded(x: np.ndarray, dtype: np.dtype, opcode: list[str]) -> np.ndarray:
    """Round to the nearest value, or down, up or towards zero if the opcode says so."""
    near = x.astype(dtype)
    down = np.where(near > x, np.nextafter(near, dtype.type(-np.inf)), near)
    up = np.where(near < x, np.nextafter(near, dtype.type(np.inf)), near)
    if "rm" in opcode:
        return down
    if "rp" in opcode:
        return up
    return np.where(x < 0, up, down) if "rz" in opcode else near


def _multiply(opcode: list[str]) -> Arithmetic:
    kind = opcode[-1]
    if "wide" not in opcode and "hi" not in opcode:
        return _of_numbers(np.multiply, 2)(opcode)
    wide, bits = dtype_of(f"{kind[0]}{2 * bits_of(kind)}"), bits_of(kind)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        whole = a.astype(wide) * b.astype(wide)
        return whole if "wide" in opcode else (whole >> wide.type(bits)).astype(a.dtype)

    return product, [kind, kind]


def _multiply_add(opcode: list[str]) -> Arithmetic:
    kind = opcode[-1]
    if opcode[0] == "fma":
        return _of_numbers(lambda a, b, c: a * b + c, 3)(opcode)
    product, _ = _multiply(opcode)
    third = f"{kind[0]}{2 * bits_of(kind)}" if "wide" in opcode else kind
    return lambda a, b, c: product(a, b) + c, [kind, kind, third]


def _extreme(loud: Callable[..., np.ndarray], quiet: Callable[..., np.ndarray]):
    """Return min or max. If one float is NaN the result is the other one, unless the opcode says NaN."""
    return lambda opcode: _of_numbers(loud if "NaN" in opcode else quiet, 2)(opcode)


def _divide(opcode: list[str]) -> Arithmetic:
    return _of_numbers(np.divide if opcode[-1][0] == "f" else _quotient, 2)(opcode)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    whole = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) != (b < 0), -whole, whole).astype(a.dtype)


def _shift(opcode: list[str]) -> Arithmetic:
    dtype, bits = dtype_of(opcode[-1]), bits_of(opcode[-1])

    def shifted(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        least = np.minimum(by, bits - 1).astype(dtype)
        if dtype.kind == "i" and opcode[0] == "shr":
            return a >> least
        return np.where(by >= bits, 0, a << least if opcode[0] == "shl" else a >> least).astype(dtype)

    return shifted, [opcode[-1], "u32"]


def _extract(opcode: list[str]) -> Arithmetic:
    kind = opcode[-1]

    def field(a: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        first, count = first.astype(np.int64) & 255, count.astype(np.int64) & 255
        value = (a.astype(np.int64) >> first) & ((1 << count) - 1)
        if kind[0] == "s":
            value -= ((value >> np.maximum(count - 1, 0)) & 1) << count
        return value.astype(a.dtype)

    return field, [kind, "u32", "u32"]


def _insert(opcode: list[str]) -> Arithmetic:
    def field(a: np.ndarray, into: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        first, count = first.astype(np.int64) & 255, count.astype(np.int64) & 255
        mask = ((1 << count) - 1) << first
        return ((into.astype(np.int64) & ~mask) | ((a.astype(np.int64) << first) & mask)).astype(a.dtype)

    return field, [opcode[-1], opcode[-1], "u32", "u32"]


def _funnel(opcode: list[str]) -> Arithmetic:
    def shifted(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        by = (by & 31 if "wrap" in opcode else np.minimum(by, 32)).astype(np.uint64)
        if opcode[1] == "l":
            return ((both << by) >> np.uint64(32)).astype(np.uint32)
        return (both >> by).astype(np.uint32)

    return shifted, ["b32", "b32", "u32"]


def _three_inputs(opcode: list[str]) -> Arithmetic:
    def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
        out = np.zeros_like(a)
        for case in range(8):
            if int(table[0]) >> case & 1:
                out |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        return out

    return look_up, ["b32"] * 4


def _permute(opcode: list[str]) -> Arithmetic:
    def chosen(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        data, out = np.stack([a, b], 1).view(np.uint8), np.empty((len(a), 4), np.uint8)
        for k in range(4):
            which = (selector >> np.uint32(4 * k)) & 15
            byte = data[np.arange(len(a)), which & 7]
            out[:, k] = np.where(which & 8, np.where(byte & 128, 255, 0), byte)
        return out.view(np.uint32)[:, 0]

    return chosen, ["b32"] * 3


_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _compare(opcode: list[str]) -> Arithmetic:
    name, kind = opcode[1], opcode[-1]
    floats = kind[0] == "f" or is_half(kind)

    def holds(a: np.ndarray, b: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
        if is_half(kind):
            a, b = from_half(kind, a), from_half(kind, b)
        unordered = np.isnan(a) | np.isnan(b) if floats else np.zeros(len(a), bool)
        if name in ("nan", "num"):
            out = unordered == (name == "nan")
        elif name in _COMPARISONS:
            out = _COMPARISONS[name](a, b) & ~unordered
        else:  # ltu and the like are true for NaN
            out = _COMPARISONS[name[:-1]](a, b) | unordered
        if other is None:
            return out
        return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[opcode[2]](out, other)

    operand = f"b{bits_of(kind)}" if is_half(kind) else kind
    return holds, [operand, operand] + ["pred"] * (opcode[2] in ("and", "or", "xor"))


def _pair(kind: str) -> Callable[..., np.ndarray]:
    return lambda high, low: (
        to_half(kind, low).astype(np.uint32) | to_half(kind, high).astype(np.uint32) << 16
    )


_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _convert(opcode: list[str]) -> Arithmetic:
    to, of = opcode[-2:]
    if to in ("bf16x2", "f16x2"):
        return _pair(to), ["f32", "f32"]
    rounding = next((_ROUNDINGS[part] for part in opcode if part in _ROUNDINGS), None)

    def converted(a: np.ndarray) -> np.ndarray:
        if is_half(of):
            a = from_half(of, a)
        if is_half(to):
            return to_half(to, a)
        target = dtype_of(to)
        if rounding:
            a = rounding(a)
        if target.kind in "iu" and (a.dtype.kind == "f" or "sat" in opcode):  # saturates
            least, most = np.iinfo(target).min, np.iinfo(target).max
            wide = np.float64 if a.dtype.kind == "f" else a.dtype
            a = np.where(np.isnan(a), 0, a).clip(least, most).astype(wide)
        return a.astype(target)

    return converted, [f"b{bits_of(of)}" if is_half(of) else of]


def _select(opcode: list[str]) -> Arithmetic:
    def select(a: np.ndarray, b: np.ndarray, first: np.ndarray) -> np.ndarray:
        return np.where(first, a, b)

    return select, [opcode[-1], opcode[-1], "pred"]


def _of_bits(function: Callable[..., np.ndarray], count: int) -> Callable[[list[str]], Arithmetic]:
    return lambda opcode: (function, [opcode[-1]] * count)


OPERATIONS: dict[str, Callable[[list[str]], Arithmetic]] = {
    "add": _of_numbers(np.add, 2), "sub": _of_numbers(np.subtract, 2), "mul": _multiply,
    "mad": _multiply_add, "fma": _multiply_add, "div": _divide,
    "rem": _of_numbers(lambda a, b: (a - _quotient(a, b) * b).astype(a.dtype), 2),
    "max": _extreme(np.maximum, np.fmax), "min": _extreme(np.minimum, np.fmin),
    "abs": _of_numbers(np.abs, 1), "neg": _of_numbers(np.negative, 1), "ex2": _of_numbers(np.exp2, 1),
    "lg2": _of_numbers(np.log2, 1), "sqrt": _of_numbers(np.sqrt, 1), "rcp": _of_numbers(np.reciprocal, 1),
    "rsqrt": _of_numbers(lambda a: 1 / np.sqrt(a), 1), "shl": _shift, "shr": _shift, "bfe": _extract,
    "bfi": _insert, "shf": _funnel, "and": _of_bits(np.bitwise_and, 2), "or": _of_bits(np.bitwise_or, 2),
    "xor": _of_bits(np.bitwise_xor, 2), "not": _of_bits(np.invert, 1),
    "popc": _of_bits(lambda a: np.bitwise_count(a).astype(np.uint32), 1), "lop3": _three_inputs,
    "prmt": _permute, "setp": _compare, "selp": _select, "cvt": _convert,
}  # fmt: skip
