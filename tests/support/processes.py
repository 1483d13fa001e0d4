"""Start the processes of a distributed run as torchrun does, but fork them to avoid repeated imports."""

import atexit
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch
from ports import free_port


def run_processes(function, *args, ranks=2, is_launched=True, timeout=900, agent=None):
    """Call ``function(rank, *args)`` in each process. Return the exit codes and the stderr of each process.

    Args:
        is_launched: Set torchrun's environment variables. If False, the processes are independent.
        agent: The port of a rendezvous store that outlives the processes, like that of torchrun's agent.
    """
    launched = (ranks, agent or free_port(), agent is not None) if is_launched else None
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, launched, function, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            with open(f"err{rank}", "a") as file:
                file.write("HANGS")
    return [process.exitcode for process in processes], [Path(f"err{rank}").read_text() for rank in range(ranks)]


def _rank(rank, launched, function, args):
    atexit._clear()
    if launched:
        ranks, port, is_agents = launched
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": str(is_agents),
        }  # fmt: skip
    with open(f"err{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = file
        try:
            function(rank, *args)
        except KeyboardInterrupt:
            # Exit with code 130, as Python does after Ctrl-C. multiprocessing would exit with code 1.
            raise SystemExit(130) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        finally:
            # Call the functions registered with atexit, because multiprocessing skips them in a forked process.
            atexit._run_exitfuncs()
            print("the group stands" if torch.distributed.is_initialized() else "left", file=file)
