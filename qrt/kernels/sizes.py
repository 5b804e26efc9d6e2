"""Integer arithmetic for launchers. Triton's own functions, made for kernels too, take the host 5 us."""


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of `size` it takes to hold `count`."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()
