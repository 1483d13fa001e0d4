"""Restore the model, the training state and the loader positions from a checkpoint."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain, islice
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigurationError, OtherModelError
from ..lightning_compat.overrides import overridden
from ..plain_state import ListItem, Part
from ..plain_values import TorchModes, load_optimizer, metadata_of
from ..rng_state import is_generator, restore_rng_state, unchanged_rng_state
from .distributed import SHARDS_KEY, load_shards
from .state import key_of, names_of_groups, run_settings

if TYPE_CHECKING:
    from ..training.run import Run

# The order in which fit restores a checkpoint:
#
# | function         | runs after           | restores                                           |
# |------------------|----------------------|----------------------------------------------------|
# | restore_model    | configure_model      | datamodule, weights, callbacks                     |
# | restore_training | configure_optimizers | optimizers, schedulers, counters, CSV files        |
# | restore_states   | on_train_start       | options, gradients, loader positions, RNG states   |
# | restore_position | restore_states       | iterators of the loaders, attributes               |
#
# The methods validate, test and predict call only restore_model.

# The keys under which Lightning, Fabric and PyTorch's tutorials save the weights.
_WEIGHTS_KEYS = ("state_dict", "model", "model_state_dict")
# The attributes in which DistributedDataParallel and torch.compile store the wrapped module.
_WRAPPERS = ("module", "_orig_mod")


# Model and weights


def restore_model(run: Run, checkpoint: dict[str, Any]) -> bool:
    """Restore the weights, the datamodule and the callbacks.

    Returns:
        Whether the weights match the model.

    Raises:
        OtherModelError: In validate, test or predict, the weights do not match the model.
    """
    is_weights_only = run.stage == "fit" and not run.plan.start.resumes
    if not is_weights_only:
        load_state(run.datamodule, checkpoint.get(type(run.datamodule).__qualname__))
    if SHARDS_KEY in checkpoint or run.steps.is_model_parallel:
        load_shards(run, checkpoint, "state_dict")
    run.hooks.call_module("on_load_checkpoint", checkpoint)
    is_loaded = True
    try:
        load_weights(run, checkpoint)
    except OtherModelError:
        if run.stage != "fit":
            raise
        # The caller loads the weights again after on_fit_start, because this hook may add modules.
        is_loaded = False
    if not is_weights_only and "callbacks" in checkpoint:
        restore_callbacks(run, checkpoint)
    return is_loaded


def load_state(part: Any, state: Any) -> None:
    if state is not None and callable(getattr(part, "load_state_dict", None)):
        part.load_state_dict(state)


def restore_callbacks(run: Run, checkpoint: dict[str, Any]) -> None:
    states = checkpoint["callbacks"]
    keys = {key_of(callback) for callback in run.hooks.callbacks}
    # The max_time option may have added a Timer to the saved run, so do not warn about a missing
    # Timer. Without a checkpoint callback, FabricLoop saves this run's checkpoints. In this case,
    # do not warn about a missing ModelCheckpoint either.
    may_miss = ("Timer",) if run.hooks.callbacks_of("Checkpoint") else ("Timer", "ModelCheckpoint")
    missing = [key for key in states if key not in keys and not key.startswith(may_miss)]
    if missing and run.plan.start.resumes:
        run.warn_once(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to"
            f" be provided during `{run.plan.loop_name}` instantiation. Please add the following"
            f" callbacks: {missing}."
        )
    run.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in run.hooks.callbacks:
        load_state(callback, deepcopy(states.get(key_of(callback))) or None)


def load_weights(run: Run, checkpoint: dict[str, Any]) -> None:
    """Load a checkpoint's weights into the model.

    Raises:
        OtherModelError: The weights do not match the model.
    """
    path, target = run.plan.start.path, run.network
    weights = rename_weights(find_weights(checkpoint, path), target)
    is_strict = getattr(run.model, "strict_loading", True)
    create_late_buffers(target, weights)
    if not run.steps.is_model_parallel:
        restore_metadata(target, weights, run.plan.start.own.get("tensor_metadata", {}))
    try:
        found = target.load_state_dict(weights, strict=is_strict)
    except RuntimeError as error:
        # Shorten load_state_dict's error, because it has one line per mismatched parameter.
        differences = shorten(" ".join(str(error).split()), 400, placeholder=" ...")
        raise OtherModelError(
            f"{differences} The weights in '{path}' do not match the model."
            " Create the model with the same arguments as the saved model."
        ) from error
    others = getattr(found, "unexpected_keys", [])
    # With strict_loading = False, torch ignores unknown names, so check that at least one name is
    # known. Skip this check if on_load_checkpoint may have loaded the weights.
    has_hook = overridden(run.model, "on_load_checkpoint") is not None
    if len(others) == len(weights) and not has_hook and target.state_dict():
        got = f"the weights {others[:3]}" if others else "no weights"
        raise OtherModelError(
            f"{path}: got {got}, expected weights of the model. Rename the keys of the saved"
            " weights."
        )


def check_dtypes(run: Run, checkpoint: dict[str, Any]) -> None:
    """Raise an error if a trained parameter's dtype differs from the saved dtype.

    The restored optimizer state has the saved dtype, so the optimizer step could fail.
    """
    target = run.network
    # With WeightAveraging, "state_dict" contains averaged weights instead of the trained ones.
    weights = checkpoint.get("current_model_state") or find_weights(checkpoint, run.plan.start.path)
    weights = rename_weights(weights, target)
    optimizers = run.optimization.optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in target.named_parameters():
        saved = getattr(weights.get(name), "dtype", parameter.dtype)
        if id(parameter) in trained and saved != parameter.dtype:
            raise CheckpointError(
                f"resume: the dtype of {name!r} is {parameter.dtype}, but was {saved} in the saved"
                " run. Use the precision= and the default dtype of the saved run, or use load= to"
                " start a new run from the weights."
            )


def restore_metadata(
    network: nn.Module, weights: Mapping[str, Any], start: Mapping[str, Any]
) -> None:
    """Restore the dtypes, shapes and strides that training has changed.

    Args:
        start: The dtype, shape and strides of each changed tensor at the start of the saved run. A
            tensor of this model is changed only if it matches ``start``.
    """
    for name, tensor in chain(network.named_parameters(), network.named_buffers()):
        value, current = weights.get(name), metadata_of(tensor)
        is_as_at_start = current == start.get(plain_name(name)) and current != "no shape"
        if isinstance(value, Tensor) and is_as_at_start and metadata_of(value) != current:
            tensor.data = value.to(tensor.device, copy=True)


def create_late_buffers(network: nn.Module, weights: Mapping[str, Any]) -> None:
    """Create empty tensors for buffers that are None in the model but not in the checkpoint."""
    modules = dict(network.named_modules())
    device = next((value.device for value in network.parameters()), None)
    for name, value in weights.items():
        place, _, buffer = name.rpartition(".")
        buffers = modules[place]._buffers if place in modules else {}
        if buffer in buffers and buffers[buffer] is None:
            buffers[buffer] = torch.empty_like(value, device=device)


def find_weights(checkpoint: dict[str, Any], path: Any) -> Mapping[str, Any]:
    """Return the state_dict in a checkpoint, or the checkpoint itself if it is a state_dict."""
    weights: Any = None
    for key in _WEIGHTS_KEYS:
        if weights is None and key in checkpoint:
            value = checkpoint[key]
            value = value.state_dict() if isinstance(value, nn.Module) else value
            weights = value if isinstance(value, Mapping) else None
    is_state_dict = all(
        isinstance(value, Tensor) or str(name).endswith("_extra_state")
        for name, value in checkpoint.items()
    )
    if weights is None and is_state_dict:
        weights = checkpoint
    if weights is None:
        keys = sorted(map(str, checkpoint))[:5]
        raise CheckpointError(
            f"{path}: got the keys {keys}, expected a checkpoint with the key state_dict."
        )
    for name in weights:
        if not isinstance(name, str):
            raise CheckpointError(
                f"{path}: got the key {name!r} in a state_dict, expected the name of a parameter."
            )
    return weights


def rename_weights(weights: Mapping[str, Any], target: nn.Module) -> Mapping[str, Any]:
    """Rename saved weights to match a model with different wrappers, such as torch.compile."""
    own = list(target.state_dict())
    if weights.keys() == set(own):
        return weights
    # state_dict() omits buffers that are None, but the saved run may have assigned tensors to them.
    for place, module in target.named_modules():
        empty = [name for name, buffer in module._buffers.items() if buffer is None]
        own += [f"{place}.{name}".removeprefix(".") for name in empty]
    # Wrappers such as DistributedDataParallel add components such as "module" to the names of
    # weights. Compare names without these components.
    own_names = {plain_name(name): name for name in own}
    # Rename no weights if two names differ only in components such as "module".
    if len(own_names) < len(own) or len(set(map(plain_name, weights))) < len(weights):
        return weights
    renamed = OrderedDict((own_names.get(plain_name(k), k), value) for k, value in weights.items())
    # load_state_dict needs each module's saved version number to convert weights in an old format.
    versions = getattr(weights, "_metadata", None) or {}
    versions = {plain_name(name): version for name, version in versions.items()}
    paths = [path for path, _ in target.named_modules() if plain_name(path) in versions]
    vars(renamed)["_metadata"] = {path: versions[plain_name(path)] for path in paths}
    return renamed


def plain_name(name: str) -> str:
    """Remove the components that wrappers such as torch.compile add to a parameter's name.

    Example:
        >>> plain_name("module._orig_mod.net.0.weight")
        'net.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


