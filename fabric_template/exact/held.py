"""Held: what the parts of a run hold beside their state_dict, for a checkpoint; put_back.py puts it back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.overrides import is_a
from ..core.run import Run
from .randomness import PLAIN, find, generator_state, is_generator


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
        self._groups = [sizes(optimizer) for optimizer in self.run.optimizing.optimizers]

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
            None if sizes(own) == counted else [[names.get(id(p)) for p in g["params"]] for g in own.param_groups]
            for own, counted in zip(run.optimizing.optimizers, self._groups, strict=False)
        ]
        has_own_buffers = not getattr(run.steps.ddp, "broadcast_buffers", True)  # of DDP, which gives all rank zero's
        return {
            "generators": {path: generator_state(generator) for path, generator in self.generators().items()},
            "buffers": _buffers_of(run.trained.net, run.steps.sharded is not None or has_own_buffers),
            "settings": changed,
            "groups": groups,
            "tensors": {path: part_of(tensor) for path, tensor in self.tensors().items()},
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

    def generators(self) -> dict[str, Any]:
        """The random generators that they hold, by the way to each."""
        run = self.run
        callbacks = {f"callbacks.{index}": callback for index, callback in enumerate(run.hooks.callbacks)}
        return find({"model": run.trained.owner, "datamodule": run.trained.datamodule, **callbacks}, is_generator)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that optimizers hold for themselves, float32 copies of the weights for example."""
        found: dict[str, Tensor] = {}
        for index, optimizer in enumerate(self.run.optimizing.optimizers):
            if hasattr(optimizer, "consolidate_state_dict"):  # all that it holds is its parts of what all ranks hold
                continue
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


def sizes(optimizer: Any) -> list[int]:
    """How many parameters each of its groups has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _buffers_of(net: nn.Module, all_of_them: bool) -> dict[str, Tensor]:
    """The buffers that no state_dict has; all, where the state_dict has the first rank's and each has its own."""
    return {
        f"{name}.{key}": module._buffers[key]
        for name, module in net.named_modules()
        for key in sorted(module._buffers if all_of_them else module._non_persistent_buffers_set)
        if module._buffers.get(key) is not None
    }
