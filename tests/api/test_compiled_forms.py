"""What generated code calls in place of single nodes gives what the nodes mean, traced or not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft import interp
from weft.api.compiled import Compiled
from weft.api.parallelize import parallelize
from weft.codegen.peepholes import peepholes_of
from weft.core.layout import Mesh, S
from weft.core.node import Type
from weft.core.program import new_program
from weft.frontend.capture import Captured, capture
from weft.ops.conv import conv2d_input_grad, conv2d_weight_grad
from weft.ops.source import input_node
from weft.runtime import intra_host as runtime_near
from weft.runtime.intra_host import HostGroup
from weft.runtime.peers import connect


def step_of(name: str) -> tuple[Captured, dict[str, torch.Tensor]]:
    w = zoo.small(name)
    batch = w.example(4)
    captured = capture(w.model, batch, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-3))
    return captured, captured.inputs(batch)


def fresh(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in values.items()}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The loss and the first moments, which are the gradients; Adam makes a sign of a gradient that is nothing but rounding."""
    for name in want:
        if name == "loss" or name.startswith(("exp_avg.", "buffer.")):
            scale = want[name].abs().max().clamp(min=1e-5).item()
            torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-3 * scale, msg=lambda m, name=name: f"{name}: {m}")


CALLS = {
    "gpt2": ("torch.nn.functional.linear", "torch.cat(", "library.layer_norm_backward", "statistics=", "library.adam_(", "library.put_all"),
    "llama3-8b": ("torch.nn.functional.linear", "library.attention_backward", "library.adam_(", "library.cross_entropy_backward"),
    "resnext50": ("library.conv2d_backward(", "library.adam_("),
}


@pytest.mark.parametrize("name", CALLS)
def test_forms_mean_their_nodes(name: str) -> None:
    captured, values = step_of(name)
    want = interp.run_global(captured.program, fresh(values))
    step = Compiled(captured.program, donate=True)
    for call in CALLS[name]:
        assert call in step.code.text, call
    assert_same(step(fresh(values)), want)


def test_state_is_updated_where_it_is() -> None:
    captured, values = step_of("gpt2")
    given = fresh(values)
    out = Compiled(captured.program, donate=True)(given)
    for name, home in captured.program.state:
        if name.startswith(("param.", "exp_avg")):
            assert out[name].data_ptr() == given[home].data_ptr()
    kept = fresh(values)
    Compiled(captured.program)(kept)
    assert all(torch.equal(kept[n], values[n]) for n in values)


@pytest.mark.parametrize(
    "equation", ["abk,nk->abn", "abk,kn->abn", "abn,abk->nk", "abn,abk->kn", "bij,bjk->bik", "bij,bkj->bik", "ai,bi->ba", "aik,k->ai", "ij,kl->ijkl"]
)
def test_products_need_no_einsum_and_mean_it(equation: str) -> None:
    sizes = dict(zip("abijklmn", range(2, 10), strict=True))
    left, right = equation.split("->")[0].split(",")
    gen = torch.Generator().manual_seed(0)
    xs = {n: torch.randn([sizes[c] for c in labels], generator=gen, dtype=torch.float64) for n, labels in (("x", left), ("y", right))}
    mesh = Mesh()
    nodes = [input_node(n, Type(torch.float64, weft.Layout.of(mesh, tuple(x.shape)))) for n, x in xs.items()]
    program = new_program("product", mesh, nodes, {"z": weft.einsum(equation, *nodes)})
    torch.testing.assert_close(Compiled(program)(xs)["z"], torch.einsum(equation, *xs.values()))


def test_gradients_of_a_convolution_that_are_held_otherwise_are_two_calls() -> None:
    """One call makes both of one image and one kernel; a kernel whose channels are cut is not that of a whole image."""
    mesh = Mesh(tp=2)
    kinds = {"ct": (2, 6, 5, 5), "x": (2, 4, 5, 5), "w": (6, 4, 3, 3)}
    for cut, calls in (({}, 1), ({"tp": S(1)}, 0)):
        ct, x, w = (
            input_node(n, Type(torch.float64, weft.Layout.of(mesh, shape, cut if n == "w" else {}))) for n, shape in kinds.items()
        )
        how = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
        grads = {"dx": conv2d_input_grad(ct, w, size=(5, 5), **how), "dw": conv2d_weight_grad(x, ct, kernel=(3, 3), **how)}
        found = peepholes_of(new_program("grads", mesh, [ct, x, w], grads), (), mesh.coords(0), False, "cpu")
        assert sum("conv2d_backward" in f.text(str) for f in found) == calls


