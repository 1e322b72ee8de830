"""Plans of Triton launches: decisions that follow from the process, not from the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_triton

import flash_dmattn
from flash_dmattn.backends.mask_choice import choose_form
from flash_dmattn.backends.triton.backend import BACKEND
from flash_dmattn.call import prepare_call
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import Flags, MaskView, NeedsGrad, RawFlags
from flash_dmattn.problem.inputs import Inputs
from flash_dmattn.validation import describe

pytestmark = needs_triton

SETTINGS = {
    "unset": ("pass", "ieee"),
    "older": ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
    "newer": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
    "of all backends": ("torch.backends.fp32_precision = 'tf32'", "tf32"),
    "highest": ("torch.set_float32_matmul_precision('highest')", "ieee"),
}


@pytest.mark.parametrize(
    ("heads", "blocks", "shares"),
    [
        (8, 128, 16),
        (8, 16, 8),
        (64, 128, 2),
        (66, 128, 2),
        (67, 128, 1),
        (4096, 1, 1),
        (1, 5, 2),
        (1, 1, 1),
        (1, 4096, 64),
        (16, 65, 8),
    ],
)
def test_shares_of_the_keys_of_few_rows_fill_the_sms(heads: int, blocks: int, shares: int) -> None:
    from flash_dmattn.triton_kernels.plan_forward import num_key_shares

    assert num_key_shares(heads, blocks, 132) == shares
    most = -(-blocks // shares)
    assert shares == 1 or -(-blocks // (shares - 1)) > most  # fewer would each have more


# Heads of a call on 132 SMs: blocks of few rows at head dims 64 and 128, shares of 4096 keys, shares of kept keys, and
# rows and blocks of these shares at head dim 128.
BY_HEADS: dict[int, tuple[tuple[int, int], int, int, tuple[int, int]]] = {
    8: ((128, 64), 16, 32, (16, 64)),
    66: ((128, 64), 2, 4, (16, 64)),
    67: ((256, 128), 1, 3, (16, 64)),
    88: ((256, 128), 1, 3, (16, 64)),
    89: ((128, 64), 1, 2, (16, 64)),
    264: ((128, 64), 1, 1, (16, 64)),
    265: ((256, 128), 1, 1, (64, 64)),
}


@pytest.mark.parametrize("heads", BY_HEADS)
def test_tiles_and_shares_of_few_rows_go_by_how_many_heads_an_sm_has(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.problem import MaskView
    from flash_dmattn.triton_kernels import plan, plan_forward

    launched: list[tuple[int, int, int]] = []

    def launch(kernel: Any, programs: int, rest: tuple[Any, ...], *_: Any) -> None:
        decided = dict(zip(kernel.arg_names[-len(rest) :], rest, strict=True))
        launched.append((decided["BLOCK_M"], decided["BLOCK_N"], programs))

    monkeypatch.setattr(plan, "Launch", launch)

    def planned(head_dim: int, mask: MaskView) -> tuple[int, int, int]:
        q = torch.empty(1, 4, heads, head_dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(1, 4096, heads, head_dim, dtype=torch.bfloat16, device="meta")
        call = plan.Call(q, k, k, mask, None, Flags(-1, -1, 0.1, 0.0, False))
        call.arch, call.num_sms = "sm_90", 132
        launched.clear()
        plan_forward.plan_forward(call)
        ((block_m, block_n, programs),) = launched
        assert programs % heads == 0
        return block_m, block_n, programs // heads

    blocks, shares, shares_of_lists, tile_of_lists = BY_HEADS[heads]
    kept = tuple(torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((1, 1, 4096), (1, 1), (1, 1, 4097)))
    assert [planned(d, MaskView()) for d in (64, 128)] == [(16, n, min(shares, 4096 // n // 2)) for n in blocks]
    assert planned(128, MaskView("keys", kept)) == (*tile_of_lists, shares_of_lists)


@pytest.fixture
def precision() -> None:
    """The setting as it was, after the test: by the name that every other one can be read by."""
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision = before


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_taken_where_torch_allows_it(setting: str, precision: None) -> None:
    from flash_dmattn.problem import MaskView
    from flash_dmattn.triton_kernels.plan import Call

    statement, wanted = SETTINGS[setting]
    exec(statement, {"torch": torch})
    q = torch.zeros(1, 4, 1, 16)
    problem, *_ = describe(prepare_call(q, q, q, None, None, None, None, RawFlags()))
    assert Call(q, q, q, MaskView(), None, problem.flags).precision == wanted


@pytest.mark.parametrize("reorder", [False, True])
def test_bounds_of_keys_know_of_one_query(reorder: bool) -> None:
    """Were the heads of a group rows of one tile, all but the first would be queries that no interval has."""
    from flash_dmattn.backends.triton.key_order import tiles_of_bounds
    from flash_dmattn.backends.triton.passes import _shares_keys_of_group, has_group_rows
    from flash_dmattn.masks import PreparedMask
    from flash_dmattn.operators import describe_operands

    q, k, flags = torch.zeros(1, 1, 6, 32), torch.zeros(1, 600, 2, 32), Flags(-1, -1, 0.1, 0.0, False)
    view = PreparedMask.from_topk(torch.randn(1, 2, 1, 600), 40, seqlen_q=1, reorder=reorder).view
    problem = describe_operands(Inputs(q, k, k, view), flags)
    assert has_group_rows(problem) and not _shares_keys_of_group(problem)
    assert tiles_of_bounds(problem, view).form == "tiles"
    assert _shares_keys_of_group(problem._replace(mask=None, mask_form="none"))


@pytest.mark.parametrize("needed", (*NeedsGrad._fields, None), ids=str)
def test_gradients_of_few_keys_that_feel_the_rounding_of_out(needed: str | None) -> None:
    """All gradients that need delta, one at a time; dsink sums it over all rows, which average its rounding."""
    from flash_dmattn.triton_kernels.launch import needs_fp32_delta

    needs = NeedsGrad() if needed is None else NeedsGrad(**{needed: True})
    asked = needed in ("q", "k", "bias")
    for dtype in (torch.bfloat16, torch.float16):
        assert needs_fp32_delta(dtype, 4096, (15, 0), needs) is asked
    others = ((torch.float32, 4096, (15, 0)), (torch.bfloat16, 16, (15, 0)), (torch.bfloat16, 4096, (15, -1)))
    assert not any(needs_fp32_delta(*other, needs) for other in others)


@pytest.mark.parametrize(("rows", "tiles"), [(192, (20, False)), (176, (15, True)), (16, (5, True))])
def test_programs_search_their_sequence_where_that_saves_a_fifth_of_the_tiles(
    rows: int, tiles: tuple[int, bool]
) -> None:
    from flash_dmattn.triton_kernels.plan_sequences import SequenceCall

    call: Any = SimpleNamespace(number=4)
    assert SequenceCall._tiles(call, rows, 80, True, 16) == tiles
    assert SequenceCall._tiles(call, rows, 80, False, 16) == (20, False)


def test_as_many_programs_share_a_walk_as_sms_run_or_memory_has_slots_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.triton_kernels import plan_slots

    monkeypatch.setattr(plan_slots, "PROGRAMS_PER_SM", 2)
    monkeypatch.setattr(plan_slots, "PROGRAMS_WITH_SLOTS", 1)
    shared = [plan_slots.chunks_of(8, 1, 2, slots) for slots in (None, 8, 1)]
    assert shared == [(2, 4), (4, 2), (8, 1)]


def test_what_makes_the_heads_of_a_group_rows_of_a_tile() -> None:
    """One query, groups, many keys; not behind a left side, with dropout, nor with tiles or keys of each query head."""
    from flash_dmattn.backends.triton.passes import GROUP_ROWS_FROM, _shares_keys_of_group, has_group_rows

    for left, is_taken in ((-1, True), (0, False), (3, False)):
        explained = explain_problem((1, 1, 8, 64), kv_heads=2, seqlen_k=GROUP_ROWS_FROM, window_size=(left, -1))
        assert has_group_rows(explained.problem) == is_taken

    def takes(seqlen_q: int = 1, heads: int = 4, keys: int = GROUP_ROWS_FROM, mask: str = "none", **flags: Any) -> bool:
        form, _, mask_heads = mask.partition(" ")
        shape = None if form == "none" else (1, int(mask_heads or 1), 1, keys)
        p = explain_problem((1, seqlen_q, heads, 16), kv_heads=2, seqlen_k=keys, mask=shape).problem
        p = p._replace(mask_form=form, flags=p.flags._replace(**flags))
        return has_group_rows(p) and _shares_keys_of_group(p)

    assert takes() and takes(right=0) and takes(mask="dense") and takes(mask="keys 1") and takes(mask="keys 2")
    assert not any((takes(2), takes(heads=2), takes(keys=GROUP_ROWS_FROM - 1), takes(left=0), takes(dropout_p=0.1)))
    assert not any((takes(mask="tiles 1"), takes(mask="keys 4")))


@pytest.mark.parametrize("rows", ["Lq", "1"])
@pytest.mark.parametrize(("sizes", "form"), [((2, 256, 4), "dense"), ((4, 512, 8), None), ((1, 1152, 1), None)])
def test_a_bool_mask_of_few_pairs_is_read_as_it_is(rows: str, sizes: tuple[int, int, int], form: str | None) -> None:
    batch, length, heads = sizes
    x = torch.empty(batch, length, heads, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 1, length if rows == "Lq" else 1, length, dtype=torch.bool, device="meta")
    problem = flash_dmattn.explain(x, x, x, mask).problem._replace(
        device="cuda", arch="sm_90", needs_grad=NeedsGrad(True, True, True)
    )
    packed = "tiles" if rows == "Lq" else "intervals"
    assert choose_form(problem, BACKEND, BACKEND).form == (form or packed)


@pytest.mark.parametrize(("seqlen_k", "copies"), [(256, False), (1152, True)])
def test_explain_announces_no_copy_where_a_bool_mask_is_read_as_it_is(seqlen_k: int, copies: bool) -> None:
    q, k = (torch.empty(1, *rows, 64, dtype=torch.bfloat16, device="meta") for rows in ((512, 8), (seqlen_k, 1)))
    mask = torch.empty(1, 1, 1, seqlen_k, dtype=torch.bool, device="meta")
    problem = flash_dmattn.explain(q, k, k, mask).problem._replace(device="cuda", arch="sm_90")
    assert any("order of kept keys" in note for note in BACKEND.notes(problem)) is copies


@pytest.mark.parametrize(
    ("head_dim", "dtype", "refusals"),
    [
        (256, torch.float32, ((), ())),
        (264, torch.float32, ((), ("fp32_head_dim",))),
        (512, torch.bfloat16, ((), ())),
        (520, torch.bfloat16, (("head_dim",), ("head_dim",))),
    ],
)
def test_head_dims_that_the_rules_take(
    head_dim: int, dtype: torch.dtype, refusals: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    """In fp32 the backward pass refuses what the forward pass takes."""
    x = torch.empty(1, 2048, 8, head_dim, dtype=dtype, device="meta")
    problem = flash_dmattn.explain(x, x, x).problem._replace(device="cuda", arch="sm_90")
    for direction, codes in zip(("forward", "backward"), refusals, strict=True):
        assert tuple(reason.code for reason in BACKEND.broken_rules(problem, (direction,))) == codes
    slow = [reason.code for reason in BACKEND.unmet(BACKEND.auto_rules, problem, ("forward",))]
    assert slow == (["fp32_head_dim_is_slow"] if head_dim == 264 else [])


def test_one_launch_for_dk_and_dv_up_to_256_and_pairs_above() -> None:
    """Wide heads store pairs, and ds of a bias with them, and multiply them three times."""
    from compiled_triton import Variant, run_plans

    names: list[str] = []

    def record(launch: Any, *tensors: Any) -> None:
        names.append(launch.kernel.__name__.removesuffix("_kernel"))

    full = ("B", "Hq", "Lq", "Lk")
    for head_dim in (256, 512):
        run_plans(Variant(head_dim=head_dim, bias=full, seqlen_q=512, seqlen_k=512).call("sm_90"), record)
    narrow, wide = ["backward_keys", "backward_product"], ["pairs", "pair_rows", "pair_columns", "pair_columns"]
    assert names == ["forward", "delta", *narrow, "forward", "delta", *wide]


@pytest.mark.parametrize(
    ("owners", "group", "lines", "is_split", "chunks"),
    [
        (32, 1, 1024, False, (32, 1, 1024)),  # all at once
        (32, 1, 8192, False, (2, 1, 8192)),
        (4, 8, 8192, False, (2, 1, 8192)),  # one head of each of two owners keeps more programs busy
        (4, 8, 2048, False, (4, 8, 2048)),
        (1, 32, 8192, False, (1, 2, 8192)),
        (4, 4, 2048, True, (3, 1, 2048)),  # members must not share a sum
        (4, 1, 16384, False, (1, 1, 8192)),  # lines of one head
        (4, 1, 20000 // 128 * 128, False, (1, 1, 6656)),
    ],
)
def test_pairs_in_chunks(owners: int, group: int, lines: int, is_split: bool, chunks: tuple[int, int, int]) -> None:
    """A chunk never takes more memory than it may."""
    from flash_dmattn.triton_kernels.plan_pairs import SPACE, chunks_of

    made = chunks_of(owners, group, lines, lines * 4, 3, 128, is_split)
    assert made == chunks and made.slots * made.lines * lines * 4 <= SPACE
