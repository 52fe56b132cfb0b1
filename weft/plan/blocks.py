"""A captured model as a stack: what its first part, its repeated block and its last part do on one device under a setting.

The short step (`plan.short`) is placed as the setting shards it, and every node becomes a record of `cost.work`, so what is priced is what is
run. What replicas share (dp, ZeRO) is no part of it: `plan.simulate` counts parameters and gradients by block.

Sizes of any micro-batch follow from two that were captured, since every size of a record is a constant plus a multiple of
the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from weft.core.errors import PlanError, WeftError
from weft.core.layout import S
from weft.core.names import bare
from weft.core.role import Role
from weft.cost.grouping import CLASSIC, local_bytes
from weft.cost.work import Attention, Gemm, Op
from weft.frontend.capture import Captured
from weft.ops.registry import Kind, flops
from weft.plan.layers import ATTENTION, FFN
from weft.plan.named import stacked
from weft.plan.once import Once
from weft.plan.setting import Setting
from weft.plan.short import FIRST, LAYER, PlacedShort, Short, short_of
from weft.plan.workload import Block, Workload, odd_of, overlapped_with_matmuls, quantised

FEW = 2  # samples for each rank of ep that are captured, and twice as many; sizes of others follow
LEAST_SLICE = 512  # of what blocks hand on, that one rank of cp keeps at least along what is sharded


@dataclass(eq=False)
class Stack(Once):
    """A model that is a stack of equal blocks, at any micro-batch. `at(n)` captures its forward pass over n samples, on no device's memory;
    where it has more blocks than were captured, `repeats` says how many units of them."""

    name: str
    at: Callable[[int], Captured]
    dtype: str = ""  # of its matmuls, where it is another than what is captured: fp8, fp4, tf32
    seq: int = 0  # tokens of a sample; 0 where samples are counted
    repeats: int = 0
    captured_params: float = 0.0
    resized: Callable[[int], Stack] | None = None  # the same with so many tokens
    layouts: tuple[str, ...] = ()  # of parameters along tp, as `plan.pins` writes them
    _shorts: dict[int, Short] = field(default_factory=dict)
    _known: dict[Any, Any] = field(default_factory=dict)

    def pinned(self, layouts: tuple[str, ...]) -> Stack:
        """The same model with some layouts of parameters fixed."""
        if not layouts:
            return self
        at_length, resized = self.resized, None
        if at_length is not None:
            resized = lambda tokens: at_length(tokens).pinned(layouts)  # noqa: E731
        return self._once(("pinned", layouts), lambda: replace(self, resized=resized, layouts=layouts, _known={}))

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

    def may_shard(self, tp: int, cp: int, asked: bool = False) -> bool:
        """Whether matmuls can be shared by so many devices, most of them where nobody asked for it, and samples by so many in slices worth having."""
        if self.layouts and tp == 1:
            return False
        return self._is_sharded("tp", tp, 0.0 if asked or self.layouts else 0.5) and self._is_sharded("cp", cp) and (cp == 1 or self._slice(cp) >= LEAST_SLICE)

    def refusal(self, tp: int) -> str:
        """Why matmuls cannot be shared by so many devices."""
        try:
            self._placed(Setting(tp=tp), FEW).params(LAYER, False)
        except WeftError as e:
            return f"{e.message}, {e.needed}"
        return "nothing is sharded"

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters of what is priced: of repeated blocks those of one."""
        return {bare(name) for name in self.short(FEW).program.inputs_for(Role.PARAMETER)}

    def _slice(self, cp: int) -> int:
        """What a rank of cp keeps of the value between blocks, along what is sharded."""

        def least() -> int:
            placed = self._placed(Setting(cp=cp), FEW)
            layouts = (placed.became(x).layout for end in placed.short.boundary for x in end)
            return min(y.largest_local[at[0]] for y in layouts if (at := y.where_sharded("cp")) is not None)

        return self._once(("slice", cp), least)

    def require(self, s: Setting) -> None:
        """Refuse degrees that do not divide it."""
        for axis in ("tp", "cp"):
            n = s.size(axis)
            if not self._is_sharded(axis, n, 0.0):
                nearest = max(k for k in range(1, n) if self._is_sharded(axis, k, 0.0))
                needed = f"{axis} that divides what its blocks compute"
                raise PlanError(f"{self.name} cannot be sharded over {axis}{n}", needed=needed, found=f"{axis} = {n}", try_=f"--{axis} {nearest}")
        if s.ep > 1 and (not self.experts or self.experts % s.ep):
            needed = f"ep a divisor of experts = {self.experts}" if self.experts else "a model with experts, such as mixtral-8x7b"
            raise PlanError("the experts do not divide over ep", needed=needed, found=f"ep = {s.ep} of {self.name}", try_="--ep 1")

    @cached_property
    def experts(self) -> int:
        """How many a block has: the first dim of weights that hold one matrix for each."""
        p = self.short(FEW).program
        sizes = {
            w.shape[0] for w in p.inputs if w.role is Role.PARAMETER and stacked(p, w, w.shape[0] if w.ndim else 1)
        }
        return math.gcd(*sizes) if sizes else 0

    def _is_sharded(self, axis: str, n: int, least: float = 0.5) -> bool:
        """Whether at least so much of what could be shared by n devices along an axis is."""
        return n == 1 or self._once((axis, n), lambda: self._try(axis, n)) > least

    def _try(self, axis: str, n: int) -> float:
        """Along tp the weights of a block come out smaller, along cp the value between blocks."""
        try:
            placed, single = (self._placed(Setting(**{axis: k}), FEW) for k in (n, 1))  # type: ignore[arg-type]
            if axis == "tp":
                sharded, full = (sum(p.params(row, False) for row in p.short.rows) for p in (placed, single))
                return (1 - sharded / full) / (1 - 1 / n)
            return float(all(isinstance(placed.became(x).layout.placement(axis), S) for end in placed.short.boundary for x in end if x.ndim > 1))
        except WeftError:
            return 0.0

    # -- work

    def work(self, s: Setting) -> Workload:
        """What one device does for one micro-batch. Every size is a constant plus a multiple of the samples, so two numbers of samples tell
        all others."""
        self.require(s)
        sharded = Setting(tp=s.tp, cp=s.cp, ep=s.ep, sp=s.sp and s.tp > 1, ragged_ep=s.ragged_ep, kernels=s.kernels, imbalance=s.imbalance if s.ep > 1 else 1.0)
        work = self._sized(sharded, s.micro_batch * s.ep)
        if s.async_tp and s.tp > 1:
            work = _each(work, _overlapped)
        if s.pp > 1:  # a tied weight is on the last stage too
            work = replace(work, last=replace(work.last, params=work.last.params + work.shared))
        return replace(work, tokens=s.micro_batch * max(1, self.seq))

    def _sized(self, sharded: Setting, n: int) -> Workload:
        """Of n samples; where a few are placed in another way than twice as many, many are as these and twice as many again. One is no half
        of two: its slices lie in one piece."""
        few = FEW * sharded.ep
        if n > few and n != 2 * few and sharded.kernels != CLASSIC:  # whose kernels of some sizes are others
            for m in (few * k for k in (1, 2, 4, 8) if few * k <= n):
                made = self._pair(sharded, m)
                if made is not None:
                    return made(n / m)  # type: ignore[no-any-return]
        return self._captured(sharded, n)

    def _pair(self, sharded: Setting, m: int) -> Callable[[float], Any] | None:
        """What m samples and twice as many say of x times m; None where they are placed in two ways."""
        def pair() -> Callable[[float], Any] | None:
            try:
                return grown(self._captured(sharded, m), self._captured(sharded, 2 * m))
            except _Differ:
                return None

        return self._once(("pair", m, sharded), pair)

    def _captured(self, sharded: Setting, n: int) -> Workload:
        def work() -> Workload:
            made = _computed_in(self._made(self._placed(sharded, n)), self.dtype)
            if sharded != Setting():  # of which everything was asked
                del self._known["placed", n, sharded]
            return made

        return self._once(("work", n, sharded), work)

    def _placed(self, sharded: Setting, n: int) -> PlacedShort:
        return self._once(("placed", n, sharded), lambda: PlacedShort(self.short(n), sharded, self.layouts))

    def _made(self, placed: PlacedShort) -> Workload:
        s = placed.setting
        short = placed.short
        names = (*(f"layer of kind {i}" for i in range(len(short.rows) - 1)), "layer")
        *others, layer = (placed.block(name, row) for name, row in zip(names, short.rows, strict=True))
        last = _merged_blocks([placed.block("last", part) for part in range(2, short.last + 1, 2)])
        halves = tuple(placed.block(name, LAYER, half) for name, half in (("attention", ATTENTION), ("ffn", FFN))) if short.half else ()
        passed = max(sum(local_bytes(placed.became(x)) for x in end) for end in short.boundary)
        return Workload(
            self.name, placed.block("first", FIRST), layer, self.depth, last, tokens=1, model_flops=self.flops_per_token,
            boundary=float((passed + placed.crossing) / (1 if s.sp else s.tp)), shared=placed.shared, halves=halves,
            others=tuple(zip(others, short.repeats, strict=False)),
        )  # fmt: skip

    @cached_property
    def params(self) -> float:
        placed = self._placed(Setting(), FEW)
        return self.captured_params + (self.depth - sum(placed.short.repeats)) * (placed.params(LAYER, False) + placed.params(LAYER, True))

    @cached_property
    def wide(self) -> float:
        """Inputs and outputs of the matmuls of a block by a weight."""
        placed = self._placed(Setting(), FEW)
        return float(sum(sum(w.shape) for w in placed.program.inputs if w.role is Role.PARAMETER and w.ndim == 2 and placed.home(w) == LAYER))

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
        work = (flops(n) * times.get(short.part[n], 1) for n in short.program.nodes if n.op.kind in (Kind.CONTRACT, Kind.COMPOSITE))
        return sum(work) / FEW / max(1, self.seq)


