"""Programs in processes of their own, each forked from one that has imported torch, which takes seconds, for all."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SECONDS = 900  # of one program

# A request is (variables, code, arguments); a program that hangs is ended by a signal.
SERVER = """
import os, pickle, signal, sys, traceback
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
{imports}
while True:
    try:
        variables, code, arguments, seconds = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1), os.dup2(write, 2), os.close(read)
        signal.alarm(seconds)
        os.environ.update(variables)
        sys.argv = ["program", *arguments]
        status = 1
        try:
            exec(compile(code, "<program>", "exec"), {{"__name__": "__main__"}})
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if status == 1 and end.code != 1:
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    pickle.dump((status, said.decode(errors="replace")), answers)
    answers.flush()
"""
# Imports of the scripts of tests/, which change none of these before they are forked.
PACKAGE = """
sys.path[:0] = [{tests!r}, {root!r}]
import hypothesis, numpy, pytest, torch
import accuracy, cases, draws, layouts
try:
    import flash_dmattn.triton_kernels.launch
except ImportError:
    import flash_dmattn
torch.set_num_threads(1)
"""
SCRIPT = "import runpy, sys; sys.argv[0] = {path!r}; runpy.run_path({path!r}, run_name='__main__')"


class Done(NamedTuple):
    """How a program ended, and what it printed to both of its streams."""

    status: int
    said: str


class Server:
    """A process that has imported what its programs need, and forks for each of them."""

    def __init__(self, imports: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-c", SERVER.format(imports=imports)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdin=pipe, stdout=pipe)

    def run(self, variables: Mapping[str, str], code: str, arguments: Sequence[str] = ()) -> Done:
        """Run a program with environment variables of its own."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        pickle.dump((dict(variables), code, list(arguments), SECONDS), process.stdin)
        process.stdin.flush()
        return Done(*pickle.load(process.stdout))


def _environment(**changes: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_DMATTN_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not compile the package at every import
    # Threads do not survive a fork.
    return {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


@cache
def _with_torch() -> Server:
    return Server("import torch", _environment())


@cache
def _with_package(interprets: bool) -> Server:
    changes = {"TRITON_INTERPRET": "1"} if interprets else {}
    return Server(PACKAGE.format(tests=str(TESTS), root=str(ROOT)), _environment(**changes))


def run(programs: Sequence[tuple[Mapping[str, str], str]]) -> list[Done]:
    """Run programs one after the other; each imports the package itself, in an environment without its variables."""
    return [_with_torch().run(variables, code) for variables, code in programs]


def run_script(script: str, *arguments: str, interprets: bool = False, **variables: str) -> str:
    """Run a script of tests/: what it prints; it has to end well.

    Args:
        script: its name.
        arguments: of the script.
        interprets: have Triton interpret its kernels, which is decided when Triton is imported.
        variables: environment variables.
    """
    done = _with_package(interprets).run(variables, SCRIPT.format(path=str(TESTS / script)), arguments)
    assert done.status == 0, f"exit {done.status}\n{done.said[-6000:]}"
    return done.said


def interpret(script: str, *arguments: str) -> str:
    """Run a script of tests/ whose Triton kernels are interpreted."""
    return run_script(script, *arguments, interprets=True)


def run_pytest(*arguments: str, **variables: str) -> str:
    """Run tests in a process of their own: what pytest prints; all of them have to pass."""
    code = "import pytest, sys; sys.exit(int(pytest.main(sys.argv[1:])))"
    done = _with_package(False).run(variables, code, ("-q", "-rs", "-p", "no:cacheprovider", *arguments))
    assert done.status == 0, f"exit {done.status}\n{done.said[-6000:]}"
    return done.said
