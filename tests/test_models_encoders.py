"""Encoders, encoder-decoders and vision transformers: published numbers, configurations, and supported questions."""

import pytest
from each import each
from shared import load, training_step
from sympy import Symbol

import costgraph as cg
from costgraph import BindingError, FormatError, GraphError, ShapeError, UnsupportedError

# -- parameters ----------------------------------------------------------------------------------------------------

PARAMETERS = {
    # checkpoints on huggingface.co; BERT: the bare model with its pooler (printed as 110 M and 340 M)
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "whisper-tiny": 37_760_640,
    "whisper-base": 72_593_920,
    "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920,
    "whisper-large-v3": 1_543_490_560,
    "clip-vit-b-32": 151_277_313,
    "clip-vit-b-16": 149_620_737,
    "clip-vit-l-14": 427_616_513,
    # torchvision documentation for vit_b_16, vit_b_32, vit_l_16 and vit_h_14
    "vit-b-16": 86_567_656,
    "vit-b-32": 88_224_232,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
}
#: Peebles and Xie 2022, table 4: parameters in millions and multiply-adds in 10^9.
DIT = {
    "dit-s-8": (33, 0.36), "dit-s-4": (33, 1.41), "dit-s-2": (33, 6.06),
    "dit-b-8": (131, 1.42), "dit-b-4": (130, 5.56), "dit-b-2": (130, 23.01),
    "dit-l-8": (459, 5.01), "dit-l-4": (458, 19.70), "dit-l-2": (458, 80.71),
    "dit-xl-8": (676, 7.39), "dit-xl-4": (675, 29.05), "dit-xl-2": (675, 118.64),
}  # fmt: skip
NAMES = [*PARAMETERS, *DIT]
#: Dimensions that stay symbolic by default.
OPEN = {"bert": {"B", "S"}, "t5": {"B", "S", "M"}, "whisper": {"B", "S"}, "vit": {"B"}, "clip": {"B"}, "dit": {"B"}}


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items())
def test_parameters_match_published_counts(name, expected):
    assert cg.param_count(load(name)) == expected


