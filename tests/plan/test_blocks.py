"""A captured stack of blocks is priced as what it runs: its products are the model's, its sizes grow with the samples, its plan runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench._layers import Sized
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.autodiff import grad
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.work import Attention, Collective, Gemm, MemoryBound
from weft.frontend import catalog
from weft.frontend.capture import Captured, capture
from weft.frontend.source import load as load_model
from weft.ops.registry import Kind
from weft.ops.registry import flops as node_flops
from weft.plan.blocks import Stack
from weft.plan.explain import explain
from weft.plan.layers import Layers
from weft.plan.plan import Plan, load
from weft.plan.planner import Infeasible, Request, captured_stack, make_plan
from weft.plan.setting import Setting
from weft.plan.short import short_of
from weft.plan.simulate import simulate
from weft.plan.space import Limits
from weft.plan.workload import Block, Workload
from weft.report.of_plan import of_plan
from weft.transform.stage_contents import Counted

SIZES = {"layers": 3, "hidden": 256, "heads": 8, "vocab": 512, "seq": 128}
LLAMA = {**SIZES, "kv_heads": 4, "ffn": 512}


def captures(name: str, **sizes: int) -> Callable[[int], Captured]:
    more = {"dropout": 0.0} if name == "gpt2" else {}
    w = catalog.get(name, device="meta", dtype=torch.bfloat16, **sizes, **more)
    return cache(lambda n: capture(w.model, w.example(n, device="meta"), w.loss))


class Residual(torch.nn.Module):
    """A layer of an MLP, with the activation as torch has it or step by step, as transformers writes it."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written, self.up, self.down = written, torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.written:
            return x + self.down(0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0)))))
        return x + self.down(torch.nn.functional.gelu(y, approximate="tanh"))


def test_steps_of_an_activation_are_one_kernel_and_made_again_behind() -> None:
    """What Inductor joins touches memory once: written out, an activation costs what it does in one op, and keeps no more."""

    def layer(written: bool) -> Block:
        with torch.device("meta"):
            model = torch.nn.Sequential(*(Residual(written) for _ in range(4))).bfloat16()
            at = cache(lambda n: capture(model, {"x": torch.empty(n, 64, dtype=torch.bfloat16)}, lambda m, b: m(b["x"]).float().square().mean()))
        stack = Stack("own", at)
        return stack.work(Setting.counted(micro_batch=4, global_batch=4)).layer

    one, steps = layer(False), layer(True)
    for way in ("forward", "back"):
        a, b = ([op.bytes for op in getattr(block, way) if isinstance(op, MemoryBound)] for block in (one, steps))
        assert sum(a) == sum(b) and len(a) == len(b), way
    assert one.saved == steps.saved


def flops(block: Block) -> float:
    return sum(op.flops for op in (*block.forward, *block.backward()) if isinstance(op, (Gemm, Attention)))


WAYS = [{}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"cp": 2}]


KNOWN = {
    "gpt2": Sized(3, 256, 8, 512, 128),
    "llama3-8b": Sized(3, 256, 8, 512, 128, 4, 512, gated=True, rotary=True, bias=False, tied=False),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("name", "sizes"), [("gpt2", SIZES), ("llama3-8b", LLAMA)])
def test_a_block_does_what_is_known_of_such_a_layer(name: str, sizes: dict[str, int], way: dict[str, int]) -> None:
    setting = Setting.counted(micro_batch=4, global_batch=64, **way)  # type: ignore[arg-type]
    got, known = Stack(name, captures(name, **sizes)).work(setting), KNOWN[name].work(setting)
    assert got.depth == known.depth == 3
    assert flops(got.layer) == pytest.approx(
        flops(known.layer), rel=0.05 if "cp" in way else 1e-9
    )  # keys may be made twice where that moves less
    assert got.layer.params == pytest.approx(known.layer.params, rel=0.02)  # biases of rows are whole on every rank
    assert got.layer.kept == known.layer.kept
    assert known.layer.saved <= got.layer.saved <= 1.6 * known.layer.saved  # norms keep their input besides what products do
    assert flops(got.halves[0]) + flops(got.halves[1]) == flops(got.layer)
    assert sum(h.saved for h in got.halves) == got.layer.saved
    assert got.layer.not_kept("activation") == pytest.approx(known.layer.not_kept("activation"))


