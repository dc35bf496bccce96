"""The chunked path on a GPU: against fp64, against the same GEMM and one streaming step, and the memory it takes."""

from __future__ import annotations

import random

import pytest
import torch

from fused_grad_optimizer import explain, ops
from fused_grad_optimizer.kernels import Gradient, Target, chunked, dispatch, param_step
from fused_grad_optimizer.kernels.configs import ChunkConfig, chunk_rows
from fused_grad_optimizer.rules import UPDATES, twin
from tests.gpu.steps import HYPER, copy_of, make_target, noise, take_step

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    monkeypatch.setenv("FORGE_KERNEL", "chunked")
    chunked.release()
    yield
    chunked.release()


def factors(n, k, tokens, dtype=BF16, **parts):
    dys = [noise(2 * i, t, n, dtype=FP32).div(t**0.5).to(dtype) for i, t in enumerate(tokens)]
    return Gradient(dys, [noise(2 * i + 1, t, k, dtype=dtype) for i, t in enumerate(tokens)], **parts)


def all_parts(n, k):
    ids = torch.randint(0, n, (n // 3 + 1,), device="cuda")
    row_map, row_sums = torch.ops.forge.sum_rows(ids, noise(50, len(ids), k), n, FP32)
    scale = torch.tensor(0.3, device="cuda")
    return {"row_map": row_map, "row_sums": row_sums, "scale": scale, "dense": noise(51, n, k)}


def step_by_param_step(t, gradient, update, dw):
    """The rule in one launch over the whole weight, from a dW in memory."""
    scalars = ops.make_scalars(update, HYPER, 3, False, 0, t.weight.device, t.weight.dtype)
    stores, stochastic = ops._stores(t.storages)
    param_step.launch(
        gradient, t, scalars=scalars.values, keys=scalars.keys, flag=None, update=update, stores=stores,
        stochastic=stochastic, acc=dw,
    )  # fmt: skip


def dw_by_chunks(gradient, n, k):
    """torch's own product of the rows of each chunk, written over NaN."""
    rows = chunk_rows(n, k, torch.cuda.get_device_properties(0).multi_processor_count, ChunkConfig())
    dw = torch.full((n, k), float("nan"), device="cuda")
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        first, *others = [(dy[:, part].t(), x) for dy, x in zip(gradient.dys, gradient.xs)]
        dw[part] = torch.mm(*first) if first[0].dtype == FP32 else torch.mm(*first, out_dtype=FP32)
        for dy, x in others:
            torch.addmm(dw[part], dy, x, out=dw[part]) if dy.dtype == FP32 else torch.addmm(
                dw[part], dy, x, out_dtype=FP32, out=dw[part]
            )
    return dw


def gradient_fp64(gradient, n, k):
    total = sum(dy.double().t() @ x.double() for dy, x in zip(gradient.dys, gradient.xs))
    if gradient.row_map is not None:
        present = gradient.row_map >= 0
        total[present] += gradient.row_sums[gradient.row_map[present].long()].double()
    if gradient.scale is not None:
        total *= gradient.scale.double()
    return total + gradient.dense.double() if gradient.dense is not None else total


def assert_same(a, b):
    assert torch.equal(a.weight, b.weight)
    assert all(torch.equal(x, y) for x, y in zip(a.states, b.states))


@pytest.mark.parametrize("with_parts", [False, True])
@pytest.mark.parametrize("weight, state", [("bf16", "bf16"), ("bf16-nearest", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("name", UPDATES)
def test_equals_the_same_gemm_and_one_streaming_step(name, weight, state, with_parts):
    update, n, k = UPDATES[name], 1300, 1008
    gradient = factors(n, k, (700, 1, 0, 64), **(all_parts(n, k) if with_parts else {}))
    stepped = make_target(update, n, k, weight, state)
    expected = copy_of(stepped)
    take_step(stepped, gradient, update)
    step_by_param_step(expected, gradient, update, dw_by_chunks(gradient, n, k))
    assert_same(stepped, expected)
    assert not torch.isnan(expected.weight).any()


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes_and_parts_against_fp64(seed):
    """SGD with lr 1 on a weight of zeros is minus the gradient: within twice the error of torch's whole product."""
    rng = random.Random(seed)
    n, k = rng.randint(1, 3000), rng.randint(1, 2000)
    tokens = tuple(rng.randint(1, 1500) for _ in range(rng.randint(1, 4)))
    gradient = factors(n, k, tokens, rng.choice([BF16, FP16, FP32]), **(all_parts(n, k) if rng.random() < 0.5 else {}))
    target = Target(torch.zeros(n, k, device="cuda"), [], ["fp32"], 0)
    update = UPDATES["sgd"]
    scalars = ops.make_scalars(
        update, {**HYPER, "lr": 1.0, "weight_decay": 0.0}, 1, True, 0, target.weight.device, FP32
    )
    ops.step(target, gradient, update, scalars, None)
    exact = gradient_fp64(gradient, n, k)
    dy, x = torch.cat(gradient.dys), torch.cat(gradient.xs)
    product = torch.mm(dy.t(), x) if dy.dtype == FP32 else torch.mm(dy.t(), x, out_dtype=FP32)
    allowed = 2 * (product - gradient_fp64(Gradient(gradient.dys, gradient.xs), n, k)).norm() + 1e-6 * exact.norm()
    assert (target.weight + exact).norm() <= allowed


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_large_weight_against_the_rule_in_fp64(name):
    update, n, k = UPDATES[name], 4096, 4096
    gradient = factors(n, k, (4096,))
    stepped = make_target(update, n, k, "fp32", "fp32")
    before = [t.double() for t in (stepped.weight, *stepped.states)]
    g = gradient_fp64(gradient, n, k)
    take_step(stepped, gradient, update)
    h = update.scalars(HYPER, 3, False)
    exact = twin(update.function)(h, before[0], g, *before[1:])
    in32 = twin(update.function)(
        h,
        before[0].float(),
        torch.mm(gradient.dys[0].t(), gradient.xs[0], out_dtype=FP32),
        *(s.float() for s in before[1:]),
    )
    for value, right, unfused in zip((stepped.weight, *stepped.states), exact, in32):
        assert (value - right).norm() <= 2 * (unfused - right).norm() + 1e-7 * right.norm()


def test_rows_of_a_wider_tensor():
    update, n, k = UPDATES["adamw"], 333, 257
    wide_dy, wide_x = noise(0, 200, 513) * 0.1, noise(1, 200, 1023)
    sliced = Gradient([wide_dy[:, 63 : 63 + n]], [wide_x[:, 129 : 129 + k]])
    stepped = make_target(update, n, k, "fp32", "fp32")
    expected = copy_of(stepped)
    take_step(stepped, sliced, update)
    take_step(expected, Gradient([sliced.dys[0].contiguous()], [sliced.xs[0].contiguous()]), update)
    for a, b in zip((stepped.weight, *stepped.states), (expected.weight, *expected.states)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)  # cuBLAS may take another kernel for another alignment


def test_a_flag_leaves_everything_untouched():
    update, n, k = UPDATES["adamw"], 256, 256
    stepped = make_target(update, n, k)
    before = copy_of(stepped)
    take_step(stepped, factors(n, k, (64,)), update, torch.ones(1, dtype=torch.int32, device="cuda"))
    assert_same(stepped, before)
    take_step(stepped, factors(n, k, (64,)), update, torch.zeros(1, dtype=torch.int32, device="cuda"))
    assert not torch.equal(stepped.weight, before.weight)


def test_the_peak_of_an_update_is_the_chunk():
    update, n, k = UPDATES["adamw"], 14336, 4096
    gradient, stepped = factors(n, k, (4096,)), make_target(update, n, k)
    warm = make_target(update, 256, 256)
    take_step(warm, factors(256, 256, (64,)), update)  # cuBLAS's workspace, compiled kernels
    chunked.release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_step(stepped, gradient, update)
    peak = torch.cuda.max_memory_allocated() - before
    rows = chunk_rows(n, k, torch.cuda.get_device_properties(0).multi_processor_count, ChunkConfig())
    assert 4 * rows * k <= peak <= (24 << 20) + (1 << 20)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_step(stepped, gradient, update)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20  # the chunk is there


def test_buffers_are_one_for_each_stream_and_few():
    update = UPDATES["sgd"]
    gradient = factors(512, 256, (64,))
    streams = [torch.cuda.Stream() for _ in range(chunked.MOST_BUFFERS + 3)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stepped = make_target(update, 512, 256)
            for _ in range(3):
                take_step(stepped, gradient, update)
            results.append(stepped)
    torch.cuda.synchronize()
    assert len(chunked._buffers) == chunked.MOST_BUFFERS
    for stepped in results[1:]:
        assert_same(stepped, results[0])


def test_a_buffer_of_inference_mode_serves_later_steps():
    update = UPDATES["adamw"]
    gradient, stepped = factors(512, 256, (64,)), make_target(update, 512, 256)
    expected, other = copy_of(stepped), copy_of(stepped)
    take_step(expected, gradient, update)
    chunked.release()
    with torch.inference_mode():
        take_step(other, gradient, update)
    assert_same(other, expected)
    (kept,) = chunked._buffers.values()
    take_step(stepped, gradient, update)
    assert next(iter(chunked._buffers.values())) is kept
    assert_same(stepped, expected)


def test_a_captured_step_replays_right_and_keeps_no_buffer():
    update, n, k = UPDATES["adamw"], 1300, 1000
    gradient, stepped = factors(n, k, (300, 20)), make_target(update, n, k)
    start = copy_of(stepped)
    expected = copy_of(stepped)
    take_step(expected, gradient, update)
    scalars = ops.make_scalars(update, HYPER, 3, False, 0, stepped.weight.device, BF16)
    chunked.release()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.step(stepped, gradient, update, scalars, None)
    assert not chunked._buffers
    stepped.weight.copy_(start.weight)
    for state, value in zip(stepped.states, start.states):
        state.copy_(value)
    graph.replay()
    assert_same(stepped, expected)


def test_tf32_where_the_user_allows_it(monkeypatch):
    n, k = 512, 512
    gradient = factors(n, k, (512,), FP32)
    exact = gradient_fp64(gradient, n, k)
    errors = {}
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        chunk = torch.empty(n, k, device="cuda")
        chunked.multiply(gradient, 0, n, chunk)
        errors[allowed] = float((chunk - exact).norm() / exact.norm())
    assert errors[False] < 2e-6 < errors[True] < 2e-3


def test_choice_by_tokens(monkeypatch):
    monkeypatch.delenv("FORGE_KERNEL")
    monkeypatch.setattr(dispatch, "_card", lambda device: None)  # tables are tests/kernels/test_tuning.py's
    targets = [torch.empty(4096, 4096, device="cuda", dtype=BF16)] * 3
    few, many = (factors(4096, 4096, (tokens,)) for tokens in (16, 40_000))
    assert dispatch.choose(few, 4096, 4096, targets, stochastic=True)[0] != dispatch.CHUNKED
    path, reason = dispatch.choose(many, 4096, 4096, targets, stochastic=True)
    assert path == dispatch.CHUNKED and "chunked above" in reason
    assert dispatch.choose(many, 4096, 4096, targets[:1], storing=True)[0] != dispatch.CHUNKED
    found = explain(4096, 4096, 40_000, device="cuda", weight_dtype=BF16)
    assert found.path == dispatch.CHUNKED and 16 <= found.crossover < 40_000