# Training state


def restore_training(run: Run, checkpoint: dict[str, Any]) -> None:
    """Restore the optimizers, the schedulers, the counters and the CSV files."""
    if run.hooks.callbacks_of("ModelPruning"):
        raise CheckpointError(
            "resume: got the callback ModelPruning, but checkpoints do not contain its masks."
            " Remove this callback, or use load= to start a new run from the weights."
        )
    check_dtypes(run, checkpoint)
    restore_optimizers(run, checkpoint)
    precision = run.fabric.strategy.precision
    load_state(precision, checkpoint.get(type(precision).__qualname__))
    own = run.plan.start.training_state(run.stop.max_steps != -1)
    # Restore max_epochs and max_steps before fit checks whether the run is finished. Restore all
    # other options only after on_train_start, because this hook must see the options that the
    # script passed.
    options = own.get("options", {})
    limits = {name: options[name] for name in ("max_epochs", "max_steps") if name in options}
    restore_options(run, limits)
    epochs_done, max_epochs = own["progress"]["epochs_done"], run.stop.max_epochs
    if -1 < max_epochs < epochs_done:
        raise ConfigurationError(
            f"You restored a checkpoint with current_epoch={epochs_done}, but you have set"
            f" {run.plan.loop_name}(max_epochs={max_epochs}). Please set a different max_epochs"
            " value."
        )
    restore_outside_parameters(run, own.get("outside_parameters", {}))
    run.progress.load_state_dict(own.pop("progress"))
    if run.plan.start.keyword != "auto" and run.stop.can_stop_early:
        # resume="last" continues a run that EarlyStopping stopped. resume="auto" does not, because
        # job schedulers also restart finished runs.
        own.pop("stop", None)
    load_states(run, own)


