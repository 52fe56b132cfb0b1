"""Zoo models are the published ones: parameter counts, and against independent implementations where there is one."""

import pytest
import torch

import weft_zoo as zoo

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "bert-large": 336_226_108,
    "bert-base": 110_106_428,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnext50": 25_028_904,
    "resnext101": 88_791_336,
    "wide-resnet50-2": 68_883_240,
    "wide-resnet101-2": 126_886_696,
    "inception-v3": 27_161_264,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
    "unet": 859_520_964,
}


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert count(zoo.get(name).model) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-39b", 39.1), ("gpt3-175b", 174.6), ("gpt-530b", 529.6), ("gpt-1t", 1008.0), ("gshard-moe", 70.0),
     ("gshard-moe-2.4b", 2.4), ("wide-resnet", 12.6), ("wide-resnet-1b", 1.0), ("dlrm-criteo", 24.0),
     ("bert-3.9b", 3.9)],
)  # fmt: skip
def test_size_in_a_papers_name(name, billions):
    assert count(zoo.get(name).model) / 1e9 == pytest.approx(billions, rel=0.02)


FAMILIES = {(e.build, tuple(sorted(e.small.items(), key=str))): e.name for e in map(zoo.entry, zoo.names())}


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_small_variant_trains(name):
    work = zoo.small(name)
    loss = work.loss(work.model, work.example(3))
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    missing = [n for n, p in work.model.named_parameters() if p.grad is None]
    assert missing == []
    assert any(p.grad.abs().sum() > 0 for p in work.model.parameters())


def test_a_small_gpt_learns():
    work = zoo.small("gpt2")
    batch, step = work.example(4), torch.optim.AdamW(work.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = work.loss(work.model, batch)
        losses.append(loss.item())
        step.zero_grad()
        loss.backward()
        step.step()
    assert losses[-1] < 0.5 * losses[0]


def test_build_is_the_same_for_the_same_seed_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b, c = (zoo.small("llama3-8b", seed=s).model.head.weight for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_meta_holds_no_values_and_keeps_initialisers_whole():
    work = zoo.get("llama3-405b")
    assert all(p.is_meta for p in work.model.parameters())
    assert work.example(2, device="meta")["tokens"].shape == (2, 8192)
    assert torch.nn.init.zeros_(torch.ones(2)).sum() == 0


def test_decoding_with_a_cache_equals_the_whole_sequence():
    work = zoo.small("llama3-8b")
    model, tokens = work.model.eval(), work.example(2)["tokens"]
    with torch.no_grad():
        whole = model(tokens)
        model.make_cache(2, tokens.shape[1])
        steps = [model(tokens[:, :10], torch.arange(10))]
        steps += [model(tokens[:, i : i + 1], torch.tensor([i])) for i in range(10, tokens.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)


def test_gshard_keeps_first_choices_and_drops_what_has_no_place():
    from weft_zoo.gshard import top2

    chances = torch.tensor([[[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]]])
    weights, _ = top2(chances, capacity=2)
    sent = weights[0].sum(-1)
    torch.testing.assert_close(sent[:2], chances[0, :2])
    assert sent[2, 0] == 0  # expert 0 is full: its two places went to the tokens before
    assert (weights[0] > 0).sum((0,)).le(1).all()  # no two tokens in one place


def test_mixtral_experts_equal_a_dense_sum_over_chosen_experts():
    work = zoo.small("mixtral-8x7b", dtype=torch.float64)
    experts = work.model.blocks[0].sparse.experts
    x = torch.randn(7, 32, dtype=torch.float64)
    picks = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, dtype=torch.float64)
    hidden = torch.einsum("th,efh->tef", x, experts.gate), torch.einsum("th,efh->tef", x, experts.up)
    every = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(hidden[0]) * hidden[1], experts.down)
    want = sum(weights[:, i, None] * every[torch.arange(7), picks[:, i]] for i in range(2))
    torch.testing.assert_close(experts(x, picks, weights), want)
