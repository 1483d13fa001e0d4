"""Files of --config: merged in order, below what is typed, in our form of a class and in LightningCLI's."""

from pathlib import Path

import pytest
import torch
import yaml
from test_cli import FIT, QUIET, refused, run, typed, weights  # noqa: F401


def config(capsys, *argv):
    """Return the parsed output of --print_config."""
    code, out, err = run(capsys, *argv, "--print_config")
    assert (code, err) == (0, "")
    return yaml.safe_load(out)


def test_print_config_can_be_fed_back(capsys):
    argv = ["--max_epochs", 2, "--model.hidden", 5, "--data.batch_size", 16, "--seed", 3, *QUIET]
    Path("run.yaml").write_text(run(capsys, *FIT, *argv, "--print_config")[1])
    run(capsys, *FIT, *argv)
    assert run(capsys, "fit", "--config", "run.yaml")[0] == 0
    a, b = weights("run/version_0"), weights("run/version_1")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_last_file_wins_and_what_is_typed_beats_all(capsys):
    Path("a.yaml").write_text("model: {class: lit:Lit, hidden: 5, lr: 0.2}\ndata: lit:Data\nmax_epochs: 7\nname: a\n")
    Path("b.yaml").write_text("model: {hidden: 6}\nmax_epochs: 1\n")
    found = config(capsys, "fit", "--name", "typed", "--config", "a.yaml", "--config", "b.yaml", "--model.lr", 0.3)
    assert (found["max_epochs"], found["name"]) == (1, "typed")
    assert found["model"] == {"class_path": "lit.Lit", "init_args": {"hidden": 6, "lr": 0.3, "act": None}}
    Path("c.yaml").write_text("model: lit:make_wide\n")
    found = config(capsys, "fit", "--config", "a.yaml", "--config", "c.yaml")
    assert found["model"] == {"class_path": "lit.make_wide", "init_args": {"factor": 2}}


def test_arguments_of_one_class_are_merged_at_every_depth(capsys):
    act = "{class_path: torch.nn.PReLU, init_args: {%s}}"
    Path("a.yaml").write_text(f"model: {{class_path: lit.Lit, init_args: {{hidden: 4, act: {act % 'init: 0.5'}}}}}\n")
    Path("b.yaml").write_text(f"model: {{class: lit:Lit, act: {act % 'num_parameters: 4'}}}\ndata: lit:Data\n")
    found = config(capsys, "fit", "--config", "a.yaml", "--config", "b.yaml")["model"]["init_args"]
    arguments = found["act"]["init_args"]
    assert (found["hidden"], arguments["init"], arguments["num_parameters"]) == (4, 0.5, 4)


def test_a_file_of_data_alone_goes_with_the_default_demo(capsys):
    Path("tuned.yaml").write_text("data: {class: fabric_template.demos.digits:DigitsData, batch_size: 32}\n")
    found = config(capsys, "fit", "--config", "tuned.yaml")
    assert (found["data"]["init_args"]["batch_size"], found["monitor"]) == (32, "val_acc")


def test_callbacks_of_files_and_typed_ones(capsys):
    Path("run.yaml").write_text("callbacks:\n- class_path: lit.Hears\n  init_args: {word: file}\n")
    argv = [*FIT, *QUIET, "--fast_dev_run", "--config", "run.yaml"]
    assert "heard file\n" in run(capsys, *argv)[1]
    assert "heard file\nheard nothing\n" in run(capsys, *argv, "--callbacks+", "lit:Hears")[1]
    assert "heard" not in run(capsys, *argv, "--callbacks", "null")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_epoch: 3", "--max_epoch: fabric-template fit has no such option. Did you mean --max_epochs?"),
        ("model: {class: lit:Lit, depth: 3}", "--model.depth is no argument of lit.Lit."),
        ("model: {hidden: 3}", "--model: got no class, expected --model package.module:Class."),
        ("data: lit:Data", "--model: got no class, expected --model package.module:Class."),
        ("callbacks: [3]", "--callbacks: got 3, expected package.module:Class."),
        ("[1, 2]", "--config: got run.yaml, expected lines such as max_epochs: 3."),
    ],
)
def test_mistakes_in_a_file_are_one_line(capsys, text, words):
    Path("run.yaml").write_text(text)
    assert refused(capsys, "fit", "--config", "run.yaml").startswith(words)
