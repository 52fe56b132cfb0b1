"""The sizes that stand for the number of vertices and of edges in a trace: two large primes no other size is a multiple of."""

ROWS, EDGES = 1_000_003, 2_000_003
