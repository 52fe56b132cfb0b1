# ruff: noqa: E501  (tables of text, one expression after another)
"""A grammar of torch modules as text: statements over values of known shapes, parameters, buffers, layers and losses.

Every rule below draws one expression; what torch itself refuses is drawn again by whoever runs it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

BATCH, LENGTH, WIDTHS = 4, 4, (4, 6)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Var:
    name: str
    shape: Shape
    kind: str = "float"  # or "bool", "int"


@dataclass(frozen=True)
class Statement:
    """One statement of `forward`: the name it makes, its text, and the names it reads."""

    made: Var
    text: str
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A module as text: attributes by name, the batch by name, statements, and the terms of the loss."""

    attributes: tuple[tuple[str, str], ...] = ()
    batch: tuple[tuple[str, str], ...] = ()
    lines: tuple[Statement, ...] = ()
    losses: tuple[Statement, ...] = ()

    def needed(self) -> Module:
        """Without what no loss needs; what is written in place keeps its writers, which read it."""
        wanted: set[str] = {name for line in self.losses for name in line.reads}
        lines: list[Statement] = []
        for line in reversed(self.lines):
            if line.made.name in wanted:
                wanted |= set(line.reads)
                lines.append(line)
        attributes = tuple(a for a in self.attributes if f"self.{a[0]}" in wanted)
        return replace(self, attributes=attributes, batch=tuple(b for b in self.batch if b[0] in wanted), lines=tuple(reversed(lines)))

    def source(self, touch: str = "{}") -> str:
        """The class. Every value goes through `touch` once it is made."""
        names = ", ".join(name for name, _ in self.batch)
        body = [f"self.{name} = {text}" for name, text in self.attributes]
        steps = []
        for line in (*self.lines, *self.losses):
            steps.append(line.text)
            if touch != "{}" and line.made.kind == "float":
                steps.append(f"{line.made.name} = {touch.format(line.made.name)}")
        total = " + ".join(line.made.name for line in self.losses)
        forward = "\n        ".join([*steps, f"return {total}"])
        init = "\n        ".join(["super().__init__()", *body])
        head = f"    def forward(self, {names}):" if names else "    def forward(self):"
        return f"class Model(nn.Module):\n    def __init__(self):\n        {init}\n\n{head}\n        {forward}\n"


@dataclass
class Draft:
    """A module while it is drawn."""

    rng: random.Random
    values: str  # of what there is at first: "whole" numbers from -2 to 2, or "normal" ones
    attributes: dict[str, str] = field(default_factory=dict)
    batch: dict[str, str] = field(default_factory=dict)
    env: list[Var] = field(default_factory=list)
    lines: list[Statement] = field(default_factory=list)
    losses: list[Statement] = field(default_factory=list)

    def pick(self, test: Callable[[Var], bool] = lambda v: True, kind: str = "float") -> Var | None:
        found = [v for v in self.env if v.kind == kind and test(v)]
        return self.rng.choice(found[-8:] if self.rng.random() < 0.6 else found) if found else None

    def seed(self) -> int:
        return self.rng.randrange(10_000)

    def param(self, shape: Shape, values: str = "") -> str:
        """A new parameter, or one there is already."""
        same = [n for n, text in self.attributes.items() if text.startswith(f"nn.Parameter(draw({shape},")]
        if same and self.rng.random() < 0.25:
            return f"self.{self.rng.choice(same)}"
        name = f"p{len(self.attributes)}"
        self.attributes[name] = f"nn.Parameter(draw({shape}, {values or self.values!r}, {self.seed()}))"
        return f"self.{name}"

    def layer(self, text: str) -> str:
        name = f"m{len(self.attributes)}"
        self.attributes[name] = f"filled({text}, {self.values!r}, {self.seed()})"
        return f"self.{name}"

    def indices(self, shape: Shape, most: int) -> str:
        """Integers below `most`, in the batch where they have its rows, else a buffer."""
        if shape[:1] == (BATCH,):
            name = f"i{len(self.batch)}"
            self.batch[name] = f"indices({shape}, {most}, {self.seed()})"
            return name
        name = f"b{len(self.attributes)}"
        self.attributes[name] = f"nn.Buffer(indices({shape}, {most}, {self.seed()}))"
        return f"self.{name}"

    def say(self, text: str, shape: Shape, kind: str = "float") -> Var:
        made = Var(f"v{len(self.lines)}", shape, kind)
        self.lines.append(Statement(made, f"{made.name} = {text}", self._reads(text)))
        self.env.append(made)
        return made

    def write(self, at: Var, text: str) -> None:
        """A statement that changes a value in its place."""
        self.lines.append(Statement(at, text, (*self._reads(text), at.name)))

    def _reads(self, text: str) -> tuple[str, ...]:
        names = [v.name for v in self.env] + [f"self.{a}" for a in self.attributes] + list(self.batch)
        return tuple(n for n in names if _stands_in(n, text))