@pytest.mark.parametrize("name", ["gpt2", "resnext50"])
def test_a_traced_step_is_the_same_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace and the parts are tried; what Inductor makes of them is torch's to test."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, given, options=None: graph)
    captured, values = step_of(name)
    plain, traced = Compiled(captured.program, donate=True), Compiled(captured.program, donate=True, inductor=True)
    assert (plain.how, traced.how) == ("node by node", "not yet called")
    one, two = fresh(values), fresh(values)
    for _ in range(2):
        one, two = {**one, **plain(one)}, {**two, **traced(two)}
    assert_same(two, one)
    assert traced.how == "Inductor's kernels"


def test_a_step_that_cannot_be_traced_runs_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, given: Any, options: Any = None) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    captured, values = step_of("gpt2")
    step = Compiled(captured.program, donate=True, inductor=True)
    with pytest.warns(UserWarning, match="runs node by node: Inductor refused it .RuntimeError: no such kernel"):
        got = step(fresh(values))
    assert step.how == "node by node"
    assert_same(got, interp.run_global(captured.program, fresh(values)))


@pytest.mark.parametrize(("world", "place"), [(2, 1 << 24), (3, 1 << 24), (2, 50_000), (3, 50_000)])
def test_collectives_through_shared_memory(world: int, place: int, tmp_path: Path) -> None:
    """In one round, or in several where what is sent does not fit into a place."""

    def job(rank: int) -> None:
        runtime_near.PLACE = place
        near = HostGroup(None, connect())
        gen = torch.Generator().manual_seed(0)
        for shape in [(5,), (3, 4), (200, 301)]:  # the last one in shares where there are more than two ranks
            terms = [torch.randn(shape, generator=gen, dtype=torch.float64) for _ in range(world)]
            more = [torch.randn(7, generator=gen, dtype=torch.float64) for _ in range(world)]
            mine = [terms[rank].clone(), more[rank].clone()]
            big, small = near.all_reduce_list(mine, "sum", [True, False])
            torch.testing.assert_close(big, torch.stack(terms).sum(0))
            torch.testing.assert_close(small, torch.stack(more).sum(0))
            assert big.data_ptr() == mine[0].data_ptr() and torch.equal(mine[1], more[rank])
            assert torch.equal(near.all_reduce_list([terms[rank]], "max", [False])[0], torch.stack(terms).amax(0))
            assert torch.equal(near.all_gather(terms[rank]), torch.stack(terms))
            parts = [torch.randn(world, *shape, generator=gen, dtype=torch.float64) for _ in range(world)]
            torch.testing.assert_close(near.reduce_scatter(parts[rank]), torch.stack([p[rank] for p in parts]).sum(0))
            assert torch.equal(near.all_to_all(parts[rank].transpose(0, 1).contiguous().transpose(0, 1)), torch.stack([p[rank] for p in parts]))

    on_ranks(world, job, tmp_path)


def test_a_check_leaves_state_in_peer_memory_alone(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        w = zoo.small("gpt2")
        step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(4), plan="dp2,zero1")
        for i in range(2):
            step(w.example(4, seed=i))
        before = fresh(step.local_state)
        places = {n: x.data_ptr() for n, x in step.local_state.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step.check(w.example(4, seed=5), tolerance=1.0)
        assert all(torch.equal(step.local_state[n], before[n]) for n in before)
        step(w.example(4, seed=2))
        assert all(step.local_state[n].data_ptr() == at for n, at in places.items() if n.startswith("param."))

    on_ranks(2, job, tmp_path)


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero1"])
def test_gradients_are_made_where_the_update_reads_them(plan: str, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        w = zoo.small("gpt2", dtype=torch.float64)
        step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-3), w.example(4), plan=plan, check=False)
        weights = sum(n.ndim == 2 for name, n in step.program.input_names.items() if name.startswith("param.blocks"))
        assert step.compiled.code.text.count(".matmul(") == weights > 0
        for i in range(2):
            step(w.example(4, seed=i))
        assert step.check(w.example(4, seed=2)) < 1e-6

    on_ranks(2, job, tmp_path)
