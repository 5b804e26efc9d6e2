"""A recipe: everything that decides a quantized checkpoint's bytes, besides the checkpoint itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from qrt.errors import ConfigError
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, by_bits, quantized, weight_only
from qrt.quant.weight.head import HEAD_BITS, head_grid
from qrt.setting import documented, setting, told
from qrt.text.data.files import KINDS
from qrt.version import __version__
from qrt_calibrate.recipe.method import METHODS, Method

UNQUANTIZED = "fp16"
_USUAL = ", ".join(f"{WEIGHT_SCHEMES[name].method} for {name}" for name in quantized())


@dataclass(frozen=True)
class LinearRecipe:
    """How a Linear is quantized: the scheme it runs in, and the grid of its weight.

    group_open   the user named no group size, so `plan` chooses one that divides the inputs
    """

    scheme: str
    spec: QuantSpec
    group_open: bool = False

    def describe(self) -> str:
        """Describe the grid in a few words, such as "w4a16 g128 asym"."""
        if self.spec.granularity is not Granularity.GROUP:
            return self.scheme
        return f"{self.scheme} g{self.spec.group_size} {'sym' if self.spec.symmetric else 'asym'}"


@dataclass(frozen=True)
class Override:
    """Another grid for some Linears.

    Linears that `pattern` matches (as in `ignore`) get `grid`, or stay unquantized if it is None.
    """

    pattern: str
    grid: LinearRecipe | None


@documented
@dataclass(frozen=True)
class Recipe:
    """Scheme and grid, method, Linears that differ, and the amount of calibration text.

    zeros_asked   the user chose the grid's symmetry; otherwise a mixture of experts is symmetric
    group_open    the user named no group size for the grid, so `plan` chooses one that divides the inputs
    """

    scheme: str
    spec: QuantSpec
    method: str = field(
        metadata=told(
            choices=tuple(METHODS),
            help="how weights are rounded. rtn reads no text, unless --eval-samples, --target-bits or "
            f"--max-size asks for a measurement (default: {_USUAL})",
        )
    )
    ignore: tuple[str, ...] = setting(
        (), metavar="PATTERN",
        help="leave these Linears unquantized. A pattern is a glob that matches the full name, or its end "
        "from a dot on (down_proj), or re:<regex> (default: none)",
    )  # fmt: skip
    overrides: tuple[Override, ...] = setting(
        (), flag="--override", metavar="PATTERN=SCHEME",
        help="give these Linears another scheme with its default grid, or fp16; the last match wins "
        "(default: none)",
    )  # fmt: skip
    calib: str | None = setting(
        None, metavar="DATA",
        help=f"calibration data: a file of {KINDS}; a folder of such files; or a dataset of the Hub, "
        "ORG/NAME[@REVISION][:CONFIG[:SPLIT]]. A row holds a text, a chat, or a question and its answer "
        "(default: Python's own docstrings)",
    )  # fmt: skip
    n_samples: int = setting(128, metavar="N", help="number of windows of calibration text")
    seqlen: int = setting(512, metavar="N", help="tokens per window")
    eval_samples: int = setting(
        8, metavar="N",
        help="number of further windows on which the result is compared with the original; 0: none (default: "
        "8; 0 for rtn)",
    )  # fmt: skip
    seed: int = setting(0, metavar="N", help="seed that chooses the windows")
    damping: float = setting(
        0.1, flag="--damp", metavar="N",
        help="share of the Hessian's mean diagonal that GPTQ adds to the diagonal; with less it fits noise",
    )  # fmt: skip
    exact_folds: bool = setting(
        True, help="channel scales are powers of two, so that folds change no bit of the unquantized model"
    )
    moe_calibrate_all_experts: bool = setting(
        False,
        help="calibrate every expert of a mixture with all tokens (default: with the tokens that the router "
        "sends to it and, where these are few, those that come closest)",
    )  # fmt: skip
    tune: int = setting(
        0, metavar="STEPS",
        help="after rounding, train codes, scales and norms of the whole model for STEPS steps, on text that "
        "the original model writes. Use hundreds of steps and a GPU",
    )  # fmt: skip
    target_bits: float | None = setting(
        None, metavar="B",
        help="choose 4, 8 or 16 bits for each fused Linear by its measured cost, with at most B bits per "
        "weight on average. The average is over all Linears in the layers, ignored ones too, with their "
        "scales and zero points; embedding, head, norms and biases do not count (default: no budget, every "
        "Linear gets --scheme)",
    )  # fmt: skip
    max_size: float | None = setting(
        None, metavar="GB",
        help="choose bits as --target-bits does, with a budget for the result: 10^9 bytes for all "
        "its tensors, embedding and head included, as total_size of the index and the report count them "
        "(default: no budget)",
    )  # fmt: skip
    zeros_asked: bool = False
    group_open: bool = False
    head_bits: int = setting(
        16, choices=HEAD_BITS,
        help="8: round the head to int8 too, to nearest, with one scale per channel; a head tied to the "
        "embedding becomes a tensor of its own",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        for flag, value, least in (
            ("--n-samples", self.n_samples, 1),
            ("--seqlen", self.seqlen, 2),
            ("--eval-samples", self.eval_samples, 0),
            ("--tune", self.tune, 0),
        ):
            if value < least:
                raise ConfigError(f"{flag}: expected at least {least}, got {value}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed: expected 0 to 2^63 - 1, got {self.seed}")
        if self.target_bits is not None and self.max_size is not None:
            raise ConfigError("--target-bits and --max-size are two budgets for one choice; give one of them")
        if self.has_budget:
            self._check_budget()
        if self.tune and not self.rules.needs_text:
            raise ConfigError(
                f"--tune: goes on from calibration text, which --method {self.method} does not read"
            )
        if not 0 < self.damping <= 1:
            raise ConfigError(f"--damp: expected a number above 0 and at most 1, got {self.damping}")
        head_grid(self.scheme, self.head_bits)

    def _check_budget(self) -> None:
        flag = self.budget_flag
        value = self.max_size if self.target_bits is None else self.target_bits
        assert value is not None
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag}: expected a number above 0, got {value}")
        usual = WEIGHT_SCHEMES[self.scheme].spec
        if usual is None or usual.group_size is None:  # narrower ones have groups, whose size is not chosen
            narrow = next(iter(by_bits(int8_tokens=True).values()))
            raise ConfigError(
                f"{flag}: expected a scheme with groups, got {self.scheme}; use {narrow}, "
                "or leave --scheme out"
            )
        if not any(self.windows):
            raise ConfigError(
                f"{flag}: needs text to measure on; use a --method that reads some, or --eval-samples"
            )

    @property
    def grid(self) -> LinearRecipe:
        """Grid of a Linear that no override matches."""
        return LinearRecipe(self.scheme, self.spec, self.group_open)

    @property
    def head(self) -> LinearRecipe | None:
        """Grid of the head; None if it stays unquantized."""
        scheme, spec = head_grid(self.scheme, self.head_bits)
        return None if spec is None else LinearRecipe(scheme, spec)

    @property
    def has_budget(self) -> bool:
        """Whether widths are chosen under a budget."""
        return self.target_bits is not None or self.max_size is not None

    @property
    def budget_flag(self) -> str:
        """The flag of that budget."""
        return "--max-size" if self.target_bits is None else "--target-bits"

    @property
    def rules(self) -> Method:
        """How the method rounds."""
        return METHODS[self.method]

    @property
    def windows(self) -> tuple[int, int]:
        """Numbers of windows that calibrate and that evaluate."""
        return (self.n_samples if self.rules.needs_text else 0), self.eval_samples

    def metadata(self) -> dict[str, Any]:
        """Return the recipe's part of `quantization_config["qrt"]` (no time, no path: reruns agree)."""
        found: dict[str, Any] = {"version": __version__, "scheme": self.scheme, "method": self.method}
        if self.rules.gptq:
            found["damping"] = self.damping
        if self.head_bits != 16:
            found["head_bits"] = self.head_bits
        if self.target_bits is not None:
            found["target_bits"] = self.target_bits
        if self.max_size is not None:
            found["max_size"] = self.max_size
        if self.tune:
            found["tune"] = self.tune
        if not self.exact_folds:
            found["exact_folds"] = False
        if self.moe_calibrate_all_experts:
            found["moe_calibrate_all_experts"] = True
        return found


