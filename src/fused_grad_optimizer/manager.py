"""`FusedOptimizerManager`: the API of the FORGE paper (arXiv 2606.22932) over `FusedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fused_grad_optimizer._backward_pass import BackwardPass
from fused_grad_optimizer._messages import shown
from fused_grad_optimizer._parameters import check_settings
from fused_grad_optimizer._state_io import read_state
from fused_grad_optimizer.modules import FusedLinear
from fused_grad_optimizer.optimizer import FusedOptimizer


class FusedOptimizerManager:
    """Steps the weights of all `FusedLinear.from_linear` layers of a model during backward.

    Everything else (biases, embeddings, norms) is in `get_non_fused_params()` for an ordinary optimizer.

    Args:
        model: a module that holds at least one layer made by `FusedLinear.from_linear`.
        seed: of stochastic rounding.

    Raises:
        ValueError: `model` is not a module or has no such layer, or one weight asked for with two different settings.

    Example:
        >>> model = nn.Sequential(FusedLinear.from_linear(nn.Linear(4, 2)))
        >>> manager = FusedOptimizerManager(model)
        >>> manager.pre_step(lr=1e-3)
        >>> model(torch.ones(3, 4)).sum().backward()   # the fused weight moves here
    """

    def __init__(self, model: nn.Module, *, seed: int = 0) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        self._model = model
        self._pass = BackwardPass("call manager.pre_step(lr=...) before each backward; nothing was changed")
        self._lr_given = True
        self._aliases: dict[str, str] = {}  # every name of a layer -> the first with the same weight
        self._groups: dict[str, dict[str, Any]] = {}  # layer name -> its parameter group
        self._optimizers: dict[tuple[str, str | None], FusedOptimizer] = {}
        layers = self._layers(model)
        if not layers:
            raise ValueError("model has no FusedLinear made by FusedLinear.from_linear(...)")
        self._lr_given = all("lr" in config["hyper"] for config in layers.values())
        by_kind: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
        for name, config in layers.items():
            kind = (config["optimizer_type"], config["state_mode"])
            weight = model.get_submodule(name).weight
            by_kind.setdefault(kind, []).append(
                {"params": [(f"{name}.weight", weight)], "layer": name, **config["hyper"]}
            )
        try:
            for (rule, state), groups in by_kind.items():
                optimizer = FusedOptimizer(groups, rule, when="backward", state=state, seed=seed)
                optimizer._pass = self._pass
                self._optimizers[(rule, state)] = optimizer
                self._groups.update({group["layer"]: group for group in optimizer.param_groups})
        except BaseException:
            for optimizer in self._optimizers.values():
                optimizer.release()
            raise

    def _layers(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Settings by layer name; a tied weight appears once, and must be asked for with one setting."""
        layers: dict[str, dict[str, Any]] = {}
        seen: dict[int, str] = {}
        for name, module in model.named_modules():
            if not isinstance(module, FusedLinear) or module.fused_config is None:
                continue
            first = seen.setdefault(id(module.weight), name)
            self._aliases[name] = first
            if first == name:
                layers[name] = module.fused_config
            elif layers[first] != module.fused_config:
                raise ValueError(f"{first} and {name} share a weight but were given different settings")
        return layers

    def get_non_fused_params(self) -> list[nn.Parameter]:
        """Parameters of the model that no fused layer steps: give them to an ordinary optimizer."""
        fused = {id(p) for group in self._groups.values() for p in group["params"]}
        return [p for p in self._model.parameters() if id(p) not in fused]

    def pre_step(
        self, lr: float | None = None, *, per_layer: Mapping[str, Mapping[str, Any]] | None = None, **hyper: Any
    ) -> None:
        """Open the next step: call it before each backward.

        Args:
            lr: learning rate of all fused layers.
            per_layer: layer name -> hyper-parameters of that layer alone.
            **hyper: further hyper-parameters of all fused layers.

        Raises:
            ValueError: an unknown layer or hyper-parameter or a bad value, no lr was ever given, or a weight whose
                memory was replaced by some that cannot be stepped (used or not; `requires_grad_(False)` excludes it).
            RuntimeError: an exception ended the last backward in its middle.
        """
        common = {**({"lr": lr} if lr is not None else {}), **hyper}
        per_layer = {} if per_layer is None else per_layer
        if not (isinstance(per_layer, Mapping) and all(isinstance(m, Mapping) for m in per_layer.values())):
            raise ValueError(
                f"per_layer={shown(per_layer)}: a dict of layer name -> dict of hyper-parameters is needed"
            )
        per_layer = {self._aliases.get(name, name): changes for name, changes in per_layer.items()}
        for name in per_layer:
            if name not in self._groups:
                raise ValueError(f"per_layer: {shown(name)} is not a fused layer; there are {', '.join(self._groups)}")
        changes = {name: {**common, **per_layer.get(name, {})} for name in self._groups}
        if not self._lr_given and not all("lr" in change for change in changes.values()):
            raise ValueError("pre_step needs lr=...: no learning rate was given to from_linear or an earlier pre_step")
        for (rule, _), optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                for key in changes[group["layer"]]:
                    if key not in optimizer.defaults:
                        raise ValueError(f"{key} is not a hyper-parameter of {rule}: {', '.join(optimizer.defaults)}")
                settings = check_settings(optimizer.rule, {**group, **changes[group["layer"]]})
                changes[group["layer"]] = {key: settings[key] for key in changes[group["layer"]]}
            optimizer._check_memory()
        self._pass.armed = False
        self._close_pass()
        for name, change in changes.items():
            self._groups[name].update(change)
        self._pass.armed = self._lr_given = True

    def _close_pass(self) -> None:
        """End the pass of all optimizers; after a backward that failed, say which layers of any of them moved."""
        failure = self._pass.failure() if self._pass.failed else None
        for optimizer in self._optimizers.values():
            if failure is None:
                optimizer.step()
            else:
                optimizer._finish()
        if failure is not None:
            raise RuntimeError(failure)

    @property
    def skipped(self) -> dict[str, int]:
        """Updates skipped because of NaN or inf, by parameter name."""
        return {name: n for optimizer in self._optimizers.values() for name, n in optimizer.skipped.items()}

    def state_dict(self) -> dict[str, Any]:
        """State of every fused layer, by rule and state mode."""
        return {f"{rule}/{state}": optimizer.state_dict() for (rule, state), optimizer in self._optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            ValueError: it was saved for other layers or settings; nothing has been changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict must be what state_dict() gave, not {type(state_dict).__name__}")
        mine = {f"{rule}/{state}": optimizer for (rule, state), optimizer in self._optimizers.items()}
        if set(mine) != set(state_dict):
            raise ValueError(f"state_dict holds {sorted(state_dict)}, the model's fused layers are {sorted(mine)}")
        for key, optimizer in mine.items():
            read_state(optimizer, state_dict[key])  # all fit before one is changed
        for key, optimizer in mine.items():
            optimizer.load_state_dict(state_dict[key])
        self._lr_given = True
