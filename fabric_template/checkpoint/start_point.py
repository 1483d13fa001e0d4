"""Store the checkpoint that a run starts from, converted to FabricLoop's layout.

The "writer" entry names the class that saved the checkpoint: FabricLoop, MiniLoop or Trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, WeightsOnlyError
from .distributed import OWN_KEY


@dataclass(eq=False)
class StartPoint:
    """The checkpoint that a run starts from. If ``path`` is None, the run starts from scratch.

    Attributes:
        path: The path of the checkpoint.
        keyword: The keyword or path that selects the checkpoint, such as "last".
        resumes: Whether the run also restores the optimizers and the counters.
        is_safe: Whether the file is read without executing code in it.
        error: The error that was raised if this process found no checkpoint.
        checkpoint: The checkpoint in Trainer's layout, or None after the run has restored it.
        own: The training state in FabricLoop's layout, which is not passed to hooks. The dict is
            empty unless the run resumes.
        sampler_seed: The seed with which the saved run shuffled samples, or None.
        restarts_epoch: For a Trainer checkpoint, whether Trainer would continue the saved epoch
            instead of starting the next one.
        is_before_epoch_end: Whether Trainer saved the checkpoint after the epoch's last batch, but
            before ``on_train_epoch_end``.
    """

    path: str | None = None
    keyword: str | None = None
    resumes: bool = False
    is_safe: bool = True
    error: Exception | None = None
    checkpoint: dict[str, Any] | None = field(default=None, init=False)
    own: dict[str, Any] = field(default_factory=dict, init=False)
    sampler_seed: int | None = field(default=None, init=False)
    restarts_epoch: bool | None = field(default=None, init=False)
    is_before_epoch_end: bool = field(default=False, init=False)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Store the content of a checkpoint in this object."""
        self.checkpoint = checkpoint
        # Remove OWN_KEY, so that on_load_checkpoint hooks get only the keys that Trainer saves.
        own = checkpoint.pop(OWN_KEY, None)
        if self.resumes:
            self.own = convert_training_state(self.path, checkpoint, own)
            self.sampler_seed = self.own.get("sampler_seed")

    def __getstate__(self) -> dict[str, Any]:
        """Do not pickle the checkpoint, because each spawned process reads the file itself."""
        return {**vars(self), "checkpoint": None, "own": {}}

    @property
    def is_pending(self) -> bool:
        """Return whether parts of the checkpoint still have to be restored."""
        return self.checkpoint is not None

    def finish_loading(self) -> None:
        """After the weights are loaded, free the checkpoint unless training resumes from it."""
        if not self.resumes:
            self.checkpoint = None

    def training_state(self, has_max_steps: bool) -> dict[str, Any]:
        """Return the saved training state. Set the attributes that Trainer checkpoints need."""
        if self.own["writer"] == "Trainer":
            self.restarts_epoch = has_max_steps or not self.own["is_between_epochs"]
            self.is_before_epoch_end = self.own["is_before_epoch_end"]
        return self.own

    def state_of_process(self, rank: int) -> dict[str, Any]:
        """Return the state that was saved by the process with the given rank.

        If the saved run had no process with this rank, return the state that another process saved.
        """
        ranks = self.own.get("ranks") or [{}]
        state: dict[str, Any] = ranks[rank % len(ranks)]
        return state

    def take(self) -> dict[str, Any]:
        """Return the training state and free the memory of the checkpoint."""
        own, self.own, self.checkpoint = self.own, {}, None
        return own


def convert_training_state(
    path: Any, checkpoint: dict[str, Any], own: dict[str, Any] | None
) -> dict[str, Any]:
    """Convert the training state in a checkpoint to FabricLoop's layout.

    Args:
        own: The state that Trainer does not save, or None for a Trainer checkpoint.

    Raises:
        WeightsOnlyError: The checkpoint contains only weights.
        CheckpointError: Training cannot continue from the position in the checkpoint.
    """
    if "optimizer_states" not in checkpoint:
        raise WeightsOnlyError(
            "Trying to restore optimizer state but checkpoint contains only the model. This is"
            " probably due to `ModelCheckpoint.save_weights_only` being set to `True`. To start a"
            f" new run from the weights, write load='{path}'."
        )
    if own is None:
        if missing := sorted({"epoch", "global_step"} - checkpoint.keys()):
            raise CheckpointError(
                f"resume: got {path} without {' and '.join(missing)}, expected a checkpoint of"
                " FabricLoop, MiniLoop or Trainer. To start a new run from the weights, write"
                f" load='{path}'."
            )
        return convert_trainer_state(path, checkpoint)
    # A MiniLoop checkpoint has no "writer" key.
    return own if own.get("writer") == "FabricLoop" else convert_mini_state(path, own)


