"""Test the commands copy, diff and update."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from fabric_template.tools import cli, package_copy
from fabric_template.tools.package_copy import copy_command, diff_command, update_command

REPOSITORY = Path(__file__).resolve().parents[2]
LOOP = "one\n\ntwo\n\nthree\n"
EDITED = LOOP.replace("one", "mine")
RELEASED = LOOP.replace("three", "new")
MINI = "class MiniLoop:\n    pass\n\n\nDONE = True\n"
PACKAGE = {
    "LICENSE": "MIT License\n\nPermission is granted\n",
    "loop.py": LOOP,
    "mini.py": MINI,
    "data/tensors.py": "tensors\n",
    "tools/runs_page.html": "<!doctype html>\n",
}


def tree(folder):
    """Return {path: text} of all files except git's files and bytecode."""
    names = {path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()}
    names = {name for name in names if not {".git", "__pycache__"} & {*name.parts}}
    return {name.as_posix(): Path(folder, name).read_bytes().decode() for name in names}


def write(folder, files):
    for name, text in files.items():
        package_copy.write_file(Path(folder, name), None if text is None else text.encode())


def git(*options):
    done = subprocess.run(["git", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def commit():
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-q", "--allow-empty", "-m", "a")


@pytest.fixture
def release(tmp_path, monkeypatch):
    """Replace the installed package with a small package.

    Return a function that releases a new version of it.
    """
    write(tmp_path / "upstream", {**PACKAGE, "py.typed": ""})
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(package_copy, "PACKAGE", tmp_path / "upstream")
    git("init", "-q")

    def release(changes, version="0.2.0"):
        write(tmp_path / "upstream", changes)
        monkeypatch.setattr(package_copy, "__version__", version)

    release({}, "0.1.0")
    return release


# The copy command


def test_the_copy_command_quotes_a_path_with_spaces_in_printed_commands(release, capsys):
    assert copy_command("my code/mini.py", mini=True) == 0
    assert "fabric-template diff 'my code/mini.py'\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"run `fabric-template update 'my code/mini\.py'`"):
        copy_command("my code/mini.py", mini=True)


def test_the_copy_command_writes_mini_py_with_its_license(release, capsys):
    assert copy_command("src/train_loop.py", mini=True) == 0
    assert "from train_loop import MiniLoop\n" in capsys.readouterr().out
    copied = tree("src")
    assert copied.pop(".train_loop.fabric_template/README.md")
    text = f"{MINI}\n\n# MIT License\n#\n# Permission is granted\n"
    assert copied == {"train_loop.py": text, ".train_loop.fabric_template/mini.py": text}


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("my-loop", {}, "a name that Python can import. Use `copy src/my_loop`."),
        ("lib/class", {}, "a name that Python can import. Use `copy src/my_loop`."),
        ("lib/__init__.py", {"mini": True}, "a name that Python can import. Use `copy --mini src/train_loop.py`."),
        ("lib/torch", {}, "another name. Use `copy src/my_loop`."),
        ("lib/yaml", {}, "another name. Use `copy src/my_loop`."),
        ("lib/json.py", {"mini": True}, "another name. Use `copy --mini src/train_loop.py`."),
        ("fabric_template", {}, "another name. Use `copy src/my_loop`."),
        ("other", {}, "another name. Use `copy src/my_loop`."),
        ("package.py", {"mini": True}, "another name. Use `copy --mini src/train_loop.py`."),
        ("lib/loop", {"mini": True}, "a .py file. Use `copy --mini src/train_loop.py`."),
        ("lib/loop.py", {}, "a folder. Use `copy --mini src/train_loop.py`."),
        ("mine", {}, "a new path. To update a copy, run `fabric-template update mine`."),
        ("notes", {}, "a new path. To update a copy, run `fabric-template update notes`."),
        ("../upstream/inside", {}, "a path outside the package."),
    ],
)
def test_the_copy_command_refuses_names_that_cannot_be_imported(release, path, options, expected):
    write(".", {"mine/notes.py": "mine\n", "mine.py": "mine\n", "other.py": "", "package/__init__.py": "", "notes": ""})
    before = tree(".")
    with pytest.raises(ValueError, match=rf"got {re.escape(path)},.* expected {re.escape(expected)}$"):
        copy_command(path, **options)
    assert tree(".") == before


# The update command


