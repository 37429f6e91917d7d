"""Collectives and peaks of torch's own sharding: programs on a process group with one real rank and fake others.

`python sharded_oracles.py sharded_oracles.json DATE` writes for each program its dispatched collectives, counted by
phase, kind, group size and bytes of the whole tensor; and, with an optimizer, the peak of live storages in the third
step. The model is a llama in fp32, `SIZES`.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_llama import SIZES, Llama, Seen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

EXPERTS = {"G": 8, "S": 16, "E": 8, "C": 4, "M": 32, "F": 64}
ATTENTION = {"B": 2, "H": 4, "S": 64, "K": 16}

#: Collectives of a program, and its peak if it trains.
Answer = dict[str, Any]


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, seen: Seen, loss_in: Callable[[], Any] = nullcontext,
    parts: int = 1, each: bool = True,
) -> Answer:  # fmt: skip
    """Take three steps and record the third; each rank has its own tokens.

    A step may have several micro-batches, with gradients reduced after `each` or after the last.
    """
    tokens = torch.zeros(SIZES["B"], SIZES["S"], dtype=torch.long)
    targets = tokens.clone()

    def step() -> None:
        for i in range(parts):
            if not each:
                model.set_requires_gradient_sync(i == parts - 1)  # type: ignore[operator]
            with loss_in():
                seen.phase = "forward"
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                del logits
                seen.phase = "backward"
                loss.backward()
        seen.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()

    seen.hold(*model.parameters(), tokens, targets)
    with seen:
        step()
        step()
        seen.rows.clear()
        seen.peak = seen.now
        step()
    return {"collectives": seen.table(), "peak": seen.peak}


# -- programs --------------------------------------------------------------------------------------------------------


def layouts(sequence: bool, loss: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layouts in torch's tensor parallelism tutorial, with sequence parallelism and a sharded-logits
    loss."""
    activations = Shard(1) if sequence else Replicate()
    last = {"output_layouts": Shard(-1) if loss else Replicate(), "use_local_output": not loss}
    model = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=activations),
             "head": ColwiseParallel(input_layouts=activations, **last)}  # fmt: skip
    block = {
        f"{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    }
    block |= {name: RowwiseParallel(output_layouts=activations) for name in ("attention.proj", "mlp.down")}
    if sequence:
        model["norm"] = SequenceParallel()
        block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        both = {"input_layouts": (activations,), "desired_input_layouts": (Replicate(),)}
        block |= {"attention": PrepareModuleInput(**both), "mlp": PrepareModuleInput(**both)}
    return model, block


def adamw(model: nn.Module, foreach: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)


def tensor(seen: Seen, sequence: bool = False, loss: bool = False) -> Answer:
    """Tensor parallelism on 4 ranks."""
    mesh, model = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), Llama()
    outer, inner = layouts(sequence, loss)
    parallelize_module(model, mesh, outer)
    for block in model.layers:
        parallelize_module(block, mesh, inner)
    # foreach optimizers cannot mix plain tensors, such as the norms without sequence parallelism, with DTensors
    return trained(model, adamw(model, foreach=sequence), seen, loss_parallel if loss else nullcontext)


def fully(
    seen: Seen, shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("dp",), parts: int = 1, each: bool = True,
    **options: Any,
) -> Answer:  # fmt: skip
    """FSDP2 with one unit per block; on a 2D mesh the outer axis replicates."""
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), Llama()
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return trained(model, adamw(model), seen, parts=parts, each=each)


def both(seen: Seen) -> Answer:
    """FSDP2 on 2 ranks with tensor and sequence parallelism on 4."""
    mesh, model = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), Llama()
    outer, inner = layouts(sequence=True, loss=True)
    parallelize_module(model, mesh["tp"], outer)
    for block in model.layers:
        parallelize_module(block, mesh["tp"], inner)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return trained(model, adamw(model), seen, loss_parallel)


def states(seen: Seen) -> Answer:
    """ZeRO-1: data parallelism with optimizer states sharded by parameter."""
    model = DistributedDataParallel(Llama())

    def hook(
        state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[
        torch.Tensor
    ]:  # the C++ reducer cannot read the results of fake collectives: the same all-reduce
        dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=True)
    return trained(model, optimizer, seen)


