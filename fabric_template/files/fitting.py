"""Fitting: parts of a checkpoint put into the objects that they are for; what does not fit is said in one line.

Optimizers and schedulers take nearly anything from a file, and stumble over it steps later. What they hold by themselves says
what they must be given.
"""

from __future__ import annotations

import copy
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.overrides import is_a
from ..core.states import states_as_saved
from . import schema
from .errors import CheckpointError
from .schema import Is, anything, check, one_of, scalar, text

number = Is("a number, or a tensor of one", lambda value: schema.number.test(value) or scalar.test(value))
finite = Is("a finite number, or one in a tensor", lambda value: number.test(value) and math.isfinite(value))
number_or_none = Is("a number, a tensor of one, or None", lambda value: value is None or number.test(value))


_NONE_AT_FIRST = (  # in Lightning's callbacks; a file may be older than what a callback has come to hold since
    "stopping_reason_message", "best_model_score", "current_score", "previous_backbone_lr", "scheduler_state",
    "average_model_state",
)  # fmt: skip


class OtherModel(CheckpointError, RuntimeError):
    """A checkpoint of another model: a RuntimeError, too, as torch's ``load_state_dict`` raises it."""


@contextmanager
def given_to(taker: Any, path: str | Path, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Within, a part of the file is put into an object: what that says of one that it cannot use becomes one line."""
    try:
        yield
    except Exception as error:
        of = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        cause = " ".join(f"{of}{error}".split())[:300]
        raise kind(
            f"'{path}' does not fit this run: {type(taker).__name__} cannot take what it holds ({cause}); resume with what"
            " saved it, or use load= to take the weights only"
        ) from error


def like(example: Any, one: Is | None = None) -> Any:
    """The table for what may stand in this one's place; `one` is that for a tensor of one element, if it need not be a tensor.

    Example:
        >>> check(like({"lr": 0.1, "betas": (0.9, 0.99)}), {"lr": torch.tensor(0.2), "betas": [0.8, 0.9]}, "file")
    """
    if isinstance(example, bool | int | float):
        kinds = {bool: number_or_none, int: finite}  # foreach=None is torch's choice
        return kinds.get(type(example), number)
    if isinstance(example, Tensor) and example.numel() == 1:
        if one is not None:
            return one
        is_complex = example.is_complex()
        return Is(scalar.words, lambda value: scalar.test(value) and value.is_complex() in (False, is_complex))
    if isinstance(example, Tensor):
        shape, is_float = tuple(example.shape), example.is_floating_point()
        return Is(
            f"a tensor of shape {shape}, {'of floats' if is_float else example.dtype}",
            lambda value: (
                isinstance(value, Tensor) and tuple(value.shape) == shape and not value.is_meta
                and value.layout is torch.strided and value.is_floating_point() == is_float
                and all(stride or size < 2 for stride, size in zip(value.stride(), shape, strict=True))
            ),
        )  # fmt: skip
    if isinstance(example, Mapping) and example and all(isinstance(key, str) for key in example):
        return {f"{key}?": like(value, one) for key, value in example.items()}
    if isinstance(example, list | tuple) and example:
        return tuple(like(value, one) for value in example)
    return text if isinstance(example, str) else anything


def put_into_optimizer(optimizer: Any, state: Mapping[str, Any], path: str | Path) -> None:
    """Give an optimizer its state."""
    with given_to(optimizer, path):
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:  # nobody else knows what it holds
            with states_as_saved([optimizer]):
                optimizer.load_state_dict(state)
            return
        groups = [  # None is torch's choice, as it is of a flag
            {key: False if value is None else value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        check({"param_groups": like(groups, number), "state": {anything: {anything: anything}}}, state, "it")
        with states_as_saved([optimizer]):
            optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            made: dict[Any, Any] = {}
            for parameter in group["params"]:
                if held := optimizer.state.get(parameter):
                    kind = tuple(min(size, 2) for size in parameter.shape), parameter.dtype
                    made[kind] = made[kind] if kind in made else _made_by_a_step(optimizer, group, *kind)
                    table = {key: like(_grown(value, parameter)) for key, value in made[kind].items()}
                    check(table, held, f"the state of a parameter of shape {tuple(parameter.shape)}")


def _grown(small: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of a state, that of a small parameter, as large as this one's: its dimensions are the parameter's, or 1."""
    if small.dim() == 0:
        return small
    pairs = zip(small.shape, parameter.shape, strict=True)
    return small.new_empty([size if least == min(size, 2) else least for least, size in pairs], device="meta")


def _made_by_a_step(optimizer: Any, group: dict[str, Any], shape: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that one step leaves of a small parameter; none where that cannot be tried, or is not torch's own."""
    twin = torch.zeros(shape, dtype=dtype)
    twin.grad = torch.zeros_like(twin)
    with suppress(Exception):
        if f"{type(optimizer).__module__}.".startswith("torch.optim."):
            defaults = dict(optimizer.defaults)
            fresh = copy.copy(optimizer)
            optimizer.defaults = defaults  # a copy adds a word to those that it shares
            fresh.param_groups, fresh.state = [{**group, "params": [twin]}], defaultdict(dict)
            fresh.step()
            state = {key: value for key, value in fresh.state[twin].items() if isinstance(value, Tensor)}
            return {key: value for key, value in state.items() if value.dim() in (0, twin.dim())}
    return {}


def put_into_scheduler(scheduler: Any, state: Mapping[str, Any], path: str | Path) -> None:
    """Give a scheduler its state, which becomes its attributes: none of them may hide a method, or its optimizer."""
    with given_to(scheduler, path):
        mine = scheduler.state_dict()
        free = Is("none of its own", lambda key: key in mine or not hasattr(scheduler, key))
        check({free: anything}, state, "it")
        groups = len(getattr(getattr(scheduler, "optimizer", None), "param_groups", ()))
        for key, value in mine.items():
            theirs = state.get(key)
            if isinstance(value, list) and isinstance(theirs, list) and len(value) < len(theirs) <= groups:
                mine[key] = value[:1] * len(theirs)  # a number for each group, of which callbacks have added some
        check(like(mine, number), state, "it")
        scheduler.load_state_dict(state)


def put_into_callback(callback: Any, state: Any, path: str | Path, step: int) -> None:
    """Give a callback its state; of Lightning's own it is known what that is, and which files ModelCheckpoint removes.

    A ModelCheckpoint that has written this very file saves no second one of the same step, as if it had gone on.
    """
    with given_to(callback, path):
        if type(callback).__module__.startswith(("lightning.", "pytorch_lightning.")) and state:
            nones = {key for key in _NONE_AT_FIRST if isinstance(state, Mapping) and state.get(key) is None}
            check(like({key: value for key, value in callback.state_dict().items() if key not in nones}), state, "it")
        if is_a(callback, "ModelCheckpoint") and state:
            check({"best_k_models?": {text: number}}, state, "it")
            models, folder = state.get("best_k_models", {}), str(state.get("dirpath"))
            inside = Is(
                f"a file in {folder!r}",
                lambda name: (
                    not name or (os.path.dirname(name) and os.path.normpath(name).startswith(os.path.join(folder, "")))
                ),
            )
            check([inside], [*models, state.get("last_model_path", "")], "its files")
            check(one_of("", *models), state.get("kth_best_model_path", ""), "its kth_best_model_path")
        if state:
            callback.load_state_dict(copy.deepcopy(state))
            if is_a(callback, "ModelCheckpoint") and path is not None and os.path.dirname(path) == callback.dirpath:
                callback._last_global_step_saved, callback._last_checkpoint_saved = step, str(path)