def test_sizes_of_many_samples_follow_from_those_of_few() -> None:
    stack = Stack("llama", captures("llama3-8b", **LLAMA))
    for way in WAYS:
        setting = Setting.counted(micro_batch=24, global_batch=96, **way)  # type: ignore[arg-type]
        grown, captured = stack._sized(setting, 24), stack._captured(setting, 24)
        for f in fields(grown):
            if f.name != "first" or not way:  # how little it matters which of two small moves is made may depend on the samples
                assert getattr(grown, f.name) == getattr(captured, f.name), f.name


def test_a_tied_weight_is_held_by_the_last_stage_too() -> None:
    stack = Stack("gpt2", captures("gpt2", **SIZES))
    one, two = (stack.work(Setting.counted(pp=pp, global_batch=8)) for pp in (1, 2))
    words = SIZES["vocab"] * SIZES["hidden"]
    assert one.shared == two.shared == words
    assert two.last.params - one.last.params == words and two.first.params == one.first.params


MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.one, self.two = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.one(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.two(x)), approximate="tanh"))


class Words(nn.Module):
    def __init__(self, layers, width, heads, vocab, seq):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.layers, self.norm = nn.ModuleList(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width)

    def forward(self, x):
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) @ self.words.weight.T


def loss(model, batch):
    out = model(batch["x"])
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def make():
    torch.manual_seed(0)
    x = torch.zeros(2, SEQ, dtype=torch.long)
    return Words(SIZES), loss, {"x": x, "y": x}


class Wide(Layer):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)


def mixed():
    # units of two, and one that stands alone
    model, own, batch = make()
    width, heads = model.norm.weight.shape[0], model.layers[0].heads
    kinds = [Wide, Wide, Layer, Wide, Layer, Wide, Layer]
    model.layers = nn.ModuleList(kind(width, heads) for kind in kinds)
    return model, own, batch


class Cross(Layer):
    # a decoder's: it reads what the encoder has made, too
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.three, self.q, self.kv, self.back = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, seen):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (self.q(self.three(x)), *self.kv(seen).chunk(2, -1)))
        return super().forward(x + self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)))


class Both(Words):
    def __init__(self, layers, width, heads, vocab, seq):
        super().__init__(layers - 2, width, heads, vocab, seq)
        self.decoder, self.between = nn.ModuleList(Cross(width, heads) for _ in range(layers - 1)), nn.LayerNorm(width)

    def forward(self, x):
        h = seen = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            seen = layer(seen)
        seen = self.between(seen)
        for layer in self.decoder:
            h = layer(h, seen)
        return self.norm(h) @ self.words.weight.T


def both():
    model, own, batch = make()
    torch.manual_seed(0)
    return Both(SIZES), own, batch


def narrow():
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)), lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(4, 8)}
"""
SMALL = MODEL.replace("SIZES", "5, 32, 4, 67, 16").replace("SEQ", "16")


def planned(folder: Path, function: str, cluster: str, batch: int, **limits: object) -> Plan | Infeasible:
    (folder / "own.py").write_text(SMALL)
    return make_plan(Request(f"{folder / 'own.py'}:{function}", cluster, batch, limits=Limits(**limits)))  # type: ignore[arg-type]


def test_a_module_is_planned_as_the_same_model_by_name(tmp_path: Path) -> None:
    """GPT-2 of the user's is searched in the same space; figures differ by what the tables of the known one leave out."""
    (tmp_path / "medium.py").write_text(MODEL.replace("SIZES", "12, 768, 12, 50257, 256").replace("SEQ", "256"))
    own = make_plan(Request(f"{tmp_path / 'medium.py'}:make", "1x4xA100", 64))
    known = make_plan(Request("gpt2", "1x4xA100", 64, 256))
    assert isinstance(own, Plan) and isinstance(known, Plan)
    assert own.step_ms == pytest.approx(known.step_ms, rel=0.2)
    assert set(own.baselines_ms) == set(known.baselines_ms)
    assert all(own.step_ms <= took * (1 + 1e-6) for took in own.baselines_ms.values())


