"""The bytes of all tensors that are alive: `from live_bytes import Peak, live_bytes`."""

import gc

import torch


def live_bytes():
    """Bytes of all CPU tensors that the collector sees, shared and mapped storage counted once."""
    storages = [
        t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)
    ]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())


class Peak:
    """The most bytes that were alive when a `sampled` function returned."""

    def __init__(self):
        self.bytes = 0

    def sampled(self, function):
        """Return `function`, which then notes what is alive after each call."""

        def call(*arguments, **options):
            result = function(*arguments, **options)
            self.bytes = max(self.bytes, live_bytes())
            return result

        return call
