"""Every trainable parameter is stepped, whatever module it is in, and the report says how."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_grad_optimizer as forge

from .helpers import BOTH, both, data, pair, passes, ref, same_curve, train


class Conv1D(nn.Module):
    """y = x W + b, W [in, out]."""

    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(i, o) * 0.2), nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = Conv1D(4, 4)
        self.experts = nn.Parameter(torch.randn(3, 4, 4) * 0.3)
        self.lstm, self.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = torch.einsum("btd,edf->betf", self.conv(x), self.experts).sum(1)
        x = self.lstm(x)[0] + self.gru(x)[0]
        return self.out(self.norm(x)) * self.scale


class MoreKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.ConvTranspose1d(6, 4, 3, padding=1)
        self.group_norm, self.batch_norm = nn.GroupNorm(2, 4), nn.BatchNorm1d(4)
        self.prelu, self.bag = nn.PReLU(), nn.EmbeddingBag(5, 4)
        self.bilinear = nn.Bilinear(4, 4, 3)
        self.alone = nn.ParameterList([torch.randn(3), torch.randn(2, 2, 3)])
        self.by_name = nn.ParameterDict({"a": torch.randn(3, 1)})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x):
        x = self.transposed(self.prelu(self.conv1(x.transpose(1, 2))))
        x = self.batch_norm(self.group_norm(x))
        x = self.conv2(x.unsqueeze(1)).mean(1).transpose(1, 2)
        x = self.bilinear(x, x + self.bag(torch.arange(5).view(1, 5)))
        return self.normed(x * self.alone[0]) + self.alone[1].sum((0, 1)) + self.by_name["a"].t()


def check_all_move(make, when, **hyper):
    a, oa, b, ob = both(make, when, **hyper)
    first = {k: v.detach().clone() for k, v in b.named_parameters()}
    width = 2 if make is Everything else 3
    ignore = train(a, oa, b, ob, lambda m, i: (m(data(i, 2, 5, 4)) * data(i + 9, 2, 5, width)).sum())
    assert passes(a, b, 3, ignore)
    assert not [k for k, v in b.named_parameters() if torch.equal(v, first[k])]
    owned = [p for group in ob.param_groups for p in group["params"]]
    assert len(owned) == len({id(p) for p in owned}) and {id(p) for p in owned} == {id(p) for p in b.parameters()}
    return b, ob


@BOTH
def test_every_parameter_equals_dense(when):
    b, ob = check_all_move(Everything, when)
    assert ob.report.converted == {"out": "FusedLinear"}
    assert {"conv.weight", "experts", "lstm.weight_ih_l0", "gru.weight_hh_l0"} <= set(ob.report.skipped)
    text = str(ob.report)
    assert "experts" in text and "out: FusedLinear" in text


@BOTH
def test_other_kinds_of_modules(when):
    b, ob = check_all_move(MoreKinds, when, eps=1e-3)
    assert not ob.report.converted and "normed" in ob.report.skipped


@BOTH
@pytest.mark.parametrize("state", ["bf16", "bf16-nearest"])
def test_lossy_states_follow_the_dense_loss(when, state):
    a, oa, b, ob = both(Everything, when, state=state)
    assert same_curve(a, oa, b, ob, lambda m, i: (m(data(i % 4, 2, 5, 4)) - 1).square().mean())


@BOTH
def test_conv1d_of_gpt2_is_converted_with_its_orientation(when):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    def make():
        return nn.Sequential(conv1d(7, 4), nn.Tanh(), conv1d(3, 7))

    a, oa, b, ob = both(make, when)
    ignore = train(a, oa, b, ob, lambda m, i: m(data(i, 2, 5, 4)).square().sum())
    assert passes(a, b, 3, ignore)
    assert ob.report.converted == {"0": "FusedConv1D", "2": "FusedConv1D"} and isinstance(b[0], conv1d)


@BOTH
def test_gpt2_equals_dense(when):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip

    def loss(m, i):
        ids = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(i))
        return m(input_ids=ids, labels=ids).loss

    a, oa, b, ob = both(lambda: transformers.GPT2LMHeadModel(config), when, eps=1e-4)
    first = {k: v.detach().clone() for k, v in b.named_parameters()}
    ignore = train(a, oa, b, ob, loss)
    assert passes(a, b, 3, ignore)
    assert not [k for k, v in b.named_parameters() if torch.equal(v, first[k])]
    assert len(ob.report.converted) == 2 * 4 + 3 and b.lm_head.weight is b.transformer.wte.weight


@BOTH
def test_excluded_modules_are_stepped_all_the_same(when):
    a, b = pair(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    oa = ref(a)
    ob = forge.fuse(b, when=when, lr=1e-2, weight_decay=0.01, exclude=["2"])
    train(a, oa, b, ob, lambda m, i: m(data(i, 4, 4)).square().sum())
    assert passes(a, b, 3)
    assert ob.report.converted == {"0": "FusedLinear"} and set(ob.report.skipped) == {"2"}


@BOTH
def test_a_scalar_and_an_empty_parameter(when):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(x) / self.temperature.exp() + self.nothing.sum()

    a, oa, b, ob = both(Net, when)
    ignore = train(a, oa, b, ob, lambda m, i: F.mse_loss(m(data(i, 3, 4)), torch.ones(3, 2)))
    assert passes(a, b, 3, ignore) and b.temperature.item() != 0.5
