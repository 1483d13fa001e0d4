"""Test that the demos mnist and cifar10 read and download the original file formats."""

import gzip
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fabric_template import read_logs
from fabric_template.demos import cifar10, mnist
from fabric_template.tools.cli import main

QUIET = ["--accelerator", "cpu", "--enable_progress_bar", "false"]


def write_mnist(folder):
    """Write scikit-learn's digits, enlarged to 28x28 pixels, as IDX files."""
    digits = load_digits()
    images = np.pad(np.kron(digits.images / 16 * 255, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    folder.mkdir(parents=True)
    for part, rows in ((mnist.TRAIN, slice(1500)), (mnist.TEST, slice(1500, None))):
        for name, array in zip(part, (images[rows], digits.target[rows]), strict=True):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            content = header + array.astype("uint8").tobytes()
            (folder / name).write_bytes(gzip.compress(content))


def write_cifar10(folder, count=300):
    """Write images as binary batches. The color of an image depends on its class."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for name in [*cifar10.TRAIN, *cifar10.TEST]:
        labels = generator.integers(0, 10, count, dtype="uint8")
        pixels = generator.integers(0, 80, (count, 3, 1024))
        for channel in range(3):
            pixels[:, channel] += (labels * (channel + 3) % 10 * 19)[:, None]
        rows = np.concatenate([labels[:, None], pixels.reshape(count, -1)], axis=1)
        (folder / name).write_bytes(rows.astype("uint8").tobytes())


def test_the_mnist_demo_reaches_85_percent_accuracy():
    write_mnist(Path("idx"))
    options = ["--model", "demos.mnist", "--data.path", "idx", "--max_epochs", "4", *QUIET]
    assert main(["fit", *options]) == 0
    assert read_logs("logs")["val_acc"].iloc[-1] > 0.85


def test_mnist_is_downloaded_only_once(monkeypatch):
    write_mnist(Path("mirror"))
    monkeypatch.setattr(mnist, "MIRROR", Path("mirror").resolve().as_uri() + "/")
    data = mnist.MNISTData()
    data.prepare_data()
    shutil.rmtree("mirror")
    # The files exist now and the mirror is gone, so the second call must not download anything.
    data.prepare_data()
    data.setup()
    assert [len(data.splits[split]) for split in ("train", "val", "test")] == [1350, 150, 297]
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.max(), labels.dtype) == ((64, 28, 28), 1, torch.int64)
    assert sorted(path.suffix for path in Path("data/mnist").iterdir()) == [".gz"] * 4


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        (["--max_epochs", "1", "--limit_train_batches", "2", "--limit_val_batches", "2"], 0.0),
        pytest.param(["--max_epochs", "3"], 0.3, marks=pytest.mark.soak),
    ],
)
def test_the_cifar10_demo_downloads_its_data_and_trains_a_model(monkeypatch, limits, least):
    write_cifar10(Path("cifar-10-batches-bin"))
    archive = shutil.make_archive("mirror/cifar-10-binary", "gztar", ".", "cifar-10-batches-bin")
    monkeypatch.setattr(cifar10, "URL", Path(archive).as_uri())
    options = ["--model.width", "4", "--data.batch_size", "50", *limits, *QUIET]
    assert main(["fit", "--model", "demos.cifar10", *options]) == 0
    assert read_logs("logs")["val_acc"].iloc[-1] >= least
    assert Path("data/cifar-10-batches-bin/test_batch.bin").exists()


def test_the_cifar10_demo_reads_the_binary_version_of_its_data():
    write_cifar10(Path("bin"), count=20)
    data = cifar10.CIFAR10Data("bin")
    data.setup()
    images, labels = data.splits["test"].tensors
    row = Path("bin/test_batch.bin").read_bytes()[7 * 3073 :]
    assert (labels[7], images[7, 1, 2, 3]) == (row[0], row[1 + 1024 + 2 * 32 + 3])
    assert [len(data.splits[split]) for split in ("train", "val", "test")] == [90, 10, 20]
    # This is the number of parameters of a ResNet-18 for CIFAR-10.
    assert sum(weight.numel() for weight in cifar10.CIFAR10Net().parameters()) == 11_173_962


@pytest.mark.parametrize("demo", ["mnist", "cifar10"])
def test_an_error_about_a_failed_download_explains_where_to_copy_the_file(monkeypatch, capsys, demo):
    # Let the download fail: no proxy server listens on this port.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert main(["fit", "--model", f"demos.{demo}", *QUIET]) == 2
    error = capsys.readouterr().err
    assert re.search(r"download of https://.*copy it to data/\S+\n$", error)
    assert not [path for path in Path("data").rglob("*") if path.is_file()]
