"""A model under a plan for inference: prefill and decode steps over a key-value cache give what one process gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
