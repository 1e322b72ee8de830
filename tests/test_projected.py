"""`Projected`: its matrix, and its errors. With `Relative` with positions: random calls, every way through a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import DEVICE
from conftest import needs_triton, refusal_of
from forked import interpret
from projected_cases import (
    LONG,
    SHAPES,
    assert_accurate,
    assert_products,
    by_gather,
    draw,
    gathered,
    with_gradients,
    with_positions,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import AuxRequest, Sequences, attention, biases, config, explain, projected
from flash_dmattn.bias_makers import ProjectedMaker, Term
from flash_dmattn.biases import Band, Projected, Relative
from flash_dmattn.distributed import SequenceLayout, context_parallel_attention
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import positions

F64 = torch.float64
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="a CPU interprets the kernels")
WORKSPACES = (1, 5000, 2**28)  # an entry at a time, some, all


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype).requires_grad_()


B, LQ, LK, HQ, HK = 5, 20, 33, 4, 2
Q, K, V, X = leaf(B, LQ, HQ, 8), leaf(B, LK, HK, 8, seed=1), leaf(B, LK, HK, 8, seed=2), leaf(B, LQ, HQ, 6, seed=3)
TABLE = leaf(HK, 11, 6, seed=4)
LEAVES = [Q, K, V, X, TABLE]
BIAS = Projected(X, TABLE, 4, "clamp")
VALUES, OWN_VALUES = leaf(HQ, 9, seed=6), leaf(B, 1, 5, seed=7)
TIMES = torch.randint(0, 12, (B, LQ + LK), generator=torch.Generator().manual_seed(8)).split((LQ, LK), 1)
BY_TIMES = Relative(VALUES, 3, "clamp", TIMES, Relative(OWN_VALUES, 2, "zero"))
SHARED = Relative(VALUES, 3, "zero", (TIMES[0][0], TIMES[1][0]))
BANDED = Band(leaf(B, HK, LQ, 5, seed=9), 2, "clamp")
BY_KEYS = Projected(leaf(B, LK, HK, 6, seed=5), TABLE, 4, "clamp", "keys")


def scaled(content: Tensor = X, table: Tensor = TABLE) -> Tensor:
    """The same as a tensor bias."""
    return Projected(content, table, 4, "clamp").dense(LQ, LK) * 8**-0.5


@pytest.mark.parametrize("of", ("queries", "keys"))
@pytest.mark.parametrize("lengths", ((1, 1), (1, 6), (6, 1), (5, 8), (8, 5), (7, 7)))
def test_dense_is_the_product_of_every_score(of: Any, lengths: tuple[int, int]) -> None:
    for number in (1, 4, 30):
        for zero in (-9, -1, 0, number // 2, number - 1, number + 7):
            for outside in ("zero", "clamp"):
                for heads in (1, 2):
                    content, table = leaf(3, lengths[of == "keys"], 2, 5), leaf(heads, number, 5, seed=1)
                    bias = Projected(content, table, zero, outside, of)  # type: ignore[arg-type]
                    made, wanted = bias.dense(*lengths), gathered(bias, *lengths)
                    pairs = (with_gradients((each,), [content, table]) for each in (made, wanted))
                    for x, y in zip(*pairs, strict=True):
                        torch.testing.assert_close(x, y)


def test_dense_of_no_batch_and_of_several_dims() -> None:
    content = leaf(2, 3, 5, 2, 4)
    table = leaf(1, 9, 4)
    made = Projected(content, table, 4, "zero").dense(5, 7)
    assert made.shape == (2, 3, 2, 5, 7)
    torch.testing.assert_close(made[1, 2], Projected(content[1, 2], table, 4, "zero").dense(5, 7))
    torch.testing.assert_close(made[0], gathered(Projected(content[0], table, 4, "zero"), 5, 7))


@pytest.mark.parametrize("has_positions", (False, True))
@pytest.mark.parametrize("backend", ("auto", "eager", "reference"))
@pytest.mark.parametrize("workspace", WORKSPACES)
def test_random_calls_are_as_by_a_gather(
    backend: Any, workspace: int, has_positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", workspace)
    for seed in range(25):
        case = draw(seed + 100 * WORKSPACES.index(workspace))
        case = with_positions(case, seed) if has_positions else case
        q, k, v, mask, bias, options = case
        results = attention(q, k, v, mask, bias, backend=backend, return_lse=True, **options)
        pairs = (with_gradients(each, case.leaves) for each in (results, by_gather(case)))
        for x, y in zip(*pairs, strict=True):
            torch.testing.assert_close(x, y)


def same(call: Callable[[Any], Any], *more: Tensor) -> None:
    """A call with the bias is as with its tensor, gradients included."""
    leaves = [*LEAVES, VALUES, OWN_VALUES, BANDED.values, *more]
    for pair in ((BIAS, scaled()), *((bias, bias.dense(LQ, LK)) for bias in (BY_TIMES, SHARED, BANDED))):
        results = []
        for bias in pair:
            torch.manual_seed(3)
            made = call(bias)
            results.append(with_gradients(made if isinstance(made, tuple) else (made,), leaves))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y)


def some_pairs(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5


@pytest.mark.parametrize("bias", (BIAS, BY_TIMES), ids=("Projected", "Relative"))
def test_parts_drop_what_one_part_drops(bias: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for workspace in WORKSPACES:
        monkeypatch.setattr(projected, "WORKSPACE_BYTES", workspace)
        torch.manual_seed(1)
        out = attention(Q, K, V, bias=bias, dropout_p=0.4)
        leaves = (Q, K, V, X) if bias is BIAS else (Q, K, V, VALUES, OWN_VALUES)
        made.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for others in made[1:]:
        assert all(torch.equal(x, y) for x, y in zip(made[0], others, strict=True))


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_what_goes_with_it(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", workspace)
    mask = some_pairs(B, 1, LQ, LK)
    same(lambda bias: attention(Q, K, V, bias=bias, dropout_p=0.3))
    tiles = PreparedMask.from_mask(mask, seqlen_q=LQ, seqlen_k=LK, is_causal=True)
    rows = PreparedMask.from_mask(mask[:, :, :1], seqlen_q=LQ, seqlen_k=LK)
    one = PreparedMask.from_mask(mask[:1], seqlen_q=LQ, seqlen_k=LK)
    for prepared in (tiles, rows, one):
        same(lambda bias, prepared=prepared: attention(Q, K, V, prepared, bias, return_lse=True))

    def with_aux(bias: Any) -> tuple[Tensor, ...]:
        out, aux = attention(Q, K, V, mask, bias, return_aux=AuxRequest(lse=True, entropy=True, max_scores=True))
        return out, aux.lse, aux.entropy

    same(with_aux)
    sink = leaf(HQ, dtype=torch.bfloat16)
    same(lambda bias: attention(Q, K, V, mask, bias, sink=sink), sink)


def test_parts_add_the_gradient_of_a_sink_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = leaf(HQ, dtype=torch.bfloat16)
    gradients = []
    for workspace in WORKSPACES:
        monkeypatch.setattr(projected, "WORKSPACE_BYTES", workspace)
        out = attention(Q, K, V, bias=BIAS, sink=sink)
        gradients += torch.autograd.grad(out.square().sum(), sink)
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("mask", ((2, 1, 1, LQ, LK), (1, 3, 1, LQ, LK), (3, 1, LQ, LK), (2, 3, 4, 1, LK)))
def test_leading_dims(mask: tuple[int, ...], workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", workspace)
    q, k, v, x = leaf(2, 3, LQ, HQ, 8), leaf(2, 3, LK, HK, 8), leaf(2, 3, LK, HK, 8), leaf(2, 3, LQ, HQ, 6, seed=1)
    allowed = some_pairs(*mask)
    values, times = leaf(2, 1, HQ, 7, dtype=torch.float32), torch.randint(0, 9, (3, LQ + LK)).split((LQ, LK), 1)
    relative = Relative(values, 3, "clamp", (times[0], times[1][None, :1]))
    for pair in ((Projected(x, TABLE, 4, "clamp"), scaled(x)), (relative, relative.dense(LQ, LK))):
        results = [
            with_gradients(attention(q, k, v, allowed, bias, return_lse=True), [q, k, v, x, TABLE, values])
            for bias in pair
        ]
        for made, wanted in zip(*results, strict=True):
            torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("by_keys", (False, True))
def test_the_gradient_of_the_table_has_the_same_bits_in_any_parts(by_keys: bool) -> None:
    ds, x = leaf(7, 2, 30, 40, dtype=torch.float32).detach(), leaf(7, 40 if by_keys else 30, 2, 8).detach().float()
    rows, shape = leaf(2, 69, 8, dtype=torch.float32).detach(), (2, *((40, 30) if by_keys else (30, 40)))
    made = []
    for entries in (1, 3, 7):
        products = positions.Products(rows, 0.3, by_keys, entries, shape)
        for part_of_ds, part in zip(ds.split(entries), x.split(entries), strict=True):
            products.gradients(part_of_ds, part, False, True)
        made.append(products.rows_gradient())
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[2])


def test_no_scores_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass makes the products of a part again; saved is nothing larger than q, out or the table."""
    q, k, v = (leaf(4, 200, 2, 8, seed=seed) for seed in range(3))
    table, sizes = leaf(2, 399, 8), []
    keep = lambda x: sizes.append(x.untyped_storage().nbytes() // x.element_size()) or x
    entries: list[int] = []
    shown = projected.positions.product
    monkeypatch.setattr(projected.positions, "product", lambda x, *rest: entries.append(len(x)) or shown(x, *rest))
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 2 * 2 * 200 * 208 * 8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(q, k, v, bias=Projected(q, table, 199), backend="eager")
    out.sum().backward()
    assert sizes and max(sizes) <= q.numel() < 200 * 200
    assert entries == [2, 2, 2, 2]


def test_16_bits_round_once() -> None:
    """No error is above the error of the call with a tensor of 16 bits that was made in fp64."""
    for dtype in (torch.bfloat16, torch.float16):
        exact = [leaf(2, 70, 4, 16, seed=seed, dtype=dtype).double().detach().requires_grad_() for seed in range(4)]
        wide = leaf(4, 139, 16, seed=5, dtype=dtype).double().detach().requires_grad_()
        low = [x.detach().to(dtype).requires_grad_() for x in exact]
        low_table = wide.detach().to(dtype).requires_grad_()

        def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor, table: Tensor, by_tensor: bool = False) -> list[Tensor]:
            bias: Any = Projected(x, table, 69)
            if by_tensor:
                wide_bias = Projected(x.double(), table.double(), 69)
                bias = (wide_bias.dense(70, 70) * 0.25).to(x.dtype)
            out = attention(q, k, v, bias=bias, backend="eager")
            return with_gradients((out,), [q, k, v, x, table])

        wanted = run(*exact, wide)
        errors = [
            [float((x.double() - y).norm().detach() / y.norm().detach()) for x, y in zip(made, wanted, strict=True)]
            for made in (run(*low, low_table), run(*low, low_table, by_tensor=True))
        ]
        assert all(error <= 1.3 * by_tensor + 1e-5 for error, by_tensor in zip(*errors, strict=True)), errors


