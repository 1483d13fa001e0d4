"""Logged steps of evaluations, hyperparameters, resume and errors are as under Trainer."""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
import yaml
from both import LOOPS, Notes
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from modules import quiet
from torch.utils.data import DataLoader
from torchmetrics import Metric

from fabric_template import FabricLoop

WORDS = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}


class ByStep(BoringModel):
    """Logs each batch of its validations, of two loaders."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)

    def val_dataloader(self):
        return [DataLoader(RandomDataset(32, 2 + n)) for n in range(2)]


@pytest.mark.parametrize("reloads", [0, 1, 2])
@pytest.mark.parametrize("sanity", [0, 2])
def test_loaders_made_again_count_their_batches_from_zero(reloads, sanity, tmp_path):
    rows = []
    words = {**WORDS, "max_epochs": 4, "num_sanity_val_steps": sanity, "reload_dataloaders_every_n_epochs": reloads}
    for kind in LOOPS.values():
        trainer = kind(**quiet(**words, logger=Notes(), val_check_interval=1, default_root_dir=str(tmp_path)))
        trainer.fit(ByStep())
        rows.append(trainer.loggers[0].rows)
    assert rows[0] == rows[1]
    first = [step for step, values in rows[1] if "x/dataloader_idx_0" in values]
    each = {0: range(24), 1: [*range(6)] * 4, 2: [*range(12)] * 2}[reloads]
    assert first == list(each)


class Configured(BoringModel):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.ones(1, 32)


class Told(Notes):
    """Notes what it is told beside values."""

    def log_hyperparams(self, params, *args, **kwargs):
        self.rows.append(("hyperparameters", dict(params)))

    def log_graph(self, model, input_array=None):
        self.rows.append(("graph", type(model).__name__))


@pytest.mark.parametrize("verbs", [["fit"], ["validate"], ["test"], ["predict"], ["fit", "validate"]])
def test_each_verb_tells_the_loggers_its_hyperparameters(verbs, tmp_path):
    told, files = [], []
    for name, kind in LOOPS.items():
        root = tmp_path / name
        loggers = [Told(), CSVLogger(root, "csv"), TensorBoardLogger(root, "board")]
        trainer = kind(**quiet(**{**WORDS, "limit_test_batches": 1, "limit_predict_batches": 1}, logger=loggers))
        model = Configured()
        for verb in verbs:
            getattr(trainer, verb)(model)
        told.append([what for what in loggers[0].rows if isinstance(what[0], str)])
        paths = sorted(path.relative_to(root) for path in root.rglob("*.yaml"))
        files.append([(str(path), yaml.safe_load((root / path).read_text())) for path in paths])
    assert told[0] == told[1] == [("hyperparameters", {"width": 3}), ("graph", "Configured")] * len(verbs)
    assert files[0] == files[1]
    assert [path for path, _ in files[1]] == ["board/version_0/hparams.yaml", "csv/version_0/hparams.yaml"]


def starting(seen):
    """A module that notes what there is as training starts."""

    class Starts(BoringModel):
        def val_dataloader(self):
            seen.append("val_dataloader")
            return super().val_dataloader()

        def on_train_start(self):
            seen.append((self.trainer.current_epoch, self.trainer.global_step, self.trainer.num_val_batches))

        def on_train_epoch_start(self):
            seen.append(("epoch", self.current_epoch))

    return Starts()


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("words", [{}, {"val_check_interval": 1}])
def test_a_resume_starts_in_the_next_epoch(words, tmp_path):
    """From a file that a ModelCheckpoint has saved as an epoch ended: its loaders are there, and the epoch that comes."""
    found = []
    words = {**WORDS, "num_sanity_val_steps": 0, "enable_checkpointing": True, **words}
    for name, kind in LOOPS.items():
        keeps = ModelCheckpoint(tmp_path / name, save_on_train_epoch_end=True, save_top_k=-1)
        kind(**quiet(**words, callbacks=[keeps])).fit(starting([]))
        later = kind(**quiet(**{**words, "max_epochs": 4}, callbacks=[keeps]))
        found.append([])
        later.fit(starting(found[-1]), ckpt_path=tmp_path / name / "epoch=1-step=6.ckpt")
    assert found[0][:3] == found[1][:3] == ["val_dataloader", (2, 6, [2]), ("epoch", 2)]


def test_what_is_saved_there_is_of_where_it_stands(tmp_path):
    """The next epoch is shown, and nothing else: a file that on_train_start saves is as the one that is resumed."""

    class Saves(BoringModel):
        def on_train_start(self):
            self.trainer.save_checkpoint(tmp_path / f"{self.trainer.global_step}.ckpt")

    pl.seed_everything(1, verbose=False)
    keeps = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, filename="end")
    words = {**WORDS, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    FabricLoop(**quiet(**{**words, "max_epochs": 1}, callbacks=[keeps])).fit(BoringModel())
    whole, again = BoringModel(), BoringModel()
    for model, path in ((Saves(), "end"), (whole, "end"), (again, "3")):
        FabricLoop(**quiet(**words)).fit(model, resume=tmp_path / f"{path}.ckpt")
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))


class Breaks(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("broken")
        self.log("a", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        self.log("b", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class ByHand(BoringModel):
    """Returns a loss for each sample."""

    def __init__(self, returned):
        super().__init__()
        self.automatic_optimization, self.returned = False, returned

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean(1)
        self.optimizers().zero_grad()
        self.manual_backward(loss.mean())
        self.optimizers().step()
        return self.returned(loss)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 7), batch_size=2)


class OwnBackward(BoringModel):
    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean(1)

    def backward(self, loss):
        loss.mean().backward()

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 7), batch_size=2)


RETURNED = {"tensor": lambda loss: loss, "matrix": lambda loss: loss.repeat(2, 1), "dict": lambda loss: {"loss": loss}}


@pytest.mark.parametrize("kind", [*RETURNED, "backward"])
def test_a_loss_for_each_sample(kind, tmp_path):
    """Where nobody but the module itself goes backward from it: the history has its mean."""
    models, noted = [], []
    for make in LOOPS.values():
        pl.seed_everything(1, verbose=False)
        models.append(OwnBackward() if kind == "backward" else ByHand(RETURNED[kind]))
        models[-1].on_train_batch_end = lambda outputs, batch, batch_idx: noted.append(
            (outputs["loss"].mean(), len(batch))
        )
        history = make(**quiet(max_epochs=2, limit_val_batches=0, default_root_dir=str(tmp_path))).fit(models[-1])
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))
    assert history["step"].tolist() == [4, 8]
    if kind == "dict":  # whose scalars the history has
        return
    means = [sum(loss * size for loss, size in noted[start : start + 4]).item() / 7 for start in (8, 12)]
    assert history["train_loss"].tolist() == pytest.approx(means)


def test_a_path_that_was_set_gives_way_to_one_that_is_passed(tmp_path):
    loop = FabricLoop(**quiet(max_epochs=1, limit_train_batches=1, limit_val_batches=0))
    loop.fit(model := BoringModel())
    loop.save_checkpoint(tmp_path / "set.ckpt")
    loop.save_checkpoint(tmp_path / "passed.ckpt")
    found = []
    for kind in LOOPS.values():
        trainer = kind(**quiet(max_epochs=2, limit_train_batches=1, limit_val_batches=0))
        trainer.ckpt_path = str(tmp_path / "set.ckpt")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, ckpt_path=str(tmp_path / "passed.ckpt"))
        found.append([text for one in caught if "ckpt_path" in (text := str(one.message))])
        assert trainer.ckpt_path == str(tmp_path / "passed.ckpt")
    assert found[0] == found[1]
    assert found[1] == [
        f"`trainer.ckpt_path = '{tmp_path / 'set.ckpt'}'` was called but then you passed "
        f"`trainer.fit(ckpt_path='{tmp_path / 'passed.ckpt'}')`. The latter will be loaded."
    ]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_best_of_a_fast_dev_run(verb, tmp_path):
    text = (
        f'You cannot execute `.{verb}(ckpt_path="best")` with `fast_dev_run=True`. Please pass an exact checkpoint path to'
        f" `.{verb}(ckpt_path=...)`"
    )
    for kind in LOOPS.values():
        trainer = kind(**{**quiet(fast_dev_run=True, default_root_dir=str(tmp_path)), "enable_checkpointing": True})
        trainer.fit(BoringModel())
        with pytest.raises(ValueError, match=re.escape(text)):
            getattr(trainer, verb)(ckpt_path="best")


class Worded(Metric):
    """Computes what is no tensor."""

    def update(self):
        pass

    def compute(self):
        return "much"


def test_a_metric_that_computes_no_tensor(tmp_path):
    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.metric = Worded()

        def training_step(self, batch, batch_idx):
            self.metric.update()
            self.log("m", self.metric, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    for kind in LOOPS.values():
        with pytest.raises(
            ValueError, match=r"^The `.compute\(\)` return of the metric logged as 'm' must be a tensor. Found much"
        ):
            kind(**quiet(**WORDS, default_root_dir=str(tmp_path))).fit(Model())
