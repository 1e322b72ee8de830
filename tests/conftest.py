"""Settings of the whole suite: threads, hypothesis, and the fixture that runs a test on every backend."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from accuracy import Results, assert_accurate, run
from cases import DEVICE, Case, Inputs
from flex_fixture import ROUNDED, ROUNDS_GRADIENTS
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.flex import backend as flex
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch import config, profiles, registry, selection

# The workers of pytest-xdist share the cores; a small product gains nothing from a second thread.
torch.set_num_threads(1)
# Inductor need not ask the compiler what the CPU can do: seconds of the first process, and one of every other.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

hypothesis_settings.register_profile(
    "default",
    deadline=None,  # the first example of a shape pays for imports and allocations
    derandomize=True,  # the same draws everywhere, so that what fails there fails here; `@seed` goes before it
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
hypothesis_settings.load_profile("default")

if "FLASH_DMATTN_EMULATED" in os.environ:  # the file that tests/emulation/build.py has written
    from emulated_cuda import admit_cpu

    admit_cpu(Path(os.environ["FLASH_DMATTN_EMULATED"]))

# Rules and eager mathematics of flex are the same on every CPU: only tests of its compiled kernel ask for AVX2.
flex.probe.found = Availability(True)

BACKENDS = ("eager", "sdpa", "flex", "triton", "cuda")
GPU = "NVIDIA A100-SXM4-80GB"
# A test takes the backward pass of the second where rules refuse it to the first: all share the layout of lse.
PAIRED = {"cuda": "triton", "sdpa": "eager"}


@pytest.fixture(autouse=True)
def nothing_remembered_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may have other rules, probes and backends than the one before it, and none reads the user's profile."""
    monkeypatch.setattr(config.process, "profile", "off")
    profiles.forget()
    registry.choices_changed()


@pytest.fixture
def young_heap() -> Iterator[None]:
    """Have `gc.collect` look through what a test makes, not through all that a worker holds, which takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def untouched_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a test with the settings of a new process, and take back what it changes."""
    for name, value in (("default_backend", "auto"), ("disabled", ()), ("fallback", "warn"), ("rules", "built-in")):
        monkeypatch.setattr(config.process, name, value)
    monkeypatch.setattr(selection, "_warned", set())


@pytest.fixture
def caches(untouched_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The user's folder of profiles, empty, on a machine with an A100."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config.process, "profile", "")
    monkeypatch.setattr(profiles, "gpu_names", lambda arch: [GPU])
    profiles.forget()
    yield tmp_path / "flash_dmattn"
    monkeypatch.undo()
    profiles.forget()


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# Inductor of torch 2.13 writes vector code there, and its own headers refuse it.
needs_inductor = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="ATEN_CPU_CAPABILITY=default: the C++ code that Inductor writes does not compile",
)


class Runner:
    """One backend under test: runs cases on it, or skips with the reasons its own rules give."""

    def __init__(self, name: str) -> None:
        self.name = name

    def choice(self, case: Case, inputs: Inputs, **flags: Any) -> Any:
        """Return the argument `backend`: the name, or a pair where its rules refuse the gradients."""
        return self._choice(case, inputs, **flags)[0]

    def _choice(self, case: Case, inputs: Inputs, **flags: Any) -> tuple[Any, str | None]:
        """Return the argument `backend`, and why it does not serve; each `explain` asks all backends."""
        error = self._error(self.name, case, inputs, **flags)
        if error is None or self.name not in PAIRED:
            return self.name, error
        pair = (self.name, PAIRED[self.name])
        return pair, self._error(pair, case, inputs, **flags)

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        """Why the backend does not serve a case, in the words of its rules; None where it does."""
        return self._reason(case, self._choice(case, inputs)[1])

    def _reason(self, case: Case, error: str | None) -> str | None:
        """Why the backend does not serve a case, from the error of its choice."""
        if self.name != "eager" and (case.bias_kind == "min" or case.data.endswith(" min")):
            return f"{self.name}: it computes in base 2, where a bias of finfo.min overflows to -inf (docs/backends.md)"
        if (
            self.name == "flex"
            and DEVICE == "cpu"
            and case.needs_grad
            and case.dtype.itemsize == 2
            and ROUNDS_GRADIENTS
        ):
            return ROUNDED
        if error is None:
            return None
        lines = [line for line in error.splitlines()[1:] if not line.startswith("  backends that accept it")]
        return f"{self.name}: {' '.join(lines).strip().removeprefix('- ')}"

    @staticmethod
    def _error(choice: Any, case: Case, inputs: Inputs, **flags: Any) -> str | None:
        x = inputs
        grads = [t if t is None else t.detach().requires_grad_(n in case.needs_grad) for n, t in x.floats()]
        q, k, v, bias = grads
        sink = None if x.sink is None else x.sink.detach().requires_grad_("sink" in case.needs_grad)
        asked = {"return_aux": case.request()} if case.aux else {"return_lse": True}
        flags = {**case.flags(), **case.dropping(), **asked, "backend": choice, "sink": sink, **flags}
        return flash_dmattn.explain(q, k, v, x.mask, case.passed(bias), **flags).error

    def __call__(self, case: Case, inputs: Inputs | None = None) -> Results:
        """(out, lse, gradients) of a case."""
        inputs = case.build() if inputs is None else inputs
        return run(self.attention(case, inputs), case, inputs)

    def attention(self, case: Case, inputs: Inputs, *, alone: bool = False, **flags: Any) -> Callable[..., Any]:
        """`attention` on the backend, or a skip with the reasons for which it refuses the case.

        Args:
            case: the call.
            inputs: its tensors.
            alone: no other backend may compute its gradients.
            flags: more arguments of every call.
        """
        choice, error = self._choice(case, inputs)
        refusal = self._reason(case, error)
        if refusal is not None:
            pytest.skip(refusal)
        if flags:
            choice = self.choice(case, inputs, **flags)
        assert not alone or choice == self.name, f"{self.name} does not make the gradients of {case.repro()}"
        return partial(flash_dmattn.attention, return_lse=True, backend=choice, **flags)

    def check(self, case: Case, inputs: Inputs | None = None, call: Inputs | None = None, **how: Any) -> Results:
        """Compare every result of a case with fp64; `call`: the same tensors in another form, `how`: of `attention`."""
        inputs = case.build() if inputs is None else inputs
        call = inputs if call is None else call
        results = run(self.attention(case, call, **how), case, call)
        assert_accurate(results, case, inputs)
        return results


