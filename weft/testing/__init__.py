"""The fuzzers, and what tests of ops and of verbs stand on: every layout of a shape, inputs by name, two programs compared."""
