"""Test which samples two processes get in training, evaluation and prediction."""

import json
import shutil

import lightning.pytorch as pl
import pytest
import torch
from modules import quiet
from parameters import halve
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from fabric_template import FabricLoop, TensorLoader

FORK = {"strategy": "ddp_fork", "devices": 2}


pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")


class RecordingModule(pl.LightningModule):
    """A module that writes the samples of each process to a file, and logs their mean."""

    def __init__(self, folder, on_step=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.on_step = folder, on_step

    def record(self, stage, batch):
        batch = batch[0] if isinstance(batch, list | tuple) else batch
        with open(f"{self.folder}/{stage}{self.global_rank}.jsonl", "a") as file:
            print(json.dumps(batch.flatten().tolist()), file=file)
        return batch

    def training_step(self, batch, batch_idx):
        return self.layer(self.record("fit", batch)).sum()

    def validation_step(self, batch, batch_idx):
        batch = self.record("validate", batch)
        self.log("mean", batch.mean(), sync_dist=True, on_epoch=True, on_step=self.on_step)
        self.log("sum", batch.sum(), sync_dist=True, on_epoch=True, reduce_fx="sum")

    def test_step(self, batch, batch_idx):
        self.log("mean", self.record("test", batch).mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.record("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def numbers(num):
    return TensorDataset(torch.arange(float(num))[:, None])


def seen(folder, stage):
    texts = [(folder / f"{stage}{rank}.jsonl").read_text() for rank in range(2)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


LOADERS = {
    "DataLoader": lambda num, size: DataLoader(numbers(num), batch_size=size),
    "BatchSampler": lambda num, size: DataLoader(
        numbers(num), batch_sampler=BatchSampler(SequentialSampler(range(num)), size, drop_last=False)
    ),
    "TensorLoader": lambda num, size: TensorLoader(torch.arange(float(num))[:, None], batch_size=size),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_each_process_gets_the_same_test_samples_as_with_trainer(tmp_path, kind):
    for name, run in (("trainer", pl.Trainer), ("loop", FabricLoop)):
        (tmp_path / name).mkdir()
        loader = LOADERS["DataLoader" if name == "trainer" else kind](7, 3)
        run(**quiet(**FORK)).test(RecordingModule(tmp_path / name), loader, verbose=False)
    assert seen(tmp_path / "loop", "test") == seen(tmp_path / "trainer", "test")


def test_two_processes_together_predict_each_sample_once(tmp_path):
    """Like Trainer, FabricLoop ignores drop_last in predict."""
    loader = DataLoader(numbers(7), batch_size=2, drop_last=True)
    FabricLoop(**quiet(**FORK)).predict(RecordingModule(tmp_path), loader, return_predictions=False)
    assert seen(tmp_path, "predict") == [[[0, 2], [4, 6]], [[1, 3], [5]]]


class Stream(IterableDataset):
    """A stream that is empty in the first process."""

    def __iter__(self):
        return iter([torch.ones(1)] * len(self))

    def __len__(self):
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 1


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_is_empty_in_one_process_is_refused(tmp_path):
    with pytest.raises(Exception, match=r"got \[0, 1\] batches in the processes"):
        FabricLoop(**quiet(max_epochs=1, **FORK)).fit(RecordingModule(tmp_path), DataLoader(Stream(), batch_size=None))


# Resuming with a different seed


class CopiesCheckpoint(pl.Callback):
    """A callback that copies last.ckpt before the given batches."""

    def __init__(self, folder, where):
        self.folder, self.where, self.batches = folder, where, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.is_global_zero and self.batches in self.where:
            shutil.copy(self.folder / "checkpoints/run/version_0/last.ckpt", self.folder / f"{self.batches}.ckpt")
        self.batches += 1


@pytest.mark.parametrize(("kind", "reload"), halve(LOADERS, [0, 1]))
def test_resuming_with_a_different_seed_does_not_change_the_order_of_samples(tmp_path, kind, reload):
    """The checkpoint contains the seed from which all processes draw the same order."""

    def fit(seed, **options):
        pl.seed_everything(seed, verbose=False)
        loader = LOADERS[kind](16, 2)
        if kind == "TensorLoader":
            loader.shuffle = True
        options |= {"max_epochs": 3, "enable_checkpointing": True, "default_root_dir": str(tmp_path), **FORK}
        options["reload_dataloaders_every_n_epochs"] = reload
        resume = options.pop("resume", None)
        FabricLoop(**quiet(**options)).fit(RecordingModule(tmp_path), loader, resume=resume)
        found = seen(tmp_path, "fit")
        for rank in range(2):
            (tmp_path / f"fit{rank}.jsonl").unlink()
        return found

    whole = fit(1, save_every_n_steps=3, callbacks=[CopiesCheckpoint(tmp_path, (3, 9))])
    assert sorted(sum(whole[0][:4] + whole[1][:4], [])) == list(range(16))
    for batch in (3, 9):
        assert fit(99, resume=tmp_path / f"{batch}.ckpt") == [rank[batch:] for rank in whole], batch
    assert fit(99)[0] != whole[0]
