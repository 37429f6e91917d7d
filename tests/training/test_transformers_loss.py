"""The loss of transformers: saved and live copies of logits against its own function, and where it is the default."""

import re

import pytest
from shared import load, training_step

import costgraph as cg
from costgraph import BindingError, FormatError, ShapeError, UnsupportedError
from costgraph.report.files import to_json
from costgraph.transforms.loss import LOSSES, loss_title, read_loss, with_loss

D = 16
SIZES = [(1, 64, 1000), (3, 55, 1009), (4, 128, 4096)]
FIELDS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 4099,
}  # fmt: skip


def head(V, dtype="bf16"):
    """Return two linear layers, the second with V outputs."""
    b, s, d = cg.dims("B S D")
    with cg.Graph("g", dtype=dtype) as g:
        x = cg.linear(g.input("x", (b, s, d)), "b s d -> b s e", e=d, name="first")
        g.output(cg.linear(x, "b s d -> b s v", v=V, bias=False, name="head"))
    return g


def above_sources(graph, **dims):
    """Return the peak bytes above parameters and inputs."""
    line = cg.timeline(graph, **dims)
    return line.peak - line.by_role["param"] - line.by_role["input"]


# -- where it applies ------------------------------------------------------------------------------------------------


def test_configs_default_to_loss_of_transformers_and_presets_do_not():
    for fields, loss in (
        (FIELDS, "transformers"),
        ({**FIELDS, "architectures": ["MistralForCausalLM"], "sliding_window": 32}, "transformers"),
        ({"architectures": ["BertModel"], "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
          "num_hidden_layers": 3, "vocab_size": 4099, "max_position_embeddings": 64, "type_vocab_size": 2}, None),
    ):  # fmt: skip
        assert cg.models.from_config(fields).loss == loss
    assert load("llama-3-8b").loss == "cross_entropy"


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"checkpoint": True}, {"clip": 1.0}, {"precision": "bf16-mixed"}], ids=str
)
def test_three_fp32_copies_of_logits_at_the_peak(options):
    """Log-probabilities, their gradient and that of the logits; the default loss has the same three in bf16."""
    V = 2**18
    model = cg.models.from_config({**FIELDS, "vocab_size": V})

    def bytes_per_logit(loss):
        step = cg.training_step(model, loss, **options)
        return (cg.peak_memory(step, B=2, S=8192) - cg.peak_memory(step, B=2, S=4096)) / (2 * 4096 * V)

    assert bytes_per_logit(None) == pytest.approx(12, rel=0.01)
    if "precision" not in options:  # autocast runs the cross-entropy in fp32, too
        assert bytes_per_logit("cross_entropy") == pytest.approx(6, rel=0.01)


@pytest.mark.parametrize("loss", ["fp32", "transformers", cg.chunked_cross_entropy(1, dtype="fp32")])
def test_logits_are_fp32_whatever_the_precision(loss):
    for dtype in ("fp32", "bf16"):
        for precision in (None, "bf16", "fp16-mixed"):
            step = cg.training_step(load("llama-3-8b", dtype=dtype), loss, precision=precision)
            assert {t.dtype.name for op in step.walk() if op.name.endswith("log_softmax") for t in op.results} == {
                "fp32"
            }


@pytest.mark.parametrize(
    "degrees", [{"dp": 2}, {"dp": 2, "zero": 3}, {"cp": 2}, {"cp": 2, "context": "ring"}, {"pp": 3, "micro_batches": 6}]
)
def test_ranks_need_as_much_as_with_the_same_cross_entropy(degrees):
    """The kept logits are no larger than gradients of the backward pass, and labels are not gathered."""
    model, accumulate = load("llama-3-8b", symbolic=True), degrees.get("micro_batches", 1)
    sizes = {"B": 4, "S": 64, "D": 64, "H": 4, "G": 2, "K": 16, "F": 96, "L": 6, "V": 4096}
    found = []
    for loss in ("fp32", "transformers"):
        step = cg.training_step(model, loss, checkpoint=True, accumulate=accumulate)
        rank = cg.parallelize(step, **degrees)
        rank = rank.stages[-1] if rank.parts else rank
        assert rank.loss == loss
        messages = [(m.axis, m.collective, m.times, m.ring_bytes) for m in cg.communication(rank, **sizes)]
        found.append((cg.peak_memory(rank, **sizes), sorted(map(str, messages))))
    (expected, sent), (peak, also) = found
    assert 0 <= peak - expected <= 2 * 8 * sizes["B"] * sizes["S"]  # labels
    assert also == sent


