"""Activations kept in the host's memory: the same bits under every plan, less held meanwhile, priced by the host's link."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft import passes
from weft.api.parallelize import parallelize
from weft.api.planfile import Followed
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.program import Program
from weft.cost.memory import peak_bytes
from weft.cost.simulate import predict
from weft.frontend.capture import capture
from weft.interp import run, run_global
from weft.plan.setting import Setting
from weft.plan.spec import Spec
from weft.transform.stage_contents import stage_contents_of


def losses(plan: str) -> list[float]:
    w = zoo.small("gpt2", layers=3)
    opt = torch.optim.AdamW(w.model.parameters(), lr=1e-2)
    step = parallelize(w.model, w.loss, opt, w.example(8), plan=plan, check="offload" in plan)
    return [step(w.example(8, seed=i)).item() for i in range(2)]


def test_bits_are_the_same(tmp_path: Path) -> None:
    assert losses("offload") == losses("recompute,offload") == losses("dp1")

    def job(rank: int) -> None:
        for plan in ("dp2,zero3", "pp2,micro2", "dp2,recompute"):
            assert losses(f"{plan},offload") == losses(plan), plan
        mixed = "pp2,micro2,recompute:mixed,stage:first+layer/offload+layer,stage:layer/full-offload+last"
        assert losses(mixed) == losses("pp2,micro2"), mixed

    on_ranks(2, job, tmp_path)


def test_what_the_backward_pass_alone_reads_of_earlier_layers_comes_back_too() -> None:
    """Of a BERT, whose embeddings end in a norm, what this norm was given."""
    t = pytest.importorskip("transformers")
    sizes = {"vocab_size": 37, "hidden_size": 18, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 26, "max_position_embeddings": 16}
    x = torch.randint(0, 37, (4, 11), generator=torch.Generator().manual_seed(0))

    def trained(plan: str) -> list[float]:
        torch.manual_seed(0)
        model = t.BertForMaskedLM(t.BertConfig(**sizes))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = parallelize(model, lambda m, x: torch.nn.functional.cross_entropy(m(input_ids=x).logits.flatten(0, 1), x.flatten()), opt, x, plan, check=False)
        return [step(x).item() for _ in range(2)]

    assert trained("recompute,offload") == trained("recompute")


def test_sums_stay_where_they_are() -> None:
    """Of experts under tp, whose gradients are linear in what a barrier waits for, rank by rank."""
    w = zoo.small("mixtral-8x7b")
    captured = capture(w.model, w.example(8), w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2))

    def outputs(words: str) -> dict[str, torch.Tensor]:
        made = passes.run(passes.Draft(captured, Spec.parse(words))).program
        assert made is not None
        return run(made, captured.inputs(w.example(8)), tolerance=1e-4)

    plain = outputs("tp2")
    for words in ("tp2,offload", "tp2,recompute"):
        found = outputs(words)
        assert [name for name in plain if not torch.equal(plain[name], found[name])] == [], words


def test_layers_are_run_each_in_its_way() -> None:
    """Of five blocks two are kept by the host, one is recomputed, one recomputed from an input kept by the host; the last is kept as it is, so the one
    before comes back while it is at work."""
    w = zoo.small("gpt2", layers=5, hidden=64)
    captured = capture(w.model, w.example(8), w.loss, torch.optim.SGD(w.model.parameters(), lr=1e-2))
    stage = "recompute:mixed,stage:first+layer/full+layer/offload*2+layer/full-offload+layer+last"
    plan = Followed("a plan", Spec.parse(stage), contents=stage_contents_of(Spec.parse(stage)))
    made = passes.run(passes.Draft(captured, plan.spec, plan=plan)).program
    assert made is not None
    whole = passes.run(passes.Draft(captured, Spec.parse("offload"))).program
    assert whole is not None
    of_one = len(whole.find_all("to_host")) // 4  # all but the last
    assert len(made.find_all("to_host")) == 2 * of_one + 1 == len(made.find_all("landed"))
    attended = {text: len(p.find_all("attention")) for text, p in (("mixed", made), ("offload", whole), ("recompute", program("recompute")))}
    assert attended == {"mixed": 7, "offload": 5, "recompute": 12}
    given = captured.inputs(w.example(8))
    both = [run_global(p, given) for p in (made, captured.program)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[1])


def program(words: str, batch: int = 16) -> Program:
    w = zoo.small("gpt2", layers=6, hidden=128)
    captured = capture(w.model, w.example(batch), w.loss, torch.optim.SGD(w.model.parameters(), lr=1e-2))
    made = passes.run(passes.Draft(captured, Spec.parse(words))).program
    assert made is not None
    return made


def test_less_is_held_and_the_link_is_paid_for() -> None:
    plain, kept = program("dp1", 256), program("offload", 256)
    assert peak_bytes(kept) < 0.75 * peak_bytes(plain)
    quick, slow = (predict(kept, cluster(f"1x1x{device}")) for device in ("GH200", "H100"))
    sent, back, there = (len(kept.find_all(op)) for op in ("to_host", "from_host", "landed"))
    assert sent == back == there > 0
    assert slow.causes_ms["host"] > quick.causes_ms.get("host", 0.0)
    assert predict(plain, cluster("1x1xH100")).causes_ms.get("host", 0.0) == 0.0


def test_of_recomputed_blocks_their_inputs_are_kept_by_the_host() -> None:
    """Of six blocks the first begins at the embedding, which stands outside; less is held than by recompute or offload alone."""
    plain, both, alone = (program(words, 256) for words in ("recompute", "recompute,offload", "offload"))
    moved = both.find_all("to_host")
    assert {n.shape for n in moved} == {(256, 16, 128)} and 5 <= len(moved) <= 6
    assert len(both.find_all("landed")) == len(moved)
    assert peak_bytes(both) < peak_bytes(plain) - 3 * 256 * 16 * 128 * 4 and peak_bytes(both) < peak_bytes(alone)


def test_words_and_settings_say_the_same() -> None:
    for text in ("dp2,offload", "dp2,micro2,recompute,offload"):
        spec = Spec.parse(text)
        assert Spec.parse(str(spec)) == spec == Setting.of(spec, global_batch=8).spec
    with pytest.raises(PlanError, match="no recompute named 'ffn-offload'") as caught:
        Setting.of(Spec.parse("recompute:ffn,offload"), global_batch=8).check()
    assert "full-offload" in str(caught.value)
