"""Four ranks on one GPU: training steps against DDP and FSDP2, a Llama block against torch's tensor parallelism.

    python bench/gpu_ranks.py [--stages hosts,symmetric,inference] [--ranks 4] [--plans "dp4;dp4,zero1 lanes2"] [--device cuda] [--quick]

`hosts`: every rank is a host of its own to NCCL, which then uses sockets. `symmetric`: ranks map each other's memory, and torch's
ways have their collectives replaced by ones over the same memory. Starts MPS and its own ranks, one stage after the other, each
in processes of its own with a limit; every row is printed as soon as it is measured, values are compared before times. With
`--device cpu` the same code runs over gloo, to see that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMITS = {"hosts": 300.0, "symmetric": 300.0, "inference": 220.0}
GPT = {"cuda": {"layers": 4, "hidden": 768, "heads": 12, "vocab": 8192, "seq": 512, "batch": 8},
       "cpu": {"layers": 1, "hidden": 32, "heads": 2, "vocab": 64, "seq": 8, "batch": 2}}  # fmt: skip
BLOCK = {"cuda": {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 256, "seq": 2048},
         "cpu": {"hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64, "seq": 64}}  # fmt: skip
CALLS = {"decode x1": (1, 1), "decode x16": (16, 1), "prefill 2048": (1, 2048)}  # batch, new tokens


# -- the parent: MPS, ranks, limits ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mps(device: str) -> Iterator[dict[str, str]]:
    """Ranks that share a GPU run at the same time only under MPS; a new one for every stage, so that none inherits a failure."""
    folders = [tempfile.mkdtemp() for _ in range(3)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
           "CUDA_MPS_PIPE_DIRECTORY": folders[0], "CUDA_MPS_LOG_DIRECTORY": folders[1], "TORCHINDUCTOR_CACHE_DIR": folders[2],
           "TORCHINDUCTOR_COMPILE_THREADS": "4"}  # fmt: skip
    if device == "cuda":
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True, timeout=30)
    try:
        yield env
    finally:
        if device == "cuda":
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=env, timeout=20, check=False)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def run_stage(stage: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """One stage in its own ranks; what it has said by its limit is kept."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start, logs = time.time(), [folder / f"{r}.log" for r in range(ranks)]
    command = [sys.executable, __file__, "--child", stage, "--out", str(folder / "rows"), "--device", args.device]
    command += ["--rounds", str(args.rounds), "--plans", args.plans, *(["--quick"] if args.quick else [])]
    with mps(args.device) as env:
        where = {**env, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for r in range(ranks):
            with logs[r].open("w") as log:
                processes.append(subprocess.Popen(command, env={**where, "RANK": str(r)}, stdout=log, stderr=log, start_new_session=True))
        status = _ended(processes, start + LIMITS[stage], folder / "rows")
    rows = [json.loads(line) for line in (folder / "rows").read_text().splitlines()] if (folder / "rows").exists() else []
    result = {"stage": stage, "ranks": ranks, "status": status, "seconds": round(time.time() - start, 1), "rows": rows}
    if status != "ok":
        result["logs"] = {r: logs[r].read_text()[-1500:] for r in (0, 1)}
        print(json.dumps({k: v for k, v in result.items() if k != "rows"}), flush=True)
    return result


def _ended(processes: list[subprocess.Popen[bytes]], deadline: float, rows: Path) -> str:
    """Wait for all, showing rows as they come; when one fails or the time is up, end the rest."""
    shown = 0
    try:
        while True:
            text = rows.read_text() if rows.exists() else ""
            print(text[shown:], end="", flush=True)
            shown = len(text)
            codes = [p.poll() for p in processes]
            if all(c == 0 for c in codes):
                return "ok"
            if any(codes):
                return f"rank {next(r for r, c in enumerate(codes) if c)} ended with {next(c for c in codes if c)}"
            if time.time() > deadline:
                return "stopped at its limit"
            time.sleep(0.2)
    finally:
        for p in processes:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="hosts,symmetric,inference")
    parser.add_argument("--ranks", default="4", help="of training; inference runs on 2 and on so many")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plans", default="", help="with semicolons between; ` lanesN` after one: its messages over N groups, not as measured")
    parser.add_argument("--quick", action="store_true", help="fewer plans and calls")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    ranks = int(args.ranks)
    turns = [(s, r) for s in args.stages.split(",") for r in (sorted({2, ranks}) if s == "inference" else [ranks])]
    results = [run_stage(stage, r, args) for stage, r in turns]
    print(json.dumps({"bench": "gpu_ranks", "device": args.device, "stages": results}), flush=True)


