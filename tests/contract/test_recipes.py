"""docs/recipes/: the loop before and the one after run, end with the same bits, and part in as few lines as the index says."""

import difflib
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch

from fabric_template import compare

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "recipes"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
INDEX = TEXTS["README"]
PAGES = [page for page in TEXTS if page not in ("README", "export")]  # with a loop before and one after
MOST_LINES = 15


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", TEXTS[page], re.M | re.S)


def run(source, page, folder, monkeypatch):
    """The names of a block that was run in a folder of its own, as a script."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"}
    exec(compile(source, f"{page}, {folder.name}", "exec"), names)
    return names


def same(net, other):
    net, other = net.state_dict(), other.state_dict()
    return list(net) == list(other) and all(torch.equal(net[name], other[name]) for name in net)


def same_rows(before, after):
    """What the loop before has noted per epoch has a column each, with the same numbers: in 32 bits, as all that is logged."""
    rows = pd.DataFrame(before["rows"])
    return rows.astype("float32").equals(after["history"][rows.columns].astype("float32"))


def same_stop(before, after):
    return len(after["history"]) == before["epoch"] + 1 < 100 and after["history"].val_loss.min() == before["best"]


def same_lines(before, after):
    """Each validation, with the epoch; between them the means of training."""
    texts = (Path(f"../{name}/log.jsonl").read_text() for name in ("before", "after"))
    old, new = ([json.loads(line) for line in text.splitlines()] for text in texts)
    rows = pd.read_csv("logs/logger/version_0/metrics.csv")
    return (
        [{**line, "step": line["step"] - 1, "epoch": epoch} for epoch, line in enumerate(old)] == new[::2]
        and [line["train_loss"] for line in new[1::2]] == rows.train_loss.tolist()
    )  # fmt: skip


def same_files(*names):
    def are_same(before, after):
        return all(Path("../before", name).read_bytes() == Path(name).read_bytes() for name in names)

    return are_same


CHECKS = {
    "early-stopping": same_stop,
    "ema": same_rows,
    "f1": same_rows,
    "gan": lambda before, after: (
        same(before["generator"], after["generator"]) and after["history"].step.tolist() == [16, 32, 48]
    ),
    "gradients": same_rows,
    "hugging-face": same_rows,
    "k-folds": same_files("out_of_fold.csv"),
    "logger": same_lines,
}
NETS = {"gan": "critic", "hugging-face": "model"}  # by its name in the page


@pytest.mark.parametrize("page", PAGES)
def test_before_and_after_are_the_same(page, tmp_path, monkeypatch):
    before, after = blocks(page)[:2]
    before = run(before, page, tmp_path / "before", monkeypatch)
    after = run(after, page, tmp_path / "after", monkeypatch)
    net = NETS.get(page, "net")
    assert same(before[net], after[net])
    assert CHECKS[page](before, after)


@pytest.mark.parametrize("page", PAGES)
def test_compare_finds_no_difference(page, tmp_path, monkeypatch):
    before, after = blocks(page)[:2]
    result = compare(
        lambda: run(before, page, tmp_path / "before", monkeypatch),
        lambda: run(after, page, tmp_path / "after", monkeypatch),
    )
    assert result.is_equal, result


def test_with_the_library(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    names = run(blocks("hugging-face")[2], "hugging-face", tmp_path / "library", monkeypatch)
    again = type(names["model"]).from_pretrained("finetuned")
    assert same(names["model"], again)
    assert not same(names["model"], type(again).from_pretrained("small"))


def test_export(tmp_path, monkeypatch):
    """The block of the page compares what it has written with the model."""
    source, onnx = blocks("export")
    names = run(source, "export", tmp_path / "export", monkeypatch)
    assert {path.name for path in Path().iterdir()} == {"checkpoints", "logs", "net.pt2", "net.safetensors"}
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        import onnxruntime

        exec(onnx, names)
        session = onnxruntime.InferenceSession("net.onnx")
        found = torch.from_numpy(session.run(None, {"input": names["x"].numpy()})[0])
        assert torch.allclose(found, names["net"](names["x"]), atol=1e-6)


def lines_of(page):
    """How many lines, blank ones aside, stand in the block after only, and in the block before only."""
    before, after = blocks(page)[:2]
    marks = [line[0] for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[2:].strip()]
    return marks.count("+"), marks.count("-")


def test_the_index_has_every_page_and_its_lines():
    rows = re.findall(r"^\| \[(.*)\]\((.*)\.md\) \| (\d+) \| (\d+) \|$", INDEX, re.M)
    figures = {page: (int(written), int(gone)) for _, page, written, gone in rows}
    assert figures == {page: lines_of(page) for page in PAGES}
    assert [page for page in PAGES if lines_of(page)[0] > MOST_LINES] == []
    for title, page, _, _ in rows:
        assert TEXTS[page].splitlines()[0].removeprefix("# ").lower() == title.lower()


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.M | re.S)
    assert [target for target in re.findall(r"\]\(([^)#]+)", text) if not (FOLDER / target).is_file()] == []