def test_the_tensor_of_float16_holds_products_beyond_its_range() -> None:
    """The recipe of docs/biases.md scales behind the product, and gives the lse and the gradients of the call."""
    q, k, v, x = (torch.full((1, 4, 1, 64), value, dtype=torch.float16) for value in (1.0, 1.0, 1.0, 40.0))
    table = torch.full((1, 7, 64), 40.0, dtype=torch.float16, requires_grad=True)
    bias = Projected(x, table, 3)
    _, lse = attention(q, k, v, bias=bias, return_lse=True)
    _, same = attention(q, k, v, bias=bias.dense(4, 4) * 0.125, return_lse=True)
    torch.testing.assert_close(lse, same.to(lse), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("create_graph", (False, True))
def test_the_gradient_passes_through_scores_that_float16_bounds(create_graph: bool) -> None:
    q, k, v = (torch.ones(1, 4, 1, 8, dtype=torch.float16) for _ in range(3))
    table = torch.full((1, 7, 8), 3e4, dtype=torch.float16, requires_grad=True)
    _, lse = attention(q, k, v, bias=Projected(q, table, 3), softmax_scale=1.0, return_lse=True)
    assert torch.autograd.grad(lse.sum(), table, create_graph=create_graph)[0].abs().sum() > 1


class Positioned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(TABLE.detach())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return attention(q, k, v, bias=Projected(x, self.table, 4, "clamp"))


@pytest.mark.parametrize("requires_grad", (False, True))
def test_a_trace_has_no_parts_of_its_own_batch(requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 5000)
    module, inputs = Positioned().requires_grad_(requires_grad), [x.detach() for x in (Q, K, V, X)]
    traced = torch.jit.trace(module, [x[:3] for x in inputs], check_trace=False)
    torch.testing.assert_close(traced(*inputs), module(*inputs))


def test_a_second_derivative_ignores_autocast_of_its_own_block() -> None:
    x = [t.detach().float().requires_grad_() for t in (Q, K, V, X, TABLE)]
    made = []
    for is_on in (False, True):
        out = attention(*x[:3], bias=Projected(x[3], x[4], 4, "clamp"))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            made.append(torch.autograd.grad(out.sin().sum(), x, create_graph=True))
    torch.testing.assert_close(*made)


def test_keys_have_two_tensors_of_scores_in_the_workspace() -> None:
    makers = [ProjectedMaker((Term(4, True, of),)) for of in (False, True)]
    sizes = [maker.bytes_of_entry([BY_KEYS.content, BY_KEYS.table], (LQ, LK)) for maker in makers]
    assert sizes[1] == 2 * sizes[0]


def test_explain_with_softcap_where_only_v_has_a_gradient() -> None:
    q, k, x, table = (t.detach() for t in (Q, K, X, TABLE))
    bias, records = Projected(x, table, 4, "clamp"), []
    explained = explain(q, k, V, bias=bias, softcap=2.0)
    with config(record=records):
        attention(q, k, V, bias=bias, softcap=2.0)
    assert [(each.forward, each.backward) for each in records] == [(explained.forward, explained.backward)]


def test_float16_scores_beyond_its_range_stay_finite() -> None:
    q, k, v = (torch.ones(1, 4, 1, 8, dtype=torch.float16) for _ in range(3))
    table = torch.full((1, 7, 8), 3e4, dtype=torch.float16)
    for plus in (None, Projected(k, table, 3, of="keys")):
        bias = Projected(q, table, 3, plus=plus)
        assert attention(q, k, v, bias=bias, softmax_scale=1.0).isfinite().all()
        assert bias.dense(4, 4).isfinite().all()


def test_second_derivatives() -> None:
    mask = some_pairs(B, 1, LQ, LK)

    def norms(bias: Any) -> Tensor:
        out = attention(Q, K, V, mask, bias, dropout_p=0.2)
        leaves = [Q, K, V, X, TABLE, VALUES, OWN_VALUES]
        made = torch.autograd.grad(out.square().sum(), leaves, create_graph=True, allow_unused=True)
        return torch.stack([g.square().sum() for g in made if g is not None])

    same(norms)


def test_batched_gradients() -> None:
    sent = torch.randn(3, B, LQ, HQ, 8, dtype=F64)
    for leaves, *pair in (
        (LEAVES, BIAS, scaled()),
        ([Q, K, V, VALUES, OWN_VALUES], BY_TIMES, BY_TIMES.dense(LQ, LK)),
    ):
        made, wanted = (
            torch.autograd.grad(attention(Q, K, V, bias=bias), leaves, sent, is_grads_batched=True) for bias in pair
        )
        for x, y in zip(made, wanted, strict=True):
            torch.testing.assert_close(x, y)


def by_product(q: Tensor, k: Tensor, v: Tensor, content: Tensor, table: Tensor) -> Tensor:
    return attention(q, k, v, bias=Projected(content, table, 4, "clamp"))


def by_tensor(q: Tensor, k: Tensor, v: Tensor, content: Tensor, table: Tensor) -> Tensor:
    return attention(q, k, v, bias=scaled(content, table))


def test_transforms() -> None:
    func, wanted = torch.func, by_tensor(*LEAVES)
    each = func.vmap(lambda *x: by_product(*(t[None] for t in x), TABLE)[0])
    torch.testing.assert_close(each(Q, K, V, X), wanted)
    tables = torch.stack((TABLE, 2 * TABLE))
    made = func.vmap(lambda table: by_product(Q, K, V, X, table))(tables)
    torch.testing.assert_close(made[1], by_tensor(Q, K, V, X, 2 * TABLE))
    tangents = tuple(torch.randn_like(x) for x in LEAVES)
    for x, y in zip(*(func.jvp(f, tuple(LEAVES), tangents) for f in (by_product, by_tensor)), strict=True):
        torch.testing.assert_close(x, y)
    gradients = [func.grad(lambda t, f=f: f(Q, K, V, X, t).square().sum())(TABLE) for f in (by_product, by_tensor)]
    torch.testing.assert_close(*gradients)
    again = checkpoint(by_product, *LEAVES, use_reentrant=False)
    pairs = ((again, TABLE), (wanted, TABLE))
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), y)[0] for x, y in pairs))


