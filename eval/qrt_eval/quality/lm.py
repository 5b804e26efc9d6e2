"""Run lm-evaluation-harness over the engine: `qrt-eval lm --tasks ...`, or its model class `qrt`.

    import qrt_eval.quality.lm_model  # registers it
    lm_eval.simple_evaluate(model="qrt", model_args="model=Qwen3-8B-w4,kv=int8", tasks=["hellaswag"])

It needs lm-eval: `pip install qrt[lm]`.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.table import Table

from qrt.errors import ConfigError, QrtError, UnsupportedError
from qrt.model_files.location import model_name
from qrt_eval.quality.ppl import scorer
from qrt_eval.results.console import show
from qrt_eval.results.record import model_facts, save

OFFLINE = (
    "lm-eval's own tasks download their data; offline, give YAML tasks with local files in --include-path"
)


def run(arguments: Namespace) -> None:
    """Run `qrt-eval lm`: the tasks; write the JSON, print their metrics."""
    try:
        import lm_eval

        from qrt_eval.quality.lm_model import QRTLM
    except ImportError as error:
        raise UnsupportedError(f"lm: expected lm-eval, got no {error.name}; pip install 'qrt[lm]'") from error
    if arguments.include_path and not Path(arguments.include_path).is_dir():
        raise ConfigError(f"--include-path: expected a folder, got {arguments.include_path}")
    manager = task_manager(arguments.tasks, arguments.include_path)
    if unknown := [name for name in arguments.tasks if name not in manager.all_tasks]:
        raise ConfigError(f"--tasks: expected tasks that lm-eval knows, got {unknown[0]}; {OFFLINE}")
    llm = scorer(arguments.model, arguments.kv, arguments.dtype, arguments.max_model_len)
    started = time.perf_counter()
    try:
        found: Any = lm_eval.simple_evaluate(
            model=QRTLM(llm),
            tasks=arguments.tasks,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            apply_chat_template=arguments.apply_chat_template,
            task_manager=manager,
            log_samples=False,
        )
    except QrtError:
        raise
    except (OSError, ValueError) as error:  # errors of datasets and its HTTP client derive from these
        raise QrtError(
            f"--tasks {' '.join(arguments.tasks)}: {type(error).__name__}: {error}; {OFFLINE}"
        ) from error
    rows = scores(found)
    about = {"lm_eval_version": lm_eval.__version__, "seconds": time.perf_counter() - started}
    save(arguments, {**model_facts(llm), "scores": rows, **about})
    print_table(arguments, rows)


def task_manager(wanted: list[str], include_path: str | None) -> Any:
    """Return lm-eval's index of tasks: those of a folder if all `wanted` ones are tasks in it.

    Otherwise lm-eval's own are read too, which takes 15 seconds. So it does for a group, whose tasks may be
    anywhere.
    """
    from lm_eval import tasks

    if include_path is not None:
        here = tasks.TaskManager(include_path=include_path, include_defaults=False)
        if set(wanted) <= set(here.all_subtasks):
            return here
    return tasks.TaskManager(include_path=include_path)


def scores(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every metric of every task. Filters after the first are named in the metric."""
    rows = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, _, filter = key.partition(",")
            if not filter or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter}")
            better = found["higher_is_better"].get(task, {}).get(metric, True)
            name = metric if filter == "none" else f"{metric} ({filter})"
            spread = stderr if isinstance(stderr, float) else None
            row = {"task": task, "metric": name, "value": float(value), "stderr": spread}
            rows.append({**row, "higher_is_better": bool(better)})
    return rows


def print_table(arguments: Namespace, rows: list[dict[str, Any]]) -> None:
    """Print a row per task and metric."""
    table = Table(title=f"{model_name(arguments.model)}, KV {arguments.kv}", title_justify="left")
    for name in ("task", "metric", "value", "± stderr"):
        table.add_column(name, justify="right" if name in ("value", "± stderr") else "left")
    for row in rows:
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        table.add_row(row["task"], row["metric"], f"{row['value']:.4f}", stderr)
    show(table)
