"""The rule tables, held together on random problems, and the support matrix that is generated from them."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import cuda_forms
import pytest
import torch
from draws import BF16, FORMS, FP16, FP32, FP64, Features, draw
from out_of_tree import replaced

from docs import support_matrix
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.protocol import Availability, Backend, Reason, Rule
from flash_dmattn.biases import ByDistance
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.dispatch.selection import (
    BackendError,
    BackendUnsupportedError,
    choose,
    passes_of,
    reasons_against,
    selected_names,
)
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import AttentionProblem, SequenceSpec, dtype_name

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("cuda", "triton", "flex", "sdpa", "eager", "reference")
PASSES = ("forward", "backward")
MANY = 1_000_000  # enough for every rule that counts elements
_LISTS = {"mask": (2, 1, 4096, 4096), "mask_form": "lists", "block_q": 1, "block_k": 64}
_BAND = {"bias": (16, 4096, 64), "by_distance": (63, "zero", True)}
_PACKED = {"q": (1, 8192, 16, 64), "sequences": SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)}
# Calls that break the rules of triton, as `Rule.example` has them for the other backends.
OF_TRITON: dict[str, dict[str, Any]] = {
    "device": {"device": "cpu"},
    "arch": {"device": "sm_75"},
    "dtype": {"dtype": "fp64"},
    "head_dim": {"q": (2, 4096, 16, 520)},
    "invariant": {"invariant": True, "dropout_p": 0.1},
    "invariant_dbias": {"invariant": True, "bias": (1, 4096, 4096), "bias_grad": True},
    "invariant_tangents": {"invariant": True},
    "relative_sequences": {**_PACKED, "bias": (16, 257), "by_distance": (128, "clamp", False), "bias_grad": True},
    "relative_head_dim": {
        "q": (2, 4096, 16, 264),
        "bias": (16, 257),
        "by_distance": (128, "clamp", False),
        "bias_grad": True,
    },
    "band_sequences": {**_PACKED, "bias": (16, 8192, 64), "by_distance": (63, "zero", True)},
    "band_heads": {**_BAND, "bias_grad": True},
    "values_span": {"bias": (16, 2**31), "by_distance": (4, "clamp", False)},
    "fp32_head_dim": {"q": (2, 4096, 16, 264), "dtype": "fp32"},
    "tangents_head_dim": {"q": (2, 4096, 16, 264)},
    "tangents_form": _LISTS,
    "list_blocks": {**_LISTS, "block_k": 48},
    "list_queries": {**_LISTS, "block_q": 256},
    "list_heads": {**_LISTS, "mask": (2, 16, 4096, 4096), "kv_heads": 4},
    "list_head_dim": {**_LISTS, "q": (2, 4096, 16, 512), "dtype": "fp32"},
    "list_dropout": {**_LISTS, "dropout_p": 0.1},
    "list_bias": {**_LISTS, "bias": (2, 16, 4096, 4096)},
    "measured_gpu": {"device": "sm_80"},
    "fp32_head_dim_is_slow": {"q": (2, 4096, 16, 264), "dtype": "fp32"},
}
ELSEWHERE = {"list_pages", "list_sequences"}  # tests/interpreted_list_calls.py breaks them
ALL_RULES = [
    pytest.param(name, rule._replace(example=rule.example or OF_TRITON[rule.code]), id=f"{name}: {rule.code}")
    for name in SHIPPED
    for rule in (*BACKENDS[name].rules, *BACKENDS[name].auto_rules)
    if rule.code not in ELSEWHERE
]


@pytest.fixture(autouse=True)
def with_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)  # whichever this checkout has built


@pytest.mark.parametrize(("name", "rule"), ALL_RULES)
def test_its_example_breaks_a_rule_alone(name: str, rule: Rule) -> None:
    """And says so with the words of the page, a hint, and in the error of a call that names the backend."""
    backend, problem = BACKENDS[name], support_matrix.example_of(rule)
    passes = ("tangents",) if rule.passes == ("tangents",) else passes_of(problem)
    reason = Reason(name, rule.code, rule.says(problem), rule.hint)
    if any(rule.code == each.code for each in backend.auto_rules):
        assert not backend.broken_rules(problem, passes) and rule.hint
        assert backend.unmet(backend.auto_rules, problem, passes) == (reason,)
        return
    assert backend.broken_rules(problem, passes) == (reason,)
    if passes == ("tangents",):
        assert backend.accepts(problem, "forward") and not backend.serves_tangents(problem)
        return
    assert rule.hint and all(backend.accepts(problem, each) is (each not in rule.passes) for each in passes)
    with replaced(name, probe=lambda: Availability(True)), pytest.raises(BackendUnsupportedError) as caught:
        choose(problem, name)
    assert caught.value.reasons == (reason,) and f"\n  - {reason}" in caught.value.details


CALLS: Features = {
    "batch": (0, 1, 2),
    "seqlen_q": (0, 1, 4095, MANY),
    "seqlen_k": (0, 1, 33, MANY),
    "group": (1, 1, 4),
    "head_dim": (1, 8, 16, 64, 96, 256, 512, 520),
    "head_dim_v": (0, 8, 128, 300, 600),
    "dtype": (FP16, BF16, FP32, FP64),
    "mask": (None, *FORMS),
    "bias": (None, *FORMS),
    "bias_dtype": (None, FP16, FP32, FP64),
    "is_causal": (True, False),
    "softmax_scale": (None, 0.0, 0.3),
    "softcap": (0.0, 30.0),
    "window_size": (None, (-1, 0), (16, 4)),
    "sink": (None,),
    "dropout_p": (0.0, 0.0, 0.1),
    "relative": ("1", "Lq", "Lq"),
}


def described(seed: int) -> AttentionProblem:
    """One random call; the seed is the whole repro."""
    rng = random.Random(seed)
    case = draw(rng, CALLS, seed)
    device = "gfx942" if seed % 10 == 0 else rng.choice(("cpu", "sm_75", "sm_80", "sm_90", "sm_100"))
    flags = {name: rng.random() < 0.5 for name in ("grad", "bias_grad", "deterministic", "return_lse")}
    flags["bias_grad"] &= case.bias is not None or case.relative is not None
    problem = cuda_forms.described(case, device=device, return_probs=rng.random() < 0.2, **case.dropping(), **flags)
    if problem.mask is None or seed % 4 != 1:
        return problem
    blocks = {"block_q": rng.choice((1, 1, 256)), "block_k": rng.choice((1, 8, 16))}
    return problem._replace(mask_form="lists", flags=problem.flags._replace(**blocks))


def described_sequences(seed: int) -> AttentionProblem:
    """The same of a call with packed sequences, or with pages."""
    pick = random.Random(seed)
    if seed % 4 == 0:
        page, heads = pick.choice((1, 16, 48, 64, 256)), pick.choice((1, 4))
        paged = {
            "q": (1, 300, heads, pick.choice((8, 64, 100))),
            "seqlen_k": page,
            "sequences": SequenceSpec("paged_packed", 3, 300, 4 * page, 200, 4 * page, page_size=page),
            "dtype": pick.choice(("fp16", "bf16", "fp32")),
            "device": pick.choice(("cpu", "sm_80", "sm_90", "sm_90")),
            "is_causal": pick.random() < 0.5,
        }
        return explain_problem(**paged).problem
    number, most, heads = pick.choice((1, 3)), pick.choice((1, 64, 2048)), pick.choice((1, 4))
    tokens = number * most + pick.choice((0, 5))
    by_position = (pick.choice((1, number)), pick.choice((1, heads)), most, most)
    bias = pick.choice((None, by_position, (pick.choice((1, heads)), tokens, most), (heads, 1, tokens)))
    by_distance = None
    distances = random.Random(f"relative {seed}").random()
    if distances < 0.1:
        bias, by_distance = (heads, tokens, 9), ByDistance(4, "zero", True)
    elif distances < 0.3:
        bias, by_distance = (heads, 9), ByDistance(4, "clamp", False)
    tree = random.Random(f"tree {seed}").random() < 0.1
    mask: dict[str, Any] = {"mask": pick.choice((None, None, by_position))}
    if tree:
        mask = {"mask": (pick.choice((1, number)), most, most), "mask_prepared": True}
    packed = {
        "q": (1, tokens, heads, pick.choice((8, 64, 100, 256))),
        "sequences": SequenceSpec("packed", number, tokens, tokens, most, most),
        "dtype": pick.choice(("fp16", "bf16", "fp32")),
        "device": pick.choice(("cpu", "sm_80", "sm_90", "sm_90")),
        **mask,
        "bias": bias,
        "by_distance": by_distance,
        "bias_dtype": pick.choice((None, "fp32")),
        "grad": pick.random() < 0.6,
        "bias_grad": bias is not None and pick.random() < 0.5,
        "is_causal": pick.random() < 0.5 and not tree,
        "softcap": pick.choice((0.0, 30.0)),
        "window_size": None if tree else pick.choice((None, (-1, 0), (16, 4))),
        "deterministic": pick.random() < 0.5,
    }
    return explain_problem(**packed).problem


def described_band(seed: int) -> AttentionProblem:
    """The same of a bias by query and distance, whose values entries or heads may share, or with packed sequences."""
    pick = random.Random(seed)
    band: dict[str, Any] = {"by_distance": ByDistance(4, "zero", True), "device": "sm_90", "dtype": "bf16"}
    band |= {"grad": True, "bias_grad": pick.random() < 0.7}
    heads = pick.choice((1, 4))
    if seed % 4 == 0:
        sequences = SequenceSpec("packed", 2, 60, 60, 40, 40)
        return explain_problem((1, 60, 4, 64), bias=(heads, 60, 9), sequences=sequences, **band).problem
    return explain_problem((2, 60, 4, 64), bias=(pick.choice((1, 2)), heads, 60, 9), **band).problem


@pytest.fixture(scope="module")
def problems() -> list[tuple[int, AttentionProblem]]:
    return [
        *((seed, described(seed)) for seed in range(1000)),
        *((seed, described_sequences(seed)) for seed in range(1000, 1300)),
        *((seed, described_band(seed)) for seed in range(1300, 1320)),
    ]


def all_rules(backend: Backend) -> tuple[Rule, ...]:
    return (*backend.rules, *backend.auto_rules)


@pytest.mark.parametrize("name", SHIPPED)
class TestRules:
    def test_accepts_if_and_only_if_no_rule_is_broken(
        self, name: str, problems: list[tuple[int, AttentionProblem]]
    ) -> None:
        backend = BACKENDS[name]
        for seed, problem in problems:
            for direction in PASSES:
                reasons = backend.broken_rules(problem, (direction,))
                where = f"described({seed}), {direction}: {problem}"
                assert backend.accepts(problem, direction) == (not reasons), where

    def test_says_works_on_any_problem_that_breaks_the_rule(
        self, name: str, problems: list[tuple[int, AttentionProblem]]
    ) -> None:
        for rule in all_rules(BACKENDS[name]):
            for seed, problem in problems:
                holds = rule.is_kept(problem)
                text = "kept" if holds else rule.says(problem)
                assert isinstance(holds, bool), f"{rule.code}, described({seed})"
                assert isinstance(text, str) and text and "\n" not in text, f"{rule.code}, described({seed}): {text!r}"

    def test_a_reason_contains_the_values_found(self, name: str, problems: list[tuple[int, AttentionProblem]]) -> None:
        for rule in BACKENDS[name].rules:
            for seed, problem in problems:
                if set(rule.passes) & set(passes_of(problem)) and not rule.is_kept(problem):
                    text = rule.says(problem)
                    assert len(text.split()) > 2 and all(text.split(" ")), f"{rule.code}, described({seed}): {text!r}"
                    words = set(re.findall(r"[\w.]+", text))
                    assert words & values(problem), f"{rule.code}, described({seed}): no value of the call in {text!r}"

    def test_codes_are_unique_words(self, name: str, problems: object) -> None:
        codes = [rule.code for rule in all_rules(BACKENDS[name])]
        assert len(set(codes)) == len(codes), codes
        assert all(re.fullmatch(r"[a-z0-9_]+", code) for code in codes), codes

    def test_each_rule_names_passes_that_exist(self, name: str) -> None:
        for rule in all_rules(BACKENDS[name]):
            assert rule.passes and set(rule.passes) <= {*PASSES, "tangents"}, rule.code


def values(problem: AttentionProblem) -> set[str]:
    """Words by which a reason can name what it found in a call."""
    numbers = (problem.head_dim, problem.head_dim_v, problem.seqlen_q, problem.seqlen_k, problem.batch)
    numbers += (problem.num_heads, problem.num_heads_k)
    numbers += () if problem.sequences is None else (problem.sequences.page_size,)
    flags = ("deterministic", "return_lse", "return_probs", "is_causal")
    actual = {str(number) for number in numbers}
    actual |= {problem.device, problem.arch, *map(str, (problem.softcap, problem.softmax_scale, problem.dropout_p))}
    dtypes = {problem.dtype} | ({problem.bias_tensor.dtype} if problem.bias_tensor is not None else set())
    actual |= {name for dtype in dtypes for name in (dtype_name(dtype), str(dtype))}
    actual |= {flag for flag in flags if getattr(problem, flag)}
    actual |= {name for name, needed in zip(problem.needs_grad._fields, problem.needs_grad) if needed}
    actual |= {str(spec.span()) for spec in (problem.mask, problem.bias) if spec is not None}
    actual |= {str(problem.flags.block_q), str(problem.flags.block_k)}
    if problem.relative is not None:
        actual |= {str(problem.relative.shape[3])}
    heads = (
        (problem.q_strides, problem.seqlen_q, problem.head_dim),
        (problem.k_strides, problem.seqlen_k, problem.head_dim),
        (problem.v_strides, problem.seqlen_k, problem.head_dim_v),
    )
    # Elements of memory from the first to the last of one head.
    return actual | {str(1 + max(rows - 1, 0) * s[1] + (columns - 1) * s[3]) for s, rows, columns in heads}


def test_the_choice_follows_the_rules(problems: list[tuple[int, AttentionProblem]]) -> None:
    for seed, problem in problems:
        where = f"described({seed}): {problem}"
        for name in BACKENDS:
            reasons = reasons_against(BACKENDS[name], problem, passes_of(problem))
            try:
                selection = choose(problem, name)
            except BackendError as refusal:
                assert refusal.reasons == reasons and reasons, where
            else:
                assert not reasons and selection.forward is BACKENDS[name], where
                assert selection.forward.is_differentiable or (selection.backward is None) != any(problem.needs_grad), (
                    where
                )
        try:
            chosen = selected_names(problem, choose(problem, "auto"))
        except BackendError:
            # Eager serves everything but the probabilities, which auto gives to nobody.
            assert problem.return_probs, where
        else:
            for name, direction in zip(chosen, PASSES):
                reasons = () if name is None else reasons_against(BACKENDS[name], problem, (direction,), auto=True)
                if name == "triton":  # in its usual place nobody need have measured it
                    reasons = tuple(reason for reason in reasons if reason.code != "measured_gpu")
                assert not reasons, where


def test_random_problems_are_varied(problems: list[tuple[int, AttentionProblem]]) -> None:
    # The properties above say little about problems that are all alike.
    seen = [problem for _, problem in problems]
    assert {p.device for p in seen} == {"cpu", "cuda"} and len({p.dtype for p in seen}) == 4
    assert len({p.needs_grad for p in seen}) == 4 and len(set(seen)) > 950


class TestMatrix:
    def test_page_is_current(self) -> None:
        actual = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
        assert actual == support_matrix.document(SHIPPED), "not current: run python docs/support_matrix.py --write"

    @pytest.mark.parametrize("name", SHIPPED)
    def test_cells_are_what_the_rules_say(self, name: str) -> None:
        backend = BACKENDS[name]
        for row in support_matrix.rows():
            word, reasons = support_matrix.cell(backend, row.problem)
            where = f"{row.group}, {row.name}"
            passes = passes_of(row.problem)
            broken = backend.broken_rules(row.problem, passes)
            if word in ("yes", "by name"):
                assert not broken, where
                assert bool(reasons) == (word == "by name"), where
            else:
                assert word in ("no", "forward") and set(reasons) == set(broken) and reasons, where
                assert (word == "forward") == backend.accepts(row.problem, "forward"), where

    def test_a_rule_changes_the_page(self) -> None:
        no_softcap = Rule("softcap", lambda p: p.softcap == 0, lambda p: f"softcap is {p.softcap:g}", "leave it out")
        with replaced("eager", rules=(no_softcap,)):
            page = support_matrix.document(SHIPPED)
        assert re.search(r"^\| +\| softcap; softcap, head dim 256 \|.*\| no: softcap \|$", page, re.MULTILINE), page
        assert "| `eager` | softcap | softcap is 30 (leave it out)" in page

    def test_write_makes_the_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder in ("csrc", "docs", "triton_kernels"):
            (tmp_path / folder).mkdir()
        monkeypatch.setattr(support_matrix, "ROOT", tmp_path)
        monkeypatch.setattr(
            cuda_rules, "installed_instances", lambda: frozenset()
        )  # the pages do not tell of this build
        assert support_matrix.main(["--write"]) == 0
        written = (tmp_path / "docs" / "support.md").read_text(encoding="utf-8")
        monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
        assert written == support_matrix.document(tuple(BACKENDS))
        assert "| device | sm_90 |" in written


def test_problems_hold_no_tensor_and_ask_for_the_gradients_that_their_rows_name() -> None:
    for row in support_matrix.rows():
        assert not any(isinstance(x, torch.Tensor) for x in row.problem)
        assert hash(row.problem) == hash(row.problem)
        if "dbias" in row.name:
            assert row.problem.needs_grad.bias and row.problem.needs_grad.q == ("only dbias" not in row.name), row.name
