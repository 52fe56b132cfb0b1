"""Masked attention on one GPU by the kernels weft calls for it: right for masks of every kind at awkward sizes, then timed against torch's.

    python -m bench.gpu_attention [--json]

sdpa         torch.nn.functional.scaled_dot_product_attention and its backward
as defined   products, softmax and their gradients, as the op is defined

weft's and the defined form are compiled by Inductor, as steps are; all are replayed from graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from bench import _gpu
from bench._gpu_rank import timed_row
from bench._gpu_time import in_graph, in_turn
from weft.runtime import fused_attention

SIZES = (512, 512), (64, 64), (60, 60), (33, 77), (5, 7), (128, 200), (200, 128), (100, 1000), (1000, 100), (2, 128)  # rows, keys
TIMED = {"keys": (16, 16, 512, 64), "rows": (4, 32, 2048, 128), "heads": (8, 12, 512, 64)}  # batch, heads, rows, numbers in a head
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}  # relative to the largest
SCALE = 0.1


def register(app: typer.Typer) -> None:
    app.command("gpu-attention")(attention)


def attention(json: bool = _gpu.JSON) -> None:
    """Masked attention, forward and back, on a GPU against scaled_dot_product_attention."""
    _gpu.need_gpu()
    rows = [{"machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}}, *check()]
    rows += [time_case(kind, *sizes, error=float(rows[1]["worst"])) for kind, sizes in TIMED.items()]
    status = "failed" if any(row.get("wrong") for row in rows) else "ok"
    _gpu.report("gpu-attention", [{"stage": "", "ranks": 1, "status": status, "rows": rows}], json)


def operands(kind: str, batch: int, heads: int, rows: int, keys: int, deep: int, dtype: torch.dtype, shared: int = 1) -> tuple[Tensor, ...]:
    """q, k, v, a cotangent and a mask of some kind: of keys, of rows and keys with a row that sees nothing, or of every score."""
    gen = torch.Generator("cuda").manual_seed(rows * 7 + keys)
    groups = heads // shared
    whole, some = (batch, groups, shared, rows, deep), (batch, groups, keys, deep)
    q, k, v, do = (torch.randn(shape, generator=gen, device="cuda").to(dtype) for shape in (whole, some, some, whole))
    shape = {"keys": (batch, 1, 1, 1, keys), "rows": (1, 1, 1, rows, keys), "heads": (batch, groups, shared, rows, keys)}[kind]
    hidden, added = torch.rand(shape, generator=gen, device="cuda") < 0.3, torch.randn(shape, generator=gen, device="cuda")
    mask = torch.where(hidden, -math.inf, added).to(dtype)
    mask[..., 0] = 0.0
    if kind == "rows":
        mask[..., rows // 2, :] = -math.inf
    return q, k, v, do, mask


def by_weft(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """The result, and its gradients by q, k and v."""
    out, lse = fused_attention.attention(q, k, v, mask, scale=SCALE)
    return out, *fused_attention.attention_backward(do, q, k, v, out, lse, mask, scale=SCALE)


def as_defined(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    p = torch.nan_to_num(torch.softmax(torch.einsum("bgrsd,bgtd->bgrst", q, k) * SCALE + mask, -1))
    out = torch.einsum("bgrst,bgtd->bgrsd", p, v)
    ds = p * (torch.einsum("bgrsd,bgtd->bgrst", do, v) - (do * out).sum(-1, keepdim=True)) * SCALE
    dq, dk = torch.einsum("bgrst,bgtd->bgrsd", ds, k), torch.einsum("bgrst,bgrsd->bgtd", ds, q)
    return out, dq, dk, torch.einsum("bgrst,bgrsd->bgtd", p, do)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    given = [x.detach().requires_grad_() for x in (q.flatten(1, 2), k, v)]
    out = F.scaled_dot_product_attention(*given, attn_mask=mask.flatten(1, 2), scale=SCALE)
    return out, *torch.autograd.grad(out, given, do.flatten(1, 2))


def check() -> list[dict[str, Any]]:
    """By cuDNN's kernels where they are the quick ones, and without them: against float64."""
    rows = []
    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        cases = [(kind, size, deep, dtype, 1) for dtype in CLOSE for kind, size, deep in itertools.product(TIMED, SIZES, (64, 128))]
        cases += [("heads", (60, 60), 40, torch.bfloat16, 1), *((kind, (60, 60), 64, torch.bfloat16, 3) for kind in TIMED)]
        wrong, worst = {}, 0.0
        for kind, (s, t), deep, dtype, shared in cases:
            given = operands(kind, 2, 3, s, t, deep, dtype, shared)
            both = zip(by_weft(*given), as_defined(*(x.double() for x in given)), strict=True)
            apart = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in both]
            worst = max(worst, max(apart) if dtype == torch.bfloat16 else 0.0)
            if not all(e < CLOSE[dtype] for e in apart):  # nan is not
                wrong[f"{kind} {s}x{t} of {deep}, {dtype}"] = [f"{e:.1e}" for e in apart]
        rows.append({"case": f"check, {'with' if cudnn else 'without'} cuDNN", "cases": len(cases), "worst": worst, "wrong": wrong})
        print(rows[-1], flush=True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return rows


def compiled(work: Callable[..., Any], given: tuple[Tensor, ...]) -> Callable[[], Any]:
    """As weft compiles a step: traced to ATen and given to Inductor."""
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    run = inductor(make_fx(work, tracing_mode="fake")(*given), list(given))
    return lambda: run(*given)


def time_case(kind: str, batch: int, heads: int, rows: int, deep: int, error: float) -> dict[str, Any]:
    given = operands(kind, batch, heads, rows, rows, deep, torch.bfloat16)
    ways = {"weft": compiled(by_weft, given), "sdpa": lambda: by_sdpa(*given), "as defined": compiled(as_defined, given)}
    name = f"mask of {kind}, {batch} x {heads} heads of {deep}, {rows} rows, bf16"
    return timed_row(name, in_turn({key: in_graph(way) for key, way in ways.items()}, 10), correct=f"within {error:.1e} of float64")


if __name__ == "__main__":
    typer.run(attention)
