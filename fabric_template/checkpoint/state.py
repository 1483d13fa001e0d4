"""Build a checkpoint in Lightning's layout.

``LitModel.load_from_checkpoint(path)`` and ``Trainer.fit(ckpt_path=path)`` can read the checkpoint.
The OWN_KEY entry contains the state that Trainer does not save: random generators, loaders, running
metrics and the number of CSV rows.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import __version__ as lightning_version
from lightning.pytorch import LightningDataModule, LightningModule
from lightning_utilities.core.apply_func import apply_to_collection

from ..distributed.launch import gather_objects
from ..errors import CheckpointError, ConfigurationError
from ..lightning_compat.overrides import CALLBACK_MODULES, is_instance_of, overridden
from ..lightning_compat.private import hyperparameters_name
from ..loggers.result_collection import find_torchmetrics
from ..plain_state import ListItem, Part, PlainState, buffers_of, parts_of_module
from ..plain_values import TorchModes, address_of, is_plain_tensor, refers_to
from ..rng_state import capture_rng_state
from .checkpoint_io import replace_numpy
from .distributed import OWN_KEY
from .reader import Placeholder, PlainUnpickler, find_unbuilt_parts

if TYPE_CHECKING:
    from ..training.progress import Progress
    from ..training.run import Run

# The names of the counters in Trainer's progress objects.
_COUNTS = ("ready", "started", "processed", "completed")
# The types of the FabricLoop options that checkpoints contain.
OPTION_TYPES = bool | int | float | str | None
# The attributes that Lightning sets in every module and datamodule.
_OF_MODULE = frozenset(vars(LightningModule()))
_OF_DATAMODULE = frozenset(vars(LightningDataModule()))
# Do not save these optimizer attributes. state_dict() already contains "state" and "param_groups".
# The attribute "defaults" may share tensors with "param_groups". "_opt_called" and "_step_count"
# are used only to warn the user.
_OF_OPTIMIZER = {"_opt_called", "_step_count"}
_OF_OPTIMIZER |= vars(torch.optim.Optimizer([torch.zeros(1)], {})).keys()
# Do not save BatchNorm's momentum, which StochasticWeightAveraging changes only temporarily.
_OF_AVERAGING = _OF_MODULE | {"momentum"}
_HYPERPARAMETERS = re.compile("hyper_parameters|hparams")
# The checkpoint keys that a resumed run reads.
_KEYS_READ_ON_RESUME = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks")


def build_checkpoint(
    run: Run, weights_only: bool = False, epoch: int | None = None
) -> dict[str, Any]:
    """Collect the run's current state into a checkpoint. All processes must call this function.

    Args:
        weights_only: Leave out optimizers, callbacks and the position in the loaders.
        epoch: The epoch number to save, or None for the current epoch.
    """
    source: Any = run.network
    # Remove torch.compile's prefix from the parameter names, so that an uncompiled network can load
    # the weights.
    source = source._orig_mod if is_instance_of(source, "OptimizedModule") else source
    checkpoint: dict[str, Any] = {
        "epoch": run.progress.epochs_done if epoch is None else epoch,
        "global_step": run.progress.global_step,
        "pytorch-lightning_version": lightning_version,
        "state_dict": source.state_dict(),
        "loops": loops_state(run),
    }
    if not weights_only:
        checkpoint |= training_state(run)
    for part in (run.model, run.datamodule):
        add_hyperparameters(run, checkpoint, part)
    if state := state_of(run.datamodule):
        checkpoint[type(run.datamodule).__qualname__] = state
    if not weights_only:
        run.hooks.call_callbacks("on_save_checkpoint", checkpoint)
    run.hooks.call_module("on_save_checkpoint", checkpoint)
    # Hooks must not see OWN_KEY, so add this key to a copy of the checkpoint.
    if weights_only:
        return checkpoint
    with run.steps.outer_dtype():
        return {**checkpoint, OWN_KEY: own_state(run)}


def training_state(run: Run) -> dict[str, Any]:
    """Return the states of callbacks, optimizers, schedulers and the precision plugin."""
    strategy, optimization = run.fabric.strategy, run.optimization
    check_learning_rates(run)
    check_unsynchronized(run)
    # Fabric gathers the state of a ZeroRedundancyOptimizer in process 0.
    get_state: Any = strategy.get_optimizer_state
    if run.steps.is_model_parallel:
        # Each process returns its own shards of the optimizer states.
        get_state = torch.optim.Optimizer.state_dict
    callbacks = {key_of(callback): state_of(callback) for callback in run.hooks.callbacks}
    state = {
        "callbacks": {key: state for key, state in callbacks.items() if state},
        "optimizer_states": [get_state(optimizer) for optimizer in optimization.optimizers],
        "lr_schedulers": [item.scheduler.state_dict() for item in optimization.lr_schedulers],
    }
    if scaler_state := strategy.precision.state_dict():
        state[type(strategy.precision).__qualname__] = scaler_state
    return state


def check_learning_rates(run: Run) -> None:
    """Raise an error if learning rates, and therefore weights, differ between processes."""
    groups = [group for item in run.optimization.optimizers for group in item.param_groups]
    rates = [group.get("lr") for group in groups]
    found = gather_objects(
        run, str([r.tolist() if isinstance(r, torch.Tensor) else r for r in rates])
    )
    if found.count(found[0]) != len(found):
        raise ConfigurationError(
            f"optimizer: got the learning rates {', '.join(found)} in the processes, expected the"
            " same values in each. With different values, the processes would train different"
            " weights. If ReduceLROnPlateau monitors a metric, log this metric with sync_dist=True."
            " If the script draws random hyperparameters, pass devices=1."
        )


def check_unsynchronized(run: Run) -> None:
    """Raise an error if parameters that DDP does not synchronize differ between processes."""
    sums = gather_objects(run, run.steps.sum_unsynchronized())
    if any(str(other) != str(sums[0]) for other in sums):
        raise ConfigurationError(
            f"strategy: got DDP and the parameters {', '.join(sorted(sums[0]))}, which did not"
            " require a gradient when training started, and now differ between the processes. DDP"
            " never averages their gradients. Freeze them in on_train_start instead, and pass"
            " strategy='ddp_find_unused_parameters_true', or train with devices=1."
        )


def key_of(callback: Any) -> str:
    return getattr(callback, "state_key", type(callback).__qualname__)


def state_of(part: Any) -> Any:
    """Return the state_dict of a callback or datamodule, or None if it has no state_dict method."""
    state_dict = getattr(part, "state_dict", None)
    state: Any = state_dict() if callable(state_dict) else None
    # A state_dict() that returns vars(self) contains the log() and log_dict() methods that the loop
    # adds to callbacks. Remove these methods.
    methods = [n for n in ("log", "log_dict") if isinstance(state, dict) and callable(state.get(n))]
    return {n: value for n, value in state.items() if n not in methods} if methods else state


def own_state(run: Run) -> dict[str, Any]:
    """Return the state that Trainer does not save, such as RNG states and loader positions."""
    if run.progress.phase == "validate":
        run.warn_once(
            "save_checkpoint: called during a validation. A resumed run repeats the validation, but"
            " draws different random numbers. To resume exactly, call save_checkpoint() in"
            " on_validation_end."
        )
    of_process = {
        "rng": capture_rng_state(),
        "gradients": run.optimization.accumulated_gradients(),
        **states_of(run, per_process=True),
    }
    outside = run.optimization.outside_parameters()
    return {
        "writer": "FabricLoop",
        **states_of(run, per_process=False),
        "saved_at": run.checkpoints.folders.save_time(),
        "options": changed_options(run),
        "flags": run.steps.changed_flags(run.optimization.named_parameters()),
        "tensor_metadata": run.steps.changed_tensor_metadata(),
        "outside_parameters": {name: value.detach() for name, value in outside.items()},
        "parameter_groups": names_of_groups(run),
        "settings": run_settings(run),
        # Save the seed even if no loader has used it, because a resumed run may need it.
        "sampler_seed": run.data.common_seed,
        "ranks": gather_objects(run, of_process),
    }


def changed_options(run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the original and the current value of each option that a hook has changed."""
    current = vars(run.config)
    pairs = {name: (value, current[name]) for name, value in run.given_options.items()}
    return {
        name: pair
        for name, pair in pairs.items()
        if isinstance(pair[1], OPTION_TYPES) and pair[0] != pair[1]
    }


