"""A captured step made short: one of its repeated blocks, or of the groups that do, between what stands before the first and behind the last.
Of a model with several rows of blocks, an encoder's and a decoder's, one of each: row i is part 2 i + 1, and what follows it the next.

All that is priced of a stack of equal blocks follows from it, so it costs as little to plan a hundred layers as two. Values that many blocks
read (rotary tables, masks, an encoder's output) are read by the one that is left.

`PlacedShort` is a short step as a setting shards it: the kernels of its parts in records of `cost.work`, and the bytes they keep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from weft.autodiff import grad
from weft.core.errors import PlanError
from weft.core.layout import R, S
from weft.core.node import Node, remade, toposort
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.cost.grouping import CLASSIC, EAGER, Kernels, local_bytes, scores_kept
from weft.cost.work import Collective, Gemm, Op, inside
from weft.frontend.capture import Captured
from weft.ops.comm import all_gather, all_reduce, is_comm, reduce_scatter
from weft.ops.pointwise import dropout_op
from weft.ops.registry import Kind
from weft.plan.layers import ATTENTION, FFN, FULL, MOST_OF_IT, ROWS, Layers, Row
from weft.plan.named import input_layouts
from weft.plan.pins import parse_pin, resolve
from weft.plan.place import Placements, placed_with
from weft.plan.sent_alone import imbalanced, sent_alone
from weft.plan.setting import Setting
from weft.plan.spec import Spec
from weft.plan.workload import Block

FIRST, LAYER = 0, 1  # parts of it: what stands before all rows, and the first row
WAYS = ("activation", "ffn", "selective", "per-op")  # of running a part of a block again


@dataclass(frozen=True, eq=False)
class Short:
    """A captured step with one of its repeated blocks, and the part of every node."""

    program: Program
    part: Mapping[Node, int]
    active: frozenset[Node]  # forward nodes that read both batch and parameters
    repeats: tuple[int, ...]  # of each row
    boundary: tuple[tuple[Node, ...], ...]  # what the block of each row hands on
    ways: Mapping[tuple[int, str, int], frozenset[Node]]  # what is recomputed of the block of a part, or of half of it
    half: frozenset[Node]  # of the block, up to the place where it may be split into two; empty where it may not

    @property
    def rows(self) -> range:
        """The parts that repeat."""
        return range(LAYER, self.last, 2)

    @property
    def last(self) -> int:
        """The part behind all rows."""
        return 2 * len(self.repeats)


def short_of(captured: Captured) -> Short:
    """The short step; refused where too little repeats."""
    layers = Layers(captured)
    ahead, rows = layers.forward, layers.rows
    blocks = sum(row.blocks for row in rows if row.count > 1)
    if not 0 < len(rows) <= ROWS or blocks < max(2, MOST_OF_IT * layers.count):
        found = f"{layers.count} blocks, of which {blocks} in {len(rows)} rows are the same"
        raise PlanError("the model is no stack of equal blocks", needed="most of its blocks isomorphic, or in groups that are", found=found)
    became = _shortened(layers, rows)
    units = [range(row.start, row.start + row.period) for row in rows]
    ends = tuple(tuple(became[n] for n in ahead.given(layers.blocks[unit[-1]])) for unit in units)
    loss = became[ahead.loss]
    order = toposort([loss])
    kept = set(order)
    part = _parts(order, [{became[n] for k in unit for n in layers.nodes(k)} for unit in units], ends)
    active = frozenset(became[n] for n in ahead.active if n in became) & kept
    forward = new_program(captured.program.name, captured.program.mesh, [n for n in captured.program.inputs if n in kept], {"loss": loss})
    wanted = [name for name, x in captured.parameters.items() if name in forward.input_names and x.requires_grad and x.is_floating_point()]
    program = grad(forward, "loss", wanted)
    modes = {
        (2 * i + 1, mode, half): frozenset(became[n] for k in unit for r in layers.again(k, mode, half) for n in r.nodes)
        for i, unit in enumerate(units) for mode in WAYS for half in (ATTENTION, FFN, FULL)
    }  # fmt: skip
    row = rows[0]
    halved = len(rows) == row.period == 1 and layers.middle(row.start) is not None
    half = frozenset(layers.nodes(row.start, ATTENTION)) if halved else frozenset[Node]()
    return Short(program, _backward_parts(program, part, active), active, tuple(row.count for row in rows), ends, modes, half)


def _shortened(layers: Layers, rows: Sequence[Row]) -> dict[Node, Node]:
    """What becomes of every forward node that is left when each row is but its first unit."""
    ahead, became = layers.forward, {n: n for n in layers.forward.main}
    for row in rows:
        first, last = (ahead.given(layers.blocks[row.start + k - 1]) for k in (row.period, row.blocks))
        swap = {became[b]: became[a] for a, b in zip(first, last, strict=True)}
        made = remade([became[ahead.loss]], swap)
        became = {n: made[m] for n, m in became.items() if m in made}
    return became


def _parts(order: Sequence[Node], blocks: Sequence[Collection[Node]], ends: Sequence[Collection[Node]]) -> dict[Node, int]:
    """Forward nodes by part: of a row its block, behind it what reads what it hands on, before all rows the rest."""
    inside = {n: 2 * i + 1 for i, block in enumerate(blocks) for n in block}
    given = {n: 2 * i + 2 for i, end in enumerate(ends) for n in end}
    part: dict[Node, int] = {}
    for n in order:
        behind = [max(given.get(a, FIRST), part[a] if part[a] % 2 == 0 else FIRST) for a in n.args]
        part[n] = inside.get(n, max(behind, default=FIRST))
    return part


def _backward_parts(program: Program, part: Mapping[Node, int], active: Collection[Node]) -> dict[Node, int]:
    """A backward node belongs to the part of what it needs of the forward pass, and never to a later one than its cotangent; what leads to the
    gradient of a weight alone, to no part before the weight's."""
    found, weights = dict(part), _weights(program, part)
    for n in program.nodes:
        if n in found:
            continue
        needs = [found[a] for a in n.args if a in active]
        cotangents = [found[a] for a in n.args if a not in part]
        found[n] = min([*cotangents, max(needs)]) if needs else min(cotangents, default=max(part.values()))
        if n in weights:
            found[n] = max(found[n], min([*cotangents, weights[n]]))
    return found


