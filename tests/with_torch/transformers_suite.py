"""transformers classes with tiny configs, traced and compared with real runs.

    python tests/with_torch/transformers_suite.py [--only NAME ...] [--forward] [--write docs/accuracy/transformers.md]

Each class runs in its own process, forward and, if it returns a loss, as an AdamW step: parameters, matmul FLOPs by
torch's counter, and the peak by the profiler's allocation events. The trace has symbolic sizes and is bound to the
run's sizes, which differ from the traced ones. The module is traced as built, with its default attention.
"""

import argparse
import dataclasses
import inspect
import multiprocessing
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from traced import adamw, held_by, real_peak, stepper
from transformers_classes import MORE, NAMES

import costgraph as cg
from costgraph.errors import CostGraphError
from costgraph.torch import trace

#: Peak differences above this are not due to Python scalars.
SLACK = 4096
LIMIT = 400  # seconds per class
PARTS = ("forward", "step")
VOCABULARY, WIDTH, HEADS, PIXELS = 101, 32, 4, 32

#: Values of config fields by name, for any family that has them.
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

#: Kernels with workspaces outside of tensors: docs/accuracy/workspaces.md.
WORKSPACE = {"convolution", "_scaled_dot_product_flash_attention_for_cpu", "native_group_norm", "logsumexp"}


@dataclasses.dataclass
class Row:
    """One class's results."""

    name: str
    seconds: float = 0.0
    refused: str = ""
    problem: str = ""
    """Why it could not be run for real, which is no matter of the library."""
    found: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Of forward and step: bytes of the real peak less the predicted one, FLOPs of torch's counter less ours."""
    parameters: bool = True
    calls: int = 0
    stated: int = 0
    """Of these calls, those that no declared kind says."""
    kernels: list[str] = dataclasses.field(default_factory=list)
    """Kernels with workspace among its calls: what a peak that is larger than predicted is named after."""

    @property
    def says(self) -> str:
        """Return the problem of a class, "" if there is none."""
        if self.problem or self.refused:
            return self.problem or self.refused
        return self.off

    @property
    def off(self) -> str:
        """Return the mismatches of a traced run, "" if there are none."""
        wrong = [f"{k}: FLOPs {n:+d}" for k, (_, n) in self.found.items() if n]
        wrong += [f"{k}: peak {n:+d} B" for k, (n, _) in self.found.items() if abs(n) > SLACK]
        return "; ".join([*wrong, *(() if self.parameters else ("parameters",))])


class Called(nn.Module):
    """A model in training: its loss, or without labels all of its outputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = dict(zip(self.names, tensors, strict=False))
        out = self.model(**given, return_dict=True)
        return out.loss if "labels" in given else out


def tiny(config: Any, more: dict[str, Any]) -> Any:
    """Return a config with its numeric fields reduced."""
    defaults = {n: p.default for n, p in inspect.signature(config.__init__).parameters.items()}
    if dataclasses.is_dataclass(config):
        defaults |= {f.name: f.default for f in dataclasses.fields(config)}
    fields = {k: v for k, v in TINY.items() if k in defaults and not isinstance(defaults[k], list | tuple)}
    if "hidden_sizes" in defaults:
        fields.pop("hidden_size", None)
    return config(**{k: v for k, v in (fields | more).items() if v is not None})


# -- model inputs ------------------------------------------------------------------------------------------------------


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
#: Batch and length in the trace, and in the run.
Sizes = tuple[tuple[int, int], tuple[int, int]]
FEW: Sizes = (2, 13), (3, 17)
CHUNKS: Sizes = (2, 200), (3, 270)
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


def convolution_backward(grad: Any, x: Any, weight: Any, bias: Any, *rest: Any, out_shape: Any = None) -> int:
    transposed, mask = rest[3], rest[6]
    slid = x if transposed else grad
    return sum(mask[:2]) * 2 * slid[0] * prod(slid[2:]) * prod(weight)


#: Kernels without a formula in torch's counter, or with one that ignores groups: docs/howto/flop_counter.md.
UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    torch.ops.aten._grouped_mm: grouped,
    torch.ops.aten.convolution_backward: convolution_backward,
}


# -- a single class ----------------------------------------------------------------------------------------------------


def run(name: str, parts: Sequence[str] = PARTS) -> Row:
    """Trace a class and run it."""
    import transformers

    row, start = Row(name), time.process_time()
    try:
        cls = getattr(transformers, name)
        model = cls(tiny(cls.config_class, MORE.get(name, {})))
        inputs = next(v for k, v in FAMILIES.items() if k in name)
        _compare(row, parts, model, inputs, FEW)
        if row.refused and not row.found:  # loops over chunks of positions are refused if there is a single chunk
            again = Row(name)
            with suppress(Exception):  # a tiny model may lack such positions
                _compare(again, parts, model, inputs, CHUNKS)
            row = again if again.found else row
    except Exception as error:
        row.problem = f"{type(error).__name__}: {str(error)[:300]}"
    row.seconds = time.process_time() - start
    return row


def _compare(row: Row, parts: Sequence[str], model: nn.Module, inputs: Inputs, sizes: Sizes) -> None:
    for what in parts:
        if not _compared(row, what, model, inputs, sizes):
            break


def _compared(row: Row, what: str, model: nn.Module, inputs: Inputs, sizes: Sizes) -> bool:
    train = what == "step"
    torch.manual_seed(0)
    model.train(train)
    small, large = ({k: v for k, v in inputs(B, S).items() if train or k != "labels"} for B, S in sizes)
    if train and "labels" not in small:
        return False
    module = Called(model, tuple(small))
    given = tuple(large.values())
    optimizer = adamw(model.parameters()) if train else None
    with torch.set_grad_enabled(train):
        outputs = module(*given)
    if train and (not isinstance(outputs, torch.Tensor) or outputs.ndim):
        return False
    try:
        dims = [dims_of(k, t) for k, t in small.items()]
        graph = trace(module, *small.values(), dims=dims, train=train, optimizer=adamw if train else None)
    except CostGraphError as error:
        row.refused = f"{what}: {error!s}"
        return False
    bound = {n: v for n, v in zip("BS", sizes[1], strict=True) if any(n in d for d in dims)}
    row.parameters &= cg.param_count(graph) == sum(p.numel() for p in model.parameters())
    run = stepper(module, given, optimizer)
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        run()  # the optimizer's state exists afterwards
    flops = counter.get_total_flops() - cg.matmul_flops(graph, count="full", **bound)
    row.found[what] = real_peak(run, *held_by(module, given, optimizer)) - cg.peak_memory(graph, **bound), flops
    kinds = [op.kind.name for op in graph.ops if op.kind.name != "keep_alive"]
    row.calls, row.stated = row.calls + len(kinds), row.stated + kinds.count("custom_call")
    called = {re.sub(r"_\d+\Z", "", op.name.rpartition("/")[2]) for op in graph.ops}
    row.kernels = sorted({*row.kernels, *called} & WORKSPACE)
    return True


def _warm() -> None:
    """Preload torch and transformers before processes are forked."""
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
    module = Called(nn.Linear(5, 7), ())
    module.forward = lambda x: module.model(x).softmax(-1).sum()  # type: ignore[method-assign]
    module.train()
    trace(module, torch.zeros(2, 5), dims=[("B", None)], train=True, optimizer=adamw)


def results(names: Sequence[str], parts: Sequence[str] = PARTS) -> Iterator[Row]:
    """Run classes one after another, each in its own process."""
    _warm()
    context = multiprocessing.get_context("fork")
    for name in names:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda end, n: end.send(run(n, parts)), args=(theirs, name))
        process.start()
        theirs.close()
        try:
            yield mine.recv() if mine.poll(LIMIT) else Row(name, LIMIT, problem=f"takes more than {LIMIT} s")
        except EOFError:
            yield Row(name, problem="the process ended")
        process.kill()
        process.join()


# -- the page --------------------------------------------------------------------------------------------------------

HEAD = """# Transformers classes