def _stands_in(name: str, text: str) -> bool:
    """Whether a name is in a text as a word."""
    at = text.find(name)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(name) : at + len(name) + 1]
        if not (before.isalnum() or before in ("_", ".")) and not (after.isalnum() or after == "_"):
            return True
        at = text.find(name, at + 1)
    return False


Rule = Callable[[Draft], None]
RULES: list[tuple[int, Rule]] = []


def rule(weight: int) -> Callable[[Rule], Rule]:
    def add(f: Rule) -> Rule:
        RULES.append((weight, f))
        return f

    return add


# -- element by element ------------------------------------------------------------------------------------------------------------

UNARY = """
torch.relu({0})|F.relu6({0} * 3)|F.elu({0})|F.elu({0}, alpha=0.5)|F.celu({0}, alpha=2.0)|F.selu({0})|F.gelu({0})|F.gelu({0}, approximate='tanh')
F.silu({0})|F.mish({0})|F.softplus({0})|F.softplus({0}, beta=2.0, threshold=1.0)|F.logsigmoid({0})|F.hardtanh({0})|F.hardtanh({0}, -2.0, 1.0)
F.hardsigmoid({0} * 3)|F.hardswish({0} * 3)|F.leaky_relu({0}, 0.1)|F.softsign({0})|F.tanhshrink({0})|F.softshrink({0}, 0.5)|F.softshrink({0}, 1.0)
F.hardshrink({0}, 1.0)|F.threshold({0}, 0.0, 0.5)|torch.tanh({0})|torch.sigmoid({0})|torch.sin({0})|torch.cos({0})|torch.exp({0} * 0.5)
torch.expm1({0} * 0.5)|torch.log1p({0}.abs())|torch.sqrt({0}.abs() + 0.5)|torch.sqrt(torch.relu({0}))|torch.rsqrt({0} * {0} + 0.25)|{0}.abs()
-{0}|torch.sign({0})|torch.floor({0} * 0.5)|torch.round({0} * 0.5)|torch.trunc({0} * 1.5)|torch.frac({0} * 1.5)|torch.square({0})|{0} ** 2|{0} ** 3
{0} ** 0|{0} ** 1|2.0 ** {0}|0.0 ** {0}.abs()|{0}.abs() ** 0.5|({0}.abs() + 1.0) ** -1.5|{0}.clamp(-1.0, 1.0)|{0}.clamp(min=0.0)
{0}.clamp(max=1.0)|{0}.clamp(0.0, float('inf'))|{0}.clip(-2.0, 2.0)|torch.erf({0})|torch.erfc({0})|torch.atan({0})|torch.asinh({0})
torch.asin({0}.clamp(-1.0, 1.0))|torch.acos({0}.clamp(-1.0, 1.0))|torch.sinh({0} * 0.5)|torch.cosh({0} * 0.5)|torch.logit(torch.sigmoid({0}))
torch.log({0}.abs() + 1.0)|torch.log2({0}.abs() + 1.0)|torch.log10({0}.abs() + 1.0)|torch.nan_to_num(torch.log({0}), neginf=-3.0, nan=0.5)
torch.reciprocal({0} + 3.5)|1.0 / ({0} * {0} + 1.0)|torch.where({0} > 0, {0}, 0.5 * {0})|torch.where({0} == 0, 1.0, {0})|{0}.masked_fill({0} > 1, 0.25)
{0}.detach() * 0.5|{0}.float().double()|torch.sinc({0})|torch.deg2rad({0})|torch.exp2({0})|torch.addcmul({0}, {0}, {0}, value=0.5)|({0} - 1.0).abs()
3.0 - {0}|{0} / 3.0|{0} * -1.5|{0} % 2.0|torch.remainder({0}, 1.5)|torch.fmod({0}, 1.5)|{0}.sgn()|({0} >= 1.0).double() * {0}|{0}.positive()
torch.special.expit({0})|torch.special.erfcx({0}.abs())|torch.special.log_ndtr({0})|torch.special.ndtr({0})|torch.i0({0})|torch.lgamma({0}.abs() + 1.0)
torch.digamma({0}.abs() + 1.0)|F.rrelu({0}, 0.2, 0.2)|F.dropout({0}, 0.0)|F.prelu({0}, torch.full((1,), 0.3, dtype=torch.float64))|F.glu(torch.cat([{0}, {0}], -1), -1)
torch.ones_like({0}) * {0}|torch.zeros_like({0}) + {0}|torch.full_like({0}, 0.5) * {0}|{0}.new_ones({0}.shape) + {0}|torch.abs({0}).neg().exp()
""".replace("\n", "|").strip("|").split("|")

