"""transformers: the mask function allows what transformers' own dense mask allows, and says so in O(L)."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", exc_type=ImportError)

from transformers import masking_utils
from transformers_models import VERSION, padding

import flash_dmattn
from flash_dmattn.integrations.transformers import mask_function
from flash_dmattn.integrations.transformers.mask_function import LayerMask, make_mask, read_rule
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.storage import IntervalMask, TileMask

BATCH = 3
TAKES_POSITIONS = VERSION.release < (5, 4)  # cache_position in the place of q_length and q_offset
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 2, 2, 2, 3, 3]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 2, 3, 0, 1]])


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers lays packed documents over a mask function."""
    remapped = function
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        remapped = masking_utils.remap_positions_for_packed_sequence(function, POSITIONS)
    return masking_utils.and_masks(remapped, masking_utils.packed_sequence_mask_function(DOCUMENTS))


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "bidirectional": lambda: masking_utils.bidirectional_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(3),
    "window of one key": lambda: masking_utils.sliding_window_causal_mask_function(1),
    "window beyond": lambda: masking_utils.sliding_window_causal_mask_function(99),
    "documents": lambda: packed(masking_utils.causal_mask_function),
    "documents and window": lambda: packed(masking_utils.sliding_window_causal_mask_function(3)),
}
if hasattr(masking_utils, "sliding_window_bidirectional_mask_function"):
    FUNCTIONS["both ways"] = lambda: masking_utils.sliding_window_bidirectional_mask_function(2)
# Checked by code that looks whether it may leave the mask out.
LOCAL_SIZES = {"window": 3, "window of one key": 1, "window beyond": 99, "both ways": 2, "documents and window": 3}
# Lq, Lk, the position of the first query, the position of the first key
PLACES = {
    "training": (8, 8, 0, 0),
    "decoding": (1, 8, 7, 0),
    "chunked prefill": (3, 8, 5, 0),
    "full sliding cache": (3, 7, 9, 5),
    "static prefill": (5, 12, 0, 0),
    "static chunk": (3, 12, 4, 0),
    "static decoding": (1, 12, 6, 0),
}


def arguments(place: tuple[int, int, int, int], function: Callable[..., Any], mask: Tensor | None) -> dict[str, Any]:
    seqlen_q, seqlen_k, first_q, first_k = place
    options: dict[str, Any] = {"batch_size": BATCH, "kv_length": seqlen_k, "kv_offset": first_k, "attention_mask": mask}
    if TAKES_POSITIONS:
        options["cache_position"] = torch.arange(seqlen_q) + first_q
    else:
        options |= {"q_length": seqlen_q, "q_offset": first_q, "device": torch.device("cpu")}
    return {**options, "mask_function": function}


def dense(options: dict[str, Any]) -> Tensor:
    """The mask (B, 1, Lq, Lk) of transformers."""
    more = {"allow_torch_fix": False} if TAKES_POSITIONS else {}
    allowed = masking_utils.sdpa_mask(**options, allow_is_causal_skip=False, **more)
    assert allowed is not None
    return allowed


def allowed_by(mask: LayerMask | None, place: tuple[int, int, int, int], is_causal: bool, with_bias: bool) -> Tensor:
    """The pairs that a call allows: with equal scores, and an identity for values, the output is above 0 there."""
    seqlen_q, seqlen_k = place[:2]
    q, k = torch.zeros(BATCH, seqlen_q, 1, 8), torch.zeros(BATCH, seqlen_k, 1, 8)
    v = torch.eye(seqlen_k)[None, :, None].expand(BATCH, -1, -1, -1)
    call: dict[str, Any] = {"is_causal": is_causal} if mask is None else mask.arguments(with_bias)._asdict()
    out = flash_dmattn.attention(q, k, v, **call)
    assert isinstance(out, Tensor)
    return (out > 0).transpose(1, 2)


CASES = [
    (name, place, side)
    for name in FUNCTIONS
    for place in PLACES
    for side in (None, "left", "right", "full")
    # transformers looks for documents where there is neither a cache nor padding.
    if not name.startswith("documents") or (place, side) == ("training", None)
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("name", "place", "side"), CASES)
def test_the_same_keys_are_allowed(name: str, place: str, side: str | None, with_bias: bool) -> None:
    where = PLACES[place]
    seqlen_q, _, first_q, _ = where
    seen = first_q + seqlen_q
    mask = None if side is None else padding(seen, None if side == "full" else side).bool()
    options = {**arguments(where, FUNCTIONS[name](), mask), "local_size": LOCAL_SIZES.get(name)}
    result = make_mask(
        **options, allow_is_bidirectional_skip=True, allow_is_causal_skip=not name.startswith("documents")
    )
    if isinstance(result, Tensor):
        assert name == "both ways" and place.startswith("static"), "a rule has not been recognised"
        assert torch.equal(result, dense(options))
        return
    assert torch.equal(allowed_by(result, where, name != "bidirectional", with_bias), dense(options))
    if result is None:
        assert name == "bidirectional" or seqlen_q == where[1] or seqlen_q == 1
        return
    held = [x.numel() for x in (result.padding, result.documents) if x is not None]
    assert sum(held) <= BATCH * where[1] and result.shape == (BATCH, 1, *where[:2])


