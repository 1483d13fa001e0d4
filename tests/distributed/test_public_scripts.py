"""What public scripts for several processes do: sharded losses, closures under spawn."""

import lightning.pytorch as pl
import pytest
import torch
from externally import externally
from modules import make_loader, quiet, sgd
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---- a sharded loss


def in_parallel():
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def by_columns(net, mesh):
    """Shard the logits by columns, for torch's loss_parallel()."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(
        net, mesh["tensor_parallel"], ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    )


def make_net():
    torch.manual_seed(1)
    return nn.Linear(8, 4)


class Whole(pl.LightningModule):
    """As Lightning's example of tensor parallelism, on one device."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch):
        loss = under(self.net, batch)
        self.log("mine", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def backward(self, *args, **words):
        with in_parallel():
            super().backward(*args, **words)

    def validation_step(self, batch):
        return under(self.net, batch)

    def predict_step(self, batch):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def under(net, batch):
    with in_parallel():
        return cross_entropy(net(batch[0]), batch[1])


class Sharded(Whole):
    def configure_model(self):
        if not hasattr(self.net.weight, "full_tensor"):  # which each verb calls
            by_columns(self.net, self.device_mesh)


def train():
    return make_loader(16, shuffle=False)


def by_module(kind, **words):
    loop = FabricLoop(**quiet(max_epochs=2, **words))
    model = kind()
    loop.fit(model, train(), make_loader(8, shuffle=False, seed=5))
    weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.state_dict().values()]
    predicted = loop.predict(model, train())
    return {"weights": weights, "metrics": dict(loop.callback_metrics), "predicted": torch.cat(predicted)}


def train_with_sharded_loss(rank):
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    torch.save(by_module(Sharded, strategy=strategy, devices=2), f"found{rank}.pt")


def test_a_sharded_loss_is_logged_and_returned():
    """Values are those of one process."""
    codes, errors = externally(train_with_sharded_loss)
    assert codes == [0, 0], errors
    alone = by_module(Whole)
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        assert found["metrics"].keys() == alone["metrics"].keys()
        for name in ("weights", "metrics", "predicted"):
            torch.testing.assert_close(found[name], alone[name], rtol=0, atol=1e-6)


# ---- what cannot be pickled


def test_closures_are_refused_by_strategies_that_spawn():
    net = nn.Linear(8, 3)
    loop = FabricLoop(**quiet(max_epochs=1, devices=2), strategy="ddp_spawn")
    with pytest.raises(TypeError) as caught:
        loop.fit(net, make_loader(), training_step=lambda net, batch: under(net, batch), optimizer=sgd(net))
    assert "strategy: got one that spawns processes" in str(caught.value)
    assert "<lambda>" in str(caught.value)
