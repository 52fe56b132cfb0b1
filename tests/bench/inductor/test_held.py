"""What kernels of a compiled graph hold: lifetimes, the order of least memory, and buffers that wait to be written again."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from bench.inductor.held import Buffer, Kernel, Plan
from bench.inductor.stored import Stored
from bench.inductor.sums import join
from bench.inductor.torch_ops import value_random_ops

MB = 2**20


def buffer(size: int, *readers: int, kept: bool = False) -> Buffer:
    return Buffer(size, frozenset(readers), kept, ("f32", size))


def test_a_buffer_lives_to_its_last_reader() -> None:
    line = [Kernel((buffer(4, 1),)), Kernel((buffer(3, 2),)), Kernel((buffer(1, kept=True),))]
    assert Plan(line).peaks(range(3)) == [4, 7, 4]
    assert Plan(line).peak == 7


def test_what_nobody_reads_dies_with_its_maker() -> None:
    assert Plan([Kernel((buffer(4),)), Kernel((buffer(3, kept=True),))]).peak == 4


def test_a_fused_kernel_writes_over_what_it_reads_last() -> None:
    given, made = buffer(4, 1), buffer(4, kept=True)
    assert Plan([Kernel((given,)), Kernel((made,), {made: [given]})]).peak == 4
    assert Plan([Kernel((given,)), Kernel((made,))]).peak == 8


def test_kernels_that_need_least_come_first() -> None:
    """Two large results, each summed: one after the other needs room for one."""
    wide = [Kernel((buffer(10, 2),)), Kernel((buffer(10, 3),)), Kernel((buffer(1, kept=True),)), Kernel((buffer(1, kept=True),))]
    plan = Plan(wide)
    assert plan.order == [0, 2, 1, 3]
    assert plan.peak == 12


def test_a_freed_buffer_waits_where_that_does_not_raise_the_peak() -> None:
    """Kernel 4 takes what kernel 1 freed; it stays allocated while kernel 2 and 3 run, under the peak of kernel 0."""
    high = [Kernel((buffer(20, 1),)), Kernel((buffer(4, 2),)), Kernel((buffer(3, 3),)), Kernel((buffer(5, 4),)), Kernel((buffer(4, kept=True),))]
    assert Plan(high).peak == 24
    flat = high[1:]
    held = [Kernel(tuple(Buffer(b.size, frozenset(r - 1 for r in b.readers), b.kept, b.kind) for b in k.makes)) for k in flat]
    assert Plan(held).peak == max(Plan(held).peaks(Plan(held).order))


def test_a_product_waits_for_what_is_added_to_it() -> None:
    def work(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        product = torch.mm(a, b).t()
        return product.t() + torch.sin(c)

    given = [torch.randn(4, 4) for _ in range(3)]
    graph = make_fx(work, tracing_mode="fake")(*given)
    join(graph, accelerator=True)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "aten.addmm.default" in targets and "aten.mm.default" not in targets
    torch.testing.assert_close(graph(*given), work(*given))


def test_a_sum_that_pointwise_ops_read_is_done_by_them() -> None:
    def work(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.mm(a, b) + c)

    given = [torch.randn(4, 4) for _ in range(3)]
    for accelerator, joined in ((True, False), (False, True)):
        graph = make_fx(work, tracing_mode="fake")(*given)
        join(graph, accelerator)
        assert ("aten.addmm.default" in [str(n.target) for n in graph.graph.nodes]) is joined


def test_parts_of_a_result_live_as_long_as_each_is_read() -> None:
    """A backward that reads one part of a pair does not hold the other."""

    def work(x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.topk(x, 1024, dim=-1)
        return torch.mm(torch.mm(values, x), x)

    graph = make_fx(work, tracing_mode="fake")(torch.randn(1024, 1024))
    first = Stored(graph)
    part = first.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)[0]
    values, places = first._buffers(part)
    assert values.readers and not places.readers and values.size == 4 * MB


def test_the_state_of_random_numbers_is_no_argument_of_the_op_it_is_for() -> None:
    """As a checkpointed block runs its attention again on a GPU."""
    def graphsafe_run_with_rng_state(*_: object, rng_state: object) -> None: ...

    graph = make_fx(lambda x: torch.ops.aten.bernoulli.p(x, 0.5), tracing_mode="fake")(torch.rand(4))
    (drawn,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p)
    x = drawn.args[0]
    with graph.graph.inserting_before(drawn):
        again = graph.graph.create_node("call_function", graphsafe_run_with_rng_state, (torch.ops.aten.bernoulli.p, x, 0.5), {"rng_state": x})
    value_random_ops(graph)
    assert [t.shape for t in again.meta["val"]] == [torch.Size([4])]


def test_what_a_library_holds_while_it_runs_counts_but_no_plan_is_made_of_it() -> None:
    wide = [Kernel((buffer(4, 1),)), Kernel((buffer(1, kept=True),), passing=10)]
    assert Plan(wide).peaks(range(2)) == [4, 5]
    assert Plan(wide).peak == 15


def test_kernels_that_wait_for_one_another_are_taken_as_given() -> None:
    assert Plan([Kernel((buffer(4, 1),)), Kernel((buffer(4, 0),))]).order == [0, 1]
