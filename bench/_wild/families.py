"""Every causal, masked and sequence-to-sequence language model and image classifier of transformers that is no case of its own yet.

A config is made of the library's default, each size in it made small by its name. What torch itself does not run so is told as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from bench._wild import hugging_face as hf
from bench._wild.tools import CLASSES, SAMPLES, Table, batches, ints, quiet, reals

CASES = Table()
IMAGE = 32
SMALL: list[tuple[str, Any]] = [
    (r"(shared_|n_|num_)?(routed_|local_)?experts?_per_tok(en)?|moe_k|moe_top_?k|top_?k(_experts)?|router_topk", 2),
    (r"(n_|num_)(routed_|local_|block_sparse_)?experts|moe_num_experts|num_sparse_.*layers", 4),
    (r"num_kv_shared_layers|hidden_size_per_layer_input|num_mem_blocks", 0), (r"mamba_d_head|mamba_headdim", 16),
    (r"n_groups?|topk_groups?|n_shared_experts|num_shared_experts|num_nextn_predict_layers|first_k_dense_replace|mamba_n_groups|ngroups", 1),
    (r".*vocab_size(_per_layer_input)?|.*num_embeddings|n_tokens", hf.VOCAB),
    (r"(num_|n_)?(key_value|kv)_?heads|num_global_key_value_heads|.*_num_(key_value|kv)_heads", 2),
    (r"num_heads|n_heads?|.*attention_heads|num_(linear_)?(key|value)_heads|linear_num_.*heads|.*_n_heads|.*_num_heads|num_lookup.*heads", 4),
    (r"qk_rope_head_dim|rotary_dim|qk_nope_head_dim|v_head_dim|.*head_dim|.*_head_size|d_kv|attention_key_hidden.*|.*_d_head|.*qk_head_dim", 8),
    (r".*lora_rank|.*_rank|conv_rank|d_state|.*state_size|.*_d_state|ssm_state.*|time_step_rank", 8),
    (r"num_hidden_layers|n_layers?|num_layers|.*(encoder|decoder)_layers|num_decoder_layers|num_blocks|max_window_layers|num_encoder_blocks", 2),
    (r"(.*_)?hidden_size|.*d_model|n_embd|dim|emb_dim|.*embed_dim|word_embed_proj_dim|.*embedding_size|lru_width|projection_dim|embedding_dim", 32),
    (r".*intermediate_size|.*ffn_dim|d_ff|.*hidden_dim|ffn_hidden_size|d_inner|n_inner|.*feedforward.*size|mamba_d_ssm|.*_mlp_dim", 64),
    (r".*max.*position_embeddings|n_positions|max_seq_len(gth)?|context_length|n_ctx|.*max_(source|target)_positions|seq_len(gth)?", 64),
    (r".*(sliding_)?window(_size)?|attention_window|chunk_size|attention_chunk_size|local_radius|.*chunk_length", 8),
    (r"image_size", IMAGE), (r"patch_size", 8), (r"num_labels", CLASSES), (r"pad_token_id", 0), (r"bos_token_id", 1), (r"eos_token_id", 2),
    (r"decoder_start_token_id|sep_token_id|cls_token_id", 2), (r".*layerdrop", 0.0),
]  # fmt: skip


def small(config: Any) -> dict[str, Any]:
    """What to give a config's class so that its model is small."""
    given = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    kinds = list(dict.fromkeys(given["layer_types"])) if isinstance(given.get("layer_types"), (list, tuple)) else []
    out: dict[str, Any] = {}
    heads = given.get("num_attention_heads")
    for name, value in given.items():
        if hasattr(value, "to_dict"):
            out[name] = value.to_dict() | small(value)
        elif name == "num_key_value_heads" and value == heads:
            out[name] = 4
        elif name == "layer_types" and kinds:
            out[name] = (kinds * 2)[: max(2, len(kinds))]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            size = _small_size(name)
            out |= {name: min(size, value) if value > 0 else value} if size is not None else {}
        elif value is None and re.search(r"experts|pad_token_id|num_key_value_heads|vocab_size|^head_dim$", name):
            out |= {name: size} if (size := _small_size(name)) is not None else {}
        elif isinstance(value, (list, tuple)) and value and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            out |= _small_list(name, value)
    if kinds and "num_hidden_layers" in out:
        out["num_hidden_layers"] = max(2, len(kinds))
    return out


def _small_size(name: str) -> Any:
    return next((size for pattern, size in SMALL if re.fullmatch(pattern, name)), None)


def _small_list(name: str, value: Any) -> dict[str, Any]:
    if "depth" in name or name in ("layers", "num_blocks"):
        return {name: [1] * len(value)}
    if name == "intermediate_size":
        return {name: 64}
    if re.search(r"hidden_sizes|.*channels|embed_dims|widths|key_dim", name):
        return {name: [16 * (1 + i // 2) for i in range(len(value))]}
    return {name: [2] * len(value)} if "heads" in name else {}


def pictures(k: int) -> dict[str, Any]:
    return {"pixel_values": reals(k, SAMPLES, 3, IMAGE, IMAGE), "labels": ints(k + 1, CLASSES, SAMPLES)}


def add(kind: str, model_type: str, name: str, data: Callable[[int], dict[str, Any]]) -> None:
    def make() -> tuple[Any, ...]:
        import transformers

        cls = getattr(transformers, name)
        default = (cls.config_class or transformers.CONFIG_MAPPING[model_type])()
        more = {"num_labels": CLASSES} if kind == "image" else {"decoder_start_token_id": 0} if kind == "seq2seq" else {}
        return quiet(cls(type(default)(**small(default) | more | OWN.get(case, OWN.get(model_type, {}))))), hf.of_model, batches(data)

    case = f"{kind}_{model_type.replace('-', '_')}"
    CASES.add(case, make)


SPOKEN = ("audioflamingo3", "fsmt", "glmasr", "granite_speech", "granite_speech_plus", "musicflamingo", "qwen2_audio", "qwen3_asr", "voxtral", "vibevoice_asr")
OWN: Mapping[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 2},
    "causal_reformer": {"is_decoder": True, "axial_pos_embds": False, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "masked_reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "xmod": {"default_language": "en_XX"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "hidden_size": 32, "embedding_size": 32},
    "esmc": {"vocab_size": hf.VOCAB},
}

if find_spec("transformers"):
    from transformers.models.auto import modeling_auto as auto

    done = set(hf.CLASSES_OF_CASES)
    for kind, data, names in [
        ("causal", hf.text_padded, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", hf.masked_words, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("seq2seq", hf.translated, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("image", pictures, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ]:
        for model_type, given in names.items():
            name = given if isinstance(given, str) else given[0]
            if name not in done:
                done.add(name)
                add(kind, model_type, name, hf.text_padded if model_type in SPOKEN else data)
