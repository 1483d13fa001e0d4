"""The command line: what it prints, what it refuses and in which words; and the same run under every launcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clock import DURATION
from interpreter import ready, ready_python
from ports import free_port

from fabric_template.files.reading import read_checkpoint
from fabric_template.tools import cli
from fabric_template.tools import typed as typed_commands

REPOSITORY = Path(__file__).resolve().parents[2]
LIT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(nn.Module):
    '''Something to train.

    Args:
        hidden: Width of the layer between.
        lr: Learning rate.
    '''

    def __init__(self, hidden: int = 3, lr: float = 0.1, act: nn.Module | None = None):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, hidden), act or nn.Identity(), nn.Linear(hidden, 1))

    def training_step(self, batch):
        return (self.net(batch[0]) - 1).pow(2).mean()

    validation_step = test_step = training_step

    def predict_step(self, batch):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data:
    def __init__(self, batch_size: int = 8):
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Broken(Lit):
    def training_step(self, batch):
        raise ValueError("inside the step")


class Picky(Lit):
    def __init__(self, size: int = 0):
        raise ValueError("inside the constructor")


def make_wide(factor: int = 2):
    return Lit(hidden=3 * factor)
"""


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    """As if typed in a shell, in a folder with a module of the user's own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fabric-template"])
    monkeypatch.setattr(typed_commands.shutil, "which", lambda name: None)
    Path("lit.py").write_text(LIT)
    yield
    sys.modules.pop("lit", None)


FIT = ["fit", "--model", "lit:Lit", "--data", "lit:Data", "--accelerator", "cpu", "--devices", "1"]
QUIET = ["--enable_model_summary", "false"]


def run(capsys, *argv):
    """(exit code, stdout, stderr)."""
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys, *argv):
    """The one line on stderr of what is refused."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err.strip().removeprefix("fabric-template: ")


# ---- help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_verbs(capsys, argv):
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(cli.VERBS)


def test_help_needs_no_torch():
    code = "import sys; from fabric_template.tools.cli import main; main(); print({'torch', 'jsonargparse'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.endswith("set()\n")


def test_the_package_is_lazy_and_whole():
    import fabric_template

    assert {*fabric_template.__all__} <= {*dir(fabric_template)}
    assert all(getattr(fabric_template, name) is not None for name in fabric_template.__all__)
    with pytest.raises(AttributeError, match="module 'fabric_template' has no attribute 'FabricLop'"):
        _ = fabric_template.FabricLop


def test_fit_help_has_every_field_with_its_own_words(capsys):
    from fabric_template import LoopConfig

    code, out, _ = run(capsys, *FIT, "--help")
    text = " ".join(out.split())
    assert code == 0
    assert all(f"--{word} " in text for word in LoopConfig.__dataclass_fields__)
    assert "--max_epochs MAX_EPOCHS Stop after this many epochs. -1: no limit." in text
    assert "--monitor MONITOR The metric that says which checkpoint is best, asked after" in text
    assert "--precision PRECISION" in text
    assert "--model PACKAGE.MODULE:CLASS The model. (default: lit:Lit)" in text
    assert "--model.hidden HIDDEN Width of the layer between. (type: int, default: 3)" in text
    assert "--data.batch_size BATCH_SIZE (type: int, default: 8)" in text
    assert "--model.class" not in text


def test_version(capsys):
    from fabric_template import __version__

    assert run(capsys, "--version") == (0, f"fabric_template {__version__}\n", "")


# ---- fit and its kin