# -- a rank ------------------------------------------------------------------------------------------------------------------------


class Rank:
    """This process among the ranks: where it runs, how the ranks agree on the host, and what rank 0 writes."""

    def __init__(self, args: argparse.Namespace, backend: str) -> None:
        import torch
        import torch.distributed as dist

        self.cuda, self.out, self.rounds, self.quick, self.plans = args.device == "cuda", args.out, args.rounds, args.quick, args.plans
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(0)
            torch.zeros(1, device="cuda")
            torch.set_float32_matmul_precision("high")
        else:
            torch.set_num_threads(1)
        dist.init_process_group(backend if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.host = dist.new_group(backend="gloo")

    def say(self, **row: Any) -> None:
        if self.rank == 0:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        import torch
        import torch.distributed as dist

        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier(self.host)

    def all(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.host)
        return found

    def tried(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, or None on every rank when one of them failed; which is then said."""
        start, failed, made = time.time(), "", None
        try:
            made = make()
            self.finish()
        except Exception as e:
            failed = f"{type(e).__name__}: {e}"[:500] + traceback.format_exc()[-900:]
        wrong = [w for w in self.all(failed) if w]
        if wrong:
            self.say(case=name, failed=wrong[0], seconds=round(time.time() - start, 1))
            return None
        self.say(note=f"{name} is ready", seconds=round(time.time() - start, 1))
        return made

    def finish(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def time_in_turn(self, ways: dict[str, Callable[[], Any]], calls: int = 1) -> dict[str, float]:
        """Median milliseconds of each on its slowest rank; a round takes all in turn, so all see the same machine."""
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.rounds + 1):
            for name, way in ways.items():
                self.sync()
                start = time.perf_counter()
                for _ in range(calls):
                    way()
                self.finish()
                if turn:
                    took[name].append((time.perf_counter() - start) / calls)
        each = self.all({name: took[name] for name in ways})
        slowest = {name: [max(rank[name][k] for rank in each) for k in range(self.rounds)] for name in ways}
        return {name: round(1e3 * statistics.median(seconds), 4) for name, seconds in slowest.items()}


def child(args: argparse.Namespace) -> None:
    os.environ["LOCAL_RANK"] = "0"
    if args.child == "hosts":
        os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    me = Rank(args, "cpu:gloo,cuda:nccl" if args.child == "hosts" else "gloo")
    {"hosts": train, "symmetric": train, "inference": inference}[args.child](me, args.child)
    me.sync()
    sys.stdout.flush()
    os._exit(0)  # groups over four kinds of memory are not worth taking apart


# -- training ----------------------------------------------------------------------------------------------------------------------

Step = Callable[[Any], Any]  # from a global batch to the loss, of this rank's part or of all


def train(me: Rank, stage: str) -> None:
    import torch

    from weft.frontend import zoo

    sizes = dict(GPT["cuda" if me.cuda else "cpu"])
    batch = sizes.pop("batch") * me.world
    w = zoo.get("gpt2", device="cpu", dropout=0.0, **sizes)
    batches = [{k: v.to(me.device) for k, v in w.example(batch, seed=i).items()} for i in range(3)]
    count = sum(p.numel() for p in w.model.parameters())
    gpu = torch.cuda.get_device_name() if me.cuda else "none"
    me.say(case="machine", stage=stage, gpu=gpu, torch=torch.__version__, world=me.world, parameters=count, batch=batch, **sizes)
    over = Memory(me) if stage == "symmetric" else None
    peers: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    for name, make in {"ddp": ddp, "fsdp2": fsdp2, "ddp compiled": compiled_ddp}.items():
        if name != "ddp compiled" or over is not None and me.cuda and not me.quick:
            add(me, name, lambda make=make: make(me, w, over), batches, peers, losses)  # type: ignore[misc]
    n = me.world
    plans = [f"dp{n}", f"dp{n},zero1", *([] if me.quick else [f"dp{n},zero3"])]
    for plan in me.plans.split(";") if me.plans else plans:
        ours: dict[str, Step] = {}
        add(me, f"weft {plan}", lambda plan=plan: weft_step(me, w, plan, batches[0]), batches, ours, losses)  # type: ignore[misc]
        for name, step in ours.items():
            row(me, f"{stage} gpt x{n} {plan}", name, step, peers, batches[0], losses)
        ours.clear()


def add(me: Rank, name: str, make: Callable[[], Step], batches: list[Any], into: dict[str, Step], losses: dict[str, list[float]]) -> None:
    """Make a way, take three steps, and keep it if its losses are those of the first one made."""

    def started() -> tuple[Step, list[float]]:
        step = make()
        return step, [float(step(b)) for b in batches]

    made = me.tried(name, started)
    if made is None:
        return
    step, mine = made
    losses[name] = [statistics.fmean(each) for each in zip(*me.all(mine), strict=True)]
    first = next(iter(losses.values()))
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses[name], first, strict=True))
    if apart > 2e-3:
        me.say(case=name, failed="other losses", losses=losses[name], wanted=first)
        return
    for b in batches:
        step(b)
    into[name] = step


def row(me: Rank, case: str, name: str, step: Step, peers: dict[str, Step], batch: Any, losses: dict[str, list[float]]) -> None:
    ways = {n: (lambda s=s: s(batch)) for n, s in {name: step, **peers}.items()}
    took = me.time_in_turn(ways)
    ours, theirs = took[name], {n: took[n] for n in peers}
    first = next(iter(losses))
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[first], strict=True))
    how = getattr(step, "how", lambda: "")()
    me.say(case=case, weft_ms=ours, peers_ms=theirs, ratios={n: round(ms / ours, 4) for n, ms in theirs.items()}, how=how,
           correct=f"losses of three steps equal {first}'s to {apart:.1e}")  # fmt: skip


class weft_step:
    def __init__(self, me: Rank, w: Any, plan: str, example: Any) -> None:
        import torch

        from weft.api.parallelize import parallelize

        plan, _, lanes = plan.partition(" lanes")
        os.environ["WEFT_LANES"] = lanes  # groups over which messages are sent in turn; none said, as measured
        model = copy.deepcopy(w.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        example = {k: v.cpu() for k, v in example.items()}
        self.step = parallelize(model, w.loss, optimizer, example, plan=plan, device=me.device.type)

    def __call__(self, batch: Any) -> Any:
        return self.step(batch)

    def how(self) -> str:
        return self.step.compiled.how


def _loop(me: Rank, model: Any, loss: Any, opt: Any) -> Step:
    def step(batch: Any) -> Any:
        opt.zero_grad()
        value = loss(model, {k: v.chunk(me.world)[me.rank] for k, v in batch.items()})
        value.backward()
        opt.step()
        return value.detach()

    return step


def ddp(me: Rank, w: Any, over: Memory | None, compiled: bool = False) -> Step:
    """DistributedDataParallel and torch's fused AdamW; over symmetric memory by a communication hook."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model: Any = DistributedDataParallel(copy.deepcopy(w.model).to(me.device), gradient_as_bucket_view=True)
    if over is not None:
        model.register_comm_hook(None, over.hook)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return _loop(me, torch.compile(model) if compiled else model, w.loss, opt)


def compiled_ddp(me: Rank, w: Any, over: Memory | None) -> Step:
    return ddp(me, w, over, compiled=True)


def fsdp2(me: Rank, w: Any, over: Memory | None) -> Step:
    """fully_shard per block and over the whole; over symmetric memory by custom collectives."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model, mesh = copy.deepcopy(w.model).to(me.device), DeviceMesh.from_group(dist.group.WORLD, me.device.type)
    for blocks in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if over is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                over.install(module)
    return _loop(me, model, w.loss, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=me.cuda))


# -- torch's collectives over symmetric memory ---------------------------------------------------------------------------------------


class Memory:
    """What torch's ways are given in place of NCCL: its own ops over symmetric memory; on a CPU gloo's, to see that it runs."""

    def __init__(self, me: Rank) -> None:
        import torch.distributed as dist

        self.me, self.group = me, dist.group.WORLD
        self._buffers: dict[Any, Any] = {}

    def buffer(self, key: Any, count: int, dtype: Any) -> tuple[Any, Any]:
        """A buffer of at least so many elements on every rank, and its handle. All ranks ask for the same ones in the same order."""
        import torch

        unit = 64 * self.me.world
        if (key, count, dtype) not in self._buffers:
            padded = -(-count // unit) * unit
            if self.me.cuda:
                import torch.distributed._symmetric_memory as symm_mem

                made = symm_mem.empty(padded, dtype=dtype, device=self.me.device)
                self._buffers[key, count, dtype] = made.zero_(), symm_mem.rendezvous(made, self.group)
            else:
                self._buffers[key, count, dtype] = torch.zeros(padded, dtype=dtype), None
        return self._buffers[key, count, dtype]

    def sum(self, x: Any) -> Any:
        """All ranks' buffers summed in place."""
        import torch
        import torch.distributed as dist

        if self.me.cuda:
            return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", self.group.group_name)
        dist.all_reduce(x)
        return x

    def hook(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and takes no other than its own
        import torch

        grads = bucket.buffer()
        buffer, _ = self.buffer(("ddp", bucket.index()), grads.numel(), grads.dtype)
        torch.mul(grads, 1 / self.me.world, out=buffer[: grads.numel()])
        done: Any = torch.futures.Future(devices=[self.me.device] if self.me.cuda else [])
        done.set_result(self.sum(buffer)[: grads.numel()])
        return done

    def install(self, module: Any) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

        memory = self

        class Gather(AllGather):
            def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
                import torch

                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
                memory.gather(output_tensor, input_tensor)

        class Scatter(ReduceScatter):
            allocate = Gather.allocate

            def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
                memory.scatter(output_tensor, input_tensor, "AVG" in str(op))

        module.set_custom_all_gather(Gather())
        module.set_custom_reduce_scatter(Scatter())

    def gather(self, out: Any, mine: Any) -> None:
        import torch
        import torch.distributed as dist

        if not self.me.cuda:
            dist.all_gather_into_tensor(out, mine.clone())
            return
        count = mine.numel()
        buffer, handle = self.buffer("gather", count, mine.dtype)
        buffer[:count].copy_(mine.view(-1))
        handle.barrier(channel=0)
        torch.cat([handle.get_buffer(r, (count,), mine.dtype) for r in range(self.me.world)], out=out.view(-1))
        handle.barrier(channel=1)

    def scatter(self, out: Any, whole: Any, mean: bool) -> None:
        import torch
        import torch.distributed as dist

        count = out.numel()
        if not self.me.cuda:
            total = whole.clone()
            dist.all_reduce(total)
            out.copy_(total.view(-1)[self.me.rank * count : (self.me.rank + 1) * count].view(out.shape))
        else:
            buffer, handle = self.buffer("scatter", whole.numel(), whole.dtype)
            buffer[: whole.numel()].copy_(whole.view(-1))
            handle.barrier(channel=0)
            terms = [handle.get_buffer(r, (count,), whole.dtype, self.me.rank * count) for r in range(self.me.world)]
            total = torch.add(terms[0], terms[1], out=out.view(-1))
            for term in terms[2:]:
                total.add_(term)
            handle.barrier(channel=1)
        if mean:
            out.div_(self.me.world)


# -- inference ---------------------------------------------------------------------------------------------------------------------


def inference(me: Rank, stage: str) -> None:
    """A Llama of one block under tensor parallelism, over symmetric memory; small calls are replayed from graphs on both sides."""
    import torch

    from weft.frontend import zoo

    sizes = BLOCK["cuda" if me.cuda else "cpu"]
    w = zoo.get("llama3-8b", device="cpu", layers=1, **sizes)
    model = w.model.eval()
    dtype = torch.bfloat16
    model = model.to(dtype)
    gpu = torch.cuda.get_device_name() if me.cuda else "none"
    me.say(case="machine", stage=stage, gpu=gpu, torch=torch.__version__, world=me.world, dtype=str(dtype), **sizes)
    over = Memory(me)
    for case, (batch, tokens) in CALLS.items():
        tokens = min(tokens, sizes["seq"])
        gen = torch.Generator().manual_seed(1)
        x = torch.randint(0, sizes["vocab"], (batch, tokens), generator=gen).to(me.device)
        makers = {"weft": lambda x=x: ours(me, model, x), "torch tp": lambda: theirs(me, model, over, False)}
        if me.cuda and not me.quick:
            makers["torch tp compiled"] = lambda: theirs(me, model, over, True)
        call(
            me,
            f"llama block tp{me.world} {case}",
            {n: me.tried(f"{n}, {case}", lambda m=m, x=x: started(m, x)) for n, m in makers.items()},
            x,
        )


def started(make: Callable[[], Callable[[Any], Any]], x: Any) -> Callable[[Any], Any]:
    run = make()
    for _ in range(3):
        run(x)
    return run


def call(me: Rank, case: str, ways: dict[str, Any], x: Any) -> None:
    import torch

    ways = {n: way for n, way in ways.items() if way is not None}
    if len(ways) < 2 or "weft" not in ways:
        return
    results = {n: way(x).float().clone() for n, way in ways.items()}
    last = next(n for n in ways if n != "weft")
    apart = max(me.all(float((results["weft"] - results[last]).abs().max() / results[last].abs().max())))
    if not apart < 3e-2:
        me.say(case=case, failed=f"results differ by {apart:.1e}")
        return
    graphs = {}
    for n, way in ways.items():
        graphs[n] = me.tried(f"{n} recorded, {case}", lambda way=way: recorded(me, way, x)) or (lambda way=way: way(x))
    kinds = {"graph": graphs, "call": {n: (lambda way=way: way(x)) for n, way in ways.items()}}
    took = {kind: me.time_in_turn(some, calls=20 if me.cuda else 2) for kind, some in kinds.items()}
    for kind, ms in took.items():
        peers = {n: t for n, t in ms.items() if n != "weft"}
        me.say(case=f"{case}, {kind}", weft_ms=ms["weft"], peers_ms=peers, ratios={n: round(t / ms["weft"], 4) for n, t in peers.items()},
               correct=f"results equal to {apart:.1e}")  # fmt: skip
    torch.cuda.empty_cache() if me.cuda else None


def recorded(me: Rank, way: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    """The call as a CUDA graph."""
    import torch

    if not me.cuda:
        return lambda: way(x)
    graph = torch.cuda.CUDAGraph()
    me.sync()
    with torch.no_grad(), torch.cuda.graph(graph):
        way(x)
    me.sync()
    graph.replay()
    return graph.replay


def ours(me: Rank, model: Any, x: Any) -> Callable[[Any], Any]:
    from weft.api.compile import compile as weft_compile

    run = weft_compile(copy.deepcopy(model), f"tp{me.world}", x.cpu(), device=me.device.type)
    return lambda x: next(iter(run(x).values()))


def theirs(me: Rank, model: Any, over: Memory, compiled: bool) -> Callable[[Any], Any]:
    """torch's tensor parallelism: columns, then rows, of each linear on this rank, and its sum over symmetric memory."""
    import torch

    model = copy.deepcopy(model).to(me.device)
    block = model.blocks[0]
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        _cut(block.get_submodule(name), 0, me)
    for name in ("attention.o", "mlp.down"):
        linear = block.get_submodule(name)
        _cut(linear, 1, me)
        linear.forward = _then_summed(me, linear, over, name)
    run = torch.compile(model) if compiled else model

    def once(x: Any) -> Any:
        with torch.no_grad():
            return run(x)

    return once


def _cut(linear: Any, dim: int, me: Rank) -> None:
    import torch

    linear.weight = torch.nn.Parameter(linear.weight.chunk(me.world, dim)[me.rank].contiguous(), requires_grad=False)


def _then_summed(me: Rank, linear: Any, over: Memory, name: str) -> Callable[[Any], Any]:
    import torch
    import torch.nn.functional as F

    def forward(x: Any) -> Any:
        y = F.linear(x, linear.weight)
        buffer, _ = over.buffer(name, y.numel(), y.dtype)
        if not me.cuda:
            return over.sum(y.clone())
        buffer[: y.numel()].copy_(y.reshape(-1))
        group = over.group.group_name
        if y.numel() * y.element_size() <= 1 << 18:
            return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group)[: y.numel()].view(y.shape)
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group)[: y.numel()].view(y.shape).clone()

    return forward


if __name__ == "__main__":
    main()
