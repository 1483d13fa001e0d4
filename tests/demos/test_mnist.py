"""The demo mnist: a small file of the same form is trained on; without file and without network one line says what to type."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fabric_template import read_logs
from fabric_template.demos.mnist import MNISTData
from fabric_template.tools.cli import main

FIT = ["fit", "--model", "demos.mnist", "--accelerator", "cpu", "--enable_progress_bar", "false"]


def write_small(path):
    """Scikit-learn's digits, three times as large and with a rim: 28x28 pixels, 0 to 255."""
    digits = load_digits()
    images = np.kron(digits.images / 16 * 255, np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("uint8")
    labels = digits.target.astype("uint8")
    np.savez(path, x_train=images[:1500], y_train=labels[:1500], x_test=images[1500:], y_test=labels[1500:])


def test_it_reads_digits(capsys):
    write_small("small.npz")
    own = ["--data.path", "small.npz", "--data.val_size", "200"]
    assert main([*FIT, *own, "--max_epochs", "4"]) == 0
    assert read_logs("logs")["val_acc"].iloc[-1] > 0.85
    capsys.readouterr()
    assert main(["test", *FIT[1:], *own, "--load", "best"]) == 0
    assert "test_acc" in capsys.readouterr().out


def test_neither_file_nor_network(monkeypatch, capsys):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nobody answers
    assert main(FIT) == 2
    said = capsys.readouterr().err
    assert "MNISTData: there is no file 'data/mnist.npz', and openml.org cannot be reached (URLError: " in said
    assert said.endswith(" (--data.path ~/.keras/datasets/mnist.npz)\n")
    assert said.count("\n") == 1
    assert not Path("data").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a file", b"no archive at all"])
def test_a_damaged_file_is_named(content):
    Path("bad.npz").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"^MNISTData: 'bad.npz' is no .npz file with x_train, y_train, x_test, y_test \("
    ):
        MNISTData("bad.npz").setup()


def test_another_archive_and_a_part_that_is_too_large():
    np.savez("other.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match="is no .npz file with x_train"):
        MNISTData("other.npz").setup()
    write_small("small.npz")
    with pytest.raises(ValueError, match="val_size=5000 must be at least 1, and less than the 1500 images"):
        MNISTData("small.npz").setup()