def test_the_default_trains_the_digits_and_says_what_to_type_next(capsys):
    code, out, _ = run(capsys, "fit", "--max_epochs", "1", *QUIET)
    assert code == 0
    assert re.search(rf"^trained     DigitsClassifier on DigitsData: 1 epoch, 20 steps, {DURATION}$", out, re.MULTILINE)
    assert re.search(
        r"^at the end  train_loss [\d.]+, train_acc [\d.]+, val_loss [\d.]+, val_acc 0\.\d+$", out, re.MULTILINE
    )
    assert re.search(r"^best        val_acc 0\.\d+ in epoch 0$", out, re.MULTILINE)
    places = dict(re.findall(r"^(log|picture)\s+(.*)$", out, re.MULTILINE))
    assert places == {"log": "logs/digits/version_0/metrics.csv", "picture": "logs/digits/version_0/history.png"}
    kept = re.findall(r"^checkpoint  (.*)$", out, re.MULTILINE)
    assert kept == [f"checkpoints/digits/version_0/{name}.ckpt" for name in ("best", "last")]
    assert all(Path(path).stat().st_size for path in [*places.values(), *kept])

    go_on, plot = re.findall(r"^(?:go on|plot) +fabric-template (.*)$", out, re.MULTILINE)
    assert go_on == "fit --resume last --max_epochs 2 --enable_model_summary false"
    code, out, _ = run(capsys, *go_on.split())
    assert code == 0
    assert "2 epochs, 40 steps" in out
    assert len(Path("logs/digits/version_0/metrics.csv").read_text().splitlines()) == 3
    assert run(capsys, *plot.split()) == (0, "picture     logs/digits/version_0/history.png\n", "")


def test_the_ten_epochs_of_the_default(capsys):
    cli.main(["fit", "--print_config"])
    out = capsys.readouterr().out
    for line in ("max_epochs: 10", "name: digits", "monitor: val_acc", "mode: max", "seed: 0"):
        assert f"{line}\n" in out


def test_fit_with_a_model_of_ones_own(capsys):
    code, out, _ = run(
        capsys, *FIT, "--max_epochs", 2, "--precision", "bf16-mixed", "--model.hidden", 7, "--data.batch_size", 16
    )
    assert code == 0
    assert "trained     Lit on Data: 2 epochs, 4 steps" in out
    assert "best " not in out  # no monitor
    weights = read_checkpoint("checkpoints/run/version_0/last.ckpt")["state_dict"]
    assert weights["net.0.weight"].shape == (7, 4)


def test_dotted_paths_and_functions(capsys):
    code, out, _ = run(
        capsys, "fit", "--model=lit.make_wide", "--model.factor=3", "--data=lit.Data", "--max_epochs=1", *QUIET
    )
    assert code == 0
    assert "trained     Lit on Data: 1 epoch," in out
    assert read_checkpoint("checkpoints/run/version_0/last.ckpt")["state_dict"]["net.0.weight"].shape == (9, 4)