BINARY = """
{0} + {1}|{0} - {1}|{0} * {1}|{0} / ({1} * {1} + 1.0)|{0} / {1}|torch.maximum({0}, {1})|torch.minimum({0}, {1})|torch.fmax({0}, {1})|torch.fmin({0}, {1})
torch.atan2({0}, {1})|torch.pow({0}.abs() + 0.5, {1})|torch.pow({0}.abs(), {1}.abs())|torch.hypot({0}, {1})|torch.where({0} > {1}, {0}, {1})
torch.where({0} >= {1}, {0} * 2.0, {1})|torch.logaddexp({0}, {1})|torch.xlogy({0}, {1} * {1})|torch.special.xlog1py({0}, {1} * {1})|torch.lerp({0}, {1}, 0.3)
({0} > {1}).double() * {0}|({0} == {1}).double() + {1}|torch.copysign({0}, {1})|{0}.add({1}, alpha=0.5)|{0}.sub({1}, alpha=2.0)|torch.rsub({0}, {1})
torch.addcdiv({0}, {1}, {0} * {0} + 1.0, value=0.5)|torch.logical_and({0} > 0, {1} > 0).double() * {0}|F.gelu({0}) * {1}|F.silu({0}) * {1}|torch.fmod({0}, {1}.abs() + 0.5)
{0} + {1}.mean()|{0} * torch.sigmoid({1})|torch.true_divide({0}, {1}.exp())|torch.ldexp({0}, torch.ones_like({1}))|torch.heaviside({0}, {1}.detach()) * {1}
""".replace("\n", "|").strip("|").split("|")


@rule(20)
def unary(d: Draft) -> None:
    x = d.pick()
    if x:
        d.say(d.rng.choice(UNARY).format(x.name), x.shape)


@rule(14)
def binary(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 0)
    if x is None:
        return
    y = d.pick(lambda v: _stretches(v.shape, x.shape)) if d.rng.random() < 0.7 else None
    other = y.name if y else d.param(d.rng.choice([x.shape, x.shape[-1:], (1,) * len(x.shape), x.shape]))
    pair = (x.name, other) if y is None or d.rng.random() < 0.5 or y.shape != x.shape else (other, x.name)
    d.say(d.rng.choice(BINARY).format(*pair), x.shape)


def _stretches(small: Shape, big: Shape) -> bool:
    return len(small) <= len(big) and all(a in (1, b) for a, b in zip(small[::-1], big[::-1], strict=False))


# -- over a dim ----------------------------------------------------------------------------------------------------------------------

REDUCE = """
{0}.sum({1}{2})|{0}.mean({1}{2})|{0}.var({1}{2})|{0}.std({1}{2})|{0}.var({1}, correction=0{2})|{0}.amax({1}{2})|{0}.amin({1}{2})|{0}.prod({1}{2})
{0}.norm(dim={1}{2})|{0}.norm(p=1, dim={1}{2})|torch.linalg.vector_norm({0}, 3, {1}{2})|torch.linalg.vector_norm({0}, float('inf'), {1}{2})
torch.linalg.vector_norm({0}, float('-inf'), {1}{2})|torch.linalg.vector_norm({0}, 0, {1}{2})|torch.logsumexp({0}, {1}{2})|{0}.max({1}{2}).values
{0}.min({1}{2}).values|({0} > 0).sum({1}{2}).double()|({0} > 0).any({1}{2}).double()|({0} > -1).all({1}{2}).double()|torch.nansum({0}, {1}{2})
({0} * {0}).sum({1}{2}).sqrt()|torch.std_mean({0}, {1}{2})[1]|{0}.argmax({1}{2}).double()|torch.count_nonzero({0}, {1}).double(){3}
""".replace("\n", "|").strip("|").split("|")

ALONG = """
torch.softmax({0}, {1})|torch.log_softmax({0}, {1})|F.softmin({0}, {1})|F.normalize({0}, dim={1})|F.normalize({0}, p=1.0, dim={1})|{0}.cumsum({1})
{0}.flip({1})|{0}.roll(1, {1})|torch.logcumsumexp({0}, {1})|torch.cumprod({0}, {1})|torch.cummax({0}, {1}).values|{0} - {0}.mean({1}, keepdim=True)
torch.sort({0}, dim={1}, stable=True).values|{0}.index_select({1}, torch.arange({0}.shape[{1}] - 1, -1, -1))|torch.diff({0}, dim={1}, prepend={0}.narrow({1}, 0, 1))
{0} / {0}.abs().sum({1}, keepdim=True).clamp(min=1e-6)|torch.softmax({0}.masked_fill({0} > 0, float('-inf')), {1}).nan_to_num()|{0}.renorm(2, {1}, 1.5)
({0} - {0}.amax({1}, keepdim=True)).exp()|torch.softmax({0} * 2.0, {1}) * {0}|torch.cummin({0}, {1}).values|{0}.sigmoid().cumsum({1})
""".replace("\n", "|").strip("|").split("|")


