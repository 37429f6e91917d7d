"""Encoders, encoder-decoders and vision transformers against torch modules with the same config."""

import pytest
import torch
from lazy import lazy_import
from shared import load
from torch.utils.flop_counter import FlopCounterMode
from zoo_encoders import REFERENCES, DiT, VisionTransformer, ids

import costgraph as cg
from costgraph.torch import trace
from costgraph.torch.lowering import lower, random_inputs

transformers = lazy_import("transformers")

torch.set_num_threads(1)

B, S, M = 2, 7, 11
EAGER = {"attn_implementation": "eager"}


def of(module, graph, inputs=(), keywords=None, **sizes):
    """Compare a declaration with torch's counts of the module; `test_zoo_page.py` traces modules."""
    module = module.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs, **(keywords or {}))
    assert cg.param_count(graph) == sum(p.numel() for p in module.parameters())
    assert cg.matmul_flops(graph, count="full", **sizes) == counter.get_total_flops()


def module_and_graph(kind, config):
    """Return the module of a config, and its declaration."""
    config._attn_implementation = "eager"
    fields = {**config.to_dict(), "architectures": [kind.__name__]}
    return kind(config), cg.models.from_config(fields, attention="eager")


# -- BERT ------------------------------------------------------------------------------------------------------------

BERT = {
    "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 19, "num_hidden_layers": 3, "vocab_size": 23,
    "max_position_embeddings": 13, "type_vocab_size": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("BertModel", {}),
        ("BertModel", {"hidden_act": "relu", "num_hidden_layers": 1}),
        ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
        ("BertForMaskedLM", {"tie_word_embeddings": False}),
        ("BertForSequenceClassification", {}),
        ("BertForSequenceClassification", {"num_labels": 7}),
        ("BertForTokenClassification", {"num_labels": 3}),
    ],
)
def test_bert(kind, more):
    module, graph = module_and_graph(getattr(transformers, kind), transformers.BertConfig(**{**BERT, **more}))
    of(module, graph, (ids(B, S),), B=B, S=S)


# -- T5 --------------------------------------------------------------------------------------------------------------

T5 = {  # three heads with dimension five, not a width of 14
    "d_model": 14, "num_heads": 3, "d_kv": 5, "d_ff": 19, "num_layers": 2, "vocab_size": 23,
    "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
}  # fmt: skip


def t5_inputs():
    return {"input_ids": ids(B, M), "decoder_input_ids": ids(B, S), "use_cache": False}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_decoder_layers": 3},
        {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 1},
        {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 12},
        {"tie_word_embeddings": False},  # transformers 5 saves it as tied, with unscaled features
    ],
)
def test_t5(more):
    module, graph = module_and_graph(transformers.T5ForConditionalGeneration, transformers.T5Config(**{**T5, **more}))
    of(module, graph, keywords=t5_inputs(), B=B, S=S, M=M)


def test_untied_t5_head_matches_the_module():
    """transformers 5 ties fresh modules whatever the config says, and unties them when it loads a checkpoint."""
    fields = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields, **EAGER))
    module.lm_head.weight = torch.nn.Parameter(module.shared.weight.detach().clone())
    graph = cg.models.from_config({**fields, "architectures": ["T5ForConditionalGeneration"]}, attention="eager")
    of(module, graph, keywords=t5_inputs(), B=B, S=S, M=M)
    assert not any(t.name == "scale" for t in graph.tensors)  # only a tied head scales its features


# -- Whisper ---------------------------------------------------------------------------------------------------------

WHISPER = {  # the two stacks differ in every possible size
    "d_model": 30, "encoder_attention_heads": 3, "encoder_ffn_dim": 19, "encoder_layers": 3,
    "decoder_attention_heads": 5, "decoder_ffn_dim": 17, "decoder_layers": 2, "vocab_size": 23, "num_mel_bins": 7,
    "max_source_positions": M, "max_target_positions": 13, "pad_token_id": 0,
}  # fmt: skip


def whisper_inputs():
    return {"input_features": torch.zeros(B, 7, 2 * M), "decoder_input_ids": ids(B, S), "use_cache": False}


@pytest.mark.parametrize("more", [{}, {"activation_function": "relu"}, {"tie_word_embeddings": False}])
def test_whisper(more):
    kind = transformers.WhisperForConditionalGeneration
    module, graph = module_and_graph(kind, transformers.WhisperConfig(**{**WHISPER, **more}))
    of(module, graph, keywords=whisper_inputs(), B=B, S=S)


# -- ViT -------------------------------------------------------------------------------------------------------------

