"""Modules made on the meta device: values from safetensors shards or the module's own initialisation, slice by slice, and folders written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from weft import parallelize
from weft.core.errors import CheckpointError, RuntimeFault

safetensors = pytest.importorskip("safetensors.torch")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, dtype=torch.float64)
        self.first, self.last = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 12, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.last(self.first(self.embed(x)).tanh()))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def batches() -> list[Tensor]:
    return [torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def shards(folder: Path, model: nn.Module) -> None:
    """As Hugging Face writes them: tied weights once, a few files, an index."""
    folder.mkdir()
    tensors = [(n, t) for n, t in model.state_dict().items() if n != "head.weight"]
    files = {f"model-0000{i + 1}-of-00002.safetensors": dict(tensors[i::2]) for i in range(2)}
    for name, some in files.items():
        safetensors.save_file(some, folder / name)
    index = {"metadata": {}, "weight_map": {n: f for f, some in files.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def torchs(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for x in batches():
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {n: t.detach() for n, t in model.state_dict().items()}


def trained(plan: str, **options: Any) -> Any:
    model = on_meta()
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=0.05), batches()[0], plan, check=False, **options)
    return step, [step(x).item() for x in batches()]


@pytest.mark.parametrize("plan", ["dp2,zero3", "tp2", "pp2"])
def test_shards_in_and_out(plan: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net()
    shards(tmp_path / "hf", model)

    def job(rank: int) -> str:
        step, losses = trained(plan, weights=tmp_path / "hf")
        step.save_pretrained(tmp_path / "out", size=1000)
        held = {n: list(x.shape) for n, x in step.local_state.items() if n == "param.first.weight"}
        return json.dumps([losses, held])

    said = run_ranks(2, job, tmp_path)
    want, state = torchs(model)
    for text in said.values():
        losses, held = json.loads(text)
        torch.testing.assert_close(losses, want, atol=1e-9, rtol=1e-9)
        assert held in ({}, {"param.first.weight": [8, 8]}, {"param.first.weight": [16, 8]} if plan == "pp2" else None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1 and "head.weight" not in index
    for name, file in index.items():
        found = safetensors.load_file(tmp_path / "out" / file)[name]
        torch.testing.assert_close(found, state[name], atol=1e-9, rtol=1e-9)


def test_the_modules_own_initialisation(tmp_path: Path) -> None:
    """As torch has it: to_empty, then reset_parameters of one module after another under the seed."""

    class Plain(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64))

    def squares(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def job(rank: int) -> float:
        with torch.device("meta"):
            model = Plain()
        return parallelize(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), x, "dp2,zero3", seed=5, check=False)(x).item()

    said = run_ranks(2, job, tmp_path)
    with torch.device("meta"):
        model = Plain()
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for m in model:
        m.reset_parameters()
    for text in said.values():
        assert abs(float(text) - squares(model, x).item()) < 1e-9


def test_what_has_no_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match="the module has tensors without values") as e:
        trained("dp1")
    assert "seen" in str(e.value) and "weights=FOLDER" in str(e.value)
    with pytest.raises(CheckpointError, match="no weights in"):
        trained("dp1", weights=tmp_path)
    model = Net()
    with pytest.raises(RuntimeFault, match="weights= is for a module that has no values"):
        parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batches()[0], weights=tmp_path)
    shards(tmp_path / "hf", model)
    step, _ = trained("dp1", weights=tmp_path / "hf")
    with pytest.raises(RuntimeFault, match="the module is on the meta device, which holds no values") as e:
        step.sync_model()
    assert "step.save_pretrained(folder)" in str(e.value)


def test_state_that_one_rank_alone_asks_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "2")

    def job(rank: int) -> str:
        model = nn.Linear(4, 4)
        step = parallelize(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 4), "dp2,zero3", check=False)
        words = ""
        if rank == 0:
            with pytest.raises(RuntimeFault) as e:
                step.state_dict()
            words = str(e.value)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done{rank}", "1")
        store.get("done0")
        return words

    words = run_ranks(2, job, tmp_path)[0]
    assert "not every rank has called state_dict()" in words and "rank 1 did not answer" in words and "outside of `if rank == 0:`" in words, words
