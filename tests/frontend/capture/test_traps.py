"""Traps that tracing a real model falls into, each of them seen before: one test per trap."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft_zoo as zoo
from tests.frontend.capture.checks import ops, run, same_as_torch, same_function
from tests.frontend.capture.test_models import hugging_face
from weft.core.errors import RuntimeFault
from weft.frontend.capture import capture

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def hf(name, **changes):
    return zoo.load(hugging_face()[name], device="cpu", seq=16, **changes)


def test_tensors_made_for_another_device_are_traced_on_the_cpu():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = x.cuda().to("cuda:1").to(device=torch.device("cuda"), dtype=torch.float32)
            return self.linear(x) + torch.arange(4, device="cuda") + torch.zeros(4, device=torch.device("cuda", 1))

    program = capture(Elsewhere(), (X,), lambda m, b: m(*b).sum(), gradients=True).program
    assert len(program.find_all("einsum")) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", [None, "padding"])
def test_attention_is_one_op_forward_and_one_backward_whatever_torch_would_choose(dropout, mask):
    work = zoo.small("bert-large", dropout=dropout)
    batch = work.example(2)
    if mask is None:
        work.model.forward = lambda words, kinds, keep, plain=type(work.model).forward: plain(work.model, words, kinds, None)
    found = ops(capture(work.model, batch, work.loss, gradients=True))
    assert found["attention"] == found["attention_backward"] == 2
    assert found.get("dropout", 0) == (10 if dropout else 0)  # forward and backward: two layers of two, and one at the start
    assert "softmax" not in found


def test_transformers_masks_stay_a_property_of_attention():
    work = zoo.load(hugging_face()["llama"], device="cpu", seq=13)
    found = capture(work.model, work.example(3), work.loss).program
    masks = [n for n in found.nodes for t in n.types if t.shape[-2:] == (13, 13)]
    assert masks == []
    assert all(n.attr("causal") for n in found.find_all("attention"))


def test_grouped_keys_are_not_repeated():
    program = capture(hf("llama").model, hf("llama").example(3), hf("llama").loss).program
    assert all(n.args[1].shape[1] == 2 and n.args[0].shape[1:3] == (2, 2) for n in program.find_all("attention"))


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "mixtral"])
def test_padding_is_not_dropped(name):
    work = hf(name)
    keep = torch.ones(3, 16, dtype=torch.long)
    keep[0, 10:] = 0
    keep[2, 5:] = 0
    keep[1, 3] = 0  # in the middle, where causality would not hide it
    labels = work.example(3)["labels"].masked_fill(keep == 0, -100)
    batch = {**work.example(3), "attention_mask": keep, "labels": labels}
    captured = same_as_torch(work.model, work.loss, batch)
    assert ops(captured)["attention"] == 3
    other = {**batch, "attention_mask": torch.ones_like(keep)}
    assert abs(run(captured, other)["loss"] - run(captured, batch)["loss"]) > 1e-6


def test_left_padding_too():
    work = hf("llama")
    keep = torch.ones(3, 16, dtype=torch.long)
    keep[1, :6] = 0
    batch = {**work.example(3), "attention_mask": keep}
    batch["labels"] = batch["labels"].masked_fill(keep == 0, -100)
    same_as_torch(work.model, work.loss, batch)


def test_a_mask_of_the_users_own_is_taken_as_it_is():
    work = hf("llama")
    full = torch.ones(3, 1, 16, 16).bool()  # every key seen: not causal, whatever the module says
    batch = {**work.example(3), "attention_mask": full}
    captured = same_as_torch(work.model, work.loss, batch)
    assert not any(n.attr("causal") for n in captured.program.find_all("attention"))


def test_experts_never_gather_weights_per_token():
    work = hf("mixtral")
    captured = capture(work.model, work.example(3), work.loss, gradients=True)
    found = ops(captured)
    assert found["experts"] == found["experts_backward"] == 3
    largest = max(max(n.types, key=lambda t: len(t.shape)).shape for n in captured.program.nodes)
    assert len(largest) <= 5
    assert not any(t.shape[:1] == (3 * 16 * 2,) for n in captured.program.nodes for t in n.types)  # tokens x picks rows of weights


def of_picks(x, w, picks):
    return torch.einsum("td,tkfd->tkf", x, w[picks])


EXPERTS = {  # (x, a, b, c, picks, weights) with a and b [e, 6, 5], c [e, 5, 6] -> what torch computes
    "gated": lambda x, a, b, c, p, w: torch.einsum("tkf,tkdf,tk->td", F.silu(of_picks(x, a, p)) * of_picks(x, b, p), c[p], w),
    "up first": lambda x, a, b, c, p, w: torch.einsum("nj,njh,njyh->ny", w, of_picks(x, b, p) * F.gelu(of_picks(x, a, p)), c[p]),
    "not gated": lambda x, a, b, c, p, w: torch.einsum("tkf,tkdf,tk->td", F.relu(of_picks(x, a, p)), c[p], w),
    "turned": lambda x, a, b, c, p, w: torch.einsum("tkf,tkfd,tk->td", F.relu(torch.einsum("tkdf,td->tkf", c[p], x)), a[p], w),
    "other picks": lambda x, a, b, c, p, w: torch.einsum("tkf,tkdf,tk->td", F.relu(of_picks(x, a, p.flip(1))), c[p], w),
    "other tokens": lambda x, a, b, c, p, w: torch.einsum("tkf,tkdf,tk->td", F.silu(of_picks(x, a, p)) * of_picks(x + 1, b, p), c[p], w),
    "no sum over picks": lambda x, a, b, c, p, w: torch.einsum("tkf,tkdf,tk->kd", F.relu(of_picks(x, a, p)), c[p], w),
    "another activation": lambda x, a, b, c, p, w: torch.einsum("tkf,tkdf,tk->td", F.tanh(of_picks(x, a, p)), c[p], w),
}


@pytest.mark.parametrize("form", EXPERTS)
def test_experts_gathered_by_hand_are_one_op(form):
    """Of any model, seen by what it computes; what is only like them is left as it is."""
    made = torch.Generator().manual_seed(0)
    x, a, b, c = (torch.randn(s, generator=made, dtype=torch.float64) for s in ((7, 5), (3, 6, 5), (3, 6, 5), (3, 5, 6)))
    chances = torch.randn(7, 3, generator=made, dtype=torch.float64)

    def routed(x, a, b, c, chances):
        weights, picks = chances.softmax(-1).topk(2, -1)
        return EXPERTS[form](x, a, b, c, picks, weights)

    captured = same_function(routed, x, a, b, c, chances, tolerance=1e-12)
    assert ("experts" in ops(captured)) == (list(EXPERTS).index(form) < 4)


def test_experts_work_is_that_of_the_picked_ones():
    from weft.ops.registry import flops

    few, many = (zoo.get("mixtral-8x7b", layers=1, experts=e) for e in (8, 64))
    counts = [flops(capture(w.model, w.example(1, device="meta"), w.loss).program.find("experts")) for w in (few, many)]
    s = few.settings
    assert counts[0] == counts[1] == 2 * s.seq * s.chosen * 3 * s.hidden * s.ffn


def test_experts_by_capacity_for_planning():
    work = zoo.small("mixtral-8x7b")
    batch = work.example(4)
    captured = capture(work.model, batch, work.loss, gradients=True, capacity=4.0)
    assert {"dispatch", "combine", "expert_slots"} <= set(ops(captured))
    assert "experts" not in ops(captured)
    assert any("capacity 4.0" in a for a in captured.assumed)
    want = work.loss(copy.deepcopy(work.model), batch)
    torch.testing.assert_close(run(captured, batch)["loss"], want.detach(), atol=1e-5, rtol=1e-5)  # 4 x the even share drops none


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "bert"])
def test_tied_weights_are_one_input_with_one_gradient(name):
    work = zoo.load(hugging_face()[name], device="meta", seq=16)
    captured = capture(work.model, work.example(2, device="meta"), work.loss, gradients=True)
    names = [n for n in captured.program.input_names if "lm_head.weight" in n or "decoder.weight" in n]
    assert names == []
    assert len(captured.program.find_all("input", lambda n: n.shape == (67, 32))) == 1


def test_half_precision_models_on_meta():
    work = zoo.load(hugging_face()["llama"], device="meta", seq=16, dtype=torch.bfloat16)
    program = capture(work.model, work.example(2, device="meta"), work.loss, gradients=True).program
    assert all(n.dtype == torch.bfloat16 for name, n in program.output_names.items() if name.startswith("d."))


def test_batch_norm_statistics_are_outputs():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=0.3, affine=False))
    captured = same_as_torch(model, lambda m, b: m(*b).square().mean(), (torch.randn(2, 3, 5, 5),))
    assert {o for o, _ in captured.program.state} == {
        f"buffer.{i}.{n}" for i in (1, 3) for n in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_batch_norm_that_averages_over_all_batches():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)).double()
    model[1].num_batches_tracked.fill_(3)
    captured = same_as_torch(model, lambda m, b: m(*b).square().sum(), (X.double(),), 1e-12)
    assert {"buffer.1.running_mean", "buffer.1.running_var", "buffer.1.num_batches_tracked"} <= set(captured.program.output_names)


def test_batch_norm_without_statistics_and_in_evaluation():
    same_as_torch(nn.BatchNorm1d(4, track_running_stats=False), lambda m, b: m(*b).pow(3).sum(), (X,))
    captured = same_as_torch(nn.BatchNorm1d(4).eval(), lambda m, b: m(*b).pow(3).sum(), (X,))
    assert captured.program.state == ()


@pytest.mark.parametrize("training", [True, False])
def test_an_instance_norm_keeps_its_running_statistics(training):
    model = nn.InstanceNorm2d(3, affine=True, track_running_stats=True).double().train(training)
    captured = same_as_torch(model, lambda m, b: m(*b).pow(3).sum(), (torch.randn(2, 3, 5, 5, dtype=torch.float64),), 1e-12)
    assert ("buffer.running_var" in captured.program.output_names) is training


def test_counting_has_a_shape_of_its_own():
    captured = same_as_torch(hf("mixtral balanced").model, hf("mixtral balanced").loss, hf("mixtral balanced").example(2))
    assert captured.assumed == () and "bincount" in ops(captured)


def test_counting_beyond_what_was_captured_is_refused_when_it_runs():
    class Counting(nn.Module):
        def forward(self, ids):
            return torch.bincount(ids, minlength=4)

    captured = capture(Counting(), (torch.tensor([0, 3]),))
    with pytest.raises(RuntimeFault) as error:
        run(captured, (torch.tensor([0, 4]),))
    assert "needed  values below 4" in str(error.value) and "found   4" in str(error.value)


def test_parameters_without_a_gradient_have_none():
    work = zoo.small("bert-large")
    optimizer = torch.optim.AdamW(work.model.parameters())
    captured = capture(work.model, work.example(2), lambda m, b: m(b["words"], b["kinds"])[1].mean(), optimizer)
    assert "param.transform.weight" not in captured.program.output_names
    assert "param.follows.weight" in captured.program.output_names


def test_checkpointed_layers_are_captured_as_if_they_were_not():
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.linear, self.reentrant = nn.Linear(4, 4), reentrant

        def forward(self, x):
            x = x.clone().requires_grad_() if self.reentrant else x
            return checkpoint(lambda y: F.relu(self.linear(y)), x, use_reentrant=self.reentrant)

    for reentrant in (True, False):
        captured = same_as_torch(Saving(reentrant), lambda m, b: m(*b).sum(), (X,))
        assert ops(captured)["relu"] == 1
        assert "d.param.linear.weight" in captured.program.output_names


def test_a_reentrant_checkpoint_of_what_has_no_gradient_gives_none():
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.after(checkpoint(self.inside, x, use_reentrant=True))

    captured = same_as_torch(Saving(), lambda m, b: m(*b).square().sum(), (X,))
    assert "d.param.inside.weight" not in captured.program.output_names


def test_rotary_and_rms_norm_written_out_are_one_op_each():
    found = ops(capture(hf("llama").model, hf("llama").example(2), hf("llama").loss, gradients=True))
    assert (found["rope"], found["rms_norm"], found["rms_norm_backward"]) == (12, 7, 7)
    assert "rsqrt" not in found


def test_names_that_a_program_could_not_print():
    model = nn.ModuleDict({"a-b": nn.Linear(4, 4)})
    model.forward = lambda x: model["a-b"](x)
    captured = capture(model, (X,))
    assert set(captured.parameters) == {"param.a_0x2d_b.weight", "param.a_0x2d_b.bias"}
    torch.testing.assert_close(run(captured, (X,))["out"], model["a-b"](X))


@pytest.mark.parametrize("causal", [True, False])
def test_a_transformer_takes_the_mask_of_its_batch_as_it_is(causal):
    """Torch looks whether the mask is causal, and only to say so once more."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2).double()
    mask = torch.zeros(3, 3, dtype=torch.float64).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf") if causal else -2.0)
    batch = torch.randn(2, 3, 4, dtype=torch.float64), mask
    same_as_torch(model, lambda m, b: m(b[0], mask=b[1]).pow(2).sum(), batch, 1e-9)