def states_of(run: Run, per_process: bool) -> dict[str, Any]:
    """Return the state_dict of each stateful object of a run, keyed by the object's name.

    Args:
        per_process: If True, return the states that every process saves. If False, return the
            states that only rank 0 saves.
    """
    parts = run.saved_parts().items()
    return {name: part.state_dict() for name, part in parts if part.is_per_process == per_process}


def run_settings(run: Run) -> dict[str, Any]:
    """Return settings that should not change when a run resumes, such as the batch size."""
    loaders = run.data.train.loaders if "train" in run.data.created else []
    resumable = run.data.train.resumable if loaders else []
    return {
        "number of processes": run.fabric.world_size,
        "batch size": [getattr(loader, "batch_size", None) for loader in loaders],
        "num_workers": [getattr(loader, "num_workers", None) for loader in loaders],
        "number of batches": [loader.length for loader in resumable],
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimization.optimizers],
        "schedulers": [
            [type(config.scheduler).__name__, config.interval, config.frequency]
            for config in run.optimization.lr_schedulers
        ],
    }


def loops_state(run: Run) -> dict[str, Any]:
    """Return counters in the format of Trainer's loops, so that Trainer can resume this run."""
    loaders = [loader.state_dict() for loader in run.data.stateful_loaders()]
    is_automatic = run.module.automatic_optimization
    return make_loop_counters(run.progress, run.hooks.current, is_automatic, loaders)


