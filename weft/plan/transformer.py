"""The work of a transformer on one device: from a few sizes and a setting to the records of `plan.workload`.

The shardings are the usual ones: heads and feed-forward columns over tp, tokens over cp (and, between the matmuls, over tp
where sequence parallel), experts over ep, vocabulary over tp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from weft.cluster.kernels import kept_width
from weft.core.errors import PlanError
from weft.cost.work import Attention, Collective, Gemm, Op, Touch
from weft.plan.setting import Setting
from weft.plan.style import STYLES, Style
from weft.plan.workload import Block, Workload, beside_products, odd_of, quantised

LEAST_SLICE = 512  # tokens of a sequence that one rank of cp keeps at least


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer. `chosen` of `experts` feed-forwards serve a token, in every `moe_every`-th layer."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    ffn: int = 0
    name: str = "transformer"
    gated: bool = False
    causal: bool = True
    rotary: bool = False
    bias: bool = True
    tied: bool = True
    dropout: bool = False
    experts: int = 0
    chosen: int = 1
    moe_every: int = 1
    cross_entropy: bool = True
    head: int = 0  # width of a head, where it is not hidden / heads

    @property
    def head_dim(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

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
    def odd(self) -> int:
        """A vocabulary that is worth padding."""
        return odd_of([self.vocab])

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden + (0 if self.rotary else self.seq * self.hidden)

    @property
    def depth(self) -> int:
        """Layers, or runs of layers of which one has experts."""
        return self.layers // (self.moe_every if self.experts else 1)

    def may_cut(self, tp: int, cp: int) -> bool:
        """Whether matmuls can be shared by so many devices, and a sequence by so many."""
        return self.heads % tp == 0 and self.inner % tp == 0 and self.seq % cp == 0 and (cp == 1 or self.seq // cp >= LEAST_SLICE)

    def work(self, setting: Setting) -> Workload:
        """What one device does for one micro-batch."""
        return workload(self, setting)

    @property
    def resized(self) -> Callable[[int], Shape]:
        """The same with so many tokens."""
        return lambda seq: replace(self, seq=seq)

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


def workload(shape: Shape, setting: Setting) -> Workload:
    """What one device does for one micro-batch."""
    return _WorkBuilder(shape, setting).build()


@dataclass(frozen=True)
class _WorkBuilder:
    shape: Shape
    setting: Setting

    @cached_property
    def style(self) -> Style:
        return STYLES[self.setting.kernels]

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
        return self.stream / (self.setting.tp if self.setting.sequence_parallel else 1)

    def build(self) -> Workload:
        s, t = self.shape, self.setting
        for name, count in (("heads", s.heads), ("ffn", s.inner)):
            if count % t.tp:
                near = max(n for n in range(1, t.tp) if s.heads % n == s.inner % n == 0)
                raise PlanError(f"{name} cannot be sharded", needed=f"tp a divisor of {name} = {count}", found=f"tp = {t.tp}", try_=f"--tp {near}")
        if t.ep > 1 and (not s.experts or s.experts % t.ep):
            needed = f"ep a divisor of experts = {s.experts}" if s.experts else "a model with experts, such as mixtral-8x7b"
            raise PlanError("experts cannot be spread", needed=needed, found=f"ep = {t.ep} of {s.name or 'a model'}", try_="--ep 1")
        return Workload(
            s.name, self.first(), self.repeated(), s.layers // (s.moe_every if s.experts else 1), self.last(),
            tokens=t.micro_batch * s.seq, model_flops=s.flops_per_token, total_params=s.params,
            boundary=self.stream / t.tp,
            shared=s.vocab * s.hidden / t.tp if s.tied else 0.0,
            halves=() if s.experts and s.moe_every > 1 else self.halves(bool(s.experts)),
        )  # fmt: skip

    def repeated(self) -> Block:
        """The layer, or the run of layers of which one has experts."""
        if not self.shape.experts:
            return self.layer(False)
        dense, moe = self.layer(False), self.layer(True)
        others = self.shape.moe_every - 1
        return replace(
            moe, forward=dense.forward * others + moe.forward, params=moe.params + others * dense.params,
            kept=moe.kept, redo=dense.redo * others + moe.redo, redo_frees=dense.redo_frees * others + moe.redo_frees,
            parts=tuple((n, a * others + b, x * others + y) for (n, a, x), (_, b, y) in zip(dense.parts, moe.parts, strict=True)),
        )  # fmt: skip

    # --- blocks

    def layer(self, moe: bool) -> Block:
        attention, ffn = self.halves(moe)
        return Block(
            "moe layer" if moe else "layer", attention.forward + ffn.forward, attention.params + ffn.params, ffn.expert_params,
            kept=self.between, work=max(attention.work, ffn.work), redo=attention.redo + ffn.redo,
            redo_frees=attention.redo_frees + ffn.redo_frees, parts=ffn.parts,
        )  # fmt: skip

    def halves(self, moe: bool) -> tuple[Block, Block]:
        """Attention and feed-forward, each with its residual: where a layer may be split between two stages."""
        s, t = self.shape, self.setting
        ffn = (*self.experts(), *([] if t.tp == 1 else self.leave())) if moe else (*self.feed_forward(), *self.leave())
        parts = ((*self.attention(), *self.leave()), ffn)
        ops = [tuple(quantised(tuple(beside_products(p)) if t.overlap_tp else p)) for p in parts]
        expert = s.ffn_params * s.experts / (t.ep * t.tp) if moe else 0.0
        attention = s.attention_params / t.tp + s.norm_params / 2
        params = (0 if moe else s.ffn_params) / t.tp + s.norm_params / 2 + (s.hidden * s.experts if moe else 0)
        work = [self.tokens * n * self.width / t.tp for n in (3 * s.hidden, s.inner * (2 if s.gated else 1))]
        again = (self.redo_attention(), self.redo_activation(ffn))
        return (
            Block("attention", ops[0], attention, kept=self.between, work=work[0], redo=again[0][0], redo_frees=again[0][1]),
            Block("ffn", ops[1], params, expert, kept=self.between, work=work[1], redo=again[1][0], redo_frees=again[1][1],
                  parts=(("activation", *again[1]), ("ffn", *self.redo_ffn(ffn)))),
        )  # fmt: skip

    def first(self) -> Block:
        """Look up words and positions."""
        s, t = self.shape, self.setting
        table = -(-s.vocab // t.tp) * s.hidden * self.width
        n, b = self.style.embed
        lookup = Touch("embedding", n * self.stream, b * self.stream + table, *self.style.embed_launches)
        cut = (self.meet("reduce_scatter" if t.sequence_parallel else "all_reduce"),) if t.tp > 1 else ()
        return Block("embedding", (lookup, *cut), s.embedding_params / t.tp, work=table)

    def last(self) -> Block:
        """Final norm, logits and loss."""
        s, t = self.shape, self.setting
        columns = -(-s.vocab // t.tp)
        logits = self.tokens * columns * self.width
        f, b = self.style.loss
        loss = Touch("cross entropy", f * logits, b * logits, *self.style.loss_launches, saved=self.style.loss_saved * logits)
        norms = self.norm()
        head = Gemm(self.tokens, columns, s.hidden, dtype=self.wide_dtype, name="logits", saved=self.between)
        params = 0 if s.tied and t.pp == 1 else s.vocab * s.hidden / t.tp
        sums = [Collective("all_reduce", self.tokens * 4.0, "tp", "loss") for _ in range(2)] if t.tp > 1 else []
        return Block("head", (*norms, *self.enter(), head, loss, *sums), params, work=self.style.loss_work * logits)

    # --- parts of a layer

    def norm(self) -> tuple[Op, ...]:
        f, b = self.style.norm
        return (Touch("norm", f * self.between, b * self.between, *self.style.norm_launches, saved=self.style.norm_saved * self.between),)

    def enter(self) -> tuple[Op, ...]:
        """Bring the tokens together before a matmul sharded by columns."""
        t = self.setting
        return (self.meet("all_gather"), *self.copied()) if t.tp > 1 and t.sequence_parallel else ()

    def leave(self) -> tuple[Op, ...]:
        """Sum the terms of a matmul sharded by rows, then add to the residual."""
        t, style = self.setting, self.style
        meet: tuple[Op, ...] = ()
        if t.tp > 1:
            meet = (*self.copied(), self.meet("reduce_scatter")) if t.sequence_parallel else (self.meet("all_reduce"),)
        f, b = style.residual_dropout if self.shape.dropout else style.residual
        kept = 0.5 * self.between if self.shape.dropout else 0.0
        return (*meet, Touch("residual", f * self.between, b * self.between, *style.residual_launches, saved=kept))

    def copied(self) -> tuple[Op, ...]:
        """Slices of a sequence are not contiguous where the batch comes first."""
        strided = self.setting.batch_first and self.setting.micro_batch > 1
        return (Touch("copy slices", 2 * self.stream, 2 * self.stream),) if strided else ()

    def meet(self, kind: str) -> Collective:
        return Collective(kind, self.stream, "tp", kind.replace("_", " "))

    def product(self, name: str, n: int, k: int, saved: float) -> Gemm:
        return Gemm(self.tokens, n, k, dtype=self.setting.dtype, name=name, saved=saved, bias=self.shape.bias)

    def attention(self) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        wide = (s.heads + 2 * max(s.kv, t.tp)) * s.head_dim // t.tp
        qkv = self.tokens * wide * self.width
        out = self.tokens * s.heads * s.head_dim // t.tp * self.width
        f, b = self.style.rotary if s.rotary else self.style.heads
        turn = Touch("rotary" if s.rotary else "heads", f * qkv, b * qkv, *self.style.rotary_launches)
        core = self.core() if self.style.attention_in_memory else self.flash(qkv)
        return (
            *self.norm(), *self.enter(), self.product("qkv", wide, s.hidden, self.between), turn, *self.ring(qkv), *core,
            self.product("projection", s.hidden, s.heads * s.head_dim // t.tp, out),
        )  # fmt: skip

    def flash(self, saved: float) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        local = s.seq // t.cp
        kv = max(1, s.kv // t.tp)
        # along cp a causal ring is balanced: every rank meets half of all pairs
        return (Attention(t.micro_batch, s.heads // t.tp, kv, local, s.seq, s.head_dim, s.causal, self.wide_dtype, saved=saved),)

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

    def core(self) -> tuple[Op, ...]:
        """Attention with its scores in memory: matmul, softmax, dropout, matmul."""
        s, t, style = self.shape, self.setting, self.style
        heads = t.micro_batch * s.heads // t.tp
        local = s.seq // t.cp
        scores = heads * local * s.seq * self.width
        qkv = 3 * self.tokens * s.heads * s.head_dim // t.tp * self.width
        first = Gemm(local, s.seq, s.head_dim, heads, self.setting.dtype, "scores", saved=2 * qkv / 3, weight=False)
        second = Gemm(local, s.head_dim, s.seq, heads, self.setting.dtype, "context", saved=qkv / 3, weight=False)
        # the fused kernel takes groups of four heads x samples of one row in 16 bits; others fall back to one kernel per step
        (f, b), launches = (
            (style.softmax_wide, style.softmax_wide_launches) if self.width > 2
            else (style.softmax, style.softmax_launches) if heads % 4 == 0 else (style.softmax_apart, style.softmax_apart_launches)
        )  # fmt: skip
        walk = "memory.softmax" if self.width > 2 else ""  # a kernel per step: rows are read again for their largest, their sum, the mask
        soft = Touch("softmax", f * scores, b * scores, *launches, saved=scores, walk=walk)
        drop = (Touch("attention dropout", 2.5 * scores, 2.5 * scores, 1, 1, saved=1.5 * scores),) if s.dropout else ()
        return first, soft, *drop, second

    def redo_attention(self) -> tuple[tuple[Op, ...], float]:
        """The middle of attention recomputed, and what that frees: scores in memory, which grow with the square of the sequence, or
        the result of the one kernel, made again from what its backward needs anyhow."""
        if self.style.attention_in_memory:
            core = self.core()
            return core, sum(op.saved for op in core)
        return self.flash(0.0), float(self.tokens * self.shape.heads * self.shape.head_dim // self.setting.tp * self.width)

    def redo_activation(self, ffn: tuple[Op, ...]) -> tuple[tuple[Op, ...], float]:
        """The activation recomputed from what its own backward needs, which frees the input of the matmul after it."""
        if self.style.attention_in_memory:
            return (), 0.0  # that system runs attention again and nothing else
        at = next(i for i, op in enumerate(ffn) if op.name.endswith("activation"))
        after = next(op for op in ffn[at + 1 :] if isinstance(op, Gemm))
        return (replace(ffn[at], saved=0),), float(after.saved)

    def redo_ffn(self, ffn: tuple[Op, ...]) -> tuple[tuple[Op, ...], float]:
        """The matmul before the activation recomputed too, tokens brought together for it once more: frees all that is wide."""
        at = next(i for i, op in enumerate(ffn) if op.name.endswith("activation"))
        up = next(i for i in range(at, -1, -1) if isinstance(ffn[i], Gemm))
        gather = ffn[up - 1 : up] if isinstance(ffn[up - 1], Collective) and ffn[up - 1].name == "all gather" else ()
        after = next(op for op in ffn[at + 1 :] if isinstance(op, Gemm))
        again = tuple(replace(op, saved=0) for op in (*gather, *ffn[up : at + 1]))
        return again, float(ffn[at].saved + after.saved)

    def activation(self) -> tuple[Op, ...]:
        s = self.shape
        inner = self.tokens * s.inner // self.setting.tp * self.width
        f, b = self.style.gate if s.gated else self.style.activation
        return (Touch("activation", f * inner, b * inner, *self.style.activation_launches, saved=inner * (2 if s.gated else 1)),)

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
        route = Gemm(self.tokens, s.experts, s.hidden, dtype=self.wide_dtype, name="router", saved=self.between)
        place = Touch("dispatch", 2 * sent, 2 * sent, 4, 4, saved=sent, walk="memory.experts")
        swap = (Collective("all_to_all", sent, "ep", "tokens to experts", copies=s.chosen),) if t.ep > 1 else ()
        inner = s.inner // t.tp
        up = Gemm(rows, inner * (2 if s.gated else 1), s.hidden, local, t.dtype, "experts up", saved=sent, grouped=True)
        wide = rows * local * inner * self.width
        f, b = self.style.gate
        act = Touch("expert activation", f * wide, b * wide, *self.style.activation_launches, saved=2 * wide, walk="memory.experts")
        down = Gemm(rows, s.hidden, inner, local, t.dtype, "experts down", saved=wide, grouped=True)
        back = Touch("combine", 3 * sent, 3 * sent, 3, 3, walk="memory.experts")
        return (*self.norm(), *self.enter(), route, place, *swap, up, act, down, *swap, back)
