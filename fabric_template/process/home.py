"""Home: where a run lives: its loggers, its name and version, its folder for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from ..core.config import Settings
from ..core.errors import MisuseOfType
from ..core.ranks import is_joined
from ..core.run import Run
from ..core.steps import is_shared_out
from ..files.disk import claim_version
from ..files.errors import CheckpointError, cause_of
from ..files.locks import is_first
from ..files.storage import AtomicCheckpointIO, door
from ..record.logger import CSVLogger
from ..trainer.attributes import TrainerFace
from .build import Plan


def with_safe_files(fabric: Fabric, config: Settings) -> Fabric:
    """The Fabric with checkpoints that are written whole; a CheckpointIO plugin of the user's own keeps its place."""
    io: Any = door(fabric)
    trusted = config.trusted
    if type(io) is TorchCheckpointIO:
        fabric.strategy.checkpoint_io = AtomicCheckpointIO(trusted, in_run=True)
    elif is_shared_out(fabric):
        io.trusted = trusted
    while (inner := getattr(io, "checkpoint_io", None)) is not None:
        io = inner
    # AsyncCheckpointIO() and its kin write through another, which Trainer fills in, too
    if hasattr(io, "checkpoint_io"):
        io.checkpoint_io = AtomicCheckpointIO(trusted, in_run=True)
    return fabric


def settle_files(run: Run, kind: type | None, error: BaseException | None, *_: Any) -> None:
    """On the way out of a run: what a CheckpointIO writes in the background is on disk, or the error of that is raised."""
    try:
        getattr(door(run.fabric), "teardown", lambda: None)()
        if error is None and run.fn == "fit":
            run.keeper.tidy(run)
    except Exception as another:
        if error is None:  # else that is the one to be told
            raise not_all(cause_of(another)) from another


def not_all(complaint: str) -> CheckpointError:
    """What is raised after a training whose last state or rows could not be written."""
    return CheckpointError(f"training has come to its end, but not everything is on disk: {complaint}")


def make_loggers(config: Settings, loggers: Any, fabric: Fabric) -> tuple[list[Any], bool]:
    """The loggers that were asked for, and whether it is the loop's own CSV logger."""
    asked = loggers if loggers is not None else config.logger
    if asked is True and fabric.loggers:
        asked = fabric.loggers
    if config.fast_dev_run and asked:
        from lightning.pytorch.loggers.logger import DummyLogger

        return [DummyLogger()], False  # code that asks self.logger for its experiment runs, and nothing is written
    if not asked:
        return [], False
    given = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    own = any(logger is True for logger in given)
    if own:
        given = [logger for logger in given if logger is not True]
    for logger in given:
        if isinstance(logger, type) or not callable(getattr(logger, "log_metrics", None)):
            word = repr(logger) if isinstance(logger, str | int | float) else f"a {type(logger).__name__}"
            raise MisuseOfType(
                f"logger={word}: expected True (the CSV logger), False, or an object with log_metrics, such as"
                " logger=CSVLogger('logs'), of this package, of Fabric or of Lightning; or a list of them"
            )
        # which the loop and Lightning's ModelCheckpoint ask for; Fabric's lack two of them, an object of one's own may lack all
        lacking = {"name": config.name, "version": config.version or 0, "save_dir": getattr(logger, "root_dir", None)}
        for word, value in (lacking | dict.fromkeys(_TOLD, _nothing)).items():
            # of the class first: a property may look at the disk, or begin an experiment
            if not (hasattr(type(logger), word) or hasattr(logger, word)):
                setattr(logger, word, value)
    if own:
        given.insert(0, CSVLogger(Path(config.default_root_dir or ".", "logs"), config.name, config.version))
    return given, own


_TOLD = ("log_hyperparams", "finalize", "after_save_checkpoint")


def _nothing(*told: Any) -> None:
    """Nothing to do."""


def choose_place(loop: TrainerFace, plan: Plan) -> None:
    """Choose name and version on rank zero, prove that logs can be written there, and tell all ranks.

    A resumed run goes on in its own version, a new one takes the next number that neither logs nor checkpoints have.
    """
    if plan.fn != "fit" or plan.home.is_chosen:
        return
    config = plan.config
    root = Path(config.default_root_dir or ".")
    name, version = config.name, config.version
    resumed = plan.origin.resume_path and _place_of(plan.origin.resume_path, root)
    if version is None and resumed:
        name, version = resumed
    csv = next((logger for logger in loop.loggers if isinstance(logger, CSVLogger)), None)
    own = csv if loop._own_logger else None
    if own is not None and (own.has_run or (Path(own.root_dir), own.name) != (root / "logs", name)):
        csv = own = CSVLogger(str(root / "logs"), name, version)
        loop.loggers = [own, *loop.loggers[1:]]
    keeps = config.enable_checkpointing and not loop.checkpoint_callbacks
    homes = [root / kind / name for kind, due in (("logs", loop._own_logger), ("checkpoints", keeps)) if due]
    if version is None and homes:
        version = _claim(homes, None if own is None else own._version, loop.fabric)
    if own is not None:
        own.claim(version)
        own.has_run = True
    if csv is not None:
        csv.check_writable()
    if keeps:
        folder = version if isinstance(version, str) else f"version_{version}"
        plan.home.folder = root / "checkpoints" / name / folder
    plan.home.is_chosen = True


def _place_of(path: str | Path, root: Path) -> tuple[str, int | str] | None:
    """(name, version) of a checkpoint that lies in this root's own layout, or where a ModelCheckpoint keeps it there."""
    folder, home = Path(path).resolve().parent, "checkpoints"
    if folder.name == home and folder.parents[2] == (root / "logs").resolve():
        folder, home = folder.parent, "logs"
    if folder.parent.parent != (root / home).resolve():
        return None
    version = folder.name.removeprefix("version_")
    return folder.parent.name, int(version) if version.isdigit() and folder.name != version else folder.name


def _claim(homes: list[Path], asked: int | str | None, fabric: Fabric) -> int:
    """The next free number; two runs that start together get two.

    Or the one that the loop's logger was asked for before, or has written to: scripts log hyperparameters ahead of a fit. If
    several were told the same number, the first of them has it.
    """
    number = -1
    if fabric.is_global_zero:
        try:
            number = asked if isinstance(asked, int) else claim_version(*homes)
            while not is_first(*(home / f"version_{number}" for home in homes)):
                number = claim_version(*homes)
        except OSError as error:
            raise ValueError(
                f"cannot make the run's folder in '{homes[0]}' ({error.strerror}): expected a folder that can be written;"
                " write default_root_dir= with one, or logger=False"
            ) from error
    return fabric.broadcast(number) if is_joined() else number
