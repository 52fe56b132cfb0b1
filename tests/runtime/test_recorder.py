"""What of a step's state is recorded in place, and what is copied in: told by whether it stays where it is."""

import torch

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
