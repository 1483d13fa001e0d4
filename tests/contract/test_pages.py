"""Test the code blocks, commands, links, figures and tables of README.md and docs/.

The Python blocks of a page run as one program, in their own process and folder.
"""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

# Import these packages before forking a process for each page, because each page would otherwise spend seconds on them.
import lightning.pytorch
import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import pytest
import sklearn.datasets
import torch
import yaml
from interpreter import fork_command, forking_python
from lightning_utilities.core.imports import RequirementCache
from processes import run_processes

from fabric_template import FabricLoop, MiniLoop
from fabric_template.config import LoopConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
}
README = PAGES["README.md"]
AGENTS = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
TRAINER_PAGE = PAGES["docs/coming-from.md"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "CUDA_VISIBLE_DEVICES": "",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
}
# A code block that imports one of these packages is left out if the package is not installed.
OPTIONAL = ("transformers", "optuna", "mlflow")
# A line that ends in a comment such as "# needs lightning>=2.6" is left out if the installed Lightning is older.
NEWER_LINE = re.compile(r"^.*  # needs (lightning>=[\d.]+).*$", re.M)


def run_page(rank, page, sources, check):
    """Run a page's code blocks as one program. All warnings except those of Trainer are errors."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
    of_trainer = "does not have many workers|smaller than the logging interval|GPU available"
    of_trainer += "|args parameter is|requested to overfit|in eval mode at the start of training"
    warnings.filterwarnings("ignore", f"(?s).*({of_trainer}|not supported by the model summary)")
    # Ignore two warnings: the lowest supported matplotlib calls deprecated pyparsing
    # functions, and SequentialLR in torch 2.6 passes its schedulers a deprecated argument.
    warnings.filterwarnings("ignore", r"'\w+' (argument is )?deprecated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")
    torch.manual_seed(torch.initial_seed())
    if page == "README.md":
        # Copy mini.py, because the script in the README imports such a copy.
        shutil.copy(REPOSITORY / "fabric_template" / "mini.py", ".")
        sys.path.insert(0, os.getcwd())
    # Run the pages with an eighth of the digits dataset, which is faster.
    load_digits = sklearn.datasets.load_digits
    digits = load_digits()
    few = sklearn.utils.Bunch(**{name: digits[name][::8] for name in ("data", "images", "target")})
    sklearn.datasets.load_digits = lambda **options: load_digits(**options) if options else few
    names = {"__name__": "__main__"}
    for line, source in sources:
        exec(compile("\n" * line + source, page, "exec"), names)
    assert eval(check, {"same": same, "Path": Path}, names), check


def same(net, other):
    net, other = net.state_dict(), other.state_dict()
    return all(torch.equal(net[key], other[key]) for key in net)


# Map each page to an expression that must be true after the page's code blocks have run.
CHECKS = {
    "README.md": "history['epoch'].tolist() == list(range(10))",
    "docs/callbacks.md": "history['noisy_norm'].iloc[0] > 0",
    "docs/checkpoints.md": "state['global_step'] > 0",
    "docs/fine-tuning.md": "[g['lr'] for g in loop.optimizers[0].param_groups] == [1e-3, 1e-4]",
    "docs/levels.md": "same(plain_net, net_by_fit) and rest['epoch'] == 2",
    "docs/recipes.md": (
        "gan_history['step'].tolist() == [16, 32, 48] and lbfgs_history['train_loss'].iloc[-1] < 1e-3"
        " and wave_history['train_loss'].iloc[-1] < wave_history['train_loss'].iloc[0] / 2"
        " and 0 < folds['mean'] < 1"
        " and f1_history['val_f1'].iloc[-1] > f1_history['val_f1'].iloc[0] > 0"
        " and sklearn_history['val_f1'].iloc[-1] > sklearn_history['val_f1'].iloc[0] > 0"
        " and both_history['step'].tolist() == [8, 16]"
        " and (ema_history['val_current_loss'] != ema_history['val_loss']).all()"
        " and penalty_history['val_penalty'].iloc[-1] > 0 and list(Path('logs/boards').rglob('events*'))"
        " and stored_history['epoch'].tolist() == [0, 1, 2, 3] and not list(Path('checkpoints/stored').rglob('*.ckpt'))"
    ),
    "docs/troubleshooting.md": (
        "rates['lr'].tolist() == [1e-3, 1e-4] and len(fitting) == len(own) - 3"
        " and overfit['train_loss'].iloc[-1] < overfit['train_loss'].iloc[0] / 2"
    ),
}


def blocks(text, language):
    """Return (line, source) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def commands(text):
    lines = [line.split("  #")[0].strip() for _, source in blocks(text, "bash") for line in source.splitlines()]
    return [line for line in lines if line]


