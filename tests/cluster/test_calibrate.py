"""Calibration: the fit finds constants that made the samples, and real ranks can be timed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping

import pytest

from weft.cluster import calibrate, local, measure, passes
from weft.cluster.measure import MatmulTime
from weft.cluster.profile import Device, dump, load, parse
from weft.core.errors import ClusterError, RuntimeFault


def test_the_fit_finds_what_made_the_samples() -> None:
    def line(values: Mapping[str, float], size: float) -> float:
        return values["wait"] + size / values["rate"]

    truth = {"wait": 3e-5, "rate": 2e9}
    sizes = [2.0**p for p in range(8, 28, 2)]
    found = calibrate.descend({"wait": 1e-3, "rate": 1e8}, sizes, line, lambda s: line(truth, s))
    assert found == pytest.approx(truth, rel=0.05)


def test_products_give_back_their_surface() -> None:
    from weft.cluster import kernels

    device = load("H100").device
    shapes = [(m, n, k, 1, "bf16") for m in (512, 2048, 8192) for n in (512, 8192) for k in (256, 4096)]
    burst = Device("H100", {**device.constants, "gemm.sustained": device.constants["units"].__class__(1.0, "measured")})
    timed = [MatmulTime(*s, kernels.matmul(burst, *s)) for s in shapes]
    found = calibrate._fit_matmuls(device, timed, "bf16", "measured: a test")
    assert found.get("gemm.efficiency") == pytest.approx(device.get("gemm.efficiency"), rel=0.05)


def test_time_is_the_best_of_several() -> None:
    calls: list[int] = []
    assert measure.seconds(lambda: calls.append(1), "cpu", budget=1e-4) > 0
    assert len(calls) > 6


@pytest.mark.parametrize("ranks", [2])
def test_real_ranks_are_timed(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SIZES", (4096, 65536))
    found = local.run_ranks(ranks, "cpu", local.Timing("cpu", ranks, (4096, 65536)), timeout=60)[0]
    assert {s.kind for s in found} == set(local.KINDS)
    assert all(s.seconds > 0 for s in found)
    links = calibrate._links(None, found, ranks)
    assert links[0].span == ranks
    assert not multiprocessing.active_children()


class _Fails:
    def __call__(self, rank: int) -> None:
        raise ValueError("no luck")


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(RuntimeFault, match="no luck"):
        local.run_ranks(2, "cpu", _Fails(), timeout=60)
    assert not multiprocessing.active_children()


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ClusterError, match="cannot be measured here"):
        calibrate.calibrate("tpu")


def test_a_calibrated_profile_is_a_profile() -> None:
    seen = [MatmulTime(64, 64, 64, 1, "fp32", 1e-5), MatmulTime(512, 512, 512, 1, "fp32", 5e-3)]
    seen += [
        {"rate.memory": 1e10, "rate.cache": 4e10, "kernel.launch": 5e-6, "host.launch": 0.0, "gemm.sustained": 1.0, "math.rate": 1e8},
        {"attention.forward.128": 1e10, "attention.backward.128": 8e9, "attention.forward.64": 8e9, "attention.backward.64": 7e9},
        {"gemm.misaligned.1": 0.9, "gemm.misaligned.2": 0.8},
    ]
    device = calibrate._device("cpu", None, "here", seen)
    made = calibrate.Profile("here", device, 2, calibrate._links(None, [], 2))
    assert parse(dump(made)) == made
    assert device.bandwidth == pytest.approx(1e10)
    assert device.get("gemm.misaligned") == 0.8
    assert device.get("attention.narrow") == pytest.approx(0.3219, abs=1e-3)


def test_attention_over_few_keys() -> None:
    """Rates of keys / (keys + half) give back the half."""
    rate = {keys: 40e9 * keys / (keys + 70) for keys in (measure.SHORT, measure.LONG)}
    assert calibrate._half(rate[measure.LONG], rate[measure.SHORT]) == pytest.approx(70, rel=1e-6)
    assert calibrate._half(1.0, 2.0) == 0.0


def test_what_products_lose_in_a_step() -> None:
    """A step that takes as long as its parts says that they lose nothing; a longer one that they do."""
    from weft.cluster import kernels
    from weft.cluster.profile import Constant

    rates = {f"rate.{op}": Constant(1e9, "measured") for op in ("gelu", "gelu_backward", "layer_norm", "layer_norm_backward", "sum")}
    here = load("x86-2").device
    device = Device("here", {**here.constants, **rates, "gemm.sustained": Constant(1.0, "measured")})
    sizes = ((measure.ROWS, 4 * measure.WIDTH, measure.WIDTH), (measure.ROWS, measure.WIDTH, 4 * measure.WIDTH),
             (4 * measure.WIDTH, measure.WIDTH, measure.ROWS))  # fmt: skip
    products = measure.DEPTH * 2 * sum(kernels.matmul(device, *s, 1, "fp32") for s in sizes)
    assert calibrate._in_a_step(device, products, "measured: a test").get("gemm.sustained") == 1.0
    assert 0.5 <= calibrate._in_a_step(device, 3 * products, "measured: a test").get("gemm.sustained") < 0.9


def test_passes_go_round_operands_that_no_cache_holds() -> None:
    calls = passes.each_cold(lambda x, y: lambda: (x, y), (2**20,), (2**20,))
    assert len(calls) == passes.COLD // 2**23
    assert len({x.data_ptr() for call in calls for x in call()}) == 2 * len(calls)
    turns: list[int] = []
    passes.among([lambda k=k: turns.append(k) for k in range(3)], budget=1e-6)
    assert set(turns) == {0, 1, 2} and turns == [k % 3 for k in range(len(turns))]


def test_passes_over_stored_scores_are_what_products_and_exponentials_leave() -> None:
    from weft.cluster import kernels
    from weft.cluster.profile import Constant

    device = Device("here", {**load("x86-2").device.constants, "rate.exp": Constant(1e9, "measured")})
    heads = passes.SAMPLES * passes.HEADS
    count = heads * passes.KEYS**2
    product = kernels.matmul(device, passes.KEYS, passes.KEYS, passes.WIDTH, heads, "fp32")
    took = {"scores.attention": 2 * product + 2 * count / 1e9 + count / 2e8, "scores.attention_backward": 5 * product + count / 1e9 + count / 1e8}
    found = calibrate._with_scores(device, took, "measured: a test")
    assert found.get("rate.scores.attention") == pytest.approx(2e8, rel=1e-3)
    assert found.get("rate.scores.attention_backward") == pytest.approx(1e8, rel=1e-3)


def test_attention_as_it_is_defined_is_timed() -> None:
    assert all(took > 0 for took in passes.scores().values())


def test_ranks_that_share_cores_have_their_share_of_every_rate() -> None:
    from weft.cluster.profile import Constant
    from weft.cluster.spec import crowded

    here = load("x86-2")
    device = Device("here", {**here.device.constants, "rate.gelu": Constant(1e9, "measured"), "rate.scores.attention": Constant(1e8, "measured")})
    shared = crowded(calibrate.Profile("here", device, 4, here.links), 4).device
    rates = ("rate.gelu", "rate.scores.attention", "peak.fp32", "memory.bandwidth")
    assert [shared.get(key) / device.get(key) for key in rates] == pytest.approx([0.5] * len(rates))