VIT = {
    "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 19, "num_hidden_layers": 2, "image_size": 23,
    "patch_size": 5, "num_channels": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("ViTModel", {}),
        ("ViTModel", {"qkv_bias": False, "pooler_output_size": 7, "pooler_act": "relu"}),
        ("ViTForImageClassification", {}),
        ("ViTForImageClassification", {"num_labels": 11, "hidden_act": "gelu_new", "patch_size": 7}),
    ],
)
def test_vit(kind, more):
    module, graph = module_and_graph(getattr(transformers, kind), transformers.ViTConfig(**{**VIT, **more}))
    of(module, graph, (torch.zeros(B, 2, 23, 23),), B=B)


def test_vit_matches_torchvision():
    module = VisionTransformer(23, 5, 15, 3, 19, 2, classes=11, channels=2)
    graph = load("vit-b-16", patch=5, attention="eager")
    sizes = {"R": 23, "IC": 2, "D": 15, "H": 3, "F": 19, "L": 2, "C": 11}
    assert cg.param_count(graph, **sizes) == sum(p.numel() for p in module.parameters())
    graph_of_module = trace(
        module, torch.zeros(B, 2, 23, 23)
    )  # torch's counter has no formula for fused attention on a CPU
    assert cg.matmul_flops(graph, count="full", B=B, **sizes) == cg.matmul_flops(graph_of_module, count="full")


# -- CLIP ------------------------------------------------------------------------------------------------------------

TEXT = {
    "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 19, "num_hidden_layers": 2, "vocab_size": 23,
    "max_position_embeddings": 13, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 14, "num_attention_heads": 7, "intermediate_size": 17, "num_hidden_layers": 3, "image_size": 23,
    "patch_size": 5, "num_channels": 2,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"hidden_act": "gelu"}])
def test_clip(more):
    config = transformers.CLIPConfig(text_config={**TEXT, **more}, vision_config=VISION, projection_dim=11)
    module, graph = module_and_graph(transformers.CLIPModel, config)
    of(module, graph, (ids(B, S), torch.zeros(B, 2, 23, 23)), B=B, S=S)


# -- DiT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patch", "learned"), [(2, True), (5, True), (5, False)])
def test_dit(patch, learned):
    sizes = {"R": 10, "IC": 3, "D": 15, "H": 3, "F": 19, "L": 2, "C": 11, "waves": 14}
    module = DiT(10, patch, 15, 3, 19, 2, classes=11, channels=3, waves=14, learn_sigma=learned)
    graph = load("dit-xl-2", patch=patch, learned_variance=learned, attention="eager")
    assert cg.param_count(graph, **sizes) == sum(p.numel() for p in module.parameters())
    counted = cg.matmul_flops(graph, count="full", B=B, **sizes)
    with FlopCounterMode(display=False) as counter:
        out = module(torch.zeros(B, 3, 10, 10), ids(B), ids(B))
    assert out.shape == (B, 6 if learned else 3, 10, 10)
    assert counted == counter.get_total_flops()


# -- training --------------------------------------------------------------------------------------------------------


def total(y):
    """Return a scalar of every output, whose gradient needs no matmul."""
    if isinstance(y, torch.Tensor):
        return y.sum()
    return sum(t.sum() for t in y.values() if isinstance(t, torch.Tensor) and t.is_floating_point())


def summed(*outputs):
    """Declare the same scalar."""
    axes = [" ".join(f"a{i}" for i in range(t.ndim)) for t in outputs]
    parts = [cg.reduce(t, f"{names} -> ", "sum") for t, names in zip(outputs, axes, strict=True)]
    return sum(parts[1:], start=parts[0])


def assert_step_matches(module, graph, inputs=(), keywords=None, **sizes):
    """Compare a whole step with a forward and backward pass of the module."""
    with FlopCounterMode(display=False) as counter:
        total(module(*inputs, **(keywords or {}))).backward()
    step = cg.training_step(graph, loss=summed, optimizer=cg.SGD())
    assert cg.matmul_flops(step, count="full", **sizes) == counter.get_total_flops()


@pytest.mark.long
def test_a_step_of_bert():
    module, graph = module_and_graph(transformers.BertModel, transformers.BertConfig(**BERT))
    assert_step_matches(module, graph, (ids(B, S),), B=B, S=S)


def test_a_step_of_t5():
    module, graph = module_and_graph(transformers.T5ForConditionalGeneration, transformers.T5Config(**T5))
    decoded = {**t5_inputs(), "return_dict": True}
    with FlopCounterMode(display=False) as counter:
        module(**decoded).logits.sum().backward()
    step = cg.training_step(graph, loss=summed, optimizer=cg.SGD())
    assert cg.matmul_flops(step, count="full", B=B, S=S, M=M) == counter.get_total_flops()


