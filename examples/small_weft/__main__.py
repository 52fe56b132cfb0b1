"""Prints Adam, ZeRO-1 and two plans, each checked against one device; the last one also on real processes."""

from __future__ import annotations

import sys

from . import Machine, P, Program, cost, mesh, on_one_device, on_real_ranks, on_simulated_ranks, plan, tensor, trace
from .processes import mesh_of
from .programs import adam, assert_same, mlp_of, random_inputs, zero1


def show(title: str, p: Program) -> None:
    """Prints a program after checking it: simulated ranks against one device."""
    values = random_inputs(p)
    assert_same(on_simulated_ranks(p, values), on_one_device(p, values))
    print(f"{title}\n{p}\n")


def main() -> None:
    m = mesh(dp=2)
    vector = tensor(m, 8)
    p = trace(adam, g=tensor(m, 8, dp=P), x=vector, m=vector, v=vector)
    show("Adam as written", p)
    show("ZeRO-1: split, sink, shard_state", zero1(p))

    m = mesh(gpu=2)
    for title, program, machine in (
        ("Many samples, narrow", mlp_of(m, 4096, 16), Machine()),
        ("Few samples, wide", mlp_of(m, 8, 128), Machine()),
    ):
        best = plan(program, machine)
        show(f"{title}: {1e6 * cost(best, machine):.0f} us, {1e6 * cost(program, machine):.0f} without a plan", best)

    best = plan(mlp_of(m, 8, 128), Machine())
    values = random_inputs(best)
    assert_same(on_real_ranks(best, values), on_one_device(best, values))
    print(f"{mesh_of(best).ranks} processes over gloo agree with one device")


if __name__ == "__main__":
    sys.exit(main())
