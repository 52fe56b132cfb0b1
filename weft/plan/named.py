"""How the inputs of a training step are laid out under a plan's degrees; `place` does the rest.

Tensor parallelism is found, not configured: a weight is sharded by columns, the sharding is followed through the ops that keep it, and
where it ends in a matmul with another weight, that one is sharded by rows. Where it ends anywhere else the weight stays replicated, but for
vocabularies: a table of more rows than columns is sharded along them, evenly or not, where they end in lookups, losses and sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from weft.core.errors import LayoutError, PlanError
from weft.core.layout import Layout, Mesh, O, Placement, R, S
from weft.core.names import bare
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.registry import ONE, Kind, Linear, equation_of
from weft.ops.shape import reshape_op
from weft.plan.place import Placements, PlacingOptions
from weft.plan.spec import Spec


def input_layouts(
    program: Program, named: Spec, states: Mapping[str, str], pins: Mapping[str, Placements] | None = None
) -> tuple[dict[str, Placements], PlacingOptions]:
    """How every input is laid out. `states` tells of which parameter an optimizer's tensor is; `pins` are parameters' own layouts."""
    placements: dict[str, dict[str, Placement]] = {}
    for name, node in program.inputs_for(Role.BATCH).items():
        if node.ndim:
            placements[name] = _batch(node, named)
    loss = program.output_names["loss"] if "loss" in program.output_names else program.outputs[0][1]
    weights = program.inputs_for(Role.PARAMETER)
    if named.tp > 1:
        placements |= {n: {"tp": shard} for n, shard in tensor_shards(program, loss, weights, named.tp).items()}
    if named.ep > 1:
        placements |= {n: {"ep": S(0)} for n, w in weights.items() if stacked(program, w, named.ep)}
    for name, places in (pins or {}).items():
        placements[name] = {a: p for a, p in {**placements.get(name, {}), **places}.items() if p != R}
    for state, param in states.items():
        placements[state] = dict(as_state(program.input_names[state], program.input_names[param], placements.get(param, {})))
    if named.most_zero and named.copies:
        level = {name: named.zero_of(bare(name)) for name in weights}
        sharded = [*(s for s, param in states.items() if level.get(param, named.zero)), *(n for n, z in level.items() if z == 3)]
        owners = owned(program, states, named.dp)
        for name in sharded:
            here, owner = placements.get(name, {}), owners.get(states.get(name, name))
            if owner is None:
                placements[name] = _also_sharded(program.input_names[name], here, named.copies)
            elif named.dp > 1:  # what has one owner is left to dp alone
                mine = {**here, "dp": O(owner)} if name in states else None
                placements[name] = mine or _also_sharded(program.input_names[name], here, {"dp": named.dp})
    scatter = frozenset({"tp"}) if named.sp and named.tp > 1 else frozenset()
    turn = frozenset({"cp"}) if named.a2a and named.cp > 1 else frozenset()
    gather = frozenset(named.copies) if named.most_zero == 3 else frozenset[str]()
    return placements, PlacingOptions(scatter, turn=turn, gather=gather)  # type: ignore[return-value]


def as_state(state: Node, param: Node, places: Placements) -> Placements:
    """How an optimizer's tensor is laid out next to its parameter: sharded the same along the dims that it shares with it."""
    shared = [d for d, n in enumerate(state.shape) if d < param.ndim and n == param.shape[d]]
    return {a: p for a, p in places.items() if not isinstance(p, S) or p.dim in shared}


def owned(program: Program, states: Mapping[str, str], ranks: int) -> dict[str, int]:
    """Parameters whose update multiplies matrices of their state, as Muon's does, and the copy that has all of it: each as many bytes as others.

    The owner sums the gradient, updates alone, and tells the others; in slices, every matmul would gather what the others have."""
    after: dict[Node, bool] = {}
    for n in program.nodes:
        after[n] = any(after[a] for a in n.args) or (n.role is Role.STATE and n.ndim == 2)
    many = {n for n in program.nodes if after[n] and n.op.kind is Kind.CONTRACT}
    if not many:
        return {}
    full = set(toposort(many))
    found = {p for s, p in states.items() if program.input_names[s] in full and program.input_names[s].shape == program.input_names[p].shape}
    load, out = [0] * ranks, {}
    for p in sorted(found, key=lambda p: -math.prod(program.input_names[p].shape)):
        out[p] = load.index(min(load))
        load[out[p]] += math.prod(program.input_names[p].shape)
    return out


def _batch(node: Node, named: Spec) -> dict[str, Placement]:
    places: dict[str, Placement] = {"dp": S(0, _batch_shards(node, named))} if named.dp > 1 else {}
    if named.cp > 1 and node.ndim > 1:
        places["cp"] = S(1)
    if named.ep > 1 and node.shape[0] >= named.dp * named.ep:
        places["ep"] = S(0)
    return places


