"""One rank of a benchmark on a GPU, started by `bench._gpu`: what it says, how ranks agree, and how they time things together.

Ways that are compared are timed in turn, round after round, since a GPU under load lowers its clock. Of each round the slowest rank
counts; of all rounds the median.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.runtime import faults

Call = Callable[[], Any]
LONG = 4.0  # milliseconds: ranks set out up to a tenth of one apart, and only where all are at work do they share the device


class Rank:
    """This process among those of the benchmark."""

    def __init__(self, backend: str, device: str, out: Path) -> None:
        self.cuda, self.out = device == "cuda", out
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(0)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(backend if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.host = dist.new_group(backend="gloo")
        gpu = {"gpu": torch.cuda.get_device_name()} if self.cuda else {}
        self.say(machine={**gpu, "torch": torch.__version__, "ranks": self.world})

    def become_host(self) -> None:
        """From now on NCCL takes this rank for a host of its own, and joins it to the others by sockets."""
        os.environ["NCCL_HOSTID"] = f"host-{self.rank}"

    def say(self, **row: Any) -> None:
        """A row of the result, from rank 0, written at once."""
        if self.rank == 0:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    # -- agreement -------------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """All work of all ranks is done."""
        self.finish()
        dist.barrier(self.host)

    def finish(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def all(self, value: Any) -> list[Any]:
        """What every rank gives, in rank order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.host)
        return found

    def worst(self, value: float) -> float:
        """The largest over all ranks; no number at all is larger than any."""
        return max(self.all(value), key=lambda x: (x != x, x))

    def tried(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, or None on every rank when one of them failed; which is then said."""
        start, failed, made = time.time(), "", None
        try:
            made = make()
            self.finish()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"[:500] + traceback.format_exc()[-900:]
            print(f"{name}: {failed}", file=sys.stderr, flush=True)  # others may wait where this rank never comes
        wrong = [why for why in self.all(failed) if why]
        if wrong:
            self.say(case=name, failed=wrong[0], seconds=round(time.time() - start, 1))
            return None
        self.say(note=f"{name} is ready", seconds=round(time.time() - start, 1))
        return made

    # -- time ------------------------------------------------------------------------------------------------------------------

    def time_calls(self, ways: Mapping[Any, Call], rounds: int = 10, calls: int = 1) -> dict[Any, float]:
        """Milliseconds of a call, host and device together."""

        def clock(way: Call) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                way()
            self.finish()
            return 1e3 * (time.perf_counter() - start) / calls

        return self._in_turn(ways, rounds, clock)

    def time_graphs(self, ways: Mapping[Any, Call], rounds: int = 7, calls: int = 5) -> dict[Any, float]:
        """Milliseconds of a call on the device, replayed from a graph of several as often as it takes to outlast the ranks' unequal starts."""
        pool = torch.cuda.graph_pool_handle()  # one for all: no result outlives its replay
        graphs = {name: self.recorded(way, calls, pool) for name, way in ways.items()}
        first = self._in_turn(graphs, 1, on_device)
        often = {name: math.ceil(LONG / max(ms, LONG / 1000)) for name, ms in first.items()}
        repeated = {name: functools.partial(repeat, replay, often[name]) for name, replay in graphs.items()}
        return {name: ms / (calls * often[name]) for name, ms in self._in_turn(repeated, rounds, on_device).items()}

    def _in_turn(self, ways: Mapping[Any, Call], rounds: int, clock: Callable[[Call], float]) -> dict[Any, float]:
        took: dict[Any, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                self.sync()
                ms = clock(way)
                if turn:
                    took[name].append(ms)
        slowest = [max(each, default=0.0) for each in zip(*self.all([ms for times in took.values() for ms in times]), strict=True)]
        return {name: statistics.median(slowest[k * rounds : (k + 1) * rounds]) for k, name in enumerate(ways)}

    def recorded(self, way: Call, calls: int = 1, pool: Any = None) -> Call:
        """So many calls as one graph; where there are none, the calls."""
        if not self.cuda:
            return lambda: [way() for _ in range(calls)]
        with torch.no_grad():
            way()
            self.sync()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                for _ in range(calls):
                    way()
        self.sync()
        graph.replay()
        return graph.replay


def repeat(work: Call, times: int) -> None:
    for _ in range(times):
        work()


def on_device(work: Call) -> float:
    """Milliseconds between two events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def rounded(ms: Mapping[Any, float]) -> dict[str, float]:
    return {str(name): round(t, 5) for name, t in ms.items()}


def timed_row(case: str, ms: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """A row of the result from the times of `weft` and of its peers."""
    ours, peers = ms["weft"], {name: t for name, t in ms.items() if name != "weft"}
    ratios = {name: round(t / ours, 3) for name, t in peers.items()}
    return {"case": case, "weft_ms": round(ours, 5), "peers_ms": rounded(peers), "ratios": ratios, **more}


def main() -> None:
    module, work, backend, device, out, settings = sys.argv[1:]
    faulthandler.dump_traceback_later(float(os.environ["WEFT_BENCH_LIMIT"]) - 5, exit=False)  # where a rank that never ends stands
    me = Rank(backend, device, Path(out))
    try:
        getattr(importlib.import_module(module), work)(me, **json.loads(settings))
        me.sync()
    except RuntimeError as error:
        if not faults.is_lost_connection(error):
            raise
        traceback.print_exc()
        sys.exit(faults.LOST_A_PEER)
    sys.stdout.flush()
    os._exit(0)  # groups over several kinds of memory are not worth taking apart


if __name__ == "__main__":
    main()
