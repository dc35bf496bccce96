"""`forge bench host`: what eager training pays on the host for a layer and its update, in us.

Layers are small, so that on a GPU the host is never held up by the device. On a CPU there is no device to run ahead of:
times hold the computation too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fused_grad_optimizer.convert import convert, fuse
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import cuda_driver, triton_reason
from fused_grad_optimizer.optimizer import FusedOptimizer

WARMUP = 5  # rounds before those that count: kernels are compiled, states made, ways of launching settled
LR = 1e-7  # weights hardly move, so that many rounds of backward neither overflow nor fade
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
IN_PLACE, BY_TRITON = "one launch, arguments in place", "one launch by Triton"


@dataclass(frozen=True)
class HostSettings:
    """What to measure. Weights are `width` x `width`, each with `tokens` tokens."""

    layers: int
    width: int
    tokens: int
    rounds: int
    dtype: torch.dtype
    device: torch.device


class Case(NamedTuple):
    """`run` is timed and does all layers; `prepare` comes before it each time and is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


class Times(NamedTuple):
    """us a layer: the median of the rounds, the least, the ninth decile."""

    us: float
    least: float
    ninth_decile: float


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection in this block, which would fall on one sample or another."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def microseconds(case: Case, settings: HostSettings) -> Times:
    """Host time of `case.run`, with the device idle before it."""
    times = []
    with no_collection():
        for _ in range(WARMUP + settings.rounds):
            case.prepare()
            _synchronize(settings.device)
            start = time.perf_counter()
            case.run()
            times.append((time.perf_counter() - start) / settings.layers * 1e6)
        _synchronize(settings.device)
    times = times[WARMUP:]
    # "inclusive": never above the longest sample, however few there are
    ninth = statistics.quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]
    return Times(statistics.median(times), min(times), ninth)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- forward and backward ----------------------------------------------------------------------------------------------


def model(settings: HostSettings) -> nn.Sequential:
    """Linear layers whose activations and gradients keep their size, however many there are."""
    width = settings.width
    made = [nn.Linear(width, width, bias=False, device=settings.device) for _ in range(settings.layers)]
    for layer in made:
        nn.init.normal_(layer.weight, std=width**-0.5)
    return nn.Sequential(*made).to(settings.dtype)


def forward_backward(layers: nn.Module, settings: HostSettings, prepare: Callable[[], object] | None = None) -> Case:
    """Forward and backward of this model; its gradients are dropped before each, unless `prepare` does more."""
    x = torch.randn(settings.tokens, settings.width, device=settings.device, dtype=settings.dtype)
    return Case(lambda: layers(x).sum().backward(), prepare or layers.zero_grad)


def plain(settings: HostSettings) -> Case:
    """Layers that FORGE has nothing to do with."""
    return forward_backward(model(settings), settings)


def factored(settings: HostSettings) -> Case:
    return forward_backward(convert(model(settings)), settings)


def collecting(settings: HostSettings) -> Case:
    """Gradients for a later `step()`, which never comes."""
    layers = model(settings)
    optimizer = fuse(layers, "adamw", lr=LR, when="step")
    return forward_backward(layers, settings, optimizer.zero_grad)


def updating(settings: HostSettings) -> Case:
    """Updates in backward."""
    layers = model(settings)
    optimizer = fuse(layers, "adamw", lr=LR, when="backward")

    def clear() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return forward_backward(layers, settings, clear)


# -- step() ------------------------------------------------------------------------------------------------------------


def weights(settings: HostSettings, dtype: torch.dtype) -> list[nn.Parameter]:
    shape = settings.width, settings.width
    return [nn.Parameter(torch.randn(shape, device=settings.device).to(dtype)) for _ in range(settings.layers)]


