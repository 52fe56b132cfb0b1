"""Stacks of mamba, attention and experts as layers of their own, as some published runs have them, from sizes alone.

A mamba-2 layer projects a token to heads of states (Dao and Gu, 2024): in chunks of `CHUNK` tokens states are summed up, passed on from chunk
to chunk in fp32 and read again, by kernels that move more than they compute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from bench._layers import Counted, Layers, Sized, both_ways, narrowed, told
from weft.cost.work import Gemm, Op
from weft.plan.setting import Setting
from weft.plan.workload import Block, Workload

CHUNK = 128
SCAN = 0.14  # of the bandwidth, for the fewest bytes they can move: fitted to the two rows of Nemotron 3 Nano; Super's are predicted with it


@dataclass(frozen=True)
class HybridShape(Sized):
    """So many layers of mamba, of experts and of attention. Experts may work on `latent` numbers of a token, and one serves them all."""

    mamba: int = 0
    attention: int = 0
    states: tuple[int, int, int, int] = (1, 64, 128, 1)  # heads, width of one, states, groups
    latent: int = 0
    shared: int = 0
    ahead: int = 0  # words predicted beyond the next, each by a layer of attention, one of experts and the head

    def work(self, setting: Setting) -> Workload:
        return _HybridBuilder(self, setting).build()

    @property
    def inside(self) -> int:
        heads, width, _, _ = self.states
        return heads * width

    @property
    def params(self) -> float:
        experts = self.layers - self.mamba - self.attention
        each = 2 * (self.latent or self.hidden) * self.inner * self.experts + 2 * self.hidden * (self.shared + self.latent)
        return self.mamba * 3 * self.hidden * self.inside + self.attention * self.attention_params + experts * each + 2 * self.vocab * self.hidden


def hybrid(shape: Counted, text: str, shared: int, ahead: int) -> HybridShape:
    """Of words as `23 mamba2 (64 heads of 64; state 128; 8 groups) 23 moe (relu2; not gated; latent 1024) 6 gqa`."""
    found = re.search(r"(\d+) mamba2 \((\d+) heads of (\d+); state (\d+); (\d+) groups\) \d+ moe \(([^)]*)\) (\d+) gqa", text)
    if found is None:
        raise ValueError(f"no layers are read from {text!r}")
    mamba, *states, about, attention = found.groups()
    latent = re.search(r"latent (\d+)", about)
    known = {f.name: getattr(shape, f.name) for f in fields(Counted)}
    return HybridShape(
        **known | {"gated": "not gated" not in about}, mamba=int(mamba), attention=int(attention), states=tuple(map(int, states)),  # type: ignore[arg-type]
        latent=int(latent.group(1)) if latent else 0, shared=shared, ahead=ahead,
    )  # fmt: skip


@dataclass(frozen=True)
class _HybridBuilder(Layers):
    shape: HybridShape

    def build(self) -> Workload:
        s, t, heads = self.shape, self.setting, 1 + self.shape.ahead
        (attention, _), last = self.halves(True), self.last()
        last = replace(last, forward=last.forward * heads, back=last.back * heads, saved=last.saved * heads)
        return Workload(
            s.name, self.first(), self.mixture(), s.layers + 2 * s.ahead, last, tokens=t.micro_batch * s.seq,
            model_flops=s.flops_per_token, boundary=self.stream / t.tp,
            others=((self.mamba(), s.mamba), (attention, s.attention + s.ahead)),
        )  # fmt: skip

    def product(self, name: str, n: int, k: int, saved: float, least: str = "") -> Gemm:
        """Recipes in 4 bits keep some matmuls wider: those of attention and of latents in 16, what leaves a mamba layer in 8 (Nemotron 3)."""
        made = super().product(name, n, k, saved)
        wide = least or ("bf16" if name in ("qkv", "projection", "latent", "from latent") else "")
        return replace(made, dtype=wide) if wide and made.dtype == "fp4" else made

    def mamba(self) -> Block:
        """Projection, short convolution, states over the sequence, gated norm, projection."""
        s, t = self.shape, self.setting
        heads, _, states, groups = s.states
        inside, read = s.inside // t.tp, 2 * groups * states // t.tp
        token = self.tokens * self.width
        chunks = 3 * self.tokens / CHUNK * inside * states * 4.0  # written by their chunk, passed on, read by the next
        size = token * (3 * inside + 2 * read) + chunks
        ops: tuple[Op, ...] = (
            *self.norm(), *self.enter(), self.product("in", 2 * inside + read + heads // t.tp, s.hidden, self.between),
            both_ways("convolution", 2 * token * (inside + read), 4 * token * (inside + read), saved=token * (inside + read)),
            both_ways("states", size / SCAN, 2.5 * size / SCAN, 5, 8, saved=token * inside),
            both_ways("gated norm", 3 * token * inside, 5 * token * inside, saved=token * inside),
            self.product("out", s.hidden, inside, token * inside, "fp8"), *self.leave(),
        )  # fmt: skip
        again = tuple(replace(op, saved=0.0) for op in ops if op.name in ("convolution", "gated norm"))
        return told(
            "mamba", tuple(narrowed(ops)), s.hidden * (3 * inside + read), kept=self.between, work=2 * token * inside,
            parts=(("selective", again, token * (2 * inside + read)),),
        )  # fmt: skip

    def mixture(self) -> Block:
        """Experts on all of a token or on what it is projected to, and the one that serves all tokens."""
        s, t = self.shape, self.setting
        inner = Layers(replace(s, hidden=s.latent or s.hidden), t)
        there = (self.product("latent", s.latent, s.hidden, self.between),) if s.latent else ()
        back = (self.product("from latent", s.hidden, s.latent, self.tokens * s.latent * self.width),) if s.latent else ()
        beside = Layers(replace(s, ffn=s.shared, gated=False), t).feed_forward() if s.shared else ()
        chosen = inner.experts()
        ops = (*self.norm(), *there, *chosen[1:], *back, *beside[1:], *self.leave())
        redo, frees = self.redo_activation(chosen)
        rows = 2 * (s.latent or s.hidden) * s.inner * s.experts / (t.ep * t.tp)
        params = s.hidden * (2 * s.shared / t.tp + 2 * s.latent + s.experts)
        return told(
            "experts", tuple(narrowed(ops)), params, rows, kept=self.between, work=self.tokens * s.inner * self.width / t.tp,
            parts=(("selective", redo, frees),),
        )  # fmt: skip