CONFLICT = "<<<<<<< yours\nmine\n=======\nother\n>>>>>>> fabric_template-0.2.0\n\ntwo\n\nthree\n"
# Map each case to (your file, upstream's new file, outcome, exit code, your file after the update).
CASES = {
    "only upstream": (LOOP, RELEASED, "replaced", 0, RELEASED),
    "only yours": (EDITED, LOOP, None, 0, EDITED),
    "both": (EDITED, RELEASED, "merged", 0, "mine\n\ntwo\n\nnew\n"),
    "both the same": (RELEASED, RELEASED, None, 0, RELEASED),
    "the same lines": (EDITED, LOOP.replace("one", "other"), "conflict", 1, CONFLICT),
    "deleted by you": (None, RELEASED, "left out", 0, None),
    "deleted upstream": (LOOP, None, "removed", 0, None),
    "deleted upstream, changed by you": (EDITED, None, "kept", 1, EDITED),
    "CRLF": (EDITED.replace("\n", "\r\n"), RELEASED, "merged", 0, "mine\n\ntwo\n\nnew\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_update_command_merges_user_changes_with_the_new_version(release, capsys, case):
    yours, theirs, outcome, code, expected = CASES[case]
    copy_command("mine")
    write("mine", {"loop.py": yours, "extra.py": "extra\n"})
    commit()
    before = tree("mine")
    release({"loop.py": theirs, "new.py": "new\n"})
    capsys.readouterr()
    assert update_command("mine", dry_run=True) == code
    assert tree("mine") == before
    assert update_command("mine") == code
    out = capsys.readouterr().out
    assert out.startswith("dry run     mine from 0.1.0 to 0.2.0\n")
    dry, done = out.split("updated     mine from 0.1.0 to 0.2.0\n")
    assert dry.split("\n", 1)[1] == done.split("next ")[0]
    assert ("\nnext " in done) == (outcome == "conflict")
    assert f"\n{done}".count("\nadded       new.py\n") == 1
    assert f"\n{done}".count(f"\n{outcome:12}loop.py\n" if outcome else "loop.py") == bool(outcome)
    after = tree("mine")
    assert after.get("loop.py") == expected
    assert (after["extra.py"], after["new.py"]) == ("extra\n", "new\n")
    # The first update has recorded the new version in the copy's hidden folder, so a second update changes nothing.
    assert update_command("mine") == 0
    assert capsys.readouterr().out == "up to date  mine already contains version 0.2.0\n"
    assert tree("mine") == after


def test_the_update_command_refuses_to_overwrite_files_that_git_cannot_restore(release, capsys):
    def assert_refused(found):
        before = tree("mine")
        with pytest.raises(ValueError, match=re.escape(f"update: got files that git cannot restore ({found}")):
            update_command("mine")
        assert tree("mine") == before

    copy_command("mine")
    release({"loop.py": RELEASED, "data/tensors.py": "new\n"})
    assert_refused("?? mine/.fabric_template/README.md, ?? mine/data/tensors.py, ?? mine/loop.py)")
    commit()
    write("mine", {"loop.py": EDITED})
    assert_refused(" M mine/loop.py)")
    os.rename(".git", "no.git")
    with pytest.raises(ValueError, match="git: fatal: not a git repository"):
        update_command("mine")


def test_the_commands_update_and_diff_refuse_a_missing_or_conflicting_package_copy(release, monkeypatch):
    def assert_refused(command, message):
        before = tree("mine")
        with pytest.raises(ValueError, match=f"^{message}$"):
            command("mine")
        assert tree("mine") == before

    write("other", {"loop.py": "loop\n"})
    write(".", {"file": "text\n"})
    missing = r"got other, expected a copy of this package \(other/.fabric_template is missing\)\. Run `fabric-template copy`.*"
    for name, command in (("update", update_command), ("diff", diff_command)):
        for path in ("other", "file"):
            with pytest.raises(ValueError, match=f"^{name}: {missing.replace('other', path)}$"):
                command(path)
    copy_command("mine")
    write("mine", {"loop.py": f"<<<<<<< yours\n{EDITED}"})
    release({"loop.py": RELEASED})
    assert_refused(update_command, r"update: got an unresolved conflict in loop\.py\. Resolve the conflict first\.")
    monkeypatch.setenv("PATH", "")
    assert_refused(diff_command, r"git is not on the PATH\. Install git\.")


# The diff command, the documented commands and the data files of the package


def test_the_diff_command_separates_your_changes_from_upstream_changes(release, capsys):
    copy_command("mine")
    write("mine", {"loop.py": EDITED, "extra.py": "extra", "mini.py": None})
    release({"loop.py": RELEASED, "new.py": "new\n"})
    capsys.readouterr()
    found = []
    for options in ({"yours": True}, {"upstream": True}, {}):
        assert diff_command("mine", **options) == 1
        found.append(capsys.readouterr().out)
    yours, upstream, both = found
    assert both == yours + upstream
    files = [re.findall(r"^(?:---|\+\+\+) (.*)", text, re.M) for text in found[:2]]
    assert files[0][:4] == ["/dev/null", "yours/extra.py", "original/loop.py", "yours/loop.py"]
    assert files[0][4:] == ["original/mini.py", "/dev/null"]
    assert files[1][:2] == ["original/loop.py", "fabric_template-0.2.0/loop.py"]
    assert files[1][2:] == ["/dev/null", "fabric_template-0.2.0/new.py"]
    Path("yours.patch").write_text(yours)
    git("apply", "--directory=mine", "--reverse", "yours.patch")
    assert diff_command("mine", yours=True) == 0


def test_the_commands_on_the_copying_page_work(tmp_path, monkeypatch, capsys):
    """Between the two code blocks of docs/copying.md, the test releases a new version of the package."""
    page = (REPOSITORY / "docs/copying.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    first, later = ([line.split("#")[0].split()[1:] for line in block.splitlines()] for block in blocks)
    git("init", "-q")
    assert [cli.main(options) for options in first] == [0, 0]
    mini = Path("my_project/train_loop.py")
    assert mini.read_text().endswith("# SOFTWARE.\n")
    mini.write_text(mini.read_text().replace("import csv\n", "import csv  # mine\n"))
    commit()
    write("newer", {name: data.decode() for name, data in package_copy.read_files(package_copy.PACKAGE).items()})
    write("newer", {"mini.py": Path("newer/mini.py").read_text() + "\n\nNEW = True\n"})
    monkeypatch.setattr(package_copy, "PACKAGE", tmp_path / "newer")
    monkeypatch.setattr(package_copy, "__version__", "0.2.0")
    assert [cli.main(options) for options in later] == [1, 0, 0, 0]
    assert cli.main(["update", "my_project/train_loop.py"]) == 0
    assert "merged      train_loop.py\n" in capsys.readouterr().out
    assert "NEW = True\n" in mini.read_text()
    assert Path("my_project/training/mini.py").read_text().endswith("NEW = True\n")


def test_pyproject_includes_each_data_file_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads(Path(REPOSITORY, "pyproject.toml").read_text())["tool"]["setuptools"]
    package = REPOSITORY / "fabric_template"
    included = {path for pattern in settings["package-data"][package.name] for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == included