ALL_COMMANDS = [line for text in PAGES.values() for line in commands(text)]


def section(text, title):
    """Return the text below a title, up to the next title of the same level."""
    level = title.split()[0]
    return re.search(rf"^{re.escape(title)}\n(.*?)(?=^{level} |\Z)", text, re.M | re.S)[1]


# Skip docs/ray.md here: Ray's workers need a script, so tests/distributed/test_ray.py runs this page.
@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if blocks(text, "python") and page != "docs/ray.md"]
)
def test_every_python_block_of_the_documentation_runs_without_errors(page, tmp_path):
    missing = {package for package in OPTIONAL if not find_spec(package)}
    text = NEWER_LINE.sub(lambda line: line[0] if RequirementCache(line[1]) else "", PAGES[page])
    sources = [
        (line, source)
        for line, source in blocks(text, "python")
        if not missing & set(re.findall(r"^(?:import|from) (\w+)", source, re.M))
    ]
    codes, errors = run_processes(run_page, page, sources, CHECKS.get(page, "True"), ranks=1, is_launched=False)
    assert codes == [0], errors[0][-3000:]


# Test of validation on a second loader in a callback

SECOND = """
import sys

import lightning.pytorch as pl
import torchmetrics
from fabric_template import read_logs
from lightning.pytorch.utilities.seed import isolate_rng


class ValidateSecond:
    def __init__(self, loader, **functions):
        self.loader, self.functions = loader, functions

    def on_train_batch_end(self, loop, net, outputs, batch, batch_idx):
        if (batch_idx + 1) % 4 == 0:
            options = {"logger": False, "inference_mode": False, "enable_model_summary": False}
            other = FabricLoop(loop.fabric, enable_progress_bar=False, **options)
            with isolate_rng():
                row = other.validate(net, self.loader, verbose=False, **self.functions)[0]
            values = {f"second_{name}": value for name, value in row.items()}
            loop.log_dict(values, step=loop.global_step)


data = TensorLoader(x[:64], x[:64].sum(1, keepdim=True), batch_size=8, shuffle=True)
# A DataLoader draws a random number in each epoch, even if it does not shuffle.
other = DataLoader(TensorDataset(torch.ones(6, 8), torch.full((6, 1), 5.0)), batch_size=4)


def same(net, other):
    return all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        self.net, self.error = nn.Sequential(*layers), torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx=0):
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.error(self.net(batch[0]), batch[1])
        values = {"val_loss": mse_loss(self.net(batch[0]), batch[1]), "val_error": self.error}
        self.log_dict(values, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_lit(name, has_second=True, epochs=2, is_plain=False, resume=None, **options):
    torch.manual_seed(0)
    lit = Lit()
    given, functions = {}, {}
    if is_plain:
        lit = lit.net
        functions = {"validation_step": lambda net, batch: mse_loss(net(batch[0]), batch[1])}
        given = {"training_step": functions["validation_step"], "optimizer": torch.optim.SGD(lit.parameters(), 0.01)}
    callbacks = [ValidateSecond(other, **functions)] if has_second else []
    loop = FabricLoop(accelerator="cpu", name=name, max_epochs=epochs, callbacks=callbacks, **options)
    loop.fit(lit, data, data, resume=resume, **functions, **given)
    return lit, read_logs(f"logs/{name}/version_0")


def steps_of(name):
    return read_logs(f"logs/{name}/version_0/steps.csv")


plain, _ = train_lit("plain", has_second=False, is_plain=True)
assert same(plain, train_lit("with", is_plain=True)[0])
settings = [{}, {"val_check_interval": 3, "accumulate_grad_batches": 2}, {"strategy": "ddp_fork", "devices": 2}]
for index, options in enumerate(settings if sys.platform == "linux" else settings[:2]):
    lit, rows = train_lit(f"lit{index}", **options)
    alone, expected = train_lit(f"alone{index}", has_second=False, **options)
    assert same(lit, alone)
    for name in ("train_loss", "val_loss", "val_error"):
        assert rows[name].tolist() == expected[name].tolist(), (options, name)
    loss = mse_loss(lit.eval().net(torch.ones(1, 8)), torch.full((1, 1), 5.0)).item()
    last = steps_of(f"lit{index}").dropna(axis=1, how="all").iloc[-1]
    assert abs(last["second_val_loss"] - loss) < 1e-4 and abs(last["second_val_error"] - loss) < 1e-4
assert steps_of("lit0")["step"].tolist() == [4, 8, 12, 16]
train_lit("cut", epochs=1)
train_lit("cut", resume="last")
assert steps_of("cut").equals(steps_of("lit0").assign(name="cut"))
"""


