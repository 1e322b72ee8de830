"""The choice of a backend: auto, forced, in pairs, registered, broken, and the fallback to eager on an accelerator."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import sys
import threading
import warnings
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import pytest
import torch
from out_of_tree import Differentiable, KernelPair, registered, replaced
from torch import Tensor

import flash_dmattn
from flash_dmattn import FallbackWarning, call
from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.backends.cuda import rules
from flash_dmattn.backends.protocol import Availability, Probe, Rule
from flash_dmattn.backends.triton import backend as triton
from flash_dmattn.backends.triton import passes
from flash_dmattn.dispatch import registry, selection
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import AttentionProblem, NeedsGrad

FORWARD_ONLY = Rule("forward_only", lambda p: False, lambda p: "there is no backward kernel yet", "", ("backward",))


pytestmark = pytest.mark.usefixtures("untouched_settings")


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 7, 2, 8, dtype=torch.float64).requires_grad_().unbind()
    bias = torch.randn(1, 2, 1, 7, dtype=torch.float64, requires_grad=True)
    return q, k, v, torch.rand(5, 7) > 0.3, bias


def results(backend: object = "auto") -> list[Tensor]:
    """out, lse and the gradients of q, k and v together, and bias."""
    q, k, v, mask, bias = inputs()
    out, lse = flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, backend=backend)
    return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), (q, k, v, bias))]


def select(problem: AttentionProblem, requested: Any) -> selection.Selection:
    """The choice of a call, and what a fallback says of it."""
    chosen = selection.choose(problem, requested)
    if selection.falls_back(problem, requested, chosen):
        selection.report_fallback(problem)
    return chosen


def on_gpu(needs_grad: bool = False, **changes: object) -> AttentionProblem:
    """A call on an accelerator."""
    problem = explain_problem((2, 4096, 16, 64), kv_heads=4, device="sm_80", bias=(1, 16, 1, 4096)).problem
    return problem._replace(needs_grad=NeedsGrad(needs_grad, needs_grad, needs_grad, needs_grad), **changes)


# Registered backends


@pytest.mark.parametrize("requested", ["auto", "ours", ("ours", "ours"), ("ours", "eager"), ("eager", "ours")])
def test_kernel_backend_out_of_tree_runs_both_passes(requested: object) -> None:
    ours, want = KernelPair("ours"), results("reference")
    with registered(ours, before="sdpa"), flash_dmattn.config(record=(decisions := [])):
        assert flash_dmattn.available_backends().index("ours") < flash_dmattn.available_backends().index("eager")
        torch.testing.assert_close(results(requested), want)
    passes = {"auto": ("ours", "ours"), "ours": ("ours", "ours")}.get(requested, requested)
    assert [(d.forward, d.backward) for d in decisions] == [passes]
    assert ours.ran == [name for name, backend in zip(("forward", "backward"), passes) if backend == "ours"]
    assert "ours" not in flash_dmattn.available_backends()


def test_differentiable_backend_out_of_tree() -> None:
    ours, want = Differentiable("ours"), results("reference")
    with registered(ours, before="sdpa"), flash_dmattn.config(record=(decisions := [])):
        torch.testing.assert_close(results(), want)
        for pair in (("ours", "eager"), ("eager", "ours")):
            with pytest.raises(ValueError, match=r"'ours' is one differentiable function .* two of .*'eager'"):
                results(pair)
        torch.testing.assert_close(results(("ours", "ours")), want)
    assert ours.ran == ["forward", "forward"]
    assert [(d.forward, d.backward) for d in decisions] == [("ours", "ours")] * 2


def test_without_before_a_backend_comes_last() -> None:
    first, last = KernelPair("first"), KernelPair("last")
    with registered(first, before="cuda"), registered(last):
        assert list(registry.BACKENDS) == ["first", "cuda", "triton", "flex", "sdpa", "eager", "reference", "last"]
        results()
    assert first.ran == ["forward", "backward"]
    assert last.ran == []


@pytest.mark.parametrize("pair", ["auto", ("ours", "eager")])
def test_backend_of_a_forward_alone_is_paired(pair: object) -> None:
    ours, want = KernelPair("ours", rules=(FORWARD_ONLY,)), results("reference")
    with registered(ours, before="sdpa"), flash_dmattn.config(record=(decisions := [])):
        torch.testing.assert_close(results(pair), want)
        with torch.no_grad():
            q, k, v, mask, bias = inputs()
            torch.testing.assert_close(flash_dmattn.attention(q, k, v, mask, bias, backend="ours"), want[0])
        with pytest.raises(flash_dmattn.BackendUnsupportedError, match="there is no backward kernel yet") as caught:
            results("ours")
    assert [(d.forward, d.backward) for d in decisions] == [("ours", "eager"), ("ours", None)]
    assert [reason.code for reason in caught.value.reasons] == ["forward_only"]
    assert {"eager", "reference"} <= set(caught.value.accepted_by) and "ours" not in caught.value.accepted_by


def test_each_backend_of_a_pair_is_asked_for_its_own_pass() -> None:
    backward_only = Rule("backward_only", lambda p: False, lambda p: "there is no forward kernel yet", "", ("forward",))
    first, second = KernelPair("first", rules=(FORWARD_ONLY,)), KernelPair("second", rules=(backward_only,))
    with registered(first, second):
        torch.testing.assert_close(results(("first", "second")), results("reference"))
        with pytest.raises(flash_dmattn.BackendUnsupportedError, match="there is no backward kernel yet") as caught:
            results(("eager", "first"))
        assert [(reason.backend, reason.code) for reason in caught.value.reasons] == [("first", "forward_only")]
        with pytest.raises(flash_dmattn.BackendUnsupportedError, match="there is no forward kernel yet"):
            results(("second", "eager"))
        with torch.no_grad():  # the backend of a pass that does not run is not asked
            flash_dmattn.attention(*inputs()[:3], backend=("eager", "first"))
    assert (first.ran, second.ran) == (["forward"], ["backward"])


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("requested", ["auto", "ours", ("ours", "ours")], ids=str)
def test_a_pass_that_raises_is_not_retried_elsewhere(fails: str, requested: object) -> None:
    class Broken(KernelPair):
        def broken(self, direction: str, run: Any) -> Any:
            def passed(*arguments: Any) -> Any:
                result = run(*arguments)
                if direction == fails:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return result

            return passed

        def plan_forward(self, problem: AttentionProblem) -> Any:
            return self.broken("forward", super().plan_forward(problem))

        def plan_backward(self, problem: AttentionProblem) -> Any:
            return self.broken("backward", super().plan_backward(problem))

    ours, other = Broken("ours"), KernelPair("other")
    elsewhere = {"plan_forward": lambda problem: pytest.fail("planned elsewhere")}
    with (
        registered(other, before="sdpa"),
        registered(ours, before="other"),
        replaced("eager", **elsewhere),
        replaced("reference", **elsewhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="an illegal memory access") as caught:
            results(requested)
    assert not isinstance(caught.value, flash_dmattn.BackendError)
    assert ours.ran == (["forward"] if fails == "forward" else ["forward", "backward"])
    assert other.ran == []


def test_auto_passes_over_what_a_backend_keeps_to_its_name() -> None:
    shy = KernelPair("shy", auto_rules=(Rule("small", lambda p: p.seqlen_k > 64, lambda p: f"only {p.seqlen_k} keys"),))
    with registered(shy, before="sdpa"):
        results()
        assert shy.ran == []
        results("shy")
    assert shy.ran == ["forward", "backward"]


def test_a_backend_that_is_taken_out_while_a_call_chooses_is_passed_over_whole() -> None:
    def take_second_out(problem: AttentionProblem) -> bool:
        if "second" in registry.BACKENDS:
            flash_dmattn.unregister_backend("second")
        return False

    want = results("reference")
    first = KernelPair("first", auto_rules=(Rule("busy", take_second_out, lambda p: "it is busy"),))
    second = KernelPair("second", availability=Availability(True))
    flash_dmattn.register_backend(second.backend, before="cuda")
    with registered(first, before="second"), flash_dmattn.config(record=(decisions := [])):
        torch.testing.assert_close(results(), want)
    assert decisions[0].forward == "sdpa" and second.ran == []


def test_a_choice_made_while_backends_change_is_not_found_after_the_change() -> None:
    late = KernelPair("late")

    def register_late(problem: AttentionProblem) -> bool:
        if "late" not in registry.BACKENDS:
            flash_dmattn.register_backend(late.backend, before="first")
        return False

    x = torch.randn(1, 3, 2, 8)
    with registered(KernelPair("first", auto_rules=(Rule("busy", register_late, lambda p: "busy"),)), before="sdpa"):
        flash_dmattn.attention(x, x, x)
        assert late.ran == []  # the choice had begun
        flash_dmattn.attention(x, x, x)
        assert late.ran == ["forward"]
        flash_dmattn.unregister_backend("late")


def test_two_threads_register_at_once_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=0.2)

    def meet(backends: object, name: str, value: object) -> None:
        if name == "table":
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait()
        object.__setattr__(backends, name, value)

    monkeypatch.setattr(type(registry.BACKENDS), "__setattr__", meet)
    for change, arguments in (
        (flash_dmattn.register_backend, (KernelPair("one").backend, KernelPair("two").backend)),
        (flash_dmattn.unregister_backend, ("one", "two")),
    ):
        threads = [threading.Thread(target=change, args=(argument,)) for argument in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together.reset()
        expected = {"one", "two"} if change is flash_dmattn.register_backend else set()
        assert {"one", "two"} & set(registry.BACKENDS) == expected


def test_the_registry_is_never_edited() -> None:
    before = registry.BACKENDS.table
    names = list(before)
    with registered(KernelPair("ours")):
        assert list(before) == names and list(registry.BACKENDS) == [*names, "ours"]
    assert list(before) == names


def test_the_last_resort_says_that_it_is_one() -> None:
    ours = KernelPair("ours", workspace_bytes=lambda problem: 0)
    assert not KernelPair("other").backend.is_fallback
    with registered(ours, before="sdpa"):
        assert registry.last_resort() is ours.backend
    assert registry.last_resort().name == "eager"
    with pytest.raises(ValueError, match="'eager' is what \"auto\" falls back to; it cannot be unregistered"):
        flash_dmattn.unregister_backend("eager")


def test_wrong_names_of_backends_are_told_what_was_meant() -> None:
    x = torch.randn(1, 3, 2, 8)
    for wrong in (
        lambda: flash_dmattn.attention(x, x, x, backend="trition"),
        lambda: flash_dmattn.attention(x, x, x, backend=("eager", "trition")),
        lambda: flash_dmattn.explain(x, x, x, backend="trition"),
        lambda: flash_dmattn.config(backend="trition"),
        lambda: flash_dmattn.config.set(backend="trition"),
        lambda: flash_dmattn.config(disabled="trition"),
        lambda: flash_dmattn.unregister_backend("trition"),
        lambda: flash_dmattn.register_backend(KernelPair("ours").backend, before="trition"),
    ):
        with pytest.raises(ValueError, match=r"'trition'.*; did you mean 'triton'\?$"):
            wrong()


def test_registration_is_checked() -> None:
    def checked(error: type[Exception], text: str, backend: object, **flags: object) -> None:
        order = list(registry.BACKENDS)
        with pytest.raises(error, match=text), registered():
            flash_dmattn.register_backend(backend, **flags)
        assert list(registry.BACKENDS) == order

    checked(ValueError, "backend name 'eager' is taken", KernelPair("eager").backend)
    checked(ValueError, "backend name 'auto' is taken", KernelPair("auto").backend)
    checked(ValueError, "before is 'nope'; it needs to be one of 'cuda', ", KernelPair("ours").backend, before="nope")
    checked(TypeError, "backend is a KernelPair; it needs to be a flash_dmattn.Backend", KernelPair("ours"))
    unknown = dataclasses.replace(KernelPair("ours").backend, features=frozenset({"mask", "dropout"}))
    checked(ValueError, "features of backend 'ours' names dropout; it needs names out of mask, bias, ", unknown)


# Refusals


def test_forced_backend_that_does_not_work_here() -> None:
    cause = OSError("libours.so: cannot open shared object file")
    broken = KernelPair("broken", availability=Availability(False, "libours cannot be loaded", "reinstall", cause))
    with registered(broken, before="cuda"):
        with pytest.raises(flash_dmattn.BackendUnavailableError) as caught:
            results("broken")
        assert results()[0].shape == (2, 5, 4, 8)
        assert "broken" not in flash_dmattn.available_backends()
    error = caught.value
    assert error.backend == "broken"
    assert error.__cause__ is cause
    assert [tuple(reason) for reason in error.reasons] == [
        ("broken", "unavailable", "libours cannot be loaded", "reinstall")
    ]
    assert "eager" in error.accepted_by and "broken" not in error.accepted_by
    assert str(error) == (
        "backend 'broken' is not available; pass backend='auto', or one that accepts it: 'eager', 'reference'\n"
        "  - libours cannot be loaded (reinstall)"
    )
    assert "backend 'broken' is not available: batch 2, 5 queries x 7 keys, 4 heads on 2 key-value" in error.details
    assert error.details.endswith("\n  - libours cannot be loaded (reinstall)")
    assert "\n  backends that accept it: " in error.details


def test_forced_backend_that_refuses_the_call_gives_every_reason() -> None:
    rules = (
        Rule("dtype", lambda p: p.dtype != torch.float64, lambda p: f"dtype is {p.dtype}", "cast q, k and v"),
        Rule("heads", lambda p: p.num_heads == p.num_heads_k, lambda p: f"{p.num_heads} heads on {p.num_heads_k}"),
        Rule("batch", lambda p: p.batch < 9, lambda p: "never said"),
        FORWARD_ONLY,
    )
    with registered(KernelPair("picky", rules=rules)), pytest.raises(flash_dmattn.BackendUnsupportedError) as caught:
        results("picky")
    error = caught.value
    assert isinstance(error, flash_dmattn.BackendError) and isinstance(error, RuntimeError)
    assert error.__cause__ is None
    assert [reason.code for reason in error.reasons] == ["dtype", "heads", "forward_only"]
    assert str(error).splitlines() == [
        "backend 'picky' does not support this call; pass backend='auto', or one that accepts it: 'eager', 'reference'",
        "  - dtype is torch.float64 (cast q, k and v)",
        "  2 more: print(flash_dmattn.explain(...).error) with the arguments of the call",
    ]
    for text in ("'picky' does not support this call", "dtype is torch.float64 (cast q, k and v)", "4 heads on 2"):
        assert text in error.details
    assert "\n  backends that accept it: " in error.details


def test_an_error_of_a_real_call_is_short() -> None:
    q = torch.randn(1, 3, 2, 7, dtype=torch.float64, requires_grad=True)
    for backend in ("cuda", "triton", "flex", "sdpa"):
        call = {"bias": torch.zeros(3, 3, requires_grad=True), "sink": torch.zeros(2), "dropout_p": 0.1}
        with pytest.raises(flash_dmattn.BackendError) as caught:
            flash_dmattn.attention(q, q, q, **call, backend=backend)
        first, *told = str(caught.value).splitlines()
        assert "pass backend='auto', or one that accepts it: 'eager'" in first
        assert told[0].startswith("  - ") and len(told) <= 3 and len(str(caught.value)) < 600
        explained = flash_dmattn.explain(q, q, q, **call, backend=backend).error
        assert explained == caught.value.details and all(str(x) in explained for x in caught.value.reasons)


def test_errors_cross_processes() -> None:
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(flash_dmattn.BackendUnsupportedError) as caught:
        flash_dmattn.attention(x, x, x, return_probs=True, backend="eager")
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is flash_dmattn.BackendUnsupportedError and str(error) == str(caught.value)
    assert vars(error) == vars(caught.value) and error.backend == "eager" and error.reasons


def test_probabilities_are_refused_by_every_backend_but_the_reference() -> None:
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match="return_probs is set") as caught:
        flash_dmattn.attention(x, x, x, return_probs=True, backend="eager")
    assert caught.value.accepted_by == ("reference",)
    assert str(caught.value).splitlines()[0].endswith("does not support this call; pass backend='reference'")
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match=r"^no backend accepts this call unasked") as caught:
        flash_dmattn.attention(x, x, x, return_probs=True)
    assert caught.value.backend == "auto"
    assert {reason.backend for reason in caught.value.reasons} == set(registry.BACKENDS)
    assert "pass backend='reference': " in str(caught.value).partition("\n")[0]
    out, probs = flash_dmattn.attention(x, x, x, return_probs=True, backend="reference")
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probs, x), out)
    assert len(flash_dmattn.attention(x, x, x, return_probs=True, return_lse=True, backend="reference")) == 3


def test_auto_with_everything_disabled_says_so_for_each() -> None:
    with flash_dmattn.config(disabled=tuple(registry.BACKENDS)):
        with pytest.raises(flash_dmattn.BackendUnsupportedError, match="no backend accepts this call") as caught:
            results()
        assert flash_dmattn.available_backends() == ()
    disabled = [reason.backend for reason in caught.value.reasons if reason.code == "disabled"]
    assert disabled == list(registry.BACKENDS)
    assert caught.value.accepted_by == ()


# Probes


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, AttributeError])
@pytest.mark.parametrize(
    ("module", "imported"), [(cuda, "flash_dmattn._C"), (triton, "flash_dmattn.triton_kernels.launch")]
)
def test_probe_of_a_broken_install_keeps_the_exception_and_never_raises(
    module: ModuleType, imported: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    class Broken(MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == imported:
                attempts.append(name)
                raise error("undefined symbol: cudaGetDevice")

    rules.installed_instances()  # read once from a file that a broken import leaves readable
    monkeypatch.setattr(module.probe, "found", None)
    monkeypatch.setattr(passes, "_launch", None)
    monkeypatch.delitem(sys.modules, imported, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    actual = module.probe()
    assert module.probe() is actual
    assert attempts == [imported]
    assert not actual.usable
    assert type(actual.exception) is error
    assert "undefined symbol: cudaGetDevice" in actual.reason
    with pytest.raises(flash_dmattn.BackendUnavailableError, match="undefined symbol") as caught:
        results(module.BACKEND.name)
    assert caught.value.__cause__ is actual.exception
    torch.testing.assert_close(results("auto"), results("reference"))


def test_threads_probe_a_backend_once() -> None:
    loads: list[int] = []
    inside, others = threading.Event(), threading.Event()

    def load() -> Availability:
        loads.append(1)
        inside.set()
        others.wait(10)
        return Availability(True)

    probe = Probe(load)
    threads = [threading.Thread(target=probe) for _ in range(4)]
    threads[0].start()
    inside.wait()
    for thread in threads[1:]:
        thread.start()
    others.set()
    for thread in threads:
        thread.join()
    assert len(loads) == 1 and probe().usable


def test_probe_is_left_alone_where_a_rule_refuses_already() -> None:
    probes: list[int] = []
    ours = KernelPair("ours", rules=(Rule("device", lambda p: p.device == "cuda", lambda p: f"device is {p.device}"),))
    probed = dataclasses.replace(ours.backend, probe=lambda: probes.append(1) or Availability(True))
    with registered(probed, before="sdpa"):
        results()
    assert probes == []


# The fallback on an accelerator, where this process may use only eager


@pytest.fixture
def eager_alone(untouched_settings: None) -> None:
    flash_dmattn.config.set(disabled=("cuda", "triton", "flex", "sdpa"))  # until untouched_settings takes it back


@pytest.mark.usefixtures("eager_alone")
def test_fallback_warns_once_per_cause_with_bytes_and_reasons() -> None:
    problem = on_gpu()
    with pytest.warns(FallbackWarning) as caught:
        assert select(problem, "auto").forward.name == "eager"
        select(problem, "auto")
        select(problem._replace(batch=1), "auto")
    (text,) = [str(warning.message) for warning in caught]
    with pytest.warns(FallbackWarning, match="cuda: dtype is .*float32"):
        select(problem._replace(dtype=torch.float32), "auto")
    # The least of the chunk budget and three copies of 2 * 16 * 4096 * 4096 fp32 scores.
    assert text.startswith("attention runs on eager PyTorch, with up to 256.0 MB of temporaries: batch 2, 4096 queries")
    lines = text.splitlines()
    better = [registry.BACKENDS[name] for name in ("cuda", "triton", "flex", "sdpa")]
    reasons = [r for each in better for r in selection.reasons_against(each, problem, ("forward",), auto=True)]
    assert {"disabled", "arch"} <= {reason.code for reason in reasons}
    assert lines[1:-1] == [f"  - {reason.backend}: {reason}" for reason in reasons]
    assert lines[-1].startswith('  config.set(fallback="error") turns this warning into an error')


def test_fallback_warning_points_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "falls_back", lambda *_: True)
    with pytest.warns(FallbackWarning) as caught:
        results()
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("eager_alone")
def test_small_call_names_few_bytes() -> None:
    problem = on_gpu(batch=1, num_heads=2, num_heads_k=2, seqlen_q=128, seqlen_k=512, bias=None)
    with pytest.warns(FallbackWarning, match=r"up to 1\.5 MB of temporaries"):
        select(problem, "auto")


@pytest.mark.usefixtures("eager_alone")
def test_fallback_can_be_an_error_or_silent() -> None:
    flash_dmattn.config.set(fallback="error")
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match="attention runs on eager PyTorch") as caught:
        select(on_gpu(needs_grad=True), "auto")
    assert caught.value.accepted_by == ("eager",)
    assert {reason.backend for reason in caught.value.reasons} == {"cuda", "triton", "flex", "sdpa"}
    assert 'fallback="error" is in force' in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(on_gpu(), "eager").forward.name == "eager"  # by name: no fallback
        flash_dmattn.config.set(fallback="silent")
        assert select(on_gpu(), "auto").forward.name == "eager"
        flash_dmattn.config.set(fallback="error")
        with flash_dmattn.config(fallback="silent"):
            assert select(on_gpu(), "auto").forward.name == "eager"
        results()  # on the CPU eager is no fallback
    flash_dmattn.config.set(fallback="warn")
    with flash_dmattn.config(fallback="error"), pytest.raises(flash_dmattn.BackendUnsupportedError):
        select(on_gpu(), "auto")


@pytest.mark.usefixtures("eager_alone")
def test_backward_alone_on_eager_is_a_fallback_too() -> None:
    with registered(KernelPair("ours", rules=(FORWARD_ONLY,)), before="sdpa"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert select(on_gpu(), "auto").forward.name == "ours"
        with pytest.warns(FallbackWarning, match="ours: there is no backward kernel yet"):
            chosen = select(on_gpu(needs_grad=True), "auto")
    assert (chosen.forward.name, chosen.backward.name) == ("ours", "eager")
