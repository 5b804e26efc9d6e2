"""Weights of layers. They keep how they are multiplied, so that it is worked out once for each size of x."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from torch import Tensor

MOST_SIZES = 64  # sizes of x that are kept; steps of a server are padded to about as many

Prepared = Callable[..., Tensor]


class Weight(list[Tensor]):
    """The tensors of one weight, as operators take them, and the products that were made ready for it.

    A product is a function of what is multiplied; its plan, grid, kernel and the TMA descriptors of the
    weight are settled. The first plan stays. A plain list of the same tensors keeps nothing.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__(tensors)
        self.ready: dict[Hashable, Prepared | None] = {}

    def keep(self, key: Hashable, product: Prepared | None) -> None:
        """Keep the product for this key; None: there is none to keep."""
        if len(self.ready) >= MOST_SIZES:
            self.ready.clear()
        self.ready[key] = product


def ready(weight: Sequence[Tensor], key: Hashable) -> Prepared | None:
    """Return the product that a `Weight` keeps under a key; None for other lists."""
    return weight.ready.get(key) if type(weight) is Weight else None


def is_new(weight: Sequence[Tensor], key: Hashable) -> bool:
    """Return whether a `Weight` keeps nothing under a key yet; False for other lists."""
    return type(weight) is Weight and key not in weight.ready
