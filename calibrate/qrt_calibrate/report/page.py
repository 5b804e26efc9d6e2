"""qrt_report.html: the report as one page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined

from qrt_calibrate.estimate.sizes import COUNTED

NEAREST = ", rtn"  # suffix of an error's title: the same error for rounding to nearest
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{{ name }}: {{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .2rem .8rem; text-align: right }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
.bar { background: #4477aa; height: .6rem } .rtn { background: #cc8963 } code { font-size: 13px }
.key { display: inline-block; width: 1.5rem } tr.above { background: #fbe3e0 } .above small { color: #a02010 }
td.wide { width: 20rem; text-align: left }
</style></head><body>
<h1>{{ name }}</h1>
<p>{{ title }}: {{ "%.3f"|format(facts.bits_per_weight) }} {{ counted }},
{{ "%.1f"|format(facts.source_bytes / 1e6) }} MB &rarr; {{ "%.1f"|format(facts.stored_bytes / 1e6)
}} MB.</p>
{% if facts.cost %}
<h2>What it costs</h2>
<table><tr><th></th><th>original</th><th>quantized</th></tr>
<tr><td>perplexity</td><td>{{ "%.4f"|format(facts.cost.exact_ppl) }}</td>
<td>{{ "%.4f"|format(facts.cost.ppl) }}</td></tr>
<tr><td>KL to the original, nats</td><td></td><td>{{ "%.6f"|format(facts.cost.kl) }}</td></tr>
<tr><td>same likeliest token</td><td></td><td>{{ "%.2f"|format(100 * facts.cost.agreement) }} %</td></tr>
</table>
<p>On {{ facts.cost.tokens }} tokens of the calibration text that did not calibrate.</p>
{% endif %}
<h2>Layers</h2>
{% if nearest in columns %}
<p><span class="bar key"></span> {{ columns[0] }}, <span class="bar rtn key"></span> what rounding to nearest
would leave. {% if facts.above_rtn %}Above it, and marked: {{ facts.above_rtn|join(", ") }}.{% endif %}</p>
{% endif %}
<table><tr>
<th>layer</th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}<th>{{ columns[0] }}</th></tr>
{% for layer in facts.layers %}
<tr{% if layer.name in facts.above_rtn %} class="above"{% endif %}><td><code>{{ layer.name }}</code></td>
{% for column in columns %}<td>{{ layer[column]|figure if column in layer else "" }}</td>{% endfor %}
<td class="wide"><div class="bar" style="width: {{ (100 * layer[columns[0]] / most)|round(1) }}%"></div>
{% if nearest in layer %}
<div class="bar rtn" style="width: {{ (100 * layer[nearest] / most)|round(1) }}%"></div>{% endif %}
{% if layer.name in facts.above_rtn %}<small>above rounding to nearest</small>{% endif %}
</td></tr>
{% endfor %}</table>
<p>Worst: {{ facts.worst_layers|join(", ") }}.</p>
<h2>Grids</h2>
<table><tr><th>grid</th><th>Linears</th></tr>
{% for grid, count in facts.grids.items() %}<tr><td>{{ grid }}</td><td>{{ count }}</td>
</tr>{% endfor %}</table>
{% if facts.curve %}
<h2>Bits against KL</h2>
<table><tr><th>bits per weight</th><th>KL, estimated</th><th>change</th></tr>
{% for point in facts.curve %}
<tr><td>{{ "%.3f"|format(point.bits) }}</td><td>{{ "%.5f"|format(point.kl) }}</td>
<td>{{ point.change }}</td></tr>
{% endfor %}</table>
{% endif %}
{% if left_out %}
<h2>Left out of the calibration data</h2>
<table><tr><th>rows or files</th><th>count</th></tr>
{% for reason, count in left_out %}<tr><td>{{ reason }}</td><td>{{ count }}</td></tr>{% endfor %}</table>
{% endif %}
{% if facts.findings %}
<h2>Notes</h2>
<ul>{% for finding in facts.findings %}<li>{{ finding }}</li>{% endfor %}</ul>
{% endif %}
<h2>Recipe</h2>
<table>{% for key, value in recipe.items() %}<tr><td>{{ key }}</td><td>{{ value }}</td>
</tr>{% endfor %}</table>
</body></html>
"""


def figure(value: object) -> str:
    """Return a layer's figure as tables show it: a number in four digits, text unchanged."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def render(name: str, title: str, facts: Mapping[str, Any]) -> str:
    """Write the page of a report's `facts` (Report.to_json)."""
    layers = facts["layers"]
    columns = list(dict.fromkeys(column for layer in layers for column in layer if column != "name"))
    nearest = f"{columns[0]}{NEAREST}"
    most = max(max(layer[columns[0]], layer.get(nearest, 0.0)) for layer in layers) or 1.0
    text = dict(facts["calibration"] or {})
    left_out = [
        (what.format(kind), count)
        for key, what in (("rows_left_out", "{}"), ("files_left_out", "files: {}"))
        for kind, count in text.pop(key, {}).items()
    ]
    recipe = {**facts.get("source", {}), **facts["recipe"], **text, **facts["versions"]}
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["figure"] = figure
    return environment.from_string(PAGE).render(
        counted=COUNTED, name=name, title=title, facts=facts, columns=columns, most=most, recipe=recipe,
        left_out=left_out, nearest=nearest,
    )  # fmt: skip