class Model(torch.nn.Module):
    """A call with learned tables and a sink, of one of five kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for name, shape in (("table", (HK, 11, 6)), ("other", (1, 7, 3)), ("sink", (HQ,)), ("values", (HQ, 9))):
            setattr(self, name, torch.nn.Parameter(leaf(*shape, seed=len(name)).detach()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        plus = Projected(y, self.other, 3, "zero", "keys")
        bias = Projected(x, self.table, 5, "clamp", plus=plus)
        if self.kind == "positions":
            places = ((x[..., 0, 0] * 3).long(), (y[0, :, 0, 0] * 3).long())
            added = Relative(self.values, 4, "clamp", places, Relative(self.table[:, :, 0], 5, "zero"))
            return attention(q, k, v, mask, added, softcap=3.0, return_lse=True)
        if self.kind == "band":
            near = torch.einsum("bihp,hnp->bhin", x, self.table[:1].expand(q.shape[2], -1, -1))
            return attention(q, k, v, mask, Band(near, 4, "clamp"), softcap=3.0, return_lse=True)
        if self.kind == "softcap":
            return (attention(q, k, v, mask, bias, softcap=3.0),)
        if self.kind == "causal":
            return attention(q, k, v, mask, bias, is_causal=True, return_lse=True)
        asked = AuxRequest(lse=True, max_scores=True, entropy=True)
        out, aux = attention(q, k, v, mask, bias, sink=self.sink, return_aux=asked)
        return out, aux.lse, aux.entropy


KINDS = ("causal", "aux", "softcap", "positions", "band")


def inputs_of(batch: int, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, ...]:
    rows, keys = (batch, seqlen_q, HQ), (batch, seqlen_k, HK)
    sizes = ((*rows, 8), (*keys, 8), (*keys, 8), (*rows, 6), (*keys, 3))
    return (*(leaf(*size, seed=n) for n, size in enumerate(sizes)), some_pairs(batch, 1, seqlen_q, seqlen_k))


def assert_alike(model: Model, other: Callable[..., Any], parameters: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    pairs = ((model, list(model.parameters())), (other, parameters))
    results = [with_gradients(call(*inputs), [*inputs[:5], *learned]) for call, learned in pairs]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def operators_of(program: Any) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "flash_dmattn" in str(node.target)]


@pytest.mark.parametrize("kind", KINDS)
def test_exported_programs_take_any_length(kind: str) -> None:
    model, length = Model(kind), torch.export.Dim("length", min=3, max=512)
    dims = (*({1: length},) * 5, {2: length, 3: length})
    exported = torch.export.export(model, inputs_of(2, 24, 24), dynamic_shapes=dims)
    projects = operators_of(exported) == ["flash_dmattn.made_bias_forward.default"]
    assert projects == (kind != "softcap")
    program = exported.module()
    named = dict(program.named_parameters())
    for each in (3, 24, 40):
        assert_alike(model, program, [named[name] for name, _ in model.named_parameters()], inputs_of(2, each, each))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for workspace, sizes in zip(WORKSPACES, ((3, 24, 33), (2, 17, 17), (5, 20, 33)), strict=True):
        monkeypatch.setattr(projected, "WORKSPACE_BYTES", workspace)
        assert_alike(model, compiled, list(model.parameters()), inputs_of(*sizes))


def test_graphs_draw_the_same_dropout_and_refuse_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 1)

    def call(q: Tensor, k: Tensor, v: Tensor, content: Tensor, table: Tensor) -> Tensor:
        return attention(q, k, v, bias=Projected(content, table, 4, "clamp"), dropout_p=0.3)

    results = []
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for run in (call, compiled):
        torch.manual_seed(1)
        results.append(with_gradients((run(*LEAVES),), LEAVES))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    program = torch.export.export(Model("causal"), inputs_of(2, 24, 24)).module()
    inputs = inputs_of(2, 24, 24)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(program(*inputs)[0].sum(), inputs[0], create_graph=True)


def test_flop_of_a_call_count_its_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for bias in (None, Projected(X.detach(), TABLE.detach(), 4, "clamp"), BIAS):
        with FlopCounterMode(display=False) as counter:
            attention(Q, K, V, bias=bias).sum().backward()
        counts.append(counter.get_total_flops())
    product = 2 * 6 * B * HQ * LQ * LK
    assert [count - counts[0] for count in counts] == [0, 2 * product, 4 * product]


def test_autocast_casts_both_parts() -> None:
    q, k, v = (leaf(2, 12, 4, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    table = leaf(1, 23, 8, dtype=torch.float32)
    low = [x.detach().bfloat16() for x in (q, k, v, table)]
    for softcap in (0.0, 3.0):
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v, bias=Projected(q, table, 11), softcap=softcap)
        wanted = attention(*low[:3], bias=Projected(low[0], low[3], 11), softcap=softcap)
        assert out.dtype == torch.bfloat16 and torch.equal(out, wanted)
    assert torch.autograd.grad(out.float().sum(), table)[0].dtype == torch.float32


def test_explain_names_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", 2 * HQ * LQ * 48 * 8)
    explained = explain(Q, K, V, some_pairs(B, 1, LQ, LK), BIAS)
    assert explained.copies == ("runs 3 parts of 2 of 5 entries; their scores of the Projected take 0.1 MiB",)
    assert "batch 2, 20 queries x 33 keys" in str(explained.problem)
    records: list[Any] = []
    with config(record=records):
        attention(Q, K, V, some_pairs(B, 1, LQ, LK), BIAS)
    assert [(each.forward, each.backward) for each in records] == [(explained.forward, explained.backward)]
    made = explain(Q, K, V, bias=BIAS, softcap=3.0)
    assert made.copies == (f"makes the scores of the Projected in PyTorch, a tensor of {(B, HQ, LQ, LK)}",)
    monkeypatch.undo()
    q = torch.empty(16, 1500, 8, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    table = torch.empty(8, 2999, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    explained = explain(q, q, q, bias=Projected(q, table, 1499), device="sm_90")
    assert (explained.forward, explained.backward) == ("cuda", "cuda")
    assert "of 6 of 16 entries" in explain(q, q, q, bias=Projected(q, table, 1499), device="sm_90").copies[0]
    assert attention(q, q, q, bias=Projected(q, table, 1499)).shape == q.shape


def test_calls_without_scores() -> None:
    for rows in ((B, 0, LK), (B, LQ, 0), (0, LQ, LK)):
        q, k, v, x = Q[: rows[0], : rows[1]], K[: rows[0], : rows[2]], V[: rows[0], : rows[2]], X[: rows[0], : rows[1]]
        out = attention(q, k, v, bias=Projected(x, TABLE, 4, "zero"))
        assert out.shape == (*q.shape[:3], 8) and not out.any()
        assert not torch.autograd.grad(out.sum(), TABLE)[0].any()
        assert explain(q, k, v, bias=Projected(x, TABLE, 4, "zero")).error is None


def test_distances_that_the_call_does_not_have_need_no_row() -> None:
    exact = Projected(X, leaf(1, LK, 6), LK - 1)  # distances up to 0
    attention(Q, K, V, bias=exact, is_causal=True)
    prepared = PreparedMask.from_mask(some_pairs(B, 1, LQ, LK), seqlen_q=LQ, seqlen_k=LK, is_causal=True)
    attention(Q, K, V, prepared, bias=exact)
    error = refusal_of(
        lambda: attention(Q, K, V, bias=exact), lambda: attention(Q, K, V, bias=exact, is_causal=True), ValueError
    )
    told = 'bias has rows for distances -32 to 0; it needs those of the call, -32 to 19 (or outside="clamp", or "zero")'
    assert str(error) == told


LISTS = PreparedMask.from_lists(torch.zeros(LQ, 2, dtype=torch.int64), seqlen_k=LK)
PADDED = Sequences.padded(seqlens_k=torch.full((B,), LK))
WRONG: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
    (BIAS._replace(content=[1.0]), {}, TypeError, "bias.content is a list; it needs to be a floating-point"),
    (BIAS._replace(table=TABLE.float()), {}, TypeError, "bias.table has dtype float32; it needs that of q, float64"),
    (BIAS._replace(content=X.float()), {}, TypeError, "bias.content has dtype float32; it needs that of q, float64"),
    (BIAS._replace(table=TABLE.to("meta")), {}, ValueError, "bias.table is on meta; it needs to be on the device of q"),
    (BIAS._replace(zero=1.0), {}, TypeError, "bias.zero is a float; it needs to be an int"),
    (BIAS._replace(outside="wrap"), {}, ValueError, "bias.outside is 'wrap'; it needs to be one of 'error'"),
    (BIAS._replace(of="values"), {}, ValueError, "bias.of is 'values'; it needs to be one of 'queries', 'keys'"),
    (BIAS._replace(of="keys"), {}, ValueError, "it needs the batch, seqlen_k and heads of k: (5, 33, 2, 6)"),
    (BIAS._replace(content=X[:, :7]), {}, ValueError, "it needs the batch, seqlen_q and heads of q: (5, 20, 4, 6)"),
    (BIAS._replace(content=X[0, 0]), {}, ValueError, "bias.content has shape (4, 6); it needs (*batch, queries, heads"),
    (BIAS._replace(table=TABLE[0]), {}, ValueError, "bias.table has shape (11, 6); it needs (heads, distances, terms)"),
    (BIAS._replace(table=TABLE[:, :0]), {}, ValueError, "of one distance at least"),
    (BIAS._replace(table=TABLE[:, :, :5]), {}, ValueError, "bias.content has 6 terms in a product and bias.table 5"),
    (
        BIAS._replace(table=leaf(3, 11, 6)),
        {},
        ValueError,
        "bias.table has 3 heads and bias.content 4; it needs 1, or a",
    ),
    (Projected(leaf(B, LQ, HQ, 300), leaf(1, 9, 300), 4), {}, ValueError, "they need the same number, from 1 to 256"),
    (
        BIAS,
        {"sequences": PADDED},
        TypeError,
        "bias is a Projected with sequences; it needs to be None or another bias",
    ),
    (BIAS, {"mask": LISTS}, TypeError, "bias is a Projected with lists; it needs to be a ListBias there"),
    (
        BIAS._replace(plus=BY_KEYS._replace(content=BY_KEYS.content.float())),
        {},
        TypeError,
        "bias.plus.content has dtype float32; it needs that of q, float64",
    ),
    (BIAS._replace(plus=BY_KEYS._replace(outside="error")), {}, ValueError, "bias.plus has rows for distances -4 to 6"),
    (BIAS._replace(plus=BY_KEYS._replace(plus=BIAS)), {}, ValueError, "bias.plus has plus, a third Projected"),
    (
        BIAS._replace(plus=BIAS),
        {},
        ValueError,
        "bias.plus is another Projected of queries; it needs to be of the other",
    ),
    (BIAS._replace(content=X.detach().to_sparse()), {}, TypeError, "bias.content"),
    (BIAS, {"is_causal": 1}, TypeError, "is_causal is 1; it needs to be True or False"),
    (BIAS, {"softmax_scale": "1"}, TypeError, "softmax_scale is a str; it needs to be"),
    (BIAS, {"mask": some_pairs(3, 1, LQ, LK)}, ValueError, "mask has shape (3, 1, 20, 33)"),
    (BIAS, {"mask": some_pairs(B, 1, LQ, LK - 1)}, ValueError, "mask has shape (5, 1, 20, 32)"),
    (BIAS, {"mask": torch.tensor(True)}, ValueError, "mask has 0 dimensions"),
    (BIAS, {"mask": [True]}, TypeError, "mask is a list"),
    (BIAS, {"sink": [1.0]}, TypeError, "sink is a list"),
)


@pytest.mark.parametrize(("bias", "options", "kind", "says"), WRONG, ids=range(len(WRONG)))
def test_wrong_biases_are_named(
    bias: Any, options: dict[str, Any], kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projected, "WORKSPACE_BYTES", WORKSPACES[1])  # messages tell of the whole batch
    error = refusal_of(lambda: attention(Q, K, V, bias=bias, **options), lambda: attention(Q, K, V, bias=BIAS), kind)
    assert says in str(error)
    with pytest.raises(kind):
        explain(Q, K, V, bias=bias, **options)


def test_wrong_operands_are_named_before_the_bias() -> None:
    for q, k, v, says in (
        (Q[0], K, V, "q has 3 dimensions"),
        (Q, K[:, :, :, :4], V, "k has head_dim 4"),
        (Q[None], K[None, :3], V[None], "whose batch dim 1 is 3"),
    ):
        with pytest.raises(ValueError, match=says):
            attention(q, k, v, bias=BIAS)
    with pytest.raises(ValueError, match=r"bias\.content has 20 rows; it needs seqlen_q of them, 19"):
        BIAS.dense(19, LK)
    for plus, says in (
        (BY_KEYS._replace(content=leaf(B, LK, 3, 6), table=TABLE[:1]), r"batch \(5,\) and 3 heads; .* of its 4 heads"),
        (
            BY_KEYS._replace(content=BY_KEYS.content[:2]),
            r"batch \(2,\) and 2 heads; it needs the batch of bias\.content",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            BIAS._replace(plus=plus).dense(LQ, LK)
    with pytest.raises(TypeError, match=r"bias\.table has dtype float32; it needs that of bias\.content, float64"):
        BIAS._replace(table=TABLE.float()).dense(LQ, LK)
    for add in (lambda: BIAS + torch.zeros(3), lambda: torch.zeros(3) + BIAS):
        with pytest.raises(TypeError, match="is no tensor"):
            add()


def test_packed_and_nested_rows_are_refused_by_what_they_are() -> None:
    told, ends = "bias is a Projected with sequences", torch.tensor([0, 3, LQ], dtype=torch.int32)
    with pytest.raises(TypeError, match=told):
        attention(Q[0], Q[0], Q[0], bias=BIAS, sequences=Sequences.packed(ends))
    rows = torch.nested.nested_tensor([torch.randn(n, HQ, 8) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(TypeError, match=told):
        attention(rows, rows, rows, bias=BIAS)


def test_shared_sequences_and_dtensors_need_a_tensor() -> None:
    told = (
        r"bias is a Projected {}; it needs to be a tensor there, the rows of this rank of softmax_scale \* bias\.dense"
    )
    with pytest.raises(TypeError, match=told.format("with DTensors")):
        biases.require_dense_bias(BIAS, "with DTensors")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=told.format("of ranks that share a sequence")):
            context_parallel_attention(
                K, K, V, bias=BIAS, group=dist.group.WORLD, layout=SequenceLayout.contiguous(LK, 1)
            )
        mesh = init_device_mesh("cpu", (1,))
        for parts in ({"content": distribute_tensor(X, mesh)}, {"table": distribute_tensor(TABLE, mesh)}):
            with pytest.raises(TypeError, match=rf"bias\.{next(iter(parts))} is a DTensor, and q is none"):
                attention(Q, K, V, bias=BIAS._replace(**parts))
    finally:
        dist.destroy_process_group()


def test_named_backends_refuse_as_with_a_tensor() -> None:
    with pytest.raises(flash_dmattn.BackendError):
        attention(Q, K, V, bias=BIAS, backend="cuda")


@on_gpu
@pytest.mark.parametrize("has_positions", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("dim", (64, 128))
def test_random_calls_on_a_gpu(
    dim: int, dtype: torch.dtype, has_positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each backend is as accurate in any parts as the formula with a tensor, and repeats its bits."""
    served = []
    for seed in range(16):
        case = draw(seed, dtype, LONG, dim, "cuda", softcap=has_positions)
        case = with_positions(case, seed) if has_positions else case
        q, k, v, mask, bias, options = case
        monkeypatch.setattr(projected, "WORKSPACE_BYTES", WORKSPACES[seed % 3])
        for backend in ("auto", "cuda", "triton"):
            named: dict[str, Any] = {**options, "backend": backend, "deterministic": True, "return_lse": True}
            try:
                results = attention(q, k, v, mask, bias, **named)
            except flash_dmattn.BackendError:  # also of a build without the dtype
                continue
            assert_accurate(case, results)
            served.append(backend)
            first, again = (with_gradients(attention(q, k, v, mask, bias, **named), case.leaves) for _ in range(2))
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert served.count("triton") >= 12 and (dtype == torch.float32 or served.count("cuda") >= 6)


