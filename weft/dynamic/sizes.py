"""The sizes that stand for the number of vertices and of edges in a trace: two large primes no other size is a multiple of."""

ROWS, EDGES = 1_000_003, 2_000_003


def unit_of(size: int) -> int:
    """Which of the two a size is a multiple of; 0: it is a size of its own."""
    return next((unit for unit in (ROWS, EDGES) if size and size % unit == 0), 0)