Can costgraph trace your Hugging Face model? Each class below was built with a tiny configuration, traced with symbolic
sizes, and run at other sizes: a forward pass without gradients and, if the class returns a loss, a step of AdamW. If
the step's cell is empty, the class returns no scalar loss or ran with `--forward`.

{traced} classes are traced, {equal} of them with equal FLOPs and peaks within 4 KiB; {refused} are refused. For {half}
of the traced classes the step is refused; derive it from the trace of the forward pass
([tracing](../concepts/tracing.md)).

```console
$ python tests/with_torch/transformers_suite.py --write docs/accuracy/transformers.md
```

wrote this page with torch {torch} and transformers {transformers} on a CPU. Parameters are equal for all classes.
FLOPs are compared with `FlopCounterMode`, plus the kernels that it ignores. Peaks are the profiler's allocations minus
the prediction, in bytes. If a peak is more than 4 KiB higher, the last column names the kernel that takes a
[workspace](workspaces.md). A lower one was predicted with a mask that transformers creates when traced, but at run
time only if needed. If a class cannot be traced with 13 positions, it is traced with 200, several chunks of a chunked
loop.

| class | FLOPs | peak, forward | peak, step | kernels |
|---|---|---:|---:|---|
"""


def page(rows: list[Row]) -> str:
    """Return the table as Markdown, without classes that transformers itself fails to run."""
    import transformers

    rows = sorted((r for r in rows if not r.problem), key=lambda r: r.name)
    traced = [r for r in rows if r.found]
    head = HEAD.format(
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        traced=len(traced),
        equal=sum(not r.off for r in traced),
        refused=len(rows) - len(traced),
        half=sum(bool(r.refused) for r in traced),
    )
    refused = "".join(f"| {r.name} | {_short(r.refused)} |\n" for r in rows if r.refused)
    return head + "".join(map(_line, traced)) + "\n## Refused\n\n| class | reason |\n|---|---|\n" + refused


def _line(row: Row) -> str:
    peaks = [f"{row.found[k][0]:,}" if k in row.found else "" for k in ("forward", "step")]
    off = any(n > SLACK for n, _ in row.found.values())
    peaks = [peak or "refused" * bool(row.refused) for peak in peaks]
    flops = ", ".join(f"{n:+,}" for _, n in row.found.values() if n) or "equal"
    named = ", ".join(f"`{k}`" for k in row.kernels) if off else ""
    return f"| {row.name} | {flops} | {' | '.join(peaks)} | {named} |\n"


def _short(text: str) -> str:
    """Return an error text without local file paths."""
    text = re.sub(r"\S*/site-packages/", "", text).replace("|", "\\|").replace("\n", " ")
    return text if len(text) < 330 else text[:330] + " ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME", help="classes to run, by default all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument("--forward", action="store_true", help="no steps of training")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for row in results(given.only, PARTS[:1] if given.forward else PARTS):
        rows.append(row)
        print(f"{row.name} {row.seconds:.1f} s {row.found} {row.says}", flush=True)
    if given.write is not None:
        given.write.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
