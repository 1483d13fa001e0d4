"""validate, test and predict beside Trainer's: gradients are freed, and loaders under a limit of 0 are not asked for."""

import lightning.pytorch as pl
import pytest
from both import LOOPS
from modules import Classifier, make_loader, quiet


class Notes(Classifier):
    """Notes which loaders are asked for, and whether there are gradients in the first batch of a call."""

    def __init__(self):
        super().__init__()
        self.asked, self.gradients = [], []

    def loader(self, stage):
        self.asked.append(stage)
        return make_loader(8)

    train_dataloader = lambda self: self.loader("train")  # noqa: E731
    val_dataloader = lambda self: self.loader("val")  # noqa: E731
    test_dataloader = lambda self: self.loader("test")  # noqa: E731
    predict_dataloader = lambda self: self.loader("predict")  # noqa: E731

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.gradients.append(any(p.grad is not None for p in self.parameters()))
        return batch[1].float().mean()

    test_step = predict_step = validation_step


def notes_of_both(act, **options):
    """Return what the module has noted under Trainer and under FabricLoop."""
    found = []
    for loop_class in LOOPS.values():
        pl.seed_everything(1, verbose=False)
        module = Notes()
        act(loop_class(**quiet(max_epochs=1, num_sanity_val_steps=0, **options)), module)
        found.append((module.asked, module.gradients))
    return found


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_gradients_are_freed(call):
    def act(loop, module):
        sum(p.sum() for p in module.parameters()).backward()
        for _ in range(2):
            getattr(loop, call)(module)

    expected, ours = notes_of_both(act)
    assert ours == expected
    assert ours[1] == [False, False]


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("limit", [0, 0.0])
def test_no_loader_is_asked_for_under_a_limit_of_0(call, limit):
    returned = []
    stage = {"fit": "train", "validate": "val"}.get(call, call)
    expected, ours = notes_of_both(
        lambda loop, module: returned.append(getattr(loop, call)(module)), **{f"limit_{stage}_batches": limit}
    )
    assert ours == expected
    assert stage not in ours[0]
    if call == "fit":
        assert returned[1].empty
    else:
        assert returned[1] == (None if call == "predict" else [])
