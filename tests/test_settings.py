"""Settings outside a call: precedence, environment variables, `with` blocks, threads and decision records."""

from __future__ import annotations

import asyncio
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import forked
import pytest
import torch
from out_of_tree import KernelPair, registered
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flash_dmattn
from flash_dmattn import call
from flash_dmattn.backends.protocol import Rule
from flash_dmattn.dispatch import checkpoints, config, registry
from flash_dmattn.dispatch.config import Blocks

pytestmark = pytest.mark.usefixtures("untouched_settings")


def ran(**flags: object) -> tuple[str, str | None]:
    """The backend of each pass of one call with gradients."""
    x = torch.randn(1, 3, 2, 8, requires_grad=True)
    with flash_dmattn.config(record=(decisions := [])):
        flash_dmattn.attention(x, x, x, **flags)
    (decision,) = decisions
    return decision.forward, decision.backward


AUTO, EAGER, REFERENCE = ("sdpa", "sdpa"), ("eager", "eager"), ("reference", "reference")


def test_argument_beats_block_beats_default_beats_auto() -> None:
    assert ran() == AUTO
    flash_dmattn.config.set(backend="reference")
    assert ran() == REFERENCE
    with flash_dmattn.config(backend="eager"):
        assert ran() == EAGER
        assert ran(backend="reference") == REFERENCE
    with flash_dmattn.config(backend="auto"):
        assert ran() == AUTO
    assert ran() == REFERENCE
    flash_dmattn.config.set(backend="auto")
    assert ran() == AUTO


def run_thread(target: object) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def test_disabling_beats_an_explicit_name_until_the_block_ends() -> None:
    with flash_dmattn.config(disabled="eager"):
        assert "eager" not in flash_dmattn.available_backends()
        with pytest.raises(flash_dmattn.BackendUnavailableError, match=r"'eager' is not available(.*\n)+.*switched"):
            ran(backend="eager")
        with pytest.raises(flash_dmattn.BackendUnavailableError, match="switched off"):
            ran(backend=("eager", "eager"))
        with flash_dmattn.config(disabled="reference"):
            assert {"eager", "reference"}.isdisjoint(flash_dmattn.available_backends())
        assert ran(backend="reference") == REFERENCE
    assert ran(backend="eager") == EAGER
    with pytest.raises(KeyError), flash_dmattn.config(disabled="eager"):
        raise KeyError
    assert ran() == AUTO


def test_the_process_has_a_list_of_its_own_that_is_replaced() -> None:
    flash_dmattn.config.set(disabled=("reference", "flex", "reference"))
    with pytest.raises(flash_dmattn.BackendUnavailableError, match="switched off"):
        ran(backend="reference")
    seen: list[tuple[str, ...]] = []
    with flash_dmattn.config(disabled="eager"):
        assert config.disabled() == ("reference", "flex", "eager")
        run_thread(lambda: seen.append(config.disabled()))
    assert seen == [("reference", "flex")]
    flash_dmattn.config.set(disabled="flex")
    assert ran(backend="reference") == REFERENCE
    with pytest.raises(ValueError, match=r"backend 'refrence' is unknown; .*; did you mean 'reference'"):
        flash_dmattn.config.set(disabled="refrence")
    assert config.disabled() == ("flex",)
    flash_dmattn.config.set(disabled=())
    assert config.disabled() == ()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"backend": "reference"}, r"backend='reference'"),
        ({"disabled": "eager"}, r"disabled=\('eager',\)"),
        ({"fallback": "error"}, r"fallback='error'"),
        ({"record": []}, r"record=\[\]"),
        ({"backend": "reference", "disabled": ("flex", "eager")}, r"backend='reference', disabled=\('flex', 'eager'\)"),
    ],
)
def test_a_block_that_is_never_entered_says_so(arguments: dict[str, Any], shown: str) -> None:
    with pytest.warns(RuntimeWarning, match=rf"config\({shown}\) was never entered .* config\.set is for the whole"):
        flash_dmattn.config(**arguments)
    assert ran() == AUTO
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = flash_dmattn.config(**arguments)
        with block:
            pass
        del block
        flash_dmattn.config.set(backend="auto")


