"""Which values a compiled graph stores, and which kernels become one: as Inductor decides it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bench.inductor.stored import Stored
from bench.inductor.torch_ops import drop_copies

ROWS, WIDE = 16384, 512


def cut(work: Callable[..., object], *given: Tensor, accelerator: bool = True) -> Stored:
    return Stored(make_fx(work, tracing_mode="fake")(*given), accelerator)


def kernels(graph: Stored) -> list[set[str]]:
    """The names of what each kernel leaves in memory, after the ops that make it."""
    return [{n.name for n in graph.stored(group)} for group in graph.groups]


def tall() -> Tensor:
    return torch.empty(ROWS, WIDE, device="meta")


def test_two_kernels_that_read_the_same_become_one() -> None:
    """A layer run again and its backward read the same product; neither waits for the other."""

    def work(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.mm(x, w)
        return torch.mm(torch.sin(product), w), torch.mm(torch.cos(product) * torch.mm(grad, w), w)

    square = torch.empty(WIDE, WIDE, device="meta")
    assert {"sin", "mul"} in kernels(cut(work, tall(), square, tall()))


def test_one_that_waits_for_the_other_stays_by_itself() -> None:
    def work(x: Tensor, w: Tensor) -> Tensor:
        product = torch.mm(x, w)
        return torch.mm(torch.cos(product) * torch.mm(torch.sin(product), w), w)

    made = kernels(cut(work, tall(), torch.empty(WIDE, WIDE, device="meta")))
    assert {"sin"} in made and {"mul"} in made


def test_a_kernel_that_makes_two_results_of_an_input_does_not_write_over_it() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.mm(x, w)
        return torch.sin(product), torch.cos(product)

    square = torch.empty(WIDE, WIDE, device="meta")
    size = ROWS * WIDE * 4
    assert cut(both, tall(), square).peak == 2 * size - WIDE * WIDE * 4  # what the product was made of is freed before
    assert cut(lambda x, w: torch.sin(torch.mm(x, w)), tall(), square).peak == size


def test_a_value_of_few_inputs_is_computed_anew_and_one_of_many_is_stored() -> None:
    def work(w: Tensor, *parts: Tensor) -> list[Tensor]:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return [torch.mm(f(total), w) for f in (torch.sin, torch.cos)] + [torch.mm(torch.mm(total.relu(), w) + total, w)]

    square = torch.empty(WIDE, WIDE, device="meta")
    few, many = (cut(work, square, *(tall() for _ in range(n))) for n in (3, 6))
    assert not any("add_1" in made for made in kernels(few))
    assert any("add_4" in made for made in kernels(many))


def test_a_sum_down_the_columns_is_one_pass_with_one_along_the_rows() -> None:
    def work(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.mm(x, w)
        return (grad * x).sum(1), grad.sum(0), torch.mm(grad, w)

    square = torch.empty(WIDE, WIDE, device="meta")
    assert {"sum_1", "sum_2"} in kernels(cut(work, tall(), square))
    assert {"sum_1", "sum_2"} not in kernels(cut(work, tall(), square, accelerator=False))
    assert {"sum_1", "sum_2"} not in kernels(cut(work, torch.empty(WIDE, WIDE, device="meta"), square))


def test_what_both_passes_read_is_stored_before_them() -> None:
    """Made of five tensors, it is not computed anew; a kernel that also sums rows cannot have made it before the columns are summed."""

    def work(*parts: Tensor) -> tuple[Tensor, Tensor]:
        total = parts[0] * parts[1] + parts[2] * parts[3] + parts[4]
        return (total * total).sum(1), total.sum(0)

    assert kernels(cut(work, *(tall() for _ in range(5)))) == [{"add_1"}, {"sum_1", "sum_2"}]


def test_copies_into_the_same_layout_are_left_out() -> None:
    graph = make_fx(
        lambda x: torch.cos(torch.sin(x).clone()) + torch.sin(x).t().clone(memory_format=torch.contiguous_format).t(), tracing_mode="fake"
    )(torch.randn(4, 3))
    drop_copies(graph)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == 1