@pytest.mark.parametrize("place", ["static prefill", "static chunk", "static decoding"])
def test_a_position_that_is_a_tensor_is_not_read(place: str) -> None:
    """Static caches of newer versions keep it on the device; asking for its value would wait."""
    if TAKES_POSITIONS:
        pytest.skip("before 5.4 the positions of queries are a tensor, which is read")
    where = PLACES[place]
    options = arguments(where, masking_utils.causal_mask_function, None)
    wanted = dense(options)
    result = make_mask(**options | {"q_offset": torch.tensor(where[2])}, allow_is_causal_skip=False)
    assert isinstance(result, LayerMask) == (where[0] == 1)  # a model that lets nothing be skipped wants a tensor
    result = make_mask(**options | {"q_offset": torch.tensor(where[2])})
    assert isinstance(result, LayerMask) and isinstance(result.used, Tensor)
    assert torch.equal(allowed_by(result, where, True, False), wanted)


@pytest.mark.parametrize("name", ["causal", "bidirectional", "window"])
@pytest.mark.parametrize("place", ["training", "decoding", "chunked prefill"])
def test_padding_is_prepared_once_where_kernels_read_it(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask that a GPU gets, on a CPU."""
    monkeypatch.setattr(mask_function, "PREPARING_DEVICES", ("cpu",))
    where = PLACES[place]
    options = arguments(where, FUNCTIONS[name](), padding(8, "left").bool()) | {"local_size": LOCAL_SIZES.get(name)}
    result = make_mask(**options, allow_is_bidirectional_skip=True)
    assert isinstance(result, LayerMask)
    prepared = result.arguments(False)
    assert isinstance(prepared.mask, PreparedMask) and prepared is result.arguments(False)
    assert torch.equal(allowed_by(result, where, False, False), dense(options))


@pytest.mark.parametrize("is_causal", [False, True])
def test_beside_a_bias_padding_is_prepared_as_bits(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels read there, and would make of another form in each pass of each layer."""
    monkeypatch.setattr(mask_function, "PREPARING_DEVICES", ("cpu",))
    real = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    real[1, ..., 13:] = False
    mask = LayerMask((2, 1, 20, 20), real, is_causal=is_causal)
    without, others = (mask.arguments(with_bias).mask for with_bias in (False, True))
    assert isinstance(without, IntervalMask) and isinstance(others, TileMask)
    wanted = real & torch.ones(20, 20, dtype=torch.bool).tril() if is_causal else real.expand(2, 1, 20, 20)
    assert torch.equal(without.dense(), wanted) and torch.equal(others.dense(), wanted)


def test_documents_are_packed_in_one_row_alone() -> None:
    one = LayerMask((1, 1, 8, 8), documents=DOCUMENTS[:1], is_causal=True)
    sequences = one.arguments(False).sequences
    assert sequences is not None and sequences.cu_seqlens_q is not None
    assert sequences.cu_seqlens_q.tolist() == [0, 3, 7, 8] and sequences.max_seqlen_q == 4
    assert one.arguments(True).mask is not None and one.arguments(True).sequences is None
    assert one.arguments(False) is one.arguments(False)  # made once for all layers


def odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query + key) % 2 == 0


def sliding_window_overlay(sliding_window: int) -> Callable[..., Any]:
    """It has the name of a function in transformers, and another meaning."""

    def inner_mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key > query - 2 * sliding_window

    return inner_mask


class Window:
    """A mask function without a closure or a name to read."""

    __module__ = masking_utils.__name__

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key > query - 3


def makers() -> dict[str, Callable[..., Any]]:
    """A function by each maker of transformers whose closure is read."""
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    result = {
        "and_masks": masking_utils.and_masks(causal, both),
        "sliding_window_overlay": masking_utils.sliding_window_overlay(3),
        "packed_sequence_mask_function": masking_utils.packed_sequence_mask_function(DOCUMENTS),
    }
    if hasattr(masking_utils, "sliding_window_bidirectional_overlay"):
        result["sliding_window_bidirectional_overlay"] = masking_utils.sliding_window_bidirectional_overlay(2)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        result["remap"] = masking_utils.remap_positions_for_packed_sequence(causal, POSITIONS)
    return result


def with_other_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of transformers with its closure's variables renamed, as a version to come may have them."""
    code = function.__code__
    names = tuple(f"{name}_" for name in code.co_freevars)
    code = code.replace(co_freevars=names)
    renamed = FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
    renamed.__module__, renamed.__qualname__ = function.__module__, function.__qualname__
    return renamed