def convert_mini_state(path: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Convert MiniLoop's training state to FabricLoop's layout by adding default values."""
    progress = own["progress"]
    if progress["is_in_epoch"]:
        raise CheckpointError(
            f"resume: got {path}, which MiniLoop saved in the middle of an epoch, expected a"
            " checkpoint saved at the end of an epoch. Resume with MiniLoop, or use load= to start"
            " a new run from the weights."
        )
    step = progress["global_step"]
    row = {
        **{"collected": {}, "step_values": {}, "learning_rates": [], "is_validated": False},
        **{"num_samples": 0, "seconds": 0.0, "excluded_seconds": 0.0, "seconds_waited": 0.0},
    }
    return {
        **own,
        "writer": "MiniLoop",
        "progress": {**progress, "logging_step": step},
        "checkpoints": {"is_validated": False, "last_step": step, **own["checkpoints"]},
        "row": {**row, **own["row"]},
    }


def convert_trainer_state(path: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Convert the counters and loader states of a Trainer checkpoint to FabricLoop's layout."""
    progress: dict[str, Any] = {
        "global_step": checkpoint["global_step"],
        "epochs_done": checkpoint["epoch"],
    }
    own: dict[str, Any] = {"writer": "Trainer", "progress": progress, "loader_states": []}
    own |= {"is_between_epochs": False, "is_before_epoch_end": False}
    fit_loop = checkpoint.get("loops", {}).get("fit_loop")
    if fit_loop is None:
        return own
    own["loader_states"] = fit_loop.get("state_dict", {}).get("combined_loader", [])
    epoch = fit_loop["epoch_progress"]["current"]
    batch = fit_loop["epoch_loop.batch_progress"]
    progress["epochs_done"] = epoch["processed"]
    progress["total_batches"] = batch["total"]["processed"]
    loop_state = fit_loop["epoch_loop.state_dict"]
    progress["logging_step"] = loop_state.get("_batches_that_stepped", 0)
    own["is_between_epochs"] = epoch["ready"] == epoch["started"] == epoch["processed"]
    # A checkpoint saved in on_train_epoch_start still contains the previous epoch's batch counts.
    if epoch["started"] == epoch["processed"]:
        return own
    check_trainer_position(path, epoch["processed"], batch)
    # Trainer saves the checkpoint before it increments the loggers' step, so increment it here.
    progress["logging_step"] += 1
    # If Trainer resumes from a checkpoint saved in on_train_batch_end, it skips on_train_epoch_end.
    own["is_before_epoch_end"] = batch["total"]["ready"] == batch["total"]["completed"]
    if own["is_before_epoch_end"]:
        progress["batches_done"] = batch["current"]["processed"]
    else:
        # Like Trainer, skip the validation and the hooks at the end of the saved epoch.
        progress["epochs_done"] += 1
    return own


def check_trainer_position(path: Any, epoch: int, batch: dict[str, Any]) -> None:
    """Raise an error for a checkpoint that Trainer saved in the middle of an epoch."""
    is_between_batches = batch["current"]["ready"] == batch["current"]["processed"]
    if not (batch["is_last_batch"] and is_between_batches):
        raise CheckpointError(
            f"resume: got '{path}', which Trainer saved in the middle of epoch {epoch}, expected a"
            " checkpoint saved at the end of an epoch. Trainer does not save the position in the"
            " loader. Use a checkpoint that Trainer saved at the end of an epoch, as with"
            f" ModelCheckpoint(every_n_epochs=1), or write load='{path}' to start a new run from"
            " the weights."
        )
