"""The promises made to an ordinary training loop, each in both modes, against torch.optim on a dense copy."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_grad_optimizer as forge
from fused_grad_optimizer._applied_grad import AppliedGrad
from fused_grad_optimizer.factored_grad import FactoredGrad

from .cases.helpers import Explode

BOTH = pytest.mark.parametrize("when", ["backward", "step"])
LR = 1e-2


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))


def dense_and_fused(make=mlp, when="step", **hyper):
    dense = make()
    fused = copy.deepcopy(dense)
    hyper = {"lr": LR, "eps": 1e-4, **hyper}
    return dense, torch.optim.AdamW(dense.parameters(), **hyper), fused, forge.fuse(fused, when=when, **hyper)


def snapshot(model):
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


# -- two backwards, clipping, scaling ---------------------------------------------------------------------------------


def test_second_backward_before_step_is_refused_in_backward_mode():
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    model(data(0, 4, 6)).sum().backward()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="when='step'"):
        model(data(1, 4, 6)).sum().backward()
    assert unchanged(model, before)
    del optimizer


def test_a_model_zero_grad_does_not_hide_the_second_backward():
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    model(data(0, 4, 6)).sum().backward()
    model.zero_grad()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="second backward before step.*when='step'"):
        model(data(1, 4, 6)).sum().backward()
    assert unchanged(model, before)
    optimizer.step()


def test_zero_grad_instead_of_step_is_refused_in_backward_mode():
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    model(data(0, 4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="already applied"):
        optimizer.zero_grad()
    model(data(1, 4, 6)).sum().backward()  # said once; training can go on
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "use",
    [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
        lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
        lambda m: m[0].weight.grad.norm(),
        lambda m: m[0].weight.grad.mul_(0.5),
        lambda m: m[0].bias.grad.isfinite(),
    ],
)
def test_any_use_of_an_applied_gradient_is_an_error(use):
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    model(data(0, 4, 6)).sum().backward()
    assert isinstance(model[0].weight.grad, AppliedGrad)
    with pytest.raises(RuntimeError, match="already applied.*when='step'"):
        use(model)
    optimizer.step()
    assert model[0].weight.grad is None


def test_scaled_loss_is_refused_in_backward_mode_before_anything_moves():
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    scaler = torch.amp.GradScaler("cpu")
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="GradScaler.*when='step'"):
        scaler.scale(model(data(0, 4, 6)).sum()).backward()
    assert unchanged(model, before)
    # a scaler that is off, or that scales another model's loss, is no obstacle
    torch.amp.GradScaler("cpu", enabled=False).scale(model(data(0, 4, 6)).sum()).backward()
    optimizer.step()
    scaler.scale(mlp()(data(0, 4, 6)).sum()).backward()
    model(data(0, 4, 6)).sum().backward()
    optimizer.step()
    assert not unchanged(model, before)


def test_grad_scaler_with_an_injected_inf():
    dense, dense_optimizer, fused, fused_optimizer = dense_and_fused()
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for i in range(6):
        x = data(i, 4, 6)
        if i == 2:
            x[1, 1] = float("inf")
        for model, optimizer, scaler in zip((dense, fused), (dense_optimizer, fused_optimizer), scalers):
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum()).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert i == 2 or 0.1 < norm < 1000
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert gap(dense, fused) < 1e-3 * LR * 5
    assert fused_optimizer.state[fused[0].weight]["step"] == 5


def test_four_micro_batches_clipped_equal_the_large_batch():
    dense, dense_optimizer, fused, fused_optimizer = dense_and_fused()
    for i in range(4):
        x = data(i, 16, 6)
        dense_optimizer.zero_grad()
        fused_optimizer.zero_grad()
        dense(x).square().mean().backward()
        for part in x.split(4):
            (fused(part).square().mean() / 4).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05).item() for m in (dense, fused)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0.05
        dense_optimizer.step()
        fused_optimizer.step()
    assert gap(dense, fused) < 1e-3 * LR * 4


# -- graphs ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(when, reentrant):
    dense, dense_optimizer, fused, fused_optimizer = dense_and_fused(when=when)

    def run(model, x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant) if isinstance(layer, nn.Linear) else layer(x)
        return x

    for i in range(3):
        x = data(i, 5, 6).requires_grad_()
        for model, optimizer, forward in ((dense, dense_optimizer, lambda m, x: m(x)), (fused, fused_optimizer, run)):
            optimizer.zero_grad()
            forward(model, x).square().sum().backward()
            optimizer.step()
    assert gap(dense, fused) < 1e-3 * LR * 3


def test_kept_graph_raises_after_the_update():
    layer = nn.Linear(6, 6)
    optimizer = forge.fuse(layer, lr=LR)
    x = data(0, 3, 6).requires_grad_()
    y = layer(x).square().sum()
    y.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@BOTH
def test_bptt_loop(when):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(3, 8)
            for t in range(6):
                h = torch.tanh(self.cell(h) + x[:, t])
            return self.out(h)

    torch.manual_seed(0)
    dense, dense_optimizer, fused, fused_optimizer = dense_and_fused(Cell, when=when)
    for i in range(3):
        for model, optimizer in ((dense, dense_optimizer), (fused, fused_optimizer)):
            optimizer.zero_grad()
            model(data(i, 3, 6, 8)).square().sum().backward()
            optimizer.step()
    assert gap(dense, fused) < 1e-3 * LR * 3
    assert fused_optimizer.state[fused.cell.weight]["step"] == 3


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_call", ["step", "zero_grad", "backward"])
def test_exception_in_the_middle_of_backward_is_reported(next_call):
    model = mlp()
    optimizer = forge.fuse(model, lr=LR)
    before = snapshot(model)
    with pytest.raises(KeyError, match="boom"):
        model[2:](Explode.apply(model[:2](data(0, 4, 6)))).sum().backward()
    assert torch.equal(model[0].weight, before[0]) and not torch.equal(model[4].weight, before[4])
    calls = {
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "backward": lambda: model[:2](data(1, 4, 6)).sum().backward(),
    }
    with pytest.raises(RuntimeError, match=r"exception after it had updated .*4\.weight") as error:
        calls[next_call]()
    assert "2.weight" in str(error.value) and "0.weight" not in str(error.value)
    if next_call != "backward":  # said once; training can go on
        model(data(1, 4, 6)).sum().backward()
        optimizer.step()


def test_exception_in_step_mode_moves_nothing():
    model = mlp()
    optimizer = forge.fuse(model, lr=LR, when="step")
    before = snapshot(model)
    with pytest.raises(KeyError, match="boom"):
        model[2:](Explode.apply(model[:2](data(0, 4, 6)))).sum().backward()
    assert unchanged(model, before)
    optimizer.zero_grad()


@BOTH
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_batch_changes_nothing_and_is_reported(when, where, value):
    model = nn.Sequential(nn.Embedding(5, 6), nn.LayerNorm(6), mlp())
    optimizer = forge.fuse(model, lr=LR, when=when)
    ids = torch.tensor([0, 1, 1, 3])
    model(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model)
    states = copy.deepcopy(optimizer.state_dict()["state"])
    poison = torch.tensor([value if where == "input" else 1.0] + [1.0] * 5)
    hook = model[0].register_forward_hook(lambda m, i, y: y * poison)
    (model(ids).square() * (1.0 if where == "input" else value)).sum().backward()
    with pytest.warns(RuntimeWarning, match="NaN or inf"):
        optimizer.step()
    optimizer.zero_grad()
    assert unchanged(model, before)
    for old, new in zip(states.values(), optimizer.state_dict()["state"].values()):
        assert all(torch.equal(old[k], new[k]) for k in old)
    assert optimizer.skipped["2.0.weight"] == 1
    hook.remove()
    model(ids).sum().backward()
    optimizer.step()
    assert not unchanged(model, before)


def test_a_factor_modified_before_the_step_is_an_error():
    model = nn.Linear(6, 3)
    optimizer = forge.fuse(model, lr=LR, when="step")
    x = data(0, 2, 6)
    model(x).sum().backward()
    before = snapshot(model)
    x.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        optimizer.step()
    assert torch.equal(model.weight, before[0])


def test_sparse_gradients_are_refused_before_anything_moves():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizer = forge.fuse(model, lr=LR, when="step")
    model(torch.tensor([1, 2])).sum().backward()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"0\.weight.*sparse=False"):
        optimizer.step()
    assert unchanged(model, before)


# -- refusals at the door ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rule": "adamx"}, "rule='adamx'"),
        ({"when": "later"}, "when='later'"),
        ({"state": "int9"}, "state='int9'"),
        ({"weight": "up"}, "weight='up'"),
        ({"lr": -1.0}, "lr"),
        ({"momentum": 0.9}, "momentum is not a hyper-parameter of adamw"),
        ({"amsgrad": True}, "amsgrad"),
        ({"exclude": ["nothing.like.it"]}, "nothing.like.it"),
        ({"exclude": "0"}, "exclude"),
        ({"seed": 0.5}, "seed"),
        ({"param_groups": [{"params": [], "lr": -3.0}]}, "lr"),
    ],
)
def test_wrong_arguments_name_themselves_and_change_nothing(arguments, message):
    model = mlp()
    with pytest.raises(ValueError, match=message):
        forge.fuse(model, **arguments)
    assert type(model[0]) is nn.Linear
    forge.fuse(model, lr=LR).release()  # nothing was claimed


def test_second_fuse_is_refused_while_the_first_lives():
    model = mlp()
    first = forge.fuse(model, lr=LR)
    with pytest.raises(ValueError, match="release"):
        forge.fuse(model, lr=LR)
    first.release()
    second = forge.fuse(model, lr=LR)
    before = snapshot(model)
    model(data(0, 2, 6)).sum().backward()
    second.step()
    assert second.state[model[0].weight]["step"] == 1 and not first.state
    assert not unchanged(model, before)


# -- memory ------------------------------------------------------------------------------------------------------------


class LargestAllocation(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest tensor (in elements) that any operation returns as new memory."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs))
                  if type(t) is torch.Tensor or type(t) is nn.Parameter}  # fmt: skip
        for t in torch.utils._pytree.tree_leaves(result):
            if type(t) is torch.Tensor and t.untyped_storage().data_ptr() not in inputs:
                self.largest = max(self.largest, t.numel())
        return result


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_a_weight_s_size_is_allocated(when, dtype):
    n, k = 512, 384
    model = nn.Sequential(nn.Embedding(n, k), nn.Linear(k, n, bias=False), nn.Linear(n, k, bias=False)).to(dtype)
    optimizer = forge.fuse(model, lr=LR, when=when)
    ids = torch.arange(8)

    def one_step():
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one_step()
    with LargestAllocation() as seen:
        one_step()
    assert 8 * k <= seen.largest < n * k
    dense = copy.deepcopy(model)
    with LargestAllocation() as seen:
        dense(ids).sum().backward()
    assert seen.largest == n * k  # the test can fail


def test_factors_never_hold_more_than_a_dense_gradient():
    layer = nn.Linear(8, 8, bias=False)
    optimizer = forge.fuse(layer, lr=LR, when="step")
    for i in range(64):
        layer(data(i, 16, 8)).sum().backward()
        assert layer.weight.grad.factor_bytes() <= layer.weight.numel() * 4
    expected = sum(torch.ones(16, 8).t() @ data(i, 16, 8) for i in range(64))
    assert torch.allclose(layer.weight.grad.to_dense(), expected, rtol=1e-5, atol=1e-4)
    optimizer.zero_grad()


@BOTH
def test_a_model_and_its_optimizer_are_freed(when):
    model = mlp()
    optimizer = forge.fuse(model, lr=LR, when=when)
    model(data(0, 2, 6)).sum().backward()
    optimizer.step()
    alive = [weakref.ref(o) for o in (model, optimizer, optimizer.state[model[0].weight]["exp_avg"])]
    del model, optimizer
    gc.collect()
    assert [r() is None for r in alive] == [True] * 3


def test_a_deleted_optimizer_leaves_ordinary_gradients_and_no_hooks():
    model = mlp()
    forge.fuse(model, lr=LR)
    gc.collect()
    before = snapshot(model)
    model(data(0, 2, 6)).sum().backward()
    assert unchanged(model, before) and isinstance(model[0].weight.grad, FactoredGrad)
    model.zero_grad()
    second = forge.fuse(model, lr=LR)
    model(data(0, 2, 6)).sum().backward()
    second.step()
    assert second.state[model[0].weight]["step"] == 1


@BOTH
def test_factors_are_freed(when):
    layer = nn.Linear(64, 64)
    optimizer = forge.fuse(layer, lr=LR, when=when)
    earlier = {id(o) for o in gc.get_objects() if type(o) is FactoredGrad}
    x = data(0, 2, 64)
    seen = weakref.ref(x)
    layer(x).sum().backward()
    del x
    assert (seen() is not None) == (when == "step")
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert seen() is None
    assert not [o for o in gc.get_objects() if type(o) is FactoredGrad and id(o) not in earlier]


@pytest.mark.parametrize("place", ["matmul", "all"])
def test_torchs_new_setting_of_tf32_is_read_and_the_old_one_is_not(place):
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the old setting only")
    code = {
        "matmul": 'torch.backends.cuda.matmul.fp32_precision = "tf32"',
        "all": 'torch.backends.fp32_precision = "tf32"',
    }[place]
    program = f"""
import torch, fused_grad_optimizer as forge
from fused_grad_optimizer.kernels import allows_tf32
assert not allows_tf32()
{code}
assert allows_tf32()
model = torch.nn.Linear(4, 4)
optimizer = forge.fuse(model, lr=1e-3, when="step")
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
