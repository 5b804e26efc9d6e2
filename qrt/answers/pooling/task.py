"""Match tasks to a model: which vectors the engine makes for them, and how callers get these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qrt.arch.pooling import Pooling
from qrt.engine.schedule.logprobs import Vectors
from qrt.errors import ConfigError
from qrt.request.pooling import PoolingParams

LEAST_LENGTH = 1e-12  # of a vector that is normalized


def vector_size(pooling: Pooling | None, hidden_size: int) -> int:
    """Return how many numbers one vector has; 0 for a model that generates."""
    return 0 if pooling is None else len(pooling.labels) or hidden_size


def with_task(
    pooling: Pooling | None, params: PoolingParams, task: str | None, size: int = 0
) -> PoolingParams:
    """Return `params` for `task`, or for the model's own; ConfigError where the model does not do it.

    pooling   how the model pools; None: it generates
    size      numbers in one of its vectors, which any model may be asked for
    """
    name = task or params.task or "pooling"
    if pooling is None:
        raise ConfigError(
            f"{name}: expected a model that pools, got one that generates; start it with runner='pooling' "
            "(--runner pooling)"
        )
    if None not in (task, params.task) and task != params.task:
        raise ConfigError(f"task: expected {task!r} here, got {params.task!r}; leave it out")
    own = f"token_{pooling.task}" if pooling.kind == "all" else pooling.task
    task = task or params.task or own
    if task.removeprefix("token_") != pooling.task:
        raise ConfigError(
            f"task: expected {pooling.task!r}, which the model does, got {task!r}; see --convert"
        )
    if pooling.kind == "all" and task == pooling.task:
        raise ConfigError(f"task: expected {own!r}, as the model has a vector for each token, got {task!r}")
    if params.dimensions == size and pooling.task == "embed":
        params = replace(params, dimensions=None)
    _check_dimensions(pooling, params)
    return replace(params, task=task)


def kind_of(pooling: Pooling, params: PoolingParams) -> str:
    """Return the kind of vectors that the engine makes for a task."""
    return "all" if str(params.task).startswith("token_") else pooling.kind


def _check_dimensions(pooling: Pooling, params: PoolingParams) -> None:
    wanted, known = params.dimensions, pooling.dimensions
    if wanted is None:
        return
    if pooling.task != "embed":
        raise ConfigError(f"dimensions: expected none with labels, got {wanted}; leave it out")
    if known is None:
        raise ConfigError(
            f"dimensions: expected none, as config.json has no matryoshka_dimensions, got {wanted}; "
            "leave it out, or if the model was trained for it give --hf-overrides '{\"is_matryoshka\": true}'"
        )
    if known and wanted not in known:
        raise ConfigError(f"dimensions: expected {' or '.join(map(str, known))}, got {wanted}")


def finish(vectors: Vectors, pooling: Pooling, params: PoolingParams) -> Vectors:
    """Return what callers get of the engine's vectors fp32 [n, D]; embeddings are cut, then normalized."""
    if pooling.task == "classify":
        active = params.use_activation is not False and params.normalize is not False
        match pooling.activation if active else "none":
            case "softmax":
                powers = np.exp(vectors - vectors.max(-1, keepdims=True, initial=-np.inf))
                return powers / powers.sum(-1, keepdims=True)
            case "sigmoid":
                with np.errstate(over="ignore"):  # then the divisor is infinite, and the result 0
                    return np.reciprocal(np.exp(-vectors) + 1)
        return vectors
    if params.dimensions is not None:
        if params.dimensions > vectors.shape[-1]:
            raise ConfigError(
                f"dimensions: expected at most {vectors.shape[-1]}, the model's, got {params.dimensions}"
            )
        vectors = vectors[:, : params.dimensions]
    given = params.normalize if params.normalize is not None else params.use_activation
    normalize = pooling.normalize if given is None else given
    if not normalize:
        return vectors
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, LEAST_LENGTH)
