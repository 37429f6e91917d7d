"""transformers models that the zoo does not declare, traced from a config.json through their classes."""

import json

import pytest
import torch
from lazy import lazy_import
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.cli import app as cli
from costgraph.errors import BindingError, CostGraphError, FormatError, GraphError, UnsupportedError
from costgraph.torch import from_config, trace

transformers = lazy_import("transformers")

DECODER = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80,
    "num_hidden_layers": 4, "vocab_size": 101, "max_position_embeddings": 131, "pad_token_id": 1, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
# decoders outside the zoo's families; an encoder; an encoder-decoder; image models
CLASSES = {
    "StableLmForCausalLM": DECODER,
    "GraniteForCausalLM": DECODER,
    "Cohere2ForCausalLM": DECODER | {"head_dim": 16, "num_hidden_layers": 17},  # three in four layers have a window
    "GPTNeoXForCausalLM": DECODER,
    "OPTForCausalLM": DECODER | {"ffn_dim": 80, "word_embed_proj_dim": 64},
    # the first and the last layer differ: the frame that calls the encoder keeps the embeddings alive
    "BertLMHeadModel": DECODER | {"is_decoder": True, "num_hidden_layers": 5},
    "Dinov2Model": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "image_size": 42},
}


def config(name, **fields):
    config_class = getattr(transformers, name).config_class
    return {
        "architectures": [name],
        "model_type": config_class.model_type,
        "dtype": "float32",
        **CLASSES[name],
        **fields,
    }


def built(name, **fields):
    """Build the transformers class with data, with eager attention: torch's counter has no formula for the CPU's
    fused kernel."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class.from_dict(config(name, **fields, attn_implementation="eager"))).eval()


SHORT = ("Cohere2ForCausalLM", "Dinov2Model")  # StableLM is in the next test


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CLASSES]
)
def test_config_graph_equals_the_transformers_class(name):
    layers = CLASSES[name]["num_hidden_layers"]
    graph, depth = from_config(config(name), device="cpu"), layers + 4
    assert graph.defaults == {"L": layers}
    assert cg.param_count(graph) == sum(p.numel() for p in built(name).parameters())
    deeper = built(name, num_hidden_layers=depth)  # binding another depth gives the class with that depth
    assert cg.param_count(graph, L=depth) == sum(p.numel() for p in deeper.parameters())
    images = deeper.main_input_name == "pixel_values"
    inputs = torch.zeros((2, 3, 42, 42) if images else (2, 23), dtype=torch.float32 if images else torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        deeper(inputs, **({} if images else {"use_cache": False}))
    sizes = {"B": 2, "L": depth, **({} if images else {"S": 23})}
    assert cg.matmul_flops(graph, count="full", **sizes) == counter.get_total_flops()
    assert graph.loss == ("transformers" if name.endswith(("ForCausalLM", "LMHeadModel")) else None)


def test_encoder_decoder_has_two_depths():
    settings = {"d_model": 48, "encoder_layers": 4, "decoder_layers": 5, "encoder_ffn_dim": 80, "decoder_ffn_dim": 112,
           "encoder_attention_heads": 4, "decoder_attention_heads": 2, "vocab_size": 101,
           "max_position_embeddings": 131, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1,
           "decoder_start_token_id": 1, "attn_implementation": "eager"}  # fmt: skip
    fields = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart", "dtype": "float32", **settings}
    graph = from_config(fields, device="cpu")
    module = transformers.BartForConditionalGeneration(transformers.BartConfig(**settings)).eval()
    assert (sorted(graph.defaults.values()), graph.loss) == ([4, 5], "cross_entropy")
    assert cg.param_count(graph) == sum(p.numel() for p in module.parameters())
    tokens, decoded = torch.zeros(2, 23, dtype=torch.int64), torch.zeros(2, 19, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(input_ids=tokens, decoder_input_ids=decoded, use_cache=False)
    assert cg.matmul_flops(graph, count="full", B=2, S=23, T=19) == counter.get_total_flops()


class WithLoss(torch.nn.Module):
    """A module with its training loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = self.model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), "cuda"])
def test_config_training_step_equals_the_class(device):
    depth = {"num_hidden_layers": 3}
    graph = from_config(config("StableLmForCausalLM", dtype="bfloat16", **depth), device=device)
    step = cg.training_step(graph, optimizer=cg.AdamW())
    module = transformers.StableLmForCausalLM(
        transformers.StableLmConfig.from_dict(config("StableLmForCausalLM", attn_implementation="sdpa", **depth))
    ).to(torch.bfloat16)
    tokens = torch.zeros(3, 127, dtype=torch.int64)
    traced = trace(WithLoss(module), tokens, tokens, dims=[("B", "S")] * 2, train=True, device=device)
    for count in ("full", "executed"):
        flops = cg.matmul_flops(step, count=count, B=2, S=29)
        assert flops == cg.matmul_flops(traced, count=count, B=2, S=29)
    rank = cg.parallelize(step, dp=2, zero=3)
    assert 2 * cg.matmul_flops(rank, B=4, S=29) == cg.matmul_flops(step, B=4, S=29)


