"""The CUDA kernels on the emulated GPU of `emulation/`, for CPU tensors: `python emulated_cuda.py FILE FIRST COUNT`.

FILE is what `emulation/build.py` has written. Runs COUNT of the random calls of `draws.py` from number FIRST on, those
that its kernels take, each as on a GPU of some number of SMs, in some order of its warps and with some
number of blocks that share keys, against the fp64 formula; some a second time in another order, for the same bits. A
process of its own: the backend is changed.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from accuracy import assert_accurate, run  # noqa: E402
from cases import Case  # noqa: E402
from cuda_forms import described  # noqa: E402
from draws import Drawn, draw_cuda, placed  # noqa: E402
from out_of_tree import replace_backend, rules_without  # noqa: E402
from outcomes import report, served  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.backends.cuda import passes  # noqa: E402
from flash_dmattn.backends.cuda import rules as cuda_rules  # noqa: E402
from flash_dmattn.backends.protocol import Availability  # noqa: E402

# An H200 has 132; with fewer, blocks take several pieces of work each. The threads of more than some 60 blocks at once
# are more stacks than Linux maps for a process.
NUM_SMS = (1, 2, 3, 5, 40)
NUM_KV_SPLITS = (1, 1, 0, 2, 3, 7)
NUM_DBIAS_CHUNKS = (0, 1, 2, 3, 7)
MOST_SCORES = 200_000  # of a call; they take half a second
_loaded: ctypes.CDLL | None = None


def admit_cpu(path: Path) -> None:
    """Have the backend run the operators of an emulated extension; of its rules that on the device is lifted."""
    global _loaded
    torch.ops.load_library(path)
    _loaded = ctypes.CDLL(str(path))
    _loaded.emulation_configure.argtypes = (ctypes.c_int, ctypes.c_uint64)
    units = frozenset(json.loads(path.with_suffix(".json").read_text()))
    cuda_rules.installed_instances = lambda: units
    replace_backend("cuda", probe=lambda: Availability(True), rules=rules_without("cuda", "device"))


def configure(num_sms: int = 3, seed: int = 0) -> None:
    """Set how many SMs the GPU has, and in which order its next kernel runs; each later one has another."""
    assert _loaded is not None
    _loaded.emulation_configure(num_sms, seed)


def smaller(case: Case) -> Case:
    """The case with fewer heads, and where that is not enough fewer queries and keys."""
    heads_k = min(case.num_heads_k, 2)
    heads = heads_k * min(case.num_heads // case.num_heads_k, 3)
    case = case.with_(batch=min(case.batch, 2), num_heads_k=heads_k, num_heads=heads)
    while case.batch * heads * case.seqlen_q * case.seqlen_k > MOST_SCORES:
        if case.seqlen_q >= case.seqlen_k:
            case = case.with_(seqlen_q=case.seqlen_q // 2)
        else:
            case = case.with_(seqlen_k=case.seqlen_k // 16 * 8 + case.seqlen_k % 8)
    return case


def failure_of(number: int, drawn: Drawn) -> str | None:
    """Run a call; None where every result is as it has to be.

    Raises:
        flash_dmattn.BackendUnsupportedError: a rule refuses it.
    """
    case, rng = smaller(drawn.case), random.Random(number)
    deterministic, num_sms = rng.random() < 0.5, rng.choice(NUM_SMS)
    passes.NUM_KV_SPLITS = rng.choice(NUM_KV_SPLITS)
    passes.NUM_DBIAS_CHUNKS = random.Random(f"chunks {number}").choice(NUM_DBIAS_CHUNKS)
    inputs = case.build("cpu")
    given = placed(drawn, case, inputs)
    attention = partial(flash_dmattn.attention, return_lse=True, backend="cuda", deterministic=deterministic)
    try:
        configure(num_sms, 2 * number)
        results = run(attention, case, given)
        assert_accurate(results, case, inputs)
        if rng.random() < 0.3:
            configure(num_sms, 2 * number + 1)
            again = run(attention, case, given)
            # In one order whatever is asked for, where no atomics sum it.
            summed = ("dbias",) if case.bias is not None and case.bias[2:] == ("Lq", "Lk") else ()
            for name, x in results.items():
                if x is not None and (deterministic or name in ("out", "lse", *summed)):
                    assert torch.equal(x, again[name]), f"{name} differs in another order"
    except flash_dmattn.BackendUnsupportedError:
        raise
    except Exception as failure:  # the other calls still count
        where = f"number {number}, {drawn[1:]}, SMs {num_sms}, deterministic {deterministic}, "
        where += f"{passes.NUM_KV_SPLITS} parts, {passes.NUM_DBIAS_CHUNKS} chunks"
        return f"{case.repro()}\n  {where}\n{type(failure).__name__}: {failure}"[:2000]
    return None


def random_calls(first: int, count: int) -> Iterator[str | None]:
    """Outcomes of the calls that are not refused."""
    built = (number for number in itertools.count(first) if _is_built(draw_cuda(number).case))
    return served(lambda number: failure_of(number, draw_cuda(number)), built, count)


def _is_built(case: Case) -> bool:
    """Whether there are kernels for its head dims and dtype, so that it is worth building."""
    return cuda_rules._instance(described(case)) is not None


if __name__ == "__main__":
    admit_cpu(Path(sys.argv[1]))
    sys.exit(report(random_calls(int(sys.argv[2]), int(sys.argv[3]))))
