"""An expert layer of Qwen3-30B's sizes, forward and backward, on ranks that share a GPU: weft's `ep`, overlapped and not, against torch.

    python -m bench.gpu_experts [--ranks 4] [--plans "ep4;ep4,async-ep"] [--json]

torch: tokens sorted by expert, sent by an all_to_all with the sizes of the moment through symmetric memory, grouped products, and back;
what lies between the two exchanges is compiled. Losses and the input's gradient are compared with every expert on one rank first.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from bench import _gpu
from bench._gpu_memory import Memory
from bench._gpu_rank import Rank, timed_row

STAGES = {"symmetric": _gpu.Stage("layers", limit=150)}
SIZES = {True: {"experts": 128, "k": 8, "hidden": 2048, "inner": 768, "tokens": 8192},  # tokens of a rank
         False: {"experts": 8, "k": 2, "hidden": 32, "inner": 16, "tokens": 64}}  # fmt: skip
CLOSE = {True: 2e-2, False: 1e-5}


def register(app: typer.Typer) -> None:
    app.command("gpu-experts")(experts)


def experts(
    plans: str = typer.Option("", help="With semicolons between; as many ranks as there are by default, overlapped and not."),
    ranks: int = _gpu.RANKS, device: str = _gpu.DEVICE, json: bool = _gpu.JSON,
) -> None:  # fmt: skip
    """An expert layer over ranks: weft's expert parallelism against torch's grouped matmuls and all_to_all."""
    wanted = plans.split(";") if plans else [f"ep{ranks}", f"ep{ranks},async-ep"]
    _gpu.report("gpu-experts", _gpu.run_stages("bench.gpu_experts", STAGES, "symmetric", ranks, device, plans=wanted), json)


def layers(me: Rank, plans: list[str]) -> None:
    sizes, close = SIZES[me.cuda], CLOSE[me.cuda]
    x, want = batch(me, sizes), batch(me, sizes, 1)
    ways: dict[str, Callable[[], Any]] = {}
    whole = Layer(me, sizes)
    first = me.tried("torch alone", lambda: alone(whole, x, want))
    made = me.tried("torch", lambda: Sent(me, sizes, whole))
    if made is not None and first is not None:
        got = float(made(x.chunk(me.world)[me.rank], want.chunk(me.world)[me.rank]))
        off = abs(sum(me.all(got)) / me.world - first[0]) / abs(first[0])
        apart = me.worst(relative(made.scale.grad / me.world, first[1].chunk(me.world)[me.rank]))
        if off > close or apart > close:
            me.say(case="torch", failed=f"loss off by {off:.1e}, the input's gradient by {apart:.1e}")
        else:
            me.say(note=f"torch: loss off by {off:.1e}, the input's gradient by {apart:.1e}")
            own = x.chunk(me.world)[me.rank], want.chunk(me.world)[me.rank]
            ways["torch"] = lambda: made(*own)
    steps = {}
    for plan in plans:
        start = me.tried(plan, functools.partial(planned, me, whole, plan, x, want, first)) if first is not None else None
        if start is None:
            continue
        step, off, apart = start
        if max(off, apart) > close:
            me.say(case=plan, failed=f"loss off by {off:.1e}, the input's gradient by {apart:.1e}")
            continue
        for _ in range(4):
            step({"x": x, "want": want})
        steps[plan], ways[plan] = step, functools.partial(step, {"x": x, "want": want})
        me.say(note=f"{plan}: loss off by {off:.1e}, the input's gradient by {apart:.1e}", how=step.compiled.how)
    for _ in range(2):
        for way in ways.values():
            way()
    ms = me.time_calls(ways, rounds=7, calls=2)
    for plan in steps:
        me.say(**timed_row(f"experts {plan}", {"weft": ms[plan], **{k: v for k, v in ms.items() if k != plan}}, how=steps[plan].compiled.how))


def batch(me: Rank, sizes: dict[str, int], seed: int = 0) -> Tensor:
    made = torch.randn(me.world, sizes["tokens"], sizes["hidden"], generator=torch.Generator().manual_seed(seed))
    return made.to(me.device, torch.bfloat16 if me.cuda else torch.float32)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


class Layer(nn.Module):
    """transformers' layer of Qwen3-MoE behind a factor on every feature of every token, so that the input has a gradient."""

    def __init__(self, me: Rank, sizes: dict[str, int]) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=sizes["hidden"], moe_intermediate_size=sizes["inner"], num_experts=sizes["experts"], num_experts_per_tok=sizes["k"],
            norm_topk_prob=True, experts_implementation="eager",
        )  # fmt: skip
        with torch.device("meta"):
            self.block = Qwen3MoeSparseMoeBlock(config)
            self.scale = nn.Parameter(torch.empty(me.world, sizes["tokens"], 1))
        self.to(torch.bfloat16 if me.cuda else torch.float32).to_empty(device=me.device)
        torch.manual_seed(0)
        for p in self.block.parameters():
            nn.init.normal_(p, std=0.02)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x * self.scale)
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]


def loss_of(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    return ((model(b["x"]) - b["want"]).float() ** 2).mean()


def alone(model: Layer, x: Tensor, want: Tensor) -> tuple[float, Tensor]:
    """The loss and the gradient of the factors with all experts on one rank, expert by expert."""
    loss = loss_of(model, {"x": x, "want": want})
    loss.backward()
    assert model.scale.grad is not None
    grad = model.scale.grad.clone()
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), grad


