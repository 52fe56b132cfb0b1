"""Passes of a pipeline in time and memory, whatever they were priced from: blocks of a stack, units of a program, or programs that run.

Stage g = chunk * ranks + rank. A pass waits for the one before it on the same stage and micro-batch, and for what other stages send it,
which is sent overlapped with compute on the link between two ranks, or keeps the sender busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from weft.cost.timeline import Task, Timeline

Pass = tuple[str, int, int]  # forward, backward or weight; chunk; micro-batch
Seconds = Callable[[int, str], float]  # of a pass of a stage
Routes = Callable[[int, str], Mapping[int, float]]  # the stages that read of a pass, and the seconds it is sent to each
BEFORE = {"forward": "", "backward": "forward", "weight": "backward"}
STEADY = 2  # rounds of micro-batches after which a pipeline repeats itself


def passes(orders: Sequence[Sequence[Pass]], seconds: Seconds, routes: Routes, overlap: bool = True, first: int = 0) -> list[Task]:
    """Every pass of every rank in its order, then what is sent, as tasks that are numbered from `first` on."""
    ranks = len(orders)
    keys = [(kind, chunk * ranks + rank, micro) for rank, order in enumerate(orders) for kind, chunk, micro in order]
    index: dict[Pass, int] = {key: i for i, key in enumerate(keys)}
    after: list[list[int]] = [[first + index[BEFORE[kind], g, micro]] if BEFORE[kind] else [] for kind, g, micro in keys]
    blocked, links = [0.0] * len(keys), list[Task]()
    several = any(chunk for order in orders for _, chunk, _ in order)
    sent = {(g, kind): routes(g, kind) for kind, g, _ in keys}
    for i, (kind, g, micro) in enumerate(keys):
        for reader, seconds_between in sent[g, kind].items():
            waits = after[index[kind, reader, micro]]
            if overlap and reader % ranks != g % ranks:
                waits.append(first + len(keys) + len(links))
                name = pass_name(kind, micro, g // ranks, several)
                links.append(Task(name, f"stage {g % ranks} to stage {reader % ranks}", seconds_between, (first + i,), "pp"))
            else:
                waits.append(first + i)
                blocked[i] += seconds_between if reader % ranks != g % ranks else 0.0
    made = [
        Task(pass_name(kind, micro, g // ranks, several), f"stage {g % ranks}", seconds(g, kind) + blocked[i], tuple(after[i]), kind)
        for i, (kind, g, micro) in enumerate(keys)
    ]
    return made + links


def pass_name(kind: str, micro: int, chunk: int, several: bool) -> str:
    return f"{kind} {micro}" + (f" of chunk {chunk}" if several else "")


def neighbours(places: Sequence[int], ranks: int, seconds_between: Callable[[int], float]) -> Routes:
    """Each stage reads of the next before it, and of the next behind it in the backward pass; `places` are their numbers, first to last, and
    `travels(k)` is of what lies behind the k-th."""
    at = {g: k for k, g in enumerate(places)}

    def routes(g: int, kind: str) -> Mapping[int, float]:
        k = at[g]
        reader, behind = {"forward": (k + 1, k), "backward": (k - 1, k - 1)}.get(kind, (-1, -1))
        return {places[reader]: seconds_between(behind) if ranks > 1 else 0.0} if 0 <= reader < len(places) else {}

    return routes


def repeated(at: Callable[[int], Timeline], ranks: int, micro: int) -> float:
    """Seconds of so many micro-batches; of a long row the beginning is simulated, and the rest repeats."""
    few = STEADY * ranks + micro % ranks
    more = few + ranks
    if more >= micro:
        return at(micro).seconds
    a, b = at(few), at(more)
    period = max(
        b.seconds - a.seconds, *(b.busy(f"stage {r}") - a.busy(f"stage {r}") for r in range(ranks))
    )  # none is done sooner than it is busy
    return b.seconds + period * (micro - more) / ranks


def kept_over(line: Timeline, rank: int, order: Sequence[Pass], kept: Sequence[float]) -> Iterator[tuple[int, Pass, float]]:
    """Each pass of a rank in time, as the number of its task, with what waits for later passes after it."""
    kinds = {kind for kind, *_ in order}
    own = sorted((i for i in line.on(f"stage {rank}") if line.tasks[i].cause in kinds), key=line.start.__getitem__)
    yield from zip(own, order, waiting(order, kept), strict=True)


def waiting(order: Sequence[Pass], kept: Sequence[float]) -> Iterator[float]:
    """What waits for later passes of a rank after each of its own; `kept` by a forward of each chunk until its last pass."""
    frees, now = "weight" if any(kind == "weight" for kind, *_ in order) else "backward", 0.0
    for kind, chunk, _ in order:
        now += kept[chunk] * ((kind == "forward") - (kind == frees))
        yield now
