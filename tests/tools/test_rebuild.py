"""A run is rebuilt from its folder alone, with the same bits; what its folder does not know is asked for in one line."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from runs import without_time
from test_cli import FIT, LIT, QUIET, refused, run, typed  # noqa: F401

from fabric_template import FabricLoop
from fabric_template.files.reading import read_checkpoint
from fabric_template.record import recipe

FIVE = ["--max_epochs", 3, "--model.hidden", 6, "--data.batch_size", 16, "--seed", 7, "--gradient_clip_val", 0.5]
HEAR = """
class Hears:
    def __init__(self, word: str = "nothing"):
        self.word = word

    def on_train_start(self, loop, model):
        print("heard", self.word)
"""


def weights(place):
    return read_checkpoint(f"checkpoints/{place}/last.ckpt")["state_dict"]


def are_the_same_run(one, other):
    """Weights bit for bit; every row but its time."""
    first, second = weights(one), weights(other)
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert without_time(Path("logs", one, "metrics.csv")) == without_time(Path("logs", other, "metrics.csv"))


def config_of(place):
    return yaml.safe_load(Path("logs", place, "config.yaml").read_text("utf-8"))


def test_a_run_with_five_options_is_rebuilt_from_its_folder_with_the_same_bits(capsys):
    assert run(capsys, *FIT, *QUIET, *FIVE)[0] == 0
    torch.rand(3)
    assert run(capsys, "fit", "--config", "logs/run/version_0/config.yaml")[0] == 0
    are_the_same_run("run/version_0", "run/version_1")
    assert run(capsys, "fit", "--run", "logs/run/version_0")[0] == 0
    are_the_same_run("run/version_0", "run/version_2")
    torch.manual_seed(99)
    assert run(capsys, *FIT, *QUIET, *FIVE[:-4], "--seed", 8)[0] == 0  # the comparison can fail
    with pytest.raises(AssertionError):
        are_the_same_run("run/version_0", "run/version_3")


def test_what_stands_in_the_file(capsys, monkeypatch):
    commit = {"commit": "0" * 40, "is_clean": False}
    monkeypatch.setattr(recipe, "git_state", lambda: commit)
    run(capsys, *FIT, *QUIET, *FIVE, "--callbacks+=EarlyStopping", "--callbacks.monitor=val_loss")
    text = Path("logs/run/version_0/config.yaml").read_text()
    assert text.startswith("# fabric-template fit --config with this file is this run again; `about` is for people")
    found = config_of("run/version_0")
    from fabric_template import LoopConfig

    assert {*LoopConfig.__dataclass_fields__} <= {*found}
    assert found["model"] == {"class": "lit:Lit", "hidden": 6, "lr": 0.1, "act": None}
    assert found["data"] == {"class": "lit:Data", "batch_size": 16}
    told = {
        word: found[word] for word in ("max_epochs", "seed", "gradient_clip_val", "monitor", "accelerator", "devices")
    }
    assert told == {
        "max_epochs": 3,
        "seed": 7,
        "gradient_clip_val": 0.5,
        "monitor": None,
        "accelerator": "cpu",
        "devices": 1,
    }
    assert (found["strategy"], found["precision"], found["version"]) == ("auto", None, None)
    assert found["callbacks"][0]["class_path"] == "lightning.pytorch.callbacks.EarlyStopping"
    assert found["callbacks"][0]["init_args"]["monitor"] == "val_loss"
    about = found["about"]
    assert [*about["versions"]] == ["fabric_template", "torch", "lightning", "python"]
    assert about["versions"]["torch"] == torch.__version__
    assert (about["git"], about["unknown"], about["folder"]) == (commit, {}, str(Path.cwd()))
    assert about["command"].startswith("fabric-template fit --model lit:Lit --data lit:Data --accelerator cpu")


def test_every_verb_takes_the_folder(capsys):
    run(capsys, *FIT, *QUIET, *FIVE, "--monitor", "val_loss")
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)  # a newer version, of another model
    folder = ["--run", "logs/run/version_0"]
    for load in ("best", "last"):
        code, out, _ = run(capsys, "validate", *folder, "--load", load)
        assert code == 0
        rows = Path("logs/run/version_0/metrics.csv").read_text().splitlines()
        assert float(re.search(r"val_loss +([\d.]+)", out)[1]) == pytest.approx(float(rows[-1].split(",")[3]), rel=1e-6)
    assert "test_loss" in run(capsys, "test", *folder, "--load", "best")[1]
    assert "predicted   2 batches" in run(capsys, "predict", *folder, "--load", "best")[1]
    file = ["--run", "logs/run/version_0/metrics.csv", "--data.batch_size", 8]  # a file in it will do; typed words win
    assert "predicted   4 batches" in run(capsys, "predict", *file, "--load", "best")[1]
    assert not Path("logs/run/version_2").exists()


def test_a_fit_of_a_folder_begins_anew_or_goes_on_in_it(capsys):
    run(capsys, *FIT, *QUIET, *FIVE)
    begun = Path("logs/run/version_0/config.yaml").read_bytes()
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)  # a newer version
    code, out, _ = run(capsys, "fit", "--run", "logs/run/version_0", "--resume", "last", "--max_epochs", 4)
    assert (code, "4 epochs, 8 steps" in out, "logs/run/version_0/metrics.csv" in out) == (0, True, True)
    assert Path("logs/run/version_0/config.yaml").read_bytes() == begun  # a resume leaves it as it was
    assert re.search(r"go on +fabric-template fit --resume last --run logs/run/version_0 --max_epochs 8", out)
    _, out, _ = run(capsys, "fit", "--run", "logs/run/version_0", "--load", "last", "--max_epochs", 1)
    assert "logs/run/version_2/metrics.csv" in out
    assert re.search(
        r"go on +fabric-template fit --resume last --config logs/run/version_0/config.yaml --max_epochs", out
    )
    assert config_of("run/version_2")["load"].endswith("checkpoints/run/version_0/last.ckpt")
    # which is what a fit began with, and no other verb's word
    assert run(capsys, "fit", "--run", "logs/run/version_2")[0] == 0
    are_the_same_run("run/version_2", "run/version_3")
    assert "the weights are new ones" in run(capsys, "validate", "--run", "logs/run/version_2")[2]


def test_from_another_folder(capsys, monkeypatch):
    run(capsys, *FIT, *QUIET, *FIVE)
    home = Path.cwd()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    monkeypatch.syspath_prepend(home)
    code, out, _ = run(capsys, "validate", "--run", home / "logs/run/version_0", "--load", "last")
    assert (code, "val_loss" in out) == (0, True)
    assert run(capsys, "fit", "--run", home / "logs/run/version_0", "--resume", "last", "--max_epochs", 4)[0] == 0
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--run", "logs"], "--run logs: there is no config.yaml in 'logs' (No such file or directory); type --model and"),
        (["--run", "logs/run"], "--run logs/run: there is no config.yaml in 'logs/run' (No such file or directory); it holds"
         " runs: type --run logs/run/version_0"),
        (["--run", "none"], "--run none: there is no config.yaml in 'none' (No such file or directory); type --model and"),
        (["--run", "moved", "--load", "best"], "--load best with --run moved: expected logs/<name>/version_<n>, with its"
         " checkpoints beside logs: type --load with the path of a checkpoint"),
        (["--run", "logs/run/version_0", "--load", "best"], "--load best: the run logs/run/version_0 has kept no best.ckpt"),
        (["--run", "logs/run/version_0", "--model.depth", "3"], "--model.depth: lit:Lit has no argument 'depth'"),
    ],
)  # fmt: skip
def test_what_is_refused_of_a_folder(capsys, argv, words):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    Path("moved").mkdir()
    Path("moved/config.yaml").write_text(Path("logs/run/version_0/config.yaml").read_text())
    before = sorted(Path().rglob("*"))
    assert refused(capsys, "fit", *argv).startswith(words)
    assert sorted(Path().rglob("*")) == before


def test_a_class_that_moved_or_took_another_argument(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    file = Path("logs/run/version_0/config.yaml")
    text = file.read_text()
    file.write_text(text.replace("lit:Lit", "lit:Moved"))
    assert "--model lit:Moved: there is no class 'Moved'" in refused(capsys, "fit", "--run", "logs/run/version_0")
    code, out, _ = run(capsys, "fit", "--run", "logs/run/version_0", "--model", "lit:Lit", "--print_config")
    assert (code, "class: lit:Lit" in out) == (0, True)
    file.write_text(text.replace("  hidden: 3", "  width: 3"))
    assert refused(capsys, "fit", "--run", "logs/run/version_0").startswith(
        "--model.width: lit:Lit has no argument 'width'"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {class: [1]}", "model.class is [1]: expected package.module:Class"),
        ("1: 2", "expected 'word: value' lines; type --model and --data as its fit had them"),
        ("about: 3", "expected 'word: value' lines; type --model and --data as its fit had them"),
        ("model: lit:Lit\nabout: {unknown: [1, 2], label: x}", None),
        (
            "model: {class: lit:Lit}\nabout: {unknown: {1: 2}}",
            "is of a script, and lacks what only that knows: 1 (2) cannot",
        ),
        ("a: &a [*a]", "its aliases unfold to more than 10,000,000 characters; write less of them"),
    ],
)
def test_what_a_file_may_hold(capsys, text, words):
    Path("logs/x/version_0").mkdir(parents=True)
    Path("logs/x/version_0/config.yaml").write_text(text)
    code, _, err = run(capsys, "fit", "--run", "logs/x/version_0", "--data", "lit:Data", "--print_config")
    assert (code, err.count("\n")) == ((0, 0) if words is None else (2, 1))
    assert words is None or words in err


# ---- of a script

SCRIPT = """
import torch
from lightning.pytorch import LightningModule
from lit import Data, Lit, Hears