def _weights(program: Program, part: Mapping[Node, int]) -> dict[Node, int]:
    """Nodes that lead to the gradient of one weight and nothing else, with the part that reads the weight first."""
    found: dict[Node, int] = {}
    for name, n in program.outputs:
        readers = [part[u] for u in program.users[program.input_names[name[2:]]] if u in part] if name.startswith("d.") else []
        found |= {n: min(readers)} if readers else {}
    for n in reversed(program.nodes):
        homes = {found.get(u) for u in program.users[n]}
        if n not in part and n not in found and len(homes) == 1 and (home := homes.pop()) is not None:
            found[n] = home
    return found


# --- placed


@dataclass(frozen=True, eq=False)
class PlacedShort:
    """A short step as a setting places it."""

    short: Short
    setting: Setting
    layouts: tuple[str, ...] = ()  # of parameters along tp

    @cached_property
    def _made(self) -> tuple[Program, Mapping[Node, Node]]:
        s, p = self.setting, self.short.program
        named = Spec(cp=s.cp, ep=s.ep, tp=s.tp, sp=s.sp and s.tp > 1)
        shapes = {n: node.shape for n, node in p.inputs_for(Role.PARAMETER).items()}
        pins = resolve(map(parse_pin, self.layouts), shapes, named.mesh.sizes) if s.tp > 1 else {}
        places, options = input_layouts(p, named, {}, pins)
        placements: dict[str, Placements] = {
            f"d.{name}": {a: places.get(name, {}).get(a, R) for a in ("tp", "ep") if a in named.mesh.axes and (a == "tp" or a in places.get(name, {}))}
            for name in p.input_names if f"d.{name}" in p.output_names
        }  # fmt: skip
        placed, made = placed_with(p, named.mesh, places, options, outputs=placements)
        changes = [partial(sent_alone, axis="ep")] * s.ragged_ep + [partial(imbalanced, imbalance=s.imbalance)] * (s.imbalance > 1)
        for change in changes:
            became: dict[Node, Node] = {}
            placed = change(placed, made=became)
            made = {old: became[new] for old, new in made.items()}
        return placed, made

    @property
    def program(self) -> Program:
        return self._made[0]

    @cached_property
    def part(self) -> dict[Node, int]:
        """Of every node: as the one it was made of; one that is not, as what it sums, or as what reads it."""
        _, made = self._made
        found, added = dict[Node, int](), list[Node]()
        for old, new in made.items():
            if old in self.short.part:
                found.setdefault(new, self.short.part[old])
        for n in reversed(self.program.nodes):
            if n not in found:
                found[n] = max((found[u] for u in self.program.users[n] if u in found), default=self.short.last)
                added.append(n)
        return found | {n: found[n.args[0]] for n in reversed(added) if n.op in (all_reduce, reduce_scatter)}

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
        return Kernels(self.program, lambda n: (n in self.ahead, self.part[n]), self.ahead, self.idle, self.setting.kernels)

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
                if late and self.setting.kernels == CLASSIC:
                    continue  # such systems sum what enters a norm before it, so that gradients of its weights are complete
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
        others that wait does not, but torch by itself makes none again; Megatron of 2021 keeps masks, and the slices of what it gathers."""
        waits = dict(self.joined.awaited)
        free = set(self.joined.remade & waits.keys())
        cast = {n for n in waits if n.op.is_cast and n not in free}
        for n in cast:  # the narrower of a value and its cast waits
            source = self.joined.base(n.args[0])
            if source in self.ahead and source not in self.idle and local_bytes(source) < local_bytes(n) and not waits[n]:
                free.add(n)
                waits.setdefault(source, False)
        kept = {n: local_bytes(n) for n in waits if n not in free or self.setting.kernels == EAGER}
        if self.setting.kernels == CLASSIC:
            kept = {n: local_bytes(n.args[0]) if n.op is all_gather else size for n, size in kept.items()}
            kept |= {n: kept.get(n, 0) + math.prod(n.type.layout.largest_local) for n in self.ahead if n.op is dropout_op}  # a byte for each element
            kept |= {n: kept.get(n, 0) + int(scores_kept(n)) for n in self.program.nodes if n.op.attends == 0}
        return kept

    def largest(self, part: int) -> float:
        """The largest value that passes."""
        sizes = [inside(n) or local_bytes(n) for n in self.program.nodes if self.part[n] == part and n.args and n.op.kind is not Kind.VIEW
                 and n not in self.idle and n not in self.late and n not in self.joined.left_out]  # fmt: skip
        return float(max(sizes, default=0))

    def params(self, part: int, experts: bool, of: Collection[bool] = (True, False)) -> float:
        """Elements of parameters that a part reads first; `of` those that are trained, or are not."""
        total = 0.0
        for name, node in self.program.input_names.items():
            if node.role is Role.PARAMETER and (f"d.{name}" in self.program.output_names) in of and self.home(node) == part:
                sharded = "ep" in node.layout.placements and isinstance(node.layout.placement("ep"), S)
                if sharded == experts:
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
        return float(sum(local_bytes(a) for a in read if a.args and a not in given and a not in self.idle and 0 < self.part[a] < rows[0])) if rows else 0.0

    def became(self, node: Node) -> Node:
        """What a node of the short step is here."""
        return self._made[1][node]

    def home(self, node: Node) -> int:
        readers = [self.part[u] for u in self.program.users[node] if u in self.ahead]
        return min(readers, default=FIRST)

    # -- blocks

    def block(self, name: str, part: int, half: int = FULL) -> Block:
        mine = [(ahead, nodes) for at, ahead, nodes in self.kernels if at == part and self._of_half(nodes, half)]
        forward = tuple(op for ahead, nodes in mine if ahead for op in self.records(nodes))
        back = tuple(op for ahead, nodes in mine if not ahead for op in self.records(nodes))
        share = self._share(part, half)
        repeats = part in self.short.rows
        kept = float(sum(local_bytes(self.became(n)) for n in self.short.boundary[part // 2])) if repeats else 0.0
        parts = tuple(self._again(mode, part, half) for mode in WAYS) if repeats else ()
        frozen = any(self.params(part, experts, (False,)) for experts in (False, True))
        learnt = sum(self.params(part, experts, (True,)) for experts in (False, True)) if frozen else None
        return Block(
            name, forward, share * self.params(part, False, (not frozen,)), share * self.params(part, True, (not frozen,)), kept=kept,
            work=self.largest(part), back=back, saved=float(sum(self._waiting(part, half).values())), parts=parts,
            trained=None if learnt is None else share * learnt,
        )  # fmt: skip

    def _share(self, part: int, half: int) -> float:
        if half == FULL or part != LAYER:
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
        return half == FULL or self._halves.get(nodes[-1], FFN) == half

    def _waiting(self, part: int, half: int) -> dict[Node, int]:
        return {n: size for n, size in self.saved.items() if self.part[n] == part and (half == FULL or self._halves.get(n, FFN) == half)}

    def _again(self, mode: str, part: int, half: int) -> tuple[str, tuple[Op, ...], float]:
        """What is recomputed in this way, and the bytes that need not wait then."""
        _, made = self._made
        inside = {made[n] for n in self.short.ways[part, mode, half] if n in made}
        inside |= {n for n in self.program.nodes if n in self.ahead and is_comm(n) and self.part[n] == part and self.joined.base(n.args[0]) in inside
                   and all(u in inside for u in self.program.users[n])}  # fmt: skip
        waiting = self._waiting(part, half)
        freed = {n for n in waiting if n in inside}
        needed = self._needed(freed, inside)
        more = {b for n in needed for a in n.args if (b := self.joined.base(a)) not in inside and b in self.ahead and b not in self.idle
                and b.op.kind is not Kind.SOURCE and b not in self.saved}  # fmt: skip
        ops = tuple(op for at, ahead, nodes in self.kernels if at == part and ahead and nodes[-1] in needed for op in self.records(nodes))
        return mode, ops, float(sum(waiting[n] for n in freed) - sum(local_bytes(n) for n in more))

    def _needed(self, roots: Iterable[Node], inside: Collection[Node]) -> set[Node]:
        found, todo = set[Node](), list(roots)
        while todo:
            n = todo.pop()
            if n in inside and n not in found:
                found.add(n)
                todo += [self.joined.base(a) for a in n.args]
        return found
