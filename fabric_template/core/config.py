"""LoopConfig: every word of the loop, with Trainer's meaning and Trainer's default, checked once and all together."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

Interval = int | float | str | timedelta | dict[str, int]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, how often to validate, what to keep.

    The words are `lightning.Trainer's <https://lightning.ai/docs/pytorch/stable/common/trainer.html>`_, with its meaning
    and its defaults; the last group is ours. Each field is documented under itself.

    Raises:
        Misuse: one message that lists every field that is out of range.
        MisuseOfType: the same, when a value has the wrong type.

    Example:
        >>> LoopConfig(max_epochs=3, accumulate_grad_batches=4).max_epochs
        3
        >>> LoopConfig(mode="best")
        Traceback (most recent call last):
        ...
        fabric_template.core.errors.Misuse: mode='best': expected "min" or "max"
    """

    # How long
    max_epochs: int | None = None
    """Stop after this many epochs. -1: no limit. None: 1000, or no limit when max_steps or max_time is given."""
    min_epochs: int | None = None
    """Ignore requests to stop early before this many epochs."""
    max_steps: int = -1
    """Stop after this many optimizer steps; an epoch that ends in its middle goes on when a resume has more. -1: no limit."""
    min_steps: int | None = None
    """Ignore requests to stop early before this many optimizer steps."""
    max_time: str | timedelta | dict[str, int] | None = None
    """Stop after this much time: "DD:HH:MM:SS", a timedelta, or its keywords ({"minutes": 30})."""

    # How much of the data
    limit_train_batches: int | float | None = None
    """Train on this many batches of each epoch (int) or this fraction of them (float). None: all."""
    limit_val_batches: int | float | None = None
    """Validate on this many batches (int) or this fraction of them (float) of each loader. None: all."""
    limit_test_batches: int | float | None = None
    """Test on this many batches (int) or this fraction of them (float) of each loader. None: all."""
    limit_predict_batches: int | float | None = None
    """Predict this many batches (int) or this fraction of them (float) of each loader. None: all."""
    overfit_batches: int | float = 0.0
    """Train and validate on the same few first batches (int) or fraction (float), unshuffled. 0: off."""
    fast_dev_run: int | bool = False
    """Run this many batches (True: one) of everything, one epoch, without logger and checkpoints: does it run at all?"""

    # When to validate and to log
    val_check_interval: Interval | None = None
    """Validate every so many batches (int), every fraction of an epoch (float), or every so much time
    ("DD:HH:MM:SS", timedelta or its keywords). None: at the end of each epoch."""
    check_val_every_n_epoch: int | None = 1
    """Validate only every so many epochs. None: count val_check_interval's batches across epochs."""
    validate_every_n_steps: int | None = None
    """Validate every so many optimizer steps, counted across epochs, and not at an epoch's end. None: by epochs."""
    num_sanity_val_steps: int | None = None
    """Validate this many batches before training, so that a broken validation fails at once. -1: all; None: 2."""
    log_every_n_steps: int | None = None
    """Write values logged per step every so many steps. None: 50. 0: never."""

    # The update
    accumulate_grad_batches: int = 1
    """Batches per optimizer step. Each weighs 1/N, also in a shorter last window, as Trainer does it."""
    gradient_clip_val: int | float | None = None
    """Clip gradients at this norm or value before each step. None or 0: off."""
    gradient_clip_algorithm: str | None = None
    """What gradient_clip_val limits: "norm" (all gradients together; the default) or "value" (each element)."""

    # How to run
    deterministic: bool | str | None = None
    """Ask PyTorch for deterministic algorithms; "warn" only warns where there is none."""
    benchmark: bool | None = None
    """torch.backends.cudnn.benchmark. None: as it is; False when deterministic."""
    inference_mode: bool = True
    """validate, test and predict under torch.inference_mode (False: torch.no_grad)."""
    reload_dataloaders_every_n_epochs: int = 0
    """Ask the datamodule or module for new loaders every so many epochs. 0: never."""
    profiler: Any = None
    """A Lightning profiler, or "simple" or "advanced"."""
    detect_anomaly: bool = False
    """torch.autograd.set_detect_anomaly: names the operation that made a NaN in backward. Slow."""
    on_nan: int | str = "warn"
    """What is done about a training loss that is not finite (NaN or inf): "warn" looks seldom and says so once, "off" does
    nothing. An int stops after so many such batches in a row, and writes no checkpoint behind the first of them: it reads each
    batch's loss, for which a GPU has to wait."""
    barebones: bool = False
    """Everything off that is not the loop itself, the history of losses included: to measure its cost."""
    logger: Any = None
    """True or None: the CSV logger. False: none. Or a logger, or a list of them (Fabric's, Lightning's or your own, an object
    with log_metrics); True among them is the CSV logger."""
    enable_checkpointing: bool | None = None
    """False: keep no checkpoints."""
    enable_progress_bar: bool | None = None
    """False: neither bar nor lines. By default rank zero prints a line per epoch and for each validation inside one; a terminal
    or a notebook has a bar, a log file a line a minute in its place."""
    enable_model_summary: bool | None = None
    """False: do not print the table of layers before training."""
    default_root_dir: str | None = None
    """The folder for logs/ and checkpoints/. None: the current one."""

    # Ours: where a run lives and what is kept of it
    name: str = "run"
    """The run's name: logs/<name>/version_<n> and checkpoints/<name>/version_<n>."""
    version: int | str | None = None
    """The run's version. None: the next free number, or the resumed run's own."""
    monitor: str | None = None
    """The metric that says which checkpoint is best, asked after each validation and epoch. None: only the last one is kept."""
    mode: str = "min"
    """Whether the best monitor is the smallest ("min") or the largest ("max")."""
    save_top_k: int = 1
    """Keep the best k checkpoints by monitor: k = 1 is best.ckpt, otherwise epoch=..-<monitor>=...ckpt; -1: all."""
    save_last: bool = True
    """Keep last.ckpt, rewritten at the end of each epoch and after each validation inside one."""
    save_every_n_steps: int | None = None
    """Also rewrite last.ckpt every so many optimizer steps, in the middle of epochs."""
    trusted: bool = False
    """Also read checkpoints that need arbitrary classes (pickles of old). Such a file can run any program: True only for
    files whose writer you know."""
    seed: int | None = None
    """Seed Python, NumPy and PyTorch, on every rank and in every worker, when the loop is made and again as each run starts.
    Make the model after the loop, as the command line does and as configure_model is called, or write seed_everything(1)
    before it: weights that are there already stay as they are.
    None: leave the random numbers as they are."""
    compile: bool | str | dict[str, Any] = False
    """torch.compile the steps: True, its mode ("reduce-overhead", "max-autotune") or its keywords."""

    def __post_init__(self) -> None:
        wrong_type: list[str] = []
        wrong_value: list[str] = []
        for field in dataclasses.fields(self):
            if field.name in _CHECKS:
                types, in_range, expected = _CHECKS[field.name]
                value = getattr(self, field.name)
                wrong = wrong_value if (is_type := _is_one_of(value, types)) else wrong_type
                if not is_type or not in_range(value):
                    from .elsewhere import trainers_words

                    wrong.append(f"{field.name}={value!r}: expected {expected}{trainers_words(field.name, value)}")
        if not (wrong_type or wrong_value):
            wrong_value += self._contradictions()
        if wrong_type or wrong_value:
            from .errors import Misuse, MisuseOfType  # Lightning takes seconds: only when there is something to say

            raise (MisuseOfType if wrong_type else Misuse)("; ".join(wrong_type + wrong_value))

    def _contradictions(self) -> list[str]:
        """What no field can see alone."""
        found = []
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            found.append(
                "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS', datetime.timedelta, or"
                " dict kwargs for timedelta) when `check_val_every_n_epoch=None`."
                f" It is {self.val_check_interval!r}; expected batches, counted across epochs, or a time"
            )
        if self.validate_every_n_steps and (self.val_check_interval, self.check_val_every_n_epoch) not in (
            (None, 1), (self.validate_every_n_steps, None)
        ):  # fmt: skip
            found.append(
                f"validate_every_n_steps={self.validate_every_n_steps} with val_check_interval={self.val_check_interval!r} and"
                f" check_val_every_n_epoch={self.check_val_every_n_epoch!r}: expected it alone"
            )
        if self.save_top_k not in (0, 1) and self.monitor is None:
            found.append(
                f"save_top_k={self.save_top_k!r} without monitor: expected monitor='val_loss' or another metric"
            )
        if self.barebones:
            off = ("logger", "enable_checkpointing", *_SHOWN, "log_every_n_steps", "num_sanity_val_steps", "fast_dev_run",
                   "detect_anomaly", "profiler", "on_nan")  # fmt: skip
            from .elsewhere import off_in_barebones

            given = {name: value for name in off if (value := getattr(self, name)) not in (None, "warn") and value}
            found += [off_in_barebones(name, value) for name, value in given.items()]
        return found

    def resolved(self) -> Settings:
        """The same configuration with every None that stands for a default filled in.

        Example:
            >>> LoopConfig(fast_dev_run=2).resolved().limit_train_batches
            2
        """
        on = not self.barebones
        defaults = {**dict.fromkeys(("logger", "enable_checkpointing", *_SHOWN), on), "val_check_interval": 1.0,
                    "num_sanity_val_steps": 2 if on else 0, "log_every_n_steps": 50 if on else 0,
                    **dict.fromkeys(_LIMITS, 1.0)}  # fmt: skip
        words: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.validate_every_n_steps:
            words |= {"val_check_interval": self.validate_every_n_steps, "check_val_every_n_epoch": None}
        if self.default_root_dir is not None:
            words["default_root_dir"] = os.path.expanduser(self.default_root_dir)
        if self.num_sanity_val_steps == -1:
            words["num_sanity_val_steps"] = float("inf")
        if self.overfit_batches:
            words |= {"limit_train_batches": self.overfit_batches, "limit_val_batches": self.overfit_batches}
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            words |= dict.fromkeys(_LIMITS, batches)
            words |= {"max_steps": batches, "max_epochs": 1, "num_sanity_val_steps": 0, "val_check_interval": 1.0,
                      "check_val_every_n_epoch": 1, "validate_every_n_steps": None, "enable_checkpointing": False}  # fmt: skip
        return self.changed(**words)

    def changed(self, **words: Any) -> Settings:
        """A copy with other values, taken as they are: the checks know what users may write, not what we fill in."""
        copy = object.__new__(Settings)
        for name, value in {**vars(self), **words}.items():
            object.__setattr__(copy, name, value)
        return copy


