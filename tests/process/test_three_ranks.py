"""Three processes (gloo): sums over them depend on DDP's buckets; a resumed run begins with those of the run it goes on."""

import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from modules import Classifier, assert_same_weights, make_loader, run_loop, run_trainer
from runs import assert_same_end, fit, logs_of
from torch import nn


@pytest.fixture(autouse=True)
def forked_ranks_are_quiet(monkeypatch):
    """Set, so that Lightning gives each rank no more threads than this process has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train():
    return make_loader(60)


class Used(Classifier):
    """More than one bucket; the gradients come in another order than the parameters, one of them of two uses."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 16_000), nn.ReLU(), nn.Linear(16_000, 12), nn.BatchNorm1d(12), nn.Dropout(0.2)]
        self.net, self.again = nn.Sequential(*layers), nn.Linear(12, 12)
        self.first = nn.Linear(12, 3)

    def forward(self, x):
        return self.first(self.again(self.again(self.net(x)).relu()))


@pytest.mark.parametrize(
    ("make", "words"), [(Classifier, {}), (Used, {"accumulate_grad_batches": 2})], ids=["one_bucket", "several"]
)
def test_a_resumed_run_has_the_same_last_bits(tmp_path, make, words):
    """Cut in the middle of its first epoch: weights, optimizer, rows; the undisturbed run's weights are Trainer's, too."""
    words = {"strategy": "ddp_fork", "devices": 3, **words}
    whole = fit(tmp_path / "whole", make, train, max_epochs=2, **words)
    if make is Classifier:
        assert_same_weights(run_trainer(make, train, max_epochs=2, **words)[1], whole[1])
    fit(tmp_path / "parts", make, train, max_steps=2, **words)
    resumed = fit(tmp_path / "parts", make, train, max_epochs=2, resume="last", **words)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "parts")
    ours = torch.load(tmp_path / "parts/checkpoints/run/version_0/last.ckpt")["fabric_template"]
    assert sorted(ours["buckets"]) == list(range(len(list(make().parameters()))))


def test_the_order_costs_nothing_after_the_first_step(tmp_path):
    """The hooks that note it are gone, also behind batches that are not summed over the ranks."""
    left = tmp_path / "left"

    class Counting(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_rank == 0:
                hooks = [len(p._post_accumulate_grad_hooks or ()) for p in self.parameters()]
                left.write_text(f"{left.read_text() if left.exists() else ''}{sum(hooks)} ")

    run_loop(Counting, train, max_epochs=1, strategy="ddp_fork", devices=3, accumulate_grad_batches=2)
    assert left.read_text() == "4 0 0 0 0 "


def test_where_the_order_is_not_known_a_line_says_so(tmp_path):
    def words(**more):
        strategy = DDPStrategy(start_method="fork", static_graph=True)
        return {"train": train, "devices": 3, "strategy": strategy, **more}

    fit(tmp_path, **words(max_epochs=1))
    with pytest.raises(
        Exception, match=r"this run does not go on to the bit; with find_unused_parameters=True it would"
    ):
        fit(tmp_path, **words(max_epochs=2, resume="last"))
