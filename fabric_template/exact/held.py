"""Held: what the parts of a run hold beside their state_dict, saved with a checkpoint and put back on resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.overrides import is_a
from ..core.run import Run
from .randomness import PLAIN, find, generator_state, is_generator, set_generator_state


class Held:
    """What a run's parts hold that no state_dict has, looked for at each save and never at a step.

    * random generators, wherever module, callbacks and datamodule hold them;
    * non-persistent buffers;
    * ``requires_grad``, train or eval, and what torch's own layers are set to (``Dropout.p``, ``BatchNorm.momentum``): as far
      as it has changed since the set-up, so that what a resumed run is set up with counts where hooks left it alone;
    * in manual optimization, gradients that wait for a later batch;
    * which parameters an optimizer trains, where groups were added; tensors among an optimizer's attributes.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._settings: dict[str, dict[str, Any]] = {}
        self._groups: list[list[int]] = []

    def set_up(self) -> None:
        """Note how things stand as set-up hooks have left them."""
        self._settings = settings_of(self.run.trained.net)

    def set_up_optimizers(self) -> None:
        """Note how many parameters each optimizer trains."""
        self._groups = [_sizes(optimizer) for optimizer in self.run.optimizing.optimizers]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        run = self.run
        now, before = settings_of(run.trained.net, run.steps.modes), self._settings
        changed = {
            name: part
            for name, own in now.items()
            if (part := {key: value for key, value in own.items() if before.get(name, {}).get(key, ...) != value})
        }
        names = {id(parameter): name for name, parameter in run.trained.net.named_parameters()}
        groups = [
            None if _sizes(own) == sizes else [[names.get(id(p)) for p in g["params"]] for g in own.param_groups]
            for own, sizes in zip(run.optimizing.optimizers, self._groups, strict=False)
        ]
        return {
            "generators": {path: generator_state(generator) for path, generator in self._generators().items()},
            "buffers": _buffers_of(run.trained.net, all_of_them=run.steps.sharded is not None),
            "settings": changed,
            "groups": groups,
            "tensors": {path: part_of(tensor) for path, tensor in self._tensors().items()},
            "weights": run.update.weights.total if run.update is not None and run.update.weights is not None else None,
            "gradients": {
                names[id(parameter)]: part_of(parameter.grad)
                for optimizer in self._waiting()
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None and id(parameter) in names
            },
        }

    def _waiting(self) -> list[Any]:
        """The optimizers whose gradients wait for another batch."""
        run, at = self.run, self.run.at
        if run.update is None:
            return []
        epoch = at.epochs_done - at.between_epochs  # that ends here, or has just ended
        may_average = (
            run.trained.is_automatic and not run.failure.has_come and (at.between_epochs or at.is_last_of_epoch)
        )
        # behind it Lightning's StochasticWeightAveraging goes forward only, to renew BatchNorm's statistics, and then steps
        is_averaged = any(
            callback.swa_end == epoch and callback.pl_module_contains_batch_norm(run.trained.net)
            for callback in run.hooks.callbacks
            if may_average and is_a(callback, "StochasticWeightAveraging")
        )
        return run.optimizing.optimizers if is_averaged else run.update.waiting()

    def put_back_groups(self, groups: Sequence[Any]) -> None:
        """Let optimizers train the parameters that they trained, before their state is loaded."""
        parameters = dict(self.run.trained.net.named_parameters())
        for optimizer, saved in zip(self.run.optimizing.optimizers, groups, strict=False):
            if not saved or [len(names) for names in saved] == _sizes(optimizer):
                continue
            if not {name for names in saved for name in names} <= parameters.keys():
                continue  # of another model: what loads the optimizer's state says so
            del optimizer.param_groups[len(saved) :]
            for group in optimizer.param_groups:
                group["params"] = []
            for index, names in enumerate(saved):
                own = [parameters[name] for name in names]
                if index < len(optimizer.param_groups):
                    optimizer.param_groups[index]["params"] = own
                else:
                    optimizer.add_param_group({"params": own})

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Put everything but the groups back, after all hooks that set it up again."""
        net, device = self.run.trained.net, self.run.fabric.device
        modules, parameters = dict(net.named_modules()), dict(net.named_parameters())
        for name, own in state["settings"].items():
            for key, value in own.items():
                if name in modules and type(vars(modules[name]).get(key, ...)) in PLAIN:
                    setattr(modules[name], key, value)
                elif name in parameters and key == "requires_grad":
                    parameters[name].requires_grad_(value)
        with torch.no_grad():
            for name, value in state["buffers"].items():
                owner, _, key = name.rpartition(".")
                if owner in modules:
                    _put(modules[owner], key, value.to(device, copy=True))
            tensors = self._tensors()
            for path, value in state["tensors"].items():
                if path in tensors and part_of(tensors[path]).shape == value.shape:
                    part_of(tensors[path]).copy_(value)
        if state.get("weights") is not None and self.run.update is not None and self.run.update.weights is not None:
            total = state["weights"]
            self.run.update.weights.total = total.to(device) if isinstance(total, Tensor) else total
        for name, gradient in state["gradients"].items():
            if name in parameters and part_of(parameters[name]).shape == gradient.shape:
                whole = part_of(parameters[name]) is parameters[name]
                parameters[name].grad = gradient.to(device, copy=True) if whole else torch.zeros_like(parameters[name])
                if not whole:
                    part_of(parameters[name].grad).copy_(gradient)
        generators = self._generators()
        for path, part in state["generators"].items():
            if path in generators:
                set_generator_state(generators[path], part)
        if missing := sorted(state["generators"].keys() - generators.keys()):
            self.run.said.warn(
                f"resume: the checkpoint has the state of random generators that are not there now ({', '.join(missing)}): what"
                " they draw is not what they would have drawn; make them in __init__ or setup"
            )

    def _generators(self) -> dict[str, Any]:
        run = self.run
        callbacks = {f"callbacks.{index}": callback for index, callback in enumerate(run.hooks.callbacks)}
        return find({"model": run.trained.owner, "datamodule": run.trained.datamodule, **callbacks}, is_generator)

    def _tensors(self) -> dict[str, Tensor]:
        """Tensors that optimizers hold for themselves, float32 copies of the weights for example."""
        found: dict[str, Tensor] = {}
        for index, optimizer in enumerate(self.run.optimizing.optimizers):
            known = {"state", "param_groups", "defaults"}
            own = {name: part for name, part in vars(optimizer).items() if name not in known}
            trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            tensors = find({f"optimizers.{index}": own}, lambda item: isinstance(item, Tensor))
            found |= {path: tensor for path, tensor in tensors.items() if id(tensor) not in trained}
        return found


def settings_of(net: nn.Module, modes: Any = None) -> dict[str, dict[str, Any]]:
    """What every module is set to, by its name, and whether each parameter requires gradients, by its own.

    Example:
        >>> settings_of(nn.Dropout(0.5))
        {'': {'training': True, 'p': 0.5, 'inplace': False}}
    """
    found = {name: {"requires_grad": parameter.requires_grad} for name, parameter in net.named_parameters()}
    for name, module in net.named_modules():
        own: dict[str, Any] = {"training": module.training if modes is None else modes.of(module)}
        if type(module).__module__.startswith("torch.nn."):
            own |= {
                key: value
                for key, value in vars(module).items()
                if key[0] != "_" and type(value) in PLAIN and key != "training"
            }
        found[name] = own
    return found


def part_of(tensor: Any) -> Tensor:
    """This rank's part of a tensor; of one that is whole, itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _buffers_of(net: nn.Module, all_of_them: bool) -> dict[str, Tensor]:
    """The buffers that no state_dict has; all, where the state_dict has the first rank's and each has its own."""
    return {
        f"{name}.{key}": module._buffers[key]
        for name, module in net.named_modules()
        for key in sorted(module._buffers if all_of_them else module._non_persistent_buffers_set)
        if module._buffers.get(key) is not None
    }


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Fill a buffer, or put another one in its place."""
    now = getattr(module, name, None)
    if isinstance(now, Tensor) and now.shape == value.shape and now.dtype == value.dtype and not now.is_inference():
        now.copy_(value)
    elif name in module._buffers:
        setattr(module, name, value)
