"""Programs of `weft bench planner-cases`, built from the words of a case: every word must be understood, or there is no program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

FILLER = re.compile(
    r"relu between|MSE( mean)?|mean squared error|fp32|f32|float32|post-LN|ffn ?4h|ffn=4h|deterministic|dropout off|training step|"
    r"top-?2( gating)?( capacity)?|\(dispatch tensor 2x tokens\)|attention \+|GShard|cross[- ]entropy|loss|no-bias convs?|same padding|"
    r"with|and|the|then|of|model|layers?|[-+,;:.()\[\]]"
)


class Words:
    """A statement that is read piece by piece; what is left in the end was not understood."""

    def __init__(self, text: str) -> None:
        self.text = text

    def take(self, pattern: str) -> re.Match[str] | None:
        found = re.search(pattern, self.text, re.IGNORECASE)
        if found:
            self.text = self.text[: found.start()] + " " + self.text[found.end() :]
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """`h64`, `h=64`, `hidden 64`."""
        found = self.take(rf"\b(?:{name})[ =]?(\d+)\b")
        if found is None and default is None:
            raise KeyError(name)
        return int(found[1]) if found else int(default)  # type: ignore[arg-type]

    def left(self) -> str:
        return " ".join(FILLER.sub(" ", self.text).split())


@dataclass(frozen=True)
class Sizes:
    batch: int
    seq: int = 0
    image: int = 0
    x: tuple[int, ...] = ()


Maker = Callable[[Words, Sizes], tuple[Any, Any, Any]]  # model, batch, loss


def build(model: str, sizes: Sizes, optimizer: str = "") -> Any:
    """A captured step from the words of a case, or what of them was not understood."""
    import torch

    from weft.core.errors import WeftError
    from weft.frontend.capture import capture
    from weft.transform.recompute import recomputed, regions_of

    words = Words(model)
    remat = words.take(r"(with )?(use[_ ])?remat(erialization)?|gradient[_ ]checkpointing|recompute")
    steps = (
        words.take(r"adafactor\(.*?\)|adafactor|SGD[- ]momentum|SGD|Adam") if not optimizer else words.take(r"adafactor\(.*?\)|Adam|SGD")
    )
    kind = optimizer or (steps[0] if steps else "Adam")
    try:
        with torch.device("meta"):
            made = next((m(words, sizes) for pattern, m in MAKERS.items() if re.search(pattern, model, re.IGNORECASE)), None)
    except KeyError as missing:
        return f"{missing} of {model!r}"
    if made is None or words.left():
        return words.left() if made is not None else model
    module, batch, loss = made
    try:
        captured = capture(module, batch, loss, _optimizer(kind, module.parameters()))
        captured = _apart(recomputed(captured, regions_of(captured, "full"))) if remat else captured
    except WeftError as reason:
        return reason.message
    return with_adafactor(captured, kind) if kind.lower().startswith("adafactor") else captured


def _apart(captured: Any) -> Any:
    """Every value that a second run reads waits alone, so that none decides the layout of another: only the order is lost."""
    from weft.core.node import remade
    from weft.ops.shape import item, optimization_barrier

    p = captured.program
    swap: dict[Any, Any] = {}
    for n in p.nodes:  # what waits for a second run may be part of another
        if n.op is item and n.args[0].op is optimization_barrier:
            value = n.args[0].args[n.attr("index")]
            swap[n] = optimization_barrier(remade([value], swap)[value])
    made = remade([n for _, n in p.outputs] + list(captured.gradients.values()), swap)
    program = p.with_outputs([(name, made[n]) for name, n in p.outputs], "recompute")
    return replace(captured, program=program, gradients={name: made[g] for name, g in captured.gradients.items()})


def _optimizer(kind: str, parameters: Any) -> Any:
    import torch

    if kind.lower().startswith("sgd"):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if "momentum" in kind.lower() else 0.0)
    return torch.optim.Adam(parameters)


def _squares(module: Any, batch: Any) -> Any:
    return ((module(batch[0]) - batch[1]) ** 2).mean()


def _likelihood(logits: Any, labels: Any) -> Any:
    """Cross-entropy as published programs have it: a softmax of single ops, and labels as rows of zeros with a one."""
    import torch

    most = logits.detach().amax(-1, keepdim=True)
    total = (logits - most).exp().sum(-1, keepdim=True).log() + most
    hot = (torch.arange(logits.shape[-1], device=logits.device) == labels[..., None]).to(logits.dtype)
    return (hot * (total - logits)).sum(-1)


def _like_output(module: Any, x: Any) -> tuple[Any, Any]:
    import torch

    return x, torch.empty_like(module(x))


def _mlp(words: Words, sizes: Sizes) -> Any:
    found = words.take(r"MLP (\d+) ?x ?Dense\((\d+)\)") or words.take(r"(\d+)-layer MLP h(\d+)")
    if found is None:
        raise KeyError("layers")
    bias = words.take(r"\+ ?bias|with bias") is not None or words.take(r"no[- ]?bias") is None
    return mlp(int(found[1]), int(found[2]), sizes.batch, bias)


def mlp(layers: int, width: int, batch: int, bias: bool) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        parts: list[nn.Module] = []
        for i in range(layers):
            parts += [nn.ReLU()] * (i > 0) + [nn.Linear(width, width, bias=bias)]
        return nn.Sequential(*parts), tuple(torch.empty(batch, width) for _ in range(2)), _squares


def _bert(words: Words, sizes: Sizes) -> Any:
    import torch
    from torch import Tensor, nn

    from weft_zoo import bert

    count = words.take(r"(\d+) BERT layers?")
    hidden, heads = words.number("h|hidden"), words.number("heads")
    dropout = 0.1 if words.take(r"dropout on") else 0.0
    settings = bert.Settings(int(count[1]), hidden, heads, 4 * hidden, seq=sizes.seq, dropout=dropout)  # type: ignore[index]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(bert.Block(settings) for _ in range(settings.layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, None)
            return x

    return Stack(), tuple(torch.empty(sizes.batch, sizes.seq, hidden) for _ in range(2)), _squares


def _masked(words: Words, sizes: Sizes) -> Any:
    """BERT with its embeddings and the head that predicts masked words."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from weft_zoo import bert

    words.take(r"BERT[- ]?MLM")
    layers, hidden, heads, vocab = (words.number(k) for k in ("L", "h|hidden", "heads", "V|vocab"))
    words.take(r"dropout on")
    s = bert.Settings(layers, hidden, heads, 4 * hidden, vocab, sizes.seq)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(sizes.seq, hidden)
            self.kinds, self.norm = nn.Embedding(2, hidden), nn.LayerNorm(hidden)
            self.layers = nn.ModuleList(bert.Block(s) for _ in range(layers))
            self.transform, self.last = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
            self.bias = nn.Parameter(torch.zeros(vocab))

        def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
            ids, kinds, places, _ = batch
            x = self.norm(self.words(ids) + self.kinds(kinds) + self.positions(places))
            for layer in self.layers:
                x = layer(x, None)
            return F.linear(self.last(F.gelu(self.transform(x))), self.words.weight, self.bias)

    return (
        Masked(),
        tuple(torch.zeros(sizes.batch, sizes.seq, dtype=torch.long) for _ in range(4)),
        lambda m, b: _likelihood(m(b), b[3]).mean(),
    )


