"""What a rule is: one element-wise update, written once, with its scalars, checks and registry.

A rule is two plain functions. The *update* is written in Triton's language over fp32 tiles, with no pointers, masks or
dtypes; `twin` binds the same code to torch operations, which serves every device without Triton and the fp64 checks.
The *scalars* are computed on the host in float64, once per step and parameter group.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_grad_optimizer._messages import shown

try:
    import triton
    import triton.language as tl
except ImportError:  # every rule still has its torch twin
    triton = None
    tl = types.SimpleNamespace()

Hyper = Mapping[str, Any]

# What an update may use of `tl`, besides operators, `divide` and `fma`; the twin sees these names instead of Triton's.
_TORCH_LANGUAGE = types.SimpleNamespace(sqrt=torch.sqrt, abs=torch.abs, where=torch.where, exp=torch.exp)


def divide(a, b):
    """a / b for fp32 tiles, to 2 units in the last place, for 2^-126 <= |b| < 2^126: two instructions on NVIDIA GPUs.

    Triton's own `/` also serves divisors outside this range, which costs six.
    """
    return tl.inline_asm_elementwise("div.approx.ftz.f32 $0, $1, $2;", "=r,r,r", [a, b], tl.float32, True, 1)


def _divide_anywhere(a, b):
    return a / b


def fma(a, b, c):
    """a * b + c, on NVIDIA GPUs in one instruction that rounds once; kernels do not contract `a * b + c` themselves."""
    return tl.fma(a, b, c)


def _multiply_and_add(a, b, c):
    return a * b + c


_ON_NVIDIA = triton is not None and torch.version.hip is None and os.environ.get("TRITON_INTERPRET", "0") != "1"
if triton is not None:
    divide = triton.jit(divide if _ON_NVIDIA else _divide_anywhere)
    fma = triton.jit(fma if _ON_NVIDIA else _multiply_and_add)


def twin(function: Callable) -> Callable:
    """The same code object with `tl` bound to torch functions: runs on tensors of any dtype and device."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, "tl": _TORCH_LANGUAGE, "divide": _divide_anywhere, "fma": _multiply_and_add},
        function.__name__,
    )


@dataclass(frozen=True)
class Update:
    """One element-wise update function: `(h, p, g, *states) -> (p, *states)`.

    Each result ends in arithmetic, not in a negation, `abs` or `where` of a loaded value: stochastic rounding knows
    NaNs by the bits that arithmetic gives them.

    Attributes:
        name: unique name, under which operators find it.
        states: names of the state tensors, in the order of the arguments (torch.optim's names).
        function: the Python source; `twin` is its torch form, `kernel` its `triton.jit` form (None without Triton).
        scalars: `(hyper, step, fresh) -> tuple of float`, the `h` of the update; `fresh` says that the states were
            created for this very step.
        cpu: the same update by one of torch's own fused CPU operators, in place, for fp32:
            `(h, p, g, *states) -> bool`, False where these scalars are not for it. It only saves time.
    """

    name: str
    states: tuple[str, ...]
    function: Callable
    scalars: Callable[[Hyper, int, bool], tuple[float, ...]]
    twin: Callable = field(repr=False)
    kernel: Any = field(repr=False, default=None)
    cpu: Callable | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Rule:
    """An optimizer by name: its hyper-parameters, their checks, and which `Update` they select.

    Attributes:
        name: the name given to `fuse(model, name)`.
        defaults: hyper-parameters with torch.optim's names and defaults.
        validate: raises `ValueError` for values torch.optim would refuse.
        select: the `Update` for these hyper-parameters (SGD without momentum has no state, say).
        updates: every `Update` that `select` can return.
        paper: where the formula comes from.
        needs_step: whether updates depend on how many there were before.
        stated: settings of torch.optim that the rule fixes; saved groups say them.
    """

    name: str
    defaults: Mapping[str, Any]
    validate: Callable[[Hyper], None]
    select: Callable[[Hyper], Update]
    updates: tuple[Update, ...]
    paper: str
    needs_step: bool = False
    stated: Mapping[str, Any] = field(default_factory=dict)


RULES: dict[str, Rule] = {}
UPDATES: dict[str, Update] = {}


def update(
    *,
    states: tuple[str, ...],
    scalars: Callable[[Hyper, int, bool], tuple[float, ...]],
    cpu: Callable | None = None,
) -> Callable:
    """Decorator: registers an update function under its own name, with its torch twin and its Triton form."""

    def register(function: Callable) -> Update:
        function.__globals__.setdefault("tl", tl)  # Triton's interpreter looks for it, used or not
        kernel = triton.jit(function) if triton is not None else None
        UPDATES[function.__name__] = Update(function.__name__, states, function, scalars, twin(function), kernel, cpu)
        return UPDATES[function.__name__]

    return register


def register_rule(rule: Rule) -> Rule:
    RULES[rule.name] = rule
    return rule


def get_rule(name: str) -> Rule:
    """The rule of that name.

    Raises:
        ValueError: no rule has this name; the message lists those there are.
    """
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"rule={shown(name)} is not offered; choose one of {', '.join(sorted(RULES))}")
    return RULES[name]


def number(value: Any) -> float:
    """The value as a float, NaN for what is no number (a string, None, several elements)."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def whole(value: Any) -> int | None:
    """The value as an int, None for a bool and for what is no whole number (a float, a string, several elements)."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def switch(value: Any) -> bool | None:
    """The value as a bool, if it is one of Python or NumPy, 0 or 1; else None."""
    numpy_bool = getattr(getattr(value, "dtype", None), "kind", None) == "b" and value.shape == ()
    if isinstance(value, bool) or numpy_bool:
        return bool(value)
    number = whole(value)
    return bool(number) if number in (0, 1) else None


def check_at_least_zero(hyper: Hyper, *names: str) -> None:
    """Raise `ValueError`, as torch.optim does, when one of these hyper-parameters is not a finite number from 0 on."""
    for name in names:
        if not 0.0 <= number(hyper[name]) < math.inf:
            raise ValueError(f"Invalid {name} value: {shown(hyper[name])}; it must be at least 0, and a finite number")


def check_finite_numbers(hyper: Hyper, *names: str) -> None:
    """Raise `ValueError` when one of these hyper-parameters is not a finite number."""
    for name in names:
        if not math.isfinite(number(hyper[name])):
            raise ValueError(f"Invalid {name} value: {shown(hyper[name])}; a finite number is needed")


def check_betas(hyper: Hyper) -> None:
    """Raise `ValueError` unless "betas" is an indexed collection of any class that holds two numbers in [0, 1)."""
    betas = hyper["betas"]
    indexed = hasattr(betas, "__getitem__") and not isinstance(betas, (str, bytes, Mapping))
    try:
        values = list(itertools.islice(betas, 3)) if indexed else []
    except (TypeError, ValueError, RuntimeError, LookupError):
        values = []
    if len(values) != 2:
        raise ValueError(f"Invalid betas: {shown(betas)}; two numbers in [0, 1) are needed")
    for i, beta in enumerate(values):
        if not 0.0 <= number(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i} of betas: {shown(beta)}; it must be in [0, 1)")


def check_not_offered(hyper: Hyper, *names: str) -> None:
    """Refuse a torch.optim option that would change the result and that no rule here computes."""
    for name in names:
        value = hyper.get(name)
        if value is not None and switch(value) is not False:
            raise ValueError(f"{name}={shown(value)} is not offered; leave it out or set it to False")