WINDOW = masking_utils.sliding_window_overlay
MINE = masking_utils.and_masks(masking_utils.causal_mask_function, odd)
UNKNOWN: dict[str, Callable[..., Any]] = {
    "a function of the user": odd,
    "both": MINE,
    "vmap": MINE,
    "one of two": masking_utils.or_masks(WINDOW(3), masking_utils.packed_sequence_mask_function(DOCUMENTS)),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.zeros(BATCH, dtype=torch.long)),
    "two windows": masking_utils.and_masks(masking_utils.sliding_window_causal_mask_function(3), WINDOW(5)),
    "a known name elsewhere": sliding_window_overlay(2),
    "a callable of another kind": Window(),
    **{f"{name} of other names": with_other_names(function) for name, function in makers().items()},
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("side", [None, "left"])
def test_what_no_rule_describes_is_evaluated(name: str, side: str | None) -> None:
    mask = None if side is None else padding(8, side).bool()
    options = {**arguments(PLACES["training"], UNKNOWN[name], mask), "use_vmap": name == "vmap"}
    assert read_rule(UNKNOWN[name]) is None
    result = make_mask(**options, local_size=1)  # says that there is more than causality
    assert isinstance(result, Tensor) and torch.equal(result, dense(options))


def test_closures_of_the_names_of_transformers_are_read() -> None:
    assert all(read_rule(function) is not None for function in makers().values())


def test_a_mask_passes_for_one_that_is_ready() -> None:
    """generate() makes the mask of a static cache and hands it to the model, which must not take it for padding."""
    mask = LayerMask((2, 1, 4, 8), padding=torch.ones(2, 1, 1, 8, dtype=torch.bool), is_causal=True, used=4)
    assert isinstance(mask, masking_utils.BlockMask) and len(mask.shape) == 4
    assert (mask.ndim, mask.dim(), mask.size(2), mask.size(), mask.numel()) == (4, 4, 4, (2, 1, 4, 8), 64)
    assert mask.contiguous() is mask
    moved = mask.to("meta")
    assert moved.padding is not None and moved.padding.device.type == "meta" and moved.used == 4
    assert (moved.shape, moved.is_causal, moved.window) == (mask.shape, True, None)
    assert repr(mask) == "LayerMask((2, 1, 4, 8), padding, used, is_causal=True, window=None)"
    for index in ((..., slice(4)), (0, slice(None), slice(2, None), slice(None)), (slice(None),) * 3, 0):
        with pytest.raises(TypeError, match="no values to index"):
            mask[index]
    with pytest.raises(TypeError, match="no values to index"):
        mask[:, :, :2, :]
    with pytest.raises(TypeError):
        mask + 1  # type: ignore[operator]


def test_padding_of_another_rank_is_refused() -> None:
    options = arguments(PLACES["training"], masking_utils.causal_mask_function, torch.ones(3, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 8, 8\); it needs 2 dims"):
        make_mask(**options)


def test_padding_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all masks of a tensor, since reading waits for a GPU; again where the tensor has changed."""
    reads: list[Tensor] = []
    original = Tensor.all
    monkeypatch.setattr(Tensor, "all", lambda x: reads.append(x) or original(x))
    attention_mask = torch.ones(3, 8, dtype=torch.long)
    options = arguments(PLACES["training"], FUNCTIONS["bidirectional"](), attention_mask)
    options["allow_is_bidirectional_skip"] = True
    assert make_mask(**options) is None and make_mask(**options) is None and len(reads) == 1
    attention_mask[0, 5:] = 0
    result = make_mask(**options)
    assert isinstance(result, LayerMask) and result.padding is not None and len(reads) == 2


def test_a_captured_graph_keeps_padding_that_forbids_nothing_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads what the tensor has then, whatever a warm-up before the capture has found."""
    attention_mask = torch.ones(3, 8, dtype=torch.long)
    options = arguments(PLACES["training"], FUNCTIONS["bidirectional"](), attention_mask)
    options["allow_is_bidirectional_skip"] = True
    assert make_mask(**options) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert make_mask(**options) is None, "no graph holds what is on a CPU"
    monkeypatch.setattr(Tensor, "is_cuda", True)
    result = make_mask(**options)
    assert isinstance(result, LayerMask) and result.padding is not None and result.padding.shape == (3, 1, 1, 8)


def test_padding_behind_the_used_keys_is_none() -> None:
    """An attention_mask as long as what has been seen pads the rest of a static cache, which is not read anyhow."""
    result = make_mask(**arguments(PLACES["static prefill"], FUNCTIONS["causal"](), torch.ones(3, 5, dtype=torch.bool)))
    assert isinstance(result, LayerMask) and result.padding is None and result.used == 5
