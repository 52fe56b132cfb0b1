"""Models of transformers run the attention, masks and cache that their user configured, and give what torch gives in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.capture.checks import ops, same_as_torch
from weft.core.errors import CaptureError
from weft.frontend.capture import capture

V, B, S = 67, 3, 8
SIZE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V,
        "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**SIZE, "num_key_value_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": V, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


def built(kind, /, head="ForCausalLM", attn=None, **config):
    import transformers as t

    torch.manual_seed(0)
    made = getattr(t, f"{kind}Config")(**config)
    if attn:
        made._attn_implementation = attn
    return getattr(t, f"{kind}{head}")(made).double().train()


def batch(padded="right", **more):
    ids = torch.randint(3, V, (B, S), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(B, S, dtype=torch.long)
    if padded:
        keep[0, 5:] = keep[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": keep.flip(1) if padded == "left" else keep, **more}


def words(model, b):
    """Of the logits, in their own dtype: transformers' loss is in float32. Padding is not learned."""
    labels = b["input_ids"].masked_fill(b["attention_mask"] == 0, -100) if "attention_mask" in b else b["input_ids"]
    return F.cross_entropy(model(**b).logits.flatten(0, 1), labels.flatten())


MODELS = {
    "bloom": lambda: built("Bloom", hidden_size=16, n_layer=2, n_head=4, vocab_size=V),
    "gptj": lambda: built("GPTJ", rotary_dim=4, **SMALL),
    "codegen": lambda: built("CodeGen", rotary_dim=4, **SMALL),
    "falcon": lambda: built("Falcon", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=V),
    "falcon alibi": lambda: built("Falcon", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=V, alibi=True),
    "mpt": lambda: built("Mpt", d_model=16, n_layers=2, n_heads=4, vocab_size=V, max_seq_len=32),
    "mpnet": lambda: built("MPNet", "ForMaskedLM", **SIZE, **STILL),
    "roformer": lambda: built("RoFormer", "ForMaskedLM", **SIZE, **STILL),
    "squeezebert": lambda: built("SqueezeBert", "ForMaskedLM", **SIZE, **STILL, embedding_size=16),
    "gemma2": lambda: built("Gemma2", **GROUPED, head_dim=4, sliding_window=4, attn="eager"),
    "opt": lambda: built("OPT", hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=V,
                         max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0),
}  # fmt: skip


@pytest.mark.parametrize("padded", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_attention_of_its_own(name, padded):
    """A row of left padding sees no key: some models then take a number that float32 does not have, and give NaN in float64."""
    model = MODELS[name]().float() if padded == "left" else MODELS[name]()
    same_as_torch(model, words, batch(padded), 1e-5 if padded == "left" else 1e-6 if name == "gemma2" else 1e-10)  # its softmax is in float32


@pytest.mark.parametrize("padded", [None, "right", "left"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_llama(attn, padded):
    model = built("Llama", **GROUPED, attn=attn)
    captured = same_as_torch(model.float() if padded == "left" else model, words, batch(padded), 1e-5 if padded == "left" else 1e-7)
    assert [len(group) for group in captured.blocks] == [2]
    for node in captured.program.find_all("attention"):
        assert node.attr("causal")
        assert node.args[3].shape == (B, 1, 1, 1, S)  # padding stays small
        assert node.args[1].shape[1] == 2  # keys are not repeated
    assert ops(captured).get("attention", 0) == (2 if attn == "sdpa" else 0)


def test_attentions_that_are_asked_for():
    def loss(model, b):
        out = model(**b, output_attentions=True)
        return words(model, b) + sum(a.square().sum() for a in out.attentions)

    same_as_torch(built("Llama", **GROUPED, attn="eager"), loss, batch(), 1e-6)


def test_experts_of_another_form_are_computed_as_transformers_does():
    model = built("GptOss", **GROUPED, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, attn="eager")
    model.set_experts_implementation("batched_mm")  # grouped products have no float64 in torch
    captured = same_as_torch(model, words, batch(), 1e-6)
    assert "experts" in {n.op.name for n in captured.program.nodes}  # with biases and clamped gates, as one op


class Prefixed(nn.Module):
    """A mask function of the user's own, which transformers maps over all places with vmap."""

    def __init__(self):
        super().__init__()
        self.model = built("Llama", **GROUPED)

    def forward(self, input_ids, attention_mask, prefix):
        from transformers.masking_utils import create_causal_mask

        inside = self.model.model.embed_tokens(input_ids)
        mask = create_causal_mask(self.model.config, inside, attention_mask, None, or_mask_function=lambda b, h, i, j: j < prefix[b])
        return self.model(inputs_embeds=inside, attention_mask=mask)


def test_a_mask_made_by_vmap():
    given = batch(prefix=torch.tensor([1, 2, 3]))
    same_as_torch(Prefixed(), words, given, 1e-6)


# -- caches ------------------------------------------------------------------------------------------------------------------


PACKED = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(B, -1)}


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_sequences_are_told_apart_where_torch_does(use_cache):
    given = {"input_ids": batch()["input_ids"], **PACKED}
    model = built("Llama", **GROUPED, use_cache=use_cache)
    captured = same_as_torch(model, words, given, 1e-6)
    masked = [len(n.args) > 3 for n in captured.program.find_all("attention")]
    assert masked == [not use_cache] * 2
    assert {"attention", "silu"} <= {n.op.name for n in captured.blocks[0][0].nodes}  # a whole layer is traced once, with a cache or without


def test_a_cache_that_is_read_is_kept():
    def loss(model, b):
        out = model(**b)
        return words(model, b) + sum(layer.keys.square().mean() for layer in out.past_key_values.layers)

    same_as_torch(built("Llama", **GROUPED), loss, batch(), 1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_checkpointing(reentrant, frozen):
    model = built("Llama", **GROUPED)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if frozen:
        model.get_input_embeddings().requires_grad_(False)  # transformers then marks what they give
    captured = same_as_torch(model, words, batch(), 1e-6)
    assert [len(group) for group in captured.blocks] == [2]


# -- refusals ----------------------------------------------------------------------------------------------------------------


def test_layers_dropped_at_random():
    model = built("OPT", hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=V, word_embed_proj_dim=16,
                  max_position_embeddings=32, layerdrop=0.3)  # fmt: skip
    with pytest.raises(CaptureError, match="a random number decides what is computed") as error:
        capture(model, batch(), words)
    assert "layerdrop=0.0" in str(error.value)
    assert "modeling_opt.py" in str(error.value)


def test_kernels_that_cannot_be_traced():
    model = built("Llama", **GROUPED)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(CaptureError, match="flash_attention_2 cannot be traced"):
        capture(model, batch(), words)
