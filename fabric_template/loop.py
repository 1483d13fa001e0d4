"""FabricLoop: fit, validate, test, predict. How it trains stands in core/train.py."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from lightning.fabric import Fabric
from lightning.fabric.plugins import ClusterEnvironment

from .core.config import LoopConfig, parse_config
from .core.errors import Misuse, MisuseOfType
from .process.build import Plan
from .process.home import make_loggers, with_safe_files
from .process.launch import launch
from .process.parts import Parts
from .process.prepare import prepare
from .process.world import as_launched, check_launched
from .trainer.plugged import plugged_callbacks

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Words(LoopConfig):
    """All that FabricLoop takes: LoopConfig's words, and those of Fabric."""

    fabric: Fabric | None = field(default=None, kw_only=False)
    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    plugins: Any = None
    loggers: Any = None
    callbacks: Any = None


def taking(words: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the words of another one: to editors, which read the types, and to ``help`` and notebooks."""

    def sign(init: Callable[..., None]) -> Any:
        takes = inspect.signature(words).parameters.values()
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init.__signature__ = inspect.Signature([own, *takes])  # type: ignore[attr-defined]
        return init

    return sign


class FabricLoop(Parts):
    """A training loop on Lightning Fabric with Trainer's words and Trainer's numbers.

    Args:
        fabric: a ready lightning.Fabric, or give Fabric's own arguments (not both):
        accelerator, strategy, devices, num_nodes, precision, plugins, loggers: see lightning.Fabric.
        callbacks: Lightning's or your own; an object with methods named like hooks.
        **config: the fields of LoopConfig, such as max_epochs=10.

    Raises:
        TypeError: for words that mean nothing.
        Misuse, MisuseOfType: for values that do not, all at once.

    Example:
        >>> import torch
        >>> from fabric_template import FabricLoop, TensorLoader
        >>> net = torch.nn.Linear(2, 1)
        >>> data = TensorLoader(torch.ones(8, 2), torch.zeros(8, 1), batch_size=4)
        >>> words = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        >>> words["enable_progress_bar"] = False
        >>> loop = FabricLoop(accelerator="cpu", max_epochs=2, **words)
        >>> history = loop.fit(
        ...     net, data, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        ...     training_step=lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1]),
        ... )
        >>> list(history.columns)
        ['epoch', 'step', 'train_loss', 'lr', 'time']
    """

    @taking(Words)
    def __init__(
        self, fabric: Fabric | None = None, *, accelerator: Any = "auto", strategy: Any = "auto", devices: Any = "auto",
        num_nodes: int = 1, precision: Any = None, plugins: Any = None, loggers: Any = None, callbacks: Any = None,
        **config: Any,
    ) -> None:  # fmt: skip
        given = parse_config(config)
        self.config = given.resolved()
        where = {"accelerator": accelerator, "strategy": strategy, "devices": devices, "num_nodes": num_nodes,
                 "precision": precision} if fabric is None else {"accelerator": fabric}  # fmt: skip
        more = {"plugins": plugins, "callbacks": callbacks or None, "logger": loggers}
        # what rebuilds it, see record/recipe.py; the command line puts its own here
        self.recipe = {**vars(given), **where, **{word: value for word, value in more.items() if value is not None}}
        if fabric is None and not isinstance(plugins, ClusterEnvironment):
            devices, num_nodes = as_launched(devices, num_nodes)
        if strategy != "auto" or plugins is not None or fabric is not None:
            from .trainer.strategies import as_fabrics, plugins_as_fabrics, with_files

            strategy = as_fabrics(strategy)
            plugins = with_files(strategy, plugins_as_fabrics(plugins))
        words = {"accelerator": accelerator, "strategy": strategy, "devices": devices, "num_nodes": num_nodes,
                 "precision": precision, "plugins": plugins}  # fmt: skip
        if fabric is not None:
            _check_ready(fabric, words)
            as_fabrics(fabric.strategy)  # refuses what cannot run here
        if loggers is not None and given.logger is not None:
            raise Misuse("FabricLoop got logger and loggers: expected one of them (Trainer's word or Fabric's)")
        self.fabric = with_safe_files(fabric if fabric is not None else _made(words), self.config)
        check_launched(self.fabric)
        self.callbacks, plugged = [], plugged_callbacks()
        if callbacks is not None or plugged:
            from .trainer.callbacks import parse_callbacks

            self.callbacks = parse_callbacks(callbacks, given, plugged)
        self.default_root_dir = os.fspath(self.config.default_root_dir or os.getcwd())
        self.loggers, self._own_logger = make_loggers(self.config, loggers, self.fabric)
        self.own_profiler = None
        if self.config.profiler is not None:
            from .trainer.profiling import make_profiler

            self.own_profiler = make_profiler(self.config.profiler)
        self._run, self._runs = None, {}
        self._status = "initializing"
        if self.config.seed is not None:  # for a model that is made after the loop; fit seeds once more
            Fabric.seed_everything(self.config.seed, workers=True, verbose=False)

    # ---- the four verbs

    def fit(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        resume: str | Path | None = None, load: str | Path | None = None, optimizer: Any = None,
        training_step: Callable | None = None, validation_step: Callable | None = None, *,
        epoch_end: Callable | None = None, scheduler: Any = None, ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> Any:  # fmt: skip
        """Train; hooks fire where they stand here::

            check everything; launch the processes
            prepare_data, setup, configure_model; configure_optimizers; on_fit_start
            a few validation batches, to see that they run
            on_train_start
            until max_epochs, max_steps, max_time or should_stop:
                on_train_epoch_start
                for each batch:
                    on_train_batch_start
                    training_step, backward; at the end of a window clip, step    # update.py
                    schedulers by step; after the last batch those by epoch
                    on_train_batch_end
                    validate, if due                                             # evaluate.py
                on_train_epoch_end; schedulers that follow a metric
                one row of metrics.csv; last.ckpt and best.ckpt
            on_train_end, on_fit_end, teardown

        Args:
            model: a LightningModule, an nn.Module or object with step methods, or an nn.Module with step functions.
            train_dataloaders: an iterable of batches; a list or dict of them; or a datamodule.
            val_dataloaders: an iterable of batches, or several; under the names of a dict, a plain model's metrics have these.
            datamodule: in the loaders' place.
            resume: a checkpoint to go on from, exactly: a path, "last", "best", or "auto" (the newest good one, if any).
            load: a checkpoint to take the weights from.
            optimizer: whatever configure_optimizers may return, for modules that have none; several are a function's to step.
            training_step: ``fn(model, batch)`` or ``fn(model, batch, batch_idx)``, returns the loss.
            validation_step: the same; returns a loss, a pair (loss, acc) or a dict.
            epoch_end: ``fn(model, outputs)`` of all that validation_step returned, by batch; returns a dict of metrics.
            scheduler: beside one optimizer: a scheduler, or a list of them, each by epoch; or its dict, as Lightning has it.
            ckpt_path: Trainer's word for resume; for load in the other verbs.
            weights_only: Trainer's word: False trusts this call's file, as trusted=True of the loop does any.

        Returns:
            The history, a pandas DataFrame with the rows of metrics.csv: one per epoch. Without pandas a list of dicts.
        """  # noqa: D401
        functions = {"training_step": training_step, "validation_step": validation_step, "epoch_end": epoch_end}
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        if scheduler is not None:
            from .core.optimizers import with_scheduler

            optimizer = with_scheduler(optimizer, scheduler)
        plan = prepare(self, "fit", model, loaders, datamodule, resume=resume, load=load, functions=functions,
                      optimizer=optimizer, ckpt_path=ckpt_path,
                      weights_only=weights_only)  # fmt: skip
        launch(self, plan)
        return self._required("fit").history.frame()

    def validate(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, load: str | Path | None = None,
        verbose: bool = True, *, validation_step: Callable | None = None, epoch_end: Callable | None = None,
        ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Run validation_step over the loaders; returns what was logged, a dict for each loader."""
        functions = {"validation_step": validation_step, "epoch_end": epoch_end}
        plan = prepare(self, "validate", model, {"val": dataloaders}, datamodule, load=load, ckpt_path=ckpt_path,
                      functions=functions, weights_only=weights_only)  # fmt: skip
        return self._evaluate(plan, verbose)

    def test(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, load: str | Path | None = None,
        verbose: bool = True, *, test_step: Callable | None = None, epoch_end: Callable | None = None,
        ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Run test_step over the loaders; returns what was logged, a dict for each loader."""
        functions = {"test_step": test_step, "epoch_end": epoch_end}
        plan = prepare(self, "test", model, {"test": dataloaders}, datamodule, load=load, ckpt_path=ckpt_path,
                      functions=functions, weights_only=weights_only)  # fmt: skip
        return self._evaluate(plan, verbose)

    def predict(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        load: str | Path | None = None, *, predict_step: Callable | None = None, ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """Run predict_step (or forward) over the loaders; returns the outputs by batch, on the CPU."""
        plan = prepare(self, "predict", model, {"predict": dataloaders}, datamodule, load=load, ckpt_path=ckpt_path,
                      functions={"predict_step": predict_step}, weights_only=weights_only)  # fmt: skip
        return launch(self, plan, keep=return_predictions is not False).results

    def _evaluate(self, plan: Plan, verbose: bool) -> list:
        results = launch(self, plan).results
        if verbose and self.fabric.is_global_zero:
            from .core.results import print_results

            print_results(results, plan.fn)
        return results

    # ---- what stands in tools/: the loop imports nothing of it, and asks the package for it by its public name

    def profile(self, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **words: Any) -> Any:
        """Where a training step goes; ``fabric_template.profile`` with this loop, which says what else it takes."""
        return _public("profile")(self, model, train_dataloaders, datamodule, **words)

    def tune(self, model: Any, train_dataloaders: Any = None, datamodule: Any = None, **words: Any) -> Any:
        """What makes this training faster here; ``fabric_template.tune`` with this loop, which says what else it takes."""
        return _public("tune")(self, model, train_dataloaders, datamodule=datamodule, **words)

    # ---- what it says of itself

    def ending(self) -> dict[str, list[str]]:
        """What came out of the last fit, why it ended, where its files are: lines by the word that they begin with."""
        run, paths = self._fitted, (self.checkpoint_path("best"), self.checkpoint_path("last"))
        if run is None:
            return {}
        from .record.ending import ending

        return ending(run, filter(None, paths))

    def __repr__(self) -> str:
        told = self.ending() if "_runs" in vars(self) else {}
        name = self.config.name if "config" in vars(self) else ""
        parts = [f"{word} {text}" for word in ("trained", "ended", "log", "checkpoint") for text in told.get(word, ())]
        return f"<{type(self).__name__} {name!r}: {'; '.join(parts) or 'nothing is trained yet'}>"

    def _repr_mimebundle_(self, **words: Any) -> dict[str, str]:
        """The same in a notebook, a line for each."""
        from .record.ending import as_lines

        return {"text/plain": as_lines(self.ending()) or repr(self)}

    def __getstate__(self) -> dict[str, Any]:
        """Without the last runs: their parts belong to this process."""
        return {**vars(self), "_run": None, "_runs": {}}

    def checkpoint_path(self, word: str) -> Path | None:
        """The "last" or "best" checkpoint that this loop, or a ModelCheckpoint among its callbacks, has saved.

        Of several the first says which is the best; the last is the newest.
        """
        from .files.opening import is_file

        savers = self.checkpoint_callbacks[: 1 if word == "best" else None] or [self.checkpoint_callback]
        paths = [path for saver in savers if (path := getattr(saver, f"{word}_model_path", "")) and is_file(path)]
        return Path(max(paths, key=os.path.getmtime)) if paths else None


def _public(name: str) -> Any:
    package = sys.modules[__package__ or ""]
    try:
        return getattr(package, name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(f"{__package__}.tools"):
            raise
        raise Misuse(f"loop.{name} needs the folder tools/, which this copy of the loop lacks: copy it, too") from error


def _check_ready(fabric: Any, words: dict[str, Any]) -> None:
    """Refuse what is no Fabric, and words beside one that are Fabric's own."""
    if isinstance(fabric, type) or not all(hasattr(fabric, name) for name in ("launch", "setup", "strategy")):
        what = f"the class {fabric.__name__}" if isinstance(fabric, type) else f"a {type(fabric).__name__}"
        raise MisuseOfType(
            f"FabricLoop(fabric) got {what}: expected a ready lightning.Fabric, FabricLoop(Fabric(devices=2)); all"
            " other words are given by name, as in FabricLoop(max_epochs=10, accelerator='cpu')"
        )
    if both := [word for word, value in words.items() if value != getattr(Words, word)]:
        raise Misuse(f"FabricLoop got a ready fabric and {', '.join(both)}: give these to Fabric itself")


def _made(words: dict[str, Any]) -> Fabric:
    """Fabric; what it refuses, Trainer's users catch as from Trainer."""
    try:
        return Fabric(**words)
    except (ValueError, TypeError, RuntimeError) as error:
        from .trainer.strategies import refusal

        raise refusal(error) from error
