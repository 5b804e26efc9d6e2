"""Merge what several engines answer to one question into the answer of their server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from qrt.serve.link.metric_names import MetricNames


def merge_metrics(texts: Sequence[bytes]) -> bytes:
    """Return one text in Prometheus' format of several that label their samples by engine.

    The format wants the samples of a family together, below one HELP and one TYPE line.
    """
    families: dict[str, str] = {}
    for text in texts:
        for family in re.split(r"^(?=# HELP )", text.decode(), flags=re.MULTILINE)[1:]:
            about, kind, samples = family.split("\n", 2)
            head = f"{about}\n{kind}\n"
            families[head] = families.get(head, "") + samples
    return "".join(head + samples for head, samples in families.items()).encode()


def merge_load(answers: Sequence[bytes]) -> bytes:
    """Return the sums of several loads; `kv_usage` is the share of all pools together."""
    loads: list[dict[str, Any]] = [msgspec.json.decode(answer) for answer in answers]
    total = {name: sum(load[name] for load in loads) for name in loads[0]}
    used = sum(load["kv_usage"] * load["kv_pool_tokens"] for load in loads)
    return msgspec.json.encode(total | {"kv_usage": used / total["kv_pool_tokens"]})


class EnginesUp(Collector):
    """The gauge that says which engines live."""

    def __init__(self, names: Sequence[MetricNames], up: Sequence[bool]) -> None:
        """`up` says of each engine, whose metrics have these `names`, whether it lives."""
        self._names, self._up = names, up

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the one family."""
        first = self._names[0]
        text = "Whether the engine lives, 1 or 0."
        gauge = GaugeMetricFamily(first.family("engine_up"), text, labels=list(first.labels))
        for names, up in zip(self._names, self._up, strict=True):
            gauge.add_metric(list(names.labels.values()), up)
        yield gauge


MERGES: Mapping[str, Callable[[Sequence[bytes]], bytes]] = {
    "metrics": merge_metrics,
    "load": merge_load,
    "reset_prefix_cache": lambda answers: answers[0],
}
