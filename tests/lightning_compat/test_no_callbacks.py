"""What is given for a callback and has no hook is refused: it was taken, and nothing of it ever called."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from fabric_template import FabricLoop

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
NONE = {
    "number": lambda: 3,
    "numbers": lambda: [3],
    "yes": lambda: True,
    "generator": lambda: (callback for callback in [pl.Callback()]),
    "filter": lambda: filter(None, [pl.Callback()]),
    "nested": lambda: [[pl.Callback()]],
    "object": object,
}


@pytest.mark.parametrize("make", NONE.values(), ids=list(NONE))
def test_without_a_hook(make):
    kind = type(make()[0] if isinstance(make(), list) else make()).__name__
    said = f"^callbacks got a {kind}: expected objects with methods named like hooks"
    with pytest.raises(TypeError, match=said):
        FabricLoop(callbacks=make(), **QUIET)

    class Configured(BoringModel):
        def configure_callbacks(self):
            return make()

    with pytest.raises(TypeError, match=said):
        FabricLoop(max_epochs=1, limit_train_batches=1, limit_val_batches=0, **QUIET).fit(Configured())


def test_one_hook_is_enough():
    class Loose:
        def on_train_start(self, trainer, module):
            heard.append(trainer.global_step)

    heard = []
    for callbacks in (Loose(), [Loose()]):
        FabricLoop(max_epochs=1, limit_train_batches=1, limit_val_batches=0, callbacks=callbacks, **QUIET).fit(
            BoringModel()
        )
    assert heard == [0, 0]


@pytest.mark.parametrize("nothing", [None, False, [], ()])
def test_nothing_is_no_callback(nothing):
    assert FabricLoop(callbacks=nothing, **QUIET).callbacks == []
