"""Programs that each start from a fresh `import torch`, which takes seconds and is done once for all of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Each program is a child of the process that has imported torch, and of nothing else.
SERVER = """
import os, pickle, sys, traceback
import torch
done = []
for variables, code in pickle.load(sys.stdin.buffer):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1), os.dup2(write, 2), os.close(read)
        os.environ.update(variables)
        status = 1
        try:
            exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.append((status, said.decode()))
pickle.dump(done, sys.stdout.buffer)
"""


class Done(NamedTuple):
    """How a program ended, and what it printed to both of its streams."""

    status: int
    said: str


def run(programs: Sequence[tuple[Mapping[str, str], str]]) -> list[Done]:
    """Run programs one after the other, each with environment variables of its own and no others of this library."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_DMATTN_")}
    environment["PYTHONPATH"] = str(ROOT)
    environment["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not compile the package at every import
    given = pickle.dumps([(dict(variables), code) for variables, code in programs])
    command = [sys.executable, "-c", SERVER]
    done = subprocess.run(command, input=given, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return [Done(*found) for found in pickle.loads(done.stdout)]