def test_a_block_decorates_a_function() -> None:
    decisions: list[Any] = []

    @flash_dmattn.config(backend="reference", record=decisions)
    def call(x: Tensor) -> Tensor:
        return flash_dmattn.attention(x, x, x)

    x = torch.randn(1, 3, 2, 8)
    assert call.__name__ == "call" and torch.equal(call(x), call(x))
    assert [decision.forward for decision in decisions] == ["reference"] * 2
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
    assert ran() == AUTO

    async def later() -> None: ...

    with pytest.raises(TypeError, match=r"config decorates 'later', .* write `with config\(\.\.\.\):` inside of it"):
        decorate = flash_dmattn.config(backend="eager")
        with decorate:
            decorate(later)
    with pytest.raises(TypeError, match="config decorates a Tensor; it needs a function"), decorate:
        decorate(x)


def test_one_block_has_several_settings_and_the_process_keeps_what_is_left_out() -> None:
    flash_dmattn.config.set(backend="reference", disabled="flex", fallback="silent")
    decisions: list[Any] = []
    with flash_dmattn.config(backend="eager", disabled=("triton", "flex"), fallback="error", record=decisions):
        now = config.blocks.now
        assert (now.backend, now.disabled, now.fallback) == ("eager", ("triton", "flex"), "error")
        assert now.records is decisions
        assert (config.choice(), config.disabled(), config.fallback()) == ("eager", ("flex", "triton", "flex"), "error")
        with flash_dmattn.config(fallback="warn"):
            assert (config.choice(), config.fallback()) == ("eager", "warn")
            flash_dmattn.attention(*torch.randn(3, 1, 3, 2, 8))
        assert config.fallback() == "error"
    assert [decision.forward for decision in decisions] == ["eager"]
    assert (config.choice(), config.disabled(), config.fallback()) == ("reference", ("flex",), "silent")
    for change, expected in (
        ({"backend": "auto"}, ("auto", ("flex",), "silent")),
        ({"disabled": ()}, ("auto", (), "silent")),
        ({"fallback": "warn"}, ("auto", (), "warn")),
        ({}, ("auto", (), "warn")),
    ):
        flash_dmattn.config.set(**change)
        assert (config.process.default_backend, config.process.disabled, config.process.fallback) == expected


Block = tuple[Any, Callable[[], bool]]  # a context manager, and what tells whether it is in force here

BLOCKS: dict[str, Callable[[], Block]] = {
    "backend": lambda: (flash_dmattn.config(backend="reference"), lambda: ran() == REFERENCE),
    "disabled": lambda: (flash_dmattn.config(disabled="flex"), lambda: "flex" in config.disabled()),
    "fallback": lambda: (flash_dmattn.config(fallback="silent"), lambda: config.fallback() == "silent"),
    "record": lambda: (flash_dmattn.config(record=[]), lambda: config.blocks.now.records is not None),
}


@pytest.fixture(params=BLOCKS)
def block(request: pytest.FixtureRequest) -> Block:
    return BLOCKS[request.param]()


def test_one_object_is_nested_in_itself_and_used_again(block: Block) -> None:
    context, is_in_force = block
    assert not is_in_force()
    for _ in range(2):
        with context:
            assert is_in_force()
            with context:
                assert is_in_force()
            assert is_in_force()
        assert not is_in_force()
    assert config.blocks.now == Blocks()


def test_blocks_end_in_any_order(block: Block) -> None:
    """A generator that is suspended in a block ends it when it likes."""
    context, is_in_force = block
    inner = flash_dmattn.config(backend="eager"), flash_dmattn.config(disabled="triton", fallback="error")

    def steps() -> Iterator[None]:
        with context:
            yield

    suspended = steps()
    next(suspended)
    with inner[0], inner[1]:
        assert list(suspended) == []
        assert not is_in_force()
        assert (config.blocks.now.backend, config.disabled()) == ("eager", ("triton",))
    assert config.blocks.now == Blocks()