def restore_options(run: Run, changed: dict[str, Any]) -> None:
    """Set options such as max_epochs to the values that hooks of the saved run assigned."""
    options = run.given_options
    for name, (given, value) in changed.items():
        # If the user passes a new value for the option, do not replace it with the saved value.
        # If the saved run was an earlier call to fit on this loop, the loop already has that value.
        if name in options and options[name] in (given, value):
            setattr(run.loop, name, value)
            options[name] = given


def restore_mini_attributes(run: Run, state: dict[str, Any]) -> None:
    """Restore the module attributes that MiniLoop saved."""
    parts, rebound, kept = (state.get(name, {}) for name in ("parts", "rebound", "kept"))
    modules = {**dict(run.network.named_modules()), "": run.model}
    modules["fit optimizer"] = run.optimization.optimizers[0]
    modules["torch modes"] = ListItem(modes=TorchModes())
    for name, instance in run.plain_state.objects().items():
        modules[name.removeprefix("model.")] = instance
    restorer = run.plain_state.make_restorer()
    for place, attributes in parts.items():
        module = modules.get(place)
        buffers = getattr(module, "_buffers", {})
        for name, value in attributes.items():
            tag = value[0] if isinstance(value, tuple) else None
            is_buffer = module is not None and (tag == "buffer" or name in buffers)
            part = Part(module, has_buffers=is_buffer)
            current = part.namespace().get(name, getattr(type(module), str(name), None))
            # Accept an attribute that only the class defines, because the saved run may have
            # overridden it on the instance.
            is_known = is_buffer or name in part.namespace() or hasattr(type(module), str(name))
            if tag != "state" and (not is_known or is_generator(current)):
                raise CheckpointError(
                    f"resume: got {run.plan.start.path}, in which MiniLoop saved the state of"
                    f" {place!r}. FabricLoop cannot restore this state. Resume with MiniLoop, or"
                    " use load= to start a new run from the weights."
                )
            encoded = value[1] if tag == "buffer" else value
            is_rebound, has_kept = (name in names.get(place, ()) for names in (rebound, kept))
            restorer.restore(part, name, current, encoded, is_rebound, has_kept)