def test_validating_a_second_loader_in_a_callback_does_not_change_training(tmp_path):
    sources = [blocks(PAGES["docs/recipes.md"], "python")[0], (0, SECOND)]
    codes, errors = run_processes(run_page, "recipes", sources, "True", ranks=1, is_launched=False)
    assert codes == [0], errors[0][-3000:]


# Tests of the documented recipe for averaged weights, and of the pages' layout

AVERAGED = """
def same(net, other):
    return all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


plain_step = step


def make_net():
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    return nn.Sequential(*layers)


def run_recipe(name, kind, last_batch=None):
    def step(net, batch):
        if net.training and loop_of["run"].global_step == last_batch:
            raise KeyError("stop")
        return plain_step(net, batch)

    def make_loop(**options):
        options |= {"accumulate_grad_batches": 3, "validate_every_n_steps": 2, "accelerator": "cpu"}
        loop_of["run"] = kind(**{**options, "name": name})
        return loop_of["run"]

    loop_of = {}
    source = RECIPE.replace("optimizer=optimizer", 'optimizer=optimizer, resume="auto"')
    names = {**globals(), "make_net": make_net, "step": step, "MiniLoop": make_loop}
    exec(source, names)
    return names


for kind in (MiniLoop, FabricLoop):
    whole = run_recipe(f"whole_{kind.__name__}", kind)
    try:
        run_recipe(f"cut_{kind.__name__}", kind, last_batch=4)
    except KeyError:
        cut = run_recipe(f"cut_{kind.__name__}", kind)
    assert same(whole["pair"], cut["pair"])
    assert whole["ema_history"]["val_loss"].equals(cut["ema_history"]["val_loss"])
    assert whole["average"].n_averaged == 6  # Each epoch has 8 batches, and so 3 optimizer steps.
    saved = torch.load(f"checkpoints/whole_{kind.__name__}/version_0/best.ckpt")["state_dict"]
    weights = {k.removeprefix("average.module."): v for k, v in saved.items() if "average.module." in k}
    net = make_net().eval()
    net.load_state_dict(weights)
    losses = [plain_step(net, batch).item() * len(batch[0]) for batch in val]
    assert abs(sum(losses) / 64 - whole["ema_history"]["val_loss"].min()) < 1e-6
"""


