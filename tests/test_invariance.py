"""The invariant mode, in which the bits of a row depend on the row alone: what decides them, who refuses, the rows."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import DEVICE
from conftest import needs_triton
from forked import interpret, run
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import BackendUnsupportedError
from flash_dmattn.dispatch import selection
from flash_dmattn.dispatch.config import blocks, invariant, process
from flash_dmattn.dispatch.profiles import Judgement
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import Flags, MaskView, NeedsGrad, SequenceSpec, SequenceView

X = torch.zeros(1, 3, 2, 16)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs tests/invariant_rows.py")
def test_rows_have_equal_bits_in_many_surroundings() -> None:
    assert "14 passed, 0 failed" in interpret("interpreted_rows.py")


# Arguments of a launch that decide bits. Others decide which program computes, and when.
DECIDES_BITS = {
    *("BLOCK_M", "BLOCK_N", "BLOCK_D", "BLOCK_DV", "MASK", "SOFTCAP", "PRECISION", "FLAT", "FEW_KEYS", "PARTS"),
    *("COLUMN_PARTS", "SPAN", "INVARIANT", "DBIAS", "ONE_PASS", "DROPOUT"),
}


def draw_call(rng: random.Random, head_dim: int, bias: str, layout: str, arch: str) -> Any:
    """Draw a call of a class: batch, heads, lengths, alignment of the bias, the layout of its sequences and the GPU."""
    from flash_dmattn.triton_kernels.plan import Call
    from flash_dmattn.triton_kernels.plan_sequences import SequenceCall

    batch, group = rng.randint(1, 64), 4
    heads_k = rng.choice((1, 2, 8, 32))
    queries, keys = (rng.choice((n, 7, 16, 32, 64, rng.randint(2, 2000), rng.randint(2, 100_000))) for n in (1, 2))

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    packs_q, packs_k = layout == "packed", layout == "packed"
    q = (
        meta(1, batch * queries, heads_k * group, head_dim)
        if packs_q
        else meta(batch, queries, heads_k * group, head_dim)
    )
    k = meta(1, batch * keys, heads_k, head_dim) if packs_k else meta(batch, keys, heads_k, head_dim)
    flags, added, spec = Flags(-1, 0, 0.1, 0.0, True, invariant=True), None, None
    if layout == "paged":
        k = meta(batch * -(-keys // 16), 16, heads_k, head_dim)
    if layout != "dense":
        spec = SequenceSpec(layout, batch, q.shape[1], k.shape[1], queries, keys)  # type: ignore[arg-type]
        flags = flags._replace(sequences=spec)
    if bias:
        added = meta(batch, heads_k * group, queries if bias == "score" else 1, keys + rng.randint(0, 1))[..., :keys]
    if spec is None:
        call = Call(q, k, k, MaskView(), added, flags)
    else:
        bounds = torch.empty(batch, 4, dtype=torch.int32, device="meta")
        table = torch.empty(batch, -(-keys // 16), dtype=torch.int32, device="meta") if layout == "paged" else None
        call = SequenceCall(q, k, k, MaskView(), added, flags, None, SequenceView(bounds, table))
    call.arch, call.num_sms = arch, rng.randint(1, 148)
    return call


def planned_kernels(call: Any, is_paged: bool, needs_bias: bool) -> Iterator[tuple[str, Any]]:
    """Name the kernels that a call launches, each with all of its launch that decides bits."""
    from flash_dmattn.triton_kernels import kernel_launch, launch

    launches: list[tuple[Any, ...]] = []
    with mock.patch.object(kernel_launch.Launch, "__init__", lambda self, *arguments: launches.append(arguments)):
        launch.forward_plan(call)
        if not is_paged:
            launch.backward_plan(call, call.q, None, NeedsGrad(True, True, True, needs_bias))
    for kernel, _, rest, *options in launches:
        decided = dict(zip(kernel.arg_names[-len(rest) :], rest, strict=True))
        warps = options[0].get("num_warps") if options else None
        if kernel.__name__ not in ("fold_kernel", "fill_gaps_kernel"):  # there, sums have one order
            yield kernel.__name__, (warps, *sorted((name, decided[name]) for name in decided.keys() & DECIDES_BITS))


@needs_triton
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize("bias", ["", "key", "score"])
def test_nothing_around_a_row_decides_its_bits(bias: str, arch: str) -> None:
    """All that decides bits is one tuple for each kernel of a class, in every layout and on GPUs of every size."""
    for head_dim in (64, 128):
        rng, seen = random.Random(head_dim), {}
        for number in range(120):
            layout = ("dense", "packed", "padded", "paged")[number % 4]
            call = draw_call(rng, head_dim, bias, layout, arch)
            for name, decides in planned_kernels(call, layout == "paged", bool(bias)):
                # The sums of each query head beside dk and dv of a group are two launches of one kernel.
                key = (name, dict(decides[1:]).get("DBIAS"))
                assert seen.setdefault(key, decides) == decides, (name, layout, call.shape)
        assert {"forward_kernel", "backward_queries_kernel", "backward_keys_kernel"} <= {name for name, _ in seen}


BIAS, CHUNK = (
    ("B", "Hq", "Lq", "Lk"),
    {"layout": "paged", "seqlen_q": 64, "seqlen_k": 8192, "page_size": 128, "batch": 2},
)
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"seqlen_q": 1, "seqlen_k": 65536}, {"layout": "packed", "batch": 16}, CHUNK],
    "bias": [{"bias": BIAS}, {"bias": BIAS, "seqlen_q": 200, "seqlen_k": 200}, {"bias": BIAS, **CHUNK}],
}


@needs_triton
@pytest.mark.parametrize("form", LAYOUTS)
def test_what_triton_makes_of_a_class_adds_up_in_one_order(form: str) -> None:
    """Sums of floats over a tile have one layout in every compiled form of a class, and so do products."""
    from compiled_triton import SequenceVariant, Variant, jobs_of

    made = set()
    for fields in LAYOUTS[form]:
        kind = SequenceVariant if "layout" in fields else Variant
        job = next(job for job in jobs_of(kind(128, is_causal=True, invariant=True, **fields), "sm_90"))
        text = job.ttgir()
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
        reduced = re.findall(r'"tt\.reduce"\(.*?\n(.*?)\}\) : \(tensor<(.*?), (#\w+)>', text, re.DOTALL)
        sums = {(shape, layouts[name]) for body, shape, name in reduced if "arith.addf" in body}
        products = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<(.*?), (#\w+)>", text)
        assert job.name == "forward" and products and (form == "bias" or sums)
        made.add((frozenset(sums), frozenset((shape, layouts[name]) for shape, name in products)))
    assert len(made) == 1, made


def is_refused() -> bool:
    try:
        flash_dmattn.attention(X, X, X, backend="eager")
    except BackendUnsupportedError:
        return True
    return False


def test_blocks_set_and_process_say_whether_the_mode_is_on() -> None:
    assert not is_refused()
    with flash_dmattn.config(invariant=True):
        assert is_refused() and flash_dmattn.config(backend="eager")(is_refused)()
        with flash_dmattn.config(invariant=False):
            assert not is_refused()
        assert is_refused()
    try:
        flash_dmattn.config.set(invariant=True)
        assert is_refused() and not flash_dmattn.config(invariant=False)(is_refused)()
    finally:
        flash_dmattn.config.set(invariant=False)
    assert not is_refused() and not process.invariant
    with pytest.raises(TypeError, match="invariant is 1; it needs to be True or False"):
        flash_dmattn.config(invariant=1)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match=r"config\(invariant=True\) was never entered"):
        flash_dmattn.config(invariant=True)


def test_the_environment_variable_is_1_or_0() -> None:
    code = "from flash_dmattn.dispatch.config import invariant; print(invariant())"
    on, wrong = run([({"FLASH_DMATTN_INVARIANT": value}, code) for value in ("1", "yes")])
    assert on.said.strip() == "True"
    assert "FLASH_DMATTN_INVARIANT is 'yes'; it needs to be '1' or '0'" in wrong.said and wrong.status != 0


def test_a_region_is_recomputed_in_the_mode_of_its_forward_pass() -> None:
    modes = []

    def region(x: Tensor) -> Tensor:
        modes.append(invariant())
        with flash_dmattn.config(invariant=False):  # a backend of a CPU runs it
            return flash_dmattn.attention(x, x, x)

    x = X.clone().requires_grad_()
    with flash_dmattn.config(invariant=True):
        out = checkpoint(region, x, use_reentrant=False)
    out.sum().backward()
    assert modes == [True, True] and blocks.now.invariant is None


FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.1},
    "a bias of one value per query": {"bias": (16, 4096, 1)},
    "max_scores": {"max_scores": True},
    "entropy": {"entropy": True},
    "softmax_scale 0": {"softmax_scale": 0.0},
    "head dims above 256": {"head_dim_v": 512},
    "a prepared mask of keys": {"mask": (1, 1, 1, 4096), "mask_prepared": True},
    "its heads are fewer than 16 query heads": {"bias": (1, 4096, 4096), "bias_grad": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_refusal_names_what_the_mode_lacks(name: str) -> None:
    call = {"q": (2, 4096, 16, 64), "grad": True, "backend": "triton"}
    assert explain_problem(**call, **FEATURES[name]).error is None  # type: ignore[arg-type]
    with flash_dmattn.config(invariant=True):
        assert explain_problem(**call).error is None  # type: ignore[arg-type]
        error = explain_problem(**call, **FEATURES[name]).error  # type: ignore[arg-type]
    assert error is not None and name in error and "config(invariant=True) is in force" in error


def test_other_backends_refuse_with_one_reason_and_explain_names_the_price() -> None:
    with flash_dmattn.config(invariant=True):
        explained = explain_problem((2, 4096, 16, 64), is_causal=True, grad=True)
        with_a_softcap = explain_problem((2, 4096, 16, 64), softcap=20.0, grad=True)
    assert (with_a_softcap.forward, with_a_softcap.backward) == ("triton", "triton")
    for verdict in with_a_softcap.verdicts:
        if verdict.backend != "triton":
            assert next(reason.code for reason in verdict.reasons) == "invariant", verdict
    assert "without it cuda forward, cuda backward would run" in str(with_a_softcap)
    assert "is invariant" in str(explained) and ", invariant, deterministic," in str(explained.problem)


def test_what_is_computed_beside_the_kernels_is_refused() -> None:
    bias = flash_dmattn.biases.Projected(X, torch.zeros(1, 5, 16), zero=2)
    with flash_dmattn.config(invariant=True):
        with pytest.raises(BackendUnsupportedError, match=r"bias is a Projected.*config\(invariant=True\)"):
            flash_dmattn.attention(X, X, X, bias=bias)
        with pytest.raises(BackendUnsupportedError, match=r"no backend accepts this call: .* invariant"):
            flash_dmattn.attention(X, X, X)
        with forward_ad.dual_level(), pytest.raises(BackendUnsupportedError, match=r"no backend accepts"):
            flash_dmattn.attention(forward_ad.make_dual(X, X), X, X)


def described_in_the_mode(arch: str, **more: Any) -> Any:
    with flash_dmattn.config(invariant=True):
        return explain_problem((2, 4096, 16, 64), device=arch, **more)


@pytest.mark.parametrize("requested", ("auto", "triton"))
def test_derivatives_that_no_kernel_of_the_mode_has(requested: Any) -> None:
    problem, kernels = described_in_the_mode("sm_90", grad=True).problem, BACKENDS["triton"]
    for select in (
        lambda: selection.select_tangents(problem, kernels),
        lambda: selection.select_second_derivative(problem, kernels, requested),
    ):
        with pytest.raises(BackendUnsupportedError, match=r"config\(invariant=True\) is in force, and the mode has no"):
            select()


@pytest.mark.parametrize("wrong", ((), ("triton",)), ids=("slow", "wrong"))
def test_speed_decides_nothing_where_one_backend_has_the_mode(wrong: tuple[str, ...]) -> None:
    """A profile may say that kernels are slower than eager, which does not have the mode. Wrong kernels stay out."""
    refused = (("triton", "measured", ("forward", "backward")),)
    judged = Judgement(("sdpa", "flex", "triton"), refused, "measured", wrong)
    with mock.patch.object(selection, "judgement", lambda problem: judged):
        assert (described_in_the_mode("sm_80").error is None) == (not wrong)
        assert described_in_the_mode("sm_80", backend="triton").error is None


def test_a_profile_is_not_measured_in_the_mode(capsys: pytest.CaptureFixture[str]) -> None:
    from flash_dmattn.tools import calibrate, calibrate_tiles

    with flash_dmattn.config(invariant=True):
        assert calibrate.run("cpu", 1.0) == calibrate_tiles.run(0, 1.0) == 1
    assert capsys.readouterr().err.count(calibrate.MODE) == 2


@pytest.mark.skipif(not dist.is_available(), reason="torch has no process groups here")
def test_ranks_that_share_a_sequence_have_no_such_mode() -> None:
    from flash_dmattn.distributed import SequenceLayout, context_parallel_attention

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with flash_dmattn.config(invariant=True), pytest.raises(ValueError, match="does not have the mode"):
            context_parallel_attention(X, X, X, group=dist.group.WORLD, layout=SequenceLayout.contiguous(3, 1))
    finally:
        dist.destroy_process_group()