def test_vocabulary_split_keeps_logits_alive():
    """A split softmax needs three fp32 tensors in the forward pass; the logits of the model are a fourth, in bf16."""
    model, sizes = load("llama-3-8b"), {"B": 1, "S": 8192}
    peaks = [
        cg.peak_memory(cg.parallelize(cg.training_step(model, loss, cg.SGD(), checkpoint=True), tp=8), **sizes)
        for loss in ("fp32", "transformers")
    ]
    logits = 8192 * 128256 // 8
    assert peaks[1] - peaks[0] == pytest.approx(2 * logits, rel=0.01)


def test_lora_of_quantized_config_trains():
    model = cg.quantize(cg.lora(cg.models.from_config(FIELDS), 8), "nf4", skip=["head", "lora_a", "lora_b"])
    step = cg.training_step(model)
    assert step.loss == "transformers"
    assert cg.peak_memory(step, B=1, S=64) > cg.peak_memory(cg.training_step(model, "cross_entropy"), B=1, S=64)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "title"),
    [("cross_entropy", "cross_entropy"), ("transformers", "transformers >= 4.49 (fp32 logits)"),
     ("fp32", "cross-entropy of fp32 logits"), (cg.chunked_cross_entropy(4), "chunked_cross_entropy(4)"),
     (cg.chunked_cross_entropy(4, dtype="fp32"), "chunked_cross_entropy(4, dtype=fp32)")],
)  # fmt: skip
def test_report_names_the_loss(loss, title, tmp_path):
    step = cg.training_step(head(64), loss)
    cg.save(step, tmp_path / "step.json")
    for graph in (step, cg.load(tmp_path / "step.json"), cg.parallelize(step, dp=2)):
        report = cg.report(graph, B=4, S=64, D=8)
        assert report.training.loss == title
        assert re.search(f"\nloss  +{re.escape(title)}\n", str(report))
    assert f'"loss": "{title}"' in to_json(report)
    assert "\nloss  " not in str(cg.report(head(64), B=4, S=64, D=8))


def test_a_scalar_output_is_a_loss_without_a_name():
    model = cg.models.from_config(FIELDS)
    with model:
        model.outputs = [cg.reduce(model.outputs[0], "b s v -> ", "mean")]
    assert cg.report(cg.training_step(model), B=2, S=8).training.loss is None


def test_losses_parse_from_text():
    assert all(read_loss(name) == name for name in LOSSES)
    assert read_loss("chunked:8") == cg.chunked_cross_entropy(8)
    assert loss_title("cross_entropy") == "cross_entropy"
    for text in ("huggingface", "chunked", "chunked:", "chunked:0", ""):
        with pytest.raises((BindingError, FormatError), match="expected"):
            read_loss(text)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: training_step(load("mlp"), "torch"), cg.GraphError, "'torch', expected one of cross_entropy, fp32, t"),
        (lambda: training_step(load("bert-base"), "transformers"), cg.GraphError, "which has 2 outputs, expected one"),
        (lambda: cg.training_step(scalars(), "transformers"), ShapeError, "expected an axis of positions and one of"),
        (lambda: training_step(load("dit-xl-2"), read_loss("chunked:2")), UnsupportedError, "one matmul"),
    ],
)  # fmt: skip
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def scalars():
    B = cg.dims("B")
    with cg.Graph("g") as g:
        g.output(g.param("w", (B,)) * g.input("x", (B,)))
    return g


