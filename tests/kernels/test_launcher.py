"""Direct launches on a fake driver: the same bytes as Triton passes, the right keys, and Triton where in doubt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from fused_grad_optimizer import ops  # noqa: E402
from fused_grad_optimizer.kernels import (  # noqa: E402
    Gradient,
    Target,
    cuda_driver,
    finite,
    launcher,
    multi_finite,
    param_step,
    wgrad_step,
)
from fused_grad_optimizer.kernels import wgrad_step_hopper as hopper  # noqa: E402
from fused_grad_optimizer.kernels.bound import BoundStep  # noqa: E402
from fused_grad_optimizer.kernels.configs import hopper_config  # noqa: E402
from fused_grad_optimizer.kernels.launch_layout import NotDirect, layout_of, ptx_parameters  # noqa: E402
from fused_grad_optimizer.rules import UPDATES  # noqa: E402
from tests.kernels.fake_cuda import fake_cuda, passed_by_triton  # noqa: E402

ADAMW = UPDATES["adamw"]
SCALARS, KEYS = torch.ones(7), torch.tensor([3, 4], dtype=torch.int32)


@pytest.fixture
def cuda():
    with fake_cuda() as fake:
        yield fake


def target(n, k, dtype=torch.bfloat16):
    storage = "bf16" if dtype == torch.bfloat16 else "fp32"
    return Target(torch.zeros(n, k, dtype=dtype), [torch.zeros(n, k, dtype=dtype) for _ in range(2)], [storage] * 3, 5)


def pairs(n, k, *tokens, dtype=torch.bfloat16, wide=0):
    dys = [torch.zeros(t, n + wide, dtype=dtype)[:, :n] for t in tokens]
    return dys, [torch.zeros(t, k + wide, dtype=dtype)[:, :k] for t in tokens]


def step_options(t, flag):
    stores, stochastic = ops._stores(t.storages)
    return {
        "target": t, "scalars": SCALARS, "keys": KEYS, "flag": flag, "update": ADAMW, "stores": stores,
        "stochastic": stochastic,
    }  # fmt: skip


def launches():
    """(label, function that launches), each of new tensors."""
    flags = torch.zeros(64, dtype=torch.int32)
    scale = torch.ones(())

    def hopper_step(n, k, *tokens, wide=0, scaled=None):
        gradient = Gradient(*pairs(n, k, *tokens, wide=wide), scale=scaled)
        options = step_options(target(n, k), flags[3])
        return lambda: hopper.launch(gradient, n, k, hopper_config(6), **options)

    def portable_step(n, k, *tokens, dtype=torch.float32, wide=0, dense=None):
        gradient = Gradient(*pairs(n, k, *tokens, dtype=dtype, wide=wide), scale=scale, dense=dense)
        options = step_options(target(n, k, dtype), flags[4])
        return lambda: wgrad_step.launch(gradient, n, k, **options)

    def param_step_of(dense):
        options = step_options(target(*dense.shape, torch.float32), flags[0])
        return lambda: param_step.launch(Gradient([], [], dense=dense), **options)

    def check(*tensors):
        return lambda: finite.check(list(tensors), flags[1])

    yield "hopper", hopper_step(256, 256, 128)
    yield "hopper, uneven, 2 pairs, scaled", hopper_step(272, 304, 100, 33, scaled=scale)
    yield "hopper, strided", hopper_step(256, 256, 64, wide=64)
    yield "portable fp32", portable_step(256, 256, 128)
    yield "portable bf16, uneven, 2 pairs, dense", portable_step(37, 29, 5, 6, dtype=torch.bfloat16, dense=scale)
    yield "portable, strided", portable_step(64, 64, 16, wide=3)
    yield "param step", param_step_of(torch.zeros(33, 7))
    yield "finite", check(*[t for p in pairs(256, 256, 64) for t in p])
    yield "finite, many", check(torch.zeros(5, 7), torch.zeros(9, 40)[:, 1:20], torch.zeros(()), torch.zeros(0, 3))
    addresses, constants = torch.zeros(35, dtype=torch.int64), multi_finite.constants(flags)
    together = (multi_finite.multi_finite_kernel, (7,), (addresses, flags, 5), constants)
    yield "finite, many gradients", lambda: launcher.launch(*together)


@pytest.mark.parametrize("number", range(10))
def test_the_same_bytes_as_triton_passes(cuda, monkeypatch, number):
    table = torch.zeros(2, 5, dtype=torch.int64)
    monkeypatch.setattr(wgrad_step, "_segment_table", lambda gradient, _: table if len(gradient.dys) > 1 else None)
    label, launch = list(launches())[number]
    launch()
    assert len(cuda.triton) == 1 and not cuda.direct, label
    launch()
    assert len(cuda.triton) == 1 and len(cuda.direct) == 1, (label, launcher.refusals())
    _, metadata, grid, function, _ = cuda.triton[0]
    wanted = (function, grid, 32 * metadata.num_warps, metadata.shared, passed_by_triton(cuda.triton[0]))
    assert cuda.direct[0] == wanted
    assert launcher.refusals() == {}


def both(cuda, launch):
    """Launch; how many launches Triton and the driver have seen."""
    launch()
    return len(cuda.triton), len(cuda.direct)


def test_what_triton_specialises_on_is_in_the_key(cuda):
    def sum_rows(stride=64, k=48, offset=0, dtype=torch.float32):
        order = torch.zeros(8, dtype=torch.int64)
        dy = torch.zeros(8 * 64 + 16, dtype=dtype)[offset:]
        positional = (order, dy, stride, order, torch.zeros(8, 64), k)
        launcher.launch(param_step.sum_rows_kernel, (2, 1), positional, {"BLOCK": 64, "enable_fp_fusion": False})

    seen = 0
    for options in (
        {}, {"offset": 1}, {"stride": 1}, {"stride": 63}, {"stride": 1 << 40}, {"stride": (1 << 40) + 1},
        {"dtype": torch.bfloat16}, {"k": 1},
    ):  # fmt: skip
        seen += 1
        assert both(cuda, lambda o=options: sum_rows(**o)) == (seen, seen - 1), options
        assert both(cuda, lambda o=options: sum_rows(**o)) == (seen, seen), options
        keys = [tuple(map(str, (s.signature, s.attrs))) for s, *_ in cuda.triton]
        assert len(set(keys)) == seen
    assert both(cuda, lambda: sum_rows(stride=128, k=80)) == (seen, seen + 1)
    cuda.device_index = 1
    assert both(cuda, sum_rows)[0] == seen + 1


def test_an_empty_grid_launches_nothing(cuda):
    args = (torch.zeros(8, dtype=torch.int64), torch.zeros(8, 64), 64, torch.zeros(8, dtype=torch.int64),
            torch.zeros(8, 64), 64)  # fmt: skip
    constants = {"BLOCK": 64, "enable_fp_fusion": False}
    launcher.launch(param_step.sum_rows_kernel, (2, 1), args, constants)
    launcher.launch(param_step.sum_rows_kernel, (0, 1), args, constants)
    assert not cuda.direct


def test_a_profilers_hooks_are_called_by_triton(cuda):
    check = lambda: finite.check([torch.zeros(64)], torch.zeros(1, dtype=torch.int32))  # noqa: E731
    assert both(cuda, check) == (1, 0)
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert both(cuda, check) == (2, 0)
        assert "hooks" in launcher.refusals()[""]
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert both(cuda, check) == (2, 1)


PTX = """
.visible .entry some_kernel(
	.param .u64 .ptr .global .align 1 some_kernel_param_0,
	.param .align 64 .b8 some_kernel_param_1[128],
	.param .u32 some_kernel_param_2,
	.param .u64 some_kernel_param_3,
	.param .u64 .ptr .global .align 1 some_kernel_param_4,
	.param .u64 .ptr .global .align 1 some_kernel_param_5
)
.reqntid 128
{
"""  # noqa: E101, W191


def compiled(signature, ptx=PTX, meta=None, **metadata):
    plain = {"num_ctas": 1, "launch_pdl": False, "target": SimpleNamespace(backend="cuda"), "tensordesc_meta": meta}
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature), asm={"ptx": ptx}, packed_metadata=(4, 1, 0),
        metadata=SimpleNamespace(**{**plain, **metadata}),
    )  # fmt: skip


def test_parameters_are_read_from_ptx():
    assert ptx_parameters(PTX) == [(8, True), (128, False), (4, False), (8, False), (8, True), (8, True)]
    for text in (PTX.replace(".entry", ".func"), PTX + PTX, PTX.replace(".u32", ".v4"), PTX.replace(".param", ".p", 1)):
        with pytest.raises(NotDirect):
            ptx_parameters(text)


META = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64], "fp4_padded": False}]
FITS = {"a": "*bf16", "b": "tensordesc<bf16[64],L>", "C": "constexpr"}
KERNEL = SimpleNamespace(pre_run_hooks=[])


def test_a_layout_that_fits():
    layout = layout_of(KERNEL, compiled(FITS, meta=META), 2)
    assert layout.kinds == ("pointer", "map") and layout.format == "<Qi4xq8x8x"
    assert layout.offsets == (0, None, 8, 16, 24, 32) and layout.map_parameters == (1,)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"signature": {**FITS, "a": "i64"}}, "pointer in PTX"),
        ({"signature": {"a": "*bf16", "b": "i32"}}, "bytes in PTX"),
        ({"signature": {**FITS, "x": "i32"}}, "keyword"),
        ({"signature": {**FITS, "a": "fp32"}}, "type fp32"),
        ({"meta": None}, "not passed as a tensor map"),
        ({"meta": [{**META[0], "fp4_padded": True}]}, "unusual"),
        ({"meta": META * 2}, "described"),
        ({"num_ctas": 2}, "num_ctas"),
        ({"launch_pdl": True}, "launch_pdl"),
        ({"launch_cooperative_grid": True}, "launch_cooperative_grid"),
        ({"global_scratch_size": 64}, "global_scratch_size"),
        ({"instrumentation_mode": "gsan"}, "instrumentation_mode"),
        ({"target": SimpleNamespace(backend="hip")}, "hip"),
        ({"ptx": PTX.replace("128\n{", "256\n{")}, "threads"),
    ],
)
def test_what_is_not_as_expected_is_left_to_triton(changed, says):
    with pytest.raises(NotDirect, match=says):
        layout_of(KERNEL, compiled(**{"signature": FITS, "meta": META, **changed}), 2)


def test_a_refusal_is_remembered_and_told(cuda, monkeypatch):
    def refuse(*_):
        raise NotDirect("because")

    monkeypatch.setattr(launcher, "layout_of", refuse)
    check = lambda: finite.check([torch.zeros(64)], torch.zeros(1, dtype=torch.int32))  # noqa: E731
    assert [both(cuda, check) for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]
    assert launcher.refusals() == {"nonfinite_kernel": "because"}


class Library:
    """libcuda, of which only launches are tried."""

    def __init__(self, *statuses):
        self.statuses, self.calls = list(statuses), []

    def cuLaunchKernel(self, function, *rest):  # noqa: N802
        self.calls.append((function.value, *rest))
        return self.statuses.pop(0)

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            return 0

        return call


def driver_of(monkeypatch, *statuses):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {1: 77}.__getitem__, raising=False)
    library = Library(*statuses)
    return cuda_driver.CudaDriver(library), library


def test_a_launch_by_the_driver(monkeypatch):
    driver, library = driver_of(monkeypatch, 0)
    driver.launch(driver.handle(5), (7, 2, 1), 128, 4096, "pointers")
    function, *grid, _, _, _, shared, stream, pointers, extra = library.calls[0]
    assert (function, grid, shared, stream.value, pointers, extra) == (5, [7, 2, 1], 4096, 77, "pointers", None)
    assert library.calls[0][4:7] == (128, 1, 1)


def test_a_thread_without_a_context_gets_one(monkeypatch):
    driver, library = driver_of(monkeypatch, 201, 0)
    driver.launch(driver.handle(5), (7, 2, 1), 128, 0, "pointers")
    assert library.calls[1:4] == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert library.calls[4] == library.calls[0] and len(library.calls) == 5


def test_a_launch_that_fails_is_an_error(monkeypatch):
    driver, _ = driver_of(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        driver.launch(driver.handle(5), (7, 2, 1), 128, 0, "pointers")


def test_bound_launches_move_addresses_only(cuda, monkeypatch):
    flag, t = torch.zeros(64, dtype=torch.int32), target(256, 256)
    fixed = [t.weight, *t.states]

    def operands():
        (dy,), (x,) = pairs(256, 256, 64)
        return dy, x

    def launches(dy, x):
        options = step_options(t, flag)
        return [
            lambda through: finite.check([dy, x], flag, through),
            lambda through: hopper.launch(Gradient([dy], [x]), 256, 256, hopper_config(6), through, **options),
        ]

    first, second = operands(), operands()
    with pytest.raises(NotDirect):
        BoundStep(launches(*first), [*first, flag, SCALARS, KEYS], fixed)
    for pair in (first, second):
        for launch in launches(*pair):
            launch(launcher.launch)
    wanted = cuda.direct[-2:]
    bound = BoundStep(launches(*first), [*first, flag, SCALARS, KEYS], fixed)
    moving = [*second, flag, SCALARS, KEYS]
    addresses = bound.addresses(moving, fixed)
    assert addresses == [t.data_ptr() for t in moving]
    for _ in range(2):
        bound.launch(addresses)
        assert cuda.direct[-2:] == wanted
    count, encoded = len(cuda.direct), cuda.encoded
    bound.launch(addresses, checked=True)
    assert cuda.encoded == encoded and len(cuda.direct) == count + 1 and cuda.direct[-1] == wanted[1]
    unaligned = torch.zeros(64 * 256 + 8, dtype=torch.bfloat16)[1:].view(-1)
    assert bound.addresses([unaligned, *moving[1:]], fixed) is None
    assert bound.addresses(moving, [t.weight.clone(), *t.states]) is None
    cuda.device_index = 1
    bound.launch(bound.addresses(moving, fixed))
    assert cuda.devices[-2:] == [0, 0] and cuda.device_index == 1
    assert len(cuda.direct) == count + 3


def test_what_cannot_be_bound(cuda):
    flag, (dys, xs) = torch.zeros(1, dtype=torch.int32), pairs(64, 64, 16, dtype=torch.float32)
    t = target(64, 64, torch.float32)

    def step(through=launcher.launch):
        wgrad_step.launch(Gradient(dys, xs), 64, 64, through=through, **step_options(t, flag))

    step()
    fixed = [t.weight, *t.states]
    assert BoundStep([step], [dys[0], xs[0], flag, SCALARS, KEYS], fixed)
    with pytest.raises(NotDirect, match="made for one launch"):
        BoundStep([step], [dys[0], flag, SCALARS, KEYS], fixed)
    with pytest.raises(NotDirect, match="two operands"):
        BoundStep([step], [dys[0], dys[0], flag, SCALARS, KEYS], fixed)


def test_a_thread_without_a_context_gets_one_for_its_tensor_maps(monkeypatch):
    class Library:
        """A driver whose calls succeed, and are written down."""

        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            return lambda *args: self.calls.append(name) or 0

    library, answers = Library(), [RuntimeError("invalid device context"), "map"]

    def fill(*values):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cuda_driver, "_triton_maps", lambda: (fill, {5: 9}, object))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    driver = cuda_driver.CudaDriver(library)
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 5, "block_size": [64, 32]}
    assert driver.encode(meta, 1 << 20, [256, 256], [256, 1]) == "map"
    assert library.calls == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    answers[:] = [RuntimeError("shape"), RuntimeError("shape")]
    with pytest.raises(RuntimeError, match="shape"):  # something else was wrong
        driver.encode(meta, 1 << 20, [256, 256], [256, 1])
