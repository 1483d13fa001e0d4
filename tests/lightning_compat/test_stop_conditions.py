"""Test requests to stop before min_epochs and min_steps are reached."""

import time

import pytest
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader, run_loop, run_trainer


class StoppingCallback(Callback):
    """A callback that sets should_stop in every call to one hook."""

    def __init__(self, hook):
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args):
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("hook", "options", "steps"),
    [
        ("on_train_batch_end", {"min_epochs": 2}, 12),
        ("on_train_batch_end", {"min_steps": 8}, 8),
        ("on_train_epoch_end", {"min_epochs": 2}, 12),
        ("on_train_epoch_end", {"min_epochs": 1}, 6),
        ("on_train_batch_end", {}, 1),
    ],
)
def test_should_stop_has_no_effect_before_min_epochs_and_min_steps(hook, options, steps):
    for run in (run_trainer, run_loop):
        trainer, _ = run(
            Classifier, lambda: make_loader(24), callbacks=[StoppingCallback(hook)], max_epochs=4, **options
        )
        assert trainer.global_step == steps


@pytest.mark.parametrize("stops", [False, True])
def test_should_stop_keeps_its_value_in_an_evaluation_after_fit(stops):
    for run in (run_trainer, run_loop):
        callbacks = [StoppingCallback("on_train_epoch_end")] if stops else []
        trainer, module = run(Classifier, lambda: make_loader(24), callbacks=callbacks, max_epochs=2)
        trainer.validate(module, make_loader(24), verbose=False)
        assert trainer.should_stop == stops


def test_max_time_does_not_end_a_run_before_min_epochs(monkeypatch):
    now, start = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600 * (now() - start))
    loop, _ = run_loop(Classifier, lambda: make_loader(24), max_time="00:00:00:01", min_epochs=2, max_epochs=4)
    assert loop.current_epoch == 2
