"""`return_aux`: the maximum score and the entropy of each row, against p in fp64.

Random calls ask for both, with gradients (`draws.asking`); here are properties, edges, and the ways to a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import DEVICE
from conftest import refusal_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import AuxOutput, AuxRequest, Sequences, attention
from flash_dmattn.backends import eager
from flash_dmattn.biases import Relative
from flash_dmattn.dispatch import registry
from flash_dmattn.masks import PreparedMask

ALL = AuxRequest(lse=True, max_scores=True, entropy=True)
BACKENDS = ("eager", "reference")


@pytest.fixture(params=(None, 3000), ids=("one chunk", "many chunks"))
def chunks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls of eager in one chunk, or with the keys of a row in several."""
    if request.param is not None:
        eager.set_chunk_bytes(request.param)
    yield
    eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)


def tensors(seqlen_q: int = 7, seqlen_k: int = 70, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = ((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def asked(*arguments: Any, **options: Any) -> AuxOutput:
    aux = attention(*arguments, return_aux=ALL, **options)[1]
    assert isinstance(aux, AuxOutput)
    return aux


def by_hand(scores: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Largest scores and entropies of scores (B, Hq, Lq, Lk) in fp64, from p itself."""
    logits = scores
    if sink is not None:
        logits = torch.cat((scores, sink.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)), 3)
    p = logits.softmax(3).nan_to_num(0.0)
    return scores.amax(3), torch.special.entr(p).sum(3)


def scores_of(q: Tensor, k: Tensor, scale: float = 8**-0.5) -> Tensor:
    return scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2))


def assert_close(aux: AuxOutput, wanted: tuple[Tensor, Tensor]) -> None:
    for got, want in zip(aux[1:], wanted, strict=True):
        assert got is not None and torch.equal(got == -math.inf, want == -math.inf)
        finite = want > -math.inf
        torch.testing.assert_close(got[finite].double(), want[finite], rtol=1e-5, atol=1e-5)


EDGES: dict[str, tuple[Any, Any, Any, float | None]] = {  # mask, bias, sink, scale
    "nothing": (None, None, None, None),
    "rows without keys": (torch.arange(7)[:, None] % 3 > 0, None, None, None),
    "rows without keys, a sink": (torch.arange(7)[:, None] % 3 > 0, None, torch.randn(4), None),
    "a bias of -inf": (None, torch.where(torch.arange(70) % 3 > 0, 0.0, -math.inf)[None], None, None),
    "a bias of -inf in whole rows": (None, torch.where(torch.arange(7) % 3 > 0, 1.0, -math.inf)[:, None], None, None),
    "sinks of -inf": (None, None, torch.tensor([-math.inf, 0.0, -math.inf, 5.0]), None),
    "large sinks": (None, None, torch.tensor([1e4, -1e4, 30.0, -30.0]), None),
    "a negative scale": (None, None, None, -0.7),
    "a scale of 0": (None, None, None, 0.0),
    "scores below 0": (None, torch.full((1, 1), -50.0), None, None),
    "scores far below 0": (None, torch.full((7, 70), -1e4), torch.full((4,), -1e4), None),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("chunks")
def test_edges(backend: str, name: str) -> None:
    mask, bias, sink, scale = EDGES[name]
    q, k, v = tensors()
    s = scores_of(q, k, 8**-0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    aux = asked(q, k, v, mask, bias, sink=sink, softmax_scale=scale, backend=backend)
    if name == "scores far below 0":  # fp32 holds them as multiples of 1e-3
        s = (s.float()).double()
        torch.testing.assert_close(aux.max_scores, s.amax(3).float(), rtol=2e-7, atol=0)
        torch.testing.assert_close(aux.entropy, by_hand(s, sink)[1].float(), rtol=0, atol=1e-3)
    else:
        assert_close(aux, by_hand(s, sink))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("chunks")
def test_entropy_lies_between_0_and_that_of_equal_scores(backend: str) -> None:
    q, k, v = tensors()
    sink = torch.tensor([0.0, 3.0, -3.0, -math.inf])
    entropy = asked(q * 9, k, v, sink=sink, backend=backend).entropy
    keys = torch.where(sink > -math.inf, 71.0, 70.0)
    assert (entropy >= 0).all() and (entropy <= keys.log()[:, None]).all()
    equal = asked(q * 0, k, v, backend=backend).entropy
    torch.testing.assert_close(equal, torch.full_like(equal, math.log(70)), rtol=1e-6, atol=0)
    with_sink = asked(q * 0, k, v, sink=torch.zeros(4), backend=backend).entropy
    torch.testing.assert_close(with_sink, torch.full_like(equal, math.log(71)), rtol=1e-6, atol=0)
    one = asked(q, k[:, :1], v[:, :1], backend=backend)
    assert torch.equal(one.entropy, torch.zeros_like(one.entropy))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("chunks")
def test_a_constant_in_all_scores_of_a_row_moves_no_entropy(backend: str) -> None:
    """The mean score and lse are 1e4 then, and fp32 holds their difference, the entropy, to 4.9e-4 only."""
    q, k, v = tensors()
    constant = torch.full((1, 1, 1, 1), 1e4)
    plain, moved = asked(q, k, v, backend=backend), asked(q, k, v, bias=constant, backend=backend)
    assert (plain.entropy - moved.entropy).abs().max() < 3e-4  # the rounding of 70 scores, which averages out
    torch.testing.assert_close(moved.max_scores, plain.max_scores + 1e4, rtol=2e-7, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("chunks")
def test_derivatives_of_entropy(backend: str) -> None:
    """They exist for every input, also the second ones, with derivatives of out and lse, and without."""
    options = {"dtype": torch.float64, "requires_grad": True}
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 2, 4, **options), *(torch.randn(1, 4, 1, 4, **options) for _ in range(2))
    bias, sink, mask = torch.randn(1, 2, 3, 4, **options), torch.randn(2, **options), torch.rand(3, 4) > 0.3

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        own, (bias, sink) = inputs[:3], inputs[3:]
        out, aux = attention(*own, mask, bias, sink=sink, softcap=2.0, backend=backend, return_aux=ALL)
        return out, aux.lse, aux.entropy

    inputs = (q, k, v, bias, sink)
    torch.autograd.gradcheck(call, inputs)
    if backend == "eager":
        torch.autograd.gradgradcheck(call, inputs, fast_mode=True)
        alone = torch.autograd.grad(call(*inputs)[2].sum(), inputs, allow_unused=True)
        unmoved = torch.autograd.grad(sum(x.sum() for x in call(*inputs)[:2]), inputs)
        zero = torch.autograd.grad(sum((x * f).sum() for x, f in zip(call(*inputs), (1, 1, 0))), inputs)
        assert torch.equal(alone[2], torch.zeros_like(v))  # the values have no part in it
        for got, want in zip(zero, unmoved, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-15)


def test_the_largest_score_has_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    for backend in BACKENDS:
        out, aux = attention(q, k, v, backend=backend, return_aux=ALL)
        assert out.requires_grad and aux.lse.requires_grad and aux.entropy.requires_grad
        assert not aux.max_scores.requires_grad


def test_what_is_not_asked_for_is_none() -> None:
    q, k, v = tensors()
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), AuxRequest(entropy=True)):
        out, aux = attention(q, k, v, backend="eager", return_aux=request)
        assert [x is not None for x in aux] == list(request)
        for x, want in zip(aux, asked(q, k, v, backend="eager"), strict=True):
            assert x is None or torch.equal(x, want)
        assert torch.equal(out, attention(q, k, v, backend="eager"))
    assert attention(q, k, v, return_aux=None).shape == q.shape


def test_the_request_of_torch_is_accepted() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this torch has no AuxRequest")
    q, k, v = tensors()
    aux = attention(q, k, v, return_aux=flex.AuxRequest(lse=True, max_scores=True))[1]
    assert aux.entropy is None and torch.equal(aux.max_scores, asked(q, k, v).max_scores)


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"return_aux": ALL, "return_lse": True}, ValueError, "return_lse is True with return_aux"),
        ({"return_aux": ALL, "return_probs": True}, ValueError, "return_probs is True with return_aux"),
        ({"return_aux": True}, TypeError, "return_aux is a bool; it needs to be a flash_dmattn.AuxRequest"),
        ({"return_aux": AuxRequest(max_scores=1)}, TypeError, "return_aux.max_scores is 1; it needs to be True or"),
        ({"return_aux": AuxRequest(lse=1)}, TypeError, "return_aux.lse is 1; it needs to be True or False"),
    ],
)
def test_wrong_requests_are_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, v = tensors()
    for call in (attention, flash_dmattn.explain):
        with pytest.raises(error, match=match):
            call(q, k, v, **options)


def test_backends_without_them_refuse_and_auto_goes_on() -> None:
    q, k, v = tensors()
    for name in ("max_scores", "entropy"):
        request = AuxRequest(**{name: True})
        refused = refusal_of(
            lambda request=request: attention(q, k, v, backend="sdpa", return_aux=request),
            lambda: attention(q, k, v, backend="sdpa"),
            flash_dmattn.BackendUnsupportedError,
        )
        assert f"{name} is set; this backend does not have it" in str(refused)
        assert flash_dmattn.explain(q, k, v, return_aux=request).forward == "eager"
        x = torch.empty(2, 4096, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        on_gpu = flash_dmattn.explain(x, x, x, return_aux=request, device="sm_90")
        serves = name == "max_scores" and (DEVICE == "cpu" or registry.BACKENDS["cuda"].probe().usable)
        assert (on_gpu.forward, on_gpu.backward) == (("cuda", "cuda") if serves else ("triton", "triton"))
        assert f"{name} is set" in str(on_gpu)


CHOICES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "sequences": {"sequences": Sequences.padded(seqlens_k=torch.empty(2, dtype=torch.int32, device="meta"))},
    "a mask": {"mask": torch.empty(2, 1, 4096, 4096, dtype=torch.bool, device="meta")},
    "a bias": {"bias": torch.empty(2, 16, 4096, 4096, dtype=torch.bfloat16, device="meta")},
    "a bias by distance": {"bias": Relative(torch.empty(16, 257, device="meta"), 128, "clamp")},
    "dropout": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto_takes_cuda_with_the_largest_score_where_its_kernels_write_it(name: str) -> None:
    """The backward pass is that of a call that does not ask."""
    x = torch.empty(2, 4096, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plain, asking = (
        flash_dmattn.explain(x, x, x, **CHOICES[name], **more, device="sm_90")
        for more in ({"return_lse": True}, {"return_aux": AuxRequest(lse=True, max_scores=True)})
    )
    is_written = name in ("dense", "causal", "sequences")
    assert (asking.forward, asking.backward) == (plain.forward if is_written else "triton", plain.backward)
    assert DEVICE != "cpu" or plain.forward == "cuda"


def test_layouts_of_sequences_and_batches() -> None:
    """Packed, padded and nested sequences have rows as each alone; rows of no sequence have -inf and 0."""
    q, k, v = (x[0] for x in tensors(8, 8))
    sequences = Sequences.packed(torch.tensor([0, 3, 7]))  # the last token is of none
    for backend in BACKENDS:
        aux = asked(q, k, v, sequences=sequences, is_causal=True, sink=torch.zeros(4), backend=backend)
        for first, last in ((0, 3), (3, 7)):
            own = (x[None, first:last] for x in (q, k, v))
            alone = asked(*own, is_causal=True, sink=torch.zeros(4), backend=backend)
            for x, want in zip(aux, alone, strict=True):
                torch.testing.assert_close(x[:, first:last], want[0])
        assert (aux.max_scores[:, 7] == -math.inf).all() and (aux.entropy[:, 7] == 0).all()
    offsets = torch.tensor([0, 3, 7])
    nested = [torch.nested.nested_tensor_from_jagged(x[:7], offsets) for x in (q, k, v)]
    entropy = asked(*nested).entropy
    assert entropy.is_nested and entropy.shape[:2] == (2, 4)
    batched = asked(*(x.view(1, 2, 4, *x.shape[1:]) for x in (q, k, v)))
    assert [x.shape for x in batched] == [(1, 2, 4, 4)] * 3


def test_lists_have_rows_as_their_mask() -> None:
    q, k, v = tensors()
    lists = PreparedMask.from_lists(torch.randint(-1, 70, (2, 1, 7, 9)), seqlen_k=70)
    for x, want in zip(asked(q, k, v, lists), asked(q, k, v, lists.dense()), strict=True):
        torch.testing.assert_close(x, want)


def results(q: Tensor, k: Tensor, backend: str = "auto") -> tuple[Tensor, ...]:
    out, aux = attention(q, k, k, backend=backend, return_aux=AuxRequest(max_scores=True, entropy=True))
    return out, aux.max_scores, aux.entropy


def loss(*inputs: Any) -> Tensor:
    out, largest, entropy = results(*inputs)
    return out.sum() + 0 * largest.sum() + entropy.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_graphs(backend: str) -> None:
    q, k, _ = tensors(3, 5)
    q.requires_grad_()
    (want,) = torch.autograd.grad(loss(q, k, backend), q)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(q, k, backend), q)[0], want)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            return results(q, k, backend)

    module = torch.export.export(Layer(), (q.detach(), k)).module()
    for x, y in zip(module(q.detach(), k), results(q.detach(), k, backend), strict=True):
        torch.testing.assert_close(x, y)
    out, _, entropy = module(q, k)
    torch.testing.assert_close(torch.autograd.grad(out.sum() + entropy.sum(), q)[0], want)


def test_under_transforms() -> None:
    q, k, _ = tensors(3, 5, torch.float64)
    many = torch.stack((q, 2 * q, -q))
    mapped = torch.vmap(lambda q: results(q, k, "eager"))(many)
    for x, *each in zip(mapped, *(results(q, k, "eager") for q in many), strict=True):
        torch.testing.assert_close(x, torch.stack(each))
    gradients = torch.vmap(torch.func.grad(lambda q: loss(q, k, "eager")))(many)
    for x, q in zip(gradients, many, strict=True):
        torch.testing.assert_close(x, torch.func.grad(lambda q: loss(q, k, "eager"))(q))
    leaf = many[0].clone().requires_grad_()
    entropy = results(leaf, k, "eager")[2]
    sent = torch.stack((torch.ones_like(entropy), torch.zeros_like(entropy)))
    batched = torch.autograd.grad(entropy, leaf, sent, is_grads_batched=True, retain_graph=True)[0]
    torch.testing.assert_close(batched[0], torch.autograd.grad(entropy.sum(), leaf)[0])
    assert not batched[1].any()
    again = checkpoint(lambda q: loss(q, k, "eager"), leaf, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, leaf)[0], gradients[0])
    with torch.inference_mode():
        torch.testing.assert_close(results(many[0], k, "eager"), results(many[0], k, "reference"))


def test_forward_mode_is_refused_in_words_but_by_the_formula() -> None:
    q, k, _ = tensors(3, 5, torch.float64)
    entropy = lambda backend: lambda q: results(q, k, backend)[2]
    with pytest.raises(NotImplementedError, match=r"max_scores is set in forward mode .*reference"):
        torch.func.jvp(entropy("eager"), (q,), (q,))
    with pytest.raises(NotImplementedError, match="is set in forward mode"):
        torch.func.jvp(torch.func.grad(lambda q: entropy("eager")(q).sum()), (q,), (q,))
    _, moved = torch.func.jvp(entropy("reference"), (q,), (q,))
    by_gradient = torch.func.grad(lambda q: entropy("eager")(q).sum())(q)
    torch.testing.assert_close(moved.sum(), (by_gradient * q).sum())