def _each(work: Workload, change: Callable[[Block], Block]) -> Workload:
    """With every block changed."""
    first, layer, last, *halves = map(change, (work.first, work.layer, work.last, *work.halves))
    return replace(work, first=first, layer=layer, last=last, halves=tuple(halves), others=tuple((change(b), n) for b, n in work.others))


def _merged_blocks(blocks: Sequence[Block]) -> Block:
    """Blocks that come once each, as one."""
    if len(blocks) == 1:
        return blocks[0]
    frozen = [b for b in blocks if b.trained is not None]  # parameters of such are those that learn nothing
    sums = {k: sum(getattr(b, k) for b in frozen or blocks) for k in ("params", "expert_params")}
    learnt = sum(b.params + b.expert_params if b.trained is None else b.trained for b in blocks) if frozen else None
    forward, back = (tuple(op for b in some for op in getattr(b, k)) for k, some in (("forward", blocks), ("back", blocks[::-1])))
    saved, work = sum(b.saved for b in blocks), max(b.work for b in blocks)
    return replace(blocks[-1], forward=forward, back=back, saved=saved, work=work, trained=learnt, **sums)


def _computed_in(work: Workload, dtype: str) -> Workload:
    """With its matmuls in another dtype than they were captured in: in fp8 and fp4 those of the repeated blocks by weights alone, as
    recipes have it; in tf32 all, attention too."""
    if dtype not in ("fp8", "fp4", "tf32"):
        return work
    kinds = (Gemm, Attention) if dtype == "tf32" else (Gemm,)

    def ops(given: Sequence[Op], back: bool = False) -> tuple[Op, ...]:
        return tuple(quantised([replace(op, dtype=dtype) if isinstance(op, kinds) else op for op in given], back))

    def block(b: Block) -> Block:
        return replace(b, forward=ops(b.forward), back=ops(b.back, True), parts=tuple((mode, ops(again), freed) for mode, again, freed in b.parts))

    made = _each(work, block)
    return made if dtype == "tf32" else replace(made, first=work.first, last=work.last)


def _overlapped(block: Block) -> Block:
    return replace(block, forward=tuple(overlapped_with_matmuls(block.forward)), back=tuple(overlapped_with_matmuls(block.back)))


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