class Kept(Lit, LightningModule):
    def __init__(self, hidden: int = 3, lr: float = 0.1, act=None):
        super().__init__(hidden, lr)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        return Lit.training_step(self, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", Lit.training_step(self, batch))
"""
WORDS = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


@pytest.fixture
def mine(monkeypatch):
    """A module of one's own, beside lit."""
    import importlib

    Path("lit.py").write_text(LIT + HEAR)
    Path("mine.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    import sys

    sys.modules.pop("lit", None)
    yield importlib.import_module("mine")
    sys.modules.pop("mine", None)


def test_a_script_that_keeps_its_hyperparameters_is_rebuilt(capsys, mine):
    loop = FabricLoop(seed=4, max_time={"minutes": 3}, **WORDS)
    loop.fit(mine.Kept(hidden=5), datamodule=mine.Data())
    found = config_of("run/version_0")
    assert found["model"] == {"class": "mine:Kept", "hidden": 5, "lr": 0.1, "act": None}
    assert (found["max_time"], found["devices"]) == ({"minutes": 3}, 1)
    assert found["about"]["unknown"] == {"data.batch_size": "not kept by save_hyperparameters"}
    assert run(capsys, "fit", "--config", "logs/run/version_0/config.yaml")[::2] == (
        0, "fabric-template: not known of that run, and taken as by default: --data.batch_size\n",
    )  # fmt: skip
    are_the_same_run(
        "run/version_0", "run/version_1"
    )  # the seed is set when the loop is made, before the model, in both


def test_what_only_a_script_knows_is_asked_for(capsys, mine):
    net, data = mine.Lit(hidden=5, act=torch.nn.PReLU()), mine.Data()

    def step(model, batch):
        return Lit.training_step(model, batch)

    Lit, words = mine.Lit, {**WORDS, "callbacks": [mine.Hears()]}
    FabricLoop(**words).fit(net, data.train_dataloader(), optimizer=net.configure_optimizers(), training_step=step)
    unknown = config_of("run/version_0")["about"]["unknown"]
    assert unknown == {
        **dict.fromkeys(("model.hidden", "model.lr", "model.act"), "not kept by save_hyperparameters"),
        "data": "fit was given loaders",
        "training_step": f"{__name__}.test_what_only_a_script_knows_is_asked_for.<locals>.step",
        "optimizer": "an object: SGD",
        "callbacks": "objects: Hears",
    }
    folder = ["--run", "logs/run/version_0"]
    capsys.readouterr()
    assert refused(capsys, "fit", *folder) == (
        "--run logs/run/version_0 is of a script, and lacks what only that knows: type --data (fit was given loaders) and"
        f" --callbacks (objects: Hears); training_step ({unknown['training_step']}) and optimizer (an object: SGD) cannot be"
        " typed: run its script again, or type --model with a class that has it"
    )
    assert refused(capsys, "validate", *folder).endswith(
        "lacks what only that knows: type --data (fit was given loaders)"
    )
    typed_words = ["--data", "lit:Data", "--model.hidden", 5, "--model.act", "torch.nn.PReLU", "--load", "last"]
    code, out, err = run(capsys, "validate", *folder, *typed_words)
    assert (code, "val_loss" in out) == (0, True)
    assert err == "fabric-template: not known of that run, and taken as by default: --model.lr\n"
    assert run(capsys, "fit", *folder, "--model", "lit:Lit", "--data", "lit:Data", "--callbacks", "null")[0] == 0


def test_a_class_of_no_module_and_a_ready_fabric_are_named(mine):
    from lightning.fabric import Fabric

    class Here(mine.Kept):
        pass

    words = {word: value for word, value in WORDS.items() if word not in ("accelerator", "devices")}
    FabricLoop(Fabric(accelerator="cpu", devices=1), **words).fit(Here(hidden=5), datamodule=mine.Data())
    found = config_of("run/version_0")
    assert found["model"] == {"hidden": 5, "lr": 0.1, "act": None}  # for a class that is typed
    assert found["about"]["unknown"]["model"] == (
        f"test_a_class_of_no_module_and_a_ready_fabric_are_named.<locals>.Here of {__name__}, which nothing else can import"
    )
    assert found["about"]["unknown"]["accelerator"] == "an object: Fabric"
    assert "accelerator" not in found
