"""Programs of `weft bench planner-cases`, built from the words of a case."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def build(words: str) -> Callable[[int, int, int], Any] | None:
    """A captured step from the words of a case; None where they say what is not built here."""
    if m := re.match(r"MLP (\d+)xDense\((\d+)\)\+bias", words):
        return lambda batch, seq, image: mlp(int(m[1]), int(m[2]), batch, bias=True, adam="Adam" in words)
    if m := re.match(r"(\d+) BERT layers h(\d+) heads(\d+)", words):
        return lambda batch, seq, image: _bert(int(m[1]), int(m[2]), int(m[3]), batch, seq)
    if (m := re.match(r"(\d+)x\[conv3x3 s2 no-bias, BN\(train\), relu, maxpool2 SAME\], channels (\d+)", words)) is not None:
        return lambda batch, seq, image: _conv(int(m[1]), int(m[2]), batch, image)
    if (m := re.match(r"attention \+ GShard MoE layer, h(\d+) heads(\d+) group(\d+) experts(\d+)", words)) is not None:
        return lambda batch, seq, image: _moe(*(int(x) for x in m.groups()), batch, seq)
    if m := re.match(r"(\d+) conv blocks channels (\d+)", words):
        return lambda batch, seq, image: _conv(int(m[1]), int(m[2]), batch, image)
    if m := re.match(r"BERT-MLM L(\d+) h(\d+) heads(\d+) V(\d+)", words):
        return lambda batch, seq, image: _masked(*(int(x) for x in m.groups()), batch, seq)
    if m := re.match(r"Dense(\d+) nobias, Dropout \.1, Dense(\d+) nobias, SGD", words):
        return lambda batch, seq, image: _dropped(int(m[1]), batch, seq)
    return None


def _capture(model: Any, example: Any, adam: bool) -> Any:
    import torch

    from weft.frontend.capture import capture

    made = torch.optim.Adam(model.parameters()) if adam else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(model, example, lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), made)


def mlp(layers: int, width: int, batch: int, bias: bool, adam: bool) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        parts: list[nn.Module] = []
        for i in range(layers):
            parts += [nn.ReLU()] * (i > 0) + [nn.Linear(width, width, bias=bias)]
        example = tuple(torch.empty(batch, width) for _ in range(2))
        return _capture(nn.Sequential(*parts), example, adam)


def _bert(layers: int, hidden: int, heads: int, batch: int, seq: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

        def heads(self, x: Tensor) -> Tensor:
            return x.view(batch, seq, heads, hidden // heads).transpose(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x)))
            y = self.out(y.transpose(1, 2).reshape(batch, seq, hidden))
            x = self.norm1(x + F.dropout(y, 0.1))
            return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))

    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
        return _capture(model, tuple(torch.empty(batch, seq, hidden) for _ in range(2)), adam=True)


def _masked(layers: int, hidden: int, heads: int, vocab: int, batch: int, seq: int) -> Any:
    """BERT with its embeddings and the head that guesses masked words."""
    import torch

    import weft_zoo as zoo
    from weft.frontend.capture import capture

    w = zoo.get("bert-large", layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=vocab, seq=seq)
    return capture(w.model, w.example(batch, device="meta"), w.loss, torch.optim.Adam(w.model.parameters()))


def _conv(blocks: int, channels: int, batch: int, image: int) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        parts: list[nn.Module] = []
        for i in range(blocks):
            parts += [nn.Conv2d(3 if i == 0 else channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
            parts += [nn.MaxPool2d(2, 2, ceil_mode=True)]
        model = nn.Sequential(*parts)
        x = torch.empty(batch, 3, image, image)
        return _capture(model, (x, torch.empty_like(model(x))), adam=False)


def _moe(hidden: int, heads: int, group: int, experts: int, batch: int, seq: int) -> Any:
    """Attention, then experts whose two chosen places are dense tensors."""
    import torch

    from weft.frontend.capture import capture
    from weft_zoo import gshard

    settings = gshard.Settings(hidden=hidden, heads=heads, experts=experts, group=group, seq=seq)
    with torch.device("meta"):
        model = gshard.SparseBlock(settings)
        example = tuple(torch.empty(batch, seq, hidden) for _ in range(2))
        return capture(model, example, lambda m, b: ((m(b[0])[0] - b[1]) ** 2).mean(), torch.optim.Adam(model.parameters()))


def _dropped(width: int, batch: int, seq: int) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Dropout(0.1), nn.Linear(width, width, bias=False))
        return _capture(model, tuple(torch.empty(batch, seq, width) for _ in range(2)), adam=False)


# -- Adafactor: second moments of rows and columns where a parameter has both, of elements where not

DECAY, LEAST, RATE = 0.8, 1e-30, 1e-3


def with_adafactor(captured: Any, words: str) -> Any:
    """The same model stepped by Adafactor: its gradients, and an update that keeps means of squares by row and by column."""
    from dataclasses import replace

    from weft.core.program import new_program

    least = int(re.search(r"min_dim_size_to_factor=(\d+)", words)[1])  # type: ignore[index]
    p, outputs, states = captured.program, {}, dict[str, str]()
    outputs["loss"] = p.output_names["loss"]
    for name, gradient in captured.gradients.items():
        param, made = p.input_names[name], dict[str, Any]()
        outputs[name] = _adafactor(name, param, gradient, least, made)
        outputs |= made
        states |= dict.fromkeys(made, name)
    read = [n for n in new_nodes(outputs) if n.op.name == "input"]
    state = tuple((name, name) for name in outputs if name != "loss")
    return replace(captured, program=new_program("adafactor", p.mesh, read, outputs, state=state), states=states)


def new_nodes(outputs: dict[str, Any]) -> Any:
    from weft.core.node import toposort

    return toposort(outputs.values())


def _adafactor(name: str, param: Any, gradient: Any, least: int, made: dict[str, Any]) -> Any:
    """The next parameter; `made` is told of the next moments."""
    from weft.ops.pointwise import add, mul, rsqrt, square, sub
    from weft.ops.reduce import mean

    squares, bare = add(square(gradient), LEAST), name.removeprefix("param.")
    if param.ndim == 2 and min(param.shape) >= least:
        rows = _moment(f"v_row.{bare}", mean(squares, 1, keepdim=True), made)
        columns = _moment(f"v_col.{bare}", mean(squares, 0, keepdim=True), made)
        scale = mul(rsqrt(rows / mean(rows)), rsqrt(columns))
    else:
        scale = rsqrt(_moment(f"v.{bare}", squares, made))
    return sub(param, mul(mul(gradient, scale), RATE))


def _moment(name: str, fresh: Any, made: dict[str, Any]) -> Any:
    from weft.core.node import Type
    from weft.ops.pointwise import add, mul
    from weft.ops.source import input_node

    made[name] = add(mul(input_node(name, Type(fresh.dtype, fresh.layout)), DECAY), mul(fresh, 1 - DECAY))
    return made[name]


def small(words: str) -> Any:
    """A program of a few ops, without a mesh yet; None where the words are not known."""
    from weft.core.layout import Mesh
    from weft.frontend.trace import f32, trace

    lone = Mesh(x=1)
    if m := re.match(r"transpose/reshape chains \+ dot \((\d+)x(\d+)\)@\(\2x\1\), replicated out", words):
        n, k = int(m[1]), int(m[2])
        return trace(_turned_dot, lone, a=f32(k, n), b=f32(k // n, n, n))
    if words.startswith("z+x@y+x@y+x@y reused"):
        return trace(_reused, lone, x=f32(128, 2048), y=f32(2048, 128), z=f32(128, 128))
    if m := re.match(r"attention fwd B(\d+) S(\d+) H(\d+) nh(\d+)", words):
        b, s, h, heads = (int(x) for x in m.groups())
        return trace(_attention, lone, x=f32(b, s, h), **{w: f32(h, heads, h // heads) for w in "qkvo"})
    return None


def _turned_dot(a: Any, b: Any) -> Any:
    from weft.ops.linalg import matmul
    from weft.ops.shape import reshape, transpose

    rows, inner = a.shape[1], a.shape[0]
    left = transpose(reshape(reshape(a, (inner // rows, rows, rows)), (inner, rows)), 0, 1)
    return matmul(left, reshape(b, (inner, rows)))


def _reused(x: Any, y: Any, z: Any) -> Any:
    from weft.ops.linalg import matmul

    product = matmul(x, y)
    return z + product + product + product


def _attention(x: Any, q: Any, k: Any, v: Any, o: Any) -> dict[str, Any]:
    """One layer, its result the input of the next."""
    from weft.ops.linalg import einsum
    from weft.ops.norm import softmax

    heads = [einsum("bsm,mhd->bhsd", x, w) for w in (q, k, v)]
    chances = softmax(einsum("bhsd,bhtd->bhst", heads[0], heads[1]), dim=3)
    return {"x": einsum("bhsd,mhd->bsm", einsum("bhst,bhtd->bhsd", chances, heads[2]), o)}
