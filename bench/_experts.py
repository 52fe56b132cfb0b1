"""Stacks of experts as they were published: the first layers without them, one that serves every token, attention over latent keys, windows,
words predicted further ahead, and what exactly is recomputed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace

from bench._layers import Counted, Layers, Sized, both_ways, unsaved
from weft.cost.work import Attention, Collective, Gemm, Op
from weft.plan.setting import Setting
from weft.plan.workload import Block, Workload

TILE = 128  # keys that attention takes at once


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention: what queries (0: made at once) and keys are made of, and of a head's queries without and with positions, and values."""

    queries: int
    keys: int
    plain: int
    turned: int
    values: int


@dataclass(frozen=True)
class ExpertShape(Sized):
    """`dense` layers have a feed-forward of `plain` instead of experts, `windowed` see `window` tokens; `shared` is the width of the expert of all."""

    shared: int = 0
    dense: int = 0
    plain: int = 0
    latent: Latent | None = None
    window: int = 0
    windowed: int = 0
    ahead: int = 0  # words predicted beyond the next, each by a layer and the head
    again: tuple[str, ...] = ("core_attn", "moe_act")  # what selective recompute makes again
    beside: bool = False  # tokens are sent beside the compute of another micro-batch

    def work(self, setting: Setting) -> Workload:
        return _ExpertLayers(self, setting).build()

    @property
    def attention_params(self) -> int:
        if (x := self.latent) is None:
            return super().attention_params
        rows = x.plain + x.turned
        asked = (self.hidden + self.heads * rows) * x.queries if x.queries else self.hidden * self.heads * rows
        return asked + self.hidden * (x.keys + x.turned) + x.keys * self.heads * (x.plain + x.values) + self.heads * x.values * self.hidden

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense

    def _met(self, served: int) -> float:
        """Parameters of all layers where a token meets, or a device holds, so many experts of each."""
        each = self.hidden * (2 + self.gated)
        mixed = self.ffn_params * served + each * self.shared + self.hidden * self.experts
        return self.layers * self.attention_params + self.dense * each * self.plain + self.moe_layers * mixed

    @property
    def params(self) -> float:
        return self._met(self.experts) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def flops_per_token(self) -> float:
        wide = self.latent.plain + self.latent.turned + self.latent.values if self.latent else 2 * self.head_dim
        return 6.0 * (self._met(self.chosen) + self.vocab * self.hidden) + 6 * self.layers * self.seq * self.heads * wide