def load_states(run: Run, states: dict[str, Any]) -> None:
    for name, part in run.saved_parts().items():
        if name in states:
            part.load_state_dict(states[name])


def restore_position(run: Run) -> None:
    """Restore random generators, loader positions and running metrics before training continues."""
    attributes = restore_states(run)
    if run.progress.is_in_epoch:
        # Samplers may draw random numbers in set_epoch(), so restore the RNG state afterwards.
        with unchanged_rng_state():
            run.data.set_train_epoch()
        run.data.train.start()
    # Restore attributes last, because iter(loader) must see their values from the start of the
    # epoch.
    if attributes is not None:
        run.plain_state.load_state_dict(attributes)
        if run.progress.is_in_epoch and run.data.train.prefetch_saved():
            # Prefetching a batch may have changed attributes of the dataset. The saved run had also
            # prefetched this batch before it saved the attributes, so restore them again.
            run.plain_state.load_state_dict(attributes)


def restore_states(run: Run) -> dict[str, Any] | None:
    """Restore FabricLoop options, module flags, gradients, loader positions and RNG states.

    Returns:
        The saved attributes of the model, the callbacks and other objects, or None if the
        checkpoint contains none.
    """
    rank = run.fabric.global_rank
    of_process = run.plan.start.state_of_process(rank)
    own = run.plan.start.take()
    if not own:
        return None
    if own["writer"] == "Trainer":
        # Checkpoints from Trainer contain no RNG state.
        run.data.load_loader_states(own["loader_states"])
        return None
    restore_options(run, own.get("options", {}))
    attributes: dict[str, Any] | None = of_process.pop("plain_state", None)
    check_settings(run, own["settings"])
    if own["writer"] == "MiniLoop":
        # Checkpoints from MiniLoop contain no loader positions.
        run.data.check_iterators(own.get("iterators", []))
        restore_network(run, own["flags"], {})
        restore_mini_attributes(run, of_process["rng"])
    else:
        restore_network(run, own["flags"], of_process["gradients"])
        of_process["results"] = move_data_to_device(of_process["results"], run.fabric.device)
        load_states(run, of_process)
    # Restore the RNG states last, because on_train_start and the code above may draw random
    # numbers.
    restore_rng_state(of_process["rng"])
    if rank >= len(own["ranks"]):
        # If this run has more processes than the saved run, each additional process gets its own
        # seed.
        seed = int(torch.randint(2**31, ())) + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
    return attributes