def test_tasks_have_blocks_of_their_own_and_inherit_those_around_their_start(block: Block) -> None:
    context, is_in_force = block

    async def holder(entered: asyncio.Event, done: asyncio.Event) -> bool:
        with context:
            entered.set()
            await done.wait()
            return is_in_force()

    async def other(entered: asyncio.Event, done: asyncio.Event) -> bool:
        await entered.wait()
        before = is_in_force()
        with context:  # the same object, which ends here before it ends there
            await asyncio.sleep(0)
        done.set()
        return before or is_in_force()

    async def heir() -> bool:
        return is_in_force()

    async def everything() -> tuple[list[bool], bool, bool]:
        events = asyncio.Event(), asyncio.Event()
        together = await asyncio.gather(holder(*events), other(*events))
        with context:
            started = asyncio.create_task(heir())
            in_thread = asyncio.create_task(asyncio.to_thread(is_in_force))
        return together, await started, await in_thread

    assert asyncio.run(everything()) == ([True, False], True, True)
    assert not is_in_force()


UNKNOWN = r"backend 'nope' is unknown; it needs to be one of 'cuda', "
PAIR = r"backend is \('auto', 'eager'\); a pair names a backend for each pass: pass 'auto' alone for both"
NO_CHOICE = r"backend is .*; it needs to be a name, a pair \(forward, backward\), or"
NO_NAMES = r"disabled is .*; it needs to be a name or a tuple of names"
WRONG: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("backend", ("nope", ("eager", "nope")), ValueError, UNKNOWN),
    ("backend", (("auto", "eager"),), ValueError, PAIR),
    ("backend", (None, 3, ("eager",), ("eager", 3), ["eager", "eager"]), TypeError, NO_CHOICE),
    ("disabled", ("nope", ("eager", "nope")), ValueError, UNKNOWN),
    ("disabled", (None, 3, ["eager"], ("eager", 3)), TypeError, NO_NAMES),
    ("fallback", ("eror",), ValueError, r"fallback is 'eror'; it needs .*, 'error'; did you mean 'error'\?$"),
    ("fallback", (None, 3, ["warn"]), ValueError, r"fallback is .*; it needs to be one of 'warn', 'silent', 'error'"),
]


@pytest.mark.parametrize("choose", [flash_dmattn.config, flash_dmattn.config.set], ids=["block", "process"])
@pytest.mark.parametrize(("name", "values", "kind", "message"), WRONG)
def test_a_wrong_setting_is_refused_when_it_is_made(
    name: str, values: tuple[Any, ...], kind: type[Exception], message: str, choose: Callable[..., object]
) -> None:
    others = {"backend": "reference", "disabled": "flex", "fallback": "error"}
    for value in values:
        with pytest.raises(kind, match=message):
            choose(**{**others, name: value})
    with pytest.raises(TypeError, match="positional argument"):
        choose("eager")
    with pytest.raises(TypeError, match=r"config.* got an unexpected keyword argument 'backendd'; .* mean 'backend'\?"):
        choose(backendd="eager")
    assert ran() == AUTO
    assert (config.process.disabled, config.process.fallback) == ((), "warn")


def test_decisions_are_appended_to_a_list_in_blocks_alone() -> None:
    for wrong in (None, (), {}):
        with pytest.raises(TypeError, match=r"record is .*; it needs to be a list, to which decisions are appended"):
            flash_dmattn.config(record=wrong)
    with pytest.raises(TypeError, match=r"config\.set takes no record; it needs a block: with .*config\(record="):
        flash_dmattn.config.set(backend="reference", record=[])
    assert ran() == AUTO
    decisions: list[Any] = ["first"]
    recording = flash_dmattn.config(record=decisions)
    for _ in range(2):
        with recording:
            ran(backend="eager")  # in a block of its own
            flash_dmattn.attention(*torch.randn(3, 1, 3, 2, 8))
    assert decisions[0] == "first" and [decision.forward for decision in decisions[1:]] == ["sdpa"] * 2


def test_decisions_say_what_ran_and_for_what() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 8).unbind()
    bias = torch.zeros(1, 4, 1, 5, requires_grad=True)
    with flash_dmattn.config(record=(outer := [])):
        flash_dmattn.attention(q, k, v)
        with flash_dmattn.config(record=(inner := [])):
            flash_dmattn.attention(q, k, v, bias=bias, backend="reference", is_causal=True)
        with torch.no_grad():
            flash_dmattn.attention(q, k, v, bias=bias, backend=("eager", "eager"))
    flash_dmattn.attention(q, k, v)
    assert [(d.requested, d.forward, d.backward) for d in outer] == [
        ("auto", "sdpa", None),
        (("eager", "eager"), "eager", None),
    ]
    assert [(d.requested, d.forward, d.backward) for d in inner] == [("reference", "reference", "reference")]
    problem = inner[0].problem
    assert problem.needs_grad == (False, False, False, True, False)
    assert problem.is_causal
    assert str(problem) == (
        "batch 2, 5 queries x 5 keys, 4 heads, head_dim 8, float32 on cpu, bias (1, 4, 1, 5) float32, causal, "
        "gradients dbias"
    )


