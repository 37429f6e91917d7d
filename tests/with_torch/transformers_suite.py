"""Classes of transformers, each with a tiny configuration, traced and held to real runs.

    python tests/with_torch/transformers_suite.py [--only NAME ...] [--write docs/transformers.md]

A class runs in a process of its own, forward and, where it returns a loss, as a step of AdamW: parameters, matmul FLOPs
by torch's counter, and the peak by the profiler's allocation events. The trace is made with sizes as symbols and bound
to the sizes of the run, which are others. What is traced is the module as it is built: with its default attention.
"""

import dataclasses
import inspect
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from traced import adamw, held_by, real_peak, stepper

import costgraph as cg
from costgraph.errors import CostGraphError
from costgraph.torch import trace

#: Beyond that a difference of peaks is no matter of Python's numbers.
SLACK = 4096
LIMIT = 40  # seconds for one class
VOCABULARY, WIDTH, HEADS, PIXELS = 101, 32, 4, 32

#: Fields of configurations by their names, in any family that has them.
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "bos_vocab_size", "text_vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim", "emb_dim", "embedding_size",
                     "n_embed", "hidden_dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner",
                     "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
                     "shared_intermediate_size", "mlp_hidden_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), WIDTH // HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "cls_token_id",
                     "sep_token_id", "mask_token_id"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    "mamba_d_state": 8, "state_size": 8, "ssm_state_size": 8, "mamba_dt_rank": 4, "mamba_chunk_size": 8,
    "mamba_n_groups": 1, "chunk_size": 8, "type_vocab_size": 2, "image_size": PIXELS, "patch_size": 8,
    "num_channels": 3, "use_cache": False, "sliding_window": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32,
}  # fmt: skip

#: What a class needs besides.
MORE: dict[str, dict[str, Any]] = {}


@dataclasses.dataclass
class Row:
    """What was found of a class."""

    name: str
    seconds: float = 0.0
    refused: str = ""
    problem: str = ""
    """Why it could not be run for real, which is no matter of the library."""
    found: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Of forward and step: bytes of the real peak less the predicted one, FLOPs of torch's counter less ours."""
    parameters: bool = True


class Called(nn.Module):
    """A model as it is trained: its loss, or without labels all that it returns."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = dict(zip(self.names, tensors, strict=False))
        out = self.model(**given, return_dict=True)
        return out.loss if "labels" in given else out


def tiny(config: Any, more: dict[str, Any]) -> Any:
    """Return a configuration with small numbers in the fields that hold a number."""
    defaults = {n: p.default for n, p in inspect.signature(config.__init__).parameters.items()}
    if dataclasses.is_dataclass(config):
        defaults |= {f.name: f.default for f in dataclasses.fields(config)}
    own = {k: v for k, v in TINY.items() if k in defaults and not isinstance(defaults[k], list | tuple)}
    if "hidden_sizes" in defaults:
        own.pop("hidden_size", None)
    return config(**{k: v for k, v in (own | more).items() if v is not None})


# -- what models are called with -------------------------------------------------------------------------------------


def tokens(B: int, S: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (B, S))
    return {"input_ids": ids, "labels": ids}


def one_label(B: int, S: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (B, S)), "labels": torch.randint(0, 2, (B,))}


def both_sides(B: int, S: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (B, S))
    return {"input_ids": ids, "decoder_input_ids": ids, "labels": ids}


def images(B: int, S: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(B, 3, PIXELS, PIXELS), "labels": torch.randint(0, 2, (B,))}


def audio(B: int, S: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.rand(B, 1600)}


Inputs = Callable[[int, int], dict[str, torch.Tensor]]
FAMILIES: dict[str, Inputs] = {
    "CausalLM": tokens, "LMHeadModel": tokens, "MaskedLM": tokens, "ConditionalGeneration": both_sides,
    "SequenceClassification": one_label, "ImageClassification": images, "CTC": audio,
}  # fmt: skip


def dims_of(name: str, t: torch.Tensor) -> list[str | None]:
    return [*"BS"][: t.ndim] if "ids" in name or name == "labels" else ["B", *[None] * (t.ndim - 1)]


# -- torch's counter ---------------------------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return sdpa_flop_count(q, k, v)


def attention_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def grouped(a: Any, b: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    rows, inner, columns = a[-2], a[-1], b[-1]
    return 2 * rows * inner * columns


#: Kernels that torch's counter does not know, docs/flop_counter.md, with its own formulas for their like.
UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    torch.ops.aten._grouped_mm: grouped,
}


# -- one class -------------------------------------------------------------------------------------------------------


def run(name: str) -> Row:
    """Trace a class and run it."""
    import transformers

    row, start = Row(name), time.perf_counter()
    try:
        cls = getattr(transformers, name)
        model = cls(tiny(cls.config_class, MORE.get(name, {})))
        inputs = next(v for k, v in FAMILIES.items() if k in name)
        for what in ("forward", "step"):
            if not _compared(row, what, model, inputs):
                break
    except Exception as error:
        row.problem = f"{type(error).__name__}: {str(error)[:300]}"
    row.seconds = time.perf_counter() - start
    return row


def _compared(row: Row, what: str, model: nn.Module, inputs: Inputs) -> bool:
    train = what == "step"
    torch.manual_seed(0)
    model.train(train)
    small, large = ({k: v for k, v in inputs(B, S).items() if train or k != "labels"} for B, S in ((2, 13), (3, 17)))
    if train and "labels" not in small:
        return False
    module = Called(model, tuple(small))
    given = tuple(large.values())
    optimizer = adamw(model.parameters()) if train else None
    with torch.set_grad_enabled(train):
        made = module(*given)
    if train and (not isinstance(made, torch.Tensor) or made.ndim):
        return False
    try:
        dims = [dims_of(k, t) for k, t in small.items()]
        graph = trace(module, *small.values(), dims=dims, train=train, optimizer=adamw if train else None)
    except CostGraphError as error:
        row.refused = f"{what}: {error!s}"
        return False
    sizes = {n: v for n, v in (("B", 3), ("S", 17)) if any(n in d for d in dims)}
    row.parameters &= cg.param_count(graph) == sum(p.numel() for p in model.parameters())
    run = stepper(module, given, optimizer)
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        run()  # the optimizer's state exists afterwards
    flops = counter.get_total_flops() - cg.matmul_flops(graph, count="full", **sizes)
    row.found[what] = real_peak(run, *held_by(module, given, optimizer)) - cg.peak_memory(graph, **sizes), flops
    return True


def _warm() -> None:
    """Let torch and transformers load what all classes need, before processes are made."""
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
    module = Called(nn.Linear(5, 7), ())
    module.forward = lambda x: module.model(x).softmax(-1).sum()  # type: ignore[method-assign]
    module.train()
    trace(module, torch.zeros(2, 5), dims=[("B", None)], train=True, optimizer=adamw)


def results(names: list[str]) -> Iterator[Row]:
    """Run classes one after another, each in a process of its own."""
    _warm()
    context = multiprocessing.get_context("fork")
    for name in names:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda end, n: end.send(run(n)), args=(theirs, name))
        process.start()
        theirs.close()
        try:
            yield mine.recv() if mine.poll(LIMIT) else Row(name, LIMIT, problem=f"takes more than {LIMIT} s")
        except EOFError:
            yield Row(name, problem="the process ended")
        process.kill()
        process.join()