def check_settings(run: Run, saved: dict[str, Any]) -> None:
    """Warn or raise an error if this run's settings differ from those of the saved run."""
    current = run_settings(run)
    # A checkpoint saved in on_fit_start has no batch sizes, because the loaders do not exist yet.
    of_loaders = ("batch size", "num_workers", "number of batches")
    skipped = [name for name in of_loaders if not saved.get(name)]
    # Skip the schedulers, which check_schedulers has already compared.
    skipped.append("schedulers")
    is_in_epoch = run.progress.is_in_epoch and not run.progress.is_last_batch
    if not is_in_epoch:
        # The number of batches may change between two epochs, because users may add data.
        skipped.append("number of batches")
    changed = [name for name in saved if name not in skipped and saved[name] != current[name]]
    has_same_loaders = len(saved["batch size"]) == len(current["batch size"])
    for name in ("number of processes", "batch size", "number of batches"):
        if is_in_epoch and name in changed and has_same_loaders:
            raise CheckpointError(
                f"{run.plan.start.path}: this checkpoint was saved in the middle of an epoch, when"
                f" the {name} was {saved[name]}. Now the {name} is {current[name]}. FabricLoop"
                f" cannot convert the position in the epoch. Use the value {saved[name]} or a"
                " checkpoint saved at the end of an epoch, or use load= to start a new run from"
                " the weights."
            )
    if changed:
        texts = [f"{name} was {saved[name]} and is now {current[name]}" for name in changed]
        run.warn_once(
            f"resume: {', '.join(texts)}. The run continues, but its results will differ from"
            " those of an uninterrupted run."
        )
    has_buffers = next(run.network.buffers(), None) is not None
    if has_buffers and not getattr(run.steps.ddp, "broadcast_buffers", True):
        run.warn_once(
            "resume: got broadcast_buffers=False, but a checkpoint contains only the buffers of the"
            " first process. The results may differ from those of an uninterrupted run. Leave"
            " out broadcast_buffers."
        )


def restore_network(
    run: Run, flags: dict[str, dict[str, bool]], gradients: dict[str, torch.Tensor]
) -> None:
    """Restore train modes, requires_grad and accumulated gradients."""
    parameters = run.optimization.named_parameters()
    run.steps.load_flags(flags, parameters)
    for name, parameter in parameters.items():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device, copy=True)


def restore_optimizers(run: Run, checkpoint: dict[str, Any]) -> None:
    if SHARDS_KEY in checkpoint or run.steps.is_model_parallel:
        load_shards(run, checkpoint, "optimizer_states")
    optimizers, schedulers = run.optimization.optimizers, run.optimization.lr_schedulers
    states = checkpoint["optimizer_states"]
    add_missing_groups(run, states)
    # Accept a checkpoint without optimizer states, because an on_load_checkpoint hook may have
    # removed the states.
    if states:
        check_parameter_order(run)
    if states and len(states) != len(optimizers):
        raise CheckpointError(
            f"{run.plan.start.path}: got the states of {len(states)} optimizers, expected"
            f" {len(optimizers)}. Create the same optimizers as in the saved run, or use load= to"
            " start a new run from the weights."
        )
    saved = checkpoint.get("lr_schedulers", ())
    # StochasticWeightAveraging replaces the schedulers, so they may differ from the saved ones.
    is_averaging = bool(run.hooks.callbacks_of("StochasticWeightAveraging"))
    if not is_averaging:
        check_schedulers(run, len(saved))
    for optimizer, state in zip(optimizers, states, strict=False):
        load_optimizer_state(run, optimizer, state)
    # Do not warn if an on_load_checkpoint hook has removed all scheduler states.
    has_new_scheduler = run.plan.start.own.get("settings", {}).get("schedulers") == []
    if (saved or has_new_scheduler) and len(saved) != len(schedulers) and not is_averaging:
        run.warn_once(
            f"resume: the checkpoint has the states of {len(saved)} lr_schedulers, but this run has"
            f" {len(schedulers)} lr_schedulers. The states are restored in order. A scheduler"
            " without a saved state starts from scratch."
        )
    for config, state in zip(schedulers, saved, strict=False):
        config.scheduler.load_state_dict(state)