def planned(me: Rank, whole: Layer, plan: str, x: Tensor, want: Tensor, first: tuple[float, Tensor]) -> tuple[Any, float, float]:
    """weft's step, how far its loss is off and how far its gradient of the factors, as one large step of them tells it."""
    from weft.api.parallelize import parallelize

    model, (loss, grad) = copy.deepcopy(whole).cpu(), first
    rest = [p for n, p in model.named_parameters() if n != "scale"]
    rate = 0.5 / float(grad.abs().max())
    optimizer = torch.optim.SGD([{"params": [model.scale], "lr": rate}, {"params": rest, "lr": 0.0}])
    step = parallelize(model, loss_of, optimizer, {"x": x.cpu(), "want": want.cpu()}, plan=plan, device=me.device.type, check=False)
    off = abs(float(step({"x": x, "want": want})) - loss) / abs(loss)
    step.sync_model()
    apart = relative((1 - model.scale.detach().to(me.device)) / rate, grad)
    optimizer.param_groups[0]["lr"] = 0.0
    return step, off, me.worst(apart)


# -- torch's way ---------------------------------------------------------------------------------------------------------------


class Sent:
    """One rank's tokens, and its share of the experts."""

    def __init__(self, me: Rank, sizes: dict[str, int], whole: Layer) -> None:
        each = sizes["experts"] // me.world
        mine = slice(me.rank * each, (me.rank + 1) * each)
        self.me, self.k, self.each = me, sizes["k"], each
        self.router = nn.Parameter(whole.block.gate.weight.detach().clone())
        self.up = nn.Parameter(whole.block.experts.gate_up_proj[mine].detach().clone())
        self.down = nn.Parameter(whole.block.experts.down_proj[mine].detach().clone())
        self.scale = nn.Parameter(whole.scale.chunk(me.world)[me.rank].detach().clone())
        self.memory = Memory(me)
        compiled = torch.compile(dynamic=True) if me.cuda else lambda f: f
        self.routed, self.through, self.back = compiled(_routed), compiled(_through), compiled(_summed)

    def __call__(self, x: Tensor, want: Tensor) -> Tensor:
        for p in (self.router, self.up, self.down, self.scale):
            p.grad = None
        flat = (x * self.scale).flatten(0, 1)
        rows, weights, order, counts = self.routed(flat, self.router, self.k, self.me.world * self.each)
        plan = Sizes(self, counts)
        got = Exchange.apply(rows, self, plan.out, plan.into)
        got = self.through(got, self.up, self.down, plan.by_expert, plan.ends)
        y = self.back(Exchange.apply(got, self, plan.into, plan.out), weights, order, flat.shape[0])
        loss = ((y.view_as(x) - want).float() ** 2).mean()
        loss.backward()
        return loss.detach()

    def exchange(self, rows: Tensor, out: list[list[int]]) -> Tensor:
        """`out[r]` are the rows that rank r sends to each: from every rank those for this one."""
        me, width = self.me, rows.shape[1]
        most = max(sum(each) for each in out)
        buffer, handle = self.memory.buffer("rows", -(-most // (1 << 14)) * (1 << 14) * width, rows.dtype)
        if not me.cuda:
            all_rows = me.all(rows)
        else:
            buffer[: rows.numel()].copy_(rows.reshape(-1))
            handle.barrier(channel=0)
            all_rows = [handle.get_buffer(r, (sum(out[r]), width), rows.dtype) for r in range(me.world)]
        begins = [sum(each[: me.rank]) for each in out]
        got = torch.cat([all_rows[r][b : b + out[r][me.rank]] for r, b in enumerate(begins)])
        if me.cuda:
            handle.barrier(channel=1)
        return got


class Sizes:
    """How many rows go from each rank to each, read by the host, and where this rank's experts find theirs in what arrives."""

    def __init__(self, way: Sent, counts: Tensor) -> None:
        me = way.me
        table = torch.empty(me.world * counts.numel(), dtype=torch.int32, device=counts.device)
        way.memory.gather(table, counts.to(torch.int32))
        by_rank = table.view(me.world, me.world, way.each)
        self.out = by_rank.sum(-1).tolist()
        self.into = [list(each) for each in zip(*self.out, strict=True)]
        mine = by_rank[:, me.rank]  # [from, expert]
        experts = torch.arange(way.each, device=counts.device).repeat(me.world)
        self.by_expert = torch.sort(experts.repeat_interleave(mine.flatten(), output_size=sum(self.into[me.rank])), stable=True).indices
        self.ends = mine.sum(0).cumsum(0).to(torch.int32)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Sent, out: Any, into: Any) -> Tensor:
        ctx.way, ctx.into = way, into
        return way.exchange(rows, out)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return ctx.way.exchange(ct.contiguous(), ctx.into), None, None, None


def _routed(flat: Tensor, router: Tensor, k: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    probs = F.softmax(F.linear(flat, router), -1, dtype=torch.float)
    weights, picks = probs.topk(k, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
    at, order = torch.sort(picks.flatten(), stable=True)
    counts = torch.bincount(at, minlength=experts)
    return flat[order // k], weights.flatten()[order].unsqueeze(-1), order // k, counts


def _through(rows: Tensor, up: Tensor, down: Tensor, by_expert: Tensor, ends: Tensor) -> Tensor:
    sorted_rows = rows[by_expert]
    gate, wide = products(sorted_rows, up, ends).chunk(2, -1)
    out = products(F.silu(gate) * wide, down, ends)
    return torch.empty_like(out).index_copy(0, by_expert, out)


def products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.is_cuda:
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ w.T for part, w in zip(rows.split(sizes), weight, strict=True)])


def _summed(rows: Tensor, weights: Tensor, tokens: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, rows.shape[1]).index_add(0, tokens, rows * weights)


if __name__ == "__main__":
    typer.run(experts)
