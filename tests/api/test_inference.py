"""A model under a plan for inference: prefill and decode steps over a key-value cache give what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.compiled import Compiled
from weft.core.errors import PlanError
from weft.runtime.traced import Recorder, Traced

BATCH, PROMPT, LENGTH = 2, 5, 20


def llama() -> Any:
    w = zoo.small("llama3-8b", dtype=torch.float64)
    return w.model.make_cache(BATCH, LENGTH).eval()


def passes() -> list[dict[str, torch.Tensor]]:
    """A prompt, and then one token after the other."""
    tokens = torch.randint(0, 67, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    ends = [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))]
    return [{"tokens": tokens[:, a:b], "positions": torch.arange(a, b)} for a, b in ends]


def whole() -> list[torch.Tensor]:
    model = llama()
    with torch.no_grad():
        return [model(**p) for p in passes()]


@pytest.mark.parametrize(("plan", "heads"), [("dp1", 2), ("tp2", 1), ("dp2", 2)])
def test_prefill_and_decode_equal_one_process(plan: str, heads: int, tmp_path: Path) -> None:
    want = whole()

    def job(rank: int) -> None:
        run = weft.compile(llama(), plan, passes()[0])
        for batch, expected in zip(passes(), want, strict=True):
            torch.testing.assert_close(run(batch)["out"], expected, rtol=1e-9, atol=1e-9)
        cache = next(x for n, x in run._state.items() if n.startswith("buffer."))
        assert cache.shape[1] == heads  # under tensor parallelism a rank keeps its own heads only

    on_ranks(1 if plan == "dp1" else 2, job, tmp_path)


def test_decode_compiles_once_and_no_gather_of_the_cache() -> None:
    run = weft.compile(llama(), "dp1", passes()[0])
    for batch in passes():
        run(batch)
    assert len(run._made) == 2


class Counted(nn.Module):
    """A norm, a buffer that every call writes, and noise that is nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean(0))
        return self.last(self.norm(self.first(x + self.seen)) + 0 * torch.randn(8, dtype=x.dtype))


def another(model: nn.Module) -> None:
    model.first = nn.Linear(6, 8, dtype=torch.float64)
    nn.init.ones_(model.first.weight), nn.init.zeros_(model.first.bias)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict({n: x + 1 for n, x in m.state_dict().items()}),
    "in place": lambda m: m.first.weight.data.mul_(2),
    "another parameter": lambda m: setattr(m.last, "bias", nn.Parameter(torch.ones(4, dtype=torch.float64))),
    "another module": another,
    "a cache emptied": lambda m: m.seen.zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_the_module_later_is_taken(write: str, tmp_path: Path) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def job(rank: int) -> None:
        for plan in ("tp2", "dp2"):
            ours, theirs = Counted(), Counted().eval()
            run = weft.compile(ours, plan, x, check=False)
            for k, batch in enumerate((x, x[:4], x, x[:4])):
                if k == 2:
                    with torch.no_grad():
                        if write == "load_state_dict":  # it has the buffer too
                            ours.seen.copy_(theirs.seen)
                        WRITES[write](ours), WRITES[write](theirs)
                with torch.inference_mode():
                    torch.testing.assert_close(run(batch)["out"], theirs(batch), rtol=1e-9, atol=1e-9, msg=lambda m, at=f"{plan}, call {k}": f"{at}: {m}")

    on_ranks(2, job, tmp_path)


def test_an_example_is_needed() -> None:
    with pytest.raises(PlanError, match="a model is compiled for batches of one shape"):
        weft.compile(llama(), "dp1")


class Replayed(Recorder):
    """Records by keeping what it was given, and replays by doing the work again on that: as a CUDA graph, it sees addresses only."""

    def _record(self, inputs: Any) -> bool:
        self._given = {n: x.clone() for n, x in inputs.items() if n not in self._state}
        fixed = {**inputs, **self._given}
        self._out = self._in_place(fixed)

        def replay() -> None:
            for name, new in self._in_place(fixed).items():
                self._out[name].copy_(new)

        self._graph = SimpleNamespace(replay=replay)
        return True


def test_recorded_calls_give_what_one_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    made: list[tuple[bool, Traced]] = []
    plain = Traced.__init__

    def with_replay(self: Traced, *args: Any, record: bool, stays: Any = (), asks: bool = False) -> None:
        assert not asks  # no call of a pass without an update asks for numbers
        plain(self, *args, record=False)
        self._recorder = Replayed(self._once, {*self._state.values(), *stays}, self._state)
        made.append((record, self))

    monkeypatch.setattr(Traced, "__init__", with_replay)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, given, options=None: graph)
    monkeypatch.setattr(Compiled, "_may_trace", lambda self, asked: bool(self.code.parts))
    run = weft.compile(llama(), "dp1", passes()[0])
    for batch, expected in zip(passes(), whole(), strict=True):
        torch.testing.assert_close(run({n: x.clone() for n, x in batch.items()})["out"], expected, rtol=1e-9, atol=1e-9)
    assert [record for record, _ in made] == [True, True]
    assert made[1][1]._recorder is not None and made[1][1]._recorder.recorded  # of the pass that decodes