def check_schedulers(run: Run, num_saved: int) -> None:
    """Raise an error if a scheduler's class, interval or frequency differs from the saved run.

    Args:
        num_saved: The number of schedulers whose state is restored.
    """
    saved = run.plan.start.own.get("settings", {}).get("schedulers", ())
    pairs = zip(run_settings(run)["schedulers"], saved, strict=False)
    for found, expected in islice(pairs, num_saved):
        # torch would load the state of a different scheduler class without an error.
        if found != expected:
            raise CheckpointError(
                "resume: the class, interval and frequency of a scheduler changed from"
                f" {expected} in the saved run to {found}. Create the same scheduler, or use load="
                " to start a new run from the weights."
            )


def add_missing_groups(run: Run, states: list[Any]) -> None:
    """Add parameter groups that hooks added in the saved run, for example for unfrozen layers."""
    parameters = run.optimization.named_parameters()
    saved = run.plan.start.own.get("parameter_groups", ())
    for optimizer, state, names in zip(run.optimization.optimizers, states, saved, strict=False):
        known = len(optimizer.param_groups)
        trained = {id(p) for group in optimizer.param_groups for p in group.get("params", ())}
        new = {name for name, parameter in parameters.items() if id(parameter) not in trained}
        added = zip(groups_of_state(state)[known:], names[known:], strict=False)
        for group, group_names in added:
            if new.issuperset(group_names):
                group = {**group, "params": [parameters[name] for name in group_names]}
                optimizer.add_param_group(group)


def check_parameter_order(run: Run) -> None:
    """Raise an error if the order of an optimizer's parameters differs from the saved run.

    torch matches optimizer states to parameters by position, because the states contain no names.
    """
    known = set(map(plain_name, run.optimization.named_parameters()))
    saved = run.plan.start.own.get("parameter_groups", ())
    for old, new in zip(saved, names_of_groups(run), strict=False):
        names = zip(names_in_order(new), names_in_order(old), strict=False)
        for index, (found, expected) in enumerate(names):
            # Ignore names that this run does not have, because a layer may have been renamed. Do
            # not ignore names such as "optimizer.0.3", whose parameters are outside the model.
            if found != expected and (expected in known or expected.startswith("optimizer.")):
                raise CheckpointError(
                    f"resume: parameter {index} of the optimizer is {found!r}, but was"
                    f" {expected!r} in the saved run. Create the layers and pass the parameters to"
                    " the optimizer in the same order as in the saved run, or use load= to start a"
                    " new run from the weights."
                )


def names_in_order(groups: list[list[str | None]]) -> list[str]:
    """Return the names of an optimizer's parameters, without components such as "_orig_mod"."""
    return [plain_name(str(name)) for name in chain(*groups)]


def groups_of_state(state: Any) -> list[dict[str, Any]]:
    """Return the parameter groups in an optimizer's saved state, or [] if it contains none."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return groups if isinstance(groups, list) else []


def load_optimizer_state(run: Run, optimizer: Any, state: Any) -> None:
    try:
        load_optimizer(optimizer, state)
    except Exception as error:
        raise CheckpointError(
            f"{run.plan.start.path}: the saved state does not fit {type(optimizer).__name__}"
            f" ({type(error).__name__}: {error}). Create the same optimizer as in the saved run, or"
            " use load= to start a new run from the weights."
        ) from error


def restore_outside_parameters(run: Run, saved: dict[str, torch.Tensor]) -> None:
    """Restore parameters that an optimizer trains but that are not part of the network."""
    with torch.no_grad():
        for name, parameter in run.optimization.outside_parameters().items():
            if name in saved:
                parameter.copy_(saved[name])