def _batch_shards(node: Node, named: Spec) -> tuple[int, int] | None:
    """How the batch is sharded where not evenly."""
    n = node.shape[0]
    if not named.shards:
        return None
    if n % named.shards:
        more = -(-n // named.shards) * named.shards
        raise PlanError(f"a batch of {n} is not {named.shards} equal shards", needed=f"a multiple of {named.shards}", found=str(n), try_=str(more))
    return n, named.shards


def stacked(program: Program, weight: Node, n: int) -> bool:
    """A weight whose first dim runs over experts: every matmul that reads it keeps that dim."""
    users = program.users[weight]
    if weight.ndim < 3 or weight.shape[0] % n or not users:
        return False
    reads = [(u, u.args.index(w)) for w in (weight, *(u for u in users if u.op.is_cast)) for u in program.users[w] if u.op.kind is Kind.CONTRACT]
    return all((eq := equation_of(u)) is not None and eq.label(k, 0) in eq.outs[0] for u, k in reads)


def _also_sharded(node: Node, places: Mapping[str, Placement], copies: Mapping[str, int]) -> dict[str, Placement]:
    """Sharded along the axes of copies too, on the first dim that is long enough for all of them and not sharded already; where there is none, along
    one of them. Tensors without such a dim stay as they are.

    The inner axis takes its shards first, so that what the outer one moves between hosts is a shard of that; nested the other way where parts differ."""
    taken = {p.dim for p in places.values() if isinstance(p, S)}
    free = [(d, n) for d, n in enumerate(node.shape) if d not in taken]
    for axes in (tuple(copies), *((a,) for a in copies)):
        dim, n = next(((d, n) for d, n in free if n >= math.prod(copies[a] for a in axes)), (-1, 0))
        if n:
            inner = math.prod(copies[a] for a in axes[1:])
            within = n // inner if len(axes) > 1 and n % inner == 0 else None
            return {**places, axes[0]: S(dim, within), **{a: S(dim) for a in axes[1:]}}
    return dict(places)


# -- columns and rows ----------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """The sharding cannot be followed further."""


def tensor_shards(program: Program, loss: Node, weights: Mapping[str, Node], n: int) -> dict[str, S]:
    """The sharding of every weight that can be sharded by columns or by rows without a collective in between.

    What columns do not reach is tried from its rows: where several matmuls share a weight (queries, keys and values), it is sharded inside
    each of them, which only the far end of the chain tells."""
    forward = program.needs(loss)
    names = {node: name for name, node in weights.items()}
    found: dict[Node, S] = {}
    for begin in (_columns, _rows, _vocabulary):
        for node in program.nodes:
            if node in forward and (node.op.kind is Kind.CONTRACT and len(node.args) == 2 or begin is _vocabulary and _looks_up(node)):
                for k, w in enumerate(map(_stored, node.args)):
                    if w in names and w not in found:
                        flows = (_followed(_Flow(program, forward, names, found, n, begin is _vocabulary), *at) for at in begin(node, k, n))
                        found |= next((cuts for cuts in flows if cuts and (begin is not _rows or w in cuts and len(cuts) > 1)), {})
    return {names[w]: shard for w, shard in found.items()}


def _followed(flow: _Flow, value: Node, shard: S) -> dict[Node, S]:
    """The shardings of weights that follow from one of a value; none where they cannot all be had, or nothing ends them."""
    try:
        flow.require(value, shard)
        flow.follow()
    except (_Stop, LayoutError):
        return {}
    return flow.cuts if flow.ended else {}


def _stored(node: Node) -> Node:
    """A weight in the type it is kept in, where it is computed with in another."""
    return node.args[0] if node.op.is_cast else node


def _looks_up(node: Node) -> bool:
    """Whether it reads rows of a table, as the batch asks for them: what the table lacks adds nothing to the result."""
    if node.op.kind is not Kind.COMPOSITE or node.op.linear is not Linear.FIRST or len(node.args) != 2 or node.args[1].dtype.is_floating_point:
        return False
    return any(n.role is Role.BATCH for n in toposort([node.args[1]]))


def _vocabulary(node: Node, k: int, n: int) -> Iterator[tuple[Node, S]]:
    """A table sharded along its rows, of which it has more than columns: fewer are not worth the reductions."""
    eq, table = equation_of(node), node.args[k]
    assert eq is not None
    rows = [d for d, x in enumerate(eq.ins[k]) if x not in eq.ins[1 - k] and (x in eq.outs[0]) != _looks_up(node)]
    if table.ndim == 2 and len(rows) == 1 and table.shape[rows[0]] > max(n, table.shape[1 - rows[0]]):
        yield table, S(rows[0])


def _rows(node: Node, k: int, n: int) -> Iterator[tuple[Node, S]]:
    """What a weight multiplies, sharded as the weight's rows are."""
    eq = equation_of(node)
    assert eq is not None
    for d, x in enumerate(eq.ins[k]):
        if x in eq.ins[1 - k] and x not in eq.outs[0] and node.args[k].shape[d] % n == 0:
            yield node.args[1 - k], S(eq.ins[1 - k].index(x))


def _columns(node: Node, k: int, n: int) -> Iterator[tuple[Node, S]]:
    """A weight sharded by its columns."""
    eq = equation_of(node)
    assert eq is not None
    for d, x in enumerate(eq.ins[k]):
        if x not in eq.ins[1 - k] and x in eq.outs[0] and node.args[k].shape[d] % n == 0:
            yield node.args[k], S(d)


class _Flow:
    """Follows one sharding forward to the matmuls that end it, and back to whatever must be sharded the same."""

    def __init__(
        self, program: Program, forward: set[Node], names: Mapping[Node, str], found: Mapping[Node, S], n: int, vocabulary: bool = False
    ) -> None:
        self.program, self.forward, self.names, self.found, self.vocabulary = program, forward, names, found, vocabulary
        self.mesh = Mesh(tp=n)
        self.at: dict[Node, S] = {}
        self.cuts: dict[Node, S] = {}
        self.todo: list[Node] = []
        self.ended = False

    def require(self, node: Node, shard: S) -> None:
        """The node must be sharded so: a weight is, anything else is because its operands are."""
        if node in self.at:
            if self.at[node] != shard:
                raise _Stop
            return
        if node in self.names:
            if node in self.found or self._local(node, shard) is None:
                raise _Stop
            self.cuts[node] = shard
        elif len(node.types) == 1 and not node.dtype.is_floating_point:
            self.at[node] = shard  # indices and masks are replicated: a slice of them is free, and says nothing of others
            return
        elif node.op.is_input or node.op.is_number or len(node.types) != 1:
            raise _Stop
        else:
            self._require_operands(node, shard)
        self.at[node] = shard
        self.todo.append(node)

    def _local(self, node: Node, shard: S) -> Layout | None:
        layout = Layout.of(self.mesh, node.shape).shard("tp", shard.dim, shard.within)
        return layout if layout.is_even or self.vocabulary else None

    def _require_operands(self, node: Node, shard: S) -> None:
        if node.op.is_item:
            self._require_full_op(node.args[0], int(node.attr("index")), shard)
            return
        eq = equation_of(node)
        if node.op is reshape_op:
            self.require(node.args[0], self._reshaped(node, shard, node.args[0].shape))
            return
        if eq is None or eq.outs[0][shard.dim] in eq.unsharded:
            raise _Stop
        places = eq.dims_of(eq.outs[0][shard.dim])
        if not places:
            raise _Stop
        for k, d in places:
            self.require(node.args[k], S(d, shard.within))

    def _require_full_op(self, node: Node, index: int, shard: S) -> None:
        """One result of several is sharded so: its operands are, and the other results with it."""
        eq = equation_of(node)
        label = eq.outs[index][shard.dim] if eq is not None else ONE
        if eq is None or label in eq.unsharded or label == ONE or not eq.dims_of(label):
            raise _Stop
        for k, d in eq.dims_of(label):
            self.require(node.args[k], S(d, shard.within))
        self._results(node, label, shard)

    def _reshaped(self, node: Node, shard: S, shape: Iterable[int]) -> S:
        layout = Layout.of(self.mesh, node.shape).shard("tp", shard.dim, shard.within).reshape(tuple(shape))
        place = layout.placement("tp")
        if not isinstance(place, S):
            raise _Stop
        return place

    def follow(self) -> None:
        while self.todo:
            node = self.todo.pop()
            for user in self.program.users[node]:
                if user in self.forward and user not in self.at:
                    self._pass(node, user)

    def _pass(self, node: Node, user: Node) -> None:
        shard, eq = self.at[node], equation_of(user)
        if user.op is reshape_op:
            new = Layout.of(self.mesh, node.shape).shard("tp", shard.dim, shard.within).reshape(user.shape).placement("tp")
            assert isinstance(new, S)
            self._reach(user, new)
            return
        if user.op.is_item:
            return
        if eq is None:
            raise _Stop
        label = eq.label(user.args.index(node), shard.dim)
        if label in eq.unsharded and not (self.vocabulary and user.op.across) or label == ONE:
            raise _Stop
        for k, d in eq.dims_of(label):
            self.require(user.args[k], S(d, shard.within))
        self._results(user, label, shard)

    def _results(self, user: Node, label: str, shard: S) -> None:
        eq = equation_of(user)
        assert eq is not None
        for i, out in enumerate(eq.outs):
            results = (
                [user]
                if len(eq.outs) == 1
                else [u for u in self.program.users[user] if u.op.is_item and u.attr("index") == i and u in self.forward]
            )
            for r in results:
                if label in out:
                    self._reach(r, S(out.index(label), shard.within))
                elif user.op.kind is Kind.CONTRACT or self.vocabulary and (user.op.across or user.op.kind is Kind.REDUCE or _looks_up(user)):
                    self.ended = True
                else:
                    raise _Stop
        if len(eq.outs) > 1:
            self.at[user] = shard

    def _reach(self, node: Node, shard: S) -> None:
        if node not in self.at:
            self.at[node] = shard
            self.todo.append(node)