def test_the_seed_makes_the_first_weights_too(capsys):
    for name in ("a", "b"):
        torch.rand(3)
        assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--seed", 5, "--name", name)[0] == 0
    a, b = (read_checkpoint(f"checkpoints/{name}/version_0/last.ckpt")["state_dict"] for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_switch_needs_no_value(capsys):
    code, out, _ = run(capsys, *FIT, *QUIET, "--fast_dev_run")
    assert code == 0
    assert "1 epoch, 1 step," in out
    assert not Path("logs").exists()
    assert not Path("checkpoints").exists()
    assert "go on" not in out


def test_resume_and_load(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    assert "3 epochs, 12 steps" in run(capsys, *FIT, *QUIET, "--max_epochs", 3, "--resume", "last")[1]
    code, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--load", "checkpoints/run/version_0/last.ckpt")
    assert (code, "1 epoch, 4 steps" in out) == (0, True)
    assert "logs/run/version_1/metrics.csv" in out
    last = refused(capsys, *FIT, "--resume", "last", "--name", "other")
    assert last == (
        "--resume=last: there is no last.ckpt under 'checkpoints/other'; expected a run with --name=other to have saved"
        " one: leave resume out to start anew, or give a path"
    )


def test_validate_test_and_predict(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    code, out, err = run(capsys, "validate", *FIT[1:], "--load", "last")
    assert (code, err) == (0, "")
    assert "val_loss" in out
    code, out, err = run(capsys, "test", *FIT[1:])
    assert (code, "test_loss" in out) == (0, True)
    assert err == "fabric-template: the weights are new ones; --load best takes those of the last fit\n"
    code, out, err = run(capsys, "predict", *FIT[1:], "--load", "last", "--out", "p.pt")
    assert (code, err) == (0, "")
    assert out == "predicted   4 batches; the first: tensor([0, 0, 0, 0, 0, 0, 0, 0])\nsaved       p.pt\n"
    assert len(torch.load("p.pt")) == 4


def test_print_config_can_be_fed_back(capsys):
    words = ["--max_epochs", 2, "--model.hidden", 5, "--data.batch_size", 16, "--seed", 3, *QUIET]
    _, printed, _ = run(capsys, *FIT, *words, "--print_config")
    Path("run.yaml").write_text(printed)
    assert run(capsys, "fit", "--config", "run.yaml", "--print_config") == (0, printed, "")
    run(capsys, *FIT, *words)
    run(capsys, "fit", "--config", "run.yaml")
    a, b = (read_checkpoint(f"checkpoints/run/version_{i}/last.ckpt")["state_dict"] for i in (0, 1))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_what_is_typed_beats_the_file(capsys):
    Path("run.yaml").write_text("model: {class_path: lit.Lit, init_args: {hidden: 5}}\ndata: lit:Data\nmax_epochs: 7\n")
    code, out, _ = run(capsys, "fit", "--max_epochs", 1, "--config", "run.yaml", "--model.lr", 0.2, "--print_config")
    assert code == 0
    for line in ("max_epochs: 1", "  class: lit.Lit", "  hidden: 5", "  lr: 0.2", "  class: lit:Data"):
        assert f"{line}\n" in out


def test_an_object_as_an_argument(capsys):
    code, _, _ = run(capsys, *FIT, "--max_epochs", 1, "--model.act", "torch.nn.PReLU")
    assert code == 0
    assert "net.1.weight" in read_checkpoint("checkpoints/run/version_0/last.ckpt")["state_dict"]


# ---- errors


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["fut"],
            "there is no 'fut': expected one of fit, validate, test, predict, plot, runs, profile, compare, tune, copy,"
            " diff, update, verify",
        ),
        (["fit", "--max_epoch", "3"], "fit has no option --max_epoch: did you mean --max_epochs?"),
        (
            ["fit", "--ckpt_path=a"],
            "fit has no option --ckpt_path: give the path to fit as --resume= (continue the run) or --load= (weights only)",
        ),
        (
            ["fit", "--plugins", "x"],
            "fit has no option --plugins: objects are given in a script, FabricLoop(plugins=...)",
        ),
        (
            ["validate", "--zzzz", "x"],
            "validate has no option --zzzz: fabric-template validate --help lists what there is",
        ),
        (["fit", "ten"], "'ten' has no option before it: expected options, such as --max_epochs 10"),
        (["fit", "--max_epochs"], "--max_epochs has no value: expected --max_epochs VALUE"),
        (
            [*FIT, "--max_epochs", "ten"],
            "--max_epochs=ten: expected None, -1 (no limit) or an int >= 0",
        ),
        (
            [*FIT, "--min_epochs", "-7", "--seed=-1"],
            "--min_epochs=-7: expected None or an int >= 0; --seed=-1: expected None or an int from 0 to 4294967295",
        ),
        (
            [*FIT, "--model.depth", "3"],
            "--model.depth: lit:Lit has no argument 'depth'; its arguments are --model.hidden, --model.lr, --model.act",
        ),
        ([*FIT, "--model.hidden", "wide"], "--model.hidden=wide: expected int"),
        (
            [*FIT[:3], "--data.batch_size", "3"],
            "--data.batch_size without --data: expected --data package.module:Class",
        ),
        (["fit", "--model", "lit"], "--model lit: expected package.module:Class"),
        (["fit", "--model", "lit.py:Lit"], "--model lit.py:Lit: expected a module, not a file: write --model lit:Lit"),
        (
            [*FIT, "--accelerator", "tpux"],
            "You selected an invalid accelerator name: `--accelerator=tpux`. Available names are: ",
        ),
        (
            FIT[:3],
            "fit has no train loader; give --data package.module:Class, or write a method train_dataloader in Lit",
        ),
        (["fit", "--data.batch_size", "0"], "DigitsData(batch_size): got 0, expected at least 1. "),
        (
            ["fit", "--config", "no.yaml"],
            "--config no.yaml: No such file or directory; --print_config writes such a file",
        ),
        (["fit", "--config", "lit.py"], "--config lit.py: this is no YAML: "),
        ([*FIT, "--load=a", "--resume=b"], "--resume=b, --load=a: expected one of them; "),
    ],
)
def test_what_is_refused_and_how(capsys, argv, words):
    line = refused(capsys, *argv)
    assert line.startswith(words) if words.endswith(" ") else line == words
    assert not Path("logs").exists()
    assert not Path("checkpoints").exists()


