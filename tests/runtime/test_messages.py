"""What pipeline stages send each other can be taken in by a backend that buffers nothing: no schedule waits in a circle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.api.runner import Runner
from weft.plan.schedules import SCHEDULES
from weft.runtime import messages
from weft.runtime.messages import Messages, Rehearsal

Post = tuple[str, Any]  # what a rank asks of the backend: a kind, and the channel or the number of what it waits for


class Backend:
    """Takes down what a rank posts, and lets nothing wait."""

    def __init__(self, rank: int) -> None:
        self.rank, self.posts, self.number = rank, list[Post](), itertools.count()
        self.group = SimpleNamespace(WORLD=object())

    def get_rank(self) -> int:
        return self.rank

    def new_subgroups_by_enumeration(self, lines: Any) -> tuple[Any, None]:
        return object(), None

    def _post(self, kind: str, x: torch.Tensor, channel: tuple[int, int]) -> Any:
        number = next(self.number)
        self.posts.append((kind, (channel, number, tuple(x.shape))))
        return SimpleNamespace(wait=lambda: self.posts.append(("wait", number)), is_completed=lambda: False)

    def isend(self, x: torch.Tensor, to: int, group: Any = None) -> Any:
        return self._post("send", x, (self.rank, to))

    def irecv(self, x: torch.Tensor, source: int, group: Any = None) -> Any:
        return self._post("recv", x, (source, self.rank))

    def send(self, *args: Any, group: Any = None) -> None:
        self.isend(*args).wait()

    def recv(self, *args: Any, group: Any = None) -> None:
        self.irecv(*args).wait()


def stage(g: int, ranks: int, last: int, skip: bool, weights: bool, number: int = -1) -> Any:
    """The g-th stage, which reads the one before it and, with `skip`, the first; its message has g + 1 elements. `number` where that is not g."""
    reads = sorted({g - 1, 0} if skip and g else {g - 1} if g else set())
    forward = {f"act.{g}": None} if g < last else {"loss": None}
    backward = {f"d.act.{r}.{g}": None for r in reads}
    turns = [SimpleNamespace(output_names=forward, input_names={f"act.{r}": None for r in reads}, state=())]
    turns += [SimpleNamespace(output_names={**backward, "d.param.w": None}, input_names={}, state=())]
    turns += [SimpleNamespace(output_names={"d.param.w": None}, input_names={}, state=())] if weights else []
    passing = [f"act.{r}" for r in reads] + list(forward) + list(backward) + [f"d.act.{g}.{r}" for r in range(last + 1)]
    types = {
        n: SimpleNamespace(layout=SimpleNamespace(local_shape=lambda _, n=n: shape(n)), dtype=torch.float32) for n in passing if "act" in n
    }
    return SimpleNamespace(
        number=g if number < 0 else number,
        rank=(g if number < 0 else number) % ranks,
        phases=turns,
        types=types,
        gives=lambda turn, kind: [n for n in turns[turn].output_names if n.startswith(kind)],
    )


def shape(name: str) -> tuple[int, ...]:
    return (int(name.removeprefix("d.").split(".")[1]) + 1,) if "act" in name else (1,)


class Played(Runner):
    """One rank's part with nothing to compute."""

    def _compiled(self, program: Any) -> Any:
        return SimpleNamespace(program=program)


def played(rank: int, stages: list[Any], orders: Any, given: Any) -> Played:
    mesh = SimpleNamespace(rank=lambda coords: coords["pp"])
    like: Any = SimpleNamespace(coords={"pp": rank}, program=SimpleNamespace(mesh=mesh), device=torch.device("cpu"))
    runner = Played(stages, orders, like, given)
    runner.call = lambda _g, _action, step, _given: {n: torch.zeros(shape(n)) for n in step.program.output_names}
    return runner