def test_formats_and_kernels():
    half = config("StableLmForCausalLM", dtype="bfloat16", num_hidden_layers=1)
    graph, eager = from_config(half), from_config(half, "eager", "fp32")
    count = sum(p.numel() for p in built("StableLmForCausalLM", num_hidden_layers=1).parameters())
    assert (cg.param_bytes(graph), cg.param_bytes(eager)) == (2 * count, 4 * count)
    # 2 matmuls of 2 FLOPs, B, H, K; above the diagonal
    hidden = 4 * 2 * 4 * 16 * (29 * 28 // 2)
    assert cg.matmul_flops(eager, B=2, S=29) - cg.matmul_flops(graph, B=2, S=29) == hidden
    assert torch.get_default_dtype() == torch.float32


def test_image_inputs_have_the_model_dtype():
    fields = {"architectures": ["ConvNextModel"], "model_type": "convnext", "hidden_sizes": [8, 16, 24, 32],
              "depths": [3, 3, 3, 3], "image_size": 64, "dtype": "bfloat16"}  # fmt: skip
    graph = from_config(fields)
    module = transformers.ConvNextModel(transformers.ConvNextConfig.from_dict(fields)).float()
    assert cg.param_bytes(graph) == 2 * sum(p.numel() for p in module.parameters())
    assert {t.dtype.name for t in graph.tensors if t.role == "input" and t.producer is None} == {"bf16"}
    counted = []
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):  # 2 per output element and summed element
            layer.register_forward_hook(lambda m, _, y: counted.append(2 * y.numel() * m.weight[0].numel()))
    with torch.no_grad():
        module(torch.zeros(2, 3, 64, 64))
    assert cg.matmul_flops(graph, B=2) == sum(counted)


@pytest.mark.parametrize(("policy", "each"), [("bf16", 2), ("fp32", 4), ("bf16-mixed", 4)])
def test_precision_policy_overrides_traced_dtype(policy, each):
    half = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(torch.bfloat16)
    graph = trace(half, torch.zeros(2, 5, dtype=torch.bfloat16), dims=[("B", None)])
    assert cg.param_bytes(cg.apply_precision(graph, policy)) == each * (5 * 7 + 7 + 7 * 3 + 3)


def test_length_dependent_branch_becomes_an_assumption():
    windows = config("Cohere2ForCausalLM", sliding_window=64, max_position_embeddings=4096, num_hidden_layers=1)
    with pytest.raises(BindingError, match="against the assumption"):
        cg.flops(from_config(windows), B=1, S=17)  # the example was longer than the window


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"architectures": ["NobodyForCausalLM"]}, UnsupportedError, "'NobodyForCausalLM', expected a model class"),
        ({"architectures": ["pipeline"]}, UnsupportedError, "'pipeline', expected a model class of transformers"),
        ({"architectures": ["os.system"]}, UnsupportedError, "'os.system', expected a model class of transformers"),
        ({"num_hidden_layers": 10**9}, UnsupportedError, "num_hidden_layers is 1000000000, expected at most 1024"),
        ({"num_experts": 10**9}, UnsupportedError, "num_experts is 1000000000, expected at most 1024"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "expected a model that is not quantized"),
        ({"num_attention_heads": 5}, FormatError, "cannot build StableLmForCausalLM from it: "),
        ({"hidden_size": "many"}, FormatError, "cannot build StableLmForCausalLM from it: "),
        ({"hidden_size": -64}, FormatError, "cannot build StableLmForCausalLM from it: "),
        ({"vocab_size": None}, FormatError, "cannot build StableLmForCausalLM from it: "),
        ({"dtype": "int4"}, UnsupportedError, "dtype is 'int4', expected one of"),
    ],
)  # fmt: skip
def test_invalid_configs_are_refused_by_name(fields, error, text):
    with pytest.raises(error, match=text):
        from_config(config("StableLmForCausalLM", **fields))


def test_model_with_audio_inputs_is_refused():
    fields = {"architectures": ["Wav2Vec2Model"], "model_type": "wav2vec2"}
    with pytest.raises(UnsupportedError, match="Wav2Vec2Model takes input_values, expected tokens, or images"):
        from_config(fields)


def test_unknown_attention_kernel_is_refused():
    with pytest.raises(GraphError, match="attention 'ring', expected 'flash' or 'eager'"):
        from_config(config("StableLmForCausalLM"), attention="ring")


def test_cli_traces_architectures_that_the_zoo_lacks(tmp_path, capsys):
    file = tmp_path / "config.json"
    depth = {"num_hidden_layers": 1}
    file.write_text(json.dumps(config("StableLmForCausalLM", **depth)), encoding="utf-8")
    expected = sum(p.numel() for p in built("StableLmForCausalLM", **depth).parameters())
    with pytest.raises(CostGraphError, match=r"trace the transformers model: costgraph\.torch\.from_config"):
        cg.models.from_config(file)
    assert cli.main(["formula", str(file), "params", "--preset"]) == 0
    assert int(capsys.readouterr().out) == expected
    assert cli.main(["report", str(file), "--dropout", "0.1", "B=1", "S=17"]) == 2
    assert "is a config.json, expected a preset for this option" in capsys.readouterr().err
