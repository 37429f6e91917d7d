"""Policies: which number formats training keeps parameters, activations, gradients and optimizer state in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, NamedTuple

from ...algebra.symbols import shown
from ...dtypes import DTYPES, DType, promote
from ...dtypes import dtype as find_dtype
from ...errors import CostGraphError, FormatError, GraphError
from ...graph.arguments import need_choice, need_flag, need_name
from ...graph.tensor import Tensor
from ...notation.door import READ, guarded
from .autocast import DEVICES, autocast_list

__all__ = ["POLICIES", "ParamFormats", "Policy", "find_policy"]

_SINGLE = ("params", "compute", "grads", "master", "moments", "matmul", "grad_matmul")


class ParamFormats(NamedTuple):
    """Number formats of what belongs to one parameter in training."""

    param: DType
    """the parameter"""
    grad: DType
    """its gradient, as kept for the optimizer"""
    master: DType | None
    """the optimizer's own copy of it; None where there is none"""
    moments: DType
    """optimizer state of its shape"""


@guarded()
@dataclass(frozen=True)
class Policy:
    """Number formats of training. None stands for what the graph declares.

    Parameters
    ----------
    name : str
        Name in reports and errors.
    params : str, optional
        Format of the parameters that are declared in the graph's default format.
    compute : str, optional
        Format of inputs, buffers and activations in the default format. Where it is not that of the parameters and
        there is no autocast, each parameter is cast once before its first use.
    grads : str, optional
        Format that gradients of parameters are kept in; None: each in its parameter's.
    master : str, optional
        Format of a copy of the parameters that the optimizer keeps and updates; None: no copy. A parameter that is
        as wide itself gets none.
    moments : str, optional
        Format of optimizer state; None: that of the master copy, or of the parameter.
    autocast : mapping of str to str, optional
        Ops that run in another format: by a word of `costgraph.transforms.precision.autocast.WORDS`, or the name of
        a kernel or opaque op of the graph. None: every op runs in the format that it is given.
    autocast_device : str
        cuda or cpu: where torch converts within a kernel and where it launches a cast.
    loss_scaling : bool
        Whether the loss is multiplied by a scale, which the optimizer divides gradients by.
    scopes : mapping of str to str
        Formats of parts of the model: their parameters are kept in it and their ops run in it, without autocast.
    matmul : str, optional
        Format that both operands of linear layers are quantized to, with a scale for each tensor.
    grad_matmul : str, optional
        Format that the incoming gradient of such a layer is quantized to before its two products; None: `matmul`'s.

    Raises
    ------
    FormatError
        If a format is unknown or holds no fractions.
    GraphError
        If another argument is none.

    Examples
    --------
    >>> from costgraph.transforms.precision.policy import Policy
    >>> Policy("lean", params="fp32", grads="bf16", moments="fp32").grads
    'bf16'
    """

    name: str
    params: str | None = None
    compute: str | None = None
    grads: str | None = None
    master: str | None = None
    moments: str | None = None
    autocast: Annotated[Mapping[str, str] | None, READ] = field(default=None, hash=False)
    autocast_device: str = "cuda"
    loss_scaling: bool = False
    scopes: Annotated[Mapping[str, str], READ] = field(default_factory=dict, hash=False)
    matmul: str | None = None
    grad_matmul: str | None = None

    def __post_init__(self) -> None:
        need_name("policy", self.name)
        place = f"policy {self.name!r}"
        need_flag(place, loss_scaling=self.loss_scaling)
        need_choice(f"{place}: autocast_device", self.autocast_device, DEVICES)
        for key in _SINGLE:
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _format(f"{place}: {key}", getattr(self, key)))
        for key in ("matmul", "grad_matmul"):
            given = getattr(self, key)
            if given is not None and (DTYPES[given].bits > 8 or DTYPES[given].scale or DTYPES[given].codes):
                raise FormatError(
                    f"{place}: {key} {given!r}, expected a format of 8 bits or fewer without block scales"
                )
        for key in ("autocast", "scopes"):
            given = getattr(self, key)
            if given is None and key == "autocast":
                continue
            if not isinstance(given, Mapping) or not all(isinstance(k, str) for k in given):
                raise GraphError(f"{place}: {key} {shown(given)}, expected a mapping of names to formats")
            found = {k: _format(f"{place}: {key} {k!r}", v) for k, v in given.items()}
            object.__setattr__(self, key, MappingProxyType(found))

    def __reduce__(self) -> tuple[object, ...]:
        # a read-only view of a mapping cannot be pickled
        values = (getattr(self, f.name) for f in fields(self))
        return type(self), tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    @property
    def matmul_dtype(self) -> str | None:
        """Format in which most products run: set by quantized operands, by autocast, or by activations."""
        return self.matmul or (self.autocast or {}).get("matmul") or self.compute

    def scope_format(self, name: str) -> DType | None:
        """Return the format of the innermost named scope that an op or parameter is in, None where it is in none."""
        found = [s for s in self.scopes if name == s or name.startswith(f"{s}/")]
        return find_dtype(self.scopes[max(found, key=len)]) if found else None

    def formats_of(self, param: Tensor) -> ParamFormats:
        """Return the formats of a parameter of a graph that `apply_precision` made with this policy.

        Parameters
        ----------
        param : Tensor
            The parameter, in the format that it is kept in.

        Returns
        -------
        ParamFormats
            A parameter in a format of its own (of a scope, or declared) has its gradient in the wider of that and
            `grads`.

        Raises
        ------
        GraphError
            If it is something else than a parameter.
        """
        if not isinstance(param, Tensor) or param.role != "param":
            raise GraphError(f"policy {self.name!r}: formats of {shown(param)}, expected a parameter")
        own = param.dtype
        grad = own if self.grads is None else find_dtype(self.grads)
        if self.params is not None and own.name != self.params:
            grad = promote(own, grad)
        master = None if self.master is None else find_dtype(self.master)
        if master is not None and promote(own, master) == own:
            master = None
        moments = find_dtype(self.moments) if self.moments is not None else master or own
        return ParamFormats(own, grad, master, moments)