@on_gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_the_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    """Lengths around tiles, terms of every size, and both sides; bits do not depend on the workspace."""
    long = ((2, 1500, 1500, 128, 2), (2, 750, 750, 64, 1), (1, 1025, 300, 256, 1), (2, 127, 2049, 72, 2))
    for shape in (*SHAPES, *long):
        for by_keys in (False, True):
            assert_products(shape, by_keys, dtype, device="cuda")


@on_gpu
def test_a_great_call_on_a_gpu_needs_no_tensor_of_all_scores() -> None:
    q, k, v = (
        leaf(8, 2000, 8, 64, seed=seed, dtype=torch.bfloat16).cuda().detach().requires_grad_() for seed in range(3)
    )
    table = leaf(8, 3999, 64, dtype=torch.bfloat16).cuda().detach().requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v, bias=Projected(q, table, 1999))
    assert torch.cuda.memory_allocated() - before < 40 * 2**20
    out.sum().backward()
    # Two parts, each with scores and their gradient; all scores and their gradient would be four workspaces.
    assert torch.cuda.max_memory_allocated() - before < 3 * projected.WORKSPACE_BYTES


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize(("what", "number"), (("kernels", 17), ("gathers", 10), ("calls", 64)))
def test_the_kernels_in_the_interpreter(what: str, number: int) -> None:
    assert f"{number} passed, 0 failed" in interpret("interpreted_projected.py", what)
