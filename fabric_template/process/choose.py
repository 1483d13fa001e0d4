"""Resume: which file a path, "last", "best" and "auto" mean, and what is done with a damaged one."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn

from ..core.overrides import overrides
from ..core.passes import INFINITE
from ..core.steps import is_shared_out
from ..files.checkpoint import OURS
from ..files.disk import set_aside
from ..files.errors import CheckpointError, DamagedError, UnreadableError, cause_of
from ..files.found import find_checkpoint, folders_of
from ..files.opening import names_in
from ..files.ordinary import SHARDS
from ..files.plain import brought_back
from ..files.reading import forget_mapped, load_header, read_checkpoint
from ..files.restoring import check_fits, check_format, check_trained
from ..files.schema import check_resumable
from ..files.storage import AtomicCheckpointIO, door, inside
from ..trainer.attributes import TrainerFace
from .agreement import agree_on_file, from_rank_zero
from .build import Plan
from .signals import starts_processes
from .world import come_by_themselves


class MissingError(CheckpointError):
    """There is no such checkpoint."""


def choose_checkpoint(loop: TrainerFace, plan: Plan, resume: Any, load: Any) -> None:
    """Find the files that ``resume=`` and ``load=`` mean, and check that they can be used.

    Ranks that have come here by themselves (torchrun, SLURM) wait for `agree_on_checkpoint`, so that one without a file
    does not leave the others waiting; so does "auto" in a script that is started once per rank: one rank that sets a
    damaged file aside must not take it from under another.
    """
    fabric = loop.fabric
    is_one = fabric.strategy.launcher is None or starts_processes(fabric)
    plan.origin.is_auto = resume == "auto"
    if come_by_themselves(fabric) or (plan.origin.is_auto and not is_one):
        plan.origin.awaits = resume, load
    else:
        _find(loop, plan, resume, load)


def agree_on_checkpoint(loop: TrainerFace, plan: Plan) -> None:
    """Once the ranks can talk to each other: rank zero finds what "auto" means, and all have the same file, or end."""
    fabric, awaited = loop.fabric, plan.origin.awaits
    plan.origin.awaits = None
    if awaited is not None and plan.origin.is_auto:
        found = from_rank_zero(fabric, lambda: _path_of("resume", "auto", loop))
        awaited = found, awaited[1]
    if fabric.world_size > 1 and not starts_processes(fabric):
        agree_on_file(fabric, lambda: _find(loop, plan, *awaited) if awaited else plan.origin.path)
    elif awaited is not None:
        _find(loop, plan, *awaited)


def _find(loop: TrainerFace, plan: Plan, resume: Any, load: Any) -> str | Path | None:
    if "best" in (resume, load) and len(loop.checkpoint_callbacks) > 1:
        plan.said.warn(
            f'`.{plan.fn}(ckpt_path="best")` is called with Trainer configured with multiple `ModelCheckpoint` callbacks. It'
            " will use the best checkpoint path from first checkpoint callback."
        )
    try:
        plan.origin.resume_path = _path_of("resume", resume, loop, plan.fn)
        plan.origin.load_path = _path_of("load", load, loop, plan.fn)
    except MissingError:
        if not plan.origin.may_lack:
            raise
        plan.said.warn(
            f'.{plan.fn}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint will be loaded.'
        )
    _check(plan, loop.fabric)
    return plan.origin.path


def load_file(fabric: Fabric, path: str | Path, trusted: bool, to_compare: bool = False) -> dict[str, Any]:
    """Read a checkpoint, by the user's own CheckpointIO where that brings a way to read, otherwise by ours.

    What lies in pieces is read, too, but by a run that takes its own part of it later; ``to_compare``: the shapes will do.
    """
    io = door(fabric)
    in_parts = is_shared_out(fabric)
    if type(io).load_checkpoint in (AtomicCheckpointIO.load_checkpoint, TorchCheckpointIO.load_checkpoint):
        checkpoint = brought_back(read_checkpoint(path, trusted=trusted, mapped=in_parts))
        if in_parts:
            from ..files.shards import unmapped

            checkpoint = unmapped(checkpoint)
    else:
        forget_mapped(path)  # which may have been left on the disk by a run before, and written to since
        takes_it = "weights_only" in inspect.signature(io.load_checkpoint).parameters
        checkpoint = io.load_checkpoint(path, **({"weights_only": not trusted} if takes_it else {}))
    if SHARDS in checkpoint and (to_compare or not in_parts):
        from ..files.shards import whole, with_shapes

        return (with_shapes if to_compare else whole)(checkpoint, path)
    return checkpoint


def _path_of(argument: str, value: Any, loop: TrainerFace, fn: str = "fit") -> str | Path | None:
    """The file, None for none."""
    config = loop.config
    root = Path(config.default_root_dir or ".") / "checkpoints"
    if value in ("last", "best"):
        found = loop.checkpoint_path(value) or (_last_of_callbacks(loop) if value == "last" else None)
        found = found or find_checkpoint(value, root, config.name, config.version, config.mode)
        if found is None:
            reason = _why_no_best(loop, fn) if value == "best" else ""
            raise MissingError(
                f"{argument}={value!r}{reason}: there is no {value}.ckpt under '{root / config.name}'; expected a run with"
                f" name={config.name!r} to have saved one: leave {argument} out to start anew, or give a path"
            )
        return found
    if value == "auto":
        last = loop.checkpoint_path("last")
        own = [*([last.parent] if last is not None else ()), *_own_folders(loop)]
        others = folders_of_callbacks(loop) or folders_of(root, config.name, config.version) if last is None else []
        places = [*([tuple(dict.fromkeys(own))] if own else ()), *(folder for folder in others if folder not in own)]
        return newest_good(places, config.trusted)
    return value if value is None or "://" in str(value) else Path(value)


def _last_of_callbacks(loop: TrainerFace) -> Path | None:
    """The newest ``last.ckpt`` of the ModelCheckpoints, of an earlier process too."""
    starts = tuple(name for c in loop.checkpoint_callbacks if (name := getattr(c, "CHECKPOINT_NAME_LAST", None)))
    own, found = _own_folders(loop), list[Path]()
    for folder in (*own, *folders_of_callbacks(loop)):
        if folder in own or not found:
            found += [folder / one for one in names_in(folder) if one.startswith(starts) and one.endswith(".ckpt")]
    return max(found, key=os.path.getmtime, default=None)


def _own_folders(loop: TrainerFace) -> list[Path]:
    """Those that the loop's ModelCheckpoints name."""
    savers = [callback for callback in loop.checkpoint_callbacks if hasattr(callback, "CHECKPOINT_NAME_LAST")]
    return [Path(own) for saver in savers if (own := getattr(saver, "dirpath", None))]