def give_gradients(parameters: list[nn.Parameter], pairs: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Gradients as backward leaves them, of one or more pairs `(dY, X)` for each weight."""
    for parameter, some in zip(parameters, pairs):
        parameter.grad = FactoredGrad(parameter.shape, parameter.dtype, pairs=some)


def stepping(settings: HostSettings, dtype: torch.dtype, uses: int = 1) -> Case:
    """`step()` for weights of this dtype, each used so many times."""

    def factor() -> torch.Tensor:
        return torch.randn(settings.tokens, settings.width, device=settings.device).to(dtype)

    parameters = weights(settings, dtype)
    pairs = [[(factor(), factor()) for _ in range(uses)] for _ in parameters]
    optimizer = FusedOptimizer(parameters, "adamw", lr=LR, when="step")
    return Case(optimizer.step, lambda: give_gradients(parameters, pairs))


# -- launches ----------------------------------------------------------------------------------------------------------


def each(function: Callable[[], object], settings: HostSettings) -> Case:
    """This function once a layer."""

    def run() -> None:
        for _ in range(settings.layers):
            function()

    return Case(run)


def launches(settings: HostSettings) -> dict[str, Case]:
    """One launch of the finite check, by FORGE and by Triton, beside the cheapest that torch does with a kernel.

    The first is missing where FORGE leaves this kernel to Triton.
    """
    from fused_grad_optimizer.kernels import finite, launcher  # needs Triton

    flag = torch.zeros(1, dtype=torch.int32, device=settings.device)
    shape = settings.tokens, settings.width
    operands = [torch.zeros(shape, device=settings.device, dtype=settings.dtype) for _ in range(2)]
    finite.check(operands, flag)  # the first launch is Triton's and makes the direct one
    blocks, positional, constants = finite.arguments(operands, flag)
    direct = launcher.find(finite.nonfinite_kernel, positional, constants)
    found: dict[str, Case] = {}
    if isinstance(direct, launcher.DirectLaunch):
        made, (numbers, _) = direct, direct.values(positional)
        in_place = each(lambda: made.run((blocks, 1, 1), made.arguments, numbers), settings)
        found[IN_PLACE] = in_place
    found[BY_TRITON] = each(lambda: finite.nonfinite_kernel[(blocks,)](*positional, **constants), settings)
    found["an empty torch operation"] = each(flag.zero_, settings)
    return found


def refusals(settings: HostSettings) -> dict[str, str]:
    """Why kernels, by name, were not launched directly; `""` is a reason for all. On a CPU there is nothing to say."""
    if settings.device.type != "cuda":
        return {}
    reason = triton_reason(settings.device, settings.dtype)
    if reason is not None:
        return {"": reason}
    from fused_grad_optimizer.kernels import launcher

    return launcher.refusals()


# -- the command -------------------------------------------------------------------------------------------------------


def cases(settings: HostSettings) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names, and what makes the case when its turn comes."""
    chosen, name = settings.dtype, SHORT[settings.dtype]
    yield "forward and backward, plain layers", lambda: plain(settings)
    yield "forward and backward, factored gradients", lambda: factored(settings)
    yield "forward and backward, when='step', without step()", lambda: collecting(settings)
    yield "forward and backward, when='backward'", lambda: updating(settings)
    yield f"step(), {name} weights", lambda: stepping(settings, chosen)
    if chosen != torch.float32:
        yield "step(), fp32 weights", lambda: stepping(settings, torch.float32)
    yield f"step(), {name} weights used twice", lambda: stepping(settings, chosen, uses=2)
    if triton_reason(settings.device, chosen) is None and cuda_driver.active() is not None:
        made = launches(settings)
        for launch in made:
            yield launch, functools.partial(made.__getitem__, launch)


def measure(name: str, make: Callable[[], Case], settings: HostSettings) -> dict[str, Any]:
    """One entry of the result: times, or a status that says why there are none."""
    try:
        return {"name": name, "status": "ok", **microseconds(make(), settings)._asdict()}
    except torch.OutOfMemoryError:
        return {"name": name, "status": "out of memory"}


def run(settings: HostSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases; `say` is told each one as it begins."""
    entries = []
    for name, make in cases(settings):
        say(name)
        entries.append(measure(name, make, settings))
    return {
        "kind": "host",
        "layers": settings.layers,
        "width": settings.width,
        "tokens": settings.tokens,
        "rounds": settings.rounds,
        "warmup": WARMUP,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "refusals": refusals(settings),
        "entries": entries,
    }