@pytest.mark.parametrize(("name", "printed"), DIT.items())
def test_diffusion_transformers_match_paper(name, printed):
    g = load(name)
    millions, multiply_adds = printed
    patches, D = (32 // int(name[-1])) ** 2, g.defaults["D"]
    assert round((cg.param_count(g) - patches * D) / 1e6) == millions  # without the frozen positions
    # the paper does not define its counter further: 2 in 10,000
    assert cg.matmul_flops(g, B=1) / 2e9 == pytest.approx(multiply_adds, rel=2e-4, abs=0.0065)


@each(
    # torchvision documentation, GFLOPS of multiply-adds at 224x224
    ("name", "printed"),
    [("vit-b-16", 17.56), ("vit-b-32", 4.41), ("vit-l-16", 61.55), ("vit-h-14", 167.29)],
)
def test_vision_transformer_multiply_adds_match_torchvision(name, printed):
    assert cg.matmul_flops(load(name), B=1) / 2e9 == pytest.approx(printed, abs=0.006)


def test_parameters_of_t5_3b_by_hand():
    D, E, F, L = 1024, 32 * 128, 16384, 24
    encoder = L * (4 * D * E + 2 * D * F + 2 * D)  # attention, feed-forward layer, two norms
    decoder = L * (8 * D * E + 2 * D * F + 3 * D)
    assert cg.param_count(load("t5-3b")) == 32128 * D + encoder + decoder + 2 * D + 2 * 32 * 32


# -- supported questions -------------------------------------------------------------------------------------------


@each("name", NAMES)
def test_defaults_bind_all_but_batch_and_length(name):
    free = {s.name for s in cg.flops(load(name)).free_symbols}
    assert free == OPEN[name.split("-")[0]]


@pytest.mark.parametrize("name", ["bert-base", "t5-3b", "whisper-tiny", "vit-h-14", "clip-vit-l-14", "dit-xl-2"])
def test_symbolic_leaves_all_sizes_open(name):
    g, open_ = load(name), load(name, symbolic=True)
    assert not open_.defaults
    assert {s.name for s in cg.param_count(open_).free_symbols} <= set(g.defaults)
    assert cg.param_count(open_, **g.defaults) == cg.param_count(g)
    # every default is used
    asked = cg.flops(open_).free_symbols | cg.param_count(open_).free_symbols | cg.peak_memory(open_).free_symbols
    assert {Symbol(n).name for n in g.defaults} <= {s.name for s in asked}


@pytest.mark.parametrize("name", ["bert-base", "t5-small", "whisper-tiny", "vit-b-16", "clip-vit-b-32", "dit-s-2"])
def test_report_and_attention_kernels(name):
    point = dict.fromkeys(OPEN[name.split("-")[0]], 3)
    g, eager = load(name), load(name, attention="eager", dropout=0.1)
    assert cg.matmul_flops(g, count="full", **point) == cg.matmul_flops(eager, count="full", **point)
    assert name in str(cg.report(g, "h100-sxm", **point))
    assert cg.peak_memory(g, **point) > cg.param_bytes(g)


def test_encoder_and_decoder_depths_are_independent():
    g = load("t5-small")
    layer = 8 * 512 * 512 + 2 * 512 * 2048 + 3 * 512  # decoder layer
    assert cg.param_count(g, N=7) - cg.param_count(g) == layer
    assert cg.param_count(g, L=7) - cg.param_count(g) == layer - 4 * 512 * 512 - 512


def test_larger_image_has_more_positions():
    g = load("vit-b-16")
    assert cg.param_count(g, R=384) - cg.param_count(g) == (24**2 - 14**2) * 768
    assert cg.matmul_flops(g, R=239, B=1) == cg.matmul_flops(g, B=1)  # remainder pixels belong to no patch


def test_length_beyond_positions_is_refused():
    for name in ("bert-base", "whisper-tiny", "clip-vit-b-32"):
        with pytest.raises(BindingError, match="S <= P"):
            cg.flops(load(name), B=1, S=513)


# -- training ------------------------------------------------------------------------------------------------------


def test_losses():
    losses = {name: load(name).loss for name in ("bert-base", "t5-small", "vit-b-16", "clip-vit-b-32")}
    assert losses == {
        "bert-base": None, "t5-small": "cross_entropy", "vit-b-16": "cross_entropy", "clip-vit-b-32": "contrastive",
    }  # fmt: skip
    with pytest.raises(GraphError, match=r"names no loss, and its outputs \(2\)"):
        training_step(load("bert-base"))
    step = training_step(load("bert-base"), loss=lambda _, pooled: cg.reduce(pooled, "b d -> ", "mean"))
    assert cg.param_count(step) == PARAMETERS["bert-base"]


def test_contrastive_loss_shares_one_matmul():
    """One cross-entropy over rows and one over columns, each with B*B logits; they share one matmul."""
    g = load("clip-vit-b-32")
    scores = cg.training_step(g)
    assert cg.matmul_flops(scores, B=5) == cg.matmul_flops(cg.training_step(g, loss=_mean), B=5)
    assert [t.name for t in scores.tensors if t.role == "input"] == ["tokens", "ends", "images"]  # and no targets
    with pytest.raises(ShapeError, match=r"loss 'contrastive' of .*: expected as many rows as columns"):
        training_step(load("vit-b-16"), loss="contrastive")


def _mean(logits):
    return cg.reduce(logits, "b c -> ", "mean")


def test_frozen_positions_have_no_gradient():
    g = load("dit-s-2")
    step = cg.training_step(g, loss=lambda y: cg.reduce(y, "b c h w -> ", "mean"), optimizer=cg.AdamW())
    frozen = 256 * 384
    assert cg.state_bytes(step).state == 2 * 2 * (cg.param_count(g) - frozen)


# -- inference -----------------------------------------------------------------------------------------------------


def test_t5_decode_flops():
    """One token needs queries, keys, values and the output projection; of the encoder output it only runs
    cross-attention.
    """
    g = cg.decode(load("t5-small"))
    D, F, L, V = 512, 2048, 6, 32128
    layer = 2 * (4 * D * D) + 2 * (2 * D * D) + 2 * (2 * D * F)
    assert cg.matmul_flops(g, B=1, S=1000, M=100) == L * layer + 2 * D * V + L * 4 * D * (1000 + 100)


def test_whisper_decode_cost():
    g = cg.decode(load("whisper-tiny"))
    D, F, L, V = 384, 1536, 4, 51865
    layer = 2 * (4 * D * D) + 2 * (2 * D * D) + 2 * (2 * D * F)
    assert cg.matmul_flops(g, B=1, S=100) == L * layer + 2 * D * V + L * 4 * D * (100 + 1500)


def test_encoders_have_no_cache():
    for name in ("bert-base", "vit-b-16", "clip-vit-b-32", "dit-s-2"):
        with pytest.raises(GraphError, match=r"graph .* keeps no state between steps"):
            cg.decode(load(name))


# -- structure options ---------------------------------------------------------------------------------------------


@each(
    ("name", "options", "text"),
    [
        ("vit-b-16", {"head": "none"}, "head='none', expected 'classifier' or 'pooler'"),
        ("bert-base", {"tied": 1}, "tied=1, expected True or False"),
        ("t5-small", {"gates": True}, "gates=True, expected one of gated, activation, tied, scaled"),
        ("dit-xl-2", {"patch": 0}, "window=0: expected an integer of at least 1"),
        ("vit-b-16", {"activation": "swosh"}, "function 'swosh', expected one of copy"),
    ],
)
def test_invalid_options_are_refused(name, options, text):
    with pytest.raises(cg.CostGraphError, match=text):
        load(name, **options)


def test_masked_language_model_parameters():
    # a layer and a norm before the tied head, and its bias: BertForMaskedLM on huggingface.co has 109,514,298
    g = load("bert-base", head="masked-lm")
    assert cg.param_count(g) == 109_514_298
    assert g.outputs[0].shape[-1] == Symbol("V", integer=True, positive=True)


# -- configurations ------------------------------------------------------------------------------------------------

# as on huggingface.co, with fields from older transformers versions
BERT_BASE = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
FLAN_T5_BASE = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 768,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5",
    "n_positions": 512, "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12, "output_past": True,
    "pad_token_id": 0, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False, "transformers_version": "4.23.1", "use_cache": True, "vocab_size": 32128,
}  # fmt: skip
VIT_BASE = {
    "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0, "hidden_size": 768, "id2label": {str(i): f"class {i}" for i in range(1000)},
    "image_size": 224, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
    "model_type": "vit", "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16,
}  # fmt: skip
CLIP_L_14 = {  # transformers reads only the two parts whose names end in _dict, with their defaults
    "architectures": ["CLIPModel"], "initializer_factor": 1.0, "logit_scale_init_value": 2.6592, "model_type": "clip",
    "projection_dim": 768, "torch_dtype": "float32",
    "text_config": {"hidden_size": 768, "vocab_size": 49408},
    "text_config_dict": {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
        "projection_dim": 768,
    },
    "vision_config": {"hidden_size": 1024, "add_cross_attention": False, "top_k": 50},
    "vision_config_dict": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14, "projection_dim": 768,
    },
}  # fmt: skip
DISTILLED = {  # a distilled Whisper with two of 32 decoder layers
    "architectures": ["WhisperForConditionalGeneration"], "d_model": 1280, "encoder_layers": 32, "decoder_layers": 2,
    "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    "vocab_size": 51866, "num_mel_bins": 128, "max_source_positions": 1500, "max_target_positions": 448,
    "activation_function": "gelu", "apply_spec_augment": False, "mask_time_prob": 0.05, "encoder_layerdrop": 0.0,
    "is_encoder_decoder": True, "scale_embedding": False, "dropout": 0.0, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        (BERT_BASE, 109_514_298),
        ({**BERT_BASE, "architectures": ["BertModel"]}, 109_482_240),
        (FLAN_T5_BASE, 247_577_856),
        (VIT_BASE, 86_567_656),
        ({**VIT_BASE, "architectures": ["ViTModel"]}, 86_389_248),
        (CLIP_L_14, 427_616_513),
        (DISTILLED, 756_405_760),  # distil-whisper/distil-large-v3, printed as 756 M
    ],
)
def test_configurations_match_presets(fields, parameters):
    g = cg.models.from_config(fields)
    assert cg.param_count(g) == parameters


