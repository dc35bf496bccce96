"""A Triton that cannot compile the Hopper kernel: the portable one steps every weight, and it is said once."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from fused_grad_optimizer import FusedOptimizer  # noqa: E402
from fused_grad_optimizer.kernels import dispatch, wgrad_step_hopper  # noqa: E402
from tests.kernels import fake_training  # noqa: E402
from tests.kernels.fake_cuda import fake_cuda  # noqa: E402
from tests.kernels.fake_training import give_gradient, layers, pair  # noqa: E402

ERRORS = {
    "a name that Gluon lacks": CompilationError("def f(): pass", None, "module has no attribute 'SharedLinearLayout'"),
    "a pass of the compiler": RuntimeError("PassManager::run failed"),
    "shared memory": OutOfResources(300_000, 232_448, "shared memory"),
}


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.delenv("FORGE_KERNEL", raising=False)
    monkeypatch.setattr(dispatch, "_HOPPER_KERNEL", [])
    dispatch._say_once.cache_clear()
    with fake_cuda() as fake, monkeypatch.context() as patch:
        fake_training.take_the_gpus_way(patch)
        yield fake


def raising(error):
    def launch(*args, **options):
        raise error

    return launch


def names(cuda) -> list[str]:
    return [metadata.name for _, metadata, *_ in cuda.triton]


@pytest.mark.parametrize("error", ERRORS)
def test_the_portable_kernel_takes_its_place(cuda, error, monkeypatch):
    monkeypatch.setattr(wgrad_step_hopper, "launch", raising(ERRORS[error]))
    parameters = layers(3)
    optimizer = FusedOptimizer(parameters, "adamw", lr=1e-3, when="step")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for parameter in parameters:
                give_gradient(parameter, pair())
            optimizer.step()
    assert [optimizer.state[p]["step"] for p in parameters] == [2, 2, 2]
    assert not [name for name in names(cuda) if "hopper" in name] and [n for n in names(cuda) if "forge_wgrad" in n]
    messages = [str(w.message) for w in said if "Hopper kernel cannot be used" in str(w.message)]
    assert len(messages) == 1 and str(ERRORS[error]).strip()[-40:] in messages[0]


def test_other_errors_are_not_hidden(cuda, monkeypatch):
    monkeypatch.setattr(wgrad_step_hopper, "launch", raising(RuntimeError("CUDA error 700 in a kernel launch")))
    (parameter,) = layers(1)
    optimizer = FusedOptimizer([parameter], "adamw", lr=1e-3, when="step")
    give_gradient(parameter, pair())
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        optimizer.step()
    assert dispatch.hopper_kernel() is wgrad_step_hopper


def test_who_asks_for_the_kernel_sees_the_error(cuda, monkeypatch):
    monkeypatch.setenv("FORGE_KERNEL", dispatch.HOPPER)
    monkeypatch.setattr(wgrad_step_hopper, "launch", raising(ERRORS["a name that Gluon lacks"]))
    (parameter,) = layers(1)
    optimizer = FusedOptimizer([parameter], "adamw", lr=1e-3, when="step")
    give_gradient(parameter, pair())
    with pytest.raises(CompilationError):
        optimizer.step()


def test_a_gluon_without_its_names_is_found_before_the_first_launch(monkeypatch):
    """As Triton 3.5: Gluon is there, and a layout of shared memory is not."""
    import triton.experimental.gluon.language as gl

    monkeypatch.setattr(dispatch, "_HOPPER_KERNEL", [])
    dispatch._say_once.cache_clear()
    dispatch._module.cache_clear()
    without = SimpleNamespace(**{name: value for name, value in vars(gl).items() if name != "SharedLinearLayout"})
    for module in ("_gluon", "hopper_layouts", "wgrad_step_hopper"):
        monkeypatch.delitem(sys.modules, f"fused_grad_optimizer.kernels.{module}")
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language", without)
    monkeypatch.setattr(sys.modules["triton.experimental.gluon"], "language", without)
    with pytest.warns(RuntimeWarning, match="AttributeError.*SharedLinearLayout.*portable kernel takes its place"):
        assert dispatch.hopper_kernel() is None
    dispatch._module.cache_clear()