def refusal_of(
    bad: Callable[[], object],
    good: Callable[[], Tensor],
    kinds: type[Exception] | tuple[type[Exception], ...] = (TypeError, ValueError),
    *,
    inference: bool = True,
) -> Exception:
    """The error of a call: the same whatever ran before it, and nothing to the calls that come later.

    A remembered good call may not let a bad one through, nor may a bad call change a good one. `inference` is for
    errors that inference mode raises, too.
    """
    wanted = good()
    registry.choices_changed()
    errors = []
    for mode in (nullcontext, torch.inference_mode, nullcontext) if inference else (nullcontext, nullcontext):
        with mode():
            with pytest.raises(kinds) as caught:
                bad()
            assert torch.equal(good(), wanted)
        errors.append(caught.value)
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return errors[0]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Every backend in turn. Flex has no compiled backward on CPU; there its eager mathematics are tested."""
    name: str = request.param
    availability = flash_dmattn.dispatch.registry.BACKENDS[name].probe()
    if not availability.usable:
        pytest.skip(f"{name}: {availability.reason}")
    if name == "flex" and DEVICE == "cpu":
        from flex_fixture import eager_flex

        with eager_flex():
            yield Runner(name)
    else:
        yield Runner(name)


@pytest.fixture(params=("eager", "triton"))
def serving(request: pytest.FixtureRequest) -> Runner:
    """The backends that read pages, trees and masks prepared for sequences."""
    if request.param == "triton" and DEVICE == "cpu":
        pytest.skip("triton: it runs on GPUs")
    return Runner(request.param)


@pytest.fixture
def counted() -> Iterator[Any]:
    """The attention implementation "dmattn" of transformers, with every call that it makes recorded."""
    from transformers_models import counting

    with counting() as calls:
        yield calls


# Single tests there take the longest: begun last, they keep one worker busy when the others are done.
LONG = (
    "test_cuda_emulation.py",
    "test_triton_interpreter.py",
    "test_cuda_extension.py",
    "test_benchmarks_run.py",
    "test_demo.py",
    "test_oldest_versions.py",
    "test_docs.py",
    "test_distributed_dtensor.py",
    "test_distributed_training.py",
    "test_mask_pack_interpreter.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the longest files first, and with FLASH_DMATTN_SAMPLE=n no more than n cases of a test, by a fixed draw.

    FLASH_DMATTN_SHARE=i/n keeps the i-th of n shares of the cases. The name of a case decides its share, so that each
    process of `gpu_checks.py` can run one.
    """
    share, _, shares = os.environ.get("FLASH_DMATTN_SHARE", "").partition("/")
    if shares:
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % int(shares) == int(share)]
    most = int(os.environ.get("FLASH_DMATTN_SAMPLE", "0"))
    if most:
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        drawn = [random.Random(name).sample(cases, min(most, len(cases))) for name, cases in by_test.items()]
        items[:] = itertools.chain.from_iterable(drawn)
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


@pytest.fixture
def eager() -> Callable[..., Results]:
    """Only the eager backend, for tests that every machine can run."""
    return Runner("eager")


@pytest.fixture
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all that a backend allocates with NaN, until a kernel writes it."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def filled(*args: Any, make: Callable[..., torch.Tensor] = make, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, filled)