def replay(posts: list[list[Post]]) -> list[str]:
    """Where ranks stand in the end when a send is over only once its receive is asked for and the other way round, in the order of each
    channel. Sends and receives go on beside what a rank does; a rank stands still only where it waits for one."""
    at, done = [0] * len(posts), [set[int]() for _ in posts]
    asked: dict[Any, list[tuple[int, int, Any]]] = {}
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(posts):
            while at[rank] < len(own):
                kind, what = own[at[rank]]
                if kind == "wait" and what not in done[rank]:
                    break
                if kind != "wait":
                    channel, number, size = what
                    asked.setdefault((kind, channel), []).append((rank, number, size))
                    count, other = len(asked[kind, channel]), asked.get(("recv" if kind == "send" else "send", channel), [])
                    if len(other) >= count:
                        peer, theirs, expected = other[count - 1]
                        assert expected == size, f"{channel}: {size} meets {expected}"
                        done[rank].add(number)
                        done[peer].add(theirs)
                at[rank], moved = at[rank] + 1, True
    return [f"rank {r} at {posts[r][k]}" for r, k in enumerate(at) if k < len(posts[r])]


def cases() -> Iterator[tuple[str, int, int, int]]:
    for name, schedule in SCHEDULES.items():
        for ranks, micro, chunks in itertools.product((2, 3, 4, 8), (1, 4, 6, 8, 16), (1, 2)):
            if schedule.may_take(ranks, micro) and (chunks == 2 if schedule.folded else chunks == 1 or schedule.takes_chunks):
                yield name, ranks, micro, chunks


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("skip", [False, True])
def test_no_schedule_waits_in_a_circle(ahead: int, skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "reach", lambda group, device: torch.device("cpu"))
    monkeypatch.setattr(messages, "AHEAD", ahead)
    seen = 0
    for name, ranks, micro, chunks in cases():
        schedule = SCHEDULES[name]
        places = schedule.places(ranks, chunks)
        stages = [stage(k, ranks, ranks * chunks - 1, skip, schedule.defers_weights, g) for k, g in enumerate(places)]
        stages.sort(key=lambda s: s.number)
        orders = schedule.orders(ranks, micro, chunks)
        posts = []
        for rank in range(ranks):
            backend = Backend(rank)
            monkeypatch.setattr(messages, "dist", backend)
            runner = played(rank, stages, orders, Messages([range(ranks)], torch.device("cpu")))
            for _ in range(2):
                runner.run({}, lambda _: {})
            posts.append(backend.posts)
        assert replay(posts) == [], f"{name}, {ranks} stages, {micro} micro-batches, {chunks} chunks"
        seen += sum(len(p) for p in posts)
    assert seen > 10_000


def test_the_replay_finds_a_circle() -> None:
    """Two ranks that wait for what they sent before they receive, and two that do not."""
    send, recv = ([("send", ((r, 1 - r), 0, ())) for r in range(2)], [("recv", ((1 - r, r), 1, ())) for r in range(2)])
    assert len(replay([[send[r], ("wait", 0), recv[r], ("wait", 1)] for r in range(2)])) == 2
    assert replay([[send[r], recv[r], ("wait", 0), ("wait", 1)] for r in range(2)]) == []


def test_kernels_are_loaded_before_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages wait on the device every pass is run once without them, and state is left as it was."""
    backend = Backend(1)
    monkeypatch.setattr(messages, "reach", lambda group, device: torch.device("cpu"))
    monkeypatch.setattr(messages, "dist", backend)
    schedule = SCHEDULES["1f1b"]
    given = Messages([range(2)], torch.device("cpu"))
    given.on_device = True
    joined, calls = len(backend.posts), list[Any]()
    runner = played(1, [stage(g, 2, 1, False, False) for g in range(2)], schedule.orders(2, 2), given)
    usual = runner.call

    def call(g: int, action: Any, step: Any, values: Any) -> Any:
        calls.append((action, type(runner.messages), len(backend.posts) - joined))
        return usual(g, action, step, values)

    runner.call = call
    runner.run({}, lambda _: {})
    runner.run({}, lambda _: {})
    kinds = [kind for _, kind, _ in calls]
    assert kinds == [Rehearsal] * 4 + [Messages] * 8
    assert all(posted == 0 for _, kind, posted in calls if kind is Rehearsal)
    assert [a for a, _, _ in calls[:4]] == [a for a, _, _ in calls[4:8]] == list(schedule.orders(2, 2)[1])
