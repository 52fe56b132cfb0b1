"""The layers of a transformer as systems of today run them, counted by hand from sizes and a setting: experts get their tokens by all_to_all,
which no plan of weft does. Heads and columns of feed-forwards are sharded over tp, tokens over cp (and, between matmuls, over tp where sequence
parallel), experts over ep, the vocabulary over tp.

How many passes over memory a part costs follows from which tensors its kernels, pointwise chains in one each, read and write; none is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from weft.cluster.kernels import WIDTH, kept_width
from weft.cost.work import Attention, Collective, Gemm, MemoryBound, Op, through_experts
from weft.plan.setting import Setting
from weft.plan.sizes import Shape
from weft.plan.workload import Block, Workload, odd_of, overlapped_with_matmuls, quantised


@dataclass(frozen=True)
class Product(Gemm):
    """A matmul, and the bytes of its inputs that wait for its backward."""

    saved: float = 0.0
    bias: bool = False


@dataclass(frozen=True)
class Scores(Attention):
    """Attention, and the bytes that wait for its backward."""

    saved: float = 0.0


@dataclass(frozen=True)
class Passes(MemoryBound):
    """Passes over memory, those of the backward, and the bytes that wait for it."""

    back: float = 0.0
    back_launches: int = 1
    saved: float = 0.0


def both_ways(name: str, size: float, back: float, launches: int = 1, back_launches: int = 1, saved: float = 0.0) -> Passes:
    return Passes(name, size, launches, back=back, back_launches=back_launches, saved=saved)


def saved_of(op: Op) -> float:
    """Bytes that wait for the backward of an op."""
    return float(getattr(op, "saved", 0.0))


def unsaved(op: Op) -> Op:
    """The same where nothing waits."""
    return replace(op, saved=0.0) if isinstance(op, (Product, Scores, Passes)) else op


def narrowed(ops: Iterable[Op]) -> Iterator[Op]:
    """With what makes narrow operands, in both passes."""
    made = tuple(quantised(tuple(ops)))
    for op, after in zip(made, (*made[1:], None), strict=True):
        if isinstance(op, MemoryBound) and op.name == "quantise" and isinstance(after, Gemm):
            op = Passes(**vars(op), back=op.bytes * after.n / after.k)
        yield op


def _trained(op: Op, brought: float, wide: float) -> Op:
    """A part of a layer of experts with its backward: `brought` bytes of all rows as tokens, `wide` as an expert has them inside."""
    if isinstance(op, Gemm):
        return Product(**vars(op), saved=brought if op.name == "experts up" else wide)
    backs = {"dispatch": (2 * brought, 4, brought), "expert activation": (5 * wide, 1, 2 * wide), "combine": (3 * brought, 3, 0.0)}
    return Passes(**vars(op), **dict(zip(("back", "back_launches", "saved"), backs[op.name], strict=True))) if op.name in backs else op


def workload(shape: Sized, setting: Setting) -> Workload:
    """What one device does for one micro-batch."""
    return Layers(shape, setting).build()


@dataclass(frozen=True)
class Counted(Shape):
    """A transformer whose parameters and flops are counted by hand."""

    @property
    def head_dim(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def attention_params(self) -> int:
        return self.hidden * (2 * self.heads + 2 * self.kv) * self.head_dim

    @property
    def ffn_params(self) -> int:
        """Of one feed-forward, or of one expert."""
        return self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def norm_params(self) -> int:
        """Norms and biases of a layer."""
        biases = (2 * self.hidden + self.inner + (self.heads + 2 * self.kv) * self.head_dim) if self.bias else 0
        return self.hidden * (4 if self.bias else 2) + biases

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden + (0 if self.rotary else self.seq * self.hidden)

    @property
    def moe_layers(self) -> int:
        return self.layers // self.moe_every if self.experts else 0

    @property
    def params(self) -> float:
        dense = self.layers * (self.attention_params + self.norm_params) + self.embedding_params
        mixed = self.moe_layers * (self.ffn_params * self.experts + self.hidden * self.experts)
        head = 0 if self.tied else self.vocab * self.hidden
        return dense + mixed + (self.layers - self.moe_layers) * self.ffn_params + head

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward as MFU is usually counted: six per parameter met, and all scores, masked or not."""
        met = self.layers * self.attention_params + (self.layers - self.moe_layers + self.moe_layers * self.chosen) * self.ffn_params
        scores = 12 * self.layers * self.seq * self.heads * self.head_dim
        return 6.0 * (met + self.vocab * self.hidden) + scores