def test_the_recipe_for_averaged_weights_saves_and_restores_the_averages_exactly(tmp_path):
    text = PAGES["docs/recipes.md"]
    title = "## Validate and save averaged weights (EMA), with MiniLoop or FabricLoop"
    ((_, recipe),) = blocks(section(text, title), "python")
    sources = [blocks(text, "python")[0], (0, f"RECIPE = {recipe!r}"), (0, AVERAGED)]
    codes, errors = run_processes(run_page, "recipes", sources, "True", ranks=1, is_launched=False)
    assert codes == [0], errors[0][-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_each_documentation_page_starts_with_code_and_has_no_broken_markdown(page):
    """On the site, <name> outside of code is an HTML tag.

    Long code lines are cut off, and only lists indented by four spaces are nested.
    """
    opened = re.findall(r"^```(.*)$", PAGES[page], re.M)
    assert set(opened[::2]) <= {"python", "bash", "text", "diff"}
    assert set(opened[1::2]) <= {""}
    if page != "README.md":
        assert re.match(r"# .*\n```(python|bash)\n", PAGES[page])
    code = "".join(source for _, source in blocks(PAGES[page], r"\w+"))
    assert [line for line in code.splitlines() if len(line) > 100] == []
    assert re.findall(r"<\w+", re.sub(r"`[^`]*`", "", prose_of(PAGES[page]))) == []
    assert re.findall(r"^ {1,3}[-*] .*", prose_of(PAGES[page]), re.M) == []


def prose_of(text):
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


# Tests of README.md


def test_the_readme_is_short_and_starts_with_a_picture_and_a_script():
    assert len(README.splitlines()) <= 160
    assert README.index("![") < 500
    assert README.index("```python") < README.index("```bash") < README.index("```diff")
    sizes = [(REPOSITORY / path).stat().st_size for path in re.findall(r"!\[.*?\]\((.*?)\)", README)]
    assert sum(sizes) < 1_000_000


def test_the_readme_states_the_number_of_lines_of_both_loops():
    package = REPOSITORY / "fabric_template"
    files = {path.relative_to(package): path for path in package.rglob("*.py")}
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    mini = lines.pop(Path("mini.py"))
    loop = sum(count for name, count in lines.items() if name.parts[0] not in ("tools", "demos"))
    stated = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) lines", README)]
    # The README states how many lines of mini.py train, validate and log. They end at the comment "# Checkpoints".
    training = (package / "mini.py").read_text(encoding="utf-8").splitlines().index("    # Checkpoints")
    assert stated == [pytest.approx(number, rel=0.15) for number in (mini, training, loop)]


START = """
import torch
from torch.nn.functional import cross_entropy
from mini import MiniLoop
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(152, 1, 8, 8), torch.arange(152) % 10)
train = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
"""


def compare_scripts(folder, **scripts):
    """Return what `fabric-template compare old.py new.py` prints."""
    shutil.copy(REPOSITORY / "fabric_template" / "mini.py", folder)
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(START + script)
    command = [sys.executable, "-m", "fabric_template", "compare", "old.py", "new.py"]
    environment = {**ENVIRONMENT, "FORKING_PYTHON": forking_python()}
    done = subprocess.run(fork_command(command), capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_old_and_new_training_loops_in_the_readme_give_equal_results(tmp_path):
    ((_, diff),) = blocks(README, "diff")
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    assert compare_scripts(tmp_path, old=old, new=new).startswith("equal    no difference in 15 steps")


def test_the_measured_numbers_in_the_readme_are_in_results_md():
    results = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])", section(README, "## Measured")))
    assert len(figures) > 4
    assert {
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", results)
    } == set()


# Tests of AGENTS.md


