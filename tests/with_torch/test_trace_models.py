"""Traces of whole models against real runs: peaks by the profiler's allocation events, FLOPs by torch's counter."""

import pytest
import torch
from torch import nn
from traced import adamw, differences

import costgraph as cg
from costgraph.torch import trace

# A real run's allocations besides its tensors: Python scalars, and temporary norm statistics.
SCALARS = 4096


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 29), nn.GELU(), nn.LayerNorm(29), nn.Linear(29, 17))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


class Eager(nn.Module):
    """Two attention blocks with dropout of zero, and a tied head."""

    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Embedding(61, 28)
        self.norms = nn.ModuleList(norm(28) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(28, 84) for _ in range(2))

    def forward(self, ids, y):
        x = self.embed(ids)
        for norm, qkv in zip(self.norms, self.qkv, strict=True):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, 4, 7)).permute(2, 0, 3, 1, 4)
            x = x + ((q @ k.mT * 7**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), y.flatten())


PLAIN = {
    "mlp": (MLP, lambda B: (torch.randn(B, 13), torch.randint(0, 17, (B,))), [("B", None), ("B",)]),
    "layer_norm": (lambda: Eager(nn.LayerNorm), None, None),
    "rms_norm": (lambda: Eager(nn.RMSNorm), None, None),
}


def tokens(B, S):
    return torch.randint(0, 61, (B, S)), torch.randint(0, 61, (B, S))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("mlp", optimizer) for optimizer in ("foreach", "for-loop", "fused", "sgd")),
        ("layer_norm", "foreach"),
        ("rms_norm", None),
        *(
            pytest.param(*c, marks=pytest.mark.long)
            for c in (("mlp", None), ("layer_norm", None), ("rms_norm", "foreach"))
        ),
    ],
)
def test_plain_modules(name, optimizer):
    make, data, dims = PLAIN[name]
    sizes = [{"B": 3}, {"B": 7}] if data else [{"B": 3, "S": 17}, {"B": 2, "S": 41}]
    data, dims = data or tokens, dims or [("B", "S")] * 2
    factories = {
        "foreach": adamw,
        "for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "fused": lambda p: torch.optim.AdamW(p, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    factory = factories.get(optimizer)
    g = trace(make(), *data(**sizes[0]), dims=dims, train=factory is not None, optimizer=factory)
    for size in sizes:
        module = make()
        errors = differences(g, module, data(**size), factory and factory(module.parameters()), **size)
        assert errors[1] == 0
        assert abs(errors[0]) <= SCALARS


class Shared(nn.Module):
    """A tensor with several matmuls or factors as consumers: its gradient is a sum."""

    def __init__(self, products):
        super().__init__()
        self.up = nn.Linear(3, 1009, bias=False)
        self.heads = nn.ModuleList(nn.Linear(1009, 1, bias=False) for _ in range(3)) if products else None
        self.factors = None if products else nn.Parameter(torch.ones(3, 1009))

    def forward(self, x):
        x = torch.tanh(self.up(x))
        if self.heads is not None:
            return sum(head(x).sum() for head in self.heads)
        return sum((x * factor).sum() for factor in self.factors.unbind(0))


@pytest.mark.parametrize("products", [False, True])
def test_gradients_accumulate_in_place_like_autograd(products):
    g = trace(Shared(products), torch.zeros(5, 3), dims=[("B", None)], train=True, optimizer=adamw)
    for rows in (17, 61):
        module = Shared(products)
        peak, _ = differences(g, module, (torch.randn(rows, 3),), adamw(module.parameters()), B=rows)
        assert abs(peak) <= SCALARS


# -- transformers ------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 60, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 5, "vocab_size": 61,
    "max_position_embeddings": 512,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 1, "head_dim": 12}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
UNDROPPED = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
#: GPT-2, Bloom and others are in `test_transformers_suite.py`.
TEXT = {
    "llama": ("Llama", "LlamaForCausalLM", {**SMALL, **GROUPED}),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", {**SMALL, **GROUPED, "sliding_window": 8}),
    "bert": ("Bert", "BertModel", {**SMALL, "num_hidden_layers": 1, **UNDROPPED}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {**SMALL, **GROUPED, **EXPERTS}),
}
#: Models with matmuls that torch's counter misses: experts over groups of tokens.
UNCOUNTED = {"mixtral"}


