"""Write the report of a sweep as one HTML file with table, picture and facts. It loads nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_page(result: Path, folder: Path) -> None:
    """Write report.html for a sweep's result file, with the folder's pareto.svg in it."""
    facts = json.loads(result.read_text())
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text())
    page = template.render(
        facts=facts, picture=inline((folder / "pareto.svg").read_text()), shade=shades(facts)
    )
    (folder / "report.html").write_text(page + "\n")


def inline(svg: str) -> Markup:
    """Return an SVG file as an element of a page, without declarations and metadata."""
    body = svg[svg.index("<svg") :]
    return Markup(re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL))


def shades(facts: dict[str, Any]) -> dict[str, list[float]]:
    """Return, for each shaded column, how good every cell is, from 0 (worst) to 1 (best)."""
    columns = {"max_concurrent_requests": 1, "tokens_per_second": 1, "kl_mean": -1, "weight_bytes": -1}
    found = {}
    for name, sign in columns.items():
        values = [cell[name] for cell in facts["cells"]]
        if None in values:
            continue
        low, high = min(values), max(values)
        found[name] = [(sign * (v - low) / (high - low) + (sign < 0)) if high > low else 0.0 for v in values]
    return found
