"""The mask function of "dmattn": a rule and the padding describe the mask, without a value for each pair of tokens.

`read_rule` recognises the rule of a mask function of transformers, `make_mask` puts it into a `LayerMask`, and each
layer gets its arguments of `attention` from the `LayerMask`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from ... import Sequences
from ...caches import TensorCache
from ...definition import is_transformed
from ...distributed.group import context_in_force
from ...masks import PreparedMask
from .models import MODELS_ASK_FOR_TENSORS, is_captured, masking_utils, read_tables, refuse_config_without_interface

# Devices with kernels for prepared masks; elsewhere these would be unpacked again.
PREPARING_DEVICES = ("cuda",)
# On a CPU layers pass only the used keys of a static cache: the host knows their number, and this costs less than the
# sequences that a GPU needs. With one query the number is rounded up to this multiple: each length needs a plan.
_KEYS_OF_A_PLAN = 128
# A result of `_used_keys`: the last query is not aligned with the last used key.
_MISALIGNED = -1


class MaskArguments(NamedTuple):
    """The arguments of `attention` that replace a mask."""

    mask: Tensor | PreparedMask | None = None
    is_causal: bool = False
    window_size: tuple[int, int] | None = None
    sequences: Sequences | None = None


class LayerMask(BlockMask):
    """Padding, documents, causality, a window and the used part of a static cache, for all layers of one forward.

    It inherits from BlockMask only for generate(), which makes a mask for a static cache and passes it to the model
    again. There transformers accepts 4-D tensors and BlockMasks, and treats anything else as 2-D padding.

    Args:
        shape: (B, 1, Lq, Lk), the shape of the tensor that it replaces.
        padding: (B, 1, 1, Lk) bool, True = attend, or None.
        documents: (B, L), the document of each token in ascending runs, or None; with documents Lq == Lk.
        is_causal, window: as in `attention`, aligned to the last used key.
        used: the number of keys up to the last query, an int or a tensor with one; None for all Lk.
        device: of the mask.
        blocks: (B, Lk), the block of each token, for example its image, negative for no block; None without blocks.
            The tokens of a block are consecutive. Within the window they see each other, and the tokens before them.
        skipped: the number of first queries of the forward that the mask leaves out.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        is_causal: bool = False,
        window: tuple[int, int] | None = None,
        used: int | Tensor | None = None,
        device: torch.device | str | None = None,
        blocks: Tensor | None = None,
        skipped: int = 0,
    ) -> None:
        # Without super().__init__(), which needs the tables of FlexAttention.
        self._shape, self._device = shape, device
        self.padding, self.documents, self.blocks, self.skipped = padding, documents, blocks, skipped
        self.is_causal, self.window, self.used = is_causal, window, used
        self._arguments: dict[bool, MaskArguments] = {}
        self._first_keys: tuple[MaskArguments, int] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, Lq, Lk)."""
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        return self._shape[0] * self._shape[2] * self._shape[3]

    def contiguous(self) -> LayerMask:
        """Return itself; generate() calls it on the mask of a static cache."""
        return self

    def to(self, device: torch.device | str, *args: Any, **kwargs: Any) -> LayerMask:
        """Move the tensors to a device; hooks of models that are split over devices call it."""
        values = {name: getattr(self, name) for name in ("padding", "documents", "used", "blocks")}
        moved = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
        return self._with(device=device, **moved)

    def __getitem__(self, index: object) -> LayerMask:
        """Return the mask of the last queries, `mask[:, :, first:, :]`, for layers that compute only these."""
        every = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice):
            begin, stop, step = index[2].indices(self._shape[2])
            if (*index[:2], index[3]) == (every,) * 3 and (stop, step) == (self._shape[2], 1):
                batch, heads, seqlen_q, seqlen_k = self._shape
                return self._with(shape=(batch, heads, seqlen_q - begin, seqlen_k), skipped=self.skipped + begin)
        raise TypeError(
            "the attention mask is a flash_dmattn LayerMask, which has no values to index; a model that takes other "
            'parts of it than its last queries needs attn_implementation="sdpa"'
        )

    def _with(self, **changes: Any) -> LayerMask:
        names = ("shape", "padding", "documents", "is_causal", "window", "used", "blocks", "skipped")
        return LayerMask(**{"device": self._device, **{name: getattr(self, name) for name in names}, **changes})

    def __repr__(self) -> str:
        names = [name for name in ("padding", "documents", "used", "blocks") if getattr(self, name) is not None]
        tensors = ", ".join(names) or "no tensors"
        return f"LayerMask({self._shape}, {tensors}, is_causal={self.is_causal}, window={self.window})"

    __str__ = __repr__

    def arguments(self, with_bias: bool) -> MaskArguments:
        """Return the arguments of `attention`, which are computed for the first layer and kept for later layers.

        With a bias for each pair of tokens, documents are a mask and not packed sequences, which have no such bias.
        """
        if is_transformed():  # tensors that are made in a transform end with it
            return self._make(with_bias)
        if with_bias not in self._arguments:
            self._arguments[with_bias] = self._make(with_bias)
        return self._arguments[with_bias]

    def first_keys(self) -> tuple[MaskArguments, int] | None:
        """Return the arguments for the first keys of a static cache, and their number; None if a layer passes all."""
        if self.used is None or torch.compiler.is_compiling() or torch.device(self._device or "cpu").type != "cpu":
            return None
        made = self._first_keys
        if made is None or is_transformed():
            used = keys = int(self.used)
            if self._shape[2] == 1 and self.window is None:
                keys = min(-(-used // _KEYS_OF_A_PLAN) * _KEYS_OF_A_PLAN, self._shape[3])
            mask = None if self.padding is None else self.padding[..., :keys]
            if keys > used:
                is_used = (torch.arange(keys, device="cpu") < used)[None, None, None]
                mask = is_used if mask is None else mask & is_used
            made = MaskArguments(mask, self.is_causal, self.window), keys
            self._first_keys = None if is_transformed() else made
        return made

    def _make(self, with_bias: bool) -> MaskArguments:
        batch, _, seqlen_q, seqlen_k = self._shape
        if self.blocks is not None:
            begins = torch.where(self.blocks >= 0, _starts(self.blocks), torch.arange(seqlen_k, device=self._device))
            return MaskArguments(self._intervals(begins, torch.full_like(begins, seqlen_k)))
        if self.documents is not None:
            # Packing counts the documents, which waits for the device; a compiled graph cannot wait.
            waits = batch > 1 or with_bias or self.padding is not None or self.skipped > 0
            if waits or torch.compiler.is_compiling():
                begins = _starts(self.documents)
                ends = seqlen_k - _starts(self.documents.flip(1)).flip(1)
                return MaskArguments(self._intervals(begins, ends))
            return MaskArguments(None, self.is_causal, self.window, _pack_documents(self.documents[0]))
        if self.used is not None:
            if isinstance(self.used, Tensor):
                lengths = self.used.to(self._device).reshape(1).expand(batch).contiguous()
            else:
                lengths = torch.full((batch,), self.used, dtype=torch.int32, device=self._device)
            return MaskArguments(self.padding, self.is_causal, self.window, Sequences.padded(seqlens_k=lengths))
        if self.padding is not None and self.padding.device.type in PREPARING_DEVICES:
            band: dict[str, Any] = {"is_causal": self.is_causal, "window_size": self.window}
            # With a bias as tiles of bits, because passes of every layer would compute the bits from intervals.
            return MaskArguments(PreparedMask.from_mask(self.padding, seqlen_q=seqlen_q, as_tiles=with_bias, **band))
        return MaskArguments(self.padding, self.is_causal, self.window)

    def _intervals(self, begins: Tensor, ends: Tensor) -> PreparedMask:
        """Make the mask of intervals of queries for each key, (B, Lk), numbered from the first query of the forward."""
        if self.padding is not None:
            ends = ends.masked_fill(~self.padding[:, 0, 0], 0)  # an interval of negative length is empty
        begins, ends = begins[:, None] - self.skipped, ends[:, None] - self.skipped
        seqlen_q = self._shape[2]
        return PreparedMask.from_intervals(begins, ends, seqlen_q, is_causal=self.is_causal, window_size=self.window)


def _starts(documents: Tensor) -> Tensor:
    """Find the first index of the document of each token, (B, L)."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.diff(documents, prepend=documents[:, :1] - 1, dim=1) != 0
    return torch.where(begins, index, 0).cummax(1).values