class Settings(LoopConfig):
    """What a run reads: a LoopConfig that is resolved, in which these are never None."""

    limit_train_batches: int | float
    limit_val_batches: int | float
    val_check_interval: Interval
    num_sanity_val_steps: int  # or infinity
    log_every_n_steps: int
    enable_checkpointing: bool


def parse_config(words: dict[str, Any]) -> LoopConfig:
    """LoopConfig from keyword arguments; an unknown word is answered with the nearest known one.

    Raises:
        TypeError: for a word that is none of ours.

    Example:
        >>> parse_config({"max_epoch": 3})
        Traceback (most recent call last):
        ...
        TypeError: FabricLoop has no argument max_epoch; did you mean max_epochs?
    """
    known = [field.name for field in dataclasses.fields(LoopConfig)]
    if unknown := [word for word in words if word not in known]:
        from .elsewhere import AS_HERE, why_unknown

        if refused := [word for word in unknown if words[word] is not AS_HERE.get(word, ...)]:
            raise TypeError("; ".join(why_unknown(word, known) for word in refused))
    return LoopConfig(**{word: value for word, value in words.items() if word in known})


def parse_duration(value: str | timedelta | dict[str, int]) -> timedelta:
    """A length of time from Trainer's three ways to write one.

    Example:
        >>> parse_duration("00:01:30:00")
        datetime.timedelta(seconds=5400)
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, dict):
        return timedelta(**value)
    days, hours, minutes, seconds = (int(part) for part in value.split(":"))
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _is_duration(value: Any, least: timedelta = timedelta.resolution) -> bool:
    try:
        return parse_duration(value) >= least
    except (ValueError, TypeError):
        return False


def _is_one_of(value: Any, types: tuple) -> bool:
    """isinstance, except that a bool is no number and an int will do for a float."""
    if isinstance(value, bool):
        return bool in types
    return value is None and None in types or isinstance(value, tuple(t for t in types if t is not None))


def _limit(value: Any) -> bool:
    return value is None or (0.0 <= value <= 1.0 if isinstance(value, float) else value >= 0)


def _at_least(least: int) -> Any:
    return lambda value: value is None or value >= least


def is_name(value: str) -> bool:
    r"""Whether this may name a folder, on any system and on one line.

    Example:
        >>> is_name("digits"), is_name("a/b"), is_name("two\nlines")
        (True, False, False)
    """
    return value not in ("", ".", "..") and value.isprintable() and not set(value) & set('/\\:*?"<>|')


def _anything(value: Any) -> bool:
    return True


_LIMIT = ((int, float, None), _limit, "None, an int >= 0 (batches) or a float from 0.0 to 1.0 (a fraction)")
_SWITCH = ((bool, None), _anything, "True, False or None")
_YES_NO = ((bool,), _anything, "True or False")
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_SHOWN = ("enable_progress_bar", "enable_model_summary")
COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "default")
_TIME = '"DD:HH:MM:SS", a timedelta or its keywords as a dict'

# field: (types, is it in range?, what was expected)
_CHECKS: dict[str, tuple] = {
    "max_epochs": ((int, None), _at_least(-1), "None, -1 (no limit) or an int >= 0"),
    "min_epochs": ((int, None), _at_least(0), "None or an int >= 0"),
    "max_steps": ((int,), _at_least(-1), "-1 (no limit) or an int >= 0"),
    "min_steps": ((int, None), _at_least(0), "None or an int >= 0"),
    "max_time": ((str, timedelta, dict, None), lambda v: v is None or _is_duration(v, timedelta()), f"None, {_TIME}"),
    **dict.fromkeys(_LIMITS, _LIMIT),
    "overfit_batches": ((int, float), _limit, "an int >= 0 (batches) or a float from 0.0 to 1.0 (a fraction)"),
    "fast_dev_run": ((bool, int), lambda v: v >= 0, "True, False or a number of batches >= 0"),
    "val_check_interval": (
        (int, float, str, timedelta, dict, None),
        lambda v: (
            (_limit(v) and (v != 0 or isinstance(v, float))) if isinstance(v, int | float | None) else _is_duration(v)
        ),
        f"None, an int >= 1 (batches), a float from 0.0 to 1.0 (a fraction of the epoch), {_TIME}",
    ),
    "check_val_every_n_epoch": ((int, None), _at_least(1), "None or an int >= 1"),
    "num_sanity_val_steps": ((int, None), _at_least(-1), "None, -1 (all) or an int >= 0"),
    "log_every_n_steps": ((int, None), _at_least(0), "None or an int >= 0 (0: never)"),
    "accumulate_grad_batches": ((int,), _at_least(1), "an int >= 1"),
    "gradient_clip_val": ((int, float, None), _at_least(0), "None or a number >= 0"),
    "gradient_clip_algorithm": ((str, None), lambda v: v in (None, "norm", "value"), 'None, "norm" or "value"'),
    "deterministic": ((bool, str, None), lambda v: v in (None, True, False, "warn"), 'None, True, False or "warn"'),
    **dict.fromkeys(("benchmark", "enable_checkpointing", *_SHOWN), _SWITCH),
    **dict.fromkeys(("inference_mode", "detect_anomaly", "barebones", "save_last", "trusted"), _YES_NO),
    "reload_dataloaders_every_n_epochs": ((int,), _at_least(0), "an int >= 0 (0: never)"),
    "name": ((str,), is_name, "a folder's name"),
    "version": (
        (int, str, None),
        lambda v: is_name(v) if isinstance(v, str) else v is None or v >= 0,
        "None, a number >= 0 or a folder's name",
    ),
    "default_root_dir": (
        (str, os.PathLike, None),
        lambda v: v is None or "://" not in os.fspath(v),
        "None or a local folder (a run's rows and files are appended to, synced and renamed)",
    ),
    "monitor": ((str, None), _anything, 'None or a metric\'s name such as "val_loss"'),
    "mode": ((str,), lambda v: v in ("min", "max"), '"min" or "max"'),
    "save_top_k": ((int,), _at_least(-1), "-1 (all) or an int >= 0"),
    **dict.fromkeys(
        ("save_every_n_steps", "validate_every_n_steps"), ((int, None), _at_least(1), "None or an int >= 1")
    ),
    "seed": ((int, None), lambda v: v is None or 0 <= v < 2**32, "None or an int from 0 to 4294967295"),
    "compile": (
        (bool, str, dict),
        lambda v: not isinstance(v, str) or v in COMPILE_MODES,
        f"True, False, one of {', '.join(COMPILE_MODES)}, or torch.compile's keywords as a dict",
    ),
    "on_nan": (
        (int, str),
        lambda v: v in ("warn", "off") if isinstance(v, str) else v >= 1,
        '"warn", "off" or an int >= 1 (batches in a row)',
    ),
}
