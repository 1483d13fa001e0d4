"""A newer version of the package for a test, and what a folder holds: as data, to be compared whole."""

import shutil
import subprocess
from pathlib import Path

from fabric_template.tools import upstream

PACKAGE = Path(upstream.__file__).resolve().parents[1]


class Newer:
    """A copy of the package that a test changes, and that is the installed one from `install` on."""

    def __init__(self, folder):
        self.package = folder / "fabric_template"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(self, name, old, new):
        """Change a place that is there, once."""
        edit(self.package / name, old, new)

    def install(self, monkeypatch, version="0.2.0"):
        self.edit("__init__.py", '__version__ = "0.1.0"', f'__version__ = "{version}"')
        monkeypatch.setattr(upstream, "PACKAGE", self.package)


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def tree(folder):
    """Every file's bytes by its path, but for what Python compiled and git keeps."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and not {"__pycache__", ".git"} & {*path.parts})
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def git(*words):
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def repository():
    """The folder at hand becomes one, with all that is in it committed."""
    git("init", "-q")
    git("config", "user.name", "somebody")
    git("config", "user.email", "somebody@example.com")
    commit()


def commit():
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", "as it is")