def test_decisions_and_settings_under_transforms() -> None:
    """Another call runs there than the one that is written, on other backends: that is what they say and bind."""
    x, many = torch.randn(1, 8, 2, 8), torch.randn(64, 1, 64, 1, 32, dtype=torch.bfloat16)
    attend = lambda x: flash_dmattn.attention(x, x, x)
    by_name = lambda x: flash_dmattn.attention(x, x, x, backend="sdpa")
    with flash_dmattn.config(record=(decisions := [])):
        calls: list[Callable[[], Any]] = [
            lambda: torch.func.jvp(attend, (x,), (x,)),
            lambda: torch.func.jvp(by_name, (x,), (x,)),
            lambda: torch.func.grad(lambda x: attend(x).sum())(x),
            lambda: torch.vmap(attend)(many),
            lambda: torch.vmap(attend)(many[:, :, :8, :, :8].float()),
            lambda: torch.vmap(torch.func.grad(lambda x: attend(x).sum()))(many),
        ]
        ran = []
        for each in calls:
            each()
            ran.append([(d.problem.batch, d.forward, d.backward) for d in decisions])
            decisions.clear()
    # One call on a CPU takes sdpa; 64 of them with much work, eager.
    assert flash_dmattn.explain(many[0], many[0], many[0]).forward == "sdpa"
    assert ran == [
        [(1, "eager", None)],
        [(1, "eager", None)],
        [(1, "sdpa", "sdpa")],
        [(64, "eager", None)],
        [(64, "sdpa", None)],
        [(64, "eager", None)],
    ]
    with flash_dmattn.config(disabled="eager"):
        assert flash_dmattn.explain(x, x, x).tangents is None
        for call in (attend, by_name):
            with pytest.raises(flash_dmattn.BackendUnavailableError, match="in forward mode needs backend 'eager'"):
                torch.func.jvp(call, (x,), (x,))
        torch.func.jvp(lambda x: flash_dmattn.attention(x, x, x, backend="reference"), (x,), (x,))
    assert flash_dmattn.explain(x, x, x).tangents == "eager"


# A checkpointed region is recomputed as it ran, wherever its backward pass is.


def attend(x: Tensor) -> Tensor:
    return flash_dmattn.attention(x, x, x).sin()


def recomputed(checkpointed: Callable[[Tensor], Tensor], backward: Callable[[Tensor], None]) -> list[tuple[Any, ...]]:
    """List the settings of the calls in the forward pass and in the recomputation."""
    seen: list[tuple[Any, ...]] = []
    chosen = call.choose

    def spy(problem: Any, requested: Any) -> Any:
        actual = chosen(problem, requested)
        seen.append((actual.forward.name, requested, config.disabled(), config.fallback()))
        return actual

    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(attend(attend(x)).sum(), x)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "choose", spy)
        patch.setattr(call, "_key", lambda *arguments: None)
        with flash_dmattn.config(backend="reference", disabled="triton", fallback="silent"):
            out = checkpointed(x).sum()
        backward(out)
    torch.testing.assert_close(x.grad, expected)
    return seen


def in_a_thread(out: Tensor) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.backward()
        except BaseException as error:
            errors.append(error)

    run_thread(run)
    assert not errors, errors


def in_another_block(out: Tensor) -> None:
    with flash_dmattn.config(backend="eager", disabled="reference", fallback="error"):
        out.backward()
        assert config.disabled() == ("reference",)


def after_another_default(out: Tensor) -> None:
    flash_dmattn.config.set(backend="eager")
    out.backward()


BACKWARD: dict[str, Callable[[Tensor], None]] = {
    "outside": lambda out: out.backward(),
    "thread": in_a_thread,
    "another block": in_another_block,
    "another default": after_another_default,
}