@rule(10)
def reduction(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 1)
    if x:
        dim, keep = d.rng.randrange(len(x.shape)), d.rng.random() < 0.4
        text = d.rng.choice([t for t in REDUCE if not (keep and t.endswith("{3}"))])
        shape = tuple(1 if i == dim else n for i, n in enumerate(x.shape) if keep or i != dim)
        d.say(text.format(x.name, dim if d.rng.random() < 0.5 else dim - len(x.shape), ", keepdim=True" if keep else "", ""), shape)


@rule(8)
def along(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 1)
    if x:
        d.say(d.rng.choice(ALONG).format(x.name, d.rng.randrange(-len(x.shape), len(x.shape))), x.shape)


# -- norms ---------------------------------------------------------------------------------------------------------------------------


@rule(5)
def norm(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 1)
    if x is None:
        return
    n = x.shape[-1]
    weight = d.param((n,)) if d.rng.random() < 0.7 else "None"
    bias = d.param((n,)) if d.rng.random() < 0.7 else "None"
    options = [f"F.layer_norm({x.name}, ({n},), {weight}, {bias})", f"F.rms_norm({x.name}, ({n},), {weight})", f"F.layer_norm({x.name}, {x.shape[1:]})"]
    if len(x.shape) > 2 and x.shape[1] % 2 == 0:
        options += [f"F.group_norm({x.name}, 2)", f"F.instance_norm({x.name})", f"F.group_norm({x.name}, 2, {d.param((x.shape[1],))})"]
    if 1 < len(x.shape) < 5:
        kind = f"nn.BatchNorm{max(1, len(x.shape) - 2)}d({x.shape[1]})"
        options += [f"{d.layer(kind)}({x.name})", f"F.local_response_norm({x.name}, 2)" if len(x.shape) > 2 else f"{d.layer(f'nn.LayerNorm({n})')}({x.name})"]
    d.say(d.rng.choice(options), x.shape)


# -- matmuls ------------------------------------------------------------------------------------------------------------------------


@rule(9)
def draw_matmul(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 1)
    if x is None:
        return
    k, n = x.shape[-1], d.rng.choice(WIDTHS)
    out = (*x.shape[:-1], n)
    options = [f"F.linear({x.name}, {d.param((n, k))}, {d.param((n,))})", f"{x.name} @ {d.param((k, n))}", f"{d.layer(f'nn.Linear({k}, {n})')}({x.name})",
            f"torch.einsum('...k,nk->...n', {x.name}, {d.param((n, k))})", f"F.bilinear({x.name}, {x.name}, {d.param((n, k, k))})",
            f"torch.tensordot({x.name}, {d.param((k, n))}, dims=1)", f"F.linear({x.name}, {d.param((n, k))})"]  # fmt: skip
    d.say(d.rng.choice(options), out)


@rule(5)
def einsum(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) in (2, 3))
    if x is None:
        return
    if len(x.shape) == 2:
        a, b = x.shape
        options = [("ab,ab->", (), f"{d.param((a, b))}"), ("ab,ab->a", (a,), f"{d.param((a, b))}"), ("ab,cb->ac", (a, 4), d.param((4, b))), ("ab,ab->ba", (b, a), x.name),
                ("ab,b->a", (a,), d.param((b,))), ("ab,c->abc", (a, b, 4), d.param((4,))), ("ab,ac->bc", (b, b), x.name)]  # fmt: skip
    else:
        a, b, c = x.shape
        options = [("abc,abc->", (), x.name), ("abc,adc->abd", (a, b, b), x.name), ("abc,dc->adb", (a, 4, b), d.param((4, c))), ("abc,abd->acd", (a, c, c), x.name),
                ("abc,bc->ab", (a, b), d.param((b, c))), ("abc,c->ba", (b, a), d.param((c,))), ("abc,abc->ac", (a, c), d.param((1, b, c)) + f".expand({a}, -1, -1)")]  # fmt: skip
    equation, shape, other = d.rng.choice(options)
    d.say(f"torch.einsum('{equation}', {x.name}, {other})", shape)