def make_loop_counters(
    progress: Progress, hook: str | None, is_automatic: bool, loader_states: list[Any]
) -> dict[str, Any]:
    saved = progress.state_dict()
    epoch = make_counts(progress.epochs_done, progress.epochs_done)
    batches = make_counts(saved["total_batches"], saved["batches_done"])
    # Batches since the last optimizer step are not "completed", because a resumed run repeats them.
    batches["total"]["ready"] = progress.total_batches
    batches["current"]["ready"] = progress.batches_done
    if progress.is_in_epoch:
        for counts in epoch.values():
            counts["ready"] += 1
            counts["started"] += 1
            counts["processed"] += hook == "on_train_epoch_end"
        if hook == "on_train_batch_end":
            for counts in batches.values():
                counts["completed"] -= 1
    automatic, manual = make_counts(0, 0), make_counts(progress.global_step, 0)
    if is_automatic:
        steps = progress.optimizer_steps_in_epoch
        automatic, manual = make_counts(progress.global_step, steps), make_counts(0, 0)
    fit_loop = {
        "state_dict": {"combined_loader": loader_states} if loader_states else {},
        "epoch_progress": epoch,
        "epoch_loop.state_dict": {"_batches_that_stepped": progress.logging_step},
        "epoch_loop.batch_progress": batches | {"is_last_batch": saved["is_last_batch"]},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": automatic, "zero_grad": automatic}
        },
        "epoch_loop.manual_optimization.optim_step_progress": manual,
    }
    return {"fit_loop": fit_loop, "validate_loop": {}, "test_loop": {}, "predict_loop": {}}


def make_counts(total: int, current: int) -> dict[str, Any]:
    return {"total": dict.fromkeys(_COUNTS, total), "current": dict.fromkeys(_COUNTS, current)}


def names_of_groups(run: Run) -> list[list[list[str | None]]]:
    """Return the names of the parameters in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in run.optimization.named_parameters().items()}
    return [
        [[names.get(id(parameter)) for parameter in group["params"]] for group in item.param_groups]
        for item in run.optimization.optimizers
    ]


# Hyperparameters


class _TrialPickler(pickle.Pickler):
    """Pickles an object without its tensors, to test whether it can be pickled."""

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            kind = type(value)
            is_known = kind.__module__.partition(".")[0] == "torch"
            return "tensor" if is_known else f"{kind.__module__}.{kind.__qualname__}"
        return "tensor" if isinstance(value, torch.UntypedStorage) else None


class _TrialUnpickler(PlainUnpickler):
    """Reads a pickle that contains no tensors, to find objects that cannot be loaded."""

    def persistent_load(self, saved: Any) -> Any:
        """Return None for a tensor, or a placeholder for a tensor of a user's class."""
        return None if saved == "tensor" else type(saved, (Placeholder,), {})()


def is_picklable(value: Any) -> bool:
    try:
        _TrialPickler(io.BytesIO(), protocol=2).dump(value)
    except Exception:
        # Pickling a user's object may raise any error.
        return False
    return True


def picklable_part(value: Any, name: str, dropped: list[str]) -> Any:
    """Return a copy of nested dicts without the items that cannot be pickled.

    Args:
        name: The name of the value, such as "model/activation".
        dropped: A list to which the names of the removed items are added.
    """
    if not isinstance(value, dict) or is_picklable(value):
        return value
    kept = {}
    for key, item in value.items():
        place = f"{name}/{key}" if name else str(key)
        item = picklable_part(item, place, dropped)
        if is_picklable(key) and is_picklable(item):
            kept[key] = item
        else:
            dropped.append(place)
    return kept


