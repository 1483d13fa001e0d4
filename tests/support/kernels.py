"""Install a Jupyter kernel that is forked from a process that has imported torch and Lightning."""

import json
import sys

from interpreter import fork_command, forking_python

KERNEL = "fabric-template-test"


def install_kernel(folder):
    """Install the kernel below a folder. Return the variables with which Jupyter finds it and writes only there."""
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
