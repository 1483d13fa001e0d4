"""Simulate a power cut at every moment of a run. Data that was not synced may be lost or incomplete.

`record` trains once and returns the possible states of the disk after a cut at each moment. `check` restores one state
and resumes. Every completed save must still exist, and the resumed run must end like an undisturbed run.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from layer import Layer
from victim import difference, end_of, train

from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointError, read_checkpoint

KINDS = ("killed", "nothing", "names", "torn")


@dataclass(frozen=True)
class State:
    """A possible state of the disk after a power cut, and the step of the last completed save."""

    kind: str
    moment: str
    # Pairs (path, content). The content of a folder is None.
    files: tuple
    saved: int


class PowerCut(Layer):
    """Records what certainly survives a power cut: synced contents, and names in synced folders.

    killed: the process ends, but everything that was written survives.
    nothing: only what is certain survives.
    names: all names survive, but only synced contents. A rename may reach the disk before the file's data.
    torn: all names survive, and half of what was written since the last sync.
    """

    def __init__(self, root):
        super().__init__(root)
        # Map each inode to the content that its file had at its last fsync.
        self.contents: dict[int, bytes] = {}
        self.names: dict[str, dict[str, int]] = {self.root: {}}
        self.saved, self._new_path = 0, None
        self.states: dict[tuple, State] = {}

    def before(self, operation, path, size):
        if operation == "open" and not os.path.exists(path):
            self._new_path = path

    def after(self, operation, path, fd):
        if operation == "open" and self._new_path == path:
            # Forget the content of a removed file, because the new file may reuse its inode.
            self.contents.pop(os.stat(path).st_ino, None)
            self._new_path = None
        if operation == "fsync":
            synced = self.paths[fd]
            if os.path.isdir(synced):
                self.names[synced] = {entry.name: entry.inode() for entry in os.scandir(synced)}
            else:
                self.contents[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
        if operation != "write" or not path.endswith(".tmp"):
            self.record_states(f"{operation} {os.path.relpath(path, self.root)}")

    def record_states(self, moment):
        """Record the states of the disk that a power cut at this moment could leave."""
        for kind in KINDS:
            found = self._certain(self.root, "") if kind == "nothing" else self._current(kind)
            files = tuple((name, _replace_root(name, content, self.root, "ROOT")) for name, content in sorted(found))
            self.states.setdefault((files, self.saved), State(kind, moment, files, self.saved))

    def _certain(self, folder, prefix):
        inodes = {entry.inode(): entry for entry in os.scandir(folder)} if os.path.isdir(folder) else {}
        for name, inode in self.names.get(folder, {}).items():
            inner, entry = os.path.join(folder, name), inodes.get(inode)
            if inner in self.names or (entry is not None and entry.is_dir()):
                yield prefix + name, None
                yield from self._certain(inner, f"{prefix}{name}/")
            else:
                yield prefix + name, self.contents.get(inode, b"")

    def _current(self, kind):
        for path in Path(self.root).rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if path.is_dir():
                yield name, None
                continue
            written, synced = path.read_bytes(), self.contents.get(path.stat().st_ino, b"")
            if kind == "killed":
                yield name, written
            elif kind == "names":
                yield name, synced
            else:
                half = (len(synced) + len(written) + 1) // 2 if written.startswith(synced) else len(written) // 2
                yield name, written[:half]


def _replace_root(name, content, root, other):
    """Replace the path of the run directory in config.yaml and hparams.yaml."""
    is_text = name.endswith(".yaml") and content
    return content.replace(str(root).encode(), str(other).encode()) if is_text else content


def record(root, **options):
    """Train once.

    Return the final files, and the disk states that a power cut at any moment could have left.
    """
    save = AtomicCheckpointIO.save_checkpoint
    with PowerCut(root) as cut:

        def save_and_record(self, checkpoint, path, storage_options=None):
            save(self, checkpoint, path, storage_options)
            if Path(path).name == "last.ckpt":
                cut.saved = checkpoint["global_step"]
                cut.record_states("a save has returned")

        AtomicCheckpointIO.save_checkpoint = save_and_record
        try:
            train(root, **options)
        finally:
            AtomicCheckpointIO.save_checkpoint = save
    return end_of(root), list(cut.states.values())


def check(whole, state, root, **options):
    """Restore a state of the disk and resume. Return a description of the problem, or None."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in state.files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(_replace_root(name, content, "ROOT", root))
    try:
        if state.saved:
            found = max((read_checkpoint(path)["global_step"] for path in root.rglob("last.ckpt")), default=None)
            if found is None or found < state.saved:
                return f"last.ckpt of step {state.saved} was saved, but the disk has step {found}"
        train(root, **options)
        return difference(whole, end_of(root))
    except (CheckpointError, OSError) as error:
        return str(error)