def _moe(words: Words, sizes: Sizes) -> Any:
    """Attention, then experts whose two chosen places are dense tensors."""
    import torch

    from weft_zoo import gshard

    words.take(r"MoE layers?")
    hidden, heads, group, experts = (words.number(k) for k in ("h|hidden", "heads", "group|S", "experts|E"))
    settings = gshard.Settings(hidden=hidden, heads=heads, experts=experts, ffn=4 * hidden, group=group, seq=sizes.seq)
    example = tuple(torch.empty(sizes.batch, sizes.seq, hidden) for _ in range(2))
    return gshard.SparseBlock(settings), example, lambda m, b: ((m(b[0])[0] - b[1]) ** 2).mean()


def _moe_lm(words: Words, sizes: Sizes) -> Any:
    import torch

    from weft_zoo import gshard

    words.take(r"MoE[- ]?LM")
    layers, hidden, heads, vocab, group, experts = (words.number(k) for k in ("L", "h|hidden", "heads", "V|vocab", "group|S", "experts|E"))
    s = gshard.Settings(layers, hidden, heads, experts, 4 * hidden, vocab, sizes.seq, group)
    example = tuple(torch.zeros(sizes.batch, sizes.seq, dtype=torch.long) for _ in range(2))
    return gshard.GShard(s), example, lambda m, b: _likelihood(m(b[0])[0], b[1]).mean()