def test_a_wrong_path_says_where_it_was_looked_for(capsys):
    assert refused(capsys, "fit", "--model", "lit:Lot") == (
        f"--model lit:Lot: there is no class 'Lot' in '{Path('lit.py').resolve()}'; it has Lit, Data, Broken, Picky"
    )
    assert refused(capsys, "fit", "--model", "lot.net:Lit") == (
        f"--model lot.net:Lit: there is no module 'lot', neither in '{os.getcwd()}' nor among the installed packages"
    )


def test_a_file_with_an_unknown_word(capsys):
    Path("run.yaml").write_text("max_epoch: 3\nmodel: {class: lit:Lit, depth: 3}\n")
    assert refused(capsys, "fit", "--config", "run.yaml") == "fit has no option --max_epoch: did you mean --max_epochs?"
    Path("run.yaml").write_text("model: {class: lit:Lit, depth: 3}\n")
    assert "--model.depth: lit:Lit has no argument 'depth'" in refused(capsys, "fit", "--config", "run.yaml")


def test_errors_in_code_of_ones_own_keep_their_traceback():
    with pytest.raises(ValueError, match="inside the step"):
        cli.main(["fit", "--model", "lit:Broken", *FIT[3:], *QUIET])
    with pytest.raises(ValueError, match="inside the constructor"):
        cli.main(["fit", "--model", "lit:Picky", *FIT[3:]])
    Path("lit.py").write_text("import nothing_of_this_name\n")
    sys.modules.pop("lit")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        cli.main(FIT)


def test_a_monitor_that_was_not_logged_is_one_line(capsys):
    code, _, err = run(capsys, *FIT, *QUIET, "--max_epochs", 2, "--monitor", "val_ac")
    assert code == 2
    assert "--monitor=val_ac was not logged in epoch 0; logged were ['lr', 'train_loss', 'val_loss']" in err


# ---- plot, copy, verify


def test_plot_says_where_the_picture_is(capsys):
    for name in ("a", "b"):
        run(capsys, *FIT, *QUIET, "--max_epochs", 2, "--name", name)
    assert run(capsys, "plot") == (0, "picture     logs/history.png\n", "")
    assert run(capsys, "plot", "logs/a/version_0/metrics.csv", "logs/b", "--metrics", "val_loss", "--out", "x.png") == (
        0, "picture     x.png\n", "",
    )  # fmt: skip
    assert Path("logs/history.png").stat().st_size
    assert Path("x.png").stat().st_size
    assert "metrics: got 'acc', expected one of the columns" in refused(capsys, "plot", "logs", "--metrics", "acc")
    assert "read_logs: 'nowhere' does not exist" in refused(capsys, "plot", "nowhere")
    assert refused(capsys, "plot", "--out", "no/x.png").startswith("out: got 'no/x.png', expected")


def test_a_copy_has_the_command_line_too(tmp_path):
    cli.main(["copy", "my_loop"])
    command = ready([sys.executable, "-m", "my_loop", *FIT, "--max_epochs", "1"])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "go on       python -m my_loop fit --resume last" in done.stdout


