"""Strategies: the names and objects that Trainer knows and Fabric does not, as Fabric's."""

from __future__ import annotations

import copy
import inspect
import re
from functools import partial
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO, precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import Misuse, MisuseOfType
from ..core.overrides import is_a
from ..files.storage import AtomicCheckpointIO
from .callbacks import listed

_Start = Literal["popen", "spawn", "fork"]
_STARTS: dict[str, _Start] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_TRAINERS = ("lightning.pytorch.strategies.", "pytorch_lightning.strategies.")
# by Trainer's own names for them, of which the public ones are arguments only
_ELSEWHERE = {"_accelerator": "accelerator", "_precision_plugin": "precision", "_checkpoint_io": "plugins"}
_SHARDS = (
    "write strategy=ModelParallelStrategy(parallelize_fn, data_parallel_size=...) of lightning.fabric.strategies, with"
    " fully_shard(model, mesh=mesh['data_parallel']) in parallelize_fn(model, mesh), or strategy='ddp'"
)
_SIZES = ("_data_parallel_size", "_tensor_parallel_size", "_save_distributed_checkpoint", "_process_group_backend")
_TRAINERS_PLUGINS = ("lightning.pytorch.plugins.", "pytorch_lightning.plugins.")
# what the one's strategy calls in other ways than the other's
_STEPS = ("pre_backward", "backward", "post_backward", "optimizer_step")
_TRAINERS_ONLY = {"_ddp_comm_hook": "ddp_comm_hook", "_model_averaging_period": "model_averaging_period"}


def as_fabrics(strategy: Any) -> Any:
    """Fabric's strategy for one of Trainer's; anything else as it is, for Fabric to judge.

    Raises:
        Misuse: for one of Trainer's that cannot be made Fabric's without loss; the line names Fabric's.

    Example:
        >>> type(as_fabrics("ddp_fork_find_unused_parameters_false")).__name__
        'DDPStrategy'
    """
    names = [strategy] if isinstance(strategy, str) else [base.__name__ for base in type(strategy).__mro__]
    if any(name.lower().startswith(("deepspeed", "fsdp")) for name in names):
        is_fsdp = any("fsdp" in name.lower() for name in names)
        why = "is FSDP's first form, which torch replaces by fully_shard" if is_fsdp else "is not run here"
        raise Misuse(f"strategy={names[0]}: it {why}: {_SHARDS}")
    if isinstance(strategy, str):
        return _of_name(strategy)
    if not any(f"{base.__module__}.".startswith(_TRAINERS) for base in type(strategy).__mro__):
        _check_words(strategy)
        return strategy
    name = type(strategy).__name__
    is_own = not f"{type(strategy).__module__}.".startswith(_TRAINERS)  # what a class of one's own does would be lost
    if is_own or name not in ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"):
        raise Misuse(
            f"strategy={name}(...) is made for Trainer: expected one of lightning.fabric.strategies"
            f"{'' if is_own else f', such as its {name}'}, or a name (ddp, ddp_spawn, ddp_notebook, ...)"
        )
    if lost := [word for key, word in _TRAINERS_ONLY.items() if getattr(strategy, key, None) is not None]:
        raise Misuse(f"strategy={name}({lost[0]}=...): Fabric has no such word, leave it out")
    if given := [word for key, word in _ELSEWHERE.items() if getattr(strategy, key, None) is not None]:
        raise Misuse(f"strategy={name}(...) brings what is said here by {given[0]}=: write FabricLoop({given[0]}=...)")
    if name == "SingleDeviceStrategy":
        return SingleDeviceStrategy(strategy.root_device)
    if name == "ModelParallelStrategy":
        sizes = {word[1:]: getattr(strategy, word) for word in _SIZES}
        made = ModelParallelStrategy(_as_it_is, timeout=strategy._timeout, **sizes)
        made.parallel_devices, made.cluster_environment = strategy.parallel_devices, strategy.cluster_environment
        return made
    same = ("parallel_devices", "cluster_environment", "process_group_backend")
    words = {name: getattr(strategy, name) for name in same}
    return DDPStrategy(timeout=strategy._timeout, start_method=strategy._start_method, **words, **strategy._ddp_kwargs)


def _of_name(name: str) -> Any:
    """The same for a name."""
    if name.lower() == "single_device":
        return "auto"  # of one device this is it
    found = re.fullmatch("ddp(|_spawn|_fork|_notebook)_find_unused_parameters_(true|false)", name.lower())
    if found is None:
        return name
    return DDPStrategy(start_method=_STARTS[found[1]], find_unused_parameters=found[2] == "true")


def plugins_as_fabrics(plugins: Any) -> Any:
    """Trainer's precisions as Fabric's, and all other plugins as they are.

    Raises:
        Misuse: for one of somebody's own that does more than convert: what calls that is Trainer's strategy.

    Example:
        >>> from lightning.pytorch.plugins import DoublePrecision
        >>> type(plugins_as_fabrics([DoublePrecision()])[0]).__module__
        'lightning.fabric.plugins.precision.double'
    """
    if plugins is None:
        return None
    return [_precision(plugin) if isinstance(plugin, precision.Precision) else plugin for plugin in listed(plugins)]


