"""A llama in plain torch, and a dispatch mode that records collectives and live storages."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives as fakes
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = {"B": 2, "S": 32, "D": 64, "H": 4, "G": 4, "K": 16, "F": 128, "L": 4, "V": 512}

# -- the model -------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = SIZES["H"] * SIZES["K"]
        self.q, self.k, self.v = (nn.Linear(SIZES["D"], inner, bias=False) for _ in range(3))
        self.proj = nn.Linear(inner, SIZES["D"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, SIZES["K"]).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(SIZES["D"], SIZES["F"], bias=False) for _ in range(2))
        self.down = nn.Linear(SIZES["F"], SIZES["D"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(SIZES["D"]), Attention(), Norm(SIZES["D"]), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIZES["V"], SIZES["D"])
        self.layers = nn.ModuleList([Block() for _ in range(SIZES["L"])])
        self.norm, self.head = Norm(SIZES["D"]), nn.Linear(SIZES["D"], SIZES["V"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


# -- recording ---------------------------------------------------------------------------------------------------------

KINDS = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "allgather_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_out": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all", "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast",
}  # fmt: skip


class Seen(TorchDispatchMode):
    """Collectives by phase, and the bytes of live storages, including those that FSDP resizes."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.rows, self.live, self.now, self.peak = "", Counter(), {}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local ops are dispatched here again
        outputs = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, outputs)) if isinstance(t, torch.Tensor)]
        self.hold(*tensors)
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor") and name in KINDS:
            self.rows[self.phase, KINDS[name], ranks_of(func, args), max(t.nbytes for t in tensors)] += 1
        return outputs

    def hold(self, *tensors: torch.Tensor) -> None:
        """Count the storages of tensors until they are freed."""
        for t in tensors:
            storage = (t._local_tensor if isinstance(t, DTensor) else t).untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self.live[key] = 0
                weakref.finalize(storage, self.gone, key)
            self.now += storage.nbytes() - self.live[key]
            self.live[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)

    def __enter__(self) -> Self:
        self.resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            made = self.resize(storage, size)
            if storage._cdata in self.live:
                self.now += size - self.live[storage._cdata]
                self.live[storage._cdata] = size
                self.peak = max(self.peak, self.now)
            return made

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*raised)

    def table(self) -> list[dict[str, Any]]:
        """Return the recorded rows, ordered by first occurrence."""
        names = ("phase", "collective", "ranks", "bytes")
        return [{**dict(zip(names, row, strict=True)), "times": times} for row, times in self.rows.items()]


def ranks_of(func: Any, args: Any) -> int:
    """Return the number of ranks in a collective."""
    try:
        return fakes.CollectiveOp.get_process_group(func, args).size()
    except Exception:  # collectives unknown to torch's tool have their group name as the last argument
        group = next(a for a in reversed(args) if isinstance(a, str))
        return dist.distributed_c10d._resolve_process_group(group).size()