def with_experts(shape: Counted, about: str, **sizes: int) -> ExpertShape:
    """Of sizes, and of words as `mla q1536 kv512 nope128 rope64 v128` or `gqa sinks; every second layer window 128`."""
    latent = re.search(r"mla q(\d+) kv(\d+) nope(\d+) rope(\d+) v(\d+)", about)
    window = re.search(r"every second layer window (\d+)", about)
    seen = {"window": int(window[1]), "windowed": shape.layers // 2} if window else {}
    given = asdict(shape) | {"gated": True, "rotary": True, "tied": False} | sizes | seen
    made = Latent(*map(int, latent.groups())) if latent else None
    return ExpertShape(**given | ({"head": made.values} if made else {}), latent=made)


MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp")


def recomputed(text: str) -> tuple[str, ...]:
    """The modules that `selective (layernorm moe_act)` names; attention and the activation where it names none."""
    named = tuple(m for m in MODULES if re.search(rf"\b{m}\b", text))
    return named or ExpertShape.again


@dataclass(frozen=True)
class _ExpertLayers(Layers):
    shape: ExpertShape

    def build(self) -> Workload:
        s, heads = self.shape, 1 + self.shape.ahead
        last = self.last()
        last = replace(last, forward=last.forward * heads, back=last.back * heads, saved=last.saved * heads)
        return replace(super().build(), depth=s.layers + s.ahead, last=last, others=tuple((b, n) for b, n in self.other_layers() if n))

    def other_layers(self) -> tuple[tuple[Block, int], ...]:
        s = self.shape
        dense = replace(self, shape=replace(s, ffn=s.plain, window=0))
        near = replace(self, shape=replace(s, windowed=s.layers))
        return (replace(dense.layer(False), name="dense layer"), s.dense), (replace(near.layer(True), name="layer with a window"), s.windowed)

    def attention(self) -> tuple[Op, ...]:
        if self.shape.latent is None:
            return super().attention()
        s, t, x = self.shape, self.setting, self.shape.latent
        own, heads = self.tokens * self.width, s.heads // t.tp
        down = self.product("down", x.queries + x.keys + x.turned, s.hidden, self.between)
        inner = own * (x.queries + x.keys)
        return (
            *self.norm(), *self.enter(), *([down] if x.queries else self.asked(down)), both_ways("latent norm", 2 * inner, 4 * inner, 1, 2),
            *self.made_of_latents(), *self.ring(own * (x.keys + x.turned)), *self.flash(own * heads * (2 * (x.plain + x.turned) + x.values)),
            self.product("projection", s.hidden, heads * x.values, own * heads * x.values),
        )  # fmt: skip

    def asked(self, down: Gemm) -> tuple[Gemm, ...]:
        """Queries made at once, and what keys and values are made of."""
        x, heads = self.shape.latent, self.shape.heads // self.setting.tp
        assert x is not None
        return self.product("queries", heads * (x.plain + x.turned), self.shape.hidden, 0.0), down

    def made_of_latents(self) -> tuple[Op, ...]:
        """Queries, keys and values, and positions turned in."""
        x, heads, own = self.shape.latent, self.shape.heads // self.setting.tp, self.tokens * self.width
        assert x is not None
        asked = (self.product("queries up", heads * (x.plain + x.turned), x.queries, own * x.queries),) if x.queries else ()
        size = 2 * own * heads * (2 * (x.plain + x.turned))
        return (*asked, self.product("keys up", heads * (x.plain + x.values), x.keys, own * x.keys), both_ways("rotary", size, size))

    def flash(self, saved: float) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        (plain,) = super().flash(saved)
        assert isinstance(plain, Attention)
        if x := s.latent:
            return (replace(plain, kv_heads=s.heads // t.tp, head_dim=(x.plain + x.turned + x.values) // 2),)
        if s.window and s.windowed == s.layers:  # the tiles of keys that meet a tile of queries
            return (replace(plain, keys=min(plain.keys, s.window + TILE), causal=False),)
        return (plain,)

    def redo_attention(self) -> tuple[tuple[Op, ...], float]:
        s, made, frees = self.shape, tuple[Op, ...](), 0.0
        if "core_attn" in s.again:
            made, frees = super().redo_attention()
        if "layernorm" in s.again:
            made, frees = (*self.norm(), *made), frees + self.between
        if "mla_up_proj" in s.again and s.latent is not None:
            made = (*(unsaved(op) for op in self.made_of_latents() if not isinstance(op, Collective)), *made)
            frees += self.flash(1.0)[0].bytes
        return made, frees

    def redo_activation(self, ffn: tuple[Op, ...]) -> tuple[tuple[Op, ...], float]:
        s = self.shape
        norm = (self.norm(), self.between) if "layernorm" in s.again else ((), 0.0)
        if "mlp" in s.again and not any(op.name == "expert activation" for op in ffn):
            made = self.redo_ffn(ffn)
        else:
            made = super().redo_activation(ffn) if "moe_act" in s.again else ((), 0.0)
        return (*norm[0], *made[0]), norm[1] + made[1]

    def experts(self) -> tuple[Op, ...]:
        s, t = self.shape, self.setting
        chosen = tuple(
            replace(op, hidden=True, concurrent=True) if s.beside and isinstance(op, Collective) and op.axis == "ep" else op for op in super().experts()
        )
        served = Layers(replace(s, ffn=s.shared), t).feed_forward() if s.shared else ()
        return (*chosen, *(op for op in served if op.name in ("up", "activation", "down")))