def folders_of_callbacks(loop: TrainerFace) -> list[Path]:
    """Where the loop's ModelCheckpoints keep their files, of earlier processes too: the newest version first."""
    root, config, folders = Path(loop.default_root_dir), loop.config, []
    for callback in loop.checkpoint_callbacks:
        if not hasattr(callback, "CHECKPOINT_NAME_LAST"):  # what it keeps may be of the middle of a step
            continue
        if own := getattr(callback, "dirpath", None):
            folders.append(Path(own))
        elif not loop.loggers:
            folders.append(root / "checkpoints")
        else:  # beside the logs of the first logger
            logger = loop.loggers[0]
            place = config.name, config.version
            if not loop._own_logger:  # that counts its versions itself; one that it was given is there
                name, version = str(logger.name), logger.version
                is_there = Path(logger.save_dir or root, *folders_of(Path(), name, version)).is_dir()
                place = name, version if is_there else None
            folders += [path / "checkpoints" for path in folders_of(Path(logger.save_dir or root), *place)]
    return list(dict.fromkeys(folders))


def _why_no_best(loop: TrainerFace, fn: str) -> str:
    """Why this loop has no best checkpoint, where that is known."""
    if loop.checkpoint_callbacks:
        how = "to save the best model (expected save_top_k other than 0)"
        return f" is set but `ModelCheckpoint` is not configured {how}"
    if loop.config.fast_dev_run:
        return (
            f': You cannot execute `.{fn}(ckpt_path="best")` with `fast_dev_run=True`. Please pass an exact checkpoint path to'
            f" `.{fn}(ckpt_path=...)`"
        )
    if not loop.config.enable_checkpointing:
        return " is set but `ModelCheckpoint` is not configured. (enable_checkpointing=False: no files)"
    return ""


def _check(plan: Plan, fabric: Fabric) -> None:
    """Refuse a file that this run cannot use, before anything is launched or written."""
    path = plan.origin.path
    if path is None:
        return
    try:
        checkpoint = load_file(fabric, path, plan.origin.trusted, to_compare=True)
    except DamagedError as error:
        if plan.origin.resume_path is None:
            raise
        raise CheckpointError(
            f"{error} Or write resume='auto': it sets damaged ones aside, and goes on from the newest good one."
        ) from error
    check_format(checkpoint, path)
    if plan.origin.resume_path is not None:
        check_resumable(checkpoint, path)
    own_ways = [overrides(plan.trained.owner, name) for name in ("configure_model", "on_load_checkpoint")]
    loads_plainly = type(plan.trained.net).load_state_dict is nn.Module.load_state_dict
    if not any(own_ways) and loads_plainly and getattr(plan.trained.owner, "strict_loading", True):
        check_fits(plan.trained.net, checkpoint, path)
    if plan.origin.resume_path is None:
        return
    check_trained(checkpoint, path)
    if not _is_exact(checkpoint):
        what, that = "ended in the middle of a step, by an error or by a hook that saved there", "that"
        window = _ours(checkpoint).get("window") or plan.config.accumulate_grad_batches
        # from within a step several ranks go on behind a whole window
        if len(_ours(checkpoint).get("ranks", ())) > 1 and _ours(checkpoint).get("batch_idx", 0) % window:
            what, that = "was saved in a window of accumulate_grad_batches, without a sharded model's gradients", "that"
        plan.said.warn(
            f"resume: you are resuming from a checkpoint that {what} ('{path}'): training"
            f" goes on after step {checkpoint.get('global_step')}, not to the bit as without {that}"
        )


