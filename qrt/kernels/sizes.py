"""Integer arithmetic of launchers. Triton's own functions, which kernels may call too, cost the host 5 us."""


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()
