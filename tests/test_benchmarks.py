"""The benchmarks without a GPU: cases, inputs, floors, the truth that results are held to, and what systems compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from benchmark_systems import CPU, named
from torch.nn.attention.flex_attention import create_block_mask

import flash_dmattn
from benchmarks import systems
from benchmarks.cases import CASES, Case, MaskRule
from benchmarks.floors import Rates, floors
from benchmarks.inputs import Inputs, count, make_inputs, shifted_windows
from benchmarks.suites.trial import outputs
from benchmarks.systems import Mode, flexattention, ours
from benchmarks.truth import Yardstick, errors, truth, wrong

NAMES = ("causal-gqa", "bias-1hll-d64", "keys-8k", "topk-8k", "blocks", "band", "mask-documents", "mask-padding")
NAMES += ("relative-t5-2k", "mla-4k")
H200 = Rates(790e12, 4.3e12, "known")


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return named(request.param).reduced(256)


@pytest.fixture
def inputs(case: Case) -> Inputs:
    return make_inputs(case, CPU, torch.float32)


def test_inputs_have_the_shapes_that_their_case_says(case: Case) -> None:
    made, problem = make_inputs(case, CPU), case.explain("cpu").problem
    bias = made.bias
    if bias is not None and bias.dim() == 3:  # by distance
        bias = bias[:, :, None]
    for x, spec in ((made.mask, problem.mask), (bias, problem.bias_tensor)):
        assert (None if x is None else tuple(x.shape)) == (None if spec is None else tuple(spec.shape))
    assert made.q.shape == (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
    assert made.k.shape == (problem.batch, problem.seqlen_k, problem.num_heads_k, problem.head_dim)
    assert made.v.shape == (*made.k.shape[:3], problem.head_dim_v) and made.dout.shape[3] == problem.head_dim_v
    assert all(x.requires_grad for x in made.leaves.values())
    assert not any(x.requires_grad for x in make_inputs(named("decode-8k").reduced(256), CPU).leaves.values())


def test_counts(inputs: Inputs) -> None:
    q, k, v, _, mask, _, is_causal = inputs[:7]
    bias = inputs.passed_bias
    probs = flash_dmattn.attention(q, k, v, mask, bias, is_causal=is_causal, return_probs=True, backend="reference")[1]
    seen = probs > 0
    counts = count(inputs)
    assert counts.pairs == int(seen.sum())
    assert counts.density == pytest.approx(seen.double().mean().item())
    assert counts.empty_rows == int((~seen.any(-1)).sum())
    tiles = seen.unflatten(3, (2, 128)).unflatten(2, (2, 128)).any(5).any(3)
    assert counts.active_tiles == pytest.approx(tiles.double().mean().item())


def test_masks_are_what_their_names_say() -> None:
    made = {}
    for name in NAMES:
        small = named(name).reduced(256)
        if small.mask is not None:
            made[small.mask.kind] = make_inputs(small, CPU, torch.float32).mask
    rows = torch.arange(256)
    assert made["keys"].shape[2] == 1 and made["keys"].sum(-1).eq(42).all()
    assert made["topk"].sum(-1).eq((rows + 1).clamp(max=42)).all()
    assert torch.equal(made["band"][0, 0], (rows[:, None] - rows).abs() <= 64)
    blocks = made["blocks"].unflatten(3, (2, 128)).unflatten(2, (2, 128))
    assert torch.equal(blocks.any(5).any(3), blocks.all(5).all(3))
    assert blocks.any(5).any(3).diagonal(dim1=-2, dim2=-1).all()
    documents = made["documents"][:, 0]
    assert torch.equal(documents, documents.mT) and documents.diagonal(dim1=1, dim2=2).all()
    assert torch.equal(documents.float() @ documents.float() > 0, documents)  # whoever shares a document with both
    lengths = made["padding"][:, 0, 0].sum(-1)
    assert torch.equal(made["padding"][:, 0, 0], rows < lengths[:, None]) and lengths.ge(128).all()
    rule = MaskRule("random", 0, 0.25, "bhij")
    scattered = make_inputs(dataclasses.replace(named("form-full"), mask=rule), CPU).mask
    assert scattered.shape == (2, 8, 384, 384) and scattered.any(-1).all()
    assert scattered.float().mean().item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("name", "pairs", "forward", "backward"),
    [
        # FLOP bound: 4 and 10 x 64 x 4 x 32 x 4096^2 / 790e12.
        ("dense-d64", 4 * 32 * 4096**2, 0.6959, 1.7396),
        # 2 (192 + 128) and 6 x 192 + 4 x 128 of each of the pairs that causality leaves.
        ("mla-4k", 64 * 4096 * 4097 // 2, 0.4350, 1.1311),
        # Memory bound: bias (4,16,2048,2048) of 2 bytes read, and in the backward written too, with q k v out dout lse.
        ("bias-bhll-d64", 4 * 16 * 2048**2, 0.1406, 0.2814),
        # FLOP bound by a little: the bool mask takes 0.125 ms, as causality leaves half of it, and q k v out dout 0.04.
        ("topk-16k", 16 * (1024 * 1025 // 2 + 15360 * 1024), 0.1685, 0.4214),
        # k and v of 8 x 8192 x 8 x 128 are 2 x 134 MB; what the one query reads and writes is negligible.
        ("decode-8k", 8 * 32 * 8192, 0.0625, 0.1249),
    ],
)
def test_floors(name: str, pairs: int, forward: float, backward: float) -> None:
    case = named(name)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(case.batch, case.seqlen_q, case.heads, case.head_dim)
    dout = empty(case.batch, case.seqlen_q, case.heads, case.value_dim)
    k, v = (empty(case.batch, case.seqlen, case.heads_k, dim) for dim in (case.head_dim, case.value_dim))
    mask = empty(*case.shape_of(case.mask.dims), dtype=torch.bool) if case.mask else None
    bias = empty(*case.shape_of(case.bias)) if case.bias else None
    call = Inputs(q, k, v, dout, mask, bias, case.is_causal)
    computed = floors(call, pairs, reads_mask=True)
    assert [computed[p].ms(H200) for p in ("forward", "backward")] == pytest.approx([forward, backward], rel=2e-3)
    assert computed["step"].flop == computed["forward"].flop + computed["backward"].flop
    if mask is not None:
        prepared = floors(call, pairs, reads_mask=False)
        saved = computed["forward"].moved - prepared["forward"].moved
        assert saved == mask.numel() * (case.seqlen + 1) // (2 * case.seqlen)
        assert prepared["backward"] == computed["backward"]


def test_keys_that_nobody_attends_need_not_be_read() -> None:
    case = dataclasses.replace(named("decode-keys-64k"), batch=1, seqlen=1024)
    call = make_inputs(case, CPU)
    assert call.mask is not None and call.mask.shape == (1, 8, 1, 1024)
    call.mask[:] = torch.arange(1024) % 4 == 0
    full = floors(call._replace(mask=None), 0, reads_mask=False)
    quarter = floors(call, 0, reads_mask=False)
    keys = 2 * 2 * call.k.numel()
    assert full["forward"].moved - quarter["forward"].moved == keys * 3 / 4
    assert full["backward"].moved - quarter["backward"].moved == keys * 3 / 4  # gradients are written whole
    # Query heads that share keys may see different ones.
    per_head = torch.arange(1024) % 4 == torch.arange(32)[:, None] % 2
    per_group = floors(call._replace(mask=per_head[None, :, None]), 0, reads_mask=False)
    assert full["forward"].moved - per_group["forward"].moved == keys / 2


def test_yardstick_of_the_first_heads_and_of_all() -> None:
    """Plain PyTorch on a part of the heads is plain PyTorch, and a bias that heads share needs all of them."""
    case = named("form-topk").reduced(256)
    inputs = make_inputs(case, CPU)
    exact = truth(inputs)
    part = Yardstick(inputs, exact)
    assert part.parts == 2 and part.plain["dq"].shape[2] == 2
    assert list(part.limits) == ["out", "lse", "dq", "dk", "dv", "dbias"]
    reference = outputs(ours.bind("reference", inputs, Mode(with_lse=True)), inputs, backward=True)
    assert all(x < 0.02 for x in part.distances(reference).values())
    assert wrong(errors(reference, exact), part.limits, ours=True) == []
    shared = make_inputs(named("form-bias-ij").reduced(256), CPU)
    assert Yardstick(shared, truth(shared)).parts == 1


# Systems: every run compares the results of each with the truth, also of peers with kernels only for GPUs.


def results_agree(call: systems.Bound, inputs: Inputs, backward: bool = True) -> None:
    exact = truth(inputs, backward)
    computed = errors(outputs(call, inputs, backward=backward), exact)
    assert {"out", *(inputs.leaves if backward else ())} <= set(computed)
    assert all(error < 1e-5 for error in computed.values()), computed


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's own dense formula has a backward pass on CPU, once nothing refuses it."""
    import torch._functorch.config
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
    before = torch._functorch.config.donated_buffer
    yield
    torch._functorch.config.donated_buffer = before


