"""Cases of transformers: language models, encoders, encoder-decoders, vision, audio, experts and state spaces, two small layers each.

Batches are padded, some labels are -100, and no model is loaded: its config makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from bench._wild.tools import CLASSES, LENGTH, SAMPLES, Table, batches, ints, quiet, reals

CASES = Table()
CLASSES_OF_CASES: list[str] = []
VOCAB = 80
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT: dict[str, Any] = {**SIZE, **ENDS, "vocab_size": VOCAB, "max_position_embeddings": 32}
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
GPT: dict[str, Any] = {**ENDS, "vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
PAIR: dict[str, Any] = {
    **ENDS, "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32, "decoder_start_token_id": 2,
}  # fmt: skip
PATCHES: dict[str, Any] = {**SIZE, "image_size": 16, "patch_size": 8}
SOUND: dict[str, Any] = {
    **SIZE, "vocab_size": 20, "pad_token_id": 0, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
Batch = dict[str, Any]


def of_model(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def hf(
    name: str, kind: str, data: Callable[[int], Batch], loss: Any = of_model, head: str = "ForCausalLM", config: str = "", **options: Any
) -> None:
    """A model by the name that its config and its class begin with."""

    def make() -> tuple[Any, ...]:
        import transformers

        given = getattr(transformers, config or f"{kind}Config")(**options)
        return quiet(getattr(transformers, f"{kind}{head}")(given)), loss, batches(data)

    if find_spec("transformers"):
        CASES.add(f"hf_{name}", make)
        CLASSES_OF_CASES.append(f"{kind}{head}")


# -- batches ------------------------------------------------------------------------------------------------------------------------


def ids(k: int, length: int = LENGTH) -> Tensor:
    return ints(k, VOCAB, SAMPLES, length, low=3)


def padded(k: int, left: bool = False) -> Batch:
    """Token ids and a mask; sequences end, or with `left` begin, at different places."""
    mask = torch.arange(LENGTH) < ints(k + 1, LENGTH + 1, SAMPLES, 1, low=4)
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.where(mask, ids(k), 0), "attention_mask": mask.long()}


def text(k: int) -> Batch:
    return {"input_ids": ids(k), "labels": ids(k)}


def text_padded(k: int) -> Batch:
    """Padded text; what is padding has no label."""
    out = padded(k)
    return {**out, "labels": out["input_ids"].masked_fill(out["attention_mask"] == 0, -100)}


def text_padded_left(k: int) -> Batch:
    out = padded(k, left=True)
    return {**out, "labels": out["input_ids"].masked_fill(out["attention_mask"] == 0, -100)}


def masked_words(k: int) -> Batch:
    """A third of the words is to be guessed."""
    out = padded(k)
    hidden = (ints(k + 2, 3, SAMPLES, LENGTH) == 0) & (out["attention_mask"] > 0)
    return {**out, "input_ids": out["input_ids"].masked_fill(hidden, 4), "labels": out["input_ids"].where(hidden, -100)}


def classes(k: int) -> Batch:
    return {**padded(k), "labels": ints(k + 3, CLASSES, SAMPLES)}


def unpadded(k: int) -> Batch:
    return {"input_ids": ids(k), "labels": ints(k + 3, CLASSES, SAMPLES)}


def tags(k: int) -> Batch:
    out = padded(k)
    return {**out, "labels": ints(k + 3, CLASSES, SAMPLES, LENGTH).masked_fill(out["attention_mask"] == 0, -100)}


def spans(k: int) -> Batch:
    return {**padded(k), "start_positions": ints(k + 3, 4, SAMPLES), "end_positions": ints(k + 4, 4, SAMPLES)}


def choices(k: int) -> Batch:
    out = {name: x.view(SAMPLES // 2, 2, LENGTH) for name, x in padded(k).items()}
    return {**out, "labels": ints(k + 3, 2, SAMPLES // 2)}


def translated(k: int) -> Batch:
    target = ids(k + 5, 8)
    return {**padded(k), "labels": target.masked_fill(torch.arange(8) >= ints(k + 6, 9, SAMPLES, 1, low=3), -100)}


def pictures(k: int) -> Batch:
    return {"pixel_values": reals(k, SAMPLES, 3, 16, 16), "labels": ints(k + 1, CLASSES, SAMPLES)}


def segments(k: int) -> Batch:
    return {"pixel_values": reals(k, SAMPLES, 3, 32, 32), "labels": ints(k + 1, CLASSES, SAMPLES, 32, 32)}


def waves(k: int) -> Batch:
    return {"input_values": reals(k, SAMPLES, 160), "labels": ints(k + 1, CLASSES, SAMPLES)}


# -- decoders -----------------------------------------------------------------------------------------------------------------------

hf("gpt2", "GPT2", text_padded, head="LMHeadModel", **GPT)
hf("llama", "Llama", text, **GROUPED)
hf("llama_padded", "Llama", text_padded, **GROUPED)
hf("llama_padded_left", "Llama", text_padded_left, **GROUPED)
hf("llama_eager", "Llama", text_padded, **GROUPED, attn_implementation="eager")
hf(
    "llama_tied_scaled",
    "Llama",
    text,
    **GROUPED,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
)
hf("mistral", "Mistral", text_padded, **GROUPED, sliding_window=6)
hf("qwen2", "Qwen2", text_padded, **GROUPED)
hf("qwen3", "Qwen3", text, **GROUPED, head_dim=8)
hf("gemma", "Gemma", text_padded, **GROUPED, head_dim=4)
hf("gemma2", "Gemma2", text_padded, **GROUPED, head_dim=4, sliding_window=6)
hf("gemma3", "Gemma3", text, config="Gemma3TextConfig", **GROUPED, head_dim=4, sliding_window=6)
hf("phi", "Phi", text_padded, **TEXT)
hf("phi3", "Phi3", text, **GROUPED)
hf("gpt_neo", "GPTNeo", text_padded, vocab_size=VOCAB, hidden_size=16, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
   window_size=4, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)  # fmt: skip
hf("gpt_neox", "GPTNeoX", text_padded, **TEXT)
hf("gptj", "GPTJ", text_padded, **GPT, rotary_dim=4)
hf("codegen", "CodeGen", text, **GPT, rotary_dim=4)
hf("bloom", "Bloom", text_padded, **ENDS, vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4)
hf("falcon", "Falcon", text_padded, **ENDS, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
hf("mpt", "Mpt", text, vocab_size=VOCAB, d_model=16, n_heads=4, n_layers=2, max_seq_len=32)
hf("opt", "OPT", text_padded, **ENDS, vocab_size=VOCAB, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
   max_position_embeddings=32, word_embed_proj_dim=16)  # fmt: skip
hf("olmo2", "Olmo2", text, **GROUPED)
hf("cohere", "Cohere", text, **GROUPED)
hf("stablelm", "StableLm", text_padded, **GROUPED)
hf("starcoder2", "Starcoder2", text, **GROUPED)
hf("persimmon", "Persimmon", text, **TEXT)
hf("granite", "Granite", text, **GROUPED, embedding_multiplier=2.0, logits_scaling=3.0)
hf(
    "bart_decoder",
    "XGLM",
    text,
    **ENDS,
    vocab_size=VOCAB,
    d_model=16,
    ffn_dim=32,
    num_layers=2,
    attention_heads=4,
    max_position_embeddings=32,
)
hf("llama_classifier", "Llama", classes, head="ForSequenceClassification", **GROUPED, num_labels=CLASSES)

# -- experts, state spaces ----------------------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
hf("mixtral", "Mixtral", text, **GROUPED, num_local_experts=4)
hf("mixtral_balanced", "Mixtral", text_padded, **GROUPED, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
hf("qwen2_moe", "Qwen2Moe", text, **EXPERTS, shared_expert_intermediate_size=16)
hf("qwen3_moe", "Qwen3Moe", text, **EXPERTS, head_dim=8)
hf("olmoe", "Olmoe", text, **GROUPED, num_experts=4, num_experts_per_tok=2)
hf("gpt_oss", "GptOss", text_padded, **GROUPED, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
hf("mamba", "Mamba", text, **ENDS, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
hf(
    "mamba2",
    "Mamba2",
    text,
    **ENDS,
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    head_dim=8,
    num_heads=4,
    n_groups=1,
    chunk_size=4,
)
hf(
    "rwkv",
    "Rwkv",
    text,
    bos_token_id=1,
    eos_token_id=2,
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    context_length=16,
    intermediate_size=32,
)

# -- encoders -----------------------------------------------------------------------------------------------------------------------

hf("bert_words", "Bert", masked_words, head="ForMaskedLM", **TEXT)
hf("bert_classes", "Bert", classes, head="ForSequenceClassification", **TEXT, num_labels=CLASSES)
hf("bert_tags", "Bert", tags, head="ForTokenClassification", **TEXT, num_labels=CLASSES)
hf("bert_spans", "Bert", spans, head="ForQuestionAnswering", **TEXT)
hf("bert_choices", "Bert", choices, head="ForMultipleChoice", **TEXT)
hf("roberta", "Roberta", masked_words, head="ForMaskedLM", **TEXT)
hf("electra", "Electra", classes, head="ForSequenceClassification", **TEXT, embedding_size=8, num_labels=CLASSES)
hf("distilbert", "DistilBert", tags, head="ForTokenClassification", vocab_size=VOCAB, dim=16, hidden_dim=32, n_layers=2, n_heads=4,
   max_position_embeddings=32, num_labels=CLASSES)  # fmt: skip
hf("albert", "Albert", classes, head="ForSequenceClassification", **TEXT, embedding_size=8, num_labels=CLASSES)
hf("deberta", "DebertaV2", classes, head="ForSequenceClassification", **TEXT, num_labels=CLASSES, relative_attention=True,
   pos_att_type=["p2c", "c2p"], position_buckets=4)  # fmt: skip
hf("mpnet", "MPNet", classes, head="ForSequenceClassification", **TEXT, num_labels=CLASSES)
hf("roformer", "RoFormer", masked_words, head="ForMaskedLM", **TEXT, embedding_size=16)
hf(
    "rembert",
    "RemBert",
    classes,
    head="ForSequenceClassification",
    **TEXT,
    input_embedding_size=8,
    output_embedding_size=8,
    num_labels=CLASSES,
)
hf("megatron_bert", "MegatronBert", masked_words, head="ForMaskedLM", **TEXT)
hf("squeezebert", "SqueezeBert", tags, head="ForTokenClassification", **TEXT, embedding_size=16, num_labels=CLASSES)
hf("big_bird", "BigBird", classes, head="ForSequenceClassification", **TEXT, attention_type="original_full", num_labels=CLASSES)
hf("convbert", "ConvBert", classes, head="ForSequenceClassification", **TEXT, embedding_size=16, num_labels=CLASSES)
hf("modernbert", "ModernBert", masked_words, head="ForMaskedLM", **TEXT, local_attention=4, cls_token_id=1, sep_token_id=2)
hf(
    "nystromformer",
    "Nystromformer",
    unpadded,
    head="ForSequenceClassification",
    **TEXT,
    num_landmarks=4,
    segment_means_seq_len=LENGTH,
    num_labels=CLASSES,
)
hf(
    "xlnet",
    "XLNet",
    classes,
    head="ForSequenceClassification",
    vocab_size=VOCAB,
    d_model=16,
    n_layer=2,
    n_head=4,
    d_inner=32,
    num_labels=CLASSES,
)
hf("fnet", "FNet", lambda k: {"input_ids": ids(k), "labels": ints(k, CLASSES, SAMPLES)}, head="ForSequenceClassification", num_labels=CLASSES,
   **{name: value for name, value in TEXT.items() if name != "num_attention_heads"})  # fmt: skip
hf("ibert", "IBert", tags, head="ForTokenClassification", **TEXT, num_labels=CLASSES, quant_mode=False)

# -- encoder-decoders ---------------------------------------------------------------------------------------------------------------

hf("t5", "T5", translated, head="ForConditionalGeneration", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
   decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
hf("t5_gated", "T5", translated, head="ForConditionalGeneration", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4,
   decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False)  # fmt: skip
hf("bart", "Bart", translated, head="ForConditionalGeneration", **PAIR)
hf("pegasus", "Pegasus", translated, head="ForConditionalGeneration", **PAIR)
hf("marian", "Marian", translated, head="MTModel", **PAIR)
hf("whisper", "Whisper", lambda k: {"input_features": reals(k, SAMPLES, 8, 24), "labels": ids(k, 6)}, head="ForConditionalGeneration",
   **{name: value for name, value in PAIR.items() if name != "max_position_embeddings"}, num_mel_bins=8, max_source_positions=12,
   max_target_positions=16, mask_time_prob=0.0)  # fmt: skip

# -- vision, audio, several kinds at once -------------------------------------------------------------------------------------------

hf("vit", "ViT", pictures, head="ForImageClassification", **PATCHES, num_labels=CLASSES)
hf("deit", "DeiT", pictures, head="ForImageClassification", **PATCHES, num_labels=CLASSES)
hf("beit", "Beit", pictures, head="ForImageClassification", **PATCHES, num_labels=CLASSES, use_relative_position_bias=True)
hf("dinov2", "Dinov2", pictures, head="ForImageClassification", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, image_size=16,
   patch_size=8, num_labels=CLASSES)  # fmt: skip
hf("swin", "Swin", pictures, head="ForImageClassification", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2],
   window_size=4, num_labels=CLASSES)  # fmt: skip
hf("convnext", "ConvNext", pictures, head="ForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES)
hf("resnet", "ResNet", pictures, head="ForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
   num_labels=CLASSES)  # fmt: skip
hf("mobilenet", "MobileNetV2", pictures, head="ForImageClassification", image_size=16, depth_multiplier=0.1, min_depth=4, depth_divisible_by=4,
   num_labels=CLASSES)  # fmt: skip
hf("segformer", "Segformer", segments, head="ForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
   hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
   num_labels=CLASSES)  # fmt: skip
hf("wav2vec2", "Wav2Vec2", waves, head="ForSequenceClassification", **SOUND, num_labels=CLASSES, classifier_proj_size=8)
hf(
    "hubert_ctc",
    "Hubert",
    lambda k: {"input_values": reals(k, SAMPLES, 160), "labels": ints(k + 1, 20, SAMPLES, 3, low=1)},
    head="ForCTC",
    **SOUND,
)
hf("audio_spectrogram", "AST", lambda k: {"input_values": reals(k, SAMPLES, 16, 8), "labels": ints(k + 1, CLASSES, SAMPLES)},
   head="ForAudioClassification", **SIZE, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8, num_labels=CLASSES)  # fmt: skip
hf("clip", "CLIP", lambda k: {**padded(k), "pixel_values": reals(k, SAMPLES, 3, 16, 16), "return_loss": True}, head="Model",
   text_config={**TEXT, "projection_dim": 16}, vision_config={**PATCHES, "projection_dim": 16}, projection_dim=16)  # fmt: skip
hf("layoutlm", "LayoutLM", lambda k: {**tags(k), "bbox": ints(k, 16, SAMPLES, LENGTH, 2).repeat(1, 1, 2) + torch.tensor([0, 0, 4, 4])},
   head="ForTokenClassification", **TEXT, num_labels=CLASSES, max_2d_position_embeddings=32)  # fmt: skip
hf("patch_tst", "PatchTST", lambda k: {"past_values": reals(k, SAMPLES, 16, 2), "future_values": reals(k + 1, SAMPLES, 4, 2)}, head="ForPrediction",
   num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=8, num_hidden_layers=1,
   num_attention_heads=2, ffn_dim=16)  # fmt: skip


# -- how transformers are used ------------------------------------------------------------------------------------------------------


def of_logits(model: nn.Module, batch: Any) -> Tensor:
    """A loss of one's own over the logits."""
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)


def of_hidden_states(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    return out.loss + 0.1 * sum(h.square().mean() for h in out.hidden_states) + sum(a.square().mean() for a in out.attentions)


def of_packed(model: nn.Module, batch: Any) -> Tensor:
    """Two documents a row, told apart by their positions."""
    places = torch.arange(LENGTH).remainder(LENGTH // 2).expand(SAMPLES, -1)
    return model(**batch, position_ids=places, use_cache=False).loss


hf("gpt2_own_loss", "GPT2", text_padded, of_logits, head="LMHeadModel", **GPT)
hf("llama_everything_put_out", "Llama", text_padded, of_hidden_states, **GROUPED, attn_implementation="eager")
hf("llama_positions", "Llama", text, of_packed, **GROUPED)


def trained_with(name: str, change: Callable[[Any], Any]) -> None:
    def make() -> tuple[Any, ...]:
        import transformers

        return change(quiet(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)))), of_model, batches(text_padded)

    if find_spec("transformers"):
        CASES.add(f"hf_{name}", make)


def with_checkpoints(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def frozen_below(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


trained_with("checkpointed", with_checkpoints)
trained_with("frozen_below", frozen_below)
trained_with("bfloat16", lambda model: model.bfloat16())
