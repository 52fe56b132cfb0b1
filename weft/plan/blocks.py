"""A captured model as a stack: what its first part, its repeated block and its last part do on one device under a setting.

The short step (`plan.short`) is placed as the setting shards it, and every node becomes a record of `cost.work`, so what is priced is what is
run. What replicas share (dp, ZeRO) is no part of it: `plan.simulate` counts parameters and gradients by block.

Sizes of any micro-batch follow from two that were captured, since every size of a record is a constant plus a multiple of
the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from weft.core.errors import PlanError, WeftError
from weft.core.layout import R, S
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.grouping import KERNELS, Kernels, held
from weft.cost.work import Attention, Collective, Gemm, Op
from weft.frontend.capture import Captured
from weft.ops.comm import is_comm
from weft.ops.registry import Kind, flops
from weft.plan.layers import ATTENTION, FFN, WHOLE
from weft.plan.named import input_layouts, stacked
from weft.plan.place import Placements, placed_with
from weft.plan.setting import Setting
from weft.plan.short import FIRST, LAYER, WAYS, Short, short_of
from weft.plan.spec import Spec
from weft.plan.workload import Block, Workload, beside_products, odd_of, quantised

FEW = 2  # samples for each rank of ep that are captured, and twice as many; sizes of others follow
LEAST_SLICE = 512  # of what blocks hand on, that one rank of cp keeps at least along what is sharded


# -- a short step on a mesh ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlacedShort:
    """A short step as a setting places it."""

    short: Short
    setting: Setting

    @cached_property
    def _made(self) -> tuple[Program, Mapping[Node, Node]]:
        s, p = self.setting, self.short.program
        named = Spec(cp=s.cp, ep=s.ep, tp=s.tp, sp=s.sequence_parallel and s.tp > 1)
        held, options = input_layouts(p, named, {})
        told: dict[str, Placements] = {
            f"d.{name}": {a: held.get(name, {}).get(a, R) for a in ("tp", "ep") if a in named.mesh.axes and (a == "tp" or a in held.get(name, {}))}
            for name in p.input_names if f"d.{name}" in p.output_names
        }  # fmt: skip
        return placed_with(p, named.mesh, held, options, outputs=told)

    @property
    def program(self) -> Program:
        return self._made[0]

    @cached_property
    def part(self) -> dict[Node, int]:
        """Of every node: as the one it was made of, or as what reads it."""
        _, made = self._made
        found: dict[Node, int] = {}
        for old, new in made.items():
            if old in self.short.part:
                found.setdefault(new, self.short.part[old])
        for n in reversed(self.program.nodes):
            if n not in found:
                found[n] = max((found[u] for u in self.program.users[n] if u in found), default=self.short.last)
        return found

    @cached_property
    def ahead(self) -> set[Node]:
        return set(toposort([self.program.output_names["loss"]]))

    @cached_property
    def idle(self) -> set[Node]:
        """Forward nodes that read no batch or no parameter, and are brought from nowhere: tables, masks and casts of weights, made once and not
        for every micro-batch."""
        _, made = self._made
        active = {made[n] for n in self.short.active}
        found: set[Node] = set()
        for n in self.program.nodes:
            known = n in self.ahead and n not in active and not is_comm(n)
            if known and not any(a in self.ahead and a not in found and a.args for a in n.args):
                found.add(n)
        return found

    # -- kernels

    @cached_property
    def joined(self) -> Kernels:
        return Kernels(self.program, lambda n: (n in self.ahead, self.part[n]), self.idle, self.setting.kernels)

    @cached_property
    def kernels(self) -> list[tuple[int, bool, tuple[Node, ...]]]:
        """Part, whether ahead, and nodes of every kernel, in order."""
        return [(self.part[c[-1]], c[-1] in self.ahead, c) for c in self.joined.all]

    def records(self, nodes: Sequence[Node]) -> Iterator[Op]:
        """Of one kernel."""
        late = nodes[0] in self.late
        for op in self.joined.records(nodes):
            if isinstance(op, Gemm):
                op = replace(op, reads=self._reads(nodes))
                yield op if nodes[0] in self.ahead else replace(op, name=f"{op.name} {'weight' if late else 'input'} gradient", weight=late)
            elif isinstance(op, Collective):
                yield replace(op, hidden=op.axis == "cp" and op.kind == "all_gather")
            else:
                yield op

    def _reads(self, nodes: Sequence[Node]) -> int:
        """A number of the first operand of a matmul that is no parameter, in the order of the program."""
        product = next((n for n in nodes if n.op.kind is Kind.CONTRACT), nodes[0])
        return next((self._order[b] for a in product.args if (b := self.joined.base(a)).role is not Role.PARAMETER and b in self._order), 0)

    @cached_property
    def _order(self) -> dict[Node, int]:
        return {n: i for i, n in enumerate(self.program.nodes, 1)}

    @cached_property
    def late(self) -> set[Node]:
        """Backward nodes that no other part waits for: gradients of weights."""
        awaited: set[Node] = set()
        for n in reversed(self.program.nodes):
            if any(u in awaited or self.part[u] < self.part[n] for u in self.program.users[n]):
                awaited.add(n)
        return {n for n in self.program.nodes if n not in self.ahead and n not in awaited}

    # -- bytes

    @cached_property
    def saved(self) -> dict[Node, int]:
        """Forward values that wait for the backward pass, with their bytes. One that a chain of the backward pass can make again from
        others that wait does not."""
        waits: dict[Node, bool] = {}
        for n in self.program.nodes:
            if n not in self.ahead and n.op.kind is not Kind.SOURCE:
                for a in n.args:
                    b = self.joined.base(a)
                    if b in self.ahead and b not in self.idle and b.op.kind is not Kind.SOURCE:
                        waits[b] = waits.get(b, False) or not self.joined.moves(n)
        free = set()
        for n in self.program.nodes:
            if n in waits and not waits[n] and n.op.kind is Kind.POINTWISE and self._remakable(n, waits):
                free.add(n)
        cast = {n for n in waits if n.op.name == "cast" and n not in free}
        for n in cast:  # the narrower of a value and its cast waits
            source = self.joined.base(n.args[0])
            if source in self.ahead and source not in self.idle and held(source) < held(n) and not waits[n]:
                free.add(n)
                waits.setdefault(source, False)
        return {n: held(n) for n in waits if n not in free}

    def _remakable(self, n: Node, waits: Mapping[Node, bool]) -> bool:
        sources = [self.joined.base(a) for a in n.args]
        return all(a in waits or a in self.idle or a.op.kind is Kind.SOURCE for a in sources)

    def largest(self, part: int) -> float:
        """The largest value that passes."""
        sizes = [held(n) for n in self.program.nodes if self.part[n] == part and n.args and n.op.kind is not Kind.VIEW and n not in self.idle
                 and n not in self.late]  # fmt: skip
        return float(max(sizes, default=0))

    def params(self, part: int, experts: bool, of: Collection[bool] = (True, False)) -> float:
        """Elements of parameters that a part reads first; `of` those that are trained, or are not."""
        total = 0.0
        for name, node in self.program.input_names.items():
            if node.role is Role.PARAMETER and (f"d.{name}" in self.program.output_names) in of and self.home(node) == part:
                cut = "ep" in node.layout.placements and isinstance(node.layout.placement("ep"), S)
                if cut == experts:
                    total += math.prod(node.layout.largest_local)
        return total

    @cached_property
    def shared(self) -> float:
        """Elements of parameters that the first and the last part both read."""
        found = 0.0
        for name, node in self.program.input_names.items():
            readers = {self.part[u] for u in self.program.users[node] if u in self.ahead}
            found += math.prod(node.layout.largest_local) if f"d.{name}" in self.program.output_names and {FIRST, self.short.last} <= readers else 0.0
        return found

    @cached_property
    def crossing(self) -> float:
        """Bytes that a later row reads of earlier ones besides what its own blocks hand on: every stage in between passes it along."""
        rows, given = self.short.rows[1:], {self.became(x) for end in self.short.boundary for x in end}
        read = {self.joined.base(a) for n in self.program.nodes if n in self.ahead and self.part[n] in rows for a in n.args}
        return float(sum(held(a) for a in read if a.args and a not in given and a not in self.idle and 0 < self.part[a] < rows[0])) if rows else 0.0

    def became(self, node: Node) -> Node:
        """What a node of the short step is here."""
        return self._made[1][node]

    def home(self, node: Node) -> int:
        readers = [self.part[u] for u in self.program.users[node] if u in self.ahead]
        return min(readers, default=FIRST)

    # -- blocks

    def block(self, name: str, part: int, half: int = WHOLE) -> Block:
        mine = [(ahead, nodes) for at, ahead, nodes in self.kernels if at == part and self._of_half(nodes, half)]
        forward = tuple(op for ahead, nodes in mine if ahead for op in self.records(nodes))
        back = tuple(op for ahead, nodes in mine if not ahead for op in self.records(nodes))
        share = self._share(part, half)
        repeats = part in self.short.rows
        kept = float(sum(held(self.became(n)) for n in self.short.boundary[part // 2])) if repeats else 0.0
        parts = tuple(self._again(way, part, half) for way in WAYS) if repeats else ()
        frozen = any(self.params(part, experts, (False,)) for experts in (False, True))
        learnt = sum(self.params(part, experts, (True,)) for experts in (False, True)) if frozen else None
        return Block(
            name, forward, share * self.params(part, False, (not frozen,)), share * self.params(part, True, (not frozen,)), kept=kept,
            work=self.largest(part), back=back, waiting=float(sum(self._waiting(part, half).values())), parts=parts,
            trained=None if learnt is None else share * learnt,
        )  # fmt: skip

    def _share(self, part: int, half: int) -> float:
        if half == WHOLE or part != LAYER:
            return 1.0
        own = [n for n, h in self._halves.items() if h == half and n in self.program.input_set]
        total = sum(math.prod(n.layout.largest_local) for n in self.program.inputs if self.home(n) == LAYER) or 1
        return sum(math.prod(n.layout.largest_local) for n in own if self.home(n) == LAYER) / total

    @cached_property
    def _halves(self) -> dict[Node, int]:
        """Which half of the block a node belongs to."""
        _, made = self._made
        found = {made[n]: ATTENTION for n in self.short.half}
        for n in self.program.nodes:
            if self.part[n] != LAYER or n in found:
                continue
            if n in self.ahead:
                readers = [found[u] for u in self.program.users[n] if u in found]
                found[n] = ATTENTION if not n.args and ATTENTION in readers else FFN
            else:
                needs = [found[a] for a in n.args if a in self.ahead and a in found and a.args]
                found[n] = max(needs) if needs else min((found[a] for a in n.args if a in found), default=FFN)
        for n in self.program.inputs:
            found[n] = min((found[u] for u in self.program.users[n] if u in found and u in self.ahead), default=FFN)
        return found

    def _of_half(self, nodes: Sequence[Node], half: int) -> bool:
        return half == WHOLE or self._halves.get(nodes[-1], FFN) == half

    def _waiting(self, part: int, half: int) -> dict[Node, int]:
        return {n: size for n, size in self.saved.items() if self.part[n] == part and (half == WHOLE or self._halves.get(n, FFN) == half)}

    def _again(self, way: str, part: int, half: int) -> tuple[str, tuple[Op, ...], float]:
        """What is recomputed in this way, and the bytes that need not wait then."""
        _, made = self._made
        inside = {made[n] for n in self.short.ways[part, way, half] if n in made}
        inside |= {n for n in self.program.nodes if n in self.ahead and is_comm(n) and self.part[n] == part and self.joined.base(n.args[0]) in inside
                   and all(u in inside for u in self.program.users[n])}  # fmt: skip
        waiting = self._waiting(part, half)
        freed = {n for n in waiting if n in inside}
        needed = self._needed(freed, inside)
        more = {b for n in needed for a in n.args if (b := self.joined.base(a)) not in inside and b in self.ahead and b not in self.idle
                and b.op.kind is not Kind.SOURCE and b not in self.saved}  # fmt: skip
        ops = tuple(op for at, ahead, nodes in self.kernels if at == part and ahead and nodes[-1] in needed for op in self.records(nodes))
        return way, ops, float(sum(waiting[n] for n in freed) - sum(held(n) for n in more))

    def _needed(self, roots: Iterable[Node], inside: Collection[Node]) -> set[Node]:
        found, todo = set[Node](), list(roots)
        while todo:
            n = todo.pop()
            if n in inside and n not in found:
                found.add(n)
                todo += [self.joined.base(a) for a in n.args]
        return found


# -- a stack -------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stack:
    """A model that is a stack of equal blocks, at any micro-batch. `at(n)` captures its forward pass over n samples, on no device's memory;
    where it has more blocks than were captured, `repeats` says how many units of them."""

    name: str
    at: Callable[[int], Captured]
    dtype: str = ""  # of its matmuls, where it is another than what is captured: fp8, fp4, tf32
    seq: int = 0  # tokens of a sample; 0 where samples are counted
    repeats: int = 0
    captured_params: float = 0.0
    resized: Callable[[int], Stack] | None = None  # the same with so many tokens
    _shorts: dict[int, Short] = field(default_factory=dict)
    _places: dict[tuple[int, Setting], PlacedShort] = field(default_factory=dict)
    _works: dict[tuple[int, Setting], Workload] = field(default_factory=dict)
    _cuts: dict[tuple[str, int], float] = field(default_factory=dict)
    _slices: dict[int, int] = field(default_factory=dict)
    _grown: dict[tuple[int, Setting], Callable[[float], Any] | None] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return self.repeats or sum(self.short(FEW).repeats)

    def short(self, samples: int) -> Short:
        if samples not in self._shorts:
            captured = self.at(samples)
            self._shorts[samples] = short_of(captured)
            self.captured_params = float(sum(x.numel() for x in captured.parameters.values()))
        return self._shorts[samples]

    # -- what may be sharded

    def may_cut(self, tp: int, cp: int) -> bool:
        """Whether matmuls can be shared by so many devices, and samples by so many in slices worth having."""
        return self._is_cut("tp", tp) and self._is_cut("cp", cp) and (cp == 1 or self._slice(cp) >= LEAST_SLICE)

    def _slice(self, cp: int) -> int:
        """What a rank of cp keeps of the value between blocks, along what is sharded."""
        if cp not in self._slices:
            placed = self._placed(Setting(cp=cp), FEW)
            layouts = [placed.became(x).layout for end in placed.short.boundary for x in end]
            self._slices[cp] = min(y.largest_local[at[0]] for y in layouts if (at := y.where_cut("cp")) is not None)
        return self._slices[cp]

    def require(self, s: Setting) -> None:
        """Refuse degrees that do not divide it, and kernels that nothing captured has."""
        if s.kernels not in KERNELS:
            raise PlanError(f"no {s.kernels} kernels of what is captured", needed=" or ".join(KERNELS), found=s.kernels, try_="weft simulate NAME")
        for axis in ("tp", "cp"):
            n = s.size(axis)
            if not self._is_cut(axis, n, 0.0):
                near = max(k for k in range(1, n) if self._is_cut(axis, k, 0.0))
                needed = f"{axis} that divides what its blocks compute"
                raise PlanError(f"{self.name} cannot be sharded so", needed=needed, found=f"{axis} = {n}", try_=f"--{axis} {near}")
        if s.ep > 1 and (not self.experts or self.experts % s.ep):
            needed = f"ep a divisor of experts = {self.experts}" if self.experts else "a model with experts, such as mixtral-8x7b"
            raise PlanError("experts cannot be spread", needed=needed, found=f"ep = {s.ep} of {self.name}", try_="--ep 1")

    @cached_property
    def experts(self) -> int:
        """How many a block has: the first dim of weights that hold one matrix for each."""
        p = self.short(FEW).program
        sizes = {
            w.shape[0] for w in p.inputs if w.role is Role.PARAMETER and stacked(p, w, w.shape[0] if w.ndim else 1)
        }
        return math.gcd(*sizes) if sizes else 0

    def _is_cut(self, axis: str, n: int, least: float = 0.5) -> bool:
        """Whether at least so much of what could be shared by n devices along an axis is."""
        if n > 1 and (axis, n) not in self._cuts:
            self._cuts[axis, n] = self._try(axis, n)
        return n == 1 or self._cuts[axis, n] > least

    def _try(self, axis: str, n: int) -> float:
        """Along tp the weights of a block come out smaller, along cp the value between blocks."""
        try:
            placed, whole = (self._placed(Setting(**{axis: k}), FEW) for k in (n, 1))  # type: ignore[arg-type]
            if axis == "tp":
                cut, full = (sum(p.params(row, False) for row in p.short.rows) for p in (placed, whole))
                return (1 - cut / full) / (1 - 1 / n)
            return float(all(isinstance(placed.became(x).layout.placement(axis), S) for end in placed.short.boundary for x in end if x.ndim > 1))
        except WeftError:
            return 0.0

    # -- work

    def work(self, s: Setting) -> Workload:
        """What one device does for one micro-batch. Every size is a constant plus a multiple of the samples, so two numbers of samples tell
        all others."""
        self.require(s)
        cut = Setting(tp=s.tp, cp=s.cp, ep=s.ep, sequence_parallel=s.sequence_parallel and s.tp > 1, kernels=s.kernels)
        work = self._sized(cut, s.micro_batch * s.ep)
        if s.overlap_tp and s.tp > 1:
            work = _each(work, _beside)
        if s.pp > 1:  # a tied weight is on the last stage too
            work = replace(work, last=replace(work.last, params=work.last.params + work.shared))
        return replace(work, tokens=s.micro_batch * max(1, self.seq))

    def _sized(self, cut: Setting, n: int) -> Workload:
        """Of n samples; where a few are placed in another way than twice as many, many are as these and twice as many again."""
        few = FEW * cut.ep
        if n not in (few, 2 * few):
            for m in (few * k for k in (1, 2, 4, 8) if few * k <= n) if n > few else (few,):
                made = self._pair(cut, m)
                if made is not None:
                    return made(n / m)  # type: ignore[no-any-return]
        return self._captured(cut, n)

    def _pair(self, cut: Setting, m: int) -> Callable[[float], Any] | None:
        """What m samples and twice as many say of x times m; None where they are placed in two ways."""
        if (m, cut) not in self._grown:
            try:
                self._grown[m, cut] = grown(self._captured(cut, m), self._captured(cut, 2 * m))
            except _Differ:
                self._grown[m, cut] = None
        return self._grown[m, cut]

    def _captured(self, cut: Setting, n: int) -> Workload:
        if (n, cut) not in self._works:
            self._works[n, cut] = _computed_in(self._made(self._placed(cut, n)), self.dtype)
            if cut != Setting():  # of which everything was asked
                del self._places[n, cut]
        return self._works[n, cut]

    def _placed(self, cut: Setting, n: int) -> PlacedShort:
        if (n, cut) not in self._places:
            self._places[n, cut] = PlacedShort(self.short(n), cut)
        return self._places[n, cut]

    def _made(self, placed: PlacedShort) -> Workload:
        s = placed.setting
        short = placed.short
        names = (*(f"layer of kind {i}" for i in range(len(short.rows) - 1)), "layer")
        *others, layer = (placed.block(name, row) for name, row in zip(names, short.rows, strict=True))
        last = _together([placed.block("last", part) for part in range(2, short.last + 1, 2)])
        halves = tuple(placed.block(name, LAYER, half) for name, half in (("attention", ATTENTION), ("ffn", FFN))) if short.half else ()
        passed = max(sum(held(placed.became(x)) for x in end) for end in short.boundary)
        return Workload(
            self.name, placed.block("first", FIRST), layer, self.depth, last, tokens=1, model_flops=self.flops_per_token, total_params=self.params,
            boundary=float((passed + placed.crossing) / (1 if s.sequence_parallel else s.tp)), shared=placed.shared, halves=halves,
            others=tuple(zip(others, short.repeats, strict=False)),
        )  # fmt: skip

    @cached_property
    def params(self) -> float:
        placed = self._placed(Setting(), FEW)
        return self.captured_params + (self.depth - sum(placed.short.repeats)) * (placed.params(LAYER, False) + placed.params(LAYER, True))

    @cached_property
    def odd(self) -> int:
        """A size of tables before and behind the blocks that is worth padding."""
        short = self.short(FEW)
        ends = {a for n in short.program.nodes if short.part[n] not in short.rows for a in n.args if a.role is Role.PARAMETER and a.ndim == 2}
        return odd_of(size for a in ends for size in a.shape)

    @cached_property
    def flops_per_token(self) -> float:
        """Of forward and backward: matmuls and attention."""
        short = self.short(FEW)
        times = dict(zip(short.rows, short.repeats, strict=True)) | ({LAYER: self.repeats} if self.repeats else {})
        work = (flops(n) * times.get(short.part[n], 1) for n in short.program.nodes if n.op.kind in (Kind.CONTRACT, Kind.WHOLE))
        return sum(work) / FEW / max(1, self.seq)


def _each(work: Workload, change: Callable[[Block], Block]) -> Workload:
    """With every block changed."""
    first, layer, last, *halves = map(change, (work.first, work.layer, work.last, *work.halves))
    return replace(work, first=first, layer=layer, last=last, halves=tuple(halves), others=tuple((change(b), n) for b, n in work.others))


def _together(blocks: Sequence[Block]) -> Block:
    """Blocks that come once each, as one."""
    if len(blocks) == 1:
        return blocks[0]
    frozen = [b for b in blocks if b.trained is not None]  # parameters of such are those that learn nothing
    sums = {k: sum(getattr(b, k) for b in frozen or blocks) for k in ("params", "expert_params")}
    learnt = sum(b.params + b.expert_params if b.trained is None else b.trained for b in blocks) if frozen else None
    forward, back = (tuple(op for b in some for op in getattr(b, k) or ()) for k, some in (("forward", blocks), ("back", blocks[::-1])))
    waiting, work = sum(b.saved for b in blocks), max(b.work for b in blocks)
    return replace(blocks[-1], forward=forward, back=back, waiting=waiting, work=work, trained=learnt, **sums)


def _computed_in(work: Workload, dtype: str) -> Workload:
    """With its matmuls in another dtype than they were captured in: in fp8 and fp4 those of the repeated blocks by weights alone, as
    recipes have it; in tf32 all, attention too."""
    if dtype not in ("fp8", "fp4", "tf32"):
        return work
    kinds = (Gemm, Attention) if dtype == "tf32" else (Gemm,)

    def ops(given: Sequence[Op], back: bool = False) -> tuple[Op, ...]:
        return tuple(quantised([replace(op, dtype=dtype) if isinstance(op, kinds) else op for op in given], back))

    def block(b: Block) -> Block:
        return replace(b, forward=ops(b.forward), back=ops(b.back or (), True), parts=tuple((way, ops(again), freed) for way, again, freed in b.parts))

    made = _each(work, block)
    return made if dtype == "tf32" else replace(made, first=work.first, last=work.last)


def _beside(block: Block) -> Block:
    return replace(block, forward=tuple(beside_products(block.forward)), back=tuple(beside_products(block.back or ())))


class _Differ(Exception):
    """Two records differ in more than sizes."""


def grown(one: Any, two: Any) -> Callable[[float], Any]:
    """What `one` and `two`, of some samples and twice as many, say of x times as many samples; refused with `_Differ` where they differ in more than sizes.

    What does not grow is handed on as it is, so the parts of many sizes are shared."""
    if type(one) is not type(two):
        raise _Differ
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        step = two - one
        if not step:
            return _Fixed(one)
        return (lambda x: round(one + step * (x - 1))) if isinstance(one, int) else (lambda x: one + step * (x - 1))
    if isinstance(one, (bool, str, type(None))):
        if one != two:
            raise _Differ
        return _Fixed(one)
    both = zip(one, two, strict=True) if isinstance(one, tuple) else ((getattr(one, f.name), getattr(two, f.name)) for f in fields(one))
    if isinstance(one, tuple) and len(one) != len(two):
        raise _Differ
    parts = [grown(a, b) for a, b in both]
    if all(isinstance(p, _Fixed) for p in parts):
        return _Fixed(one)
    if isinstance(one, tuple):
        return lambda x: tuple([p(x) for p in parts])
    return lambda x: type(one)(*[p(x) for p in parts])


@dataclass(frozen=True, eq=False, slots=True)
class _Fixed:
    value: Any

    def __call__(self, x: float) -> Any:
        return self.value