# -- beside transformers ---------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")
from costgraph.torch import from_config, trace  # noqa: E402
from costgraph.torch.measurement import peak_bytes  # noqa: E402

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CPU = torch.device("cpu")


class Module(torch.nn.Module):
    """A head with the loss of a causal language model, whose outputs are dropped as by `Trainer.compute_loss`."""

    def __init__(self, V, dtype):
        super().__init__()
        self.first = torch.nn.Linear(D, D, bias=False, dtype=FORMATS[dtype])
        self.head = torch.nn.Linear(D, V, bias=False, dtype=FORMATS[dtype])
        self.vocab_size = V

    def outputs(self, x, labels):
        logits = self.head(self.first(x))
        return loss_utils.ForCausalLMLoss(logits=logits, labels=labels, vocab_size=self.vocab_size), logits

    def forward(self, x, labels):
        return self.outputs(x, labels)[0]


def batch(B, S, V, dtype):
    return torch.randn(B, S, D, dtype=FORMATS[dtype]), torch.randint(0, V, (B, S))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("B", "S", "V"), SIZES)
def test_step_matches_transformers(B, S, V, dtype):
    module, inputs = Module(V, dtype), batch(B, S, V, dtype)
    optimizer = sgd(module.parameters())

    def step():
        module(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured, _ = peak_bytes(step, CPU)
    declared = above_sources(cg.training_step(head(V, dtype), "transformers", cg.SGD()), B=B, S=S, D=D)
    assert declared + 4 == measured  # and the total weight of labels, a scalar
    graph = trace(module, *inputs, dims=[("B", "S", None), ("B", "S")], train=True, optimizer=sgd)
    assert above_sources(graph, B=B, S=S) == measured


@pytest.mark.parametrize(("B", "S", "V"), SIZES)
def test_forward_pass_keeps_logits_in_both_formats(B, S, V):
    module, inputs = Module(V, "bf16"), batch(B, S, V, "bf16")

    def evaluate():
        with torch.no_grad():
            return module(*inputs)

    evaluate()
    measured, _ = peak_bytes(evaluate, CPU)
    declared = above_sources(with_loss(head(V), "transformers"), B=B, S=S, D=D)
    contiguous = 8 * S if B == 1 else 0  # the shifted labels of one sequence are a view
    assert declared - contiguous + 8 * B + 4 == measured  # and the padding of each sequence, the total weight
    assert declared > 10 * B * S * V


def test_a_loop_that_keeps_outputs_needs_two_more_bytes_per_logit():
    """docs/howto/fine_tune.md states this difference."""
    B, S, V = 4, 128, 4096
    module, inputs = Module(V, "bf16"), batch(B, S, V, "bf16")

    def step(keep):
        loss, outputs = module.outputs(*inputs)
        if not keep:
            del outputs
        loss.backward()
        module.zero_grad()

    step(keep=False)
    dropped, kept = (peak_bytes(lambda keep=keep: step(keep), CPU)[0] for keep in (False, True))
    assert kept - dropped == 2 * B * S * V


@pytest.mark.parametrize("read", [cg.models.from_config, from_config])
def test_step_of_a_config_matches_the_model(read):
    """A whole step of the transformers class: the loss holds the peak, so the default decides whether it is right."""
    transformers = pytest.importorskip("transformers")
    B, S, V = 2, 64, 2**15
    fields = {**FIELDS, "vocab_size": V, "model_type": "llama", "dtype": "bfloat16"}
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(fields)).train()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer, ids = sgd(model.parameters()), torch.randint(0, V, (B, S))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured, _ = peak_bytes(step, CPU)
    line = cg.timeline(cg.training_step(read(fields), None, cg.SGD()), B=B, S=S)
    derived = line.peak - sum(line.by_role.get(role, 0) for role in ("param", "input", "buffer"))
    assert derived == pytest.approx(measured, rel=0.01)