def test_verify(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--monitor", "val_loss")
    folder = Path("checkpoints/run/version_0")
    assert run(capsys, "verify", "checkpoints") == (
        0,
        f"whole       {folder}/best.ckpt\nwhole       {folder}/last.ckpt\n",
        "",
    )
    data = (folder / "last.ckpt").read_bytes()
    (folder / "last.ckpt").write_bytes(data[: len(data) // 2])
    code, out, _ = run(capsys, "verify", folder)
    assert code == 1
    assert out.startswith(f"whole       {folder}/best.ckpt\nunusable    '{folder}/last.ckpt' ")
    assert run(capsys, "verify", folder / "last.ckpt")[0] == 1
    assert run(capsys, "verify", "nothing.ckpt")[0] == 1
    Path("empty").mkdir()
    assert refused(capsys, "verify", "empty").startswith("verify empty: there is no checkpoint in this folder")


# ---- the same run under every launcher

SCRIPT = """
import sys

import torch
from fabric_template import FabricLoop
from lit import Data, Lit

if __name__ == "__main__":
    loop = FabricLoop(accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=2, monitor="val_loss", seed=1,
                      enable_model_summary=False)
    torch.manual_seed(3)
    model = Lit()
    before = [p.detach().clone() for p in model.parameters()]
    history = loop.fit(model, Data())
    changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    last, best = (str(loop.checkpoint_path(word)) for word in ("last", "best"))
    torch.save({"weights": model.state_dict(), "epochs": history["epoch"].tolist(), "changed": changed, "last": last,
                "best": best, "step": loop.global_step}, f"rank{loop.global_rank}.pt")
"""
PYTHON = [sys.executable]
FABRIC = [*PYTHON, "-c", "from lightning.fabric.cli import _main; _main()", "run"]
FABRIC += ["--accelerator=cpu", "--devices=2", "--strategy=ddp"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize(
    ("launcher", "strategy", "ranks"),
    [(PYTHON, "ddp", 2), (FABRIC, "ddp", 2), (TORCHRUN, "ddp", 2), (PYTHON, "ddp_spawn", 1), (PYTHON, "ddp_fork", 1)],
    ids=["python", "fabric-run", "torchrun", "spawn", "fork"],
)
def test_the_same_script_under_every_launcher(launcher, strategy, ranks):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment["READY_PYTHON"] = ready_python()  # for those that it starts
    if launcher is FABRIC:
        launcher = [*FABRIC, f"--main-port={free_port()}"]  # a fixed one otherwise: two suites at once would meet there
    for attempt in ("first", "second"):
        Path(attempt).mkdir()
        os.chdir(attempt)
        Path("lit.py").write_text(LIT)
        Path("script.py").write_text(SCRIPT)
        command = ready([*launcher, "script.py", strategy])
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        # On a busy machine one of gloo's threads may meet the interpreter's end after all is done: torch's, see
        # https://github.com/pytorch/pytorch/pull/179291
        if "terminate called without an active exception" not in done.stderr:
            break
        os.chdir("..")
    assert done.returncode == 0, done.stderr
    found = [torch.load(path) for path in sorted(Path().glob("rank*.pt"))]
    assert len(found) == ranks  # spawned processes end inside fit: only the caller goes on, with what they learned
    kept = read_checkpoint("checkpoints/run/version_0/last.ckpt")["state_dict"]
    for result in found:
        assert (result["epochs"], result["step"], result["changed"]) == ([0, 1], 4, True)
        assert all(torch.equal(kept[key], value) for key, value in result["weights"].items())
        assert [result["last"], result["best"]] == [
            f"checkpoints/run/version_0/{name}.ckpt" for name in ("last", "best")
        ]
    files = sorted(path.as_posix() for folder in ("logs", "checkpoints") for path in Path(folder).rglob("[!.]*.*"))
    assert files == [
        "checkpoints/run/version_0/best.ckpt",
        "checkpoints/run/version_0/last.ckpt",
        "logs/run/version_0/config.yaml",
        "logs/run/version_0/hparams.yaml",
        "logs/run/version_0/metrics.csv",
    ]
    assert len(Path("logs/run/version_0/metrics.csv").read_text().splitlines()) == 3
