"""`AuxRequest` asks for statistics of the rows of a call, and `AuxOutput` has them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class AuxRequest(NamedTuple):
    """Ask `attention` for statistics of each row of probabilities, as `return_aux=`.

    The request of FlexAttention, `torch.nn.attention.flex_attention.AuxRequest`, is also accepted.

    Attributes:
        lse: the natural log of the sum of exp of the scores and the sink. It is differentiable.
        max_scores: the maximum score of each row, after scale, softcap and bias, without the sink. It is -inf in a row
            without an allowed key. It has no gradient.
        entropy: -sum p log(p) over the keys of each row and its sink, before dropout. It is 0 in a row without an
            allowed key. It is differentiable.

    Equivalent PyTorch in rows with a key, for scores s with -inf where a key is not allowed, and without a sink::

        lse = s.logsumexp(-1)
        max_scores = s.amax(-1)
        entropy = torch.special.entr(s.softmax(-1)).sum(-1)

    >>> import torch, flash_dmattn
    >>> q, k, v = torch.randn(3, 1, 6, 2, 16)
    >>> out, aux = flash_dmattn.attention(q, k, v, return_aux=flash_dmattn.AuxRequest(max_scores=True))
    >>> aux.max_scores.amax((0, 2)).shape  # the largest score of each head
    torch.Size([2])
    """

    lse: bool = False
    max_scores: bool = False
    entropy: bool = False


class AuxOutput(NamedTuple):
    """Hold the results of an `AuxRequest`, each shaped as lse, (B, Hq, Lq), in fp32 (fp64 for fp64); or None.

    >>> import torch, flash_dmattn
    >>> q, k, v = torch.randn(3, 1, 1, 2, 16)
    >>> _, aux = flash_dmattn.attention(q, k, v, return_aux=flash_dmattn.AuxRequest(entropy=True))
    >>> aux.lse is None, aux.entropy.flatten().tolist()  # one key has all of the probability
    (True, [0.0, 0.0])
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    entropy: Tensor | None = None


class AnyAuxRequest(Protocol):
    """An `AuxRequest`, or the one of torch, which has no entropy."""

    @property
    def lse(self) -> bool: ...

    @property
    def max_scores(self) -> bool: ...


def read_request(request: AnyAuxRequest | None, return_lse: bool, return_probs: bool) -> tuple[bool, bool, bool]:
    """Return whether a call returns lse, the maximum scores and entropies.

    Raises:
        TypeError: it is no request.
        ValueError: another argument also asks for results.
    """
    if request is None:
        return return_lse, False, False
    if not hasattr(request, "lse") or not hasattr(request, "max_scores"):
        raise TypeError(
            f"return_aux is a {type(request).__name__}; it needs to be a flash_dmattn.AuxRequest(lse=..., "
            "max_scores=..., entropy=...)"
        )
    for name, passed, advice in (
        ("return_lse", return_lse, "return_aux=AuxRequest(lse=True) returns lse, too"),
        ("return_probs", return_probs, "call once for each"),
    ):
        if passed:
            raise ValueError(f"{name} is {passed!r} with return_aux; it needs to be False ({advice})")
    lse, largest, entropy = (getattr(request, name, False) for name in AuxRequest._fields)
    for name, x in zip(AuxRequest._fields, (lse, largest, entropy), strict=True):
        if not isinstance(x, bool):
            raise TypeError(f"return_aux.{name} is {x!r}; it needs to be True or False")
    return lse, largest, entropy


def make_output(results: tuple[Tensor, ...], lse: bool, max_scores: bool, entropy: bool) -> AuxOutput:
    """Return the requested statistics from the results of a call: out, lse, and then the other ones, in order."""
    rest = iter(results[2:])
    largest = next(rest).detach() if max_scores else None  # it has no gradient
    return AuxOutput(results[1] if lse else None, largest, next(rest) if entropy else None)