@each(
    ("fields", "more", "text"),
    [
        (BERT_BASE, {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', expected"),
        (BERT_BASE, {"is_decoder": True}, "is_decoder is True, expected False"),
        (BERT_BASE, {"hidden_act": "xielu"}, "hidden_act is 'xielu', expected one of gelu"),
        (BERT_BASE, {"adapters": 3}, "adapters is 3, expected a known field"),
        (FLAN_T5_BASE, {"feed_forward_proj": "gated"}, "feed_forward_proj is 'gated', expected one of"),
        (FLAN_T5_BASE, {"n_experts": 8}, "n_experts is 8, expected a known field"),
        (VIT_BASE, {"encoder_depth": 3}, "encoder_depth is 3, expected a known field"),
        (CLIP_L_14, {"vision_config_dict": {"heads": 3}}, "vision_config_dict: heads is 3, expected a known field"),
        (DISTILLED, {"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1, expected 0"),
        (DISTILLED, {"architectures": ["WhisperForAudioClassification"]}, "'WhisperForAudioClassification' is unknown"),
    ],
)
def test_unsupported_fields_are_named(fields, more, text):
    with pytest.raises(UnsupportedError, match=text):
        cg.models.from_config({**fields, **more})


@each(
    ("fields", "missing"),
    [(BERT_BASE, "hidden_size"), (FLAN_T5_BASE, "d_kv"), (VIT_BASE, "intermediate_size"), (DISTILLED, "d_model")],
)
def test_missing_fields_are_named(fields, missing):
    with pytest.raises(FormatError, match=f"{missing} is missing, expected an integer"):
        cg.models.from_config({k: v for k, v in fields.items() if k != missing})


def test_non_square_images_are_refused():
    with pytest.raises(FormatError, match=r"image_size is \[224, 196\], expected an integer"):
        cg.models.from_config({**VIT_BASE, "image_size": [224, 196]})