def test_agents_md_is_short_and_mentions_only_existing_files():
    assert len(AGENTS.splitlines()) <= 80
    named = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+)?)`", AGENTS)
    assert len(named) > 10
    places = (REPOSITORY, REPOSITORY / "fabric_template")
    assert [path for path in named if not any((place / path).exists() for place in places)] == []
    options = set(re.findall(r"`(\w+)=`", AGENTS)) | {"validate_every_n_steps", "max_steps"}
    known = {field.name for field in dataclasses.fields(MiniLoop)}
    assert options <= known | set(inspect.signature(MiniLoop.fit).parameters)


OLD_LOOP = """
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9)
for epoch in range(3):
    net.train()
    for i, (x, y) in enumerate(train, start=1):
        loss = cross_entropy(net(x), y)
        (loss / 2).backward()
        if i % 2 == 0 or i == len(train):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    net.eval()
    with torch.no_grad():
        for x, y in train:
            cross_entropy(net(x), y)
"""
NEW_LOOP = """
def step(net, batch):
    x, y = batch
    return cross_entropy(net(x), y)

options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
functions = {"training_step": step, "validation_step": step}
scheduler = {"scheduler": scheduler, "interval": "step"}
loop = MiniLoop(max_epochs=3, **options)
loop.fit(net, train, train, optimizer=optimizer, scheduler=scheduler, **functions)
"""


def test_the_hand_written_loop_and_the_fit_call_in_agents_md_give_equal_weights(tmp_path):
    start = OLD_LOOP.partition("for epoch")[0]
    assert compare_scripts(tmp_path, old=OLD_LOOP, new=start + NEW_LOOP).startswith("equal    no difference in 9 steps")


@pytest.mark.parametrize("command", blocks(AGENTS, "bash")[0][1].splitlines())
def test_the_quick_commands_in_agents_md_use_existing_modules_and_files(command):
    python, option, module, *arguments = command.split()
    if module == "ruff":
        pytest.importorskip("ruff")
    assert (python, option, find_spec(module) is None) == ("python", "-m", False)
    assert [path for path in arguments if "/" in path and not (REPOSITORY / path).exists()] == []


# Tests of the GitHub workflows and of web addresses


WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_existing_make_targets_and_files(path):
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["jobs"]
    for target in re.findall(r"run: make (\w+)", text):
        assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.M)
    for name in re.findall(r"constraints[\w-]*\.txt|\.ci/\w+|tests/\w+", text):
        assert (REPOSITORY / name).exists(), name


def test_a_weekly_workflow_tests_the_newest_and_lowest_dependency_versions():
    (text,) = [text for path in WORKFLOWS if "schedule:" in (text := path.read_text(encoding="utf-8"))]
    job = yaml.safe_load(text)["jobs"]["suite"]
    assert {row["name"] for row in job["strategy"]["matrix"]["include"]} == {"newest", "lowest"}
    command = job["steps"][-1]["run"]
    assert command.startswith("python -m pytest")
    assert "tests/" not in command


def test_no_web_address_is_a_placeholder():
    paths = [*REPOSITORY.glob("*.*"), *(REPOSITORY / ".github").rglob("*.*"), *DOCS.glob("*.*")]
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in paths if path.suffix in (".md", ".toml", ".yml", ".cff")
    }
    placeholder = r"https?://[^\s)\"]*(?:OWNER|USER|ORG|TODO|example\.|<)"
    assert {name: found for name, text in texts.items() if (found := re.findall(placeholder, text))} == {}


# Tests of the commands and files that the documentation mentions


def test_the_page_on_logging_lists_the_files_of_a_run(tmp_path):
    short = ["--limit_train_batches", "2", "--max_epochs", "2", "--log_every_n_steps", "1"]
    command = [sys.executable, "-m", "fabric_template", "fit", *short]
    done = subprocess.run(fork_command(command), capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    tree = next(source for _, source in blocks(PAGES["docs/logging-and-plots.md"], "text"))
    named = {line.split()[0].replace("<name>", "digits").replace("<n>", "0") for line in tree.splitlines()}
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in left if not path.endswith("/.lock")} <= named


@pytest.mark.parametrize("target", sorted({line.split()[1] for line in ALL_COMMANDS if line.startswith("make ")}))
def test_make_targets_named_in_the_documentation_exist(target):
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.M)


def test_commands_named_in_the_documentation_exist():
    named = {line.split()[1] for line in ALL_COMMANDS if line.startswith("fabric-template")}
    assert named >= {"fit", "validate", "plot", "verify", "copy", "diff", "update"}
    done = subprocess.run(
        [sys.executable, "-m", "fabric_template", "--help"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    existing = set(re.findall(r"^  (\w+) ", done.stdout, re.M))
    assert named <= existing
    table = re.findall(r"^\| (`.*?`) \|", PAGES["docs/command-line.md"], re.M)
    assert {name for row in table for name in re.findall(r"\w+", row)} >= existing


def test_the_documented_install_commands_use_the_torch_version_of_constraints_txt():
    torch_line = next(line for line in ALL_COMMANDS if line.startswith("pip install torch="))
    version = re.search(r"^torch==.*$", (REPOSITORY / "constraints.txt").read_text(), re.M)[0]
    assert torch_line == f"pip install {version}"


# Tests of the options that the documentation lists

OWN = {field.name for field in dataclasses.fields(LoopConfig)}
OF_FABRIC = {name for name, p in inspect.signature(FabricLoop).parameters.items() if name not in OWN} - {"options"}
OF_TRAINER = set(inspect.signature(lightning.pytorch.Trainer.__init__).parameters) - {"self"}


def test_reference_md_lists_all_options(monkeypatch):
    """If the table is outdated, run python docs/options_table.py."""
    monkeypatch.syspath_prepend(DOCS)
    import options_table

    assert options_table.insert_table(PAGES["docs/reference.md"]) == PAGES["docs/reference.md"]
    assert set(re.findall(r"^\| `(\w+)` \| `", PAGES["docs/reference.md"], re.M)) == OWN | OF_FABRIC


