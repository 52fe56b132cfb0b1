"""Adam over four ranks in ten lines, and ZeRO-1 as three verbs: what the README shows."""

import weft
from weft import P, lang, schedule


def adam(g, x, m, v, t, lr):
    g = lang.all_reduce(g, "dp") / 4.0
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    step = lr * (m / (1.0 - 0.9**t)) / (lang.sqrt(v / (1.0 - 0.999**t)) + 1e-8)
    return {"x": x - step, "m": m, "v": v, "t": t + 1.0}


f32, n = lang.f32, 1_000_003
program = weft.trace(adam, weft.Mesh(dp=4), g=f32(n, dp=P()), x=f32(n), m=f32(n), v=f32(n), t=f32(), lr=f32())


def zero1(p):
    p = schedule.split(p, "all_reduce", dim=0)  # all_reduce -> reduce_scatter ; all_gather
    p = schedule.sink(p, "all_gather")  # the gather waits until after the update
    return schedule.shard_state(p, "m", "v")  # only ever used in slices: store slices


if __name__ == "__main__":
    print(program)
    print()
    print(zero1(program))
