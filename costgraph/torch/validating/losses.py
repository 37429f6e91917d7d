"""Losses of plain torch, with the layer that makes their logits or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from .program import Program

__all__ = ["LOSSES"]

_ROWS = {"R": ("B*T", "BT", "seq_len"), "V": ("V", "vocab_size")}
_HEAD = {"R": ("BT", "B*T", "seq_len"), "H": ("H", "hidden_size"), "V": ("V", "vocab_size")}


def _head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(x, weight), targets)


def _divergence(log_q: torch.Tensor, log_p: torch.Tensor, half: float = 0.5) -> torch.Tensor:
    """Jensen and Shannon's, of two logarithms of probabilities: op by op, as `KLDivLoss` has it."""
    log_p, log_q = log_p.to(torch.float32), log_q.to(torch.float32)
    m = torch.lerp(torch.exp(log_p), torch.exp(log_q), half)
    first = functional.kl_div(torch.log(m), log_p, reduction="batchmean", log_target=True)
    return half * first + (1 - half) * functional.kl_div(torch.log(m), log_q, reduction="batchmean", log_target=True)


def _divergence_of_rows(log_q: torch.Tensor, log_p: torch.Tensor, half: float = 0.5) -> torch.Tensor:
    """The same, summed row by row."""
    log_p, log_q = log_p.to(torch.float32), log_q.to(torch.float32)
    m = torch.lerp(torch.exp(log_q), torch.exp(log_p), half)
    first = half * functional.kl_div(torch.log(m), log_p, reduction="none", log_target=True).sum(-1)
    loss = first + (1 - half) * functional.kl_div(torch.log(m), log_q, reduction="none", log_target=True).sum(-1)
    return (loss / log_q.shape[0]).sum()


