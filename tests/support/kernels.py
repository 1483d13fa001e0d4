"""Install a Jupyter kernel that is forked from a process that has imported torch and Lightning."""

import json
import sys

from interpreter import fork_command, forking_python

KERNEL = "fabric-template-test"


def install_kernel(folder):
    """Install the kernel in a folder, and return the environment variables that make Jupyter use only this folder."""
    spec = folder / "jupyter" / "kernels" / KERNEL / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = fork_command([sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    spec.write_text(json.dumps({"argv": argv, "display_name": KERNEL, "language": "python"}))
    return {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter" / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "FORKING_PYTHON": forking_python(),
    }