@rule(5)
def attention(d: Draft) -> None:
    """Heads laid out in memory in any order, grouped, masked or causal."""
    x = d.pick(lambda v: len(v.shape) == 3 and v.shape[-1] % 2 == 0)
    if x is None:
        return
    b, s, w = x.shape
    k = w // 2
    views = [f".view({b}, {s}, 2, {k}).transpose(1, 2)", f".transpose(1, 2).reshape({b}, 2, {k}, {s}).transpose(-1, -2)",
             f".reshape({b}, {s}, {k}, 2).permute(0, 3, 1, 2)", f".view({b}, {s}, 2, {k}).permute(2, 0, 1, 3).contiguous().transpose(0, 1)"]  # fmt: skip
    q, key, v = (f"F.linear({x.name}, {d.param((w, w))}){d.rng.choice(views)}" for _ in range(3))
    if d.rng.random() < 0.2:
        key = f"{x.name}.unsqueeze(1).expand(-1, 2, -1, -1)[..., :{k}]"
    more = d.rng.choice(["", ", is_causal=True", ", scale=0.5", f", attn_mask={d.param((s, s))}", f", attn_mask=(({x.name}.sum(-1) > 0)[:, None, None, :])"])
    out = f"F.scaled_dot_product_attention({q}, {key}, {v}{more})"
    d.say(f"{out}.transpose(1, 2).reshape({b}, {s}, {w})", x.shape)


@rule(2)
def whole_layer(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) == 3 and v.shape[-1] % 2 == 0)
    if x is None:
        return
    w = x.shape[-1]
    mha = d.layer(f"nn.MultiheadAttention({w}, 2, batch_first=True)")
    need = d.rng.choice(["", ", need_weights=False"])
    options = [f"{mha}({x.name}, {x.name}, {x.name}{need})[0]",
            f"{d.layer(f'nn.TransformerEncoderLayer({w}, 2, 8, dropout=0.0, batch_first=True)')}({x.name})"]  # fmt: skip
    d.say(d.rng.choice(options), x.shape)


@rule(3)
def cell(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) in (2, 3) and v.shape[0] == BATCH)
    if x is None:
        return
    w = x.shape[-1]
    if len(x.shape) == 2:
        kind = d.rng.choice(["LSTMCell", "GRUCell", "RNNCell"])
        d.say(f"{d.layer(f'nn.{kind}({w}, 4)')}({x.name})" + ("[0]" if kind == "LSTMCell" else ""), (BATCH, 4))
    else:
        kind = d.rng.choice(["LSTM", "GRU", "RNN"])
        d.say(f"{d.layer(f'nn.{kind}({w}, 4, batch_first=True)')}({x.name})[0]", (*x.shape[:2], 4))


# -- images --------------------------------------------------------------------------------------------------------------------------


