"""Traced transformers models on a mesh: all ranks reproduce the values, and the work is divided."""

import pytest
from lazy import lazy_import

torch = pytest.importorskip("torch")
transformers = lazy_import("transformers")

import costgraph as cg  # noqa: E402  # after torch is known to be there
from costgraph import testing  # noqa: E402
from costgraph.torch import from_config, trace  # noqa: E402

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=4)  # noqa: C408  # keywords
MODELS = {
    "Llama": {"num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 8, "hidden_size": 8,
              "intermediate_size": 8},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16},
    "GPT2": {"vocab_size": 32, "n_embd": 16, "n_head": 4, "n_positions": 16, "resid_pdrop": 0, "embd_pdrop": 0,
             "attn_pdrop": 0},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 16},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 16},
    "Bert": {"max_position_embeddings": 16, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


def traced(name, layers):
    """Return a tiny model of a transformers class in fp64, with torch's results."""
    sizes = {} if name == "GPT2" else SIZES
    count = {"n_layer" if name == "GPT2" else "num_hidden_layers": layers}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **MODELS[name]}, **count, use_cache=False)
    model = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config).double().eval()
    return trace(model, torch.zeros(2, 4, dtype=torch.long), dims=[("B", "S")])


def long(name):
    return pytest.param(name, marks=pytest.mark.long)


#: Models with replicated layers: the router, attention with unequal parts of a fused weight, the layer before the head.
WHOLE = {"Mixtral", "Phi3", "Bert"}


@pytest.mark.parametrize("name", ["Llama", *(long(n) for n in MODELS if n != "Llama")])
def test_traced_step_on_dp_and_tp_ranks_keeps_its_values(name):
    step = cg.training_step(traced(name, 1), loss="cross_entropy", optimizer=cg.SGD())
    for zero in (0, 3):
        # strict=True refuses replicated weights, and Mixtral sorts rows across ranks
        rank = cg.parallelize(step, dp=2, tp=2, zero=zero, strict=name not in WHOLE)
        assert name == "Mixtral" or not rank.sharding.resharded
        testing.check_sharded(step, rank, B=2, S=2)
        each, whole = (cg.matmul_flops(g, B=2, S=4) for g in (rank, step))
        assert whole <= 4 * each < (2 * whole if name in WHOLE else whole + 1)
        assert cg.param_count(rank) * (2 if zero else 1) < 0.7 * cg.param_count(step)


def test_encoder_decoder_attention_is_split():
    """T5's self- and cross-attention have separate module names, and its position biases one entry per head."""
    fields = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 8, "d_kv": 4,
              "num_heads": 2, "d_ff": 8, "num_layers": 1, "num_decoder_layers": 1, "vocab_size": 8,
              "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
              "is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0,
              "dtype": "float64"}  # fmt: skip
    step = cg.training_step(from_config(fields, device="cpu"), optimizer=cg.SGD())
    rank = cg.parallelize(step, dp=2, tp=2)
    testing.check_sharded(step, rank, B=2, S=2, T=2)
    whole = {p.name.rpartition("/")[0].rpartition("/")[2] for p in rank.params if not rank.sharding.places[p.name].axes}
    assert whole == {"layer_norm", "final_layer_norm"}


SPLIT = [{"dp": 2, "zero": 3, "sequence": True}, {"cp": 2}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", SPLIT[0]),
        pytest.param("Llama", SPLIT[1], marks=pytest.mark.long),
        *(pytest.param(name, options, marks=pytest.mark.long) for name in ("GPT2", "Phi3") for options in SPLIT),
    ],
)
def test_folded_traces_support_sequence_parallelism(name, options):
    step = cg.training_step(cg.fold(traced(name, 4)), loss="cross_entropy", optimizer=cg.SGD())
    rank = cg.parallelize(step, tp=2, strict=name not in WHOLE, **options)
    assert not rank.sharding.resharded
    testing.check_sharded(step, rank, B=2, S=2, L=3)


def test_sequence_parallelism_needs_a_loop_of_layers():
    with pytest.raises(
        cg.GraphError, match="no loop of graph 'LlamaForCausalLM' carries a tensor that sequence=True can shard; exp"
    ):
        cg.parallelize(traced("Llama", 2), tp=2, sequence=True)


def test_router_named_gate_is_replicated():
    rank = cg.parallelize(traced("Mixtral", 2), tp=2)
    places = rank.sharding.places
    assert not places["model/layers/0/mlp/gate/weight"].axes
    assert places["model/layers/0/mlp/experts/gate_up_proj"].dim("tp") == 1


@pytest.mark.parametrize("made", ["empty", "ones", "view"])
def test_empty_tensors_inherit_the_placement_of_their_slices(made):
    """Each rank has its own sequences in a tensor written slice by slice, such as DeepSeek-V2's keys."""

    class Joined(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(5, 7), torch.nn.Linear(5, 3)

        def forward(self, x):
            shape = (x.shape[0], x.shape[1], 10)
            flat, make = (shape[0] * shape[1], 10), getattr(torch, made, None)
            y = make(shape, dtype=x.dtype) if make else x.new_empty(flat).view(shape)
            y[..., :7], y[..., 7:] = self.left(x), self.right(x)
            return y.square().sum()

    step = cg.training_step(trace(Joined().double(), torch.zeros(3, 11, 5).double(), dims=[("B", "S", None)]))
    rank = cg.parallelize(step, dp=2, strict=True)
    testing.check_sharded(step, rank, B=2, S=3)
    assert cg.matmul_flops(rank) * 2 == cg.matmul_flops(step)
    assert all(cg.peak_memory(rank, B=2 * b, S=11) == cg.peak_memory(step, B=b, S=11) for b in (2, 64))