def test_pins_and_limits_hold_for_modules(tmp_path: Path) -> None:
    made = planned(tmp_path, "make", "1x4xA100", 16, pins={"pp": "2", "tp": "2"})
    assert isinstance(made, Plan) and (made.setting.pp, made.setting.tp, made.setting.dp) == (2, 2, 1)
    none = planned(tmp_path, "make", "1x4xA100", 16, memory=1.4e9)
    assert isinstance(none, Infeasible) and "needs at least" in none.reason


def test_what_is_no_stack_is_planned_as_a_program(tmp_path: Path) -> None:
    made = planned(tmp_path, "narrow", "1x2xA100", 8)
    assert isinstance(made, Plan) and "program" in made.layouts


def own_model(folder: Path, function: str) -> tuple[Any, list[dict[str, Tensor]]]:
    drawn = [torch.randint(0, 67, (2, 16, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return load_model(f"{folder / 'own.py'}:{function}", device="cpu", dtype=torch.float64), [{"x": x, "y": y} for x, y in drawn]


def torch_losses(folder: Path, function: str) -> list[float]:
    own, batches = own_model(folder, function)
    optimizer, found = torch.optim.AdamW(own.model.parameters(), lr=1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        loss = own.loss(own.model, batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compare(plan: Path, function: str, want: list[float]) -> None:
    """Losses of weft under a plan of the user's own model, without a word about anything that is not followed."""
    own, batches = own_model(plan.parent, function)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = parallelize(own.model, own.loss, torch.optim.AdamW(own.model.parameters(), lr=1e-2), batches[0], plan=str(plan))
    torch.testing.assert_close([step(batch).item() for batch in batches], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "pins"), [("make", {"pp": "2"}), ("make", {"tp": "2"}), ("make", {"zero": "3", "tp": "1", "pp": "1"}), ("mixed", {"pp": "2"}),
     ("both", {"pp": "2"}), ("both", {"tp": "2"})],
    ids=str,
)
def test_the_plan_of_a_module_runs_as_it_says(tmp_path: Path, function: str, pins: dict[str, str]) -> None:
    made = planned(tmp_path, function, "1x2xA100", 16, pins=pins)
    assert isinstance(made, Plan)
    made = replace(made, setting=replace(made.setting, gather_once=False, async_tp=False))  # not done yet, and refused
    made.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == made
    want = torch_losses(tmp_path, function)
    on_ranks(2, lambda rank: compare(tmp_path / "plan.json", function, want), tmp_path)


def test_a_plan_of_a_module_is_explained_and_drawn_if_its_file_may_be_run(tmp_path: Path) -> None:
    made = planned(tmp_path, "make", "1x2xA100", 16, pins={"pp": "2"})
    assert isinstance(made, Plan)
    for tell in (lambda run: list(explain(made, run_model=run)), lambda run: of_plan(made, explained=False, run_model=run)):
        with pytest.raises(PlanError, match="is code that runs only if you allow it"):
            tell(False)
    assert {r.decision for r in explain(made, run_model=True)} >= {"schedule", "micro_batch"}
    facts = of_plan(made, explained=False, run_model=True)
    assert len(facts.stages) == 2 and sum(facts.stages) == 5
    assert any("qkv.weight" in str(row) for row in facts.tensors)


def assert_every_product_counts(work: Workload, program: Program) -> None:
    """Once for every layer it stands in, in all that is computed of one step."""
    blocks = [(work.first, 1), *work.kinds, (work.last, 1)]
    done = sum(op.flops * n for b, n in blocks for op in (*b.forward, *b.backward()) if isinstance(op, Gemm))
    whole = grad(program, "loss", list(program.inputs_for(Role.PARAMETER)))
    assert done == sum(node_flops(n) for n in whole.nodes if n.op.kind is Kind.CONTRACT)


def test_products_of_what_a_block_is_handed_count_in_every_layer() -> None:
    """BERT normalises behind its sums, so that its projections read what the layer before hands on."""
    at = captures("bert-large", layers=4, hidden=64, heads=4)
    assert_every_product_counts(Stack("bert", at).work(Setting.counted(global_batch=2, micro_batch=2)), at(2).program)


def test_an_encoder_and_a_decoder_are_two_rows_of_one_stack(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SMALL)
    own = load_model(f"{tmp_path / 'own.py'}:both", device="meta")
    stack = Stack("both", lambda n: capture(own.model, own.example(n, device="meta"), own.loss))
    work, program = stack.work(Setting.counted(global_batch=2, micro_batch=2)), stack.at(2).program
    assert [n for _, n in work.kinds] == [3, 4] and work.depth == 7
    held = sum(b.params * n for b, n in work.kinds) + work.first.params + work.last.params
    assert held == sum(p.numel() for p in own.model.parameters())
    assert_every_product_counts(work, program)
    assert [[n for _, n in work.layers(a, 3)] for a in (0, 2, 4)] == [[3], [1, 2], [3]]


def test_units_of_several_blocks_and_blocks_apart_are_found(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SMALL)
    own = load_model(f"{tmp_path / 'own.py'}:mixed", device="meta")
    captured = capture(own.model, own.example(2, device="meta"), own.loss)
    rows = Layers(captured).rows
    assert sorted((row.period, row.count) for row in rows) == [(1, 1), (2, 3)] and rows[1].start == rows[0].blocks
    short = short_of(captured)
    assert short.repeats == tuple(row.count for row in rows) and len([n for n in short.program.input_names if n.endswith("qkv.weight")]) == 3
    pieces = Counted(((("layer", "none", 2),), (("layer", "none", 2),))).find(captured)
    assert pieces.splits is not None and len(pieces.splits) == 1 and not pieces.problems


def test_dense_layers_before_those_with_experts_are_a_row_of_their_own() -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    low = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8}
    with torch.device("meta"):
        kind = transformers.DeepseekV3Config(**sizes, **low, num_hidden_layers=5, first_k_dense_replace=2, vocab_size=128, n_group=2, topk_group=1,
                                             num_experts_per_tok=2, use_cache=False)  # fmt: skip
        model = transformers.DeepseekV3ForCausalLM(kind)
    at = Stack("deepseek", lambda n: capture(model, {k: torch.zeros(n, 32, dtype=torch.long, device="meta") for k in ("input_ids", "labels")},
                                             lambda m, b: m(**b).loss))  # fmt: skip
    work = at.work(Setting.counted(global_batch=8, micro_batch=4, dp=2, ep=2))
    assert [n for _, n in work.kinds] == [2, 3] and [b.expert_params > 0 for b, _ in work.kinds] == [False, True]
    assert work.first.params == 128 * 64 and all(b.parts and b.kept for b, _ in work.kinds)  # what runs again, and what is kept then


def test_tokens_that_are_sent_go_to_the_ranks_of_their_picks_and_are_kept_once() -> None:
    """Counted by hand: 2 samples of 256 tokens on each of 16 ranks, 2 picks of 512 numbers in 16 bits. The experts compute the same either way."""
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "vocab": 512, "ffn": 1024, "experts": 16, "chosen": 2}
    stack, base = captured_stack("mixtral-8x7b", "bf16", 256, **sizes)[0], Setting.counted(global_batch=32, micro_batch=2, dp=16, ep=16)
    gathered, sent = (stack.work(replace(base, ragged_ep=ragged)).layer for ragged in (False, True))
    tokens = 2 * 256 * 512 * 2
    swaps = [[(op.bytes, op.copies) for op in ops if isinstance(op, Collective) and op.kind == "all_to_all"] for ops in (sent.forward, sent.back)]
    assert swaps == [[(2 * tokens, 2)] * 2, [(2 * tokens, 2)] * 3]  # there and back; tokens and what comes back there, gradients back
    largest = [max(op.bytes for op in block.forward if isinstance(op, Collective) and op.kind == "all_gather") for block in (gathered, sent)]
    assert largest[0] == 16 * tokens and largest[1] == 16 * 2 * 256 * 2 * 8  # all tokens; of all tokens their picks
    assert gathered.saved - sent.saved == 16 * tokens  # a rank's own wait for the router either way
    flops = [[sum(op.flops for op in ops if isinstance(op, Gemm)) for ops in (block.forward, block.back)] for block in (gathered, sent)]
    assert flops[0] == flops[1]


def test_what_is_not_trained_is_held_and_has_neither_gradient_nor_state() -> None:
    def biases_alone(model: torch.nn.Module) -> None:
        model.requires_grad_(False)
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))

    sizes = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 512}
    whole, few = (captured_stack("gpt2", "bf16", 128, adapt, **sizes)[0].work(Setting.counted(micro_batch=2)) for adapt in (None, biases_alone))
    assert few.layer.trained and few.layer.held == whole.layer.held and few.layer.learnt[0] < 0.02 * whole.layer.learnt[0]
    products = [sum(isinstance(op, Gemm) for op in work.layer.back) for work in (whole, few)]
    assert products == [8, 4]  # gradients of inputs alone
    place = cluster("1x8xH100")
    steps = [simulate(work, Setting.counted(micro_batch=2, dp=8, zero=zero, global_batch=16), place) for work in (whole, few) for zero in (0, 3)]
    assert steps[2].peak_memory.optimizer < 0.05 * steps[0].peak_memory.optimizer and steps[2].peak_memory.params == steps[0].peak_memory.params
    assert steps[3].peak_memory.params < steps[2].peak_memory.params / 7  # what is frozen is sharded too


