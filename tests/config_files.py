"""Minimal configuration files for every architecture that `from_config` reads: mainly the fields that set sizes."""

import copy
from typing import Any

DECODER = {
    "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 23,
    "num_hidden_layers": 3, "vocab_size": 29, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {**DECODER, "num_experts_per_tok": 2}
QWEN = {**EXPERTS, "num_experts": 5, "moe_intermediate_size": 7, "norm_topk_prob": True}
LATENT = {
    "hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 23,
    "num_hidden_layers": 4, "vocab_size": 29, "num_experts_per_tok": 3, "moe_intermediate_size": 7,
    "n_routed_experts": 6, "n_shared_experts": 2, "kv_lora_rank": 10, "q_lora_rank": 11, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6, "v_head_dim": 7, "first_k_dense_replace": 1, "pad_token_id": 0, "n_group": 3,
    "topk_group": 2,
}  # fmt: skip
FALCON = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 29, "pad_token_id": 0}
BERT = {
    "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 19, "num_hidden_layers": 3, "vocab_size": 23,
    "max_position_embeddings": 13, "type_vocab_size": 5,
}  # fmt: skip
T5 = {
    "d_model": 14, "num_heads": 3, "d_kv": 5, "d_ff": 19, "num_layers": 2, "vocab_size": 23,
    "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
WHISPER = {
    "d_model": 30, "encoder_attention_heads": 3, "encoder_ffn_dim": 19, "encoder_layers": 3,
    "decoder_attention_heads": 5, "decoder_ffn_dim": 17, "decoder_layers": 2, "vocab_size": 23, "num_mel_bins": 7,
    "max_source_positions": 7, "max_target_positions": 13, "pad_token_id": 0, "activation_function": "gelu",
}  # fmt: skip
VIT = {
    "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 19, "num_hidden_layers": 2, "image_size": 14,
    "patch_size": 7, "num_channels": 2, "hidden_act": "gelu",
}  # fmt: skip
TOWER = {"hidden_size": 12, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3}
CLIP = {
    "projection_dim": 11,
    "text_config": {**TOWER, "vocab_size": 19, "max_position_embeddings": 13, "eos_token_id": 2},
    "vision_config": {**TOWER, "hidden_size": 15, "image_size": 14, "patch_size": 7},
}
CONVNEXT = {"hidden_sizes": [6, 10, 14], "depths": [1, 2, 1], "num_stages": 3, "image_size": 37, "patch_size": 3}
RESNET = {"embedding_size": 6, "hidden_sizes": [8, 12, 20], "depths": [1, 2, 2], "num_channels": 2}
SWIN = {
    "embed_dim": 6, "depths": [2, 1], "num_heads": [1, 3], "window_size": 5, "image_size": 52, "patch_size": 4,
    "mlp_ratio": 2.0,
}  # fmt: skip
MOBILENET = {"image_size": 33, "depth_multiplier": 0.5, "finegrained_output": False}
EFFICIENTNET = {
    "image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 1.1, "hidden_dim": 1280,
    "in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "kernel_sizes": [3, 3, 5], "strides": [1, 2, 2],
    "num_block_repeats": [1, 1, 2], "expand_ratios": [1, 6, 6], "depthwise_padding": [],
}  # fmt: skip
MAMBA = {"hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 29, "state_size": 5}
MAMBA2 = {**MAMBA, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
XLSTM = {
    "hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 29, "embedding_dim": 64, "num_blocks": 2,
}  # fmt: skip

#: transformers model type and fields, by architecture.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 17, "vocab_size": 29}),
    "LlamaForCausalLM": ("llama", DECODER),
    "MistralForCausalLM": ("mistral", {**DECODER, "sliding_window": 3}),
    "Qwen2ForCausalLM": ("qwen2", DECODER),
    "Qwen3ForCausalLM": ("qwen3", {**DECODER, "head_dim": 10, "use_sliding_window": True, "max_window_layers": 1}),
    "Gemma2ForCausalLM": ("gemma2", {**DECODER, "head_dim": 10}),
    "Gemma3ForCausalLM": ("gemma3_text", {**DECODER, "head_dim": 10, "sliding_window": 3}),
    "Phi3ForCausalLM": ("phi3", DECODER),
    "FalconForCausalLM": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "FalconForCausalLM 7b": ("falcon", FALCON),
    "Olmo2ForCausalLM": ("olmo2", DECODER),
    "MixtralForCausalLM": ("mixtral", {**EXPERTS, "num_local_experts": 5}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 11}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**QWEN, "head_dim": 10}),
    "GptOssForCausalLM": ("gpt_oss", {**EXPERTS, "num_local_experts": 5, "head_dim": 6}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", LATENT),
    "DeepseekV3ForCausalLM": ("deepseek_v3", LATENT),
    "BertModel": ("bert", BERT),
    "BertForMaskedLM": ("bert", BERT),
    "BertForSequenceClassification": ("bert", BERT),
    "BertForTokenClassification": ("bert", BERT),
    "T5ForConditionalGeneration": ("t5", T5),
    "WhisperForConditionalGeneration": ("whisper", WHISPER),
    "CLIPModel": ("clip", CLIP),
    "ViTModel": ("vit", VIT),
    "ViTForImageClassification": ("vit", VIT),
    "ConvNextModel": ("convnext", CONVNEXT),
    "ConvNextForImageClassification": ("convnext", CONVNEXT),
    "ResNetModel": ("resnet", RESNET),
    "ResNetForImageClassification": ("resnet", RESNET),
    "SwinModel": ("swin", SWIN),
    "SwinForImageClassification": ("swin", SWIN),
    "MobileNetV2Model": ("mobilenet_v2", MOBILENET),
    "MobileNetV2ForImageClassification": ("mobilenet_v2", MOBILENET),
    "EfficientNetModel": ("efficientnet", EFFICIENTNET),
    "EfficientNetForImageClassification": ("efficientnet", EFFICIENTNET),
    "MambaForCausalLM": ("mamba", MAMBA),
    "Mamba2ForCausalLM": ("mamba2", MAMBA2),
    "xLSTMForCausalLM": ("xlstm", XLSTM),
}


def file_of(name: str) -> dict[str, Any]:
    """Return a minimal configuration file for an architecture."""
    kind, fields = FILES[name]
    return {"architectures": [name.split()[0]], "model_type": kind, **copy.deepcopy(fields)}
