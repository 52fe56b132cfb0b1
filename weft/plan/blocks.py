"""A captured model as a stack: what its first part, its repeated block and its last part do on one device under a setting.

The short step (`plan.short`) is placed as the setting cuts it, and every node becomes a record of `cost.work`, so what is priced is what is
run. What copies share (dp, ZeRO) is no part of it: `plan.simulate` counts parameters and gradients by block.

Kernels: ops that only move memory join the chain they stand in, up to the next product, attention, lookup or collective; a chain touches
what enters and leaves it. Sizes of any micro-batch follow from two that were captured, since every size of a record is a constant plus a multiple of
the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from weft.core.errors import WeftError
from weft.core.layout import R, S
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.work import MATH, Attention, Collective, Gemm, Op, Touch, dtype_of, of_node, query_and_key
from weft.frontend.capture import Captured
from weft.ops.comm import is_comm
from weft.ops.registry import Kind, flops, nbytes
from weft.plan.layers import ATTENTION, FFN, WHOLE
from weft.plan.named import input_layouts, stacked
from weft.plan.place import Placements, placed_with
from weft.plan.setting import Setting
from weft.plan.short import FIRST, LAST, LAYER, WAYS, Short, short_of
from weft.plan.spec import Spec
from weft.plan.workload import Block, Workload, beside_products, odd_of

MOST = 4  # samples that are captured; sizes of more follow
MANY = 4  # flops for each element it touches, beyond which an op does more than move memory


# -- a short step on a mesh ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placed:
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
                found[n] = max((found[u] for u in self.program.users[n] if u in found), default=LAST)
        return found

    @cached_property
    def ahead(self) -> set[Node]:
        return set(toposort([self.program.output_names["loss"]]))

    @cached_property
    def idle(self) -> set[Node]:
        """Forward nodes that read no batch or no parameter: tables, masks and casts of weights, made once and not for every micro-batch."""
        _, made = self._made
        active = {made[n] for n in self.short.active}
        found: set[Node] = set()
        for n in self.program.nodes:
            if n in self.ahead and n not in active and not any(a in self.ahead and a not in found and a.args for a in n.args):
                found.add(n)
        return found

    # -- kernels

    @cached_property
    def kernels(self) -> list[tuple[int, bool, tuple[Node, ...]]]:
        """Part, whether ahead, and nodes of every kernel, in order."""
        level: dict[Node, int] = {}
        joined: dict[Node, list[Node]] = {}
        order: list[list[Node]] = []
        for n in self.program.nodes:
            if n in self.idle or n.op.kind is Kind.SOURCE:
                level[n] = 0
                continue
            level[n] = max((level[a] + (not self._moves(a)) for a in n.args), default=0)
            chain = next((joined[b] for a in n.args if (b := _base(a)) in joined and self._joins(b, n, level)), None)
            if n.op.kind is Kind.VIEW and len(n.args) == 1:
                continue
            if chain is None or not self._moves(n):
                order.append(chain := [])
            chain.append(n)
            if self._moves(n):
                joined[n] = chain
        return [(self.part[c[-1]], c[-1] in self.ahead, tuple(c)) for c in order]

    def _moves(self, n: Node) -> bool:
        """Whether an op only moves memory, element by element or row by row."""
        if n.op.kind in (Kind.POINTWISE, Kind.VIEW, Kind.SOURCE):
            return True
        if n.op.kind is not Kind.WHOLE or n.op.name in ("item", "together"):
            return n.op.name == "item"
        size = sum(math.prod(t.layout.largest_local) for t in (*n.types, *(t for a in n.args for t in a.types)))
        floats = all(t.dtype.is_floating_point for a in n.args[:1] for t in a.types)
        return floats and flops(n) <= MANY * size

    def _joins(self, a: Node, n: Node, level: Mapping[Node, int]) -> bool:
        return self._moves(n) and level[a] == level[n] and (a in self.ahead) == (n in self.ahead) and self.part[a] == self.part[n]

    def records(self, nodes: Sequence[Node]) -> Iterator[Op]:
        """Of one kernel."""
        if len(nodes) == 1 and not self._moves(nodes[0]):
            yield from self._alone(nodes[0])
            return
        inside = set(nodes)
        read = {b: min(_held(b), *(nbytes(a.type) for n in nodes for a in n.args if _base(a) is b)) for n in nodes for x in n.args
                if (b := _base(x)) not in inside and b.op.kind is not Kind.SOURCE}  # fmt: skip
        wrote = [n for n in nodes if self._read_outside(n, inside)]
        moved = sum(read.values()) + sum(_held(n) for n in wrote)
        hard = sum(float(math.prod(n.types[0].layout.largest_local)) for n in nodes if n.op.name.startswith(MATH))
        name = " ".join(dict.fromkeys(n.op.name for n in nodes))
        if moved:
            own = {"kind": name, "elements": float(_widest(nodes[0]))} if len(nodes) == 1 else {}  # a rate of its own has an op alone
            yield Touch(name, float(moved), 0, math=hard, **own)  # type: ignore[arg-type]

    def _alone(self, n: Node) -> Iterator[Op]:
        late = n in self.late
        if n.op.name.startswith("attention") and n.op.name != "attention_merge":
            yield self._attention(n)
            return
        for op in of_node(n):
            if isinstance(op, Gemm) and n not in self.ahead:
                yield replace(op, name=f"{op.name} {'weight' if late else 'input'} gradient", weight=late)
            elif isinstance(op, Collective):
                yield replace(op, hidden=op.axis == "cp" and op.kind == "all_gather")
            else:
                yield op

    def _attention(self, n: Node) -> Attention:
        q, k = query_and_key(n)
        *lead, rows, width = q.type.layout.largest_local
        batch, *groups, keys, _ = k.type.layout.largest_local
        back = n.op.name != "attention"
        heads = math.prod(lead) // max(1, batch)
        causal, launches = bool(n.attr("causal")), 2 if back else 1
        return Attention(batch, heads, math.prod(groups), rows, keys, width, causal, dtype_of(n), n.op.name, back=back, launches=launches)

    def _read_outside(self, n: Node, inside: Collection[Node]) -> bool:
        users = self.program.users[n]
        return bool(self.program.outputs_of(n)) or any((u.op.kind is Kind.VIEW and self._read_outside(u, inside)) or
                                                       (u.op.kind is not Kind.VIEW and u not in inside) for u in users)  # fmt: skip

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
                    b = _base(a)
                    if b in self.ahead and b not in self.idle and b.op.kind is not Kind.SOURCE:
                        waits[b] = waits.get(b, False) or not self._moves(n)
        free = set()
        for n in self.program.nodes:
            if n in waits and not waits[n] and n.op.kind is Kind.POINTWISE and self._remakable(n, waits):
                free.add(n)
        cast = {n for n in waits if n.op.name == "cast" and n not in free}
        for n in cast:  # the narrower of a value and its cast waits
            source = _base(n.args[0])
            if source in self.ahead and source not in self.idle and _held(source) < _held(n) and not waits[n]:
                free.add(n)
                waits.setdefault(source, False)
        return {n: _held(n) for n in waits if n not in free}

    def _remakable(self, n: Node, waits: Mapping[Node, bool]) -> bool:
        sources = [_base(a) for a in n.args]
        return all(a in waits or a in self.idle or a.op.kind is Kind.SOURCE for a in sources)

    def largest(self, part: int) -> float:
        """The largest value that passes."""
        sizes = [_held(n) for n in self.program.nodes if self.part[n] == part and n.args and n.op.kind is not Kind.VIEW and n not in self.idle
                 and n not in self.late]  # fmt: skip
        return float(max(sizes, default=0))

    def params(self, part: int, experts: bool) -> float:
        """Elements of parameters that a part reads first."""
        total = 0.0
        for name, node in self.program.input_names.items():
            if f"d.{name}" in self.program.output_names and self.home(node) == part:
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
            found += math.prod(node.layout.largest_local) if f"d.{name}" in self.program.output_names and {FIRST, LAST} <= readers else 0.0
        return found

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
        kept = float(sum(_held(self._made[1][n]) for n in self.short.boundary)) if part == LAYER else 0.0
        parts = tuple(self._again(way, half) for way in WAYS) if part == LAYER else ()
        return Block(
            name, forward, share * self.params(part, False), share * self.params(part, True), kept=kept, work=self.largest(part),
            back=back, waiting=float(sum(self._waiting(part, half).values())), parts=parts,
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

    def _again(self, way: str, half: int) -> tuple[str, tuple[Op, ...], float]:
        """What runs again in this way, and the bytes that need not wait then."""
        _, made = self._made
        inside = {made[n] for n in self.short.ways[way, half] if n in made}
        inside |= {n for n in self.program.nodes if n in self.ahead and is_comm(n) and self.part[n] == LAYER and _base(n.args[0]) in inside
                   and all(u in inside for u in self.program.users[n])}  # fmt: skip
        waiting = self._waiting(LAYER, half)
        freed = {n for n in waiting if n in inside}
        needed = self._needed(freed, inside)
        more = {b for n in needed for a in n.args if (b := _base(a)) not in inside and b in self.ahead and b not in self.idle
                and b.op.kind is not Kind.SOURCE and b not in self.saved}  # fmt: skip
        ops = tuple(op for at, ahead, nodes in self.kernels if at == LAYER and ahead and nodes[-1] in needed for op in self.records(nodes))
        return way, ops, float(sum(waiting[n] for n in freed) - sum(_held(n) for n in more))

    def _needed(self, roots: Iterable[Node], inside: Collection[Node]) -> set[Node]:
        found, todo = set[Node](), list(roots)
        while todo:
            n = todo.pop()
            if n in inside and n not in found:
                found.add(n)
                todo += [_base(a) for a in n.args]
        return found


def _base(node: Node) -> Node:
    """What a view is of."""
    while (node.op.kind is Kind.VIEW or node.op.name == "item") and len(node.args) == 1:
        node = node.args[0]
    return node


def _held(node: Node) -> int:
    return sum(nbytes(t) for t in node.types)


def _widest(node: Node) -> int:
    return max(math.prod(t.layout.largest_local) for t in node.types)


# -- a stack -------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stack:
    """A model that is a stack of equal blocks, at any micro-batch. `at(n)` captures its forward pass over n samples, on no device's memory."""

    name: str
    at: Callable[[int], Captured]
    _shorts: dict[int, Short] = field(default_factory=dict)
    _works: dict[tuple[int, Setting], tuple[Placed, Workload]] = field(default_factory=dict)
    _cuts: dict[tuple[str, int], bool] = field(default_factory=dict)

    seq = 0  # a captured model has no length of its own: samples are counted, not tokens

    @property
    def depth(self) -> int:
        return self.short(1).repeats

    @property
    def layers(self) -> int:
        return self.depth

    def short(self, samples: int) -> Short:
        if samples not in self._shorts:
            self._shorts[samples] = short_of(self.at(samples))
        return self._shorts[samples]

    # -- what may be cut

    def may_cut(self, tp: int, cp: int) -> bool:
        """Whether products can be shared by so many devices, and samples by so many."""
        return self._is_cut("tp", tp) and self._is_cut("cp", cp)

    @cached_property
    def experts(self) -> int:
        """How many a block has: the first dim of weights that hold one matrix for each."""
        p = self.short(1).program
        sizes = {
            w.shape[0] for name, w in p.input_names.items() if f"d.{name}" in p.output_names and stacked(p, w, w.shape[0] if w.ndim else 1)
        }
        return math.gcd(*sizes) if sizes else 0

    def _is_cut(self, axis: str, n: int) -> bool:
        if n > 1 and (axis, n) not in self._cuts:
            self._cuts[axis, n] = self._try(axis, n)
        return n == 1 or self._cuts[axis, n]

    def _try(self, axis: str, n: int) -> bool:
        """Along tp the weights of a block come out smaller, along cp the value between blocks."""
        try:
            placed = Placed(self.short(1), Setting(**{axis: n}))  # type: ignore[arg-type]
            if axis == "tp":
                return placed.params(LAYER, False) < Placed(self.short(1), Setting()).params(LAYER, False) * (1 / n + 0.5 * (1 - 1 / n))
            return all(isinstance(placed.became(x).layout.placement(axis), S) for x in placed.short.boundary if x.ndim > 1)
        except WeftError:
            return False

    # -- work

    def work(self, s: Setting) -> Workload:
        """What one device does for one micro-batch."""
        n = s.micro_batch * s.ep
        return self._captured(s, n) if n <= MOST else self._grown(s, n)

    def _captured(self, s: Setting, n: int) -> Workload:
        """As placed, with what does not change where anything is: collectives beside products, and a tied weight on the last stage."""
        placed, work = self._placed(s, n)
        if s.overlap_tp and s.tp > 1:
            first, layer, last, *halves = (_beside(b) for b in (work.first, work.layer, work.last, *work.halves))
            work = replace(work, first=first, layer=layer, last=last, halves=tuple(halves))
        if s.pp > 1:
            work = replace(work, last=replace(work.last, params=work.last.params + placed.shared))
        return replace(work, tokens=s.micro_batch)

    def _placed(self, s: Setting, n: int) -> tuple[Placed, Workload]:
        cut = Setting(tp=s.tp, cp=s.cp, ep=s.ep, sequence_parallel=s.sequence_parallel)
        if (n, cut) not in self._works:
            placed = Placed(self.short(n), cut)
            self._works[n, cut] = placed, self._made(placed)
        return self._works[n, cut]

    def _grown(self, s: Setting, n: int) -> Workload:
        """Every size is a constant plus a multiple of the samples, so two numbers of samples tell all others; where a few are placed in
        another way than twice as many, these and twice as many again."""
        few = s.ep * max(1, MOST // 2 // s.ep)
        for m in (few, 2 * few):
            one, two = (self._captured(s, k) for k in (m, 2 * m))
            made = grown(replace(one, tokens=1), replace(two, tokens=1), m, n)
            if made is not None:
                return replace(made, tokens=s.micro_batch)  # type: ignore[no-any-return]
        return self._captured(s, n)

    def _made(self, placed: Placed) -> Workload:
        s = placed.setting
        first, layer, last = (placed.block(name, part) for name, part in (("first", FIRST), ("layer", LAYER), ("last", LAST)))
        halves = tuple(placed.block(name, LAYER, half) for name, half in (("attention", ATTENTION), ("ffn", FFN))) if placed.short.half else ()
        passed = sum(_held(placed.became(x)) for x in placed.short.boundary)
        return Workload(
            self.name, first, layer, placed.short.repeats, last, tokens=1, model_flops=self.flops_per_token, total_params=self.params,
            boundary=float(passed / (1 if s.sequence_parallel else s.tp)), shared=placed.shared, halves=halves,
        )  # fmt: skip

    @cached_property
    def params(self) -> float:
        return float(sum(x.numel() for x in self.at(1).parameters.values()))

    @cached_property
    def odd(self) -> int:
        """A size of tables before and behind the blocks that is worth padding."""
        short = self.short(1)
        ends = {a for n in short.program.nodes if short.part[n] != LAYER for a in n.args if a.role is Role.PARAMETER and a.ndim == 2}
        return odd_of(size for a in ends for size in a.shape)

    @cached_property
    def flops_per_token(self) -> float:
        """Of forward and backward of a sample: products and attention."""
        short = self.short(1)
        each = [
            sum(flops(n) for n in short.program.nodes if n.op.kind in (Kind.CONTRACT, Kind.WHOLE) and short.part[n] == k) for k in range(3)
        ]
        return each[FIRST] + each[LAYER] * short.repeats + each[LAST]


def _beside(block: Block) -> Block:
    return replace(block, forward=tuple(beside_products(block.forward)), back=tuple(beside_products(block.back or ())))


def grown(one: Any, two: Any, few: int, n: int) -> Any:
    """What `one` and `two`, of `few` samples and twice as many, say of n; None where they differ in more than sizes."""
    kind = type(one)
    if kind is not type(two):
        return None
    if kind is float or kind is int:
        made = one + (two - one) * (n - few) / few
        return made if kind is float else round(made)
    if kind is bool or kind is str or one is None:
        return one if one == two else None
    if kind is tuple:
        parts = _grown_all(one, two, few, n) if len(one) == len(two) else None
        return None if parts is None else tuple(parts)
    names = _names(kind)  # type: ignore[arg-type]
    parts = _grown_all([getattr(one, x) for x in names], [getattr(two, x) for x in names], few, n)
    return None if parts is None else kind(*parts)


def _grown_all(ones: Sequence[Any], twos: Sequence[Any], few: int, n: int) -> list[Any] | None:
    found = []
    for a, b in zip(ones, twos, strict=True):
        made = grown(a, b, few, n)
        if made is None and a is not None:
            return None
        found.append(made)
    return found


@cache
def _names(kind: type) -> tuple[str, ...]:
    """Fields of a record, in the order it is made of them."""
    return tuple(f.name for f in fields(kind))