def _divergence_loss(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, target: of(x.log_softmax(-1), target)


def _relative_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.kl_div(x.log_softmax(-1), target, reduction="batchmean")


def _variation(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p = x.softmax(-1)
    tvd = torch.abs(p - target) / 2.0
    return torch.sum(tvd) / p.size(0)


def _distilled_divergence(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(
        x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor
    ) -> torch.Tensor:
        logits = functional.linear(x, weight)
        teacher_logits = functional.linear(teacher, teacher_weight)
        log_q = torch.log_softmax(logits / 1.0, dim=-1)
        log_p = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return of(log_q, log_p).to(x.dtype)

    return call


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = targets != -100
    targets = torch.where(targets == -100, 0, targets)
    each = torch.gather(logits.log_softmax(-1), 2, targets.unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1) / mask.sum(-1)


def _preferred(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the first half of a batch, and a loss of its log-probabilities over those of the second."""
    half = x.shape[0] // 2
    made = x @ weight.t()
    logits = made.float()
    chosen = functional.cross_entropy(logits[:half].view(-1, logits.shape[-1]), targets[:half].view(-1))
    found = _log_probabilities(logits, targets)
    del made
    losses = -functional.logsigmoid(0.1 * (found[:half] - found[half:]))
    return chosen + losses.mean()


def _policy(level: str) -> Callable[..., torch.Tensor]:
    """A clipped ratio of probabilities to those of a reference, of each token or of a sequence."""

    def call(
        x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor,
        other: torch.Tensor, other_weight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        logits = x @ weight.t()
        log_probs = functional.log_softmax(logits.float(), dim=-1)
        each = log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            other_logits = other @ other_weight.t()
            other_log_probs = functional.log_softmax(other_logits.float(), dim=-1)
            other_each = other_log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        ratio = each - each.detach()
        if level == "sequence":
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        first = torch.exp(ratio)
        second = torch.clamp(first, 0.8, 1.2)
        wanted = advantages.unsqueeze(1)
        loss = -torch.min(first * wanted, second * wanted)
        away = torch.exp(other_each - each) - (other_each - each) - 1.0
        return ((loss + 0.1 * away) * mask).sum() / mask.sum().clamp(min=1.0)

    return call


def _distilled(soft: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Cross-entropy, and a distance of logits from those of a teacher."""

    def call(
        x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        made = x @ weight.t()
        with torch.no_grad():
            teacher_made = teacher @ teacher_weight.t()
        logits, teacher_logits = made.float(), teacher_made.float()
        hard = functional.cross_entropy(logits, targets)
        del made, teacher_made
        logits /= 1.0
        teacher_logits /= 1.0
        return 0.5 * hard + 0.5 * soft(logits, teacher_logits)

    return call


def _away(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """One less the cosine of the angle between two rows, in the mean."""
    norm, teacher_norm = (functional.normalize(each, p=2, dim=-1) for each in (logits, teacher_logits))
    return (1.0 * (1 - functional.cosine_similarity(norm, teacher_norm, dim=-1))).mean()


def _mixed(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Jensen and Shannon's divergence, as a mixture of probabilities."""
    log_q, log_p = functional.log_softmax(logits, dim=-1), functional.log_softmax(teacher_logits, dim=-1)
    m = 0.5 * log_q.exp() + (1 - 0.5) * log_p.exp()
    m = m.log()
    q = functional.kl_div(m, log_q, reduction="batchmean", log_target=True)
    p = functional.kl_div(m, log_p, reduction="batchmean", log_target=True)
    return 0.5 * p + 0.5 * q


_PREFERRED: dict[str, Any] = {
    "tensors": {"x": "(2 P) T H", "weight": "V H", "targets": "(2 P) T ids"},
    "sizes": {"P": ("B/2",), "H": ("H", "hidden_size"), "V": ("V", "vocab_size")},
    "kept": ("V H",), "freed": True, "refused": "2.2 GB of other allocations are counted",
}  # fmt: skip

_DISTILLED: dict[str, Any] = {
    "tensors": {
        "x": "R G", "weight": "V G", "teacher": "R H fixed", "teacher_weight": "V H fixed", "targets": "R ids",
    },
    "sizes": _HEAD | {"G": ("H/2", "hidden_size/2")}, "freed": True, "kept": ("V G", "V H", "R G", "R G"),
}  # fmt: skip
_POLICY: dict[str, Any] = {
    "tensors": {
        "x": "B T H", "weight": "V H", "chosen": "B T ids", "mask": "B T float32 fixed", "advantages": "B fixed",
        "other": "B T H fixed", "other_weight": "V H fixed",
    },
    "sizes": {"H": ("H", "hidden_size"), "V": ("V", "vocab_size")}, "freed": True, "kept": ("V H", "V H"),
}  # fmt: skip

_DISTANCE: dict[str, Any] = {
    "tensors": {"x": "R V", "target": "R V fixed"}, "sizes": _ROWS, "format": "float32",
    "untimed": "it is timed without what its inputs are made by",
}  # fmt: skip

LOSSES: dict[str, Program] = {
    "cross_entropy": Program(
        "losses", functional.cross_entropy, {"x": "R V", "targets": "R ids"}, (), _ROWS, "float32", freed=True,
    ).since("2026-05-15"),
    "fused_linear_cross_entropy": Program(
        "losses", _head_loss, {"x": "R H", "weight": "V H", "targets": "R ids"}, (), _HEAD,
        kept=("V H",), freed=True,
    ).since("2026-05-15"),
    "jsd": Program("losses", _divergence_loss(_divergence), **_DISTANCE).since(
        "2024-10-15", call=_divergence_loss(_divergence_of_rows)
    ),
    "kl_div": Program("losses", _relative_entropy, **_DISTANCE),
    "tvd": Program("losses", _variation, **_DISTANCE),
    "fused_linear_jsd": Program(
        "losses", _distilled_divergence(_divergence),
        {"x": "R H", "weight": "V H", "teacher": "R H fixed", "teacher_weight": "V H"}, (), _HEAD, freed=True,
    ).since("2024-10-15", call=_distilled_divergence(_divergence_of_rows), freed=True),
    "distill_cosine_loss": Program("losses", _distilled(_away), **_DISTILLED),
    "distill_jsd_loss": Program(
        "losses", _distilled(_mixed), **_DISTILLED, refused="the program of then was not published",
    ).since("2025-01-31", refused="", drawn=False, freed=True, kept=_DISTILLED["kept"]),
    "fused_linear_grpo_loss_token": Program("losses", _policy("token"), **_POLICY),
    "fused_linear_grpo_loss_sequence": Program("losses", _policy("sequence"), **_POLICY),
    **{f"fused_linear_{name}_loss": Program("losses", _preferred, **_PREFERRED) for name in ("cpo", "orpo", "simpo")},
}  # fmt: skip
