"""predict --out: a table, arrays or the list, in the format that the name says; nothing of hours is lost."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import FIT, LIT, QUIET, refused, run, typed  # noqa: F401

from fabric_template.tools import predictions
from fabric_template.tools.errors import UsageError

WIDE = """
class Wide(Lit):
    def predict_step(self, batch):
        return {"score": self.net(batch[0])[:, 0], "both": batch[0][:, :2].double(), "name": ["=1+1"] * len(batch[0])}


class Two(Data):
    def predict_dataloader(self):
        return [self.train_dataloader(), self.val_dataloader()]


class Image(Lit):
    def predict_step(self, batch):
        return batch[0].reshape(-1, 2, 2)


class Odd(Lit):
    def predict_step(self, batch):
        return [{"box": row} for row in batch[0]]
"""


@pytest.fixture(autouse=True)
def wide():
    Path("lit.py").write_text(LIT + WIDE)


def predict(capsys, out, model="lit:Wide", data="lit:Data"):
    return run(capsys, "predict", "--model", model, "--data", data, *FIT[5:], "--seed", 1, "--out", out)


def test_a_table_has_a_row_per_sample_and_a_column_per_class_or_key(capsys):
    assert predict(capsys, "new/preds.csv")[:2][0] == 0
    assert predict(capsys, "preds.npz")[0] == 0
    assert predict(capsys, "preds.PT")[0] == 0
    arrays, batches = dict(np.load("preds.npz")), torch.load("preds.PT")
    assert {name: array.shape for name, array in arrays.items()} == {"score": (32,), "both": (32, 2), "name": (32,)}
    assert np.array_equal(arrays["score"], torch.cat([batch["score"] for batch in batches]).numpy())
    with open("new/preds.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert (head, len(rows)) == (["score", "both_0", "both_1", "name"], 32)
    assert all(np.float32(row[0]) == score for row, score in zip(rows, arrays["score"], strict=True))  # to the bit
    assert all(float(row[2]) == both[1] for row, both in zip(rows, arrays["both"], strict=True))
    assert rows[0][3] == "'=1+1"  # no formula
    assert sorted(path.name for path in Path("new").iterdir()) == ["preds.csv"]


def test_scores_per_class_and_numbers_alone():
    batches = [torch.tensor([[1.5, 2.0], [0.1, 4.0]]), torch.tensor([[5.0, 6.0]])]
    assert predictions.to_csv([batches]) == b"0,1\n1.5,2.0\n0.1,4.0\n5.0,6.0\n"
    assert predictions.to_csv([[torch.tensor([3, 4]), torch.tensor([5])]]) == b"prediction\n3\n4\n5\n"
    assert predictions.to_csv([[torch.tensor(0.25, dtype=torch.bfloat16)]]) == b"prediction\n0.25\n"
    pairs = [(torch.tensor([1, 0]), torch.tensor([[0.5, 1.0], [2.0, 3.0]]))]
    assert predictions.to_csv([pairs]) == b"0,1_0,1_1\n1,0.5,1.0\n0,2.0,3.0\n"
    assert predictions.to_csv([[]]) == b"\n"


def test_of_several_loaders_each_row_says_which(capsys):
    assert predict(capsys, "preds.csv", data="lit:Two")[0] == 0
    rows = Path("preds.csv").read_text().splitlines()
    assert rows[0] == "dataloader,score,both_0,both_1,name"
    assert [row.partition(",")[0] for row in rows[1:]] == ["0"] * 32 + ["1"] * 32
    assert predict(capsys, "preds.npz", data="lit:Two")[0] == 0
    assert [*np.load("preds.npz")] == [f"dataloader_{i}/{name}" for i in (0, 1) for name in ("score", "both", "name")]


@pytest.mark.parametrize(
    ("out", "model", "words"),
    [
        (
            "preds.csv",
            "lit:Image",
            "prediction has shape (2, 2) for each sample, a cell holds one number: .npz or .pt do",
        ),
        ("preds.npz", "lit:Odd", "prediction holds lists that are no numbers and no text: .pt holds them"),
    ],
)
def test_what_does_not_fit_is_saved_in_the_other_format(capsys, out, model, words):
    code, _, err = predict(capsys, out, model)
    assert (code, err.splitlines()[-1]) == (2, f"fabric-template: --out {out}: {words}; they are saved as {out}.pt")
    assert len(torch.load(f"{out}.pt")) == 4
    assert not Path(out).exists()


def test_what_is_refused_before_anything_runs(capsys):
    Path("folder.csv").mkdir()
    Path("file").write_text("")
    for out, words in {
        "x.json": "expected a name that ends in .csv (a table), .npz (arrays) or .pt (torch.save)",
        "folder.csv": "this is no regular file; give the path of a file",
        "file/x.csv": "cannot be written: ",
    }.items():
        assert refused(capsys, "predict", *FIT[1:], "--out", out).startswith(f"--out {out}: {words}")


def test_a_disk_that_refuses_at_the_end_leaves_the_old_file(monkeypatch):
    from fabric_template.files import disk

    Path("preds.csv").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.fs, "write", full)
    with pytest.raises(UsageError, match=r"--out preds.csv: cannot be written: No space left on device"):
        predictions.save([torch.ones(2)], Path("preds.csv"), of_many=False)
    assert (Path("preds.csv").read_text(), len(list(Path().iterdir()))) == ("old", 2)  # and lit.py
