"""Lists of images of several sizes: how many samples a batch has is what the step says in self.log(..., batch_size=)."""

import lightning.pytorch as pl
import pytest
import torch
from runs import fit
from torch import nn
from torch.utils.data import DataLoader

SIZES = [[(3, 4, 5), (3, 6, 4)], [(3, 4, 4)]]  # two images, then one: of no tensor is that the first dimension


def make_images():
    batches = [
        ([torch.full(size, float(i)) for size in sizes], [{"boxes": torch.zeros(5, 4)} for _ in sizes])
        for i, sizes in enumerate(SIZES, 1)
    ]
    return DataLoader(batches, batch_size=None)


class Steps:
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)

    def training_step(self, batch, batch_idx):
        self.log("other", 1.0, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return 0 * self.net.weight.sum() + batch[0][0].mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_other", 1.0, batch_size=len(batch[0]))
        return batch[0][0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Plain(Steps, nn.Module):
    pass


class Lit(Steps, pl.LightningModule):
    pass


@pytest.mark.parametrize("make", [Plain, Lit])
def test_what_the_step_says_is_the_weight_of_what_it_returns(tmp_path, make):
    """And nothing is warned of: the suite makes each warning an error."""
    _, _, history = fit(tmp_path, make, make_images, make_images, max_epochs=1)
    assert history[["train_loss", "other", "val_loss", "val_other"]].iloc[0].tolist() == pytest.approx(
        [4 / 3, 1, 4 / 3, 1]
    )


def test_who_says_nothing_is_warned(tmp_path):
    class Silent(Plain):
        def training_step(self, batch, batch_idx):
            return 0 * self.net.weight.sum() + batch[0][0].mean()

    with pytest.warns(UserWarning, match="The batch size we found is 3. To avoid any miscalculations, use `self.log"):
        fit(tmp_path, Silent, make_images, max_epochs=1)