def add_hyperparameters(run: Run, checkpoint: dict[str, Any], part: Any) -> None:
    """Add a module's or datamodule's hyperparameters to a checkpoint, under Lightning's keys."""
    hparams = getattr(part, "hparams", None)
    if not hparams or not hasattr(part, "save_hyperparameters"):
        return
    if (name := hyperparameters_name(part)) is not None:
        checkpoint[part.CHECKPOINT_HYPER_PARAMS_NAME] = name
    if type(hparams).__module__.startswith("omegaconf."):
        checkpoint[part.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    else:
        dropped: list[str] = []
        hparams = picklable_part(dict(hparams), "", dropped)
        if dropped:
            run.warn_once(
                f"hparams: {', '.join(map(repr, dropped))} cannot be pickled. Checkpoints are saved"
                " without these hyperparameters. Pass them to load_from_checkpoint as arguments."
            )
    checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = hparams


def check_saved_state(run: Run) -> None:
    """Check before training that checkpoints can be saved and read back.

    Raises:
        CheckpointError: The state of an optimizer or a scheduler cannot be saved and restored.
    """
    if run.checkpoints.folder is None and not run.hooks.callbacks_of("Checkpoint"):
        return
    # Collect the hyperparameters only to warn about those that cannot be pickled.
    for part in (run.model, run.datamodule):
        add_hyperparameters(run, {}, part)
    optimization = run.optimization
    states: dict[str, list[Any]] = {
        "optimizers": [
            [{**group, "params": []} for group in optimizer.param_groups]
            for optimizer in optimization.optimizers
        ],
        "lr_schedulers": [item.scheduler.state_dict() for item in optimization.lr_schedulers],
    }
    check_scheduler_states(run, states["lr_schedulers"])
    if (place := find_unpicklable(states)) is not None:
        raise CheckpointError(
            f"{place}: got a value that cannot be pickled, so a checkpoint cannot contain it."
            " Define functions and classes at module level, or leave the value out of state_dict()."
        )
    for problem in find_unreadable(states):
        raise CheckpointError(
            f"{problem.rpartition(' ')[2]}: got {problem.partition(' in the part ')[0]}, which a"
            " resumed run could not restore, because creating this object could run arbitrary code."
            " Leave the object out of state_dict()."
        )


def check_scheduler_states(run: Run, states: list[Any]) -> None:
    """Raise an error if a scheduler's state contains parameters of an optimizer."""
    groups = [group for item in run.optimization.optimizers for group in item.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    found: list[Any] = []
    apply_to_collection(states, torch.nn.Parameter, found.append)
    if any(id(parameter) in trained for parameter in found):
        # Loading this state would give the scheduler copies of the parameters, which the optimizer
        # does not train.
        raise CheckpointError(
            "scheduler: got a state_dict() that contains parameters of the optimizer, expected a"
            " state without parameters. Use self.optimizer.param_groups in the scheduler, instead"
            " of storing the groups in another attribute."
        )


def check_optimizer_states(run: Run, states: list[Any]) -> None:
    """Raise an error if an optimizer's state contains parameters or their ids."""
    parameters = run.optimization.named_parameters().values()
    plain = [p for p in parameters if type(p) is torch.nn.Parameter and is_plain_tensor(p)]
    addresses = {address_of(parameter) for parameter in plain} - {0}
    for optimizer, state in zip(run.optimization.optimizers, states, strict=False):
        # Accept weights in the state of an optimizer that overrides load_state_dict(), because this
        # method may copy the weights back into the parameters.
        weights = set() if has_own_state(optimizer) else addresses
        if refers_to(state, {*map(id, parameters)}, weights):
            # Saved ids are useless in a resumed run, because its parameters have different ids.
            raise CheckpointError(
                "optimizer: got a state that contains parameters or their ids, which a resumed"
                " run cannot restore. In self.state[p], store copies (p.detach().clone()), and"
                " write p.data.copy_(value) instead of p.data = value."
            )


def find_unreadable(states: dict[str, Any]) -> list[str]:
    """For each checkpoint key, describe one object that ``weights_only=True`` cannot read."""
    file = io.BytesIO()
    _TrialPickler(file, protocol=2).dump(replace_numpy(states))
    file.seek(0)
    return list(find_unbuilt_parts(_TrialUnpickler(file).load()).values())


def warn_of_unreadable(run: Run, checkpoint: dict[str, Any]) -> None:
    """Warn about saved objects that can be read only with weights_only=False."""
    # Only on_load_checkpoint hooks read the keys that on_save_checkpoint hooks have added. Do not
    # check these keys if no on_load_checkpoint hook is defined.
    readers = (run.module, run.model, *run.hooks.callbacks)
    is_read = any(overridden(part, "on_load_checkpoint") for part in readers)
    states = {
        key: value
        for key, value in checkpoint.items()
        if key in _KEYS_READ_ON_RESUME or (is_read and not _HYPERPARAMETERS.search(str(key)))
    }
    states.pop(OWN_KEY, None)
    with suppress(Exception):
        for problem in find_unreadable(states):
            run.warn_once(
                f"checkpoint: got {problem}, expected tensors, numbers, strings, or containers of"
                " these. Resuming will raise an error unless you pass weights_only=False. Leave"
                " this object out of state_dict() and on_save_checkpoint."
            )


def find_unpicklable(value: Any, name: str = "") -> str | None:
    """Return the path of an item that cannot be pickled, such as "a/b", or None if all can."""
    if is_picklable(value):
        return None
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        found = find_unpicklable(item, f"{name}/{key}" if name else str(key))
        if found is not None:
            return found
    return name


# Attributes and buffers


def make_plain_state(run: Run) -> PlainState:
    """Return a PlainState that saves the attributes of the model, datamodule and callbacks."""
    parts = dict([*parts_of_model(run), *parts_of_callbacks(run)])
    parts["model.torch modes"] = Part(ListItem(modes=TorchModes()))
    if run.datamodule is not None:
        has_no_state = overridden(run.datamodule, "state_dict") is None
        parts["datamodule"] = Part(run.datamodule, _OF_DATAMODULE, has_no_state)
    return PlainState(parts, run.fabric.device, run.network, partial(parts_of_model, run))


def record_optimizer_attributes(run: Run) -> None:
    """Record the attributes of the optimizers, so that checkpoints contain later changes."""
    optimization = run.optimization
    optimizers = optimization.optimizers
    parts = {
        f"optimizer.{index}": Part(item, _OF_OPTIMIZER, has_attributes=not has_own_state(item))
        for index, item in enumerate(optimizers)
    }
    saved = [*optimizers, *optimization.lightning_optimizers, *run.hooks.callbacks, run.datamodule]
    # A resumed run calls configure_optimizers after it has loaded the weights. If this method
    # copies weights, the copies differ from those in the saved run, so always save them.
    is_created = run.plan.optimizer is None or callable(run.plan.optimizer)
    saved += [config.scheduler for config in optimization.lr_schedulers]
    groups = [optimizer.param_groups for optimizer in optimizers]
    saved += [*groups, *chain.from_iterable(groups)]
    run.plain_state.add(parts, saved, is_always_saved=is_created)


def has_own_state(optimizer: Any) -> bool:
    usual = torch.optim.Optimizer.state_dict
    return getattr(type(optimizer), "state_dict", usual) is not usual


def parts_of_model(run: Run) -> Iterator[tuple[str, Part]]:
    """Yield the attributes and the non-persistent buffers of the model and its submodules."""
    metrics = tuple(find_torchmetrics(run.network))
    saved = run.network.state_dict(keep_vars=True)
    is_averaging = bool(run.hooks.callbacks_of("StochasticWeightAveraging"))
    if run.model is not run.network:
        yield "model", Part(run.model)
    for name, module in run.network.named_modules():
        # Skip torchmetrics objects, because their states are saved with the logged results.
        if any(name == metric or name.startswith(f"{metric}.") for metric in metrics):
            continue
        path = f"model.{name}" if name else "model"
        if name or run.model is run.network:
            yield path, Part(module, _OF_AVERAGING if is_averaging else _OF_MODULE)
        yield f"{path}.buffers", buffers_of(module, name, saved)


def parts_of_callbacks(run: Run) -> Iterator[tuple[str, Part]]:
    counts: dict[str, int] = {}
    own = {id(module) for module in (run.model, *run.network.modules())}
    for callback in run.hooks.callbacks:
        name = type(callback).__qualname__
        counts[name] = counts.get(name, 0) + 1
        has_state = overridden(callback, "state_dict") is not None
        has_attributes = not (
            type(callback).__module__.startswith(CALLBACK_MODULES)
            or has_state
            or is_instance_of(callback, "ProgressBar")
        )
        path = f"callbacks.{name}.{counts[name]}"
        yield path, Part(callback, has_attributes=has_attributes)
        for attribute, network in Part(callback).namespace().items():
            # Save the buffers of a callback's network, such as WeightAveraging's averaged model. If
            # the network shares modules with the trained model, their buffers are already saved.
            if isinstance(network, torch.nn.Module) and own.isdisjoint(map(id, network.modules())):
                parts = parts_of_module(f"{path}.{attribute}", network)
                yield from ((place, part) for place, part in parts.items() if part.has_buffers)
