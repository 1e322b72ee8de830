"""Random calls that make their bias, and their results by a gather of a row or a value for every score."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn import attention
from flash_dmattn.biases import Band, Projected, Relative
from flash_dmattn.reference import distances, gathers, positions
from flash_dmattn.reference.yardstick import RATIO


class ProjectedCase(NamedTuple):
    """The arguments of one call; `leaves` are its tensors that have a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Projected | Relative | Band
    options: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        sink = self.options.get("sink")
        tensors = [x for term in self.bias.terms for _, x in term.named_tensors]
        factors = [x for x in tensors if x.is_floating_point()]
        return [self.q, self.k, self.v, *factors, *([] if sink is None else [sink])]


LENGTHS = (1, 3, 17, 40)


LONG = (65, 130, 200, 300)


def draw(
    seed: int,
    dtype: torch.dtype = torch.float64,
    lengths: tuple[int, ...] = LENGTHS,
    dim: int = 8,
    device: str = "cpu",
    softcap: bool = True,
) -> ProjectedCase:
    """Draw a call: its lengths, heads, side, rule for other distances, mask, window, sink and softcap."""
    choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype).to(device).requires_grad_()

    batch, heads_k, group = choose.choice((1, 2, 3, 5)), choose.choice((1, 2)), choose.choice((1, 2))
    seqlen_q, seqlen_k, terms = choose.choice(lengths), choose.choice(lengths), choose.choice((1, 5, dim))
    heads, of = heads_k * group, choose.choice(("queries", "keys"))
    outside: Any = choose.choice(("error", "clamp", "zero"))
    number, zero = seqlen_q + seqlen_k - 1, seqlen_k - 1
    if outside != "error":
        number = choose.choice((1, 5, 100))
        zero = choose.choice((-3, 0, number // 2, number + 2))
    heads_table = choose.choice((1, heads_k, heads) if of == "queries" else (1, heads_k))
    q, k, v = (
        leaf(batch, seqlen_q, heads, dim),
        leaf(batch, seqlen_k, heads_k, dim),
        leaf(batch, seqlen_k, heads_k, dim),
    )
    content = leaf(batch, seqlen_q, heads, terms) if of == "queries" else leaf(batch, seqlen_k, heads_k, terms)
    mask = None
    if choose.random() < 0.6:
        sizes = ((1, batch), (1, heads_k, heads), (1, seqlen_q), (1, seqlen_k))
        mask = torch.rand([choose.choice(each) for each in sizes], generator=numbers).to(device) < 0.6
    options = {
        "is_causal": choose.random() < 0.3,
        "window_size": choose.choice((None, None, (3, 2))),
        "softmax_scale": choose.choice((None, 1.0, 0.3)),
        "softcap": choose.choice((0.0, 0.0, 3.0)) * softcap,
        "sink": leaf(heads) if choose.random() < 0.3 else None,
    }
    table, plus = leaf(heads_table, number, terms), None
    if choose.random() < 0.3:  # of the other side, as DeBERTa has
        other = leaf(batch, seqlen_k, heads_k, 3) if of == "queries" else leaf(batch, seqlen_q, heads, 3)
        plus = Projected(other, leaf(1, 7, 3), 3, "clamp", "keys" if of == "queries" else "queries")
    bias = Projected(content, table, zero, outside, of, plus)  # type: ignore[arg-type]
    return ProjectedCase(q, k, v, mask, bias, options)


def with_positions(case: ProjectedCase, seed: int) -> ProjectedCase:
    """The same call with a `Relative` with positions, one term to three, or a `Band` that clamps; shared or not."""
    choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_k, _), device = case.q.shape, case.k.shape, case.q.device
    bias: Relative | None = None
    if choose.random() < 0.25:
        number = choose.choice((1, 2, 9, 70))
        shape = (*choose.choice(((), (1,), (batch,))), choose.choice((1, heads_k, heads)), seqlen_q, number)
        values = torch.randn(shape, generator=numbers, dtype=torch.float64).to(case.q).requires_grad_()
        return case._replace(bias=Band(values, choose.choice((-50, 0, number // 2, number + 60)), "clamp"))
    for term in range(choose.choice((1, 1, 2, 3))):
        number, outside = choose.choice((1, 7, 65, 300)), choose.choice(("clamp", "zero"))
        shape = (*choose.choice(((), (1,), (batch,))), choose.choice((1, heads_k, heads)), number)
        values = torch.randn(shape, generator=numbers, dtype=torch.float64).to(case.q).requires_grad_()
        reach = choose.choice((3, 50, 10**12))
        pair = tuple(
            torch.randint(-reach, reach, (*choose.choice(((), (1,), (batch,))), length), generator=numbers).to(device)
            for length in (seqlen_q, seqlen_k)
        )
        zero = choose.choice((0, number // 2, -3, number + 2))
        positions: Any = None if term > 0 and choose.random() < 0.3 else pair
        bias = Relative(values, zero, outside, positions, bias)  # type: ignore[arg-type]
    assert bias is not None
    return case._replace(bias=bias)


def placed(bias: Relative | Band, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The value of every score, (1 or B, H, Lq, Lk), of all terms."""
    if isinstance(bias, Band):
        place = bias.zero + torch.arange(seqlen_k) - torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None]
        index = place.clamp(0, bias.values.shape[-1] - 1).to(bias.values.device)
        made = bias.values.gather(-1, index.expand(*bias.values.shape[:-2], *index.shape))
        return made if made.dim() == 4 else made[None]
    values, zero, outside, pair, plus = bias
    if pair is None:
        pair = torch.arange(seqlen_k - seqlen_q, seqlen_k), torch.arange(seqlen_k)
    queries, keys = (x.to(values.device).long() for x in pair)
    place = zero + keys[..., None, :] - queries[..., None]
    number, batch = values.shape[-1], place.shape[0] if place.dim() == 3 else 1
    has_value = ((place >= 0) & (place < number)) | (outside == "clamp")
    rows = values.expand(max(batch, *values.shape[:-2], 1), *values.shape[-2:])
    index = place.clamp(0, number - 1).expand(len(rows), seqlen_q, seqlen_k)
    made = torch.stack([row[:, own] for row, own in zip(rows, index, strict=True)])
    made = torch.where(has_value.expand(len(rows), seqlen_q, seqlen_k)[:, None], made, 0.0)
    if plus is None:
        return made
    other = placed(plus, seqlen_q, seqlen_k)
    heads = max(made.shape[1], other.shape[1])
    return made.repeat_interleave(heads // made.shape[1], 1) + other.repeat_interleave(heads // other.shape[1], 1)


def gathered(bias: Projected, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The product of every score, (B, H, Lq, Lk), with a row of the table for each."""
    content, table, zero, outside, of, plus = bias
    place = zero + torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    place = place.to(content.device)
    has_row = ((place >= 0) & (place < table.shape[1])) | (outside == "clamp")
    rows = table.repeat_interleave(content.shape[-2] // table.shape[0], 0)[:, place.clamp(0, table.shape[1] - 1)]
    rows = torch.where(has_row[None, :, :, None], rows, 0.0)
    made = torch.einsum("bihp,hijp->bhij" if of == "queries" else "bjhp,hijp->bhij", content, rows)
    if plus is None:
        return made
    other = gathered(plus, seqlen_q, seqlen_k)
    heads = max(made.shape[1], other.shape[1])
    return made.repeat_interleave(heads // made.shape[1], 1) + other.repeat_interleave(heads // other.shape[1], 1)


def by_gather(case: ProjectedCase) -> tuple[Tensor, Tensor]:
    """out and lse of a call, from a tensor of all scores; written from the definition."""
    q, k, v, mask, bias, options = case
    (_, seqlen_q, heads, dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    group = heads // heads_k
    is_product = isinstance(bias, Projected)
    added = gathered(bias, seqlen_q, seqlen_k) if isinstance(bias, Projected) else placed(bias, seqlen_q, seqlen_k)
    added = added.repeat_interleave(heads // added.shape[1], 1)
    scale = dim**-0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    product = added if is_product else torch.zeros_like(added)
    s = (torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) + product) * scale
    if options["softcap"]:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    s = s + (added - product)
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    distance = distance.to(q.device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if options["is_causal"]:
        allowed = allowed & (distance <= 0)
    if options["window_size"] is not None:
        left, right = options["window_size"]
        allowed = allowed & (distance >= -left) & (distance <= right)
    if mask is not None:
        allowed = allowed & (mask if mask.shape[1] in (1, heads) else mask.repeat_interleave(group, 1))
    s = s.masked_fill(~allowed, -torch.inf)
    if options["sink"] is not None:
        s = torch.cat((s, options["sink"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
    is_empty = torch.isneginf(s).all(-1, keepdim=True)
    filled = s.masked_fill(is_empty, 0.0)
    total = filled.logsumexp(-1, keepdim=True)
    p = torch.where(is_empty, 0.0, (filled - total).exp())[..., :seqlen_k]
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2))
    return out, torch.where(is_empty, -torch.inf, total).squeeze(-1)


def with_gradients(results: tuple[Tensor, ...], leaves: list[Tensor], seed: int = 0) -> list[Tensor]:
    """The results with 0 for -inf, and the gradients of the leaves for random gradients of the results."""
    numbers = torch.Generator().manual_seed(seed)
    finite = [torch.where(x.isfinite(), x, 0.0) for x in results]
    sent = [torch.randn(x.shape, generator=numbers, dtype=torch.float64).to(x) for x in finite]
    gradients = torch.autograd.grad(finite, leaves, sent, allow_unused=True)
    return [*finite, *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True))]


def converted(bias: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """The same bias with other values."""
    if isinstance(bias, Projected):
        return bias.converted(convert)
    if isinstance(bias, Band):
        return bias._replace(values=convert(bias.values))
    return bias and bias._replace(values=convert(bias.values), plus=converted(bias.plus, convert))


def in_fp64(case: ProjectedCase) -> ProjectedCase:
    """The same call, in fp64."""
    wide = {id(x): x.detach().double().requires_grad_() for x in case.leaves}
    q, k, v = (wide[id(x)] for x in case[:3])
    sink = case.options["sink"]
    options = {**case.options, "sink": None if sink is None else wide[id(sink)]}
    return ProjectedCase(q, k, v, case.mask, converted(case.bias, lambda x: wide[id(x)]), options)


def assert_accurate(case: ProjectedCase, results: tuple[Tensor, ...]) -> None:
    """out, lse and all gradients have at most RATIO times the error of the formula with a tensor of this dtype."""
    q, k, v, mask, bias, options = case
    scale = q.shape[3] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    if isinstance(bias, Projected):
        assert options["softcap"] == 0, "a tensor is added behind the cap"
        tensor = bias.scores(q.shape[1], k.shape[1], 1.0) * scale  # in the dtype of the call
    else:
        tensor = bias.dense(q.shape[1], k.shape[1])
    plain = attention(q, k, v, mask, tensor, return_lse=True, backend="reference", **options)
    exact = in_fp64(case)
    wanted = with_gradients(by_gather(exact), exact.leaves)
    for x, y, z in zip(with_gradients(results, case.leaves), with_gradients(plain, case.leaves), wanted, strict=True):
        error, yardstick, size = (float(t.detach().double().norm()) for t in (x.double() - z, y.double() - z, z))
        # The few elements of a sink may all be rounded by half a unit, which many never are at once.
        rounding = torch.finfo(x.dtype).eps / 2 if z.numel() <= 16 else 0.0
        assert error <= RATIO * yardstick + (1e-5 + rounding) * size, (error / size, yardstick / size, tuple(z.shape))


# Heads, L, M, P, and the heads of the rows: tiles of one vector and of several, lengths that no tile divides.
SHAPES = (
    (2, 1, 1, 8, 1),
    (2, 37, 50, 20, 2),
    (4, 130, 65, 16, 2),
    (1, 7, 300, 16, 1),
    (2, 300, 7, 16, 2),
    (1, 64, 64, 130, 1),
    (2, 66, 16, 5, 1),
)


def assert_products(
    shape: tuple[int, int, int, int, int], by_keys: bool, dtype: torch.dtype, most: int = 0, device: str = "cpu"
) -> None:
    """Scores and gradients of the kernels are as in fp64 PyTorch; in parts they have the bits of the whole.

    Tiles have `most` vectors, or as many as the kernels choose.
    """
    from flash_dmattn.triton_kernels.positions import Products, Workspace  # most tests do without Triton

    heads, length, others, terms, heads_rows = shape
    random = torch.Generator().manual_seed(length)
    lengths = (others, length) if by_keys else (length, others)
    x = torch.randn(3, heads, length, terms, generator=random).to(device, dtype).transpose(1, 2)
    rows = torch.randn(heads_rows, length + others - 1, terms, generator=random).to(device, dtype)
    ds = torch.randn(3, heads, *lengths, generator=random).to(device, dtype)
    exact = positions.Products(rows.double(), 0.3, by_keys, 3, shape[:3])
    wanted = [exact.scores(x.double()), exact.gradients(ds.double(), x.double(), True, True), exact.rows_gradient()]
    made: list[list[Any]] = []
    for entries, stores in ((3, True), (1, False), (2, True)):
        products = Products(rows, 0.3, by_keys, entries, shape[:3])
        if most:
            products.tile = (*products.tile[:1], most, *products.tile[2:])
        scores, gradients = [], []
        for part_of_ds, part in zip(ds.split(entries), x.split(entries), strict=True):
            scores.append(products.scores(part).clone())
            if stores:
                part_of_ds = products.place(len(part)).copy_(part_of_ds)
            gradients.append(products.gradients(part_of_ds, part, True, True))
        made.append([torch.cat(scores), torch.cat(gradients), products.rows_gradient()])  # type: ignore[arg-type]
    for each in made:
        assert all(torch.equal(a, b) for a, b in zip(each, made[0], strict=True)), "bits depend on the workspace"
    for group in (1, 2) if by_keys else ():
        total = torch.randn(2, group * heads, *lengths, generator=random).to(device, dtype)
        place = Workspace(2, group * heads, dtype, total.device).rows("total", 2, *lengths).copy_(total)
        products.add_scores(x[:2], place)
        added = made[0][0][:2].float().repeat_interleave(group, 1)
        assert torch.equal(place, (total.float() + added).to(dtype)), "scores are added with one rounding"
    limits = (torch.finfo(dtype).eps, torch.finfo(dtype).eps, 0.0)  # the last are sums in fp32
    for x, y, limit in zip(made[0], wanted, limits, strict=True):
        error = float((x.double() - y).norm() / y.norm())
        assert error <= max(limit, 1e-5), (error, limit)


# Batch, heads, Lq, Lk, the number of values of each term, and the entries that have values of their own, 1 or B.
GATHERS: tuple[tuple[int, int, int, int, tuple[int, ...], int], ...] = (
    (3, 2, 5, 70, (7, 3), 1),
    (2, 3, 33, 37, (2000,), 2),
    (4, 1, 20, 20, (1,), 1),
    (5, 2, 40, 17, (11, 65, 300), 1),
    (3, 2, 1, 1, (4,), 3),
)


def assert_gathers(
    shape: tuple[int, int, int, int, tuple[int, ...], int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """The kernels' bias has the bits of PyTorch's, their gradient is as in fp64, in bits that no workspace changes."""
    from flash_dmattn.triton_kernels.gathers import Gathers

    batch, heads, length, others, sizes, own = shape
    random = torch.Generator().manual_seed(length)
    for shares in (False, True):
        factors = []
        for number in sizes:
            pair = [torch.randint(-40, 40, (1 if shares else batch, n), generator=random) for n in (length, others)]
            factors += [torch.randn(own, heads, number, generator=random), *pair]
        factors = [x.to(device) for x in factors]
        terms = [(number // 2, n != 1) for n, number in enumerate(sizes)]
        table, places, _ = gathers.prepare(factors, terms)
        entries_made = batch if max(own, places.batch) > 1 else 1
        ds = torch.randn(entries_made, heads, length, others, generator=random).to(device, dtype)
        exact = gathers.Gathers(table.double(), places, torch.float64, batch)
        exact.add_gradient(ds.double(), slice(0, batch))
        plain, wanted = gathers.gather(table, places).to(dtype), exact.table_gradient()
        made: list[list[Tensor]] = []
        for entries, stores in ((batch, True), (1, False), (2, True)):
            each, step = Gathers(table, places, dtype, entries), entries if entries_made > 1 else batch
            scores = []
            for first in range(0, batch, step):
                span = slice(first, min(first + step, batch))
                scores.append(each.scores(span).clone())
                part = ds[span]
                part = each.place(len(part)).copy_(part) if stores else part
                each.add_gradient(part, span)
            made.append([torch.cat(scores), each.table_gradient()])
        for x, y in made:
            assert torch.equal(x, plain) and torch.equal(y, made[0][1]), "bits depend on the workspace"
        error = float((made[0][1].double() - wanted).norm() / wanted.norm())
        assert error <= 1e-5, error


# Heads, Lq, Lk, the number of values of a query, and the index of distance 0 among them.
BANDS = ((2, 5, 300, 3, 1), (1, 40, 17, 150, 75), (2, 33, 33, 1, 0), (1, 17, 130, 9, -200), (1, 20, 20, 2, 10**12))


def assert_bands(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """The kernels' band that clamps has the bits of PyTorch's, and their gradient is as in fp64."""
    from flash_dmattn.triton_kernels.bands import Bands

    heads, length, others, number, zero = shape
    random = torch.Generator().manual_seed(length)
    values = torch.randn(3, heads, length, number, generator=random).to(device)
    ds = torch.randn(3, heads, length, others, generator=random).to(device, dtype)
    made, plain, exact = (
        kind(number, zero, own, 3, (heads, length, others), values.device)
        for kind, own in ((Bands, dtype), (distances.Bands, dtype), (distances.Bands, torch.float64))
    )
    assert torch.equal(made.scores(values), plain.scores(values))
    wanted = exact.gradient(ds.double())
    for part in (ds, made.place(3).copy_(ds)):
        torch.testing.assert_close(made.gradient(part).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(made.scores(values[1:2]), plain.scores(values[1:2]))