class Scored(nn.Module):
    """A transformers model with a scalar loss."""

    def __init__(self, config, model):
        super().__init__()
        self.model = model(config)
        self.language = hasattr(self.model, "lm_head")

    def forward(self, ids, y):
        if not self.language:
            return self.model(ids).last_hidden_state.square().mean()
        logits = self.model(ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def made(name):
    transformers = pytest.importorskip("transformers")
    family, model, options = TEXT[name]
    config = getattr(transformers, f"{family}Config")(
        **options, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    config._attn_implementation = "eager"
    return Scored(config, getattr(transformers, model))


PASSES = [("gemma2", True), ("bert", True), ("mixtral", False)]
OTHERS = [(name, not train) for name, train in PASSES] + [("llama", False), ("llama", True)]
OTHERS = [pytest.param(*other, marks=pytest.mark.long) for other in OTHERS]


@pytest.mark.parametrize(("name", "train"), PASSES + OTHERS)
def test_models_of_transformers(name, train):
    sizes = [{"B": 3, "S": 17}, {"B": 2, "S": 41}]
    g = trace(made(name), *tokens(**sizes[0]), dims=[("B", "S")] * 2, train=train, optimizer=adamw if train else None)
    assert cg.param_count(g) == sum(p.numel() for p in made(name).parameters())
    for size in sizes:
        module = made(name)
        optimizer = adamw(module.parameters()) if train else None
        peak, flops = differences(g, module, tokens(**size), optimizer, **size)
        assert abs(peak) <= SCALARS
        assert flops == 0 if name not in UNCOUNTED else flops < 0


def test_experts_are_grouped_matmuls():
    # in both layers, every token meets 2 experts out of 4: a 60 x 224 and a 112 x 60 matmul
    module = made("mixtral")
    g = trace(module, *tokens(3, 17), dims=[("B", "S")] * 2)
    grouped = [op for op in g.ops if op.call is not None and op.call.target == "_grouped_mm.default"]
    assert len(grouped) == 4
    total = sum(op.kind.flops(op).matmul for op in grouped)
    B, S = cg.dims("B S")
    assert total.expr == 2 * (2 * B * S * 2 * 60 * 224 + 2 * B * S * 2 * 112 * 60)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=60, intermediate_size=112, num_hidden_layers=2, num_attention_heads=5, image_size=24,
            patch_size=8,
        )  # fmt: skip
        config._attn_implementation = "eager"
        self.model = transformers.ViTModel(config, add_pooling_layer=False)

    def forward(self, x):
        return self.model(x).last_hidden_state.square().mean()


def test_a_vision_model():
    def images(B):
        return (torch.randn(B, 3, 24, 24),)

    g = trace(Vision(), *images(3), dims=[("B", None, None, None)], train=True, optimizer=adamw)
    for batch in (2, 5):
        module = Vision()
        peak, flops = differences(g, module, images(batch), adamw(module.parameters()), B=batch)
        assert abs(peak) <= SCALARS
        assert flops == 0


@pytest.mark.long
def test_encoder_decoder_matches_a_real_run():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=60, d_kv=12, d_ff=112, num_layers=2, num_heads=5, vocab_size=61, dropout_rate=0.0
    )
    config._attn_implementation = "eager"

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.T5ForConditionalGeneration(config)

        def forward(self, source, target):
            return self.model(input_ids=source, decoder_input_ids=target, use_cache=False).logits

    def pair(B, S, T):
        return torch.randint(0, 61, (B, S)), torch.randint(0, 61, (B, T))

    g = trace(Pair(), *pair(3, 17, 11), dims=[("B", "S"), ("B", "T")])
    for size in ({"B": 3, "S": 17, "T": 11}, {"B": 2, "S": 31, "T": 43}):
        peak, flops = differences(g, Pair(), pair(**size), **size)
        assert abs(peak) <= SCALARS
        assert flops == 0


# -- programs that query sizes of intermediate tensors -----------------------------------------------------------------


class Pyramid(nn.Module):
    """Convolution, upsampling, and a resize to the input's size: the body of a U-Net."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.mix = mode, nn.Conv2d(3, 5, 1)

    def forward(self, x):
        y = nn.functional.interpolate(self.mix(x), scale_factor=2, mode=self.mode)
        return nn.functional.interpolate(y, size=x.shape[-2:], mode=self.mode).square().mean()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_resampling_keeps_sizes_open(mode):
    g = trace(Pyramid(mode), torch.zeros(2, 3, 16, 18), dims=[("B", None, "H", "W")])
    B, H, W = cg.dims("B H W")
    assert cg.matmul_flops(g) == 2 * 3 * 5 * B * H * W
    shapes = [t.shape for t in g.tensors if t.producer is not None]
    assert shapes.index((B, 5, 2 * H, 2 * W)) == shapes.index((B, 5, H, W)) + 1  # upsampled, then downsampled again


def test_inference_mode_inside_a_module():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(5, 7)

        def forward(self, x):
            with torch.inference_mode():
                return self.up(x).softmax(-1) @ self.up.weight

    B = cg.dims("B")
    assert cg.matmul_flops(trace(Inside(), torch.zeros(3, 5), dims=[("B", None)])) == 2 * (2 * B * 5 * 7)
