"""What a compiler makes of a graph of torch ops: which run as one kernel, what those read and write, what is held when.

Products, attention and scatters stay kernels of their own. All others fuse with the ones they feed, unless a kernel of its
own lies between; two ops are of one group when they are joined by edges and equally many such kernels lie above them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from weft.cluster.profile import Device
from weft.plan.held import Buffer, Kernel, Plan
from weft.plan.observe import ROUND, VIEWS, Observed, Recorder, kernels
from weft.plan.padding import pad
from weft.plan.sums import join
from weft.plan.workload import Op, Touch

ALONE = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward", "scaled_dot_product",
    "index_put", "scatter", "sort", "topk", "_grouped_mm",
)  # fmt: skip
MATH = ("exp", "exp2", "erf", "tanh", "sigmoid", "log", "sin", "cos", "pow", "prepare_softmax_online")
NOT_OURS = ("primals", "arg")  # given to a graph by those who keep them
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

    def compiler(gm: GraphModule, _: Any) -> Any:
        _value_random_ops(gm)
        join(gm, device is not None and device.get("units") > 1)
        return _Compiled(Fused(gm), recorder)

    def alone(gm: GraphModule, given: Any) -> Any:
        return compiler(padded(gm), given)

    def padded(gm: GraphModule) -> GraphModule:
        if device is not None:
            pad(gm, device)
        return gm

    def partition(joint: GraphModule, *given: Any, **options: Any) -> Any:
        """Products are padded before the graph is cut in two, so that what is kept for the backward is padded too."""
        return min_cut_rematerialization_partition(padded(joint), *given, **options)

    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=alone,
        decompositions=select_decomp_table, partition_fn=partition,
    )  # fmt: skip


@dataclass
class _Compiled:
    """Stands for the compiled graph: gives its outputs, and tells the recorder of its kernels and of its memory."""

    fused: Fused
    recorder: Recorder
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> Any:
        self.recorder.seen.note(self.fused.ops, "host.compiled")
        self.recorder.seen.peak = max(self.recorder.seen.peak, self.recorder.live + self.fused.peak)
        given = list(args)
        args.clear()
        with self.recorder.paused():
            out = self.fused.gm(*given)
        del given
        for tensor in out:
            if isinstance(tensor, torch.Tensor):
                self.recorder.follow(tensor)
        return out


@dataclass(frozen=True)
class Fused:
    """A graph cut into kernels."""

    gm: GraphModule

    @cached_property
    def nodes(self) -> list[Node]:
        return [n for n in self.gm.graph.nodes if n.op == "call_function" and n.name not in self.views and _has_value(n)]

    @cached_property
    def views(self) -> dict[str, Node]:
        """What each view, and each part of a result, is a view of."""
        found: dict[str, Node] = {}
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and (_name(node) in VIEWS or "getitem" in str(node.target)) and node.all_input_nodes:
                source = node.all_input_nodes[0]
                found[node.name] = found.get(source.name, source) if "getitem" not in str(node.target) else source
        return found

    def base(self, node: Node) -> Node:
        while node.name in self.views:
            node = self.views[node.name]
        return node

    def inputs(self, node: Node) -> list[Node]:
        return [self.base(n) for n in node.all_input_nodes]

    @cached_property
    def depth(self) -> dict[str, int]:
        """Kernels of their own above a node, itself included."""
        found: dict[str, int] = defaultdict(int)
        for node in self.nodes:
            above = max((found[i.name] + _alone(i) for i in self.inputs(node)), default=0)
            found[node.name] = above + (_alone(node) and any(not _alone(i) and i.op == "call_function" for i in self.inputs(node)))
        for node in reversed(self.nodes):  # what only later kernels read is computed inside them
            readers = self.users[node.name]
            if not _alone(node) and readers and all(u.name in found and not _alone(u) for u in readers):
                found[node.name] = max(found[node.name], min(found[u.name] for u in readers))
        return found

    @cached_property
    def groups(self) -> list[list[Node]]:
        """Kernels in order: one node, or several that fuse."""
        parent: dict[str, str] = {}

        def find(name: str) -> str:
            while parent[name] != name:
                name = parent[name]
            return name

        for node in self.nodes:
            parent[node.name] = node.name
            if _alone(node):
                continue
            for source in self.inputs(node):
                if source.name in parent and not _alone(source) and self.depth[source.name] == self.depth[node.name]:
                    parent[find(source.name)] = find(node.name)
        members: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            members[find(node.name)].append(node)
        return list(_in_order(members, self.inputs))

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """Who reads a node, itself or through views."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.gm.graph.nodes:
            if node.name not in self.views:
                for source in node.all_input_nodes:
                    found[self.base(source).name].append(node)
        return found

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
            if _alone(node) or _summed(node):
                continue
            here, given = self.place[node.name], self.inputs(node)
            near = [i for i in given if self.place.get(i.name) == here]
            if any(i.name not in plain for i in near):
                continue
            plain.add(node.name)
            read = [x for i in given for x in found.get(i.name, [i])]
            outside = [u for u in self.users[node.name] if self.place.get(u.name) != here]
            if outside and all(u.name in self.place and not _alone(u) for u in outside) or not outside:
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
        if len(group) == 1 and _alone(first):
            target, given = _inner(first)
            values = torch.fx.node.map_arg((given, first.kwargs), lambda n: n.meta.get("val"))
            made = kernels(target, values[0], values[1], first.meta["val"])
            yield from (replace(op, walk="") if isinstance(op, Touch) else op for op in made)  # its own kernels walk as they should
            return
        inside = {n.name for n in group}
        sources = [x for n in group for i in self.inputs(n) if i.name not in inside for x in self.again.get(i.name, [i])]
        read = {i.name: i for i in sources if _has_value(i)}
        passes = 1 + min(2, sum(_reduced(n) > LOOP for n in group) // 2)
        size = passes * sum(_size(n) for n in read.values()) + sum(_size(n) for n in self.outputs(group))
        hard = max((_elements(n) for n in group if _name(n) in MATH), default=0)
        if size:
            yield Touch("fused " + " ".join(dict.fromkeys(_name(n) for n in group[:4])), float(size), 0, math=float(hard))

    @cached_property
    def peak(self) -> int:
        """The most held beyond what is held when the graph is called. Its activations are freed after their last use."""
        held = [n for n in self.gm.graph.nodes if n.op == "placeholder" and not n.name.startswith(NOT_OURS)]
        made = {n.name: self._buffers(n) for n in (*held, *(n for group in self.groups for n in self.stored(group)))}
        return Plan([self._kernel(g, made) for g in self.groups], [b for n in held for b in made[n.name]]).peak

    def _kernel(self, group: Sequence[Node], made: Mapping[str, Sequence[Buffer]]) -> Kernel:
        first = group[0]
        over = next(iter(made.get(self.inputs(first)[0].name, ())), None) if _puts(first) else None
        library = _alone(first) and isinstance(first.meta["val"], (tuple, list))
        return Kernel(tuple(b for n in self.stored(group) for b in made[n.name]), not _alone(first), library, over)

    def stored(self, group: Sequence[Node]) -> list[Node]:
        """What a kernel leaves in memory. What is only summed down its columns it sums up itself, as it goes."""
        return [n for n in self.outputs(group) if _alone(n) or not all(_over_rows(u) for u in self.users[n.name])]

    def _buffers(self, node: Node) -> list[Buffer]:
        """Of a result; of one in parts, each lives as long as it is read."""
        parts: list[Node | None] = [node]
        if isinstance(node.meta["val"], (tuple, list)):
            taken = {n.args[1]: n for n in node.users if "getitem" in str(n.target)}
            parts = [taken.get(i) for i in range(len(node.meta["val"]))]
        both = zip(parts, _values(node), strict=True)
        own = self.place.get(node.name, -1)
        return [self._buffer(part, value, own) for part, value in both if isinstance(value, torch.Tensor) and bytes_of(value)]

    def _buffer(self, node: Node | None, value: torch.Tensor, own: int) -> Buffer:
        readers = self.read_by(node) - {own} if node is not None else frozenset()
        here = frozenset(r for r in readers if r < len(self.groups))
        return Buffer(bytes_of(value), here, len(here) < len(readers), (value.dtype, bytes_of(value)))

    def read_by(self, node: Node) -> frozenset[int]:
        """The kernels that read a node, itself, through views or to compute something anew; one more stands for who gets the results."""
        if node.name not in self._known:
            found: set[int] = set()
            for user in node.users:
                through = user.name in self.views or user.name in self.again
                found |= self.read_by(user) if through else {self.place.get(user.name, len(self.groups))}
            self._known[node.name] = frozenset(found)
        return self._known[node.name]

    @cached_property
    def _known(self) -> dict[str, frozenset[int]]:
        return {}


def _in_order(members: Mapping[str, list[Node]], inputs: Callable[[Node], list[Node]]) -> Iterator[list[Node]]:
    """Groups in the order of the graph, but each after those it reads."""
    made = {n.name: key for key, group in members.items() for n in group}
    done: set[str] = set()

    def before(key: str) -> Iterator[str]:
        return (made[i.name] for n in members[key] for i in inputs(n) if i.name in made)

    def visit(key: str) -> Iterator[list[Node]]:
        """Without recursion, since graphs are deep."""
        waiting = [(key, before(key))]
        done.add(key)
        while waiting:
            now, rest = waiting[-1]
            following = next((k for k in rest if k not in done), None)
            if following is None:
                waiting.pop()
                yield members[now]
            else:
                done.add(following)
                waiting.append((following, before(following)))

    for key in members:
        if key not in done:
            yield from visit(key)


def _value_random_ops(gm: GraphModule) -> None:
    """What ops run with a state of the random numbers give: the partitioner that makes them does not say."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and "rng_state" in str(node.target) and not _has_value(node):
            target, given = _inner(node)
            own = {k: v for k, v in node.kwargs.items() if k != "rng_state"}
            args, kwargs = torch.fx.node.map_arg((given, own), lambda n: n.meta.get("val"))
            fake = next(t.fake_mode for t in torch.utils._pytree.tree_leaves(args) if hasattr(t, "fake_mode"))
            with fake:
                made = torch.utils._pytree.tree_leaves(target(*args, **kwargs))
            node.meta["val"] = tuple(t for t in made if isinstance(t, torch.Tensor) and all(isinstance(n, int) for n in t.shape))


def _inner(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """What a node calls; an op run with a state of the random numbers is that op."""
    if "rng_state" in str(node.target):
        at = next(i for i, a in enumerate(node.args) if hasattr(a, "overloadpacket"))
        return node.args[at], node.args[at + 1 :]
    return node.target, node.args


def _name(node: Node) -> str:
    target, _ = _inner(node)
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(target)


def _alone(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = _name(node)
    if name == "scatter" and isinstance(node.args[0], Node) and _name(node.args[0]) in ("full", "zeros", "full_like"):
        return False  # one place of each row set in a constant: a comparison of indices
    return name in ALONE or "index_put" in name or any(name.startswith((a, f"_{a}")) for a in ALONE[7:]) or _over_rows(node)


def _over_rows(node: Node) -> bool:
    """A sum over the leading dims, as of bias gradients, walks memory the other way than all around it."""
    if _name(node) not in ("sum", "mean", "amax") or len(node.args) < 2 or not _has_value(node.args[0]):
        return False
    dims, rank = node.args[1], node.args[0].meta["val"].dim()
    return isinstance(dims, (list, tuple)) and rank - 1 not in [d % rank for d in dims] and rank > 1


SUMS = ("sum", "mean", "amax", "var_mean", "max", "prod", "any", "logsumexp")


def _summed(node: Node) -> bool:
    return _name(node) in SUMS


def _reduced(node: Node) -> int:
    """Elements each result of a reduction is made of."""
    if not _summed(node):
        return 0
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    value = node.meta["val"]
    out = value[0] if isinstance(value, (tuple, list)) else value
    return source.meta["val"].numel() // max(1, out.numel()) if source is not None and _has_value(source) else 0


def _has_value(node: Any) -> bool:
    return isinstance(node, Node) and any(isinstance(t, torch.Tensor) for t in _values(node))


def _values(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (tuple, list)) else (value,)


def _elements(node: Node) -> int:
    return max((t.numel() for t in _values(node) if isinstance(t, torch.Tensor)), default=0)


def _puts(node: Node) -> bool:
    """Whether it puts values into a tensor."""
    return "index_put" in _name(node) or _name(node).startswith("scatter")


def _size(node: Node) -> int:
    return sum(bytes_of(t) for t in _values(node) if isinstance(t, torch.Tensor))


def bytes_of(value: torch.Tensor) -> int:
    """As the allocator counts them; a size that is not known, as of the state of random numbers, is taken for nothing."""
    known = all(isinstance(n, int) for n in value.shape)
    return -(-value.numel() * value.element_size() // ROUND) * ROUND if known else 0
