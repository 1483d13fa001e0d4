"""A list of callbacks that changes during a run, and progress counters."""

import pytest
from both import LOOPS
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from modules import quiet

WORDS = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, "limit_test_batches": 2}


class Heard(Callback):
    """Notes the ends of batches and epochs."""

    def __init__(self, name, heard):
        self.name, self.heard = name, heard

    def on_train_batch_end(self, trainer, *args):
        self.heard.append((self.name, "batch", trainer.global_step))

    def on_train_epoch_end(self, trainer, *args):
        self.heard.append((self.name, "epoch", trainer.global_step))


CHANGES = {
    "append": lambda trainer, new: trainer.callbacks.append(new),
    "remove": lambda trainer, new: trainer.callbacks.pop(0),
    "replace": lambda trainer, new: trainer.callbacks.__setitem__(0, new),
    "set": lambda trainer, new: setattr(trainer, "callbacks", [*trainer.callbacks[1:], new]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("hook", ["setup", "on_train_epoch_start"])
def test_a_changed_list_of_callbacks_counts_from_the_next_hook_on(hook, change):
    class Changes(Callback):
        name, is_changed = "changes", False

        def change(self, trainer, *args, **options):
            if not self.is_changed:
                CHANGES[change](trainer, Heard("new", heard))
            self.is_changed = True

    setattr(Changes, hook, Changes.change)
    results = []
    for kind in LOOPS.values():
        heard = []
        trainer = kind(**quiet(**WORDS, callbacks=[Heard("two", heard), Heard("one", heard), Changes()]))
        trainer.fit(BoringModel())
        results.append((heard, [callback.name for callback in trainer.callbacks]))
    assert results[1] == results[0]
    assert len(results[1][0]) >= 8


# ---- progress


COUNTS = ("ready", "processed", "completed")


class Counts(Callback):
    """Notes how many epochs and batches are done, in each hook around a batch or an epoch."""

    def __init__(self):
        self.noted = []

    def note(self, trainer, *args):
        loop, method = trainer.fit_loop, trainer.state.fn.value
        loops = {"validate": trainer.validate_loop, "test": trainer.test_loop}
        if method == "fit" and trainer.training:
            counters, names = [loop.epoch_progress, loop.epoch_loop.batch_progress], COUNTS
        else:
            counters, names = [loops.get(method, loop.epoch_loop.val_loop).batch_progress], ["ready"]
        self.noted.append(
            [getattr(part, name) for one in counters for part in (one.current, one.total) for name in names]
        )
        evaluation = loops.get(method, loop.epoch_loop.val_loop)
        self.noted.append(
            (evaluation.max_batches, evaluation.trainer is trainer, method == "fit" or evaluation.num_dataloaders)
        )

    def on_train_epoch_start(self, trainer, module):
        """Record the epochs only. Trainer's batch counts are those of the epoch before."""
        of = trainer.fit_loop.epoch_progress
        self.noted.append([getattr(part, name) for part in (of.current, of.total) for name in COUNTS])

    on_train_start = on_train_batch_end = on_train_epoch_end = on_train_end = note
    on_validation_batch_end = on_test_batch_end = on_test_batch_start = note


def test_progress_is_trainers(tmp_path):
    noted = []
    for kind in LOOPS.values():
        counts = Counts()
        trainer = kind(**quiet(**WORDS, callbacks=[counts], num_sanity_val_steps=0))
        model = BoringModel()
        trainer.fit(model)
        trainer.validate(model, verbose=False)
        trainer.test(model, verbose=False)
        noted.append((counts.noted, trainer.enable_autolog_hparams, trainer.min_epochs))
    assert noted[1] == noted[0]
    assert noted[1][0][-2:] == [[2, 2], ([2], True, 1)]
