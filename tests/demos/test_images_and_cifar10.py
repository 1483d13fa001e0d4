"""The demos images and cifar10: trained on what they make, then on files as people have them, whole and damaged."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fabric_template import read_logs
from fabric_template.demos.cifar10 import CIFAR10Data, make_images
from fabric_template.demos.images import ImageClassifier, ImagesData
from fabric_template.tools.cli import main

QUIET = ["--accelerator", "cpu", "--enable_progress_bar", "false", "--enable_model_summary", "false"]


def test_shapes_are_learned():
    """From files that a worker reads."""
    words = ["--data.size", "16", "--data.workers", "1", "--max_epochs", "4", "--save_last", "false"]
    assert main(["fit", "--model", "demos.images", *words, *QUIET]) == 0
    assert read_logs("logs")["val_acc"].max() > 0.45  # by chance 0.33
    assert len(list(Path("data/shapes").glob("*/*.png"))) == 600


def write_folders(**counts):
    for name, count in counts.items():
        Path("mine", name).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (9 + number, 12), number).save(f"mine/{name}/{number}.jpg")


def test_each_part_has_its_share_of_each_class():
    write_folders(cat=20, dog=40)
    data = ImagesData("mine", size=8)
    data.setup()
    assert data.classes == ["cat", "dog"]
    shares = {name: np.bincount(part.labels).tolist() for name, part in data.parts.items()}
    assert shares == {"train": [14, 28], "val": [4, 8], "test": [2, 4]}
    files = [file for part in data.parts.values() for file in part.files]
    assert len({*files}) == 60
    assert data.parts["val"][0][0].shape == (3, 8, 8)


def test_what_cannot_be_trained_on_is_named():
    with pytest.raises(ValueError, match=r"^ImagesData: path='mine': expected a folder .* or more.*; found 0 folders$"):
        ImagesData("mine").setup()
    write_folders(cat=9, dog=9, empty=0)
    with pytest.raises(ValueError, match="; found no picture in empty$"):
        ImagesData("mine").setup()
    Path("mine/empty/1.png").write_bytes(b"no picture")
    with pytest.raises(
        ValueError, match=r"ImagesData: 19 pictures of 3 classes cannot be split .*; give more pictures"
    ):
        ImagesData("mine").setup()
    Path("mine/empty/1.png").rename("mine/dog/1.png")
    Path("mine/empty").rmdir()
    data = ImagesData("mine", batch_size=30)
    data.setup()
    parts = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    with pytest.raises(ValueError, match=r"'mine/dog/1.png' cannot be read as a picture \(UnidentifiedImageError: "):
        [*parts[0], *parts[1], *parts[2]]
    with pytest.raises(
        ValueError, match=r"net='resnet999': expected 'small', or a name .*pip install torchvision, or timm$"
    ):
        ImageClassifier("resnet999")
    with pytest.raises(ValueError, match=r"classes=3, but a picture is of class 4, .*: give classes=5 or more"):
        ImageClassifier().validation_step((torch.zeros(2, 3, 16, 16), torch.tensor([0, 4])))


def write_batches(folder, per_file=30):
    """As they are unpacked from cifar-10-python.tar.gz: pickles of Python 2, in its second protocol."""
    images, labels = make_images(6 * per_file)
    Path(folder).mkdir()
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        part = slice(number * per_file, (number + 1) * per_file)
        data = {
            b"data": images[part].flatten(1).numpy(),
            b"labels": labels[part].tolist(),
            b"batch_label": name.encode(),
        }
        Path(folder, name).write_bytes(pickle.dumps(data, protocol=2))
    return images, labels


def test_python_batches_are_read():
    images, labels = write_batches("cifar")
    data = CIFAR10Data("cifar", val_size=50)
    data.setup()
    for name, part in {"train": slice(100), "val": slice(100, 150), "test": slice(150, 180)}.items():
        assert torch.equal(data.parts[name].tensors[0], images[part])
        assert torch.equal(data.parts[name].tensors[1], labels[part])


class Calls:
    def __reduce__(self):
        return os.mkdir, ("was_here",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({b"data": Calls()}), r"UnpicklingError: it names (posix|nt)\.mkdir, which is no array"),
        (
            pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, protocol=2),
            "TypeError: torch.float64 images",
        ),
        (pickle.dumps({b"data": np.zeros((2, 3072), "uint8")})[:-20], "UnpicklingError: "),
        (b"", "EOFError: "),
    ],
    ids=["calls", "floats", "cut", "empty"],
)
def test_a_file_that_is_none_is_refused(content, said):
    write_batches("cifar")
    Path("cifar/data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^CIFAR10Data: 'cifar/data_batch_3' is no python batch .*\({said}"):
        CIFAR10Data("cifar").setup()
    assert not Path("was_here").exists()


def test_a_resnet_learns():
    words = ["--model.width", "4", "--model.lr", "0.004", "--data.batch_size", "50", "--max_epochs", "2"]
    with pytest.warns(
        UserWarning, match="there is no folder 'data/cifar-10-batches-py': 1,200 made images in its place"
    ):
        assert main(["fit", "--model", "demos.cifar10", *words, "--limit_val_batches", "2", *QUIET]) == 0
    assert read_logs("logs")["val_acc"].max() > 0.15  # by chance 0.1