def experts(seen: Seen) -> Answer:
    """An einsum mixture of experts (GShard) on 4 ranks: tokens and experts are split over the same axis."""
    mesh, (groups, s, e, c, m, f) = init_device_mesh("cuda", (4,)), EXPERTS.values()  # a fake world needs no device

    def local(*sizes: int, grad: bool = True) -> DTensor:
        made = torch.randn(*sizes, device="meta", requires_grad=grad)
        return DTensor.from_local(made, mesh, [Shard(0)], run_check=False)

    x, mask = local(groups // 4, s, m), local(groups // 4, s, e, c, grad=False)
    up, down = local(e // 4, m, f), local(e // 4, f, m)
    with seen:
        seen.phase = "forward"
        sent = torch.einsum("gsec,gsm->gecm", mask.to_local(), x.to_local())
        sent = DTensor.from_local(sent, mesh, [Shard(0)], run_check=False).redistribute(mesh, [Shard(1)])
        hidden = functional.relu(torch.einsum("gecm,emf->gecf", sent.to_local(), up.to_local()))
        back = torch.einsum("gecf,efm->gecm", hidden, down.to_local())
        back = DTensor.from_local(back, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Shard(0)])
        made = torch.einsum("gsec,gecm->gsm", mask.to_local(), back.to_local())
        seen.phase = "backward"
        made.sum().backward()
    return {"collectives": seen.table()}


def dropless(seen: Seen) -> Answer:
    """64 tokens with two experts each on 4 ranks: rows are dispatched to their experts and combined."""
    tokens, chosen, width = 64, 2, EXPERTS["M"]
    rows, splits = torch.randn(tokens * chosen, width, requires_grad=True), [tokens * chosen // 4] * 4
    send = dist._functional_collectives.all_to_all_single_autograd
    with seen:
        seen.phase = "forward"
        there = send(rows, splits, splits, dist.group.WORLD)
        back = send(functional.relu(there), splits, splits, dist.group.WORLD)
        seen.phase = "backward"
        back.sum().backward()
    return {"collectives": seen.table()}


def sequences() -> Iterator[torch.Tensor]:
    """Return queries, keys, values and a gradient for a shard of the sequence."""
    b, h, s, k = ATTENTION.values()
    return (torch.randn(b, h, s // dist.get_world_size(), k) for _ in range(4))


def rotating(seen: Seen, how: str) -> Answer:
    """Ring attention: keys and values are passed around, or all-gathered."""
    q, k, v, grad = sequences()
    ring._cp_options.enable_load_balance = False
    ring.set_rotate_method(how)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def there(query: Any, key: Any, value: Any, is_causal: bool = False, **other: Any) -> Any:
        return forward(query, key, value, 0.0, is_causal)

    def again(
        query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, *, grad_out: Any, **other: Any
    ) -> Any:
        return backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    with seen:
        seen.phase = "forward"
        out, sums, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, there, q, k, v, is_causal=True)
        seen.phase = "backward"
        ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, again, grad, "grad_out", q, k, v, out, sums, is_causal=True
        )
    return {"collectives": seen.table()}


def heads(seen: Seen) -> Answer:
    """Ulysses: from sequence shards to heads and back; on a cuda mesh, where this is an all-to-all."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    q, k, v, _ = (t.to("meta").requires_grad_() for t in sequences())
    with seen:
        seen.phase = "forward"
        parts = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k, v)]
        local_parts = [t.redistribute(mesh, [Shard(1)]).to_local() for t in parts]
        made = torch.softmax(local_parts[0] @ local_parts[1].mT, -1) @ local_parts[2]
        made = DTensor.from_local(made, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Shard(2)])
        seen.phase = "backward"
        made.to_local().sum().backward()
    return {"collectives": seen.table()}


#: Programs, and their world sizes.
PROGRAMS = {
    "tensor": (4, tensor),
    "tensor, loss parallel": (4, partial(tensor, loss=True)),
    "tensor and sequence": (4, partial(tensor, sequence=True)),
    "tensor and sequence, loss parallel": (4, partial(tensor, sequence=True, loss=True)),
    "fully sharded": (4, fully),
    "fully sharded, root too": (4, partial(fully, reshard_after_forward=True)),
    "fully sharded, root too, on 2": (2, partial(fully, shape=(2,), reshard_after_forward=True)),
    "fully sharded, kept": (4, partial(fully, reshard_after_forward=False)),
    "fully sharded, kept by 2": (4, partial(fully, reshard_after_forward=2)),
    "fully sharded, micro-batches": (4, partial(fully, parts=3)),
    "fully sharded, micro-batches, reduced once": (4, partial(fully, parts=3, each=False)),
    "fully sharded and tensor": (8, both),
    "hybrid": (8, partial(fully, shape=(2, 4), names=("rep", "own"))),
    "states": (4, states),
    "experts": (4, experts),
    "experts, dropless": (4, dropless),
    "context, gathered": (4, partial(rotating, how="allgather")),
    "context, round": (4, partial(rotating, how="alltoall")),
    "context, by heads": (4, heads),
}


def run(name: str) -> Answer:
    """Run a program in its own process group."""
    ranks, program = PROGRAMS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        torch.manual_seed(0)
        return {"ranks": ranks, **program(Seen())}
    finally:
        dist.destroy_process_group()


def main(path: str, date: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    programs = {name: run(name) for name in PROGRAMS}
    head = {"torch": torch.__version__.partition("+")[0], "date": date, "sizes": SIZES, "experts": EXPERTS,
            "attention": ATTENTION}  # fmt: skip
    text = re.sub(r"\{\s+(\"phase\"[^}]*?)\s+\}", lambda row: f"{{{' '.join(row[1].split())}}}",
                  json.dumps(head | {"programs": programs}, indent=1))  # fmt: skip
    Path(path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
