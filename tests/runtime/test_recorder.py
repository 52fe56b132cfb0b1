"""What of a step's state is recorded in place, and what is copied in: told by whether it stays where it is."""

import torch

from weft.runtime import traced
from weft.runtime.traced import WARM_UP, Recorder


class Watched(Recorder):
    """Asked to record, it says so and goes on without."""

    asked = 0

    def _record(self, inputs):
        self.asked += 1
        return False


def _run(recorder: Recorder, weight: torch.Tensor, kept: list[torch.Tensor], calls: int) -> None:
    for k in range(calls):
        kept.append(torch.tensor(k))  # a new one each time; the old ones stay, so that no address comes again
        recorder({"weight": weight, "step": kept[-1]})


def _work(inputs):
    return {"weight": inputs["weight"], "step": inputs["step"] + 1}


def test_a_number_that_comes_anew_does_not_keep_a_step_from_being_recorded():
    recorder, kept = Watched(_work, {"weight", "step"}), []
    _run(recorder, torch.zeros(3), kept, 2 + WARM_UP)
    assert recorder._state == {"weight"}
    assert recorder.asked == 1


def test_state_that_moves_as_a_whole_stays_state():
    recorder, kept = Watched(_work, {"weight"}), []
    first, second = torch.zeros(3), torch.zeros(3)
    _run(recorder, first, kept, WARM_UP)
    _run(recorder, second, kept, WARM_UP)
    assert recorder._state == {"weight"}
    assert recorder.asked == 2


def test_a_result_goes_home_under_another_name():
    def work(inputs):
        return {"cache.new": inputs["cache"] + inputs["token"], "out": inputs["cache"] * inputs["weight"], "old": inputs["cache"][:2]}

    recorder = Watched(work, {"cache", "weight", "token"}, {"cache.new": "cache"})
    cache, weight, kept = torch.zeros(3), torch.full((3,), 2.0), []
    for k in range(WARM_UP + 2):
        kept.append(torch.tensor(float(k)))
        before = cache.clone()
        out = recorder({"cache": cache, "weight": weight, "token": kept[-1]})
        assert out["cache.new"] is cache and torch.equal(cache, before + k) and torch.equal(out["out"], before * 2)
        assert torch.equal(out["old"], before[:2])
    assert recorder._state == {"cache", "weight"} and recorder.asked == 1


def test_results_before_an_update_that_asks_for_numbers_are_the_callers_own(monkeypatch):
    """The recording is replaced by one that writes into the same memory again; the compiler by none."""

    class Again(Recorder):
        def _record(self, inputs):
            self._given = {n: x.clone() for n, x in inputs.items() if n not in self._state}
            self._out = self._work({**inputs, **self._given})
            self._graph = self
            return True

        def replay(self):
            for name, x in self._work({**self._stay, **self._given}).items():
                self._out[name].copy_(x)

    def compute(inputs):
        return {"loss": (inputs["weight"] * inputs["x"]).sum()}, (inputs["x"] * 2,)

    def update(inputs, values):
        inputs["weight"].sub_(float(values[0].sum()) * values[0])
        return {}

    step = traced.Traced(None, compute, update, [("weight.new", "weight")], torch.device("cpu"), record=False, asks=True)
    monkeypatch.setattr(step, "_compile", lambda inputs: lambda *given: _flat(step, compute, dict(zip(step._names, given, strict=True))))
    weight, want = torch.ones(3), torch.ones(3)
    step._recorder = Again(step._values, {"weight"}, {}, lends=True)
    step._recorder._stay = {"weight": weight}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    losses, wanted = [], []
    for k in range(WARM_UP + 3):
        x = torch.full((3,), k + 1.0)
        wanted.append(float((want * x).sum()))
        want = want - float(2 * x.sum()) * 2 * x
        losses.append(step({"weight": weight, "x": x})["loss"])
    assert [float(x) for x in losses] == wanted and torch.equal(weight, want)


def _flat(step, compute, inputs):
    out, values = compute(inputs)
    step._results = list(out)
    return [*out.values(), *values]
