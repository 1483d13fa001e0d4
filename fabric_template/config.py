"""Define FabricLoop's options, with Trainer's names, meanings and defaults."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, get_args, get_origin, get_type_hints

from .metric_names import find_direction

P = ParamSpec("P")
Duration = str | timedelta | dict[str, int]
LOGGER_NAMES = ("csv", "tensorboard", "wandb", "mlflow")
_LIMITS = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
# The default values that with_defaults() fills in.
_DEFAULTS: dict[str, Any] = {
    "logger": True,
    "enable_checkpointing": True,
    "enable_progress_bar": True,
    "enable_model_summary": True,
    "log_every_n_steps": 50,
    "num_sanity_val_steps": 2,
}
# barebones=True turns off loggers, checkpoints, console output and the sanity check.
_OFF = {name: 0 if name.endswith("_steps") else False for name in _DEFAULTS}


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Options for training, validation, logging and checkpoints.

    Example:
        >>> LoopConfig(max_epochs=3, accumulate_grad_batches=4).max_epochs
        3
    """

    # Training length
    max_epochs: int | None = None
    """Stop after this many epochs. -1 means no limit. If max_epochs, max_steps and max_time
    are all unset, training stops after 1000 epochs."""
    min_epochs: int | None = None
    """Train for at least this many epochs, even if a callback sets should_stop earlier."""
    max_steps: int = -1
    """Stop after this many optimizer steps. -1 means no limit."""
    min_steps: int | None = None
    """Train for at least this many optimizer steps, even if a callback sets should_stop earlier."""
    max_time: Duration | None = None
    """Stop after a duration, written as "DD:HH:MM:SS", {"minutes": 30} or a timedelta."""

    # Amount of data
    limit_train_batches: int | float | None = None
    """Train on at most this many batches per epoch (int), or on this fraction of the batches
    (float)."""
    limit_val_batches: int | float | None = None
    """Validate on at most this many batches per loader (int), or on this fraction of the batches
    (float)."""
    limit_test_batches: int | float | None = None
    """Test on at most this many batches per loader (int), or on this fraction of the batches
    (float)."""
    limit_predict_batches: int | float | None = None
    """Predict at most this many batches per loader (int), or this fraction of the batches
    (float)."""
    overfit_batches: int | float = 0.0
    """Train and validate without shuffling on the first N batches of each loader (int), or on a
    fraction of the batches (float). The default 0 has no effect."""
    fast_dev_run: int | bool = False
    """Run only this many batches of each loader, without loggers or checkpoints. True means
    fast_dev_run=1."""

    # Validation and logging
    val_check_interval: int | float | Duration | None = None
    """Validate every N batches (int), after each fraction of an epoch such as 0.25 (float), or at
    time intervals such as "00:00:30:00" (days, hours, minutes, seconds)."""
    check_val_every_n_epoch: int | None = 1
    """Validate every N epochs. With check_val_every_n_epoch=None, val_check_interval
    counts batches across epochs."""
    validate_every_n_steps: int | None = None
    """Validate every N optimizer steps, counted across epochs, instead of after each epoch."""
    num_sanity_val_steps: int | None = None
    """Validate on this many batches before training starts. -1 means all batches. None means 2."""
    log_every_n_steps: int | None = None
    """Every N optimizer steps, log the loss, the learning rate and the values logged with
    on_step=True. 0 means never. None means 50."""
    log_grad_norm: bool = False
    """Write the gradient norm, measured before clipping, to steps.csv."""

    # The optimizer step
    accumulate_grad_batches: int = 1
    """The number of batches per optimizer step."""
    gradient_clip_val: int | float | None = None
    """Clip gradients to this norm or value before each optimizer step. None or 0 turns clipping
    off."""
    gradient_clip_algorithm: str | None = None
    """"norm" (default) clips the total norm of all gradients. "value" clips each element."""

    # Execution
    deterministic: bool | str | None = None
    """Use only deterministic algorithms. "warn" allows other algorithms but issues a warning."""
    benchmark: bool | None = None
    """Set torch.backends.cudnn.benchmark to this value. None leaves
    cudnn.benchmark unchanged, or turns it off if deterministic=True."""
    inference_mode: bool = True
    """Run validate, test and predict in torch.inference_mode (True) or torch.no_grad (False).
    Validation within fit always runs in torch.no_grad."""
    reload_dataloaders_every_n_epochs: int = 0
    """Get new loaders from the datamodule or the module every N epochs. 0 means never."""
    profiler: Any = None
    """A Lightning profiler, or the name "simple", "advanced" or "pytorch"."""
    detect_anomaly: bool = False
    """Use torch.autograd.set_detect_anomaly, which is slow but finds the cause of a NaN."""
    on_nan: str = "warn"
    """"warn" warns once if train_loss in metrics.csv is NaN or infinite. "stop" also checks
    train_loss in steps.csv, and ends training without saving another checkpoint. "off" does not
    check the loss."""
    barebones: bool = False
    """Turn off log files, checkpoints, console output, training metrics and the sanity check.
    Validation and callbacks still run."""
    logger: Any = None
    """A logger or a list of loggers. None and True mean the CSV logger. False means no logger.
    "tensorboard", "wandb" or "mlflow" adds Lightning's logger of that name to the CSV logger."""
    enable_checkpointing: bool | None = None
    """Write checkpoints."""
    enable_progress_bar: bool | None = None
    """Show a progress bar and print a line per epoch."""
    enable_model_summary: bool | None = None
    """Print a table of the model's layers before training."""
    default_root_dir: str | os.PathLike[str] | None = None
    """The folder that contains logs/ and checkpoints/, by default the working directory."""

    # Files and checkpoints
    name: str = "run"
    """The run's name. Logs are written to logs/<name>/version_<n>, and checkpoints to
    checkpoints/<name>/version_<n>."""
    version: int | str | None = None
    """The run's version. None means the next free version or, when resuming, the version of the
    resumed run."""
    monitor: str | None = None
    """The metric that selects the best checkpoint. Without monitor, the loop keeps only the last
    checkpoint."""
    mode: str = "auto"
    """"min" if lower values of the monitored metric are better, "max" if higher values are better.
    "auto" infers this from the metric's name: "min" for losses, errors and perplexity, "max"
    for accuracy, F1, AUC, IoU and the like. An unknown name raises an error."""
    save_top_k: int = 1
    """Besides last.ckpt, keep the k best checkpoints. 1 keeps best.ckpt. -1 keeps all."""
    save_last: bool = True
    """Save last.ckpt at the end of each epoch and after each validation."""
    save_every_n_steps: int | None = None
    """Save last.ckpt every N optimizer steps, in addition to the saves after epochs and
    validations."""
    seed: int | None = None
    """Seed Python, NumPy and PyTorch when the loop is created and at the start of each fit.

    With `seed`, this loop and all later loops in the process also seed their DataLoader workers,
    as after `seed_everything(workers=True)`.
    """
    compile: bool | str | dict[str, Any] = False
    """Compile each step method with torch.compile. Pass True, a mode such as "reduce-overhead", or
    a dict of arguments for torch.compile."""
    hparams: Mapping[str, Any] | None = None
    """Your own settings, such as {"lr": 0.1}, which the loop writes to hparams.yaml and sends to
    the loggers. list_runs shows the settings that differ between runs of the same name."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _convert_option(name, value))
        wrong_types = [name for name in vars(self) if not self._has_type(name)]
        wrong = [name for name in vars(self) if name in wrong_types or not self._is_in_range(name)]
        problems = [] if wrong else list(self._contradictions())
        if wrong or problems:
            # Do not import errors.py at the top of this file, because errors.py imports Lightning
            # and would slow down --help.
            from .errors import ConfigurationError, ConfigurationTypeError, describe

            for name in wrong:
                expected = _RANGES[name][0] if name in _RANGES else "True or False"
                problems.append(f"{name}: got {describe(vars(self)[name])}, expected {expected}.")
            kind = ConfigurationTypeError if wrong_types else ConfigurationError
            raise kind(" ".join(problems))

    def _has_type(self, name: str) -> bool:
        """Return whether an option's value has the annotated type."""
        value, hint = vars(self)[name], _HINTS[name]
        kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
        if Any in kinds:
            return True
        # Reject True and False for int options, although bool is a subclass of int in Python.
        if isinstance(value, bool):
            return bool in kinds
        return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))

    def _is_in_range(self, name: str) -> bool:
        value = vars(self)[name]
        if value is None or isinstance(value, bool) or name not in _RANGES:
            return True
        return _RANGES[name][1](value)

    def _contradictions(self) -> Iterable[str]:
        """Yield an error message for each pair of options that contradict each other."""
        interval, algorithm = self.val_check_interval, self.gradient_clip_algorithm
        has_epochs = self.check_val_every_n_epoch is not None or self.validate_every_n_steps
        if not has_epochs and isinstance(interval, float):
            yield (
                "`val_check_interval` should be an integer or a time-based duration"
                " (str 'DD:HH:MM:SS', datetime.timedelta, or dict kwargs for timedelta) when"
                f" `check_val_every_n_epoch=None`. val_check_interval: got {interval!r}."
            )
        if algorithm is not None and algorithm.lower() not in ("norm", "value"):
            yield (
                f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed algorithms: ['value',"
                " 'norm']."
            )
        # The default val_check_interval=1.0 validates once per epoch, but the int 1 validates after
        # each batch.
        is_given = interval is not None and not (isinstance(interval, float) and interval == 1.0)
        if self.validate_every_n_steps and is_given:
            yield (
                f"validate_every_n_steps: got {self.validate_every_n_steps} together with"
                f" val_check_interval={interval!r}, expected only one of the two. Leave out"
                " val_check_interval."
            )
        if self.save_top_k not in (0, 1) and self.monitor is None:
            yield (
                f"save_top_k: got {self.save_top_k} without monitor. Write monitor='val_loss' to"
                " rank the checkpoints by this metric. To keep the newest checkpoints instead, pass"
                " callbacks=[ModelCheckpoint(monitor='step', mode='max',"
                f" save_top_k={self.save_top_k})]."
            )
        if self.mode == "auto" and self.monitor and find_direction(self.monitor) is None:
            yield (
                f"mode: got 'auto', but the metric name {self.monitor!r} does not show whether"
                " smaller or larger is better. Write mode='min' or mode='max'."
            )
        if self.barebones:
            names = (*_DEFAULTS, "fast_dev_run", "detect_anomaly", "profiler")
            slow = {name: getattr(self, name) for name in names if getattr(self, name)}
            if self.on_nan == "stop":
                slow["on_nan"] = "stop"
            for name, value in slow.items():
                yield (
                    f"`Trainer(barebones=True, {name}={value!r})` was passed. {name} can impact the"
                    " speed so it is disabled in barebones mode."
                )

    def resolve(self) -> LoopConfig:
        """Return a copy of the options with all defaults filled in.

        Example:
            >>> LoopConfig(fast_dev_run=2).resolve().limit_train_batches
            2
        """
        values: dict[str, Any] = {}
        if self.default_root_dir is not None:
            values["default_root_dir"] = os.path.expanduser(self.default_root_dir)
        if self.mode == "auto":
            values["mode"] = find_direction(self.monitor) if self.monitor else "min"
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            values |= dict.fromkeys(_LIMITS, batches)
            values |= {"max_steps": batches, "max_epochs": 1, "num_sanity_val_steps": 0}
            values |= {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
            values |= {"validate_every_n_steps": None, "enable_checkpointing": False}
        if self.overfit_batches:
            values["limit_train_batches"] = self.overfit_batches
            values["limit_val_batches"] = self.overfit_batches
        return self.changed(**values).with_defaults()

    def with_defaults(self) -> LoopConfig:
        """Return a LoopConfig with default values for the options that are None."""
        defaults = {
            **(_OFF if self.barebones else _DEFAULTS),
            **dict.fromkeys(["val_check_interval", *_LIMITS], 1.0),
        }
        values = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.validate_every_n_steps:
            values["check_val_every_n_epoch"] = None
        return self.changed(**values)

    def with_options(self, **values: Any) -> LoopConfig:
        """Copy this LoopConfig, replace the given options, and check them."""
        if self.validate_every_n_steps and "validate_every_n_steps" in values:
            # with_defaults() has set check_val_every_n_epoch to None. Restore its default.
            values = {"check_val_every_n_epoch": 1, **values}
        if isinstance(self.val_check_interval, float) and self.val_check_interval == 1.0:
            # with_defaults() may have set val_check_interval to 1.0. Restore its default, because a
            # float raises an error together with check_val_every_n_epoch=None.
            values = {"val_check_interval": None, **values}
        return replace(self, **values).with_defaults()

    def changed(self, **values: Any) -> LoopConfig:
        """Copy this LoopConfig and replace the given options without checking them."""
        changed = copy.copy(self)
        vars(changed).update(values)
        return changed


def _convert_option(name: str, value: Any) -> Any:
    """Convert NumPy numbers in an option to Python numbers, and string Enums to strings."""
    if isinstance(value, str) and isinstance(value, Enum):
        value = value.value
    if name == "hparams" and isinstance(value, Mapping):
        return {str(setting): _to_setting(given) for setting, given in value.items()}
    if Any not in (_HINTS[name], *get_args(_HINTS[name])):
        value = _to_python(value)
    if name in _NUMBERS_OF_BATCHES and isinstance(value, float):
        # As in Trainer, 0.5 means half of the batches, 1.0 means all batches, and 3.0 means 3
        # batches.
        return int(value) if value > 1 and value.is_integer() else value
    return value


def to_yaml_value(value: Any, is_strict: bool = False) -> Any:
    """Convert a value to numbers, strings, lists and dicts, so that YAML can store the value.

    Raises:
        TypeError: ``is_strict`` is True, and the value contains an object that YAML cannot store.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        # Replace surrogate characters, which UTF-8 cannot store. Python uses surrogates for file
        # names that are not encoded in UTF-8.
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping | Namespace):
        items = (value if isinstance(value, Mapping) else vars(value)).items()
        named = {key if isinstance(key, int) else str(key): item for key, item in items}
        return {key: to_yaml_value(item, is_strict) for key, item in named.items()}
    if isinstance(value, set | frozenset):
        # Sort sets, because their order differs between processes.
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [to_yaml_value(item, is_strict) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_yaml_value(value.item())
    if is_strict and not isinstance(value, Path):
        raise TypeError(f"{type(value).__name__} is not a type that YAML supports")
    # Remove memory addresses from reprs, because addresses differ between processes.
    text = re.sub(r" at 0x\w+", "", str(getattr(value, "__qualname__", value)))
    return to_yaml_value(text)


def _to_setting(value: Any) -> Any:
    try:
        return to_yaml_value(value)
    except Exception:
        return type(value).__name__


def _to_python(value: Any) -> Any:
    """Convert a NumPy or PyTorch number to a Python number."""
    return value.item() if getattr(value, "shape", None) == () else value


def parse_duration(value: Duration) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, dict):
        return timedelta(**value)
    days, hours, minutes, seconds = (int(part) for part in value.split(":"))
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _is_duration(value: Any) -> bool:
    try:
        return parse_duration(value) >= timedelta()
    except (ValueError, TypeError):
        return False


def _is_limit(value: int | float) -> bool:
    return 0.0 <= value <= 1.0 if isinstance(value, float) else value >= 0


def _is_interval(value: Any) -> bool:
    if isinstance(value, int | float):
        return value >= 1 if isinstance(value, int) else _is_limit(value)
    return _is_duration(value) and parse_duration(value) > timedelta()


def _is_logger(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_is_logger(item) for item in value)
    has_method = hasattr(value, "log_metrics") and not isinstance(value, type)
    is_name = isinstance(value, str) and value in LOGGER_NAMES
    return has_method or is_name or isinstance(value, bool)


def _is_folder_name(value: int | str) -> bool:
    """Return whether a name or version is a valid folder name on every operating system."""
    if isinstance(value, int):
        return value >= 0
    is_plain = value.isprintable() and not set(value) & set('/\\:*?"<>|')
    return is_plain and value not in ("", ".", "..")


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value >= least


def _one_of(*choices: str) -> Callable[[Any], bool]:
    return lambda value: value in choices


_DURATION = '"DD:HH:MM:SS", a timedelta, or a dict such as {"minutes": 30}'
_LIMIT = ("a number of batches (int >= 0) or a fraction (float from 0.0 to 1.0)", _is_limit)
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Maps each option to a description of the valid values and a function that checks a value.
# Options that are not listed here must be True or False.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_epochs": ("a number of epochs (int >= 0), or -1 for no limit", _at_least(-1)),
    "min_epochs": ("a number of epochs (int >= 0)", _at_least(0)),
    "max_steps": ("a number of optimizer steps (int >= 0), or -1 for no limit", _at_least(-1)),
    "min_steps": ("a number of optimizer steps (int >= 0)", _at_least(0)),
    "max_time": (_DURATION, _is_duration),
    **dict.fromkeys((*_LIMITS, "overfit_batches"), _LIMIT),
    "fast_dev_run": ("True, False or a number of batches (int >= 0)", _at_least(0)),
    "val_check_interval": (
        "a number of batches (int >= 1), a fraction of an epoch (float from 0.0 to 1.0), or a"
        f" duration: {_DURATION}",
        _is_interval,
    ),
    "check_val_every_n_epoch": ("a number of epochs (int >= 1), or None", _at_least(1)),
    "validate_every_n_steps": ("a number of optimizer steps (int >= 1)", _at_least(1)),
    "num_sanity_val_steps": ("a number of batches (int >= 0), or -1 for all", _at_least(-1)),
    "log_every_n_steps": (
        "a number of optimizer steps (int >= 1), or 0 to turn off step logging",
        _at_least(0),
    ),
    "accumulate_grad_batches": ("a number of batches (int >= 1)", _at_least(1)),
    "gradient_clip_val": ("a number >= 0", _at_least(0)),
    "gradient_clip_algorithm": ('"norm" or "value"', bool),
    "deterministic": ('True, False or "warn"', _one_of("warn")),
    "reload_dataloaders_every_n_epochs": ("a number of epochs (int >= 0)", _at_least(0)),
    "on_nan": ('"warn", "stop" or "off"', _one_of("warn", "stop", "off")),
    "logger": (
        f"True, False, {', '.join(map(repr, LOGGER_NAMES))}, an object with a log_metrics method,"
        " or a list of these",
        _is_logger,
    ),
    "default_root_dir": ("the path of a local folder", lambda value: "://" not in os.fspath(value)),
    "name": ('a non-empty folder name without the characters / \\ : * ? " < > |', _is_folder_name),
    "version": (
        'an int >= 0, or a non-empty folder name without the characters / \\ : * ? " < > |',
        _is_folder_name,
    ),
    "monitor": ("the name of one metric, such as 'val_loss'", bool),
    "mode": ('"auto", "min" or "max"', _one_of("auto", "min", "max")),
    "save_top_k": ("a number of checkpoints (int >= 0), or -1 for all", _at_least(-1)),
    "save_every_n_steps": ("a number of optimizer steps (int >= 1)", _at_least(1)),
    "seed": ("an int from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    "compile": (
        f"True, False, a mode ({', '.join(map(repr, _COMPILE_MODES))}) or a dict of torch.compile's"
        " arguments",
        lambda value: isinstance(value, dict) or value in _COMPILE_MODES,
    ),
    "hparams": ('a dict of your settings, such as {"lr": 0.1}', lambda value: True),
}
# The options in which 3.0 means 3 batches. In overfit_batches, every float is a fraction of the
# batches, as in Trainer.
_NUMBERS_OF_BATCHES = (*_LIMITS, "val_check_interval")
_HINTS = get_type_hints(LoopConfig)


@dataclass(frozen=True, kw_only=True)
class LoopArguments(LoopConfig):
    """All arguments of FabricLoop, including the options of LoopConfig."""

    fabric: Any = field(default=None, kw_only=False)
    """A lightning.Fabric object, which replaces the accelerator, strategy, devices,
    num_nodes, precision and plugins options."""
    accelerator: Any = "auto"
    """Run on "cpu", "gpu", "mps" or "auto", which uses a GPU if there is one."""
    strategy: Any = "auto"
    """The strategy for several devices: "ddp", "auto" or a lightning.fabric strategy object."""
    devices: Any = "auto"
    """The number of devices, a list of their indices, or "auto" for all devices."""
    num_nodes: int = 1
    """The number of machines."""
    precision: Any = None
    """The precision of the computation, such as "32-true", "bf16-mixed" or "16-mixed"."""
    plugins: Any = None
    """Fabric plugins for precision, the cluster environment or checkpoint files."""
    callbacks: Any = None
    """Lightning callbacks, or objects with methods such as on_fit_start."""
    loggers: Any = None
    """An alias of the logger option. Do not pass both logger and loggers."""


# FabricLoop does not support these Trainer options but accepts their default values.
_TRAINER_DEFAULTS = {
    "use_distributed_sampler": True,
    "sync_batchnorm": False,
    "enable_autolog_hparams": True,
    "model_registry": None,
}


def parse_options(options: dict[str, Any]) -> tuple[LoopConfig, dict[str, Any]]:
    """Split FabricLoop's keyword arguments into a LoopConfig and the remaining arguments.

    Raises:
        TypeError: An option is unknown.
    """
    from .errors import ConfigurationError, unknown_option

    arguments: dict[str, Any] = {field.name: field.default for field in fields(LoopArguments)}
    given = {n: v for n, v in options.items() if (n, v) not in _TRAINER_DEFAULTS.items()}
    unknown = [name for name in given if name not in arguments]
    if unknown:
        raise TypeError(" ".join(unknown_option(name, arguments) for name in unknown))
    arguments |= given
    if arguments["loggers"] is not None:
        if arguments["logger"] is not None:
            raise ConfigurationError(
                "FabricLoop: got both logger and loggers, which are two names for one option. Leave"
                " out loggers."
            )
        arguments["logger"] = arguments["loggers"]
    if isinstance(arguments["devices"], list | tuple):
        arguments["devices"] = [_to_python(device) for device in arguments["devices"]]
    for name in ("devices", "num_nodes"):
        arguments[name] = _to_python(arguments[name])
    config = LoopConfig(**{field.name: arguments.pop(field.name) for field in fields(LoopConfig)})
    return config, arguments


def with_arguments_of(
    arguments: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that copies a dataclass's fields and their docstrings to a constructor."""

    def sign(init: Any) -> Any:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = inspect.signature(arguments).parameters.values()
        init.__signature__ = inspect.Signature([own, *taken])
        init.__doc__ = "\n".join(f"{name}: {text}" for name, text in document_fields().items())
        return init

    return sign


def document_fields() -> dict[str, str]:
    """Return the docstring of each field of LoopConfig and LoopArguments, keyed by field name."""
    try:
        lines = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    except OSError:
        # If the package is installed without its .py files, the docstrings cannot be read.
        return {}
    texts = {}
    for node in lines:
        body = node.body if isinstance(node, ast.ClassDef) else []
        for line, following in pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                text = ast.literal_eval(following.value)
                texts[ast.unparse(line.target)] = " ".join(text.split())
    return texts
