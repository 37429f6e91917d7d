"""torch's DistributedDataParallel on two real processes over gloo, as a script.

`python ddp_worlds.py FILE` writes for each case of `CASES` the bytes of each bucket in the fourth step, the number of
its reductions, and the peak of live storages in that step (torch rebuilds its buckets after the first).
"""

import json
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_llama import SIZES, Llama, Seen
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def model(kind):
    """A llama: plain, with tied embeddings, with a frozen embedding, in bf16, or with LoRA."""
    llama = Llama()
    if kind == "tied":
        llama.head.weight = llama.embed.weight
    if kind in ("frozen", "lora"):
        llama.embed.requires_grad_(False)
    if kind == "lora":
        llama.requires_grad_(False)
        for block in llama.layers:
            for name in ("q", "v"):
                setattr(block.attention, name, Lora(getattr(block.attention, name)))
    return llama.bfloat16() if kind == "bf16" else llama


class Lora(torch.nn.Module):
    """A frozen linear layer and a low-rank update."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Train(torch.nn.Module):
    """A model with its loss."""

    def __init__(self, kind):
        super().__init__()
        self.m = model(kind)

    def forward(self, tokens, targets):
        return functional.cross_entropy(self.m(tokens).flatten(0, 1), targets.flatten())


#: Kind of model, tokens per sample, micro-batches, whether each is reduced, and DDP options.
CASES = {
    "copied": ("plain", 32, 1, True, {}),
    "viewed": ("plain", 32, 1, True, {"gradient_as_bucket_view": True}),
    "copied, short": ("plain", 4, 1, True, {}),
    "viewed, short": ("plain", 4, 1, True, {"gradient_as_bucket_view": True}),
    "small buckets": ("plain", 32, 1, True, {"bucket_cap_mb": 0.3}),
    "each": ("plain", 32, 3, True, {}),
    "last": ("plain", 32, 3, False, {}),
    "last, viewed": ("plain", 32, 3, False, {"gradient_as_bucket_view": True}),
    "tied": ("tied", 32, 1, True, {"bucket_cap_mb": 0.3}),
    "frozen": ("frozen", 32, 1, True, {"bucket_cap_mb": 0.3}),
    "bf16": ("bf16", 32, 1, True, {"bucket_cap_mb": 0.1}),
    "lora": ("lora", 32, 1, True, {}),
}  # fmt: skip


def run(kind, length, parts, each, options):
    """Take four steps and record the last."""
    torch.manual_seed(0)
    seen, sizes = Seen(), []
    tokens = torch.zeros(SIZES["B"], length, dtype=torch.long)
    targets = tokens.clone()
    inner = Train(kind)

    def reduced(group, bucket):
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    with seen:
        wrapped = DistributedDataParallel(inner, **options)
        wrapped.register_comm_hook(dist.group.WORLD, reduced)
        optimizer = torch.optim.AdamW([p for p in inner.parameters() if p.requires_grad], lr=1e-3)
        seen.hold(*inner.parameters(), tokens, targets)
        for _ in range(4):
            sizes.clear()
            seen.peak = seen.now
            for i in range(parts):
                wrapped.require_backward_grad_sync = each or i == parts - 1
                wrapped(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"buckets": sorted(Counter(sizes).items()), "peak": seen.peak}


def work(rank, file):
    """Run all cases on one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{file}.store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=1))
    results = {name: run(*case) for name, case in CASES.items()}
    if not rank:
        Path(file).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), RANKS)
