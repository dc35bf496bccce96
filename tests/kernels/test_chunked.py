"""The chunked path: right against fp64, and bit for bit the same GEMM followed by one `param_step` over the weight.

With TRITON_INTERPRET=1 the streaming step runs in Triton's interpreter on CPU tensors; `test_interpreter.py` does that.
"""

from __future__ import annotations

import pytest
import torch

from fused_grad_optimizer import ops
from fused_grad_optimizer.kernels import Gradient, configs, interpreting, param_step
from fused_grad_optimizer.kernels.configs import ChunkConfig, chunk_rows
from fused_grad_optimizer.rules import UPDATES
from tests.kernels.steps import HYPER, make_problem, relative_error, run_step, same_bits, step_fp64

in_interpreter = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
SHAPES = [(1, 1, [1]), (5, 3, [300]), (70, 33, [33, 0, 265]), (40, 129, [0]), (64, 64, [64, 300])]
PARTS = [{}, {"scale": 0.37}, {"dense": True}, {"rows": 11}, {"rows": 40, "dense": True, "scale": -2.0}]


@pytest.fixture
def chunks_of(monkeypatch):
    """`chunks_of(r)`: every weight in chunks of r rows, by the chunked path."""
    from fused_grad_optimizer.kernels import chunked

    def set_rows(rows):
        monkeypatch.setattr(chunked, "chunk_rows", lambda *_: rows)
        monkeypatch.setenv("FORGE_KERNEL", "chunked")

    return set_rows


@in_interpreter
@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("n, k, tokens", SHAPES)
def test_right_against_fp64(n, k, tokens, parts, rows, chunks_of):
    chunks_of(rows)
    problem = make_problem(n, k, tokens, **parts)
    result = run_step(problem)
    for value, reference in zip((result.weight, *result.states), step_fp64(problem)):
        assert relative_error(value, reference) < 2e-6  # a few fp32 roundings


@in_interpreter
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["adamw", "lion", "sgd"])
def test_equals_one_streaming_step_bit_for_bit(update, storage, parts, chunks_of):
    chunks_of(13)  # 13 * 33 elements: chunks that begin anywhere
    problem = make_problem(50, 33, [40, 9], update=update, storage=storage, **parts)
    given = problem.gradient
    dw = torch.cat([_rows_of_dw(given, start, min(start + 13, 50)) for start in range(0, 50, 13)])
    expected = problem.target()
    scalars = ops.make_scalars(UPDATES[update], HYPER, 3, False, 7, dw.device, expected.weight.dtype)
    stores, stochastic = ops._stores(expected.storages)
    param_step.launch(
        given, expected, scalars=scalars.values, keys=scalars.keys, flag=None, update=UPDATES[update], stores=stores,
        stochastic=stochastic, acc=dw,
    )  # fmt: skip
    assert same_bits(run_step(problem), expected)


def _rows_of_dw(gradient, start, end):
    rows = torch.full((end - start, gradient.xs[0].shape[1]), float("nan"))
    torch.mm(gradient.dys[0][:, start:end].t(), gradient.xs[0], out=rows)
    return rows.addmm_(gradient.dys[1][:, start:end].t(), gradient.xs[1])


@in_interpreter
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_bits_do_not_depend_on_the_chunks(storage, chunks_of):
    """A product of one token has one rounding, whatever the size of the GEMM."""
    problem = make_problem(50, 33, [1], storage=storage, dense=True)
    chunks_of(50)
    whole = run_step(problem)
    for rows in (1, 7, 16, 49):
        chunks_of(rows)
        assert same_bits(run_step(problem), whole)


@in_interpreter
def test_strided_and_16_bit_inputs(chunks_of):
    chunks_of(16)
    problem = make_problem(40, 48, [30], dtype=torch.bfloat16)
    dy = problem.gradient.dys[0]
    problem.gradient.dys[0] = torch.cat([dy, torch.full_like(dy, 1e9)], 1)[:, :40]
    problem.gradient.xs[0] = problem.gradient.xs[0][:1].expand(30, -1)
    result = run_step(problem)
    assert relative_error(result.weight, step_fp64(problem)[0]) < 2e-6