def _precision(plugin: Any) -> Any:
    """Fabric's twin of one of Trainer's; somebody's own after Trainer's stays what it is, and steps as Fabric's do."""
    kinds = type(plugin).__mro__
    trainers = next((kind for kind in kinds if f"{kind.__module__}.".startswith(_TRAINERS_PLUGINS)), None)
    if trainers is None:
        return plugin  # Fabric's, or somebody's own after Fabric's
    own = kinds[: kinds.index(trainers)]
    twin = getattr(precision, trainers.__name__, None)
    steps = set(_STEPS) & {name for kind in own for name in vars(kind)}
    twin_steps = twin is not precision.Precision and not vars(twin or object).keys().isdisjoint(_STEPS)
    if twin is None or steps or (own and twin_steps):
        why = f", whose strategy calls its {min(steps)}" if steps else ""
        raise Misuse(
            f"plugins={type(plugin).__name__}(...) is made for Trainer{why}: expected one of"
            f" lightning.fabric.plugins.precision, or a class of your own after its {trainers.__name__}"
        )
    if not own:
        made = object.__new__(twin)
        vars(made).update(vars(plugin))
        return made
    made = copy.copy(plugin)
    vars(made).update({name: partial(getattr(twin, name), made) for name in _STEPS})  # spawned ranks unpickle that
    return made


class MissingDevice(MisconfigurationException, RuntimeError):
    """An accelerator that this machine does not have: MisconfigurationException and RuntimeError."""


def refusal(error: Exception) -> Exception:
    """What Fabric's constructor refuses, as a Misuse of the same kind."""
    text = " ".join(str(error).splitlines()).replace("`Fabric(", "`FabricLoop(")
    if isinstance(error, MisconfigurationException):
        return error
    if isinstance(error, RuntimeError):
        return MissingDevice(text)
    return MisuseOfType(text) if isinstance(error, TypeError) else Misuse(text)


def _check_words(strategy: Any) -> None:
    """Refuse words that Fabric's DDPStrategy hands on to DDP, which knows nothing of them, before ranks are started."""
    known = inspect.signature(DistributedDataParallel).parameters
    if unknown := sorted(getattr(strategy, "_ddp_kwargs", {}).keys() - known):
        hook = " (register_comm_hook, in setup_module of a subclass)" * (unknown[0] == "ddp_comm_hook")
        raise MisuseOfType(
            f"strategy={type(strategy).__name__}({unknown[0]}=...): torch's DistributedDataParallel has no such word{hook}:"
            " leave it out"
        )


def with_files(strategy: Any, plugins: Any) -> Any:
    """The plugins without Lightning's AsyncCheckpointIO, which Fabric refuses for a model in parts: the loop does it then.

    Raises:
        Misuse: for any other CheckpointIO with such a model.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return plugins
    given = [] if plugins is None else listed(plugins)
    files = [plugin for plugin in given if isinstance(plugin, CheckpointIO)]
    for plugin in files:
        check_plugin(plugin, "strategy=ModelParallelStrategy(...)")
    is_one = not strategy._save_distributed_checkpoint  # one file: the plugin serves as it is
    io = files[0] if files and is_one else AtomicCheckpointIO(in_run=True, behind=bool(files))
    vars(strategy).update(own_checkpoint_io=io)  # of this loop, whatever an earlier one had
    return [plugin for plugin in given if plugin not in files] or None


def check_plugin(plugin: CheckpointIO, where: str) -> None:
    """Refuse a CheckpointIO of one's own where checkpoints lie in pieces; Lightning's AsyncCheckpointIO is a word there."""
    inner = getattr(plugin, "checkpoint_io", None)
    if not is_a(plugin, "AsyncCheckpointIO") or not (inner is None or type(inner) is AtomicCheckpointIO):
        name = f"{type(plugin).__name__}({'' if inner is None else type(inner).__name__ + '()'})"
        raise Misuse(
            f"plugins={name} with {where}: each rank writes its own piece of a checkpoint,"
            " which no CheckpointIO does; leave it out, or write plugins=AsyncCheckpointIO() to go on training meanwhile"
        )


def check_window(strategy: Any, callbacks: list[Any], window: int) -> None:
    """Refuse accumulation where DDP was told that every backward is alike: it ends in an error that says nothing."""
    several = window != 1 or any(is_a(callback, "GradientAccumulationScheduler") for callback in callbacks)
    if several and getattr(strategy, "_ddp_kwargs", {}).get("static_graph"):
        raise Misuse(
            f"strategy=DDPStrategy(static_graph=True) with accumulate_grad_batches={window}: gradients are not summed in every"
            " backward then; leave static_graph out"
        )


def _as_it_is(model: Any, mesh: Any) -> Any:
    """Trainer's modules are sharded in their ``configure_model``, by ``self.device_mesh``."""
    return model
