"""`FusedOptimizer`: a `torch.optim.Optimizer` whose step runs inside the weight-gradient GEMM."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fused_grad_optimizer import _hooks, _plans, _state_io
from fused_grad_optimizer._applied_grad import AppliedGrad
from fused_grad_optimizer._backward_pass import BackwardPass, comes_to, watch_grad_scaler
from fused_grad_optimizer._flags import SkipFlags
from fused_grad_optimizer._messages import shown
from fused_grad_optimizer._parameters import (
    ParameterRecord,
    check_gradient,
    check_memory,
    check_parameter,
    check_settings,
    check_state,
    check_trainable,
    finite_operands,
    gradient_of,
    group_of,
    listed,
    matrix_view,
    refuse_several_processes,
    stepped_on_device,
    storage_order,
    warn_about_rounding,
)
from fused_grad_optimizer._small import Entry, SmallQueue, is_small, step_together
from fused_grad_optimizer._strangers import Strangers
from fused_grad_optimizer.factored_grad import FactoredGrad
from fused_grad_optimizer.kernels import Target
from fused_grad_optimizer.modules._registry import claim, give_up, is_factored
from fused_grad_optimizer.ops import StepScalars, check_finite, make_scalars, step
from fused_grad_optimizer.rules import Update, get_rule
from fused_grad_optimizer.storage import check_modes, state_storage, weight_storage

WHEN = ("backward", "step")


class FusedOptimizer(torch.optim.Optimizer):
    """Steps weights from factored gradients without forming them, and all other parameters from ordinary gradients.

    Args:
        params: parameters, named parameters, or parameter groups, as for any torch.optim optimizer.
        rule: "adamw", "adam", "sgd" or "lion".
        when: "backward": each parameter is updated during backward, as soon as its gradient is complete, and the
            gradient is freed (lowest memory). "step": updates happen in `step()`; clipping, accumulation and loss
            scaling work as usual.
        state: how states are kept: "fp32", "bf16" (stochastic rounding), "bf16-nearest"; default the weight's dtype
            (fp32 for fp16 weights).
        weight: how bf16 weights are rounded: "stochastic" (default) or "nearest".
        seed: of the random bits of stochastic rounding; kept in the parameter groups, so in `state_dict`.
        **hyper: the rule's hyper-parameters, with torch.optim's names (lr, betas, eps, weight_decay, maximize, ...).

    Raises:
        ValueError: an argument or parameter that is not offered, naming it and the remedy; nothing is changed then.

    Example:
        >>> import fused_grad_optimizer as forge
        >>> model = forge.convert(nn.Linear(4, 2))
        >>> optimizer = FusedOptimizer(model.parameters(), "adamw", lr=1e-2, when="step")
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step(); optimizer.zero_grad()
        >>> int(optimizer.state[model.weight]["step"])
        1

    On a GPU the host learns late of an update that was skipped for NaN or inf: until the next pass begins,
    `state[p]["step"]` counts it. `state_dict()` and `skipped` wait for the device, and all counts are right after them.
    """

    report: Any = None

    def __init__(
        self,
        params: Iterable,
        rule: str = "adamw",
        *,
        when: str = "backward",
        state: str | None = None,
        weight: str | None = None,
        seed: int = 0,
        **hyper: Any,
    ) -> None:
        self.rule = get_rule(rule)
        check_modes(state, weight)
        if when not in WHEN:
            raise ValueError(f"when={shown(when)} is not offered; choose 'backward' or 'step'")
        defaults = {**self.rule.defaults, "maximize": False, "seed": seed}
        for name in hyper:
            if name not in defaults:
                raise ValueError(f"{name} is not a hyper-parameter of {rule}; it takes {', '.join(defaults)}")
        defaults.update(hyper)
        defaults = check_settings(self.rule, defaults)
        params = listed(params, "params")
        self.when, self.state_mode, self.weight_mode = when, state, weight
        self._records: dict[torch.Tensor, ParameterRecord] = {}
        self._stepped: dict[int, tuple[dict[str, Any], ParameterRecord]] = {}  # by id: a tensor's hash is slow
        self._scalars: dict[Any, StepScalars] = {}
        self._hooks: list[Any] = []
        weakref.finalize(self, _hooks.remove_all, self._hooks)
        self._pass = BackwardPass()  # a manager puts one for all its optimizers here
        self._began = False
        self._number = -1  # of the pass when it began
        self._settings: Any = None
        self._flags = SkipFlags()
        self._queue = SmallQueue(self)
        self._strangers = Strangers()
        try:
            super().__init__(params, defaults)
        except BaseException:
            self.release()
            raise
        warn_about_rounding(self._records, weight)
        if when == "backward":
            watch_grad_scaler()

    # -- parameters --------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim; everything is checked before anything is added."""
        group = check_settings(self.rule, {**self.defaults, **group_of(param_group)})
        refuse_several_processes()
        named = group["params"]
        count = len(self._records)
        names = [name or f"parameter {count + i}" for i, (name, _) in enumerate(named)]
        before = {p: record.name for p, record in self._records.items()}
        for name, (_, parameter) in zip(names, named):
            check_parameter(parameter, name, self.weight_mode, self)
            if parameter in before:
                raise ValueError(f"{name} is given twice, before as {before[parameter]}: leave one of them out")
            before[parameter] = name
        if self._wants_names(named):
            group["params"] = list(zip(names, [p for _, p in named]))
            group["param_names"] = names
        else:
            group["params"] = [p for _, p in named]
        super().add_param_group(group)
        for name, (_, parameter) in zip(names, named):
            self._records[parameter] = ParameterRecord(name, len(self._records))
            claim(parameter, self)
            self._hook(parameter)

    def _wants_names(self, named: list[tuple[str | None, torch.Tensor]]) -> bool:
        """Whether torch is to know the names of a new group: of all groups or of none. The first not empty decides."""
        if any(group["params"] for group in self.param_groups) or not named:
            return any("param_names" in group for group in self.param_groups)
        all_named = all(name is not None for name, _ in named)
        for group in self.param_groups if all_named else ():
            group["param_names"] = []
        return all_named

    def _hook(self, parameter: torch.Tensor) -> None:
        """Have autograd call back once it has summed the gradient. Frozen parameters get theirs when they train."""
        record = self._records[parameter]
        if record.hook is not None or not parameter.requires_grad or not parameter.is_leaf:
            return
        if self.when == "backward":
            record.applied = AppliedGrad(parameter, record.name)
        record.hook = _hooks.register(self, parameter)
        self._hooks.append(record.hook)

    def release(self) -> None:
        """Remove all hooks and give the parameters back: another optimizer can take them."""
        _hooks.remove_all(self._hooks)
        self._queue.drop()
        for parameter, record in self._records.items():
            record.hook = None
            if isinstance(parameter.grad, AppliedGrad):
                parameter.grad = None
            give_up(parameter, self)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name in messages.

        Raises:
            ValueError: the optimizer has no such parameter.
        """
        record = self._records.get(parameter) if isinstance(parameter, torch.Tensor) else None
        if record is None:
            raise ValueError(f"{shown(parameter)} is not a parameter of this optimizer")
        return record.name

    def watch(self, model: nn.Module) -> None:
        """Warn from now on when the model holds trainable parameters that this optimizer does not step."""
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        self._strangers = Strangers(model)

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Once between two `step()`s, before the first update; and again after a backward that moved nothing."""
        with self._pass.lock:  # the first updates of two devices may come together: one begins, the other waits
            self._begin_once()

    def _begin_once(self) -> None:
        if self._began:
            if self._number == self._pass.number:
                return
            self._flags.end()
            self._began = False
        refuse_several_processes()
        _plans.check_forced(self._records)
        if torch._C._current_graph_task_id() >= 0:  # step() has checked those that it steps
            self._check_memory(comes_to)
        if self.when == "backward":
            self._stepped = {id(p): (group, self._record_of(p)) for group in self.param_groups for p in group["params"]}
        self._strangers.warn(self._records)
        self._apply_skips()
        self._scalars.clear()
        self._flags.begin()
        self._settings = _plans.forget_if_changed(
            self._records.values(), self._settings, self.weight_mode, self.state_mode
        )
        self._began, self._number = True, self._pass.number

    def _record_of(self, parameter: torch.Tensor) -> ParameterRecord:
        record = self._records.get(parameter)
        if record is None:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} was put into param_groups by hand: add it by "
                "add_param_group()"
            )
        return record

    def _check_memory(self, concerns: Callable[[torch.Tensor], bool] = lambda parameter: True) -> None:
        """Raise `ValueError` if a trainable parameter that this `concerns` cannot be stepped in its memory."""
        for parameter, record in self._records.items():
            if parameter.requires_grad:
                try:
                    check_memory(parameter, record.name, self.weight_mode)
                except ValueError:
                    if concerns(parameter):
                        raise

    def _end(self) -> None:
        if self._began:
            self._flags.end()
            self._began = False
        self._pass.end()
        torch.clear_autocast_cache()  # it may hold casts of the weights as they were

    def _apply_skips(self) -> None:
        """Learn which updates the device skipped for NaN or inf; their step counts go back, and it is said.

        Between a backward and `step()` those of that backward too, which waits for the device.
        """
        names = []
        with self._pass.lock:
            if self._began:
                self._flags.restart()
            skipped = self._flags.collect()
            for parameter, record in self._records.items() if skipped else ():
                if record.index in skipped:
                    names.append(record.name)
                    state = self.state.get(parameter, {})
                    if skipped[record.index] == "device" and state.get("step", 0) > 0:  # else it was taken away
                        state["step"] -= 1
        if names:
            warnings.warn(
                f"NaN or inf in the gradients of {', '.join(names)}: these and their states were left untouched",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def skipped(self) -> dict[str, int]:
        """How many updates of each parameter were skipped because of NaN or inf. Waits for the device."""
        self._apply_skips()
        return {r.name: self._flags.counts[r.index] for r in self._records.values() if self._flags.counts.get(r.index)}

    def _state_of(self, parameter: torch.Tensor, update: Update) -> tuple[dict[str, Any], bool]:
        """State of the parameter, created or converted to its present dtype, device and strides: `(state, fresh)`.

        Raises:
            ValueError: a state has another shape than the parameter.
        """
        state = self.state[parameter]
        for name in update.states:
            if state.get(name) is not None:
                check_state(name, state[name], parameter, self.name_of(parameter))
        fresh = state.setdefault("step", 0) == 0
        dtype = state_storage(parameter.dtype, self.state_mode).dtype
        for name in update.states:
            kept = state.get(name)
            if kept is None:
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                fresh = True
            elif (
                kept.dtype != dtype or kept.device != parameter.device or kept.stride() != parameter.stride()
            ):  # kernels address a state as they address its parameter
                state[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(kept)
        return state, fresh

    def _scalars_of(self, group, update, step_number: int, fresh: bool, parameter: torch.Tensor) -> StepScalars:
        key = (id(group), update.name, step_number, fresh, parameter.device, parameter.dtype)
        found = self._scalars.get(key)
        if found is None:
            found = make_scalars(update, group, step_number, fresh, group["seed"], parameter.device, parameter.dtype)
            self._scalars[key] = found
        return found

    def _update_generally(
        self, parameter: torch.Tensor, record: ParameterRecord, group: dict[str, Any], grad: torch.Tensor
    ) -> None:
        """One update of one parameter, in place. Not finite: nothing is written."""
        self._say_once_if_dense(parameter, record, grad)
        on_device = stepped_on_device(parameter)
        flag = self._flags.of(record.index, parameter.device)
        check_finite(finite_operands(grad), flag)
        if not on_device and int(flag) != 0:
            self._flags.skipped_on_host(record.index)
            return
        update = self.rule.select(group)
        state, fresh = self._state_of(parameter, update)
        if parameter.numel() == 0:
            state["step"] += 1
            return
        order = storage_order(parameter)
        states = [state[name] for name in update.states]
        weight = weight_storage(parameter.dtype, self.weight_mode).name
        kept = state_storage(parameter.dtype, self.state_mode).name
        target = Target(
            matrix_view(parameter.detach(), order),
            [matrix_view(s, order) for s in states],
            [weight] + [kept] * len(states),
            record.index,
        )
        gradient = gradient_of(parameter, grad, order, group["maximize"])
        scalars = self._scalars_of(group, update, state["step"] + 1, fresh, parameter)
        step(target, gradient, update, scalars, flag if on_device else None)
        state["step"] += 1
        if on_device and record.plan is None:
            record.plan = _plans.make(parameter, grad, target, update, states)

    def _say_once_if_dense(self, parameter: torch.Tensor, record: ParameterRecord, grad: torch.Tensor) -> None:
        dense = not isinstance(grad, FactoredGrad)
        if dense and is_factored(parameter) and self._strangers.model is not None and "dense" not in record.said:
            record.said.add("dense")
            warnings.warn(
                f"{record.name} got a dense gradient (it is used outside its module, or create_graph=True): it is "
                "stepped like any other, without the memory saving",
                stacklevel=4,
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; with `when="backward"`, end the pass that backward stepped.

        Args:
            closure: runs forward and backward with gradients enabled and returns the loss, which `step` returns.

        Raises:
            RuntimeError: an exception ended the last backward in its middle; the message names the layers that moved.
                Or what a gradient consists of was modified in place; nothing has been changed by this call then,
                unless it was this call that modified it, by stepping a weight that another's gradient consists of.
            ValueError: a gradient that cannot be stepped (sparse, or of another shape), or a parameter whose new
                memory cannot be (strides that leave gaps, say); nothing has been changed by this call then. Or a state
                of another shape than its parameter, which has not moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass.settle()
        if self._pass.failed:
            message = self._pass.failure()
            self._finish()
            raise RuntimeError(message)
        todo = []
        for group in self.param_groups:
            for parameter in group["params"]:
                record, grad = self._records.get(parameter) or self._record_of(parameter), parameter.grad
                if grad is not None and not isinstance(grad, AppliedGrad):
                    check = check_trainable if record.hook is None else check_memory
                    check(parameter, record.name, self.weight_mode)
                    check_gradient(grad, parameter, record.name)
                    if isinstance(grad, FactoredGrad):
                        grad.check_unmodified(record.name)
                    todo.append((parameter, record, group, grad))
        if todo:
            self._begin()
            self._scalars.clear()  # those of a backward hold what the groups said then
        elif not self._began:
            self._strangers.warn(self._records)
        try:
            with self._pass.lock:  # flags are not read and cleared on another thread meanwhile
                self._update_all(todo)
        except BaseException:
            self._finish()  # the next step must not take this one's values and flags
            raise
        self._finish()
        if self._flags.known:
            self._apply_skips()
        return loss

    def _update_all(self, todo: list[_plans.Entry]) -> None:
        small, large = [], []
        for entry in todo:
            parameter, record, group, grad = entry
            if record.hook is None:
                self._hook(parameter)
            if is_small(parameter, grad):
                small.append(Entry(parameter, group, grad))
            else:
                large.append(entry)
        _plans.update_all(self, large)
        step_together(self, small)
        for parameter, *_ in small if self.when == "backward" else ():
            parameter.grad = None

    def _finish(self) -> None:
        """End the pass and take back what stands in `.grad` of the parameters that backward stepped."""
        for parameter in self._records:
            if isinstance(parameter.grad, AppliedGrad):
                parameter.grad = None
        self._end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, as in torch.optim.

        Raises:
            RuntimeError: with `when="backward"`, gradients were applied since the last `step()` and cannot be dropped.
        """
        self._pass.settle()
        if self._pass.moved:
            failed, message = self._pass.failed, self._pass.failure()
            moved = ", ".join(self._pass.moved[:20])
            self._finish()
            if failed:
                raise RuntimeError(message)
            raise RuntimeError(
                f"zero_grad() after backward without step(): with when='backward' the gradients of {moved} were "
                "already applied and cannot be dropped. Use when='step', or requires_grad_(False) on parameters that "
                "this backward must not move."
            )
        if self._began:  # by a backward that failed before anything moved
            self._finish()
        super().zero_grad(set_to_none)

    # -- saving ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles: the parameters' hooks would still call this optimizer, not the copy."""
        raise TypeError(
            "a FusedOptimizer cannot be copied or pickled, it is tied to its parameters by hooks: save its "
            "state_dict(), make a new optimizer for the copied model, and load that with load_state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: `step`, the rule's states, the parameter groups. torch.optim.AdamW loads it."""
        self._pass.settle()
        self._apply_skips()
        result = super().state_dict()
        result["state"] = _state_io.export_state(result["state"])
        for group in result["param_groups"]:
            group.update(self.rule.stated)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state saved here or by torch.optim's optimizer of the same rule; states are converted to `state`.

        A file without `decoupled_weight_decay` in its groups (of an older torch, or an early version of this package)
        does not tell AdamW from Adam: its weight decay is taken to be of this optimizer's kind.

        Raises:
            ValueError: it does not fit this optimizer; nothing has been changed then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._apply_skips()  # what was skipped belongs to the state that is replaced
        _state_io.load_state(self, state_dict)
        self._scalars.clear()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
