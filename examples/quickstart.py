"""The quick start: an MLP on the CPU, with the paper's API and with the one-line API. Runs in seconds.

python examples/quickstart.py
"""

import torch
import torch.nn.functional as F

import fused_grad_optimizer as forge
from fused_grad_optimizer import FusedLinear, FusedOptimizerManager


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))


def batches(steps: int = 100):
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(32, 10, generator=generator)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        yield x, (x @ teacher).argmax(1)


def with_manager() -> float:
    """Fused layers are updated during backward; an ordinary optimizer steps the rest."""
    model = make_model()
    for _, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, child_name, FusedLinear.from_linear(child, optimizer_type="adamw"))
    manager = FusedOptimizerManager(model)
    optimizer = torch.optim.AdamW(manager.get_non_fused_params(), lr=1e-3)
    for step, (x, y) in enumerate(batches()):
        manager.pre_step(lr=1e-3 * min(1.0, (step + 1) / 10))
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # fused layers are updated here
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def with_fuse() -> float:
    """One line for the whole model; any learning-rate schedule of torch works."""
    model = make_model()
    optimizer = forge.fuse(model, "adamw", lr=1e-3, when="step")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    print(f"manager: loss {with_manager():.3f}")
    print(f"fuse:    loss {with_fuse():.3f}")
