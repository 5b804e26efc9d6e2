"""List the launch configurations that `qrt-eval kernels --tune` tries for a model's products.

They are what won, or nearly won, on an H200 at Llama-3-8B's sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product, starmap
from typing import NamedTuple

from qrt.arch import Arch
from qrt.kernels import tuned
from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.int8.plans import BlockPlan, HopperPlan
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.kernels.linear.tiles.plans import FusedPlan, WidePlan
from qrt.kernels.sizes import next_power_of_2
from qrt.quant.weight import WEIGHT_SCHEMES, quantized
from qrt.quant.weight.base import Layout
from qrt.quant.weight.tiles import TILE_ROWS
from qrt_eval.speed.kernels.linear import head, heads, in_int8, products

FUSED_WIDTHS = (8, 16, 32, 64)
WIDE_WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, *tuned.BETWEEN)
INT8_WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, *tuned.BETWEEN)
INT8_TILES_WIDTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # fewer tokens are multiplied as `Digits`
HEAD_WIDTHS = (8, 16, 64, 128, 256)  # numbers of rows that sample
SMS = 132
Plan = FusedPlan | WidePlan | BlockPlan | HopperPlan
KINDS = {plan: kind for kind, plan in {**tile_plans.PLANS, **int8_plans.PLANS}.items()}


def schemes(*layouts: Layout) -> list[str]:
    """Return the schemes of integers in one of these layouts; without any, in one that has plans.

    Floats in tiles take the plans of integers of as many bits.
    """
    wanted = layouts or (Layout.TILES, Layout.INT8_ROWS)
    return [name for name in quantized() if WEIGHT_SCHEMES[name].layout in wanted]


def has_digits(scheme: str) -> bool:
    """Return whether few tokens in bf16 are multiplied as `Digits`, which have no plan."""
    return WEIGHT_SCHEMES[scheme].layout is Layout.TILES and _bits(scheme) == 4


def _bits(scheme: str) -> int:
    """Return the bits of a code."""
    spec = WEIGHT_SCHEMES[scheme].spec
    assert spec is not None
    return spec.bits


class Trial(NamedTuple):
    """Hold one launch configuration of one product."""

    scheme: str
    k: int
    n: int
    width: int
    plan: Plan | None  # None: dequantize and multiply in 16 bits
    gated: bool = False  # gate and up together, run with act_mul

    @property
    def key(self) -> str:
        """Return the winner's key in the file."""
        if WEIGHT_SCHEMES[self.scheme].layout is Layout.INT8_ROWS:
            return int8_plans.tuning_key(self.k, self.n, self.width)
        if in_int8(self.scheme):
            return tile_plans.int8_tuning_key(self.k, self.n, self.width)
        return tile_plans.tuning_key(self.k, self.n, _bits(self.scheme), self.width)

    @property
    def entry(self) -> tuned.Measured:
        """Return the plan as the file holds it."""
        return ["dequantize"] if self.plan is None else [KINDS[type(self.plan)], *self.plan]

    @property
    def binary(self) -> tuple[object, ...]:
        """Return what is equal for trials that share a compiled kernel.

        Only fused plans and dequantizing compile K in.
        """
        match self.plan:
            case HopperPlan(splits=splits):
                return self.scheme, self.plan._replace(splits=min(splits, 2)), self.gated
            case BlockPlan():
                return self.scheme, self.plan
            case WidePlan(splits=splits):  # K split or not, divisor of the tiles known or not
                gates = self.gated and self.plan.gates
                return self.scheme, self.plan._replace(splits=min(splits, 2)), self.k % 4096 == 0, gates
            case FusedPlan():
                return self.scheme, self.k, self.plan, self.width
        return self.scheme, self.k