def _conv(words: Words, sizes: Sizes) -> Any:
    """Blocks of a convolution of stride 2, norm, relu and a pool of stride 1 that keeps the size."""
    import torch
    from torch import Tensor, nn

    class Norm(nn.Module):
        """Batch norm by the means of x and of its square, as flax has it."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(channels, 1, 1)), nn.Parameter(torch.zeros(channels, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            mean, square = x.mean((0, 2, 3), keepdim=True), (x * x).mean((0, 2, 3), keepdim=True)
            return (x - mean) * (square - mean * mean + 1e-5).rsqrt() * self.weight + self.bias

    found = words.take(r"(\d+) ?x ?\[conv3x3 s2 no-bias, BN\(train\), relu, maxpool2( s1)? SAME\]") or words.take(r"(\d+) conv blocks?")
    channels = words.number("channels?|c")
    parts: list[nn.Module] = []
    for _ in range(int(found[1])):  # type: ignore[index]
        parts += [nn.Conv2d(channels, channels, 3, 2, 1, bias=False), Norm(channels), nn.ReLU()]
        parts += [nn.ConstantPad2d((0, 1, 0, 1), -1e30), nn.MaxPool2d(2, 1)]
    model = nn.Sequential(*parts)
    return model, _like_output(model, torch.empty(sizes.batch, channels, sizes.image, sizes.image)), _squares


def _depthwise(words: Words, sizes: Sizes) -> Any:
    """To eight times the channels, each alone, and back."""
    import torch
    from torch import nn

    words.take(r"conv3x3 (c ?-> ?8c|to 8c)?|depthwise( separable)?( conv(3x3)?)?( model)?")
    words.take(r"depthwise( conv(3x3)?)?( 8c)?"), words.take(r"conv3x3 8c ?-> ?c"), words.take(r"relu"), words.take(r"BN(\(train\))?")
    words.take(r"no-bias"), words.take(r"8x")
    c = words.number("channels?|c")
    convs = [nn.Conv2d(c, 8 * c, 3, 1, 1, bias=False), nn.Conv2d(8 * c, 8 * c, 3, 1, 1, groups=8 * c, bias=False)]
    model = nn.Sequential(*convs, nn.Conv2d(8 * c, c, 3, 1, 1, bias=False), nn.ReLU(), nn.BatchNorm2d(c))
    return model, _like_output(model, torch.empty(sizes.batch, c, sizes.image, sizes.image)), _squares


def _tied(words: Words, sizes: Sizes) -> Any:
    """One table, which words are read from and predicted by."""
    import torch
    from torch import Tensor, nn

    (
        words.take(r"tied (input/output |input and output |word )?embeddings?"),
        words.take(r"x ?@ ?(embed|E|W)(\.T|\^T)|logits by the same table"),
    )
    words.take(r"\bsum\b|summed")
    vocab, hidden = words.number("V|vocab"), words.number("h|hidden")

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, hidden)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(x) @ self.embed.weight.T

    example = tuple(torch.zeros(sizes.batch, sizes.seq, dtype=torch.long) for _ in range(2))
    return Tied(), example, lambda m, b: _likelihood(m(b[0]), b[1]).sum()


def _mixed(words: Words, sizes: Sizes) -> Any:
    """Dense layers, a product by groups of features, dense layers again."""
    import torch
    from torch import Tensor, nn

    words.take(r"BEM, ?EMH ?-> ?EBH"), words.take(r"EBH, ?EHM ?-> ?BEM")
    words.text = re.sub(
        r"einsums?|reshape( to)?|mixed dot|dot_all_to_all|\(B, ?E, ?M_?(/E)?\)|\(B, ?M\)|\d* ?x? ?Dense ?\(?M?\)?|no-?bias", " ", words.text
    )
    groups, width = words.number("E"), words.number("M")
    inner, rows = words.number("H", 8 * width), words.number("B", sizes.batch or 256)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = (nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))) for _ in range(2))
            self.wi = nn.Parameter(torch.zeros(groups, width // groups, inner))
            self.wo = nn.Parameter(torch.zeros(groups, inner, width // groups))

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x).reshape(rows, groups, width // groups)
            y = torch.einsum("ebh,ehm->bem", torch.einsum("bem,emh->ebh", y, self.wi), self.wo)
            return self.after(y.reshape(rows, width))

    return Mixed(), tuple(torch.empty(rows, width) for _ in range(2)), _squares


def _row(words: Words, sizes: Sizes) -> Any:
    """Layers one behind the other: `Dense16 nobias, Dropout .1, x[:, arange(16)], relu`."""
    import torch
    from torch import Tensor, nn

    class Take(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.arange(self.count, device=x.device)]

    shape = sizes.x or (sizes.batch, sizes.seq) if sizes.x or sizes.seq else (sizes.batch,)
    parts: list[nn.Module] = []
    width = shape[-1] if sizes.x else 0
    dense, dropout = r"Dense ?\(?(\d+)\)?( ?(?:no[- ]?bias|\+ ?bias|bias))?", r"Dropout ?\(?(0?\.\d+)\)?"
    take = r"(?:gather )?x\[:, ?(?:arange\((\d+)\)|:(\d+))\]|gather(?: columns)?(?: \[?(?:0\.\.|first )?(\d+)\]?)"
    layer = f"{dense}|{dropout}|{take}|relu"
    while found := words.take(rf"^[\s,;>+-]*(?:{layer})"):
        if found[1]:
            out = int(found[1])
            parts.append(nn.Linear(width or out, out, bias="no" not in (found[2] or "").lower()))
            width = out
        elif found[3]:
            parts.append(nn.Dropout(float(found[3])))
        elif count := found[4] or found[5] or found[6]:
            parts.append(Take(int(count)))
            width = int(count)
        else:
            parts.append(nn.ReLU())
    if not parts:
        raise KeyError("layers")
    model = nn.Sequential(*parts)
    if not sizes.x:
        first = next(m for m in parts if isinstance(m, nn.Linear))
        shape = (*shape, first.in_features)
    return model, _like_output(model, torch.empty(*shape)), _squares


MAKERS: dict[str, Maker] = {
    r"MLP": _mlp,
    r"BERT layers?": _bert,
    r"BERT[- ]?MLM": _masked,
    r"MoE[- ]?LM": _moe_lm,
    r"MoE layer": _moe,
    r"depthwise": _depthwise,
    r"conv": _conv,
    r"tied": _tied,
    r"BEM": _mixed,
    r"^(Dense|gather|relu)": _row,
}


# -- Adafactor: second moments of rows and columns where a parameter has both, of elements where not

DECAY, LEAST, RATE = 0.8, 1e-30, 1e-3


def with_adafactor(captured: Any, words: str) -> Any:
    """The same model stepped by Adafactor: its gradients, and an update that keeps means of squares by row and by column."""
    from weft.core.node import toposort
    from weft.core.program import new_program

    found = re.search(r"min_dim_size_to_factor=(\d+)", words)
    least = int(found[1]) if found else 128  # as optax has it
    p, outputs, states = captured.program, {}, dict[str, str]()
    outputs["loss"] = p.output_names["loss"]
    for name, gradient in captured.gradients.items():
        param, made = p.input_names[name], dict[str, Any]()
        outputs[name] = _adafactor(name, param, gradient, least, made)
        outputs |= made
        states |= dict.fromkeys(made, name)
    read = [n for n in toposort(outputs.values()) if n.op.name == "input"]
    state = tuple((name, name) for name in outputs if name != "loss")
    return replace(captured, program=new_program("adafactor", p.mesh, read, outputs, state=state), states=states)


def _adafactor(name: str, param: Any, gradient: Any, least: int, made: dict[str, Any]) -> Any:
    """The next parameter; `made` is told of the next moments. Of a tensor of many dims the last two have moments of their own."""
    from weft.ops.pointwise import add, mul, rsqrt, square, sub
    from weft.ops.reduce import mean

    squares, bare = add(square(gradient), LEAST), name.removeprefix("param.")
    if param.ndim >= 2 and min(param.shape[-2:]) >= least:
        rows = _moment(f"v_row.{bare}", mean(squares, param.ndim - 1, keepdim=True), made)
        columns = _moment(f"v_col.{bare}", mean(squares, param.ndim - 2, keepdim=True), made)
        scale = mul(rsqrt(rows / mean(rows, param.ndim - 2, keepdim=True)), rsqrt(columns))
    else:
        scale = rsqrt(_moment(f"v.{bare}", squares, made))
    return sub(param, mul(mul(gradient, scale), RATE))


def _moment(name: str, fresh: Any, made: dict[str, Any]) -> Any:
    from weft.core.node import Type
    from weft.ops.pointwise import add, mul
    from weft.ops.source import input_node

    made[name] = add(mul(input_node(name, Type(fresh.dtype, fresh.layout)), DECAY), mul(fresh, 1 - DECAY))
    return made[name]


# -- programs of a few ops


def small(words: str) -> Any:
    """A program of a few ops, without a mesh yet; None where the words are not known."""
    from weft.core.layout import Mesh
    from weft.frontend.trace import f32, trace

    lone = Mesh(x=1)
    if m := re.match(
        r"(?:multi[- ]?)?(?:transposes?|reshapes?)(?:/reshapes?)?(?: chains?)? ?\+ dot \((\d+)x(\d+)\)@\(\2x\1\), replicated out$", words
    ):
        n, k = int(m[1]), int(m[2])
        return trace(_turned_dot, lone, a=f32(k, n), b=f32(k // n, n, n))
    if m := re.match(r"(z\+)?(x@y(?:\+x@y)*)(?:, replicated out| reused|$)", words):
        size = re.search(r"\((\d+)x(\d+)\)", words)
        n, k = (int(size[1]), int(size[2])) if size else (128, 2048)
        more = {"z": f32(n, n)} if m[1] else {}
        return trace(lambda x, y, **z: _summed(x, y, m[2].count("@"), *z.values()), lone, x=f32(n, k), y=f32(k, n), **more)
    if m := re.match(r"attention fwd B(\d+) S(\d+) H(\d+) nh(\d+)(,? replicated out)?$", words):
        b, s, h, heads = (int(x) for x in m.groups()[:4])
        name = "y" if m[5] else "x"
        return trace(lambda **given: {name: _attention(**given)}, lone, x=f32(b, s, h), **{w: f32(h, heads, h // heads) for w in "qkvo"})
    return None


def _turned_dot(a: Any, b: Any) -> Any:
    from weft.ops.linalg import matmul
    from weft.ops.shape import reshape, transpose

    rows, inner = a.shape[1], a.shape[0]
    left = transpose(reshape(reshape(a, (inner // rows, rows, rows)), (inner, rows)), 0, 1)
    return matmul(left, reshape(b, (inner, rows)))


def _summed(x: Any, y: Any, times: int, *others: Any) -> Any:
    from weft.ops.linalg import matmul

    terms: Sequence[Any] = [*others, *(matmul(x, y) for _ in range(times))]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _attention(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
    from weft.ops.linalg import einsum
    from weft.ops.norm import softmax

    heads = [einsum("bsm,mhd->bhsd", x, w) for w in (q, k, v)]
    chances = softmax(einsum("bhsd,bhtd->bhst", heads[0], heads[1]), dim=3)
    return einsum("bhsd,mhd->bsm", einsum("bhst,bhtd->bhsd", chances, heads[2]), o)
