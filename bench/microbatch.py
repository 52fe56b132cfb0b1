"""`weft bench microbatch`: the largest micro-batch that fits, with optimizer state on every device or in slices, as predicted.

BERT of three sizes by data parallelism alone, Adam and LAMB, as in CoCoNet's table 1: half precision with masters and moments in
fp32, 128 words, 32 GB. A micro-batch counts if it is a power of two, as there. With `--run`, a small BERT is trained on processes of this
machine instead, within a few MB, and the bytes each rank holds are counted at every statement of its step.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

MODELS = {"334M": "bert-large", "1.2B": "bert-1.2b", "3.9B": "bert-3.9b"}
PUBLISHED = {  # CoCoNet, table 1: PyTorch's DDP, and state in slices
    ("adam", "334M"): (32, 32), ("adam", "1.2B"): (8, 32), ("adam", "3.9B"): (2, 8),
    ("lamb", "334M"): (64, 128), ("lamb", "1.2B"): (8, 64), ("lamb", "3.9B"): (2, 8),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    @app.command()
    def microbatch(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        devices: Annotated[int, typer.Option(help="copies of the model")] = 256,
        memory: Annotated[float, typer.Option(help="GB of one device")] = 32.0,
        kernels: Annotated[str, typer.Option(help="classic, eager or compiled")] = "classic",
        run: Annotated[int, typer.Option(help="train a small BERT on so many processes instead, Adam")] = 0,
        budget: Annotated[float, typer.Option(help="MB that a process may hold, with --run")] = 40.0,
    ) -> None:
        """Predict the largest micro-batch of BERT with replicated and with sharded optimizer state."""
        from weft.cli.output import console, emit

        if run:
            small = [held_row(words, run, budget * 1e6) for words in ("replicated", "sliced")]
            for row_ in small:
                console.print(f"{row_['case']}: {row_['largest']} by bytes held, {row_['predicted']} predicted; MB {row_['mb']}", markup=False)
            if json:
                emit({"bench": "microbatch", "ranks": run, "budget_mb": budget, "rows": small})
            return
        rows = [row(size, optimizer, devices, memory * 1e9, kernels) for optimizer in ("adam", "lamb") for size in MODELS]
        console.print(_table(rows))
        if json:
            emit({"bench": "microbatch", "devices": devices, "memory_gb": memory, "kernels": kernels, "rows": rows})


def row(size: str, optimizer: str, devices: int, memory: float, kernels: str) -> dict[str, Any]:
    replicated, sliced = (largest(size, optimizer, devices, memory, kernels, zero) for zero in (0, 1))
    ddp, coconet = PUBLISHED[optimizer, size]
    return {
        "case": f"{optimizer} {size}", "replicated": replicated, "sliced": sliced,
        "state_gb": {w: gigabytes(size, optimizer, devices, kernels, z) for w, z in (("replicated", 0), ("sliced", 1))},
        "published": {"replicated": ddp, "sliced": coconet},
    }  # fmt: skip


def largest(size: str, optimizer: str, devices: int, memory: float, kernels: str, zero: int) -> int:
    """The largest power of two that fits; 0 if not even one sample does."""
    fits = 0
    while fits < 1024 and needed(size, optimizer, devices, kernels, zero, max(1, 2 * fits)).total <= memory:
        fits = max(1, 2 * fits)
    return fits


def gigabytes(size: str, optimizer: str, devices: int, kernels: str, zero: int) -> float:
    """Parameters, gradients and optimizer state on one device."""
    m = needed(size, optimizer, devices, kernels, zero, 1)
    return round((m.params + m.grads + m.optimizer) / 1e9, 2)


def needed(size: str, optimizer: str, devices: int, kernels: str, zero: int, micro_batch: int) -> Any:
    """What one device must have. LAMB keeps the update of its largest tensor until its norm is known."""
    from dataclasses import replace

    from weft.cluster.spec import cluster
    from weft.frontend.catalog import entry
    from weft.plan.planner import captured_stack
    from weft.plan.setting import Setting
    from weft.plan.simulate import simulate

    model, stack = entry(MODELS[size]).settings, captured_stack(MODELS[size], "fp16", 128)[0]
    setting = Setting.counted(
        global_batch=micro_batch * devices, micro_batch=micro_batch, dp=devices, zero=zero, kernels=kernels, dtype="fp16", grad_dtype="fp16"
    )
    found = simulate(stack.work(setting), setting, cluster(f"{devices // 8}x8xV100-DGX2")).peak_memory
    update = 4.0 * model.vocab * model.hidden / (devices if zero else 1)
    return replace(found, buffers=found.buffers + update) if optimizer == "lamb" else found


# --- a small BERT, run


def held_row(how: str, ranks: int, budget: float) -> dict[str, Any]:
    """The largest micro-batch whose step stays within the budget, by what ranks held and as predicted; one is tried beyond both."""
    from bench._ranks import run_ranks

    plan, seen, size = f"dp{ranks}" + (",zero1" if how == "sliced" else ""), dict[int, tuple[float, float]](), 1
    while size <= 1024 and (not seen or min(seen[size // 2]) <= budget):
        seen[size] = run_ranks(held, ranks, plan, size)
        size *= 2
    largest, predicted = (max((b for b, found in seen.items() if found[k] <= budget), default=0) for k in range(2))
    mb = {b: [round(x / 1e6, 2) for x in found] for b, found in seen.items()}
    return {"case": f"{how}, {plan}", "largest": largest, "predicted": predicted, "mb": mb}


def held(rank: int, world: int, plan: str, micro_batch: int) -> tuple[float, float]:
    """The most bytes a rank held in a step, counted and predicted."""
    import torch

    import weft_zoo as zoo
    from weft.api.parallelize import parallelize

    w = zoo.get("bert-large", device="cpu", layers=2, hidden=256, heads=4, ffn=1024, vocab=1024, seq=32, dropout=0.0)
    batch = w.example(micro_batch * world)
    step = parallelize(w.model, w.loss, torch.optim.Adam(w.model.parameters()), batch, plan=plan)
    recorder = step.record(None, progress=False)
    for _ in range(5):
        step(batch)
    return recorder.measured.memory_gb * 1e9, recorder.predicted.memory_gb * 1e9


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("case", "replicated", "sliced", "published (DDP, CoCoNet)", "state GB", title="largest micro-batch")
    for r in rows:
        published, state = r["published"], r["state_gb"]
        table.add_row(r["case"], str(r["replicated"]), str(r["sliced"]), f"{published['replicated']}, {published['sliced']}",
                      f"{state['replicated']} against {state['sliced']}")  # fmt: skip
    return table