def test_narrow_products_are_made_narrow_once_and_by_their_own_price() -> None:
    wide, narrow = (captured_stack("llama3-8b", dtype, 512, layers=4)[0].work(Setting.counted(micro_batch=1, dtype=dtype)) for dtype in ("bf16", "fp8"))
    passes = [op for op in narrow.layer.forward if op.name == "quantise"]
    assert len(passes) == 4  # before q, k, v; o; gate, up; down
    assert sum(op.bytes for op in passes) == 512 * (3 * 4096 + 14336) * 4
    assert all(op.dtype == "fp8" for op in narrow.layer.forward if isinstance(op, Gemm))
    assert all(op.dtype == "bf16" for op in narrow.last.forward if isinstance(op, Gemm)) and not [op for op in wide.layer.forward if op.name == "quantise"]


def test_a_file_that_was_changed_is_captured_anew(tmp_path: Path) -> None:
    path, text = tmp_path / "wide.py", STACK.replace("64", "WIDE")
    found = []
    for wide in (64, 128):
        path.write_text(text.replace("WIDE", str(wide)))
        found.append(captured_stack(f"{path}:make", "bf16")[0].params)
    assert found[1] > 3 * found[0]


STACK = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 4 * 64), nn.Linear(4 * 64, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make():
    model = nn.Sequential(*(Block() for _ in range(4)))
    return model, lambda model, batch: model(batch["x"]).square().mean(), {"x": torch.randn(8, 64)}
"""