@in_interpreter
def test_a_flag_leaves_everything_untouched(chunks_of):
    chunks_of(16)
    problem = make_problem(40, 48, [30])
    target, update = problem.target(), UPDATES["adamw"]
    scalars = ops.make_scalars(update, HYPER, 3, False, 7, target.weight.device, target.weight.dtype)
    ops.step(target, problem.gradient, update, scalars, torch.ones(1, dtype=torch.int32))
    assert same_bits(target, problem.target())
    ops.step(target, problem.gradient, update, scalars, torch.zeros(1, dtype=torch.int32))
    assert not same_bits(target, problem.target())


@in_interpreter
def test_a_weight_without_elements(chunks_of):
    chunks_of(4)
    for n, k in ((0, 3), (3, 0)):
        run_step(make_problem(n, k, [5], update="sgd"))


@in_interpreter
def test_chunks_above_the_crossover_without_being_told(monkeypatch):
    from fused_grad_optimizer.kernels import chunked

    seen = []
    monkeypatch.setattr(
        chunked, "multiply", lambda gradient, start, end, chunk: seen.append((start, end)) or chunk.zero_()
    )
    run_step(make_problem(9, 8, [1024]))
    assert not seen
    run_step(make_problem(9, 8, [1000, 25]))
    assert seen == [(0, 5), (5, 9)]


def test_a_buffer_kept_in_inference_mode_serves_outside_it(monkeypatch):
    """A CUDA device by its name only: the buffer is on the CPU."""
    from fused_grad_optimizer.kernels import chunked

    class Stream:
        cuda_stream = 5

    empty = torch.empty
    monkeypatch.setattr(chunked, "_buffers", type(chunked._buffers)())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(chunked.torch, "empty", lambda *sizes, device, **options: empty(*sizes, **options))
    gradient = Gradient([torch.ones(3, 2)], [torch.full((3, 4), 2.0)])
    device = torch.device("cuda", 0)
    with torch.inference_mode():
        key, made = chunked._take(8, device)
        chunked.multiply(gradient, 0, 2, made.view(2, 4))  # and it can be written to in there
        chunked._give(key, made)
    _, kept = chunked._take(8, device)
    assert kept is made
    with torch.no_grad():
        chunked.multiply(gradient, 0, 2, kept.zero_().view(2, 4))
    assert kept.tolist() == [6.0] * 8


@pytest.mark.parametrize("mib", [16, 24, 32])
@pytest.mark.parametrize(
    "n, k", [(14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096), (999, 1), (8192, 262144)]
)
def test_chunks_fit_and_are_not_the_weight(n, k, mib):
    rows = chunk_rows(n, k, 132, ChunkConfig(mib))
    assert 4 * rows * k <= mib << 20 and 1 <= rows <= (n + 1) // 2
    assert rows % 128 == 0 or 4 * 128 * k > mib << 20 or (n + 1) // 2 < 128


def test_chunks_fill_the_card_where_they_can():
    """Full waves of 128 x 128 tiles: at least nine of ten multiprocessors busy in the weights of an 8B model."""
    for n, k in ((14336, 4096), (4096, 4096), (128256, 4096)):
        tiles = chunk_rows(n, k, 132, ChunkConfig()) // 128 * -(-k // 128)
        assert tiles / (-(-tiles // 132) * 132) > 0.9 and tiles >= 132


def test_a_single_row_and_a_row_larger_than_the_limit():
    assert chunk_rows(1, 7, 132, ChunkConfig()) == 1
    assert chunk_rows(5, 1 << 24, 132, ChunkConfig(1)) == 1
    assert chunk_rows(0, 0, 132, ChunkConfig()) == 1


def test_every_candidate_is_a_change_of_its_configuration():
    import dataclasses

    made = {
        configs.HOPPER: [configs.hopper_config(6, tokens) for tokens in (128, 512, 4096)],
        configs.PORTABLE: [configs.gemm_config(64, 64, torch.bfloat16)],
        configs.CHUNKED: [ChunkConfig()],
    }
    for path, all_changes in configs.CANDIDATES.items():
        assert {} in all_changes  # the default is always measured
        for changes in all_changes:
            changed = [dataclasses.replace(config, **changes) != config for config in made[path]]
            assert any(changed) == bool(changes)  # what is the default for one T may be a change for another
