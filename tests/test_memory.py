"""Byte accounting against numbers from elsewhere: published counts, sums by hand, tensors of a real step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fused_grad_optimizer as forge
from fused_grad_optimizer.memory import TrainingMemory, training_memory
from fused_grad_optimizer.rules import RULES

GIB = 2**30
BF16 = torch.bfloat16


def llama(dtype=BF16, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).to(dtype)


# -- Llama-3.1-8B --------------------------------------------------------------------------------------------------


def test_llama_8b_in_backward():
    kept = training_memory(llama(), "adamw")
    assert kept.parameters == 8_030_261_248
    assert kept.weights == 2 * 8_030_261_248 and kept.states == 4 * 8_030_261_248
    assert round((kept.weights + kept.states) / GIB, 2) == 44.87
    assert kept.gradients == 4096 * 2  # a norm's
    assert kept.adamw == 8 * 8_030_261_248 and round(kept.adamw / GIB, 2) == 59.83
    assert kept.total == kept.weights + kept.states + kept.gradients


def test_llama_8b_in_step():
    kept = training_memory(llama(), "adamw", when="step", tokens=512)
    layer = (4096 + 4096) * 2 + (1024 + 4096) * 2 + (14336 + 4096) * 3  # q o, k v, gate up down
    factors = 512 * 2 * (32 * layer + 128256 + 4096)
    embedding = 512 * 8 + 512 * 4096 * 2
    assert kept.gradients == factors + embedding + 65 * 4096 * 2  # and the norms
    # at 64k tokens everything but the embedding's and the head's rows is smaller as an fp32 sum
    many = training_memory(llama(), "adamw", when="step", tokens=1 << 16)
    linears = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096) + 128256 * 4096
    embedding = (1 << 16) * (8 + 4096 * 2)
    assert many.gradients == 4 * linears + embedding + 65 * 4096 * 2


def test_llama_8b_with_fp32_states_and_other_rules():
    assert training_memory(llama(), "adamw", state="fp32").states == 8 * 8_030_261_248
    assert training_memory(llama(), "adamw", state="bf16-nearest").states == 4 * 8_030_261_248
    assert training_memory(llama(torch.float16), "adamw").states == 8 * 8_030_261_248  # fp16 weights have fp32 states
    assert training_memory(llama(), "lion").states == 2 * 8_030_261_248
    assert training_memory(llama(), "sgd").states == 0
    assert training_memory(llama(), "sgd", momentum=0.9).states == 2 * 8_030_261_248
    assert training_memory(llama(), "sgd").adamw == 8 * 8_030_261_248  # the comparison stays AdamW


def test_a_tied_head_counts_once():
    tied = training_memory(llama(tie_word_embeddings=True), when="step", tokens=512)
    untied = training_memory(llama(), when="step", tokens=512)
    assert untied.parameters - tied.parameters == 128256 * 4096
    assert tied.gradients == untied.gradients  # both uses still give their factors


# -- real tensors --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied embedding and head, a frozen layer, a norm, a bias, a convolution, a weight used outside its module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 12), nn.Linear(12, 40, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.down, self.frozen = nn.Linear(12, 50), nn.Linear(50, 12), nn.Linear(12, 12)
        self.norm, self.conv = nn.LayerNorm(12), nn.Conv1d(12, 12, 3, padding=1)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.down(self.up(x).tanh()))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.frozen(x))


def ids(tokens):
    return torch.randint(0, 40, (1, tokens), generator=torch.Generator().manual_seed(0))


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def held(grad):
    """Bytes in a gradient: its factors and its dense part."""
    if not isinstance(grad, forge.FactoredGrad):
        return nbytes([grad])
    return grad.factor_bytes() + (nbytes([grad.dense]) if grad.dense is not None else 0)


def state_bytes(optimizer):
    return nbytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
@pytest.mark.parametrize("state", [None, "fp32", "bf16"])
def test_states_of_a_real_step(rule, dtype, state):
    model = Net().to(dtype)
    hyper = {"momentum": 0.9} if rule == "sgd" else {}
    with torch.device("meta"):
        on_meta = training_memory(Net().to(dtype), rule, state=state, **hyper)
    before = training_memory(model, rule, state=state, **hyper)
    optimizer = forge.fuse(model, rule, state=state, lr=1e-3, **hyper)
    model(ids(5)).square().sum().backward()
    optimizer.step()
    after = training_memory(model, rule, state=state, **hyper)
    assert on_meta == before == after
    assert after.parameters == sum(p.numel() for p in model.parameters())
    assert after.weights == nbytes(model.parameters())
    assert after.states == state_bytes(optimizer)
    assert after.gradients == nbytes([model.conv.weight])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
@pytest.mark.parametrize("exclude", [None, ["up"], ["head"]])
@pytest.mark.parametrize("tokens", [3, 7, 9, 40, 300])
def test_gradients_of_a_real_backward_before_step(dtype, exclude, tokens):
    model = Net().to(dtype)
    kept = training_memory(model, when="step", tokens=tokens, exclude=exclude)
    optimizer = forge.fuse(model, when="step", exclude=exclude)
    model(ids(tokens)).square().sum().backward()
    assert kept.gradients == sum(held(p.grad) for p in model.parameters() if p.grad is not None)
    optimizer.step()


def test_what_torch_keeps():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids(5)).square().sum().backward()
    optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    counts = 4 * len(trained)  # torch's step counts, one fp32 each
    kept = nbytes(model.parameters()) + state_bytes(optimizer) - counts + nbytes(p.grad for p in trained)
    assert training_memory(model).adamw == kept


def test_conv1d_of_gpt2_is_factored():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(64, 16))  # weight [16, 64]
    assert training_memory(model).gradients == 64 * 4  # only the bias
    assert training_memory(model, when="step", tokens=4).gradients == 4 * (64 + 16) * 4 + 64 * 4


def test_a_frozen_model_keeps_its_weights_only():
    model = nn.Linear(8, 4).requires_grad_(False)
    weights = (8 * 4 + 4) * 4
    assert training_memory(model) == TrainingMemory(36, weights, 0, 0, weights)


# -- shapes and refusals -------------------------------------------------------------------------------------------


def test_named_shapes():
    shapes = {"a": (30, 20), "bias": (30,), "conv": (4, 3, 3), "scale": (), "none": (0, 5)}
    count = 600 + 30 + 36 + 1
    assert training_memory(shapes, dtype=BF16) == TrainingMemory(count, 2 * count, 4 * count, 72, 8 * count)
    kept = training_memory(shapes, when="step", tokens=6, dtype=BF16)
    assert kept.gradients == 6 * 50 * 2 + 2 * (30 + 36 + 1)
    assert training_memory(shapes, when="step", tokens=100, dtype=BF16).gradients == 600 * 4 + 2 * (30 + 36 + 1)
    assert training_memory(shapes).weights == 4 * count
    assert training_memory({"a": torch.Size((3, 2))}).parameters == 6


@pytest.mark.parametrize(
    "model, arguments, message",
    [
        (nn.Linear(2, 2), {"rule": "adamx"}, "rule='adamx'"),
        (nn.Linear(2, 2), {"state": "int9"}, "state='int9'"),
        (nn.Linear(2, 2), {"weight": "up"}, "weight='up'"),
        (nn.Linear(2, 2), {"when": "later"}, "when='later'"),
        (nn.Linear(2, 2), {"when": "step"}, "tokens is needed"),
        (nn.Linear(2, 2), {"tokens": 0}, "tokens=0"),
        (nn.Linear(2, 2), {"tokens": 2.5}, r"tokens=2\.5"),
        (nn.Linear(2, 2), {"tokens": True}, "tokens=True"),
        (nn.Linear(2, 2), {"momentum": 0.9}, "momentum is not a hyper-parameter of adamw"),
        (nn.Linear(2, 2), {"lr": -1.0}, "lr"),
        (nn.Linear(2, 2), {"dtype": BF16}, "dtype=torch.bfloat16 is for named shapes"),
        (nn.Linear(2, 2), {"exclude": ["head"]}, "exclude: no module"),
        (nn.Sequential(), {}, "no parameters"),
        (nn.LazyLinear(2), {}, "weight is not initialised"),
        (nn.Linear(2, 2, dtype=torch.complex64), {}, "weight: weights of dtype torch.complex64"),
        ([(2, 2)], {}, "model_or_named_shapes must be"),
        ({}, {}, "model_or_named_shapes is empty"),
        ({"a": 3}, {}, "the shape of a"),
        ({"a": (3, -1)}, {}, "the shape of a"),
        ({"a": (3, 2)}, {"dtype": torch.int8}, "a: weights of dtype torch.int8"),
        ({"a": (3, 2)}, {"exclude": ["a"]}, "exclude is for a model"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_bad_arguments_are_named(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        training_memory(model, **arguments)


# -- what only a GPU keeps ------------------------------------------------------------------------------------------


def test_small_gradients_wait_on_a_gpu():
    kept, on_cpu = (training_memory(llama(), "adamw", device=device) for device in ("cuda", None))
    assert on_cpu.gradients == 4096 * 2 and on_cpu.workspace == 0
    assert kept.gradients == 65 * 4096 * 2  # all norms
    assert kept.workspace == (24 << 20) + 16 * 2 * 291  # 9 parameters a layer, and three
    assert kept.total == on_cpu.total + 64 * 4096 * 2 + kept.workspace
    step = training_memory(llama(), "adamw", when="step", tokens=512, device="cuda")
    assert step.gradients == training_memory(llama(), "adamw", when="step", tokens=512).gradients
    assert step.workspace == kept.workspace


def test_no_more_than_four_million_small_elements_wait():
    shapes = {f"b{i}": (1 << 16,) for i in range(100)} | {"large": (3, 1 << 20)}
    kept = training_memory(shapes, dtype=BF16, device="cuda", exclude=None)
    assert kept.gradients == 2 * ((1 << 22) + (1 << 16)) and kept.workspace > 0
    shapes["conv"] = (2, 3, 1 << 20)
    assert training_memory(shapes, dtype=BF16, device="cuda").gradients == kept.gradients + 2 * 6 * (1 << 20)
    few = {f"b{i}": (7,) for i in range(3)}
    assert training_memory(few, dtype=BF16, device="cuda").gradients == 2 * 21
    assert training_memory(few, dtype=torch.float64, device="cuda").gradients == 8 * 7  # has no kernels


@pytest.mark.parametrize("n, k", [(1, 5), (8, 4), (4096, 4096), (4097, 4095), (1 << 20, 8), (3, 1 << 23)])
def test_the_chunk_is_no_smaller_than_the_one_that_is_taken(n, k):
    from fused_grad_optimizer.kernels.configs import ChunkConfig, chunk_rows

    flags = 16 * 64
    kept = training_memory({"w": (n, k)}, device="cuda").workspace - flags
    for multiprocessors in (1, 108, 132, 144):
        assert 4 * k * chunk_rows(n, k, multiprocessors, ChunkConfig()) <= kept
    assert kept <= max(24 << 20, 4 * k) and training_memory({"w": (n, k)}).workspace == 0


def test_an_embedding_has_no_chunk_and_frozen_or_fp64_weights_neither():
    for model in (nn.Embedding(9, 4), nn.Linear(4, 9).requires_grad_(False), nn.Linear(4, 9).double(), nn.LayerNorm(4)):
        assert training_memory(model, device="cuda").workspace == 16 * 64


@pytest.mark.parametrize("device", ["nowhere", 1.5, []])
def test_a_device_that_is_none(device):
    with pytest.raises(ValueError, match="device="):
        training_memory(nn.Linear(2, 2), device=device)


def test_switches_of_fuse_are_taken():
    assert training_memory(nn.Linear(2, 2), maximize=True, seed=3) == training_memory(nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("when, path", [("backward", "chunked"), ("backward", None), ("step", "chunked")])
def test_a_gpu_keeps_what_is_counted(monkeypatch, when, path, dtype):
    """After a step: weights, states and workspace. Scalars and keys of a few bytes and the allocator's rounding to 512
    bytes a tensor come on top. The library of the GEMM may keep a workspace too: it is allocated before."""
    from fused_grad_optimizer.kernels import chunked

    if path is not None:
        monkeypatch.setenv("FORGE_KERNEL", path)
    chunked.release()
    x = torch.randn(64, 2048, device="cuda", dtype=dtype)
    (x @ x.t()).sum().item()
    torch.mm(x.t(), x, out=torch.empty(2048, 2048, device="cuda", dtype=dtype))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(nn.Linear(2048, 4096), nn.LayerNorm(4096), nn.Linear(4096, 2048)).to("cuda", dtype)
    optimizer = forge.fuse(model, lr=1e-3, when=when)
    kept = training_memory(model, when=when, tokens=64)
    for _ in range(4):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() - before
    tensors = 3 * len(list(model.parameters())) + 64
    assert used <= kept.weights + kept.states + kept.workspace + 512 * tensors + (9 << 20)  # cuBLAS's for mixed outputs
    if path == "chunked":
        assert used >= kept.weights + kept.states + kept.workspace // 2