def _pack_documents(documents: Tensor) -> Sequences:
    """Describe the documents (L,) of one row as packed sequences; waits for the device, to count them."""
    begins = torch.diff(documents, prepend=documents[:1] - 1).nonzero().flatten()
    limits = torch.cat([begins, begins.new_full((1,), documents.shape[0])]).to(torch.int32)
    return Sequences.packed(limits, max_seqlen_q=int(limits.diff().max()) if documents.shape[0] else 0)


class Rule(NamedTuple):
    """Causality, a window (left, right) around the query's position, and the document (B, L) of each token.

    With `blocks` (B, L), a query attends to earlier keys and to the keys of its block, and `is_causal` is False.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None
    documents: Tensor | None = None
    blocks: Tensor | None = None


# Function of transformers that makes mask functions -> the variables in the closures of these.
_HELD = {
    "sliding_window_overlay": {"sliding_window"},
    "sliding_window_bidirectional_overlay": {"sliding_window"},
    "packed_sequence_mask_function": {"packed_sequence_mask"},
    "remap_positions_for_packed_sequence": {"mask_function", "position_ids"},
    "and_masks": {"mask_functions"},
    "or_masks": {"mask_functions"},
    "blockwise_overlay": {"block_sequence_ids"},
}


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """Return the rule of a mask function of transformers; None for an unknown function, which has to be evaluated.

    A function is recognised by its name and by the variables of its closure. If a version of transformers renames
    them, the function is unknown.
    """
    if function is masking_utils.causal_mask_function:
        return Rule(is_causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Rule()
    if not isinstance(function, FunctionType) or function.__module__ != masking_utils.__name__:
        return None  # a function of the same name in another module may have another rule
    maker, held = function.__qualname__.partition(".")[0], _closure(function)
    if held.keys() != _HELD.get(maker):
        return None
    if maker == "sliding_window_overlay":
        return Rule(window=(held["sliding_window"] - 1, -1))
    if maker == "sliding_window_bidirectional_overlay":
        return Rule(window=(held["sliding_window"], held["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Rule(documents=held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        # Within a document, positions differ by as much as indices; another function hides other documents.
        return read_rule(held["mask_function"])
    if maker == "blockwise_overlay":
        return None  # only the union with causality is supported
    if maker == "or_masks":
        return _blocks_with_causality(held["mask_functions"])
    return _all_of([read_rule(part) for part in held["mask_functions"]])


def rule_of_flags(
    function: Callable[..., Any],
    config: Any,
    local_size: int | None,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> Rule | None:
    """Return the rule under torch.compile, which cannot trace closures, from flags that exclude other functions."""
    if function is masking_utils.causal_mask_function or function is masking_utils.bidirectional_mask_function:
        return read_rule(function)
    if local_size is None or local_size != getattr(config, "sliding_window", None):
        return None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None  # local_size may be the size of chunks
    if allow_is_causal_skip:
        return Rule(is_causal=True, window=(local_size - 1, -1))
    return Rule(window=(local_size, local_size)) if allow_is_bidirectional_skip else None


def _blocks_with_causality(functions: tuple[Callable[..., Any], ...]) -> Rule | None:
    """Return the rule of a union of causality and blocks, in this order; None for another union."""
    if len(functions) != 2 or functions[0] is not masking_utils.causal_mask_function:
        return None
    blocks = functions[1]
    if not isinstance(blocks, FunctionType) or blocks.__module__ != masking_utils.__name__:
        return None
    held = _closure(blocks)
    if blocks.__qualname__.partition(".")[0] != "blockwise_overlay" or held.keys() != _HELD["blockwise_overlay"]:
        return None
    return Rule(blocks=held["block_sequence_ids"])


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _all_of(parts: list[Rule | None]) -> Rule | None:
    """Return the intersection of rules; None if one is unknown, or if two have a window, documents or blocks."""
    known = [part for part in parts if part is not None]
    windows = [part.window for part in known if part.window is not None]
    documents = [part.documents for part in known if part.documents is not None]
    blocks = [part.blocks for part in known if part.blocks is not None]
    if len(known) < len(parts) or max(len(windows), len(documents), len(blocks)) > 1:
        return None
    is_causal = any(part.is_causal for part in known)
    if blocks and (is_causal or documents):
        return None
    return Rule(
        is_causal, windows[0] if windows else None, documents[0] if documents else None, blocks[0] if blocks else None
    )


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **others: Any,
) -> LayerMask | Tensor | None:
    """Make the mask for all layers of a kind; transformers calls it once in a forward.

    Offsets are the positions of the first query and of the first key, tensors for static caches. Before transformers
    5.4, `cache_position` has the positions of the queries instead of q_length and q_offset. `use_vmap` means that the
    user has combined the mask function with another one.

    Returns:
        None if no key is hidden, or if causality is the only rule and Lq == Lk. A `LayerMask` if a rule describes the
        mask; otherwise the bool tensor (B, 1, Lq, Lk) of transformers' function for SDPA.

    Raises:
        NotImplementedError: the model has no attention interface, so its code could not use the result.
    """
    refuse_config_without_interface(others.get("config"))
    read_tables(others.get("config"))
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it needs 2 dims, (batch, keys), or 4, "
            "(batch, heads or 1, queries, keys)"
        )
    call: dict[str, Any] = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, **others}
    call |= {"mask_function": mask_function, "attention_mask": attention_mask, "use_vmap": use_vmap}
    if cache_position is None:
        call |= {"q_length": q_length, "q_offset": q_offset, "device": device}
    else:
        call["cache_position"] = cache_position
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = 0
        if q_length != kv_length:  # otherwise it is 0; reading it would wait for the device
            q_offset = cache_position[0] if torch.compiler.is_compiling() else int(cache_position[0])
    assert q_length is not None and kv_length is not None
    may_skip = (allow_is_causal_skip, allow_is_bidirectional_skip)

    rule = _rule(mask_function, use_vmap, q_length, may_skip, others)
    if getattr(others.get("config"), "index_topk", None) is not None:
        rule = None  # its layers choose keys by scores of all pairs, for which they need a tensor
    if rule is not None and rule.blocks is not None:
        is_square = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0 == kv_offset
        if not is_square or not _are_runs(rule.blocks, (batch_size, kv_length)) or context_in_force() is not None:
            rule = None
    used = _used_keys(rule, q_length, kv_length, q_offset, kv_offset) if rule is not None else None
    if rule is None or used is _MISALIGNED:
        # None only if Lq == Lk: otherwise a layer could not know how queries and keys are aligned.
        call["allow_is_causal_skip"] = allow_is_causal_skip and q_length == kv_length
        return masking_utils.sdpa_mask(**call, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    window = rule.window
    if window is not None and max(window) >= kv_length - 1 and context_in_force() is None:
        window = None  # it reaches every key; under context parallelism other ranks have more keys
    padding = _padding(attention_mask, kv_length, kv_offset, used)
    is_plain = padding is None and rule.documents is None and rule.blocks is None and window is None and used is None
    # Layers that reuse keys and values may compute only the last queries, and slice their mask. With None they would
    # get the causality of the first queries, because Lq is then less than Lk.
    if is_plain and not getattr(others.get("config"), "num_kv_shared_layers", 0):
        if (allow_is_causal_skip and q_length == kv_length) if rule.is_causal else allow_is_bidirectional_skip:
            return None
    shape = (batch_size, 1, q_length, kv_length)
    return LayerMask(shape, padding, rule.documents, rule.is_causal, window, used, device, rule.blocks)


def _are_runs(blocks: Tensor, shape: tuple[int, int]) -> bool:
    """Return whether tokens of each block are consecutive, and blocks ascend; waits for the device."""
    if torch.compiler.is_compiling() or tuple(blocks.shape) != shape:
        return False
    # A token that begins a block needs a larger number than all blocks before it.
    before = functional.pad(blocks, (1, 0), value=-1)[:, :-1]
    largest = before.cummax(1).values
    return not bool(((blocks >= 0) & (blocks != before) & (blocks <= largest)).any())


def _rule(
    function: Callable[..., Any], use_vmap: bool, q_length: int, may_skip: tuple[bool, bool], others: dict[str, Any]
) -> Rule | None:
    if use_vmap:
        rule = None if torch.compiler.is_compiling() else read_rule(function)
        return rule if rule is not None and rule.blocks is not None else None
    if torch.compiler.is_compiling():
        rule = rule_of_flags(function, others.get("config"), others.get("local_size"), *may_skip)
    else:
        rule = read_rule(function)
    if rule is None or not MODELS_ASK_FOR_TENSORS or q_length == 1 or rule.documents is not None:
        return rule
    # A model that does not allow to skip the mask needs a tensor: it indexes it, or adds another one to it.
    return rule if may_skip[0 if rule.is_causal else 1] else None


def _used_keys(
    rule: Rule, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor
) -> int | Tensor | None:
    """Return the number of keys up to the last query; None for all keys, _MISALIGNED if it cannot be used."""
    if not rule.is_causal and rule.window is None:
        return None
    used = q_offset + q_length - kv_offset
    if isinstance(used, Tensor):
        return used if rule.is_causal else _MISALIGNED
    if used == kv_length:
        return None
    return used if rule.is_causal and 0 < used < kv_length else _MISALIGNED


_full = TensorCache()  # whether padding hides no key


def _padding(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor, used: int | Tensor | None
) -> Tensor | None:
    """Make the padding (B, 1, 1, Lk), or None if it hides no key.

    It waits for the device, as transformers' mask for SDPA does, once for all masks of a tensor. In the capture of a
    CUDA graph it does not wait, because padding that hides no key now may hide one at a replay.
    """
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    padding = attention_mask
    if missing > 0:
        padding = functional.pad(padding, (0, missing))  # type: ignore[arg-type]
    index = torch.arange(kv_length, device=padding.device)
    if isinstance(kv_offset, Tensor):
        padding = padding[:, index + kv_offset]
    else:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    padding = padding.to(torch.bool)
    if not (torch.compiler.is_compiling() or is_captured(attention_mask)):
        call = kv_length, kv_offset, used

        def is_full() -> bool:
            return bool((padding if used is None else padding | (index >= used)).all())

        if any(isinstance(x, Tensor) for x in call):
            forbids_nothing = is_full()
        else:
            forbids_nothing = _full.get((id(attention_mask), *call), [attention_mask], is_full)
        if forbids_nothing:
            return None
    return padding[:, None, None, :]