def trials(k: int, n: int, gated: bool = False) -> Iterator[Trial]:
    """Yield every configuration to try for a product; those of one weight come together."""
    blocks = -(-n // TILE_ROWS)
    for scheme in schemes(Layout.TILES):
        inputs = 1024 // _bits(scheme)  # of a tile
        tiles = -(-k // inputs)
        if in_int8(scheme):
            for width in INT8_TILES_WIDTHS:
                plans = _int8_tiles_plans(width, blocks, tiles, gated)
                yield from (Trial(scheme, k, n, width, plan, gated) for plan in plans)
            continue
        for width in FUSED_WIDTHS:
            fused = _fused_plans(width, blocks, tiles, gated)
            yield from (Trial(scheme, k, n, width, plan, gated) for plan in fused)
        for width in WIDE_WIDTHS:
            wide = _wide_plans(width, blocks, tiles, _bits(scheme))
            yield from (Trial(scheme, k, n, width, plan, gated) for plan in wide)
    for scheme, width in product(schemes(Layout.INT8_ROWS), INT8_WIDTHS):
        yield from (Trial(scheme, k, n, width, plan, gated) for plan in _int8_block_plans(width, k, n))
        yield from (Trial(scheme, k, n, width, plan, gated) for plan in _int8_hopper_plans(width, k, n))


def _fused_plans(width: int, blocks: int, tiles: int, gated: bool) -> Iterator[FusedPlan]:
    usual = tile_plans.fused_plan(width, blocks, tiles).splits
    around = (usual, 2 * usual) if width <= 16 and not gated else (usual // 2, usual)
    splits = sorted({tile_plans.even_splits(s, tiles) for s in around if s})
    sizes = product((1,), splits, (2, 4) if width <= 16 else (4,), (3, 4) if width == 8 else (3,))
    yield from starmap(FusedPlan, sizes)
    if gated and width <= 32 and blocks % 2 == 0:  # one program computes gate, up and act_mul of its columns
        # not 3 stages for few tokens: three programs would fit an SM, and crowd the first free ones
        yield FusedPlan(2, 1, 4, 4 if width <= 16 else 3)


# width -> tokens, row blocks, planes of x per stage, stages of x and of w at 4 bits, groups of warps. Powers
# of two where they fit, because a stage's address then takes one instruction.
WIDE_BLOCKS = {
    8: ((8, 1, 4, 2, 2, 2), (8, 2, 4, 4, 2, 2)),
    16: ((16, 1, 4, 2, 2, 2), (16, 1, 4, 4, 2, 1), (16, 2, 4, 4, 2, 2)),
    32: ((32, 1, 4, 2, 2, 2), (32, 1, 4, 2, 4, 2), (32, 1, 4, 4, 2, 1), (32, 2, 4, 2, 2, 2)),
    64: ((64, 1, 4, 2, 2, 2), (64, 1, 2, 4, 2, 1), (64, 1, 2, 4, 4, 1), (64, 1, 4, 4, 2, 1),
         (64, 1, 4, 4, 4, 1), (64, 2, 4, 2, 2, 2), (64, 4, 4, 2, 2, 4)),
    128: ((64, 1, 4, 2, 2, 2), (128, 1, 2, 2, 2, 2), (128, 1, 2, 4, 2, 1), (128, 2, 2, 4, 2, 2),
          (128, 2, 2, 4, 4, 2)),
    256: ((128, 1, 2, 4, 2, 1), (128, 2, 2, 3, 2, 1), (256, 1, 1, 4, 2, 1), (256, 2, 1, 4, 2, 1)),
    512: ((128, 1, 2, 4, 2, 1), (128, 2, 2, 3, 2, 1), (256, 1, 1, 4, 4, 1), (256, 2, 1, 4, 2, 1)),
    1024: ((128, 2, 2, 3, 2, 1), (256, 1, 1, 4, 4, 1), (256, 2, 1, 4, 2, 1)),
    2048: ((256, 1, 1, 4, 4, 1), (256, 2, 1, 4, 2, 1)),
}  # fmt: skip


def _wide_plans(width: int, blocks: int, tiles: int, bits: int) -> Iterable[WidePlan | None]:
    """Return plans of `tiles.wide_kernel`, and None for dequantizing."""
    plans: list[WidePlan | None] = [None] * (width > 64)
    above = min(next_power_of_2(width), 2048)
    around = (above // 2, above) if width in tuned.BETWEEN else (above,)
    found = dict.fromkeys(chain.from_iterable(WIDE_BLOCKS[each] for each in around))
    for tokens, rows, planes, x_stages, w_stages, groups in found:
        depths = {w_stages}
        if bits == 8:  # a tile has half the size, so twice the stages fit if a program has its own
            depths |= {2 * w_stages} if rows == 1 and w_stages == 2 else set()
            planes, x_stages = (2, 2 * x_stages) if planes == 4 else (planes, x_stages)
        programs = -(-blocks // rows) * -(-width // tokens)
        if rows > 1 and programs < SMS // 2:
            continue  # many small programs are faster here
        whole = tokens * rows > 256 or width >= 1024
        each = int((rows, groups) == (2, 1) and programs > SMS)  # one such program fills an SM
        for splits, depth in product((1,) if whole else _splits(programs, tiles // 4), sorted(depths)):
            plans.append(WidePlan(tokens, rows, splits, planes, x_stages, depth, groups, each))
    return dict.fromkeys(plans)  # at 8 bits two of them may be equal


# width -> tokens, row blocks, planes of x per stage, stages of x and of w, groups of warps, programs of an SM
# that take blocks in turn, for int8 tokens; narrower widths take blocks as narrow
INT8_TILES_BLOCKS = {
    64: ((64, 1, 2, 4, 4, 2, 0), (64, 1, 4, 3, 3, 2, 0), (64, 1, 2, 4, 4, 1, 0), (64, 2, 2, 4, 3, 2, 0),
         (64, 2, 4, 3, 4, 2, 0), (64, 4, 4, 3, 4, 4, 1)),
    128: ((64, 1, 2, 4, 4, 2, 0), (128, 1, 2, 3, 3, 2, 0), (128, 2, 2, 4, 3, 1, 0), (128, 2, 2, 4, 3, 2, 0),
          (128, 4, 2, 4, 2, 4, 0), (128, 4, 2, 4, 3, 2, 0)),
    256: ((128, 1, 2, 3, 3, 2, 0), (128, 2, 2, 4, 3, 1, 0), (128, 2, 2, 4, 3, 2, 0), (128, 4, 2, 4, 2, 4, 0),
          (128, 4, 2, 4, 3, 2, 0), (128, 1, 2, 4, 4, 1, 2), (128, 2, 2, 6, 4, 1, 1), (128, 4, 2, 4, 3, 2, 1),
          (256, 2, 2, 4, 4, 1, 1), (256, 2, 1, 6, 4, 1, 1)),
    512: ((128, 2, 2, 4, 3, 1, 0), (128, 1, 2, 4, 4, 1, 2), (128, 2, 2, 6, 3, 2, 1), (128, 2, 2, 6, 4, 1, 1),
          (128, 4, 2, 4, 3, 2, 1), (128, 4, 4, 2, 3, 2, 1), (256, 2, 2, 4, 4, 1, 1), (256, 2, 1, 6, 4, 1, 1)),
    1024: ((128, 1, 2, 4, 4, 1, 2), (128, 2, 2, 6, 3, 2, 1), (128, 2, 2, 6, 4, 1, 1), (128, 4, 2, 4, 3, 2, 1),
           (128, 4, 4, 2, 3, 2, 1), (256, 2, 2, 4, 4, 1, 1), (256, 2, 1, 6, 4, 1, 1)),
}  # fmt: skip


def _int8_tiles_plans(width: int, blocks: int, tiles: int, gated: bool) -> Iterator[WidePlan]:
    """Yield plans of `tiles.wide_kernel` for int8 tokens."""
    for most, rows, planes, x_stages, w_stages, groups, each in INT8_TILES_BLOCKS[min(max(width, 64), 1024)]:
        tokens = min(most, width)
        programs = -(-blocks // rows) * -(-width // tokens)
        whole = gated or each or rows > 2 or width > 256
        for splits in (1,) if whole else _splits(programs, tiles // 4):
            if splits <= 4:
                yield WidePlan(tokens, rows, splits, planes, x_stages, w_stages, groups, each)


# tokens, outputs and stages of `int8.hopper_kernel`; blocks below 64 tokens serve only widths of that size
HOPPER_INT8_BLOCKS = ((16, 64, 8), (16, 64, 12), (16, 128, 6), (16, 256, 6), (32, 128, 4),
                      (64, 64, 8), (64, 64, 12), (64, 128, 4), (64, 128, 6), (128, 64, 8), (128, 128, 3),
                      (128, 128, 4), (128, 128, 6), (128, 256, 4))  # fmt: skip
PERSISTENT_INT8_BLOCKS = ((128, 128, 3, 2), (128, 128, 6, 1), (128, 256, 4, 1))  # the last is programs per SM


def _int8_block_plans(width: int, k: int, n: int) -> Iterator[BlockPlan]:
    if width <= 64:
        depths = {128: (3, 4), 256: (4, 6)}
        shapes = ((32, 256), (64, 256)) if width == 16 else ((64, 128), (64, 256))
        blocks = [
            (width, outputs, inputs, 4, stages) for outputs, inputs in shapes for stages in depths[inputs]
        ]
    else:  # smaller blocks only if there are few large ones
        few = width < 1024 and -(-n // 128) * (width // 128) < 4 * SMS
        blocks = [(64, 64, 128, 4, 4), (128, 64, 128, 4, 4)] * few + [(128, 128, 128, 8, 3)]
    for tokens, outputs, inputs, warps, stages in blocks:
        programs, steps = -(-n // outputs) * -(-width // tokens), -(-k // inputs)
        for splits in _splits(programs, steps // 2):  # each split gets at least two steps
            if splits <= 8:
                yield BlockPlan(tokens, outputs, inputs, splits, warps, stages)


def _int8_hopper_plans(width: int, k: int, n: int) -> Iterator[HopperPlan]:
    for tokens, outputs, stages in HOPPER_INT8_BLOCKS:
        if width >= 512 and outputs == 64 or width > 64 and (tokens, stages) == (64, 4):
            continue  # many tokens need large blocks
        programs = -(-n // outputs) * -(-width // tokens)
        for splits in _splits(programs, -(-k // 128)) if stages > 3 else (1,):
            if (tokens == width or 64 <= tokens < width) and splits <= max(1, k // 512):
                yield HopperPlan(tokens, outputs, splits, stages)
    for tokens, outputs, stages, each in PERSISTENT_INT8_BLOCKS:
        if tokens < width <= 2048 and -(-n // outputs) * -(-width // tokens) > SMS * each:
            yield HopperPlan(tokens, outputs, 1, stages, each)


def _splits(programs: int, steps: int) -> list[int]:
    """Return counts of splits of K: one, and as many as fill the SMs once or twice."""
    counts = (1, SMS // programs, 2 * SMS // programs)
    return sorted({tile_plans.even_splits(s, max(steps, 1)) for s in counts if s})


def pending(configs: Sequence[Arch], table: Mapping[str, tuned.Measured]) -> list[Trial]:
    """Return the trials of these models' products, model by model, then of their heads in int8.

    Keys whose plan in `table` is one of the trials are left out.
    """
    sizes = {size: name == "gate_up" for config in configs for name, size in products(config).items()}
    todo = [trial for (k, n), gated in sizes.items() for trial in trials(k, n, gated)]
    own_heads = heads()
    for size in dict.fromkeys(head(config) for config in configs):
        if size not in sizes:
            own = (trial for trial in trials(*size) if trial.width in HEAD_WIDTHS)
            todo += [trial for trial in own if trial.scheme in own_heads]
    done = {trial.key for trial in todo if table.get(trial.key) == trial.entry}
    return [trial for trial in todo if trial.key not in done]