@rule(4)
def image(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) == 4 and min(v.shape[2:]) >= 3)
    if x is None:
        seed = d.pick(lambda v: len(v.shape) == 3)
        if seed is not None and seed.shape[-1] >= 4 and seed.shape[1] >= 4:
            d.say(f"{seed.name}.unsqueeze(1)", (seed.shape[0], 1, *seed.shape[1:]))
        return
    b, c, h, w = x.shape
    options = [(f"F.conv2d({x.name}, {d.param((4, c, 3, 3))}, {d.param((4,))}, padding=1)", (b, 4, h, w)), (f"F.conv2d({x.name}, {d.param((c, 1, 3, 3))}, groups={c}, padding=1)", x.shape),
            (f"F.conv2d({x.name}, {d.param((4, c, 2, 2))}, stride=2)", (b, 4, h // 2, w // 2)), (f"F.max_pool2d({x.name}, 2)", (b, c, h // 2, w // 2)),
            (f"F.avg_pool2d({x.name}, 2)", (b, c, h // 2, w // 2)), (f"F.max_pool2d({x.name}, 3, stride=1, padding=1)", x.shape),
            (f"F.adaptive_avg_pool2d({x.name}, 1)", (b, c, 1, 1)), (f"F.lp_pool2d({x.name}, 2.0, 2)", (b, c, h // 2, w // 2)), (f"F.adaptive_max_pool2d({x.name}, 1)", (b, c, 1, 1)),
            (f"F.interpolate({x.name}, scale_factor=2, mode='nearest')", (b, c, 2 * h, 2 * w)), (f"F.avg_pool2d({x.name}, 3, stride=1, padding=1)", x.shape),
            (f"F.conv_transpose2d({x.name}, {d.param((c, 3, 2, 2))}, stride=2)", (b, 3, 2 * h, 2 * w)), (f"F.pad({x.name}, (1, 1, 0, 1))", (b, c, h + 1, w + 2)),
            (f"F.pad({x.name}, (1, 1, 1, 1), mode='reflect')", (b, c, h + 2, w + 2)), (f"{x.name}.to(memory_format=torch.channels_last) * 1.0", x.shape),
            (f"F.unfold({x.name}, 2)", (b, c * 4, (h - 1) * (w - 1))), (f"F.conv2d({x.name}, {d.param((4, c, 3, 3))}, dilation=1, padding='same')", (b, 4, h, w))]  # fmt: skip
    text, shape = d.rng.choice(options)
    if 0 not in shape and max(shape) < 40:
        d.say(text, shape)


@rule(2)
def signal(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) == 3 and v.shape[-1] >= 3)
    if x is None:
        return
    b, c, n = x.shape
    options = [(f"F.conv1d({x.name}, {d.param((4, c, 3))}, padding=1)", (b, 4, n)), (f"F.max_pool1d({x.name}, 2)", (b, c, n // 2)), (f"F.avg_pool1d({x.name}, 2)", (b, c, n // 2)),
            (f"F.conv1d({x.name}, {d.param((c, 1, 2))}, groups={c})", (b, c, n - 1)), (f"F.pad({x.name}, (1, 0), mode='replicate')", (b, c, n + 1))]  # fmt: skip
    d.say(*d.rng.choice(options))


# -- tables and places ---------------------------------------------------------------------------------------------------------------


@rule(4)
def table(d: Draft) -> None:
    rows, w = d.rng.choice([5, 6, 8]), d.rng.choice(WIDTHS)
    index = d.indices((BATCH, LENGTH), rows)
    pad = d.rng.choice(["", ", padding_idx=1"])
    options = [(f"F.embedding({index}, {d.param((rows, w))}{pad})", (BATCH, LENGTH, w)), (f"{d.param((rows, w))}[{index}]", (BATCH, LENGTH, w)),
            (f"F.embedding_bag({index}, {d.param((rows, w))}, mode='{d.rng.choice(['sum', 'mean', 'max'])}')", (BATCH, w)),
            (f"F.one_hot({index}, {rows}).double() @ {d.param((rows, w))}", (BATCH, LENGTH, w)), (f"{d.param((rows, w))}.index_select(0, {index}.flatten())", (BATCH * LENGTH, w)),
            (f"F.embedding({index}, {d.param((rows, w))}, scale_grad_by_freq=True)", (BATCH, LENGTH, w))]  # fmt: skip
    d.say(*d.rng.choice(options))


@rule(5)
def places(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 1)
    if x is None:
        return
    dim = d.rng.randrange(len(x.shape))
    n = x.shape[dim]
    full, one, pair = d.indices(x.shape, n), d.indices((3,), n), d.indices((n,), 3)
    most, fewer = (*x.shape[:dim], 3, *x.shape[dim + 1 :]), tuple(m for i, m in enumerate(x.shape) if i != dim)
    options = [(f"torch.gather({x.name}, {dim}, {full})", x.shape), (f"{x.name}.index_select({dim}, {one})", most), (f"torch.take_along_dim({x.name}, {full}, {dim})", x.shape),
            (f"torch.zeros_like({x.name}).scatter_add({dim}, {full}, {x.name})", x.shape), (f"{x.name}.new_zeros({most}).index_add({dim}, {pair}, {x.name})", most),
            (f"{x.name}.select({dim}, {d.rng.randrange(-n, n)})", fewer), (f"{x.name}.scatter({dim}, {full}.narrow({dim}, 0, 1), 0.5)", x.shape),
            (f"{x.name}[{':, ' * dim}{one}]", most), (f"{x.name}.tril()", x.shape), (f"{x.name}.triu(1)", x.shape), (f"{x.name}.index_fill({dim}, {one}, 0.5)", x.shape),
            (f"{x.name}.scatter_reduce({dim}, {full}, {x.name}.detach() * 0.5, 'sum')", x.shape), (f"{x.name}.masked_fill(({full} > 0), 0.0)", x.shape)]  # fmt: skip
    d.say(*d.rng.choice(options))


@rule(8)
def view(d: Draft) -> None:
    x = d.pick(lambda v: len(v.shape) > 1)
    if x is None:
        return
    r, dims = len(x.shape), list(range(len(x.shape)))
    d.rng.shuffle(dims)
    i, j = dims[:2]
    n = x.shape[i]

    def sized(dim: int, size: int) -> Shape:
        return tuple(size if k == dim else m for k, m in enumerate(x.shape))

    swapped = tuple(x.shape[{i: j, j: i}.get(k, k)] for k in range(r))
    options: list[tuple[str, Shape]] = [
        (f"{x.name}.transpose({i}, {j})", swapped), (f"{x.name}.permute({', '.join(map(str, dims))})", tuple(x.shape[k] for k in dims)),
        (f"{x.name}.flatten({r - 2})", (*x.shape[:-2], x.shape[-2] * x.shape[-1])), (f"{x.name}.unsqueeze({i})", (*x.shape[:i], 1, *x.shape[i:])),
        (f"torch.cat([{x.name}, {x.name} * 2.0], {i})", sized(i, 2 * n)), (f"torch.stack([{x.name}, {x.name}.sin()], {i})", (*x.shape[:i], 2, *x.shape[i:])),
        (f"F.pad({x.name}, (1, 2))", sized(r - 1, x.shape[-1] + 3)), (f"{x.name}.narrow({i}, {min(1, n - 1)}, {max(1, n - 1)})", sized(i, max(1, n - 1))),
        (f"{x.name}[..., ::2]", sized(r - 1, -(-x.shape[-1] // 2))), (f"{x.name}.repeat_interleave(2, {i})", sized(i, 2 * n)), (f"{x.name}.repeat({', '.join(['2'] + ['1'] * (r - 1))})", sized(0, 2 * x.shape[0])),
        (f"torch.chunk({x.name}, 2, {i})[0]", sized(i, -(-n // 2))), (f"{x.name}.movedim({i}, {j}).contiguous().movedim({j}, {i})", x.shape), (f"{x.name}.split(1, {i})[-1]", sized(i, 1)),
        (f"torch.diagonal({x.name}, 0, {i}, {j})", (*(m for k, m in enumerate(x.shape) if k not in (i, j)), min(x.shape[i], x.shape[j]))), (f"{x.name}.unbind({i})[0]", tuple(m for k, m in enumerate(x.shape) if k != i)),
        (f"{x.name}.unfold({i}, {min(2, n)}, 1)", (*sized(i, n - min(2, n) + 1), min(2, n))), (f"{x.name}.reshape({x.shape[0]}, -1)", (x.shape[0], math.prod(x.shape[1:]))), (f"{x.name}.mT", (*x.shape[:-2], x.shape[-1], x.shape[-2])),
        (f"torch.rot90({x.name}, 1, ({i}, {j}))", swapped), (f"{x.name}.unsqueeze(0).expand(2, {', '.join(['-1'] * r)})", (2, *x.shape)), (f"{x.name}.roll((1, -1), ({i}, {j}))", x.shape),
        (f"torch.broadcast_to({x.name}.narrow({i}, 0, 1), {x.shape})", x.shape), (f"{x.name}.flip(({i}, {j}))", x.shape), (f"torch.tile({x.name}, (2,))", sized(r - 1, 2 * x.shape[-1])),
    ]  # fmt: skip
    text, shape = d.rng.choice(options)
    if math.prod(shape) <= 600 and len(shape) <= 5:
        d.say(text, shape)


@rule(6)
def in_place(d: Draft) -> None:
    """A copy that is written to, one or more times, and read."""
    x = d.pick(lambda v: len(v.shape) > 1 and v.shape[0] > 1)
    if x is None:
        return
    t = d.say(f"{x.name} * 1.0", x.shape)
    n = x.shape[-1]
    for _ in range(d.rng.choice([1, 1, 2, 3])):
        y = d.pick(lambda v: v.shape == x.shape and v.name != t.name)
        other = y.name if y else "1.5"
        options = [f"{t.name}[..., 0] = {f'{other}[..., 0]' if y else other}", f"{t.name}[:, -1] += 1.0", f"{t.name}.add_({other})", f"{t.name}.mul_({other})", f"{t.name}[..., ::2] *= 0.5", f"{t.name}[1:] = {t.name}[:-1].clone()",
                f"{t.name}.clamp_(min=0.0)", f"{t.name}[0] = 0.0", f"{t.name}.masked_fill_({x.name} > 0, 0.5)", f"{t.name}[{x.name} > 1] = 0.25", f"{t.name}.transpose(0, 1)[0] = 0.5", f"{t.name}.relu_()", f"{t.name}.tanh_()",
                f"{t.name}.select(-1, {n - 1}).copy_({f'{other}.select(-1, 0)' if y else f'{x.name}.select(-1, 0)'})", f"{t.name}.sub_({other}).div_(2.0)", f"{t.name}.narrow(-1, 0, 1).zero_()", f"{t.name}.fill_(0.5)", f"{t.name}.flatten()[::3] += 1.0",
                f"{t.name}.index_add_(0, torch.tensor([0, 0]), {x.name}[:2])", f"{t.name}.pow_(2)", f"{t.name}.neg_()", f"{t.name}.addcmul_({x.name}, {x.name}, value=0.5)"]  # fmt: skip
        d.write(t, d.rng.choice(options))


# -- losses --------------------------------------------------------------------------------------------------------------------------


def loss(d: Draft, x: Var) -> str:
    """A number of a value, by one of torch's losses where its shape allows."""
    name = x.name
    target, n = d.param(x.shape), x.shape[-1] if x.shape else 1
    how = d.rng.choice(["", ", reduction='sum'"])
    options = [f"{name}.sum() * 0.1", f"{name}.mean()", f"({name} ** 2).mean()", f"F.mse_loss({name}, {target}{how})", f"F.l1_loss({name}, {target})", f"F.smooth_l1_loss({name}, {target})", f"F.huber_loss({name}, {target}, delta=0.5)",
            f"F.binary_cross_entropy_with_logits({name}, ({target}.detach() > 0).double(){how})", f"F.binary_cross_entropy(torch.sigmoid({name}), ({target}.detach() > 0).double())", f"F.soft_margin_loss({name}, torch.sign({target}.detach()))",
            f"F.hinge_embedding_loss({name}, torch.where({target}.detach() > 0, 1.0, -1.0))", f"F.poisson_nll_loss({name}.clamp(max=3.0), {target}.detach().abs())", f"{name}.abs().amax()", f"{name}.logsumexp(tuple(range({len(x.shape)})))", f"{name}.norm()",
            f"F.gaussian_nll_loss({name}, {target}, ({name} * 0.5) ** 2 + 0.5)", f"F.softplus({name}).mean()", f"{name}.std()", f"F.margin_ranking_loss({name}, {target}, torch.ones_like({name}))", f"torch.dist({name}, {target})"]  # fmt: skip
    if len(x.shape) >= 2 and n > 1:
        classes = d.indices(x.shape[:-1], n)
        flat = f"{name}.reshape(-1, {n}), {classes}.reshape(-1)"
        options += [f"F.cross_entropy({flat}{how})", f"F.cross_entropy({flat}, label_smoothing=0.1)", f"F.cross_entropy({flat}, ignore_index=0)", f"F.cross_entropy({flat}, weight=({d.param((n,))}.detach().abs() + 0.5))", f"F.multi_margin_loss({flat})",
                 f"F.nll_loss(torch.log_softmax({name}.reshape(-1, {n}), -1), {classes}.reshape(-1))", f"F.kl_div(torch.log_softmax({name}, -1), torch.softmax({target}, -1), reduction='batchmean')", f"F.cosine_similarity({name}, {target}, dim=-1).mean()",
                 f"F.multilabel_soft_margin_loss({name}.reshape(-1, {n}), ({target}.detach() > 0).double().reshape(-1, {n}))", f"F.triplet_margin_loss({name}.reshape(-1, {n}), {target}.reshape(-1, {n}), {name}.reshape(-1, {n}).flip(0))", f"F.cross_entropy({name}.reshape(-1, {n}), torch.softmax({target}.reshape(-1, {n}), -1))",
                 f"F.cosine_embedding_loss({name}.reshape(-1, {n}), {target}.reshape(-1, {n}), torch.where({classes}.reshape(-1) > 0, 1.0, -1.0))", f"F.pairwise_distance({name}.reshape(-1, {n}), {target}.reshape(-1, {n})).mean()"]  # fmt: skip
    return d.rng.choice(options)


def random_module(rng: random.Random) -> Module:
    """One module: a few inputs and parameters, statements, and one to three losses."""
    d = Draft(rng, rng.choice(["whole", "normal"]))
    for k in range(rng.choice([1, 1, 2])):
        shape = rng.choice([(BATCH, LENGTH, rng.choice(WIDTHS)), (BATCH, rng.choice(WIDTHS)), (BATCH, 2, 4, 4), (BATCH, LENGTH, 6)])
        d.batch[f"x{k}"] = f"draw({shape}, {d.values!r}, {d.seed()})"
        d.env.append(Var(f"x{k}", shape))
    first = d.env[0]
    d.say(f"{first.name} * {d.param(rng.choice([first.shape[-1:], first.shape]))}", first.shape)
    weights = [w for w, _ in RULES]
    for _ in range(rng.randrange(2, 10)):
        rng.choices([r for _, r in RULES], weights)[0](d)
    ends = [v for v in d.env[-3:] if v.kind == "float"] or d.env[:1]
    for k in range(min(len(ends), rng.choice([1, 1, 2, 3]))):
        value = ends[-1 - k]
        text = loss(d, value)
        d.losses.append(Statement(Var(f"loss{k}", ()), f"loss{k} = {text}", d._reads(text)))
    return Module(tuple(d.attributes.items()), tuple(d.batch.items()), tuple(d.lines), tuple(d.losses)).needed()
