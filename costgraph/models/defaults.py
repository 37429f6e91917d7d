"""What transformers' configuration classes have where a file says nothing, and the second names of their fields.

Read off transformers 5.23, by `model_type`: a test holds each entry against the installed release. What is not here and
sets a size, such as a width, must stand in a file: transformers would make a published model's size of it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ACTIVATIONS", "ALIASES", "DEFAULTS", "NO_COST", "OFF", "ROPES"]

_HEADS = {"num_key_value_heads": None, "head_dim": None}
_DECODER = {"hidden_act": "silu", "tie_word_embeddings": False}
_MIXTURE = {**_DECODER, "output_router_logits": False}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_GEMMA = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "sliding_window": 4096,
    "layer_types": None, "tie_word_embeddings": True,
}  # fmt: skip
_LATENT = {**_MIXTURE, "attention_bias": False, "q_lora_rank": 1536}
_IMAGES = {"num_channels": 3, "image_size": 224}
_STATE = {
    "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
    "residual_in_fp32": True,
}  # fmt: skip

_FALCON = {
    "num_ln_in_parallel_attn": None, "num_kv_heads": None, "alibi": False, "new_decoder_architecture": False,
    "multi_query": True, "parallel_attn": True, "bias": False, "ffn_hidden_size": None, "activation": "gelu",
    "tie_word_embeddings": True,
}  # fmt: skip

#: What a field is that a file does not have; None: as null, which means what the reader of the family says.
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gpt2": {
        "n_inner": None, "activation_function": "gelu_new", "tie_word_embeddings": True, "scale_attn_weights": True,
        "reorder_and_upcast_attn": False,
    },
    "llama": {**_DECODER, **_HEADS, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_DECODER, "head_dim": None, "sliding_window": 4096},
    "mixtral": {**_MIXTURE, "head_dim": None, "sliding_window": None, "router_jitter_noise": 0.0},
    "qwen2": {**_DECODER, **_WINDOW, "max_window_layers": 28, "layer_types": None},
    "qwen3": {
        **_DECODER, **_WINDOW, "max_window_layers": 28, "layer_types": None, "head_dim": 128, "attention_bias": False,
    },
    "qwen2_moe": {**_MIXTURE, **_WINDOW, **_EVERY_LAYER, "layer_types": None, "qkv_bias": True},
    "qwen3_moe": {**_MIXTURE, **_WINDOW, **_EVERY_LAYER, "attention_bias": False},
    "gemma2": {
        **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "use_bidirectional_attention": None,
    },
    "gemma3_text": {
        **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    "phi3": {**_DECODER, "num_key_value_heads": None, "sliding_window": None},
    "falcon": _FALCON,
    # of the code that came with the first checkpoints of Falcon, which transformers no longer reads
    "refined_web": {**_FALCON, "new_decoder_architecture": None, "multi_query": False, "parallel_attn": False},
    "olmo2": {**_DECODER, "num_key_value_heads": None, "attention_bias": False},
    "gpt_oss": {
        **_MIXTURE, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "swiglu_alpha": 1.702,
        "layer_types": None, "attention_bias": True,
    },
    "deepseek_v2": {
        **_LATENT, "first_k_dense_replace": 0, "mlp_bias": False, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        **_LATENT, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "bert": {"hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False},
    "t5": {
        "feed_forward_proj": "relu", "num_decoder_layers": None, "relative_attention_num_buckets": 32,
        "is_encoder_decoder": True, "is_decoder": False,
    },
    "whisper": {
        "activation_function": "gelu", "tie_word_embeddings": True, "is_encoder_decoder": True,
        "apply_spec_augment": False, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    },
    "clip": {"projection_dim": 512},
    "clip_text_model": {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
        "hidden_act": "quick_gelu", "vocab_size": 49408, "max_position_embeddings": 77,
    },
    "clip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "hidden_act": "quick_gelu", "patch_size": 32, **_IMAGES,
    },
    "vit": {
        **_IMAGES, "patch_size": 16, "hidden_act": "gelu", "qkv_bias": True, "pooler_output_size": None,
        "pooler_act": "tanh",
    },
    "convnext": {
        **_IMAGES, "patch_size": 4, "num_stages": 4, "hidden_sizes": [96, 192, 384, 768], "depths": [3, 3, 9, 3],
        "hidden_act": "gelu", "layer_scale_init_value": 1e-6,
    },
    "resnet": {
        "num_channels": 3, "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    "swin": {
        **_IMAGES, "patch_size": 4, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24],
        "window_size": 7, "mlp_ratio": 4.0, "qkv_bias": True, "hidden_act": "gelu", "use_absolute_embeddings": False,
    },
    "mobilenet_v2": {
        **_IMAGES, "depth_multiplier": 1.0, "depth_divisible_by": 8, "min_depth": 8, "expand_ratio": 6.0,
        "output_stride": 32, "first_layer_is_expansion": True, "finegrained_output": True, "hidden_act": "relu6",
    },
    "efficientnet": {
        **_IMAGES, "image_size": 600, "width_coefficient": 2.0, "depth_coefficient": 3.1, "depth_divisor": 8,
        "kernel_sizes": [3, 3, 5, 3, 5, 5, 3], "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320], "depthwise_padding": [], "strides": [1, 2, 2, 2, 1, 2, 1],
        "num_block_repeats": [1, 2, 2, 3, 3, 4, 1], "expand_ratios": [1, 6, 6, 6, 6, 6, 6],
        "squeeze_expansion_ratio": 0.25, "hidden_act": "swish", "hidden_dim": 2560,
    },
    "mamba": {**_STATE, "state_size": 16, "time_step_rank": "auto", "tie_word_embeddings": True},
    "mamba2": {**_STATE, "state_size": 128, "n_groups": 8, "chunk_size": 256, "tie_word_embeddings": False},
    "xlstm": {
        "hidden_size": 4096, "embedding_dim": None, "num_hidden_layers": 32, "num_blocks": None, "num_heads": 8,
        "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64,
        "chunk_size": 64, "use_bias": False, "add_out_norm": True, "tie_word_embeddings": False,
        "weight_mode": "single", "inference_state_dtype": "float32",
    },
}  # fmt: skip

#: Second names of fields, by model type: `attribute_map` of each class, and what its `__post_init__` renames.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "falcon": {"n_embed": "hidden_size"},
    "refined_web": {
        "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
    },
    "t5": {
        "hidden_size": "d_model", "num_attention_heads": "num_heads", "head_dim": "d_kv",
    },
    "whisper": {
        "num_key_value_heads": "encoder_attention_heads", "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model", "num_hidden_layers": "encoder_layers",
    },
    "convnext": {"num_hidden_layers": "num_stages"},
    "swin": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
}  # fmt: skip

#: Fields that every model may have and that change no cost of a forward pass or a training step of the whole model.
NO_COST = frozenset(
    """
    architectures model_type transformers_version _name_or_path name_or_path auto_map torch_dtype dtype return_dict
    use_cache output_hidden_states output_attentions output_router_logits _commit_hash bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id cls_token_id mask_token_id unk_token_id
    forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids initializer_range initializer_factor
    init_std id2label label2id num_labels finetuning_task problem_type task task_specific_params tokenizer_class
    prefix torchscript use_bfloat16 max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty gradient_checkpointing attn_implementation _attn_implementation
    _attn_implementation_autoset _experts_implementation pretraining_tp rms_norm_eps layer_norm_eps norm_eps
    layer_norm_epsilon rope_theta default_theta original_max_position_embeddings unsloth_fixed
    _attn_implementation_internal experts_implementation attention_dropout hidden_dropout resid_dropout
    cross_attention_hidden_size pruned_heads chunk_size_feed_forward classifier_dropout
    """.split()  # noqa: SIM905  # a list of seventy words in quotes is harder to read
)

#: Elementwise functions by the names that transformers gives them in `hidden_act` and the like.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu2": "relu2", "relu6": "relu6", "silu": "silu", "swish": "silu", "sigmoid": "sigmoid", "tanh": "tanh",
    "mish": "mish", "leaky_relu": "leaky_relu", "hardswish": "hardswish",
}  # fmt: skip

#: Switches that every model may have and that change nothing while they are off.
OFF = frozenset({"is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"})

#: How frequencies of rotary positions may be had, none of which changes a cost.
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", "mrope")
