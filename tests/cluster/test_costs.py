"""Kernels and collectives against numbers others measured, and against what must hold of any device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from weft.cluster import collectives, kernels
from weft.cluster.collectives import Ranks
from weft.cluster.profile import Constant, Device, load, names
from weft.cluster.spec import cluster
from weft.core.errors import ClusterError
from weft.cost.price import device_seconds
from weft.cost.work import Gemm

MIB = 2**20


# openxla's table for H100, bf16: m, n, k and TFLOP/s of single calls.
@pytest.mark.parametrize(
    ("m", "n", "k", "rate"), [(4096, 4096, 4096, 780), (2048, 2048, 4096, 752), (1024, 1024, 4096, 473), (4096, 4096, 1024, 685)]
)
def test_single_calls_near_a_table(m: int, n: int, k: int, rate: float) -> None:
    # the table times bursts; training runs at the clocks the power limit leaves
    constants = {**load("H100").device.constants, "gemm.sustained": Constant(1.0, "assumed: a burst")}
    device = Device("H100", constants)
    seconds = kernels.matmul(device, m, n, k, 1, "bf16") + device.get("kernel.launch")
    assert 2e-12 * m * n * k / seconds == pytest.approx(rate, rel=0.15)


# aiconfigurator's table for H100, bf16, replayed from graphs: m, n, k and microseconds; few, odd and many rows.
@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [(2048, 2048, 4096, 43.5), (8192, 8192, 4096, 795.9), (2049, 4096, 7168, 150.1), (4097, 1024, 8192, 84.8), (4097, 32, 16384, 53.5), (1, 3072, 7168, 18.7)],
)
def test_products_near_the_table(m: int, n: int, k: int, us: float) -> None:
    # the table times bursts; training runs at the clocks the power limit leaves
    constants = {**load("H100").device.constants, "gemm.sustained": Constant(1.0, "assumed: a burst")}
    assert 1e6 * kernels.matmul(Device("H100", constants), m, n, k, 1, "bf16") == pytest.approx(us, rel=0.15)


def test_one_more_row_costs_nothing_to_speak_of() -> None:
    device = load("H100").device
    assert kernels.matmul(device, 8191, 4096, 4096, 1, "bf16") == pytest.approx(kernels.matmul(device, 8192, 4096, 4096, 1, "bf16"), rel=0.02)
    rows = Gemm(8191, 4096, 4096)
    back = Gemm(4096, 4096, 8191, loose="k")  # the gradient of the weight sums over rows
    assert device_seconds(device, rows) == pytest.approx(device_seconds(device, back), rel=0.1)


def test_many_products_at_once_are_the_same() -> None:
    device, sizes = load("B200").device, ((64, 512, 512), (4097, 1024, 8192), (16384, 50257, 4096))
    m, n, k = (np.array(x) for x in zip(*sizes, strict=True))
    assert kernels.matmul(device, m, n, k, 1, "bf16") == pytest.approx([kernels.matmul(device, *x, 1, "bf16") for x in sizes])


@pytest.mark.parametrize("kind", ["A100", "H100", "B200", "V100"])
def test_products_are_never_faster_than_the_device(kind: str) -> None:
    device = load(kind).device
    for m, n, k in [(64, 64, 64), (8192, 8192, 8192), (16, 50257, 4096), (4096, 1, 4096)]:
        seconds = kernels.matmul(device, m, n, k, 1, "fp16")
        assert seconds >= 2 * m * n * k / device.peak("fp16")
        assert seconds >= 2 * (m * k + k * n + m * n) / device.get("memory.bandwidth")


@pytest.mark.parametrize("kind", names())
@pytest.mark.filterwarnings("error")
def test_what_has_no_elements_has_a_price(kind: str) -> None:
    device = load(kind).device
    for sizes in itertools.product((0, 64), repeat=3):
        for given in (sizes, np.array([sizes, sizes]).T):
            seconds = kernels.matmul(device, *given, 1, "fp32")
            assert np.all(seconds >= 0) and np.all(seconds <= kernels.matmul(device, 64, 64, 64, 1, "fp32"))
        assert 0 <= kernels.attention(device, 1, 2, *sizes, 0.0, "fp16") < 1


def test_odd_rows_are_slow() -> None:
    device = load("A100").device
    assert kernels.matmul(device, 4096, 50257, 1024, 1, "fp16") > 1.8 * kernels.matmul(device, 4096, 50264, 1024, 1, "fp16")


def test_cached_passes_are_faster_where_the_cache_is_known() -> None:
    device = load("x86-2").device
    small = device.get("cache.bytes")
    per_byte = [kernels.memory_bound(device, size, 1) - device.get("kernel.launch") for size in (small, 64 * small)]
    assert per_byte[1] > 64 * per_byte[0]


# All-reduce over 8 x A100 in microseconds, each call issued and waited for (ml-engineering): size in MiB.
@pytest.mark.parametrize(("size", "us"), [(16, 277), (64, 685), (256, 2421), (1024, 8204)])
def test_collectives_near_a_table(size: int, us: float) -> None:
    place = cluster("8xA100")
    seconds = collectives.seconds(place, "all_reduce", size * MIB, Ranks((8, 8))) + place.device.get("host.launch")
    assert seconds * 1e6 == pytest.approx(us, rel=0.2)


# Over 8 x H100 in microseconds, calls queued behind each other (aiconfigurator): bytes.
@pytest.mark.parametrize(
    ("kind", "size", "us"), [("all_reduce", 512, 15.6), ("all_reduce", MIB, 25.4), ("all_gather", 4 * MIB, 33.4), ("all_to_all", 128 * MIB, 402.4)]
)
def test_small_collectives_near_a_table(kind: str, size: int, us: float) -> None:
    assert collectives.seconds(cluster("8xH100"), kind, size, Ranks((8, 8))) * 1e6 == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize("kind", [k for k in collectives.KINDS if k != "send"])
def test_more_bytes_take_longer(kind: str) -> None:
    place = cluster("4x8xH100")
    times = [collectives.seconds(place, kind, 2**p, Ranks((8, 32))) for p in range(10, 32)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_crossing_nodes_costs() -> None:
    place = cluster("2x8xH100")
    inside = collectives.seconds(place, "all_reduce", 64 * MIB, Ranks((8, 8)))
    across = collectives.seconds(place, "all_reduce", 64 * MIB, Ranks((4, 8)))
    assert across > inside


def test_ranks_of_a_node_share_the_work_of_leaving_it() -> None:
    place = cluster("16x8xH100")
    one = collectives.seconds(place, "all_reduce", 2**30, Ranks((1, 16)))
    four = collectives.seconds(place, "all_reduce", 2**30, Ranks((4, 64)))
    assert four < one


def test_one_rank_has_nobody_to_talk_to() -> None:
    assert collectives.seconds(cluster("8xH100"), "all_gather", 2**30, Ranks((1, 1))) == 0


def test_an_unknown_collective() -> None:
    with pytest.raises(ClusterError, match="no collective named 'all_shuffle'"):
        collectives.seconds(cluster("8xH100"), "all_shuffle", 2**20, Ranks((8, 8)))


def test_products_in_four_bits_are_faster_where_the_device_has_them() -> None:
    device = load("B200").device
    four, eight = (kernels.matmul(device, 8192, 8192, 8192, 1, dtype) for dtype in ("fp4", "fp8"))
    assert 0.45 * eight < four < 0.7 * eight and kernels.kept_width("fp4") == kernels.kept_width("fp8") == 2
    with pytest.raises(ClusterError, match="fp4"):
        kernels.matmul(load("H100").device, 8192, 8192, 8192, 1, "fp4")


def test_grouped_products_take_the_faster_of_two_dtypes_and_no_less_than_their_flops() -> None:
    device = load("H100").device
    narrow, wide = (kernels.grouped(device, 2048, 1536, 2048, 16, dtype) for dtype in ("fp8", "bf16"))
    assert narrow <= wide and wide > 2.0 * 16 * 2048 * 1536 * 2048 / device.peak("bf16")


def test_copies_of_a_row_cross_to_another_node_once() -> None:
    place = cluster("4x8xH100")
    once, often = (collectives.seconds(place, "all_to_all", 64 * MIB, Ranks((8, 32)), copies) for copies in (1, 8))
    assert once / 4 < often < once / 1.8  # 8 copies lie on 3.6 of 4 nodes
    assert collectives.seconds(place, "all_to_all", 64 * MIB, Ranks((8, 32)), 1) == once


def test_a_product_with_no_rows_is_priced_as_an_aligned_one() -> None:
    """All of its sizes may be odd where no tensor of it is contiguous along one."""
    device = load("A100").device
    assert device_seconds(device, Gemm(64, 64, 64, 1, "bf16", loose="mnk")) == device_seconds(device, Gemm(64, 64, 64, 1, "bf16"))