def plain_region(x: Tensor) -> Tensor:
    return checkpoint(lambda x: attend(attend(x)), x, use_reentrant=False)


def nested_region(x: Tensor) -> Tensor:
    """The outer region calls nothing itself, so that only the inner one is seen around a call."""

    def outer(x: Tensor) -> Tensor:
        return checkpoint(attend, checkpoint(attend, x, use_reentrant=False), use_reentrant=False)

    return checkpoint(outer, x, use_reentrant=False)


def selective_region(x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    return checkpoint(lambda x: attend(attend(x)), x, use_reentrant=False, context_fn=contexts)


def region_with_hooks_inside(x: Tensor) -> Tensor:
    def inside(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = attend(x)
        return attend(x)

    return checkpoint(inside, x, use_reentrant=False)


REGIONS = {
    "plain": plain_region,
    "nested": nested_region,
    "selective": selective_region,
    "hooks inside": region_with_hooks_inside,
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("backward", BACKWARD)
def test_checkpointed_region_is_recomputed_as_it_ran(region: str, backward: str) -> None:
    seen = recomputed(REGIONS[region], BACKWARD[backward])
    assert len(seen) >= 3, "two calls, and one of them at least once more"
    assert set(seen) == {("reference", "reference", ("triton",), "silent")}
    assert config.blocks.now == Blocks()


def test_region_that_ran_outside_of_blocks_is_recomputed_outside_of_them() -> None:
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    out = plain_region(x).sum()
    with flash_dmattn.config(backend="reference", record=(decisions := [])):
        out.backward()
    assert {decision.forward for decision in decisions} == {"sdpa"}


def test_region_keeps_the_default_of_its_forward_pass() -> None:
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    flash_dmattn.config.set(backend="reference")
    out = plain_region(x).sum()
    flash_dmattn.config.set(backend="auto")
    with flash_dmattn.config(record=(decisions := [])):
        out.backward()
    assert {decision.forward for decision in decisions} == {"reference"}


def test_blocks_inside_of_a_region_end_in_its_recomputation_too() -> None:
    def region(x: Tensor) -> Tensor:
        with flash_dmattn.config(backend="reference"):
            x = attend(x)
        return attend(x)

    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    out = checkpoint(region, x, use_reentrant=False).sum()
    with flash_dmattn.config(backend="reference", record=(decisions := [])):
        out.backward()
    assert [decision.forward for decision in decisions] == ["reference", "sdpa"]


@pytest.mark.parametrize("name", ["_Frame", "_top", "_is_enabled"])
def test_other_internals_of_torch_leave_recomputation_to_the_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"_Frame": None, "_top": lambda _: None, "_is_enabled": lambda: False}
    monkeypatch.setattr(checkpoints, name, absent[name])
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    with flash_dmattn.config(backend="reference"):
        plain_region(x).sum().backward()
        out = plain_region(x).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        out.backward()


def test_name_in_the_call_holds_for_reentrant_checkpoints() -> None:
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    seen: list[str] = []

    def region(x: Tensor) -> Tensor:
        with flash_dmattn.config(record=(decisions := [])):
            out = flash_dmattn.attention(x, x, x, backend="reference")
        seen.extend(decision.forward for decision in decisions)
        return out

    with flash_dmattn.config(backend="eager"):
        out = checkpoint(region, x, use_reentrant=True).sum()
    in_a_thread(out)
    assert seen == ["reference", "reference"]


def test_backward_pass_runs_on_what_its_call_chose_in_any_thread() -> None:
    small = Rule("small", lambda p: p.batch < 3, lambda p: f"batch is {p.batch}", "", ("backward",))
    ours = KernelPair("ours", rules=(small,))
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    outcomes: list[Any] = []

    def backward(size: int) -> None:
        try:
            douts = torch.randn(size, *x.shape)
            outcomes.append(torch.vmap(lambda d: torch.autograd.grad(out, x, d, retain_graph=True)[0])(douts).shape)
        except flash_dmattn.BackendError as error:
            outcomes.append([reason.code for reason in error.reasons])

    with registered(ours):
        with flash_dmattn.config(backend=("eager", "ours")):
            out = flash_dmattn.attention(x, x, x)
        ours.ran.clear()
        run_thread(lambda: out.backward(torch.ones_like(out), retain_graph=True))
        run_thread(lambda: backward(2))
        assert ours.ran == ["backward", "backward"]
        run_thread(lambda: backward(3))  # folded into a batch that the named backend refuses
    assert outcomes == [(2, *x.shape), ["small"]]


CALL = """
import torch, flash_dmattn
x = torch.randn(1, 3, 2, 8, requires_grad=True)
def ran(**flags):
    with flash_dmattn.config(record=(decisions := [])):
        flash_dmattn.attention(x, x, x, **flags)
    return decisions[0].forward
"""


BAD = (
    ("FLASH_DMATTN_BACKEND", "trition"),
    ("FLASH_DMATTN_BACKEND", "nope"),
    ("FLASH_DMATTN_BACKEND", "eager,nope"),
    ("FLASH_DMATTN_BACKEND", "auto,eager"),
    ("FLASH_DMATTN_BACKEND", "eager,eager,eager"),
    ("FLASH_DMATTN_DISABLE", "flex,nope"),
    ("FLASH_DMATTN_FALLBACK", "loud"),
    ("FLASH_DMATTN_RULES", "nope"),
)


def in_environments(*built: tuple[str, str, str]) -> list[str]:
    """Run each code with a value of a variable; return its output, or the last line of its error."""
    actual = forked.run([({variable: value}, CALL + code) for code, variable, value in built])
    return [done.said.strip() if done.status == 0 else done.said.strip().splitlines()[-1] for done in actual]


def test_environment_sets_the_default_that_everything_else_beats() -> None:
    code = """
print(ran(), ran(backend="eager"))
with flash_dmattn.config(backend="eager"):
    print(ran())
flash_dmattn.config.set(backend="auto")
print(ran())
"""
    pair = "print(flash_dmattn.explain(x, x, x).requested)"
    one, two = in_environments(
        (code, "FLASH_DMATTN_BACKEND", " reference "), (pair, "FLASH_DMATTN_BACKEND", "eager,eager")
    )
    assert one.split() == ["reference", "eager", "eager", "sdpa"]
    assert two == "('eager', 'eager')"


def test_environment_disables_and_sets_the_fallback() -> None:
    code = """
print(*flash_dmattn.available_backends())
try:
    ran(backend="reference")
except flash_dmattn.BackendUnavailableError as error:
    print("FLASH_DMATTN_DISABLE" in str(error))
print(flash_dmattn.explanation.explain_problem((1, 8, 2, 64), device="sm_80").error)
"""
    variables = {"FLASH_DMATTN_DISABLE": "reference, flex,cuda,triton,sdpa", "FLASH_DMATTN_FALLBACK": "error"}
    (done,) = forked.run([(variables, CALL + code)])
    lines = done.said.splitlines()
    assert lines[:2] == ["eager", "True"]
    assert lines[2].startswith("attention runs on eager PyTorch, with up to ")


def test_bad_value_in_the_environment_ends_the_import_with_an_error_that_names_the_variable() -> None:
    actual = forked.run([({variable: value}, "import flash_dmattn") for variable, value in BAD])
    assert actual[0].said.strip().splitlines()[-1] == (
        "ValueError: FLASH_DMATTN_BACKEND names 'trition'; it needs to be one of 'cuda', 'triton', 'flex', 'sdpa', "
        "'eager', 'reference'; did you mean 'triton'? (a backend that a program registers itself is chosen and "
        "switched off by config.set)"
    )
    for (variable, value), done in zip(BAD, actual, strict=True):
        line = done.said.strip().splitlines()[-1]
        assert done.status != 0 and line.startswith("ValueError: ") and variable in line, line
        assert any(repr(part) in line for part in (value, "nope", "auto")), line


def test_names_that_the_environment_may_have_are_those_of_the_registry() -> None:
    assert tuple(registry.BACKENDS) == config.BUILT_IN


def test_empty_value_in_the_environment_is_unset() -> None:
    variables = ("FLASH_DMATTN_BACKEND", "FLASH_DMATTN_DISABLE", "FLASH_DMATTN_FALLBACK")
    assert in_environments(*(("print(ran())", variable, "") for variable in variables)) == ["sdpa"] * 3