@dataclass(frozen=True)
class Sized(Counted):
    """A transformer whose work is counted by hand, too."""

    layouts = ()  # of parameters, none of which is fixed

    @property
    def depth(self) -> int:
        return self.layers

    @property
    def odd(self) -> int:
        """A vocabulary that is worth padding."""
        return odd_of([self.vocab])

    @property
    def resized(self) -> Callable[[int], Sized]:
        return lambda seq: replace(self, seq=seq)

    def may_shard(self, tp: int, cp: int, asked: bool = False) -> bool:
        return self.heads % tp == 0 and self.inner % tp == 0 and self.seq % cp == 0

    def work(self, setting: Setting) -> Workload:
        return workload(self, setting)


@dataclass(frozen=True)
class Layers:
    shape: Sized
    setting: Setting

    @cached_property
    def tokens(self) -> int:
        """Tokens a device holds inside the matmuls."""
        return max(1, self.setting.micro_batch * self.shape.seq // self.setting.cp)

    @cached_property
    def width(self) -> float:
        return kept_width(self.setting.dtype)

    @cached_property
    def stream(self) -> float:
        """Bytes of the residual stream inside the matmuls."""
        return float(self.tokens * self.shape.hidden * self.width)

    @cached_property
    def between(self) -> float:
        """Bytes of the residual stream between the matmuls."""
        return self.stream / (self.setting.tp if self.setting.sp else 1)

    def build(self) -> Workload:
        s, t = self.shape, self.setting
        return Workload(
            s.name, self.first(), self.layer(bool(s.experts)), s.layers, self.last(), tokens=t.micro_batch * s.seq, model_flops=s.flops_per_token,
            boundary=self.stream / t.tp, shared=s.vocab * s.hidden / t.tp if s.tied else 0.0, halves=self.halves(bool(s.experts)),
        )  # fmt: skip

    # --- blocks

    def layer(self, moe: bool) -> Block:
        attention, ffn = self.halves(moe)
        (_, one, frees), (_, two, more) = attention.parts[0], ffn.parts[0]
        return told(
            "layer", attention.forward + ffn.forward, attention.params + ffn.params, ffn.expert_params, kept=self.between,
            work=max(attention.work, ffn.work), parts=(("selective", one + two, frees + more), *ffn.parts[1:-1]),
        )  # fmt: skip

    def halves(self, moe: bool) -> tuple[Block, Block]:
        """Attention and feed-forward, each with its residual: where a layer may be split between two stages."""
        s, t = self.shape, self.setting
        ffn = (*self.experts(), *([] if t.tp == 1 else self.leave())) if moe else (*self.feed_forward(), *self.leave())
        parts = ((*self.attention(), *self.leave()), ffn)
        ops = [tuple(narrowed(tuple(overlapped_with_matmuls(p)) if t.async_tp else p)) for p in parts]
        expert = s.ffn_params * s.experts / (t.ep * t.tp) if moe else 0.0
        attention = s.attention_params / t.tp + s.norm_params / 2
        params = (0 if moe else s.ffn_params) / t.tp + s.norm_params / 2 + (s.hidden * s.experts if moe else 0)
        work = [self.tokens * n * self.width / t.tp for n in (3 * s.hidden, s.inner * (2 if s.gated else 1))]
        again = (self.redo_attention(), self.redo_activation(ffn))
        return (
            told("attention", ops[0], attention, kept=self.between, work=work[0], parts=(("selective", *again[0]),)),
            told("ffn", ops[1], params, expert, kept=self.between, work=work[1],
                 parts=(("selective", *again[1]), ("activation", *again[1]), ("ffn", *self.redo_ffn(ffn)))),
        )  # fmt: skip

    def first(self) -> Block:
        """Look up words and positions."""
        s, t = self.shape, self.setting
        table = -(-s.vocab // t.tp) * s.hidden * self.width
        lookup = both_ways("embedding", 2 * self.stream, 2 * self.stream + table, 1, 2)
        cut = (self.meet("reduce_scatter" if t.sp else "all_reduce"),) if t.tp > 1 else ()
        return told("embedding", (lookup, *cut), s.embedding_params / t.tp, work=table)

    def last(self) -> Block:
        """Final norm, logits and loss."""
        s, t = self.shape, self.setting
        columns = -(-s.vocab // t.tp)
        logits = self.tokens * columns * self.width
        loss = both_ways("cross entropy", 4 * logits, 3 * logits, 2, 2, saved=logits)
        norms = self.norm()
        head = Product(self.tokens, columns, s.hidden, dtype=self.wide_dtype, name="logits", saved=self.between)
        params = 0 if s.tied and t.pp == 1 else s.vocab * s.hidden / t.tp
        sums = [Collective("all_reduce", self.tokens * 4.0, "tp", "loss") for _ in range(2)] if t.tp > 1 else []
        return told("head", (*norms, *self.enter(), head, loss, *sums), params, work=2 * logits)

    # --- parts of a layer

    def norm(self) -> tuple[Op, ...]:
        return (both_ways("norm", 2 * self.between, 4 * self.between, 1, 2),)

    def enter(self) -> tuple[Op, ...]:
        """Bring the tokens together before a matmul sharded by columns."""
        t = self.setting
        return (self.meet("all_gather"), *self.copied()) if t.tp > 1 and t.sp else ()

    def leave(self) -> tuple[Op, ...]:
        """Sum the terms of a matmul sharded by rows, then add to the residual."""
        t = self.setting
        meet: tuple[Op, ...] = ()
        if t.tp > 1:
            meet = (*self.copied(), self.meet("reduce_scatter")) if t.sp else (self.meet("all_reduce"),)
        passes, kept = (3, 0.5 * self.between) if self.shape.dropout else (1, 0.0)  # a sum alone joins the norm after it
        return (*meet, both_ways("residual", passes * self.between, passes * self.between, 0, 1, saved=kept))

    def copied(self) -> tuple[Op, ...]:
        """Slices of a sequence are not contiguous where the batch comes first."""
        strided = self.setting.batch_first and self.setting.micro_batch > 1
        return (both_ways("copy slices", 2 * self.stream, 2 * self.stream),) if strided else ()

    def meet(self, kind: str) -> Collective:
        return Collective(kind, self.stream, "tp", kind.replace("_", " "))

    def product(self, name: str, n: int, k: int, saved: float) -> Gemm:
        return Product(self.tokens, n, k, dtype=self.setting.dtype, name=name, saved=saved, bias=self.shape.bias)

    def attention(self) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        wide = (s.heads + 2 * max(s.kv, t.tp)) * s.head_dim // t.tp
        qkv = self.tokens * wide * self.width
        out = self.tokens * s.heads * s.head_dim // t.tp * self.width
        passes = 2 * qkv if s.rotary else 0.0
        turn = both_ways("rotary" if s.rotary else "heads", passes, passes)
        return (
            *self.norm(), *self.enter(), self.product("qkv", wide, s.hidden, self.between), turn, *self.ring(qkv), *self.flash(qkv),
            self.product("projection", s.hidden, s.heads * s.head_dim // t.tp, out),
        )  # fmt: skip

    def flash(self, saved: float) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        local = s.seq // t.cp
        kv = max(1, s.kv // t.tp)
        # along cp a causal ring is balanced: every rank meets half of all pairs
        return (Scores(t.micro_batch, s.heads // t.tp, kv, local, s.seq, s.head_dim, s.causal, self.wide_dtype, saved=saved),)

    @property
    def wide_dtype(self) -> str:
        """Attention is not computed in fewer than 16 bits."""
        return "bf16" if self.setting.dtype in ("fp8", "fp4") else self.setting.dtype

    def ring(self, qkv: float) -> tuple[Op, ...]:
        """Keys and values are sent around cp while attention works on those at hand."""
        s, t = self.shape, self.setting
        if t.cp == 1:
            return ()
        share = 2 * s.kv / (s.heads + 2 * s.kv)
        return (Collective("all_gather", qkv * share * t.cp, "cp", "keys and values", hidden=True),)

    def redo_attention(self) -> tuple[tuple[Op, ...], float]:
        """Attention recomputed, which frees its result: made again from what its backward needs anyhow."""
        return self.flash(0.0), float(self.tokens * self.shape.heads * self.shape.head_dim // self.setting.tp * self.width)

    def redo_activation(self, ffn: tuple[Op, ...]) -> tuple[tuple[Op, ...], float]:
        """The activation recomputed from what its own backward needs, which frees the input of the matmul after it."""
        at = next(i for i, op in enumerate(ffn) if op.name.endswith("activation"))
        after = next(op for op in ffn[at + 1 :] if isinstance(op, Gemm))
        return (unsaved(ffn[at]),), saved_of(after)

    def redo_ffn(self, ffn: tuple[Op, ...]) -> tuple[tuple[Op, ...], float]:
        """The matmul before the activation recomputed too, tokens brought together for it once more: frees all that is wide."""
        at = next(i for i, op in enumerate(ffn) if op.name.endswith("activation"))
        up = next(i for i in range(at, -1, -1) if isinstance(ffn[i], Gemm))
        gather = ffn[up - 1 : up] if isinstance(ffn[up - 1], Collective) and ffn[up - 1].name == "all gather" else ()
        after = next(op for op in ffn[at + 1 :] if isinstance(op, Gemm))
        again = tuple(unsaved(op) for op in (*gather, *ffn[up : at + 1]))
        return again, saved_of(ffn[at]) + saved_of(after)

    def activation(self) -> tuple[Op, ...]:
        s = self.shape
        inner = self.tokens * s.inner // self.setting.tp * self.width
        f, b = (3, 5) if s.gated else (2, 3)
        return (both_ways("activation", f * inner, b * inner, saved=inner * (2 if s.gated else 1)),)

    def feed_forward(self) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        inner = s.inner // t.tp
        up = self.product("up", inner * (2 if s.gated else 1), s.hidden, self.between)
        down = self.product("down", s.hidden, inner, self.tokens * inner * self.width)
        return (*self.norm(), *self.enter(), up, *self.activation(), down)

    def experts(self) -> tuple[Op, ...]:
        """Route, exchange, compute the experts at hand, exchange back."""
        s, t = self.shape, self.setting
        local = max(1, s.experts // t.ep)
        rows = max(1, self.tokens * s.chosen // local)
        sent = self.between * s.chosen
        route = Product(self.tokens, s.experts, s.hidden, dtype=self.wide_dtype, name="router", saved=self.between)
        swap = (Collective("all_to_all", sent, "ep", "tokens to experts", copies=s.chosen),) if t.ep > 1 else ()
        inner = s.inner // t.tp
        wide = rows * local * inner * self.width
        ops = through_experts(rows, s.hidden, inner, local, t.dtype, s.gated, sent, wide, swap)
        return (*self.norm(), *self.enter(), route, *(_trained(op, sent, wide) for op in ops))


# --- backward passes, op by op


def told(
    name: str, forward: tuple[Op, ...], params: float = 0, experts: float = 0, kept: float = 0, work: float = 0,
    parts: tuple[tuple[str, tuple[Op, ...], float], ...] = (),
) -> Block:  # fmt: skip
    """A block by its forward pass."""
    again = tuple(per_op(forward))
    parts = (*parts, ("per-op", again, _freed(forward, again)))
    return Block(name, forward, params, experts, kept, work, back_of(forward), sum(map(saved_of, forward)), parts)


def back_of(forward: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(b for op in reversed(forward) for b in backward(op))


def per_op(ops: Iterable[Op]) -> Iterator[Op]:
    """What is recomputed when attention, sums over ranks and every second matmul are kept, and nothing else."""
    products = 0
    for op in ops:
        products += isinstance(op, Gemm)
        kept = isinstance(op, Attention) or (isinstance(op, Collective) and op.kind != "all_gather")
        if not kept and not (isinstance(op, Gemm) and products % 2):
            yield op


def _freed(ops: Iterable[Op], again: tuple[Op, ...]) -> float:
    """What need not be kept: inputs of ops after one that is recomputed from an input of its own that is kept."""
    freed, remade = 0.0, False
    for op in ops:
        if not isinstance(op, Collective):
            freed += saved_of(op) if remade else 0.0
            remade = op in again and saved_of(op) > 0
    return freed


def backward(op: Op) -> Iterator[Op]:
    """What the backward of one op does."""
    if isinstance(op, Product):
        yield from _of_gemm(op)
    elif isinstance(op, Scores):
        yield replace(op, back=True, saved=0, name=f"{op.name} backward", launches=2)
    elif isinstance(op, Passes):
        if op.back:
            yield MemoryBound(f"{op.name} backward", op.back, op.back_launches, walk=op.walk)
    else:
        yield replace(op, kind=_ADJOINT.get(op.kind, op.kind))


_ADJOINT = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def _of_gemm(op: Product) -> Iterator[Op]:
    yield replace(op, n=op.k, k=op.n, saved=0, weight=False, bias=False, name=f"{op.name} input gradient")
    yield replace(op, m=op.k, k=op.m, saved=0, bias=False, loose="k", name=f"{op.name} weight gradient")
    if op.bias:
        size = op.m * op.n * WIDTH[op.dtype]
        yield MemoryBound(f"{op.name} bias gradient", size)


