"""What surrounds validate, test and predict, beside Trainer's: gradients freed, loaders that nobody needs, batches counted."""

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from modules import Classifier, make_loader, quiet


class Asked(Classifier):
    """Notes which loaders were asked for, and whether gradients are there when a verb's first batch comes."""

    def __init__(self):
        super().__init__()
        self.asked, self.gradients, self.counts = [], [], []

    def loader(self, stage):
        self.asked.append(stage)
        return make_loader(8)

    train_dataloader = lambda self: self.loader("train")  # noqa: E731
    val_dataloader = lambda self: self.loader("val")  # noqa: E731
    test_dataloader = lambda self: self.loader("test")  # noqa: E731
    predict_dataloader = lambda self: self.loader("predict")  # noqa: E731

    def note(self, batch_idx, loop):
        if batch_idx == 0:
            self.gradients.append(any(p.grad is not None for p in self.parameters()))
        self.counts.append(loop.batch_progress.total.ready)

    def validation_step(self, batch, batch_idx):
        self.note(batch_idx, self.trainer._evaluation_loop)

    def test_step(self, batch, batch_idx):
        self.note(batch_idx, self.trainer._evaluation_loop)

    def predict_step(self, batch, batch_idx):
        self.note(batch_idx, self.trainer.predict_loop)
        return batch[1]


def both(act, **words):
    """What the module has noted under each of the two."""
    found = []
    for kind in LOOPS.values():
        pl.seed_everything(1, verbose=False)
        module = Asked()
        act(kind(**quiet(max_epochs=1, num_sanity_val_steps=0, **words)), module)
        found.append((module.asked, module.gradients, module.counts))
    return found


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_gradients_are_freed_and_batches_counted_on(verb):
    def act(loop, module):
        sum(p.sum() for p in module.parameters()).backward()
        for _ in range(3):
            getattr(loop, verb)(module)

    expected, ours = both(act)
    assert ours == expected
    assert ours[1:] == ([False] * 3, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("limit", [0, 0.0])
def test_under_a_limit_of_none_nobody_is_asked(verb, limit):
    def act(loop, module):
        returned.append(getattr(loop, verb)(module))

    returned = []
    stage = {"fit": "train", "validate": "val"}.get(verb, verb)
    expected, ours = both(act, **{f"limit_{stage}_batches": limit})
    assert ours == expected
    assert stage not in ours[0]
    if verb == "fit":
        assert returned[1].empty
    else:
        assert returned[1] == ([] if verb != "predict" else None)


def test_the_seed_is_that_of_the_first_weights(tmp_path):
    """Two equal calls are equal, of which each makes its loop before its model."""

    def run():
        from fabric_template import FabricLoop

        loop = FabricLoop(seed=3, max_epochs=2, **quiet())
        module = Classifier()
        return loop.fit(module, make_loader()), module

    (one, first), _, (other, second) = run(), torch.rand(7), run()
    assert one.drop(columns="time").equals(other.drop(columns="time"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
