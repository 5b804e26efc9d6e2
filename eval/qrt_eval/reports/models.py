"""How each architecture runs: `qrt-eval models` prints the table of the registry or writes it."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from qrt.arch import ARCHS, Arch
from qrt.arch.read import read_arch
from qrt.errors import ConfigError
from qrt.model.build import build
from qrt.model.decoder import Decoder
from qrt.model.random import RandomWeights
from qrt.model.unfused import unfused_part
from qrt_calibrate.job.calibrated import uncalibrated
from qrt_eval.reports.tables import markdown
from qrt_eval.results.console import show

ROOT = Path(__file__).parents[3]
PAGE, README = ROOT / "docs" / "models.md", ROOT / "README.md"
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "max_position": 64}
NEEDED: dict[str, dict[str, Any]] = {  # entries without which a family has no defaults
    "Dots1ForCausalLM": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 32},
}


class ModelRow(NamedTuple):
    """What is true of one architecture.

    name        as in config.json
    layers      "fused", or the part that makes them run one operator at a time
    calibrated  whether qrt-calibrate quantizes it
    """

    name: str
    layers: str
    calibrated: bool

    def cells(self) -> tuple[str, ...]:
        """Return the row in words."""
        return self.name, self.layers, "yes" if self.calibrated else "no"


HEADINGS = ("architecture", "layers", "calibrated")


def run(arguments: Namespace) -> None:
    """Run `qrt-eval models`."""
    if arguments.markdown:
        print(table())
        return
    if arguments.write:
        write()
        return
    shown = Table(*HEADINGS)
    for row in rows():
        shown.add_row(*row.cells())
    show(shown)


def table() -> str:
    """Return the table in Markdown."""
    return markdown(HEADINGS, (row.cells() for row in rows()))


def write() -> None:
    """Write the table into docs/models.md, and the number of architectures into README.md."""
    if not PAGE.is_file():
        raise ConfigError(f"--write: expected a checkout of qrt, got no {PAGE}; use --markdown")
    PAGE.write_text(page_with_table(PAGE.read_text()))
    README.write_text(readme_with_count(README.read_text()))


def page_with_table(page: str) -> str:
    """Return the page with the table of today's registry in place of the one it has."""
    new = table()
    head = re.escape("".join(new.splitlines(keepends=True)[:2]))
    return re.sub(rf"{head}(\|.*\n)*", lambda _: new + "\n", page)


def readme_with_count(page: str) -> str:
    """Return README.md with the number of architectures of today's registry."""
    return re.sub(r"\[\d+ architectures\]", f"[{len(list(ARCHS))} architectures]", page)


def rows() -> list[ModelRow]:
    """Return a row for each architecture of the registry, from its config's defaults, by its last layer."""
    log = logging.getLogger("qrt.model.fused")
    level = log.level
    log.setLevel(logging.ERROR)  # each plain layer would be said there, too
    try:
        return [_row(name) for name in ARCHS]
    finally:
        log.setLevel(level)


def _row(name: str) -> ModelRow:
    arch = read_arch({"architectures": [name], **NEEDED.get(name, {})}, name)
    calibrated = uncalibrated(arch) is None
    part = unfused_part(_small(arch))
    return ModelRow(name, "fused" if part is None else part.removeprefix("layer 0: "), calibrated)


def _small(arch: Arch) -> Decoder:
    """Return a decoder of one layer, the last, with small random weights."""
    sizes: dict[str, Any] = {**SMALL, "num_heads": 2, "num_kv_heads": 2, "alibi": arch.alibi[:2]}
    sizes["layers"] = arch.layers[-1:]
    if (own := arch.experts) is not None:
        sizes["experts"] = replace(own, count=own.router.top_k, width=64, shared_width=64)
    weights = RandomWeights(lambda module: ("fp16", None), torch.device("cpu"), torch.float32)
    return build(replace(arch, **sizes), weights, progress=None)