def newest_good(folders: Sequence[Path | tuple[Path, ...]], trusted: bool = False) -> Path | None:
    """What ``"auto"`` means: the checkpoint that is furthest, in the first folder that has any; None: start anew.

    Several ModelCheckpoints keep those of one run in folders of their own: they are given together.

    A damaged one is named in a warning and set aside under another name, never deleted; the one before it is next. One
    that could not be read is no damaged one: the error is the caller's, and nothing is touched.
    """
    for folder in folders:
        aside: list[str] = []
        for path in by_progress(*([folder] if isinstance(folder, Path) else folder)):
            try:
                inside(path.parent, path.name)
                if SHARDS in read_checkpoint(path, trusted=trusted):
                    from ..files.shards import check_file

                    check_file(path)
            except DamagedError as error:
                try:
                    aside.append(f"{error} It is set aside as '{set_aside(path, 'damaged')}'.")
                except OSError as another:
                    raise CheckpointError(
                        f"'{path}' is damaged and cannot be set aside: {cause_of(another)}. Move it away."
                    ) from another
            else:
                _tell(aside, f"resume='auto' goes on from '{path}'.")
                return path
        if aside:
            _tell(aside, "resume='auto' starts anew: there is no other checkpoint in this version.")
            break
    return None


def by_progress(*folders: Path) -> Iterator[Path]:
    """The checkpoints in a folder or several, the furthest state first; what cannot be looked into before what can.

    As few as possible are opened: a name that says how far it is ("epoch=3-...", "step=70") is opened only where nothing
    that was opened is as far. Names can be that old; the time of a file says nothing, once it was copied.
    """
    files = (folder / name for folder in folders for name in names_in(folder) if name.endswith(".ckpt"))
    unopened = {path: _said(path.name) for path in files}
    # the place of each, and the epochs and steps that are in it for certain
    opened: dict[Path, tuple[tuple[Any, ...], tuple[float, float]]] = {}
    while unopened or opened:
        best = max(opened, key=lambda path: (opened[path][0], path.name == "last.ckpt"), default=None)
        epochs, steps = opened[best][1] if best is not None else (-1, -1)
        further = [path for path, (epoch, step) in unopened.items() if epoch >= epochs and step >= steps]
        if best is not None and not further:
            yield best
            del opened[best]
            continue
        path = max(further, key=unopened.__getitem__)
        del unopened[path]
        try:
            checkpoint = load_header(path)
            if place := _progress(checkpoint):
                opened[path] = place, (_epochs(checkpoint), place[0])
        except UnreadableError:  # now; in a moment it may be read, and be an old one
            raise
        except CheckpointError:  # taken for the newest, so that whoever reads it says what is wrong with it
            opened[path] = (INFINITE, 0, 0), (INFINITE, INFINITE)


def _said(name: str) -> tuple[float, float]:
    """The epoch and step that a file's name says, infinite where it does not: ("epoch=3-step=40.ckpt" is (3, 40))."""
    found = [re.search(rf"(?<![A-Za-z_]){word}=(\d+)(?!\.?\d)", name) for word in ("epoch", "step")]
    epoch, step = (float(match[1]) if match else INFINITE for match in found)
    return epoch, step


def _epochs(checkpoint: Mapping[str, Any]) -> int:
    """Whole epochs in a checkpoint, at least."""
    epochs = _ours(checkpoint).get("epoch", checkpoint.get("epoch"))
    return epochs if isinstance(epochs, int) else 0


def _progress(checkpoint: Mapping[str, Any]) -> tuple[Any, ...]:
    """Steps, batches, epochs; nothing for a file that holds weights only, or from which a run does not go on exactly."""
    if "optimizer_states" not in checkpoint or not _is_exact(checkpoint):
        return ()
    ours = _ours(checkpoint)
    numbers = checkpoint.get("global_step"), ours.get("total_batches"), ours.get("epoch")
    return tuple(number if isinstance(number, int) else 0 for number in numbers)  # a file may hold anything


def _ours(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    ours = checkpoint.get(OURS)
    return ours if isinstance(ours, Mapping) else {}


def _is_exact(checkpoint: Mapping[str, Any]) -> bool:
    return _ours(checkpoint).get("is_exact") is not False


def _tell(aside: list[str], what_now: str) -> None:
    if aside:
        warnings.warn(f"{' '.join(aside)} {what_now}", stacklevel=2)
