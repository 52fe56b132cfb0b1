"""Every model of the zoo and five Hugging Face architectures: the program means what torch computes, forward and backward."""

import pytest
import torch

import weft_zoo as zoo
from tests.frontend.capture.checks import ops, run, same_as_torch
from weft import interp
from weft.core.text import parse
from weft.frontend.capture import capture

FAMILIES = sorted({e.build: e.name for e in map(zoo.entry, zoo.names())}.values())
HARD = {"inception-v3"}  # a deep net at its start on few images: float32 keeps five digits of no gradient, in torch either


@pytest.mark.parametrize("name", FAMILIES)
def test_zoo_model(name):
    kind = torch.float64 if name in HARD else torch.float32
    work = zoo.small(name, dtype=kind)
    captured = same_as_torch(work.model, work.loss, work.example(4), 1e-9 if name in HARD else 1e-5)
    assert captured.opaque == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_prints_and_parses_back(name):
    if name in HARD:
        pytest.skip("large, and nothing in it that the others lack")
    work = zoo.small(name)
    program = capture(work.model, work.example(2), work.loss, torch.optim.AdamW(work.model.parameters())).program
    assert parse(program.text).text == program.text


def hugging_face():
    import transformers as t

    size = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 67,
            "max_position_embeddings": 16}  # fmt: skip
    grouped = {**size, "num_key_value_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        "llama": t.LlamaConfig(**grouped),
        "llama tied": t.LlamaConfig(**grouped, tie_word_embeddings=True),
        "gpt2": t.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=67, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                             bos_token_id=0, eos_token_id=0),
        "bert": t.BertConfig(**size, **still),
        "mixtral": t.MixtralConfig(**grouped, num_local_experts=4, sliding_window=None),
        "mixtral balanced": t.MixtralConfig(**grouped, num_local_experts=4, sliding_window=None, output_router_logits=True),
        "vit": t.ViTConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
                           num_labels=10, **still),
        "mistral": t.MistralConfig(**grouped, sliding_window=4),
        "qwen3": t.Qwen3Config(**grouped, head_dim=8),
        "gemma": t.GemmaConfig(**grouped, head_dim=8),
        "t5": t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=67, dropout_rate=0, decoder_start_token_id=0),
    }  # fmt: skip


NAMES = ["llama", "llama tied", "gpt2", "bert", "mixtral", "mixtral balanced", "vit", "mistral", "qwen3", "gemma", "t5"]


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face(name):
    work = zoo.load(hugging_face()[name], device="cpu", seq=16)
    before = (work.model.config._attn_implementation, getattr(work.model.config, "use_cache", None))
    captured = same_as_torch(work.model, work.loss, work.example(3))
    assert captured.opaque == {}
    assert (work.model.config._attn_implementation, getattr(work.model.config, "use_cache", None)) == before
    layers = 6 if name == "t5" else 3  # t5: two layers each of encoder, decoder and decoder to encoder
    assert ops(captured).get("attention", 0) == layers


def test_hugging_face_on_meta_needs_no_memory():
    import transformers as t

    config = t.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    work = zoo.load(config, device="meta", seq=4096)
    captured = capture(work.model, work.example(8, device="meta"), work.loss, gradients=True)
    assert sum(p.numel() for p in captured.parameters.values()) > 65e9
    assert [len(group) for group in captured.blocks] == [80]


def test_forward_only_gives_what_the_module_returns():
    work = zoo.small("bert-large")
    batch = {k: work.example(2)[k] for k in ("words", "kinds", "keep")}
    captured = capture(work.model, batch)
    words, follows = work.model(**batch)
    got = run(captured, batch)
    torch.testing.assert_close(got["out.0"], words)
    torch.testing.assert_close(got["out.1"], follows)


def test_a_decoding_step_keeps_its_cache_as_state():
    work = zoo.small("llama3-8b")
    model, tokens = work.model.eval(), work.example(2)["tokens"]
    whole = model(tokens)
    model.make_cache(2, 16)
    first, second = (tokens[:, :10], torch.arange(10)), (tokens[:, 10:11], torch.tensor([10]))
    prefill, decode = capture(model, first), capture(model, second)
    caches = {k for k, _ in decode.program.state}
    assert caches == {f"buffer.caches.{i}.{x}" for i in range(2) for x in "kv"}
    filled = run(prefill, first)
    values = {**decode.inputs(second), **{k: filled[k] for k in caches}}
    got = interp.run_global(decode.program, values)["out"]
    torch.testing.assert_close(got[:, 0], whole[:, 10], atol=1e-5, rtol=1e-5)
