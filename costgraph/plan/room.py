"""How much fits: parameters into memory, tokens into files; any argument may be a symbol."""

from __future__ import annotations

import os

import sympy

from ..analysis.training import given
from ..bind.evaluate import Formula, answer
from ..hardware.specs import Hardware, load_hardware

__all__ = ["dataset_bytes", "dataset_tokens", "largest_params"]


def largest_params(memory: object, bytes_per_param: Formula, *, devices: Formula = 1) -> Formula:
    """Return how many parameters fit, state of training alone: activations come on top.

    Parameters
    ----------
    memory : str, path-like, Hardware, number or sympy.Expr
        A device, whose usable memory (`Hardware.capacity`) counts, or bytes.
    bytes_per_param : number or sympy.Expr
        Bytes that a parameter takes, such as `costgraph.bytes_per_param(step)`.
    devices : number or sympy.Expr
        How many share the state evenly.

    Returns
    -------
    int or sympy.Expr
        Parameters, rounded down.

    Raises
    ------
    BindingError, SpecError
        If an amount is not positive, or the device is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-8b"), precision="bf16")
    >>> cg.plan.largest_params("h100-sxm", 16, devices=8)
    42508746752
    >>> cg.plan.largest_params("h100-sxm", cg.bytes_per_param(step), devices=8)
    56678329002
    >>> cg.plan.largest_params(cg.dims("M"), 16)
    floor(M/16)
    """
    if isinstance(memory, str | os.PathLike | Hardware):
        memory = load_hardware(memory).capacity().value
    room = given("largest_params: memory", memory) * given("largest_params: devices", devices)
    return answer(sympy.floor(room / given("largest_params: bytes_per_param", bytes_per_param)))


def dataset_bytes(tokens: Formula, bytes_per_token: Formula) -> Formula:
    """Return the bytes of a data set.

    Parameters
    ----------
    tokens : number or sympy.Expr
        How many there are.
    bytes_per_token : number or sympy.Expr
        Such as 2 for token numbers below 65,536, or 4 of text.

    Returns
    -------
    int, float or sympy.Expr
        Bytes.

    Raises
    ------
    BindingError
        If an amount is not positive.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.plan.dataset_bytes(15e12, 4)
    60000000000000
    """
    each = given("dataset_bytes: bytes_per_token", bytes_per_token)
    return answer(given("dataset_bytes: tokens", tokens) * each)


def dataset_tokens(size: Formula, bytes_per_token: Formula) -> Formula:
    """Return the tokens in a data set of some bytes.

    Parameters
    ----------
    size : number or sympy.Expr
        Bytes.
    bytes_per_token : number or sympy.Expr
        Such as 2 for token numbers below 65,536, or 4 of text.

    Returns
    -------
    int, float or sympy.Expr
        Tokens, not rounded.

    Raises
    ------
    BindingError
        If an amount is not positive.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.plan.dataset_tokens(2.8e12, 2)
    1400000000000
    """
    each = given("dataset_tokens: bytes_per_token", bytes_per_token)
    return answer(given("dataset_tokens: bytes", size) / each)
