"""Test that the graph of a loss is freed before the next backward pass."""

import gc
import weakref

from modules import Classifier, make_loader, quiet

from fabric_template import FabricLoop


class RecordsLosses(Classifier):
    def __init__(self):
        super().__init__()
        self.losses, self.alive = [], []

    def training_step(self, batch, batch_idx):
        self.alive.append([loss() is not None for loss in self.losses])
        loss = super().training_step(batch, batch_idx)
        self.losses.append(weakref.ref(loss))
        return loss


def test_fit_keeps_only_the_loss_of_the_last_batch_in_memory():
    module = RecordsLosses()
    FabricLoop(**quiet(max_epochs=2)).fit(module, make_loader(16))
    assert module.alive == [[False] * (count - 1) + [True] * (count > 0) for count in range(8)]
    gc.collect()
    assert not any(loss() is not None for loss in module.losses)


class KeepsGraph(RecordsLosses):
    """A module that retains the graph in backward. Keeping two graphs at a time would need twice the memory."""

    def backward(self, loss):
        loss.backward(retain_graph=True)


def test_fit_frees_a_retained_graph_before_the_next_batch():
    module = KeepsGraph()
    FabricLoop(**quiet(max_epochs=1)).fit(module, make_loader(16))
    assert module.alive == [[False] * count for count in range(4)]