@pytest.mark.parametrize("case", NAMES[1:7:2], indirect=True)
@pytest.mark.parametrize("mode", [Mode(), Mode(prepared=True), Mode(with_lse=True)], ids=str)
@pytest.mark.parametrize("name", ["eager", "reference", "sdpa-math", "flexattention"])
def test_results_are_those_of_the_truth(name: str, mode: Mode, inputs: Inputs, backward_on_cpu: None) -> None:
    results_agree(systems.by_name(name).bind(inputs, mode), inputs)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("name", {(case.mask.kind, case.mask.dims): case.name for case in CASES if case.mask}.values())
def test_block_masks_are_those_of_torch(name: str, heads_k: int) -> None:
    case = dataclasses.replace(named(name).reduced(300), heads=4, heads_k=heads_k)
    inputs = make_inputs(case, CPU)
    made = flexattention.block_mask_maker(inputs)()
    assert made is not None and inputs.mask is not None
    batch, heads = (None if inputs.mask.shape[dim] == 1 else size for dim, size in ((0, case.batch), (1, case.heads)))
    exact = create_block_mask(made.mask_mod, batch, heads, *inputs.lengths, device="cpu")
    for lists in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(made, lists), getattr(exact, lists))
        assert torch.equal(getattr(made, f"full_{lists}"), getattr(exact, f"full_{lists}"))


def test_shifted_windows() -> None:
    """An image of 3 x 3 windows of 4 x 4 tokens, rolled by half a window, against its definition by regions."""
    side, windows = 4, 3
    image = torch.zeros(side * windows, side * windows)
    count = 0
    for rows in (slice(0, -side), slice(-side, -side // 2), slice(-side // 2, None)):
        for columns in (slice(0, -side), slice(-side, -side // 2), slice(-side // 2, None)):
            image[rows, columns] = count
            count += 1
    regions = image.unflatten(1, (windows, side)).unflatten(0, (windows, side)).transpose(1, 2).reshape(9, 16)
    expected = regions[:, None, :, None] == regions[:, None, None, :]
    computed = shifted_windows(20, windows, side**2, CPU)
    assert computed.shape == (20, 1, 16, 16)
    assert torch.equal(computed[:9], expected) and torch.equal(computed[9:18], expected)
    # Windows of 7 x 7 tokens have 4 of the last region.
    odd = shifted_windows(4, 2, 49, CPU)
    assert odd[0].all() and odd.diagonal(dim1=2, dim2=3).all()
    assert odd[1, 0, 0].view(7, 7).all(0).tolist() == [True] * 4 + [False] * 3
