"""Public modules for the zoo's recurrent models, one for each preset."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lazy import lazy_import
from recurrent_modules import RWKV7, XLSTM, LinearTransformer, WordLanguageModel
from shared import load
from torch import nn
from zoo_reference import Reference

transformers = lazy_import("transformers")

_BATCH, _STEPS = 2, 3  # number of iterations traced for modules that loop over positions


def _tokens(words: int, steps: int = _STEPS) -> tuple[torch.Tensor]:
    return (torch.zeros(_BATCH, steps, dtype=torch.int64).clamp(max=words - 1),)


def _reference(
    name: str, module: Callable[..., nn.Module], steps: int = _STEPS, **options: Any
) -> Callable[[], Reference]:
    """Build a module from the sizes of a preset."""

    def build() -> Reference:
        sizes = load(name, **options).defaults
        return Reference(
            partial(module, sizes), partial(_tokens, sizes["V"], steps), {"B": _BATCH, "S": steps}, options
        )

    return build


def mamba(sizes: dict[str, int]) -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=sizes["V"], hidden_size=sizes["D"], num_hidden_layers=sizes["L"], state_size=sizes["N"],
            use_cache=False,
        )
    )  # fmt: skip


def mamba2(sizes: dict[str, int]) -> nn.Module:
    return transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=sizes["V"], hidden_size=sizes["D"], num_hidden_layers=sizes["L"], state_size=sizes["N"],
            num_heads=sizes["H"], head_dim=sizes["K"], n_groups=sizes["G"], chunk_size=sizes.get("Q", 256),
            tie_word_embeddings=sizes["G"] == 1, use_cache=False,  # Codestral has groups and an untied head
        )
    )  # fmt: skip


def xlstm_large(sizes: dict[str, int]) -> nn.Module:
    config = transformers.xLSTMConfig(
        vocab_size=sizes["V"], hidden_size=sizes["D"], num_hidden_layers=sizes["L"], use_cache=False
    )
    return transformers.xLSTMForCausalLM(config)


def rwkv7(sizes: dict[str, int]) -> nn.Module:
    ranks = {n: sizes[f"R_{n}"] for n in "wavg"}
    return RWKV7(sizes["D"], sizes["K"], sizes["F"], sizes["L"], sizes["V"], ranks)


def linear_attention(sizes: dict[str, int]) -> nn.Module:
    return LinearTransformer(*(sizes[n] for n in "DHFLVP"))


def word_model(cell: type[nn.RNNBase], sizes: dict[str, int]) -> nn.Module:
    return WordLanguageModel(cell, sizes["D"], sizes["L"], sizes["V"])


def xlstm(slstm: tuple[int, ...], sizes: dict[str, int]) -> nn.Module:
    return XLSTM(*(sizes.get(n, 0) for n in "DHFLV"), slstm)  # without sLSTM there is no F


_PLACES = {"125m": (3, 20)}

REFERENCES: dict[str, Callable[[], Reference]] = {
    **{n: _reference(n, mamba) for n in (f"mamba-{size}" for size in ("130m", "370m", "790m", "1.4b", "2.8b"))},
    # two chunks at transformers' default size
    **{
        n: _reference(n, mamba2, 512, form="chunked", scan="ops")
        for n in (f"mamba2-{size}" for size in ("130m", "370m", "780m", "1.3b", "2.7b"))
    },
    "mamba-codestral-7b": _reference("mamba-codestral-7b", mamba2, 512, form="chunked", scan="ops"),
    # below a chunk, transformers runs position by position
    "xlstm-7b": _reference("xlstm-7b", xlstm_large, scan="ops"),
    **{f"xlstm-{n}": _reference(f"xlstm-{n}", partial(xlstm, ())) for n in ("125m", "350m", "760m", "1.3b")},
    **{
        f"xlstm-{n}-7-1": _reference(f"xlstm-{n}-7-1", partial(xlstm, _PLACES.get(n, (3, 5, 7, 40, 42, 44))))
        for n in ("125m", "350m", "760m", "1.3b")
    },
    **{n: _reference(n, rwkv7) for n in (f"rwkv-7-{size}" for size in ("0.1b", "0.4b", "1.5b", "2.9b"))},
    **{n: _reference(n, linear_attention) for n in ("linear-attention-mnist", "linear-attention-cifar10")},
    **{
        f"{kind}-ptb-{size}": _reference(f"{kind}-ptb-{size}", partial(word_model, cell))
        for kind, cell in (("lstm", nn.LSTM), ("gru", nn.GRU))
        for size in ("small", "medium", "large")
    },
}