def test_reference_md_lists_all_arguments_of_fit():
    rows = re.findall(r"^\| (`.*?) \|", section(PAGES["docs/reference.md"], "## Arguments of fit"), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(FabricLoop.fit).parameters) - {"self"}
    assert named >= set(inspect.signature(MiniLoop.fit).parameters) - {"self", "others"}


def test_the_page_for_trainer_users_lists_each_trainer_option_that_fabric_loop_refuses():
    refused = set(re.findall(r"^\| `(?:fit\()?([a-z_]+)=?\)?` \|", TRAINER_PAGE, re.M))
    assert refused >= OF_TRAINER - OWN - OF_FABRIC


def test_the_page_for_trainer_users_lists_each_argument_that_only_fabric_loop_has():
    """The table "The way back to Trainer" shows what to write instead of each argument."""
    rows = section(TRAINER_PAGE, "## The way back to Trainer").splitlines()
    left = " ".join(row.split(" | ")[0] for row in rows if row.startswith("| "))
    names = (OWN | OF_FABRIC) - OF_TRAINER
    for method in ("fit", "validate", "test", "predict"):
        kinds = (FabricLoop, lightning.pytorch.Trainer)
        ours, theirs = (set(inspect.signature(getattr(kind, method)).parameters) for kind in kinds)
        names |= ours - theirs
        assert theirs <= ours
    assert {name for name in names if not re.search(rf"\b{name}\b", left)} == set()


# Tests of the links in the documentation


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", prose_of(text), re.M)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_have_existing_targets(page):
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", prose_of(PAGES[page])):
        path, _, anchor = target.partition("#")
        found = ((REPOSITORY / page).parent / path).resolve() if path else REPOSITORY / page
        assert found.exists(), target
        assert REPOSITORY in (found, *found.parents), target
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), target


def test_the_documentation_site_loads_nothing_from_other_servers():
    """By default, the theme loads fonts from Google on each page."""
    assert re.search(r"^  font: false\b", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    assert [page for page, text in PAGES.items() if re.search(r"!\[[^]]*\]\(https?:", text)] == []
    assert not re.search(r"https?:|@import", (DOCS / "site.css").read_text())


def test_every_page_is_listed_in_the_index_and_in_the_navigation():
    names = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = re.findall(r"^ +- (?:[^:]+: )?([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(names)
    assert set(re.findall(r"\]\(([\w/-]+\.md)", PAGES["docs/index.md"])) == names - {"index.md"}
