"""MetricNames: how the metrics of an engine are named and labelled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricNames:
    """The prefix and the labels of all metrics of an engine.

    engine   the label `engine`, its number among those of a server; None: it is alone, without this label
    """

    model_name: str
    prefix: str = "qrt"
    engine: int | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels by name."""
        return {"model_name": self.model_name} | ({} if self.engine is None else {"engine": str(self.engine)})

    def family(self, name: str) -> str:
        """Return the full name of a metric."""
        return f"{self.prefix}:{name}"
