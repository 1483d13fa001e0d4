"""predict --out: a table, arrays or the list, in the format of the file's name; nothing that was predicted is lost."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import FIT, LIT, refused, run, typed  # noqa: F401

from fabric_template.tools.predictions import join_batches, save_table

WIDE = """

class Wide(Lit):
    def predict_step(self, batch):
        return {"score": self.net(batch[0])[:, 0], "both": batch[0][:, :2].double(), "name": ["a"] * len(batch[0])}


class Image(Lit):
    def predict_step(self, batch):
        return batch[0].reshape(-1, 2, 2)


class Odd(Lit):
    def predict_step(self, batch):
        return {"box": [{"row": row} for row in batch[0]]}
"""


@pytest.fixture(autouse=True)
def wide():
    Path("lit.py").write_text(LIT + WIDE)


def predict(capsys, out, model="lit:Wide"):
    return run(capsys, "predict", "--model", model, *FIT[3:], "--seed", 1, "--out", out)


def test_both_formats_hold_the_same_numbers(capsys):
    for out in ("new/preds.csv", "preds.pt"):
        assert predict(capsys, out)[0] == 0
    scores = torch.cat([batch["score"] for batch in torch.load("preds.pt")]).numpy()
    with open("new/preds.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert (head, len(rows)) == (["score", "both_0", "both_1", "name"], 32)
    assert all(np.float32(row[0]) == score for row, score in zip(rows, scores, strict=True))  # bit for bit
    assert sorted(path.name for path in Path("new").iterdir()) == ["preds.csv"]


def test_the_columns_of_a_table():
    tables = {
        "0,1\n1.5,2.0\n5.0,6.0\n": [torch.tensor([[1.5, 2.0]]), torch.tensor([[5.0, 6.0]])],
        "prediction\n3\n4\n": [torch.tensor([3]), torch.tensor([4])],
        "prediction\n0.25\n": [torch.tensor(0.25, dtype=torch.bfloat16)],
        "0,1_0,1_1\n1,0.5,1.0\n": [(torch.tensor([1]), torch.tensor([[0.5, 1.0]]))],
    }
    for text, batches in tables.items():
        save_table(join_batches(batches), Path("table.csv"))
        assert Path("table.csv").read_text() == text


@pytest.mark.parametrize(
    ("out", "model", "reason"),
    [
        ("preds.csv", "lit:Image", "prediction has shape (2, 2) per sample"),
        ("preds.csv", "lit:Odd", "box holds neither numbers nor text"),
    ],
)
def test_what_does_not_fit_is_saved_by_torch(capsys, out, model, reason):
    code, _, err = predict(capsys, out, model)
    line = f"fabric-template: --out: got {out}, but {reason}. They are saved as {out}.pt."
    assert (code, err.splitlines()[-1]) == (2, line)
    assert len(torch.load(f"{out}.pt")) == 4
    assert not Path(out).exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(capsys):
    Path("folder.csv").mkdir()
    Path("file").write_text("")
    for out in ("x.json", "folder.csv", "file/x.csv"):
        assert refused(capsys, "predict", *FIT[1:], "--out", out).startswith(f"--out: got {out}, ")