def test_a_step_of_whisper():
    kind = transformers.WhisperForConditionalGeneration
    module, graph = module_and_graph(kind, transformers.WhisperConfig(**WHISPER))
    with FlopCounterMode(display=False) as counter:
        module(**whisper_inputs()).logits.sum().backward()
    step = cg.training_step(graph, loss=summed, optimizer=cg.SGD())
    assert cg.matmul_flops(step, count="full", B=B, S=S) == counter.get_total_flops()


@pytest.mark.long
def test_a_step_of_vit():
    module, graph = module_and_graph(transformers.ViTModel, transformers.ViTConfig(**VIT))
    assert_step_matches(module, graph, (torch.zeros(B, 2, 23, 23),), B=B)


def test_a_step_of_clip():
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=11)
    module, graph = module_and_graph(transformers.CLIPModel, config)
    with FlopCounterMode(display=False) as counter:
        module(ids(B, S), torch.zeros(B, 2, 23, 23), return_loss=True).loss.backward()
    step = cg.training_step(graph, optimizer=cg.SGD())  # CLIP has its own loss
    assert cg.matmul_flops(step, count="full", B=B, S=S) == counter.get_total_flops()


def test_a_step_of_dit():
    sizes = {"R": 10, "IC": 3, "D": 15, "H": 3, "F": 19, "L": 2, "C": 11, "waves": 14}
    module = DiT(10, 2, 15, 3, 19, 2, classes=11, channels=3, waves=14)
    graph = load("dit-xl-2", attention="eager")
    assert_step_matches(module, graph, (torch.zeros(B, 3, 10, 10), ids(B), ids(B)), B=B, **sizes)


SMALL = {
    "bert-base": {"B": 2, "S": 5, "D": 6, "H": 2, "F": 7, "L": 3, "V": 11, "P": 7, "kinds": 3},
    "t5-small": {"B": 2, "S": 5, "M": 7, "D": 6, "H": 3, "K": 4, "F": 7, "L": 3, "N": 2, "V": 11, "buckets": 8},
    "whisper-tiny": {
        "B": 2, "S": 5, "M": 7, "D": 6, "H": 2, "F": 7, "L": 2, "HN": 3, "FN": 5, "N": 3, "V": 11, "P": 7, "mels": 3,
    },
    "vit-b-16": {"B": 2, "R": 35, "IC": 2, "D": 6, "H": 2, "F": 7, "L": 3, "C": 5},
    "clip-vit-b-32": {
        "B": 3, "S": 5, "V": 11, "P": 7, "D": 6, "H": 2, "F": 7, "L": 2, "joint": 5, "R": 67, "IC": 2, "DV": 9,
        "HV": 3, "FV": 7, "LV": 3,
    },
    "dit-s-2": {"B": 2, "R": 6, "IC": 3, "D": 6, "H": 2, "F": 7, "L": 3, "C": 5, "waves": 8},
}  # fmt: skip


#: Score biases, cross-attention, a custom loss, and modulated norms; each with one kernel.
KERNELS = [
    ("t5-small", "flash"),
    ("whisper-tiny", "eager"),
    ("clip-vit-b-32", "flash"),
    ("dit-s-2", "flash"),
    pytest.param("bert-base", "eager", marks=pytest.mark.long),
    pytest.param("vit-b-16", "flash", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "attention"), KERNELS)
def test_encoder_gradients_equal_autograd(name, attention):
    """A step of plain SGD with rate 1 subtracts the gradient, which autograd computes from the forward pass."""
    # autograd cannot differentiate the lowered quick_gelu, which works in place
    options = {"text_activation": "gelu", "vision_activation": "silu"} if name.startswith("clip") else {}
    graph = load(name, dtype="fp64", attention=attention, **options)
    chosen = None if graph.loss else summed
    loss = cg.transforms.loss.with_loss(graph, chosen)
    step = cg.training_step(graph, loss=chosen, optimizer=cg.SGD(lr=1.0))
    forward, update = lower(loss, **SMALL[name]), lower(step, **SMALL[name])
    inputs = random_inputs(loss, **SMALL[name])
    before = {k: v.clone() for k, v in forward.state_dict().items()}
    update.load_state_dict(before)
    output = forward.requires_grad_()(*inputs)
    output.backward()
    torch.testing.assert_close(update(*inputs), output.detach(), rtol=1e-12, atol=1e-12)
    for k, p in forward.named_parameters():
        change = before[k] - update.get_parameter(k)
        if "positions" in k and not change.any():  # frozen
            assert name in ("dit-s-2", "whisper-tiny")
        else:
            torch.testing.assert_close(change, p.grad, rtol=1e-6, atol=1e-12)


# -- published sizes: test_zoo_page.py compares the presets with their modules -----------------------------------------


def test_every_model_has_a_reference():
    names = {n for n in cg.models.names() if n.startswith(("bert", "t5", "whisper", "vit", "clip", "dit"))}
    assert names == set(REFERENCES)
