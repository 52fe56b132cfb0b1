"""One rank of a pipeline at work: it takes up what the schedule says, in order, and passes values on to the other stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.api.compiled import Compiled
from weft.core.errors import PlanError
from weft.plan.schedules import Action, Order
from weft.plan.split import LOSS_SUM
from weft.runtime.messages import Messages, Rehearsal, Spec
from weft.runtime.trace import synchronize
from weft.transform.pipeline import PlacedStage

Values = dict[str, Tensor]
Call = Callable[[int, Action, Compiled, Values], Values]  # runs a pass of a stage


def routes(stages: Sequence[PlacedStage]) -> dict[tuple[int, str], dict[int, list[str]]]:
    """By stage and kind of pass the stages that read what it makes, and what of it."""
    makers = {n: s.number for s in stages for n in s.types if n in s.phases[0].output_names}
    found: dict[tuple[int, str], dict[int, list[str]]] = {(s.number, k): {} for s in stages for k in ("forward", "backward", "weight")}
    for s in stages:
        for name in s.gives(0, "act."):
            for reader in stages:
                if name in reader.types and reader is not s:
                    found[s.number, "forward"].setdefault(reader.number, []).append(name)
        for name in s.gives(1, "d.act.") if len(s.phases) > 1 else ():
            found[s.number, "backward"].setdefault(makers[name.removeprefix("d.").rsplit(".", 1)[0]], []).append(name)
    return found


def require_an_end(found: Mapping[tuple[int, str], Mapping[int, list[str]]], orders: Sequence[Order]) -> None:
    """Every rank gets to the end of its order: what a pass waits for is sent by a pass that waits for none behind it."""
    at, sent = [0] * len(orders), set[tuple[str, int, int, int]]()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                a = order[at[rank]]
                g = a.chunk * len(orders) + rank
                if any(g in to and (a.kind, s, g, a.micro) not in sent for (s, kind), to in found.items() if kind == a.kind):
                    break
                sent |= {(a.kind, g, to, a.micro) for to in found[g, a.kind]}
                at[rank], moved = at[rank] + 1, True
    stuck = [f"rank {r} at {orders[r][k].kind} {orders[r][k].micro}" for r, k in enumerate(at) if k < len(orders[r])]
    if stuck:
        raise PlanError(
            "the pipeline schedule deadlocks", needed="an order in which every message is sent before it is waited for", found="; ".join(stuck),
            try_="another schedule, such as gpipe",
        )  # fmt: skip


class Runner:
    """This rank's stages, compiled. `like` is any program of the step: its groups and device are shared."""

    def __init__(
        self, stages: Sequence[PlacedStage], orders: Sequence[Order], like: Compiled, messages: Messages | None, carried: bool = False
    ) -> None:
        self.messages: Messages | Rehearsal | None
        self.stages, self.orders, self.like, self.messages, self.carried = stages, orders, like, messages, carried
        self.me = like.coords.get("pp", 0)
        self.phases = {s.number: [self._compiled(p) for p in s.phases] for s in stages if s.rank == self.me}
        self.later = {g: {n for c in phases[1:] for n in c.program.input_names} for g, phases in self.phases.items()}
        self.routes = routes(stages)
        require_an_end(self.routes, orders)
        self._buffers, self._summed = Sums(), frozenset[str]()
        self.coming = self._expected()
        self._rehearsed = False
        self._here: dict[Hashable, list[Tensor]] = {}  # messages between two stages of this rank
        self.call: Call = lambda _g, _action, step, given: step(given)  # what a recorder may put itself in the place of
        self.alive: dict[str, Any] = {}  # what is alive between two passes

    def _compiled(self, program: Any) -> Compiled:
        return Compiled(program, self.like.device_mesh, self.like.device, on_all_ranks=False)

    def _rank(self, stage: int) -> int:
        """The rank of the world next to this one at another place of the pipeline."""
        return self.like.program.mesh.rank({**self.like.coords, **({"pp": stage % len(self.orders)} if len(self.orders) > 1 else {})})

    # -- who sends what ----------------------------------------------------------------------------------------------------------

    def _number(self, rank: int, action: Action) -> int:
        return action.chunk * len(self.orders) + rank

    def _messages(self, rank: int) -> list[tuple[int, Hashable, list[str]]]:
        """What a rank of the pipeline sends to others, in order: to which stage, the message, its tensors."""
        out: list[tuple[int, Hashable, list[str]]] = []
        for a in self.orders[rank]:
            g = self._number(rank, a)
            for dst, names in self.routes[g, a.kind].items():
                if dst % len(self.orders) != rank:
                    out.append((dst, (a.kind, g, dst, a.micro), names))
        return out

    def _expected(self) -> dict[int, list[tuple[Hashable, list[Spec]]]]:
        """What comes to this rank from each other, in the order it is sent."""
        out: dict[int, list[tuple[Hashable, list[Spec]]]] = {}
        for rank in range(len(self.orders)):
            for dst, key, names in self._messages(rank):
                if dst % len(self.orders) == self.me:
                    types = [self.stages[dst].types[n] for n in names]
                    specs = [(t.layout.local_shape(self.like.coords), t.dtype) for t in types]
                    out.setdefault(self._rank(rank), []).append((key, specs))
        return out

    def _send(self, g: int, action: Action, values: Values) -> None:
        for dst, names in self.routes[g, action.kind].items():
            tensors = [values.pop(n) if action.kind == "backward" else values[n] for n in names]
            if dst % len(self.orders) == self.me:
                self._here[action.kind, g, dst, action.micro] = tensors
            else:
                assert self.messages is not None
                self.messages.send(self._rank(dst), tensors)

    def _receive(self, g: int, action: Action) -> Values:
        got: Values = {}
        for s in self.stages:
            names = self.routes[s.number, action.kind].get(g)
            if names is not None:
                key = (action.kind, s.number, g, action.micro)
                tensors = self._here.pop(key) if s.rank == self.me else self.messages.receive(self._rank(s.rank), key)  # type: ignore[union-attr]
                got |= dict(zip(names, tensors, strict=True))
        return got

    # -- running ---------------------------------------------------------------------------------------------------------------

    def run(self, state: Values, inputs: Callable[[int], Values], summed: Collection[str] = ()) -> tuple[Values, Values]:
        """All micro-batches: gradients and losses added up, by the names the update knows them by, and the new buffers, those of `summed`
        added up too. Where `state` is to be `carried`, every micro-batch begins with the buffers the last one left."""
        if self.messages is not None and self.messages.on_device and not self._rehearsed:
            self._rehearse(state, inputs, summed)
        return self._run(state, inputs, summed)

    def _rehearse(self, state: Values, inputs: Callable[[int], Values], summed: Collection[str]) -> None:
        """All passes once without a message, for nothing but their kernels: none is to be compiled or loaded while a message waits."""
        messages, self.messages = self.messages, Rehearsal(self.like.device)
        try:
            self._run(dict(state), inputs, summed)
            synchronize(self.like.device)
        finally:
            self.messages = messages
        self._rehearsed = True

    def _run(self, state: Values, inputs: Callable[[int], Values], summed: Collection[str]) -> tuple[Values, Values]:
        if self.messages is not None:
            self.messages.expect(self.coming)
        sums, kept = Sums(), dict[tuple[int, int], Values]()
        self._buffers, self._summed = Sums(), summed
        self.alive = {"state": state, "kept": kept, "sums": sums.values}
        for action in self.orders[self.me]:
            g = self._number(self.me, action)
            if action.kind == "forward":
                kept[g, action.micro] = self._forward(g, action, state, inputs(action.micro), sums)
            else:
                self._backward(g, action, state, kept, sums)
        if self.messages is not None:
            self.messages.finish()
        self.alive = {}
        return sums.values, self._buffers.values

    def _forward(self, g: int, action: Action, state: Values, inputs: Values, sums: Sums) -> Values:
        values = {**inputs, **self._receive(g, action)}
        step = self.phases[g][0]
        given = _chosen(step, {**state, **values})
        out = self.call(g, action, step, given)
        if "loss" in out:
            sums.add(LOSS_SUM, out["loss"])
        for name, _ in step.program.state:
            values[name] = given[name]  # what the backward pass of this micro-batch would read
            self._buffers.add(name, out[name], name in self._summed)
            if self.carried:
                state[name] = out[name]
        self._send(g, action, out)
        return {n: x for n, x in {**out, **values}.items() if n in self.later[g]}

    def _backward(self, g: int, action: Action, state: Values, kept: dict[tuple[int, int], Values], sums: Sums) -> None:
        phase = 1 if action.kind == "backward" else 2
        values = {**kept.pop((g, action.micro), {}), **self._receive(g, action)}
        if phase >= len(self.phases[g]):
            return
        step = self.phases[g][phase]
        out = self.call(g, action, step, _chosen(step, {**state, **values}))
        self._send(g, action, out)
        for name, x in out.items():
            if name.startswith("d.param."):
                sums.add(f"{name}.{g}", x)
        if phase + 1 < len(self.phases[g]):
            later = self.phases[g][phase + 1].program.input_names
            kept[g, action.micro] = {n: x for n, x in {**values, **out}.items() if n in later}


def _chosen(step: Compiled, values: Mapping[str, Tensor]) -> Values:
    return {n: values[n] for n in step.program.input_names if n in values}


class Sums:
    """Tensors added up by name. The first of a name may be shared with others, so it is never added to in place."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._own: set[str] = set()

    def add(self, name: str, x: Tensor, sums: bool = True) -> None:
        """One more term or, where they are not to be summed, what takes its place."""
        if name not in self.values or not sums:
            self.values[name] = x
        elif name in self._own:
            self.values[name] += x
        else:
            self.values[name] = self.values[name] + x
            self._own.add(name)
