"""The facts of a mixture of experts: who chooses, how many there are, and how they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from qrt.errors import CheckpointError


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen, and what their outputs are multiplied by. See `qrt.kernels.route`.

    top_k        experts of a token
    score        of an expert: "softmax" of all logits, "sigmoid" of its own, "top": softmax of the chosen
                 ones' logits, or "sparsemixer" (Phi 3.5 MoE)
    renormalize  the chosen scores are divided by their sum
    factor       multiplies the scores at last
    groups       experts are chosen from the best `kept` of so many groups
    group_top    so many of a group's best scores are added to judge it
    on_input     the score multiplies what the expert reads, not what it computes
    jitter       "sparsemixer": experts further from the best than twice this share do not count
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    factor: float = 1.0
    groups: int = 1
    kept: int = 1
    group_top: int = 1
    on_input: bool = False
    jitter: float = 0.01


@dataclass(frozen=True)
class Stacked:
    """How a checkpoint stores all experts of a layer as two tensors.

    gate_up, down  their names in `module`
    module      that of `Experts`, or the one that holds them elsewhere in a layer
    transposed  they are [E, in, out], not [E, out, in]; None: one or the other, as their shape says
    pairs       rows of gate and up take turns; else gate comes before up
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    module: str | None = None
    transposed: bool | None = False
    pairs: bool = False


@dataclass(frozen=True)
class Experts:
    """The mixture of a sparse layer. Names are relative to a decoder layer.

    count        how many experts there are, each a gated mlp
    width        inputs of the last product of each
    module       holds the experts, by their numbers
    parts        the names in each: gate, up and down
    stacked      how a checkpoint stores them otherwise, or None
    bias         their products have biases
    gate         the router's Linear; gate_bias: it has a bias
    correction   a tensor that is added to the scores by which experts are chosen, or None; its shape is
                 `correction_shape`
    shared       an mlp of `shared_width` that all tokens go through, with the same `parts`, or None
    shared_stacked  the names of its two Linears where it stores gate and up as one; None: `parts`
    shared_gate  a Linear of one output, whose sigmoid multiplies the shared mlp's result, or None
    """

    count: int
    width: int
    router: RouterConfig
    module: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: Stacked | None = None
    bias: bool = False
    gate: str = "mlp.gate"
    gate_bias: bool = False
    correction: str | None = None
    correction_rank: int = 1
    shared: str | None = None
    shared_width: int = 0
    shared_stacked: tuple[str, str] | None = None
    shared_gate: str | None = None

    def __post_init__(self) -> None:
        own = self.router
        if own.top_k > self.count:
            raise CheckpointError(
                f"config.json: expected at most {self.count} experts of a token, as many as there are, got "
                f"{own.top_k}; correct the two"
            )
        if (
            self.count % own.groups
            or not own.kept <= own.groups
            or self.count // own.groups * own.kept < own.top_k
        ):
            raise CheckpointError(
                f"config.json: expected {self.count} experts in groups of equal size, of which {own.kept} "
                f"hold the {own.top_k} of a token, got {own.groups} groups; correct n_group and topk_group"
            )

    @property
    def correction_shape(self) -> tuple[int, ...]:
        """The shape of the stored correction: all dimensions but the last are 1."""
        return (1,) * (self.correction_rank - 1) + (self.count,)

    @property
    def routers(self) -> tuple[str, ...]:
        """Modules that choose or weight; no scheme quantizes them."""
        return (self.gate,) if self.shared_gate is None else (self.gate, self.shared_gate)

    def each(self, number: int) -> tuple[str, str, str]:
        """Return the names of gate, up and down of one expert."""
        gate, up, down = (f"{self.module}.{number}.{part}" for part in self.parts)
        return gate, up, down

    @property
    def all(self) -> list[tuple[str, str, str]]:
        """The names of gate, up and down of every expert."""
        return [self.each(number) for number in range(self.count)]

    @property
    def stored(self) -> tuple[str, str]:
        """The names of the two tensors of stacked experts: gate and up, and down."""
        assert (own := self.stacked) is not None
        module = self.module if own.module is None else own.module
        return f"{module}.{own.gate_up}", f"{module}.{own.down}"

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The names of the shared mlp's Linears, down last; empty where there is none."""
        parts = self.parts if self.shared_stacked is None else self.shared_stacked
        return () if self.shared is None else tuple(f"{self.shared}.{part}" for part in parts)