def _format(place: str, value: object) -> str:
    try:
        found = find_dtype(value)
    except CostGraphError as error:
        raise FormatError(f"{place}: {error}") from None
    if found.kind != "float":
        raise FormatError(f"{place}: {found.name!r}, expected a floating format")
    return found.name


def _mixed(name: str, device: str, low: str) -> Policy:
    return Policy(
        name,
        params="fp32",
        compute="fp32",
        autocast=autocast_list(device, low),
        autocast_device=device,
        loss_scaling=low == "fp16",  # a gradient in fp16 underflows, one in bf16 has the range of fp32
    )


def _plain(name: str, device: str) -> Policy:
    formats: dict[str, dict[str, str]] = {
        "fp32": {"params": "fp32", "compute": "fp32"},
        "bf16": {"params": "bf16", "compute": "bf16", "moments": "fp32"},
        "bf16-master": {"params": "bf16", "compute": "bf16", "master": "fp32", "moments": "fp32"},
        "megatron-bf16": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32"},
        "fp8": {
            "params": "bf16", "compute": "bf16", "moments": "fp32", "matmul": "fp8_e4m3", "grad_matmul": "fp8_e5m2",
        },
        "declared": {},
    }  # fmt: skip
    return Policy(name, autocast_device=device, **formats[name])  # type: ignore[arg-type]  # formats are names


#: Names that `find_policy` knows.
POLICIES = ("fp32", "bf16", "bf16-master", "bf16-mixed", "fp16-mixed", "megatron-bf16", "fp8")


def find_policy(policy: object, *, autocast_device: str | None = None) -> Policy:
    """Return the policy that a name or a mapping stands for; a policy is returned as it is.

    Parameters
    ----------
    policy : None, str, mapping or Policy
        None keeps every format as declared. A name of `POLICIES`:

        - fp32: everything in fp32.
        - bf16: weights, activations and gradients in bf16, optimizer state in fp32. Lightning's bf16-true, torch's
          optimizers over a model in bf16, is None on a graph in bf16: the state is in bf16, too. The `bf16=True` of
          transformers' Trainer and of Accelerate is bf16-mixed.
        - bf16-master: the same with a master copy in fp32.
        - bf16-mixed, fp16-mixed: torch.autocast over weights and gradients in fp32, for fp16 with a scaled loss, as
          bf16-mixed and 16-mixed of Lightning.
        - megatron-bf16: weights and activations in bf16; gradients, master copy and optimizer state in fp32.
        - fp8: as bf16, linear layers quantized to E4M3 forward and E5M2 for incoming gradients.

        A mapping such as `{"matmul": "bf16", "softmax": "fp32"}` gives ops formats as autocast does, with the words
        of `costgraph.transforms.precision.autocast.WORDS`, and leaves all else as declared.
    autocast_device : str, optional
        cuda (by default) or cpu, whose lists of ops differ; a Policy states its own.

    Returns
    -------
    Policy
        Of that name; of None it is named declared, of a mapping custom.

    Raises
    ------
    GraphError, FormatError
        If the policy, a device or a format is unknown.

    Examples
    --------
    >>> from costgraph.transforms.precision.policy import find_policy
    >>> find_policy("megatron-bf16").grads, find_policy("fp16-mixed").loss_scaling
    ('fp32', True)
    """
    device = "cuda" if autocast_device is None else autocast_device
    need_choice("policy: autocast_device", device, DEVICES)
    if isinstance(policy, Policy):
        if autocast_device not in (None, policy.autocast_device):
            raise GraphError(
                f"policy {policy.name!r}: autocast_device {device!r}, expected it stated in the policy, which has "
                f"{policy.autocast_device!r}"
            )
        return policy
    if policy is None:
        return _plain("declared", device)
    if isinstance(policy, Mapping):
        return Policy("custom", autocast=policy, autocast_device=device)
    need_choice("policy", policy, POLICIES)
    name = str(policy)
    return _mixed(name, device, name.partition("-")[0]) if name.endswith("-mixed") else _plain(name, device)
