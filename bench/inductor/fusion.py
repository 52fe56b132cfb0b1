"""What a compiled step does: the kernels a compiler makes of its graphs and what those move (`Fused`), and what they hold (`stored`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bench.inductor.observe import Observed, Recorder, kernels
from bench.inductor.padding import pad
from bench.inductor.stored import Stored
from bench.inductor.sums import join
from bench.inductor.torch_graph import Graph
from bench.inductor.torch_ops import (
    MATH,
    alone,
    drop_copies,
    elements_of,
    has_value,
    inner,
    name_of,
    reduced,
    size_of,
    summed,
    value_random_ops,
)
from weft.cluster.profile import Device
from weft.cost.work import MemoryBound, Op

LOOP = 4096  # a reduction over more elements reads its input again for each further pass


def observe_compiled(
    make: Callable[[Callable[..., Any]], Callable[[], Any]], warm: int = 1, device: Device | None = None, host: str = "host.launch",
    place: str = "",
) -> Observed:  # fmt: skip
    """What a compiled step does. `make` is given `torch.compile` with a backend that records, and returns the step; a step
    that calls `torch.compile` by itself is recorded as well. `device` says which products are worth padding, `place` the kind of
    device whose memory counts, where not all of it is of one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        recorder = Recorder(host, place)
        with recorder, _recording(recorder, device) as compiled:
            step = make(compiled)
            for _ in range(warm):
                step()
            recorder.begin()
            step()
    return recorder.seen


@contextmanager
def _recording(recorder: Recorder, device: Device | None) -> Iterator[Callable[..., Any]]:
    """In place of `torch.compile`, and of its compiler called by itself, ones that record."""
    import torch._inductor
    from torch.fx.experimental import proxy_tensor

    plain, inductor, make_fx = torch.compile, torch._inductor.compile, proxy_tensor.make_fx
    backend = _backend(recorder, device)

    def compiled(fn: Any = None, **options: Any) -> Any:
        if fn is None:  # as a decorator with options
            return lambda given: compiled(given, **options)
        kept = {k: v for k, v in options.items() if k in ("fullgraph", "dynamic")}
        return plain(fn, backend=backend, **kept)

    def quietly(work: Callable[..., Any]) -> Callable[..., Any]:
        """What is made while a graph is traced is not there when it runs."""

        def quiet(*given: Any, **_: Any) -> Any:
            with recorder.paused():
                return work(*given)

        return quiet

    torch._dynamo.reset()
    torch.compile, torch._inductor.compile = compiled, quietly(backend)
    proxy_tensor.make_fx = lambda fn, **options: quietly(make_fx(fn, **options))  # type: ignore[assignment]
    try:
        yield compiled
    finally:
        torch.compile, torch._inductor.compile, proxy_tensor.make_fx = plain, inductor, make_fx


def _backend(recorder: Recorder, device: Device | None) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    accelerator = device is not None and device.get("units") > 1

    def compiler(gm: GraphModule, _: Any) -> Any:
        value_random_ops(gm)
        join(gm, accelerator)
        return _Compiled(gm, Fused(gm).ops, Stored(gm, accelerator).peak, recorder)

    def whole(gm: GraphModule, given: Any) -> Any:
        return compiler(padded(gm), given)

    def padded(gm: GraphModule) -> GraphModule:
        drop_copies(gm)
        if device is not None:
            pad(gm, device)
        return gm

    def partition(joint: GraphModule, *given: Any, **options: Any) -> Any:
        """Products are padded before the graph is cut in two, so that what is kept for the backward is padded too."""
        return min_cut_rematerialization_partition(padded(joint), *given, **options)

    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=whole,
        decompositions=select_decomp_table, partition_fn=partition,
    )  # fmt: skip


@dataclass
class _Compiled:
    """Stands for the compiled graph: gives its outputs, and tells the recorder of its kernels and of its memory."""

    gm: GraphModule
    ops: Sequence[Op]
    peak: int
    recorder: Recorder
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> Any:
        self.recorder.seen.note(self.ops, "host.compiled")
        self.recorder.seen.peak = max(self.recorder.seen.peak, self.recorder.live + self.peak)
        given = list(args)
        args.clear()
        with self.recorder.paused():
            out = self.gm(*given)
        del given
        for tensor in out:
            if isinstance(tensor, torch.Tensor):
                self.recorder.follow(tensor)
        return out


@dataclass(frozen=True)
class Fused(Graph):
    """A graph cut into kernels, as their time is counted."""

    @property
    def groups(self) -> list[list[Node]]:
        """Kernels in order: one node, or several that fuse."""
        return self.joined

    @cached_property
    def place(self) -> dict[str, int]:
        """The kernel each node is in."""
        return {n.name: i for i, group in enumerate(self.groups) for n in group}

    @cached_property
    def again(self) -> dict[str, list[Node]]:
        """Nodes computed anew in every kernel that reads them, with what is read for it: pointwise ones that only fused kernels read."""
        found: dict[str, list[Node]] = {}
        plain: set[str] = set()  # nothing summed on the way from what the kernel reads
        for node in self.nodes:
            if alone(node) or summed(node):
                continue
            here, given = self.place[node.name], self.inputs(node)
            near = [i for i in given if self.place.get(i.name) == here]
            if any(i.name not in plain for i in near):
                continue
            plain.add(node.name)
            read = [x for i in given for x in found.get(i.name, [i])]
            outside = [u for u in self.users[node.name] if self.place.get(u.name) != here]
            if outside and all(u.name in self.place and not alone(u) for u in outside) or not outside:
                found[node.name] = list(dict.fromkeys(read))
        return found

    def outputs(self, group: Sequence[Node]) -> list[Node]:
        inside = {n.name for n in group}
        return [n for n in group if n.name not in self.again and any(u.name not in inside for u in self.users[n.name])]

    @cached_property
    def ops(self) -> list[Op]:
        return [op for group in self.groups for op in self.records(group)]

    def records(self, group: Sequence[Node]) -> Iterator[Op]:
        first = group[0]
        if len(group) == 1 and alone(first):
            target, given = inner(first)
            values = torch.fx.node.map_arg((given, first.kwargs), lambda n: n.meta.get("val"))
            made = kernels(target, values[0], values[1], first.meta["val"])
            yield from (replace(op, walk="") if isinstance(op, MemoryBound) else op for op in made)  # its own kernels walk as they should
            return
        inside = {n.name for n in group}
        sources = [x for n in group for i in self.inputs(n) if i.name not in inside for x in self.again.get(i.name, [i])]
        read = {i.name: i for i in sources if has_value(i)}
        passes = 1 + min(2, sum(reduced(n) > LOOP for n in group) // 2)
        size = passes * sum(size_of(n) for n in read.values()) + sum(size_of(n) for n in self.outputs(group))
        hard = max((elements_of(n) for n in group if name_of(n) in MATH), default=0)
        if size:
            yield MemoryBound("fused " + " ".join(dict.fromkeys(name_of(n) for n in group[:4])), float(size), math=float(hard))