def scheme_of(bits: int | None, scheme: str | None) -> str:
    """Return the scheme of --bits, --scheme or both, if they agree; w4a16 without either."""
    if scheme is None:
        return weight_only()[bits or 4]
    spec = WEIGHT_SCHEMES[scheme].spec
    if bits is not None and spec is not None and spec.bits != bits:
        raise ConfigError(f"--bits {bits} contradicts --scheme {scheme}; give one of the two")
    return scheme


def grid_of(scheme: str, group_size: int | None, symmetric: bool | None) -> QuantSpec:
    """Return the scheme's default grid with the given changes; a group size of -1 is one scale per channel.

    ConfigError for a grid that the scheme cannot have.
    """
    spec = WEIGHT_SCHEMES[scheme].spec
    assert spec is not None, f"{scheme} is not a quantized scheme"
    if group_size is not None and group_size < 1 and group_size != -1:
        raise ConfigError(
            f"--group-size: expected a positive number, or -1 for one scale per channel, got {group_size}"
        )
    if spec.granularity is not Granularity.GROUP:
        if group_size not in (None, -1):
            raise ConfigError(f"--group-size: {scheme} has one scale per output channel; leave the flag out")
        if symmetric is False:
            raise ConfigError(f"--asym: {scheme} multiplies symmetric int8 codes; leave the flag out")
        return spec
    if group_size == -1:
        spec = replace(spec, granularity=Granularity.CHANNEL, group_size=None)
    elif group_size is not None:
        spec = replace(spec, group_size=group_size)
    return spec if symmetric is None else replace(spec, symmetric=symmetric)
