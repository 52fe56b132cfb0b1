"""`weft bench goodput`: a small model trained to a given loss at the batch of most goodput, and at the batch of most throughput.

Both take their learning rate by one rule, rate / (1 + noise / batch), with the rate at which the batch of most throughput is
soonest done. Times are of steps alone; all kernels are made before.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

WIDTH, CLASSES, HIDDEN = 32, 8, 1024  # wide, so that summing and updating cost as much as many samples
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
RATES = (0.2, 0.4)
TARGET, LONGEST = 0.75, 30.0  # the loss to reach, and seconds after which a run is given up
CHECKED = 10  # steps between looks at the loss
OFFLINE = 4096  # samples whose own gradients the noise is worked out from


def register(app: typer.Typer) -> None:
    @app.command()
    def goodput(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        ranks: Annotated[int, typer.Option(help="processes")] = 2,
    ) -> None:
        """Time training to a given loss at the batch goodput picks and at the one throughput picks; compare noise with offline."""
        from bench._ranks import machine, run_ranks
        from weft.cli.output import console, emit

        found = run_ranks(measure, ranks)
        for name, run in found["runs"].items():
            console.print(f"{name:<12} batch {run['batch']:>5}  {run['seconds']:6.2f} s, {run['steps']} steps to loss {run['loss']:.3f}")
        console.print(f"noise scale {found['noise']:.1f} samples while training, {found['offline']:.1f} offline")
        if json:
            emit({"bench": "goodput", "machine": machine(), "ranks": ranks, "rows": [row(found)], **found})


def row(found: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = found["runs"]["goodput"], found["runs"]["throughput"]
    return {
        "case": f"mlp to loss {TARGET}", "weft_ms": ours["seconds"] * 1e3, "peers_ms": {"most throughput": theirs["seconds"] * 1e3},
        "ratios": {"most throughput": theirs["seconds"] / ours["seconds"]},
        "correct": f"both reach loss {TARGET} on held-out samples; noise {found['noise'] / found['offline'] - 1:+.0%} of offline",
    }  # fmt: skip


# --- the task: what a random network says of random points, with noise


def task() -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES, bias=False))

    def draw(n: int, seed: int) -> tuple[Any, Any]:
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(n, WIDTH, generator=gen)
        with torch.no_grad():
            y = 6 * teacher(x) + 0.3 * torch.randn(n, CLASSES, generator=gen)
        return x, y.argmax(1)

    return student, draw


def student() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    wide = [nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), *wide, nn.Linear(HIDDEN, CLASSES))


def loss(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(batch[0]), batch[1])


def measure(rank: int, world: int) -> dict[str, Any]:
    make, draw = task()
    plain = adaptive(make, draw, world, BATCHES, RATES[0])
    plain.prepare()
    seconds = times(plain, draw)
    most = max(BATCHES, key=lambda b: b / seconds[b])
    tried = {r: train(make, draw, world, (most,), r) for r in RATES}
    best = min(tried, key=lambda r: tried[r]["seconds"])
    ours = train(make, draw, world, BATCHES, best)
    told, known = noise(make, draw, world, ours.pop("step"))
    runs = {"goodput": ours, "throughput": tried[best]}
    for run in tried.values():
        run.pop("step", None)
    samples = {str(b): b / s for b, s in seconds.items()}
    return {"runs": runs, "rate": best, "samples_per_s": samples, "noise": told, "offline": known}


def adaptive(make: Any, draw: Any, world: int, batches: tuple[int, ...], rate: float) -> Any:
    import torch

    from bench._adaptive import Adaptive
    from weft.api.parallelize import parallelize

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(batch: int) -> Any:
        return parallelize(model, loss, optimizer, draw(batch, 0), plan=f"dp{world}", noise=True)

    return Adaptive(step, batches, every=25, rate=lambda batch, noise: rate / (1 + noise / batch))


def times(steps: Any, draw: Any) -> dict[int, float]:
    """Seconds of a step at each batch, on a model that is thrown away."""
    for batch in steps.batches:
        steps.batch = batch
        for i in range(12):
            steps.batch = batch
            steps(draw(batch, i))
    return {b: agreed(steps.seconds(b)) for b in steps.batches}


def agreed(value: float) -> float:
    """As rank 0 has it."""
    import torch.distributed as dist

    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def train(make: Any, draw: Any, world: int, batches: tuple[int, ...], rate: float) -> dict[str, Any]:
    """Seconds of steps until the loss is reached on samples never trained on."""
    steps = adaptive(make, draw, world, batches, rate)
    steps.prepare()
    held, spent, n = draw(4096, 10**6), 0.0, 0
    model, value, taken = make(), float("inf"), dict[int, int]()
    while value > TARGET and spent < LONGEST:
        batch = draw(steps.batch, 1 + n)
        taken[steps.batch] = taken.get(steps.batch, 0) + 1
        began = time.perf_counter()
        steps(batch)
        spent += time.perf_counter() - began
        n += 1
        if n % CHECKED == 0:
            value, spent = evaluate(model, steps.step, held), agreed(spent)
    common = max(taken, key=lambda b: taken[b])
    return {"seconds": spent, "steps": n, "loss": value, "batch": common, "batches": taken, "step": steps.step}


def evaluate(model: Any, step: Any, held: Any) -> float:
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(step.local_state[f"param.{name}"])
        return float(loss(model, held))


def noise(make: Any, draw: Any, world: int, step: Any) -> tuple[float, float]:
    """The noise scale where training ended, as steps tell it and from every sample's own gradient."""
    from bench._adaptive import listen
    from weft.transform.noise import Noise

    listen(step, Noise(keep=0.995))
    for group in step.optimizer.param_groups:
        group["lr"] = 0.0
    batch = step.program.input_names["batch.0"].shape[0]
    for i in range(min(300, 20_000 // batch)):
        step(draw(batch, 10**7 + i))
    return step.noise.scale, offline(make(), step, draw(OFFLINE, 10**8))


def offline(model: Any, step: Any, batch: Any) -> float:
    """tr(S) / |G|^2 of single samples."""
    import torch
    from torch.nn import functional

    params = {name: step.local_state[f"param.{name}"].clone() for name, _ in model.named_parameters()}

    def one(params: Any, x: Any, y: Any) -> Any:
        return functional.cross_entropy(torch.func.functional_call(model, params, x[None]), y[None])

    per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))
    sums, squares = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}, 0.0
    for x, y in zip(batch[0].split(64), batch[1].split(64), strict=True):
        for name, g in per_sample(params, x, y).items():
            sums[name] += g.sum(0)
            squares += float(g.square().sum())
    n = len(batch[0])
    strength = sum(float((g / n).square().sum()) for g in sums.values())
    spread = (squares / n - strength) * n / (n - 1)
    return spread / (strength - spread / n)
