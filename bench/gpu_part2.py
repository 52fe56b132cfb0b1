"""Fused optimizers and overlapped products on one GPU shared by several ranks: correct first, then timed against the rest.

    python bench/gpu_part2.py [--ranks 4] [--stages optimizer,overlap,hosts,gather] [--quick]

Starts MPS and its own ranks, ends within a few minutes whatever happens, and prints one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


# -- the parent: MPS, ranks, a deadline ------------------------------------------------------------------------------


@contextmanager
def mps():
    """Ranks that share a GPU run at the same time only under MPS."""
    folders = [tempfile.mkdtemp() for _ in range(2)]
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folders[0], "CUDA_MPS_LOG_DIRECTORY": folders[1],
           "OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # fmt: skip
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
    try:
        yield env
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=env, timeout=30, check=False)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def run_stage(stage: str, ranks: int, env: dict, seconds: float, extra: list[str]) -> dict:
    """One stage in its own ranks; what it has written by the deadline is kept."""
    out = Path(tempfile.mkdtemp()) / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               __file__, "--stage", stage, "--out", str(out), *extra]  # fmt: skip
    start = time.time()
    process = subprocess.Popen(command, env={**env, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    status = "ok"
    try:
        if process.wait(timeout=seconds):
            status = f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = f"stopped after {seconds:.0f} s"
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {"stage": stage, "ranks": ranks, "status": status, "seconds": round(time.time() - start, 1), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", default="optimizer,overlap,hosts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stage")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.stage:
        return STAGES[args.stage][0](args)
    with mps() as env:
        quick = ["--quick"] * args.quick
        results = [run_stage(stage, args.ranks, env, STAGES[stage][1], quick) for stage in args.stages.split(",")]
    print(json.dumps({"bench": "gpu_part2", "stages": results}), flush=True)
    return None


# -- what every rank needs -------------------------------------------------------------------------------------------


class Rank:
    """This process among the ranks, and the file rank 0 writes rows to."""

    def __init__(self, out: str) -> None:
        import torch
        import torch.distributed as dist

        from weft.runtime.peers import connect

        torch.cuda.set_device(0)
        dist.init_process_group("gloo")
        self.peers = connect(device="cuda")
        self.rank, self.world = self.peers.rank, self.peers.world
        self.device = self.peers.device
        self.out = out

    def say(self, **row) -> None:
        if self.rank == 0:
            with open(self.out, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)

    def worst(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        t = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.item()

    def time_ms(self, call, repeat: int, graph: bool) -> float:
        """Milliseconds per call on the slowest rank; the best of three rounds. Small calls are replayed from a graph."""
        import torch

        call()
        self.peers.barrier()
        calls = repeat
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                for _ in range(10):
                    call()
            run, calls = recorded.replay, 10 * max(1, repeat // 10)
            loops = calls // 10
        else:
            run, loops = call, repeat
        run()
        best = float("inf")
        for _ in range(3):
            self.peers.barrier()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(loops):
                run()
            stop.record()
            self.peers.barrier()
            best = min(best, self.worst(start.elapsed_time(stop) / calls))
        return best

    def time_in_turn(self, calls: dict, rounds: int = 7) -> dict:
        """Milliseconds of each call on the slowest rank, the median of rounds in which all take their turn: a GPU under load
        lowers its clock, so what is compared is timed side by side. All are replayed from graphs of five calls."""
        import statistics

        import torch

        graphs, pool = {}, torch.cuda.graph_pool_handle()  # one for all: no result outlives its replay
        for name, call in calls.items():
            call()
            self.peers.barrier()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], pool=pool):
                for _ in range(5):
                    call()
        took = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, graph in graphs.items():
                self.peers.barrier()
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                stop.record()
                self.peers.barrier()
                if turn:
                    took[name].append(self.worst(start.elapsed_time(stop) / 5))
        return {name: statistics.median(ms) for name, ms in took.items()}

    def bandwidth(self) -> float:
        """Bytes per second all ranks together move when each copies a large buffer: reads and writes both counted."""
        import torch

        n = 1 << 28
        a, b = torch.empty(n, dtype=torch.uint8, device=self.device), torch.ones(n, dtype=torch.uint8, device=self.device)
        return self.world * 2 * n / (self.time_ms(lambda: a.copy_(b), 20, graph=True) / 1e3)


# -- the optimizers as fused groups ----------------------------------------------------------------------------------


def groups() -> dict:
    """What is fused: written as element-wise formulas, nothing said about communication but reduce and spread."""
    from weft.codegen.expr import Group, Slot, apply, load, reduce, scalar, sqrt, total

    g, w = Slot("g", "f32", spread=True, disposable=True), Slot("w", "f32", spread=True)
    m, v, s = Slot("m", "f32"), Slot("v", "f32"), Slot("s", "f32")
    names = ("lr", "beta1", "beta2", "eps", "decay", "step", "world", "most")
    lr, beta1, beta2, eps, decay, step, world, most = map(scalar, names)

    def moments(grad):
        new_m = beta1 * load(m) + (1 - beta1) * grad
        new_v = beta2 * load(v) + (1 - beta2) * grad * grad
        root = sqrt(new_v) / sqrt(1 - apply("pow", beta2, step)) + eps
        return new_m, new_v, (new_m / root) / (1 - apply("pow", beta1, step))

    def adamw(grad):
        new_m, new_v, way = moments(grad)
        return (m, new_m), (v, new_v), (w, load(w) * (1 - lr * decay) - lr * way)

    def lamb(grad):
        new_m, new_v, way = moments(grad)
        way = way + decay * load(w)
        long, far = sqrt(total(load(w) * load(w))), sqrt(total(way * way))
        trust = apply("where", apply("gt", long, 0.0), apply("where", apply("gt", far, 0.0), long / far, 1.0), 1.0)
        return (m, new_m), (v, new_v), (w, load(w) - (lr * trust) * way)

    mean = reduce(g) / world
    norm = sqrt(total(mean * mean, over_rows=True))
    clipped = mean * apply("minimum", 1.0, most / (norm + 1e-6))
    return {
        "adamw": Group("adamw", adamw(mean)),
        "adamw_clip": Group("adamw_clip", adamw(clipped)),
        "lamb": Group("lamb", lamb(mean)),
        "sgd": Group("sgd", ((m, 0.9 * load(m) + mean), (w, load(w) - lr * (0.9 * load(m) + mean)))),
        "reduce_scatter": Group("reduce_scatter", ((s, mean),)),
        "all_gather": Group("all_gather", ((w, load(s)),)),
    }


HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.1, "most": 1.0}


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Case:
    """A list of tensors in symmetric memory, and this rank's slices of them."""

    def __init__(self, me: Rank, sizes: list[int]) -> None:
        import torch

        self.me, self.sizes = me, sizes
        self.offsets, at = [], 0
        for n in sizes:
            self.offsets.append(at)
            at += round_up(n, 64)
        self.total = at
        self.g, self.w = me.peers.empty(4 * at), me.peers.empty(4 * at)
        self.grad, self.weight = (b.view(0, (at,), torch.float32) for b in (self.g, self.w))
        self.slices = []
        for n in sizes:
            per = round_up(-(-n // me.world), 16)
            self.slices.append([(min(n, r * per), min(n, (r + 1) * per)) for r in range(me.world)])
        mine = [hi - lo for lo, hi in (s[me.rank] for s in self.slices)]
        pad = [round_up(n, 64) for n in mine]
        self.m, self.v, self.s = (torch.zeros(max(1, sum(pad)), device=me.device) for _ in range(3))
        self.state_at = [sum(pad[:k]) for k in range(len(pad))]
        self.fill()

    def fill(self) -> None:
        import torch

        torch.manual_seed(0)
        self.weight.copy_(torch.randn(self.total, device=self.me.device))
        self.grad.copy_(self.gradient(self.me.rank))
        self.m.zero_(), self.v.zero_()
        self.me.peers.barrier()

    def gradient(self, rank: int):
        import torch

        torch.manual_seed(100 + rank)
        return torch.randn(self.total, device=self.me.device)

    def rows(self) -> list:
        from weft.runtime.fused import Row

        rows = []
        for k, offset in enumerate(self.offsets):
            lo, hi = self.slices[k][self.me.rank]
            at = {name: [a + 4 * (offset + lo) for a in b.addresses] for name, b in (("g", self.g), ("w", self.w))}
            own = {x: t.data_ptr() + 4 * self.state_at[k] for x, t in (("m", self.m), ("v", self.v), ("s", self.s))}
            rows.append(Row(hi - lo, {**at, **own}))
        return rows

    def spans(self) -> list[int]:
        return [max(hi - lo for lo, hi in s) for s in self.slices]

    def kernel(self, group, launch):
        import math

        from weft.codegen.kernel import compile_group
        from weft.runtime.launched import DeviceKernel

        kernel = compile_group(group, self.me.world, "triton")
        bound = DeviceKernel(kernel, self.rows(), self.me.peers, launch, self.spans())
        names = [x.strip() for x in kernel.scalars[7:].split(":")[0].split(",") if x.strip()]
        given = {**HYPER, "step": 1, "world": self.me.world}
        bound(eval(kernel.scalars, {"math": math})(**{x: given[x] for x in names}))
        return kernel, bound


def reference(case: Case, name: str):
    """One step by torch on the averaged gradient, tensor by tensor."""
    import torch

    mean = sum(case.gradient(r).double() for r in range(case.me.world)) / case.me.world
    torch.manual_seed(0)
    start = torch.randn(case.total, device=case.me.device).double()
    grads = [mean[o : o + n] for o, n in zip(case.offsets, case.sizes, strict=True)]
    if name == "adamw_clip":
        norm = torch.sqrt(sum((g * g).sum() for g in grads))
        grads = [g * torch.clamp(1.0 / (norm + 1e-6), max=1.0) for g in grads]
    out = []
    for g, o, n in zip(grads, case.offsets, case.sizes, strict=True):
        w, h = start[o : o + n], HYPER
        m, v = (1 - h["beta1"]) * g, (1 - h["beta2"]) * g * g
        way = (m / (torch.sqrt(v) / (1 - h["beta2"]) ** 0.5 + h["eps"])) / (1 - h["beta1"])
        if name.startswith("adamw"):
            out.append(w * (1 - h["lr"] * h["decay"]) - h["lr"] * way)
        elif name == "lamb":
            way = way + h["decay"] * w
            out.append(w - h["lr"] * (w.norm() / way.norm()) * way)
        else:
            out.append(w - h["lr"] * g)
    return out


def wrong_by(case: Case, name: str) -> float:
    got = [case.weight[o : o + n].double() for o, n in zip(case.offsets, case.sizes, strict=True)]
    return max((a - b).abs().max().item() for a, b in zip(got, reference(case, name), strict=True))


# -- stage: optimizer ------------------------------------------------------------------------------------------------


def launches(me: Rank, elements: int, quick: bool) -> list:
    """Ways to launch that are worth trying at this size."""
    from weft.runtime.launched import Launch

    resident = me.peers.resident_blocks()
    per_rank = -(-elements // me.world)
    found = []
    inside = [(2048, 16), (4096, 32), (8192, 32)] if elements <= 1 << 22 else [(4096, 16), (4096, 32), (8192, 32)]
    for block, warps in inside:
        chunk = max(block, min(4 * block, -(-per_rank // resident // block) * block))
        found.append(Launch(block, chunk, warps, resident, True))
    outside = [(1024, 1, 4), (2048, 1, 8), (2048, 2, 4), (4096, 1, 16), (4096, 4, 8)]
    if elements > 1 << 18:
        found += [Launch(block, times * block, warps, 1 << 20, False) for block, times, warps in outside]
        found += [Launch(2048, 4 * 2048, 8, 33 * 4, False), Launch(4096, 4 * 4096, 8, 33 * 2, False)]
    return found[:2] + found[3:5] if quick else found


def best_of(me: Rank, case: Case, group, options, repeat: int, graph: bool):
    tried = []
    for launch in options:
        kernel, bound = case.kernel(group, launch)
        me.peers.barrier()
        ms = me.time_ms(bound.launch_phases, repeat, graph)
        bound.check()
        tried.append((ms, launch, kernel))
        del bound
    return min(tried, key=lambda t: t[0]), tried


def show(launch) -> str:
    where = "inside" if launch.inside else "outside"
    return f"block {launch.block} chunk {launch.chunk} warps {launch.warps} blocks {launch.blocks} {where}"


def optimizer(args) -> None:
    import torch

    me = Rank(args.out)
    speed = me.bandwidth()
    me.say(case="probe", copy_TBps=round(speed / 1e12, 3), world=me.world, torch=torch.__version__, gpu=torch.cuda.get_device_name())
    mixed = [int(2 ** (10 + 12 * (k * 37 % 100) / 100)) + k for k in range(100)]
    cases = {"2^16": [1 << 16], "2^20": [1 << 20], "2^22": [1 << 22], "2^24": [1 << 24], "2^26": [1 << 26], "100 mixed": mixed}
    if args.quick:
        cases = {"2^20": cases["2^20"], "2^26": cases["2^26"]}
    check(me, groups(), [1 << 16, 1000, 37, 100003, 5])
    for label, sizes in cases.items():
        time_case(me, label, sizes, speed, args.quick)


def check(me: Rank, fused: dict, sizes: list[int]) -> None:
    """Every kernel, both ways to synchronise, on sizes that divide badly."""
    from weft.runtime.launched import Launch

    for name in ("adamw", "adamw_clip", "lamb"):
        for launch in (Launch(1024, 2048, 4, 16, True), Launch(1024, 1024, 4, 4096, False)):
            case = Case(me, sizes)
            _, bound = case.kernel(fused[name], launch)
            me.peers.barrier()
            bound.check()
            error = me.worst(wrong_by(case, name))
            # clipped gradients come near epsilon, where Adam turns the rounding of a sum of terms into a part of its step
            most = 0.03 * HYPER["lr"] if name == "adamw_clip" else 2e-6
            me.say(case=f"check {name}", launch=show(launch), error=error, correct=error < most)
            assert error < most, (name, launch, error)


def time_case(me: Rank, label: str, sizes: list[int], speed: float, quick: bool) -> None:
    import torch

    elements, fused = sum(sizes), groups()
    graph, repeat = elements <= 1 << 24, 20 if elements > 1 << 22 else 100
    case = Case(me, sizes)
    for name in ("adamw", "adamw_clip", "lamb"):
        case.fill()
        options = launches(me, elements, quick)
        (ms, launch, kernel), tried = best_of(me, case, fused[name], options, repeat, graph)
        limit = kernel.bytes_per_element * elements / speed * 1e3
        row = {"case": f"{name} {label}", "weft_ms": round(ms, 5), "limit_ms": round(limit, 5), "of_limit": round(limit / ms, 3),
               "bytes_per_element": kernel.bytes_per_element, "launch": show(launch),
               "tried": {show(c): round(t, 5) for t, c, _ in tried}}  # fmt: skip
        if name == "adamw":
            row["peers_ms"] = {"sharded": round(sharded(me, case, fused, repeat, graph), 5), "ddp": round(ddp(me, case, repeat, graph), 5)}
            row["ratios"] = {k: round(v / ms, 3) for k, v in row["peers_ms"].items()}
        me.say(**row)
    del case
    torch.cuda.empty_cache()


def sharded(me: Rank, case: Case, fused: dict, repeat: int, graph: bool) -> float:
    """reduce_scatter, torch's fused AdamW on the slice, all_gather, over the same memory, each with its best launch."""
    import torch

    elements = sum(case.sizes)
    (_, first, _), _ = best_of(me, case, fused["reduce_scatter"], launches(me, elements, True), repeat, graph)
    (_, last, _), _ = best_of(me, case, fused["all_gather"], launches(me, elements, True), repeat, graph)
    _, scatter = case.kernel(fused["reduce_scatter"], first)
    _, gather = case.kernel(fused["all_gather"], last)
    shard = torch.nn.Parameter(case.s.clone())
    shard.grad = torch.randn_like(shard)
    adamw = torch.optim.AdamW([shard], lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        scatter.launch_phases()
        adamw.step()
        gather.launch_phases()

    step()
    return me.time_ms(step, repeat, graph)


def ddp(me: Rank, case: Case, repeat: int, graph: bool) -> float:
    """torch's two-shot all_reduce on symmetric memory, then its fused AdamW on everything, on every rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    grad = symm_mem.empty(case.total, dtype=torch.float32, device=me.device)
    symm_mem.rendezvous(grad, dist.group.WORLD)
    grad.normal_()
    whole = torch.nn.Parameter(case.weight.clone())
    whole.grad = grad
    adamw = torch.optim.AdamW([whole], lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(grad, "sum", dist.group.WORLD.group_name)
        adamw.step()

    step()
    return me.time_ms(step, repeat, graph)


# -- stage: overlap --------------------------------------------------------------------------------------------------

SHAPES = [(512, 4096, 14336), (2048, 8192, 8192), (8192, 8192, 8192), (8192, 4096, 28672)]


def overlap(args) -> None:
    """Products with a collective, bf16: K/R per rank for sums, N/R for the gather. First right, then timed, plain and overlapped."""
    import torch

    me = Rank(args.out)
    me.say(case="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, world=me.world)
    best = None
    for shape in SHAPES[-1:] if args.quick else SHAPES:
        for op in ("product_reduce_scatter", "product_all_reduce", "gather_product"):
            best = fastest(me, op, shape, args.quick)
        torch.cuda.empty_cache()
    trace_overlap(me, best)


def operands(me: Rank, op: str, shape: tuple[int, int, int]):
    """This rank's x [rows, k] and w [n, k]."""
    import torch

    m, n, k = shape
    gen = torch.Generator(me.device).manual_seed(5 + me.rank)
    rows, cols, deep = (m // me.world, n // me.world, k) if op == "gather_product" else (m, n, k // me.world)
    x = torch.randn(rows, deep, generator=gen, device=me.device, dtype=torch.bfloat16)
    w = torch.randn(cols, deep, generator=gen, device=me.device, dtype=torch.bfloat16) / deep**0.5
    return x, w


def fastest(me: Rank, op: str, shape: tuple[int, int, int], quick: bool):
    """The fastest of the candidates, every other one where time is short. Those on one line come first; the best of them is timed
    again beside those on two."""
    from weft.nn.ways import candidates

    best = []
    for lines in (1, 2):
        ways = [way for way in candidates(op) if way.lines == lines][:: 2 if quick else 1]
        best = [overlap_case(me, op, shape, best + ways)] if ways else best
    return best[0]


def gather(args) -> None:
    """all_gather + product at the largest shape alone, every candidate, and a trace of the fastest."""
    import torch

    me = Rank(args.out)
    me.say(case="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, world=me.world)
    trace_overlap(me, fastest(me, "gather_product", SHAPES[-1], args.quick))
    check_carrying(me)


def check_carrying(me: Rank) -> None:
    """Products that carry, at sizes of which no tile, stage or piece is a divisor: every row arrives, every product is right."""
    import torch

    from weft.nn import over_peers
    from weft.nn.ways import Way

    for m, n, k in ((136, 264, 72), (128, 8, 64), (512, 8, 8), (64, 1032, 1000), (1000, 520, 4104)):
        gen = torch.Generator(me.device).manual_seed(m)
        whole = torch.randn(me.world, m, k, generator=gen, device=me.device, dtype=torch.bfloat16)
        w = torch.randn(n, k, generator=gen, device=me.device, dtype=torch.bfloat16)
        for _ in range(2):  # the second time on memory that was used before
            got, kept = over_peers.gather_product(whole[me.rank].clone(), w, None, Way("peers", by="product"))
        want = whole.flatten(0, 1).float() @ w.float().T
        error = me.worst(((got.float() - want).abs().max() / want.abs().max()).item())
        arrived = me.worst(float(not torch.equal(kept, whole.flatten(0, 1)))) == 0
        me.say(case=f"check carrying {(m, n, k)}", error=error, correct=error < 0.02 and arrived)
        assert error < 0.02 and arrived, (m, n, k, error, arrived)


def overlap_case(me: Rank, op: str, shape: tuple[int, int, int], ways: list):
    """The fastest way. `unfused` is the product and the collective one after the other, over the same symmetric memory."""
    import torch

    from weft.nn import over_peers

    x, w = operands(me, op, shape)
    more = ()
    if op == "gather_product":  # the rows are in symmetric memory to begin with, for the plain way too
        home = over_peers.space_of(None, me.device).rows(*x.shape, x.dtype)[me.rank]
        x, more = home.copy_(x), (False,)
    run = getattr(over_peers, op)
    ways = [way for way in ways if op == "gather_product" or x.shape[0] % (way.chunks * me.world) == 0]
    wrong = {way: me.worst(product_error(me, op, shape, x, w, run(x, w, None, way, *more))) for way in ways}
    assert max(wrong.values()) < 0.02, wrong
    whole = torch.randn(shape[0], x.shape[1], device=me.device, dtype=x.dtype) if op == "gather_product" else x
    calls = {way: functools.partial(run, x, w, None, way, *more) for way in ways}
    calls["alone"] = lambda: whole @ w.T
    if op == "gather_product":
        calls["unfused"] = lambda: unfused_gather(x, w)
    times = me.time_in_turn(calls)
    again = {way: me.worst(product_error(me, op, shape, x, w, run(x, w, None, way, *more))) for way in ways}
    assert max(again.values()) < 0.02, again
    alone = times.pop("alone")
    unfused = times.pop("unfused", None) or min(t for way, t in times.items() if way.chunks == 1)
    torch_ms = torch_fused(me, op, x, w)
    best = min(times, key=times.get)
    weft = min(times[best], unfused)
    peers = {"unfused": unfused, "gemm_alone": alone, **({"torch_fused": torch_ms} if torch_ms else {})}
    me.say(case=f"{op} {shape}", weft_ms=round(weft, 4), way=str(best) if times[best] < unfused else "left alone",
           peers_ms={k: round(v, 4) for k, v in peers.items()}, ratios={k: round(v / weft, 3) for k, v in peers.items()},
           correct=f"largest relative error {max(wrong.values()):.1e}", tried={str(c): round(t, 4) for c, t in times.items()})  # fmt: skip
    return best


def unfused_gather(x, w):
    """Gather all rows, then one product."""
    import torch

    from weft.nn.over_peers import space_of

    space = space_of(None, x.device)
    world, rank = space.peers.world, space.peers.rank
    shards = space.rows(*x.shape, x.dtype)
    gathered = torch.empty(world, *x.shape, dtype=x.dtype, device=x.device)
    space.meet()
    for turn in range(world):
        gathered[(rank + turn) % world].copy_(shards[(rank + turn) % world])
    space.meet()
    return gathered.view(-1, x.shape[1]) @ w.T


def product_error(me: Rank, op: str, shape, x, w, got) -> float:
    """Largest relative error on 32 rows, against float32 products of every rank's operands."""
    import torch

    parts = []
    for r in range(me.world):
        other = object.__new__(Rank)
        other.rank, other.world, other.device = r, me.world, me.device
        parts.append(operands(other, op, shape))
    m = shape[0]
    if op == "gather_product":
        rows = torch.arange(0, m, max(1, m // 32), device=me.device)
        whole = torch.cat([a for a, _ in parts])[rows].float()
        want, have = whole @ w.float().T, got[0][rows].float()
    else:
        lo = me.rank * m // me.world if op == "product_reduce_scatter" else 0
        count = m // me.world if op == "product_reduce_scatter" else m
        rows = torch.arange(0, count, max(1, count // 32), device=me.device)
        want = sum(a[lo + rows].float() @ b.float().T for a, b in parts)
        have = got[rows].float()
    return ((have - want).abs().max() / want.abs().max()).item()


def torch_fused(me: Rank, op: str, x, w) -> float | None:
    """torch's own fused ops, where there is one."""
    import torch
    import torch.distributed as dist

    name = dist.group.WORLD.group_name
    calls = {
        "product_reduce_scatter": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.T, "sum", 0, name),
        "gather_product": lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w.T], 0, name),
    }
    if op not in calls:
        return None
    try:
        return me.time_ms(calls[op], 10, graph=False)
    except Exception as error:
        me.say(case=f"torch {op}", error=str(error)[:300])
        return None


def trace_overlap(me: Rank, way) -> None:
    """How much of the moving of data ran while a product ran, read off a profile of rank 0, at the largest shape."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from weft.nn import over_peers

    x, w = operands(me, "gather_product", SHAPES[-1])
    x = over_peers.space_of(None, me.device).rows(*x.shape, x.dtype)[me.rank].copy_(x)
    over_peers.gather_product(x, w, None, way, False)
    graph = torch.cuda.CUDAGraph()
    me.peers.barrier()
    with torch.cuda.graph(graph):
        over_peers.gather_product(x, w, None, way, False)
    graph.replay()
    me.peers.barrier()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            me.peers.barrier()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
        spans = device_spans(seen)
        moved = sum(b - a for a, b in spans["move"])
        both = sum(max(0, min(b, d) - max(a, c)) for a, b in spans["move"] for c, d in joined(spans["gemm"]))
        me.say(case="trace of gather_product", way=str(way), moves=len(spans["move"]), gemms=len(spans["gemm"]), moved_us=round(moved),
               while_a_product_ran_us=round(both), hidden=round(both / max(moved, 1), 3) if moved else None,
               products_that_carry_us=[round(b - a) for a, b in spans["carry"]])  # fmt: skip
        if me.rank == 0 and os.environ.get("OUT"):
            seen.export_chrome_trace(os.path.join(os.environ["OUT"], f"overlap_trace_{me.world}.json"))
    except Exception as error:
        me.say(case="trace", error=str(error)[:300])
    if way.by == "product":
        cost_of_carrying(me, x, w, way)
    me.peers.barrier()


def cost_of_carrying(me: Rank, x, w, way) -> None:
    """What the moving adds to the same products when they carry it, beside what it takes alone."""
    import torch

    from weft.nn import over_peers
    from weft.runtime import carry

    multiply, space = carry.multiply, over_peers.space_of(None, me.device)
    line = torch.zeros(2, carry.WIDTH, dtype=x.dtype, device=x.device)
    shards, gathered = space.rows(*x.shape, x.dtype), torch.empty(me.world, *x.shape, dtype=x.dtype, device=x.device)

    def bare() -> None:
        carry.multiply = lambda a, b, out, source, target, blocks: multiply(a, b, out, line[0], line[1], blocks)
        try:
            over_peers.gather_product(x, w, None, way, False)
        finally:
            carry.multiply = multiply

    def move() -> None:
        space.meet()
        for turn in range(1, me.world):
            gathered[(me.rank + turn) % me.world].copy_(shards[(me.rank + turn) % me.world])
        space.meet()

    ms = me.time_in_turn({"carrying": lambda: over_peers.gather_product(x, w, None, way, False), "bare": bare, "moving": move})
    me.say(case="cost of carrying", way=str(way), ms={k: round(v, 4) for k, v in ms.items()},
           hidden=round(1 - (ms["carrying"] - ms["bare"]) / ms["moving"], 3))  # fmt: skip


def device_spans(seen) -> dict[str, list[tuple[float, float]]]:
    """Start and end, in microseconds, of kernels that multiply, of those that move data, and of those that do both."""
    import torch

    kinds = {"gemm": ("gemm", "nvjet", "cutlass", "xmma"), "move": ("move", "memcpy"), "carry": ("multiply_carrying",)}
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 2:
            for kind, signs in kinds.items():
                if any(sign in event.name.lower() for sign in signs):
                    spans[kind].append((event.time_range.start, event.time_range.end))
    return spans


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time, none within another."""
    found: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], b))
        else:
            found.append((a, b))
    return found


# -- stage: hosts ----------------------------------------------------------------------------------------------------


def hosts(args) -> None:
    """Ranks as so many hosts over NCCL sockets: programs and optimizers give what they give over symmetric memory."""
    import torch
    import torch.distributed as dist

    from weft.runtime.peers import connect

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    connect(device="cuda")  # before they are hosts of their own, since what is compared needs their memory
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    me = object.__new__(Rank)
    me.rank, me.world, me.out, me.device = dist.get_rank(), dist.get_world_size(), args.out, torch.device("cuda", 0)
    optimizers_agree(me)
    programs_agree(me)


def programs_agree(me: Rank) -> None:
    """Examples and their schedules over NCCL, and some with their kernels over symmetric memory, against the interpreter."""
    import torch

    from weft import interp
    from weft.api.compiled import Compiled
    from weft.programs.catalog import EXAMPLES

    with_kernels = {("adamw", "fuse(RS-C-AG)"), ("lamb", "fuse(RS-C-AG)"), ("mlp", "MM-AR-C")}
    for name, example in EXAMPLES.items():
        for how, schedule in {"as written": lambda p: p, **example.schedules}.items():
            program = schedule(example.make())
            if program.mesh.ranks != me.world:
                continue
            given = spread_inputs(program)
            want = interp.run_ranks(program, given)
            bare = program.with_groups((), program, "no groups") if program.groups else program
            kinds = {"nccl": bare, **({"kernels": program} if (name, how) in with_kernels else {})}
            for kind, which in kinds.items():
                try:
                    got = Compiled(which, device="cuda")({k: v[me.rank].to(me.device) for k, v in given.items() if v[me.rank] is not None})
                    far = max(
                        ((got[k].cpu() - w[me.rank]).abs().max().item() for k, w in want.items() if w[me.rank] is not None), default=0.0
                    )
                    me.say(case=f"{name}, {how}, {kind}", error=far, correct=far < 1e-3)
                except Exception as error:
                    me.say(case=f"{name}, {how}, {kind}", error=f"{type(error).__name__} {str(error)[:300]}", correct=False)
                torch.cuda.synchronize()


def spread_inputs(program) -> dict:
    import torch

    from weft import interp

    gen = torch.Generator().manual_seed(0)
    out = {}
    for i, (name, n) in enumerate(program.input_names.items()):
        x = torch.randn(n.shape, generator=gen, dtype=torch.float64) if n.shape else torch.tensor(3.0)
        out[name] = interp.distribute((x.abs() if name.startswith("v.") else x).to(n.dtype), n.type, i)
    return out


def optimizers_agree(me: Rank) -> None:
    """The fused step over symmetric memory, and the same step over NCCL."""
    import copy

    import torch

    from weft import optim

    kinds = {
        "adamw": lambda p, **o: optim.AdamW(p, lr=1e-2, **o),
        "adamw clipped": lambda p, **o: optim.AdamW(p, lr=1e-2, eps=1e-4, max_norm=0.5, **o),
        "lamb": lambda p, **o: optim.Lamb(p, lr=1e-2, **o),
        "sgd": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, **o),
    }
    for name, kind in kinds.items():
        torch.manual_seed(0)
        a = torch.nn.Sequential(torch.nn.Linear(130, 77), torch.nn.GELU(), torch.nn.Linear(77, 50)).to(me.device)
        b = copy.deepcopy(a)
        x, y = kind(a.parameters(), over="peers"), kind(b.parameters(), over="group")
        for step in range(4):
            gen = torch.Generator(me.device).manual_seed(10 * step + me.rank)
            data = torch.randn(8, 130, generator=gen, device=me.device)
            for net, opt in ((a, x), (b, y)):
                opt.zero_grad()
                net(data).square().mean().backward()
                opt.step()
        far = max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))
        me.say(case=f"{name}: symmetric memory against nccl sockets", error=far, correct=far < 2e-5)


STAGES = {"optimizer": (optimizer, 200.0), "overlap": (overlap, 130.0), "gather": (gather, 100.0), "hosts": (hosts, 130.0)}

if __name__ == "__main__":
    main()
