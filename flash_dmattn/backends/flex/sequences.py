"""A call with sequences as a dense one of rows that are laid out in tiles, and its results where the tokens lie."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import AttentionProblem, Packing, spec_of
from ...problem.inputs import Inputs
from .blocks import Blocks
from .call import attend, nothing, ready_inputs, with_sink
from .sequence_blocks import prepare_sequences
from .tiles import Side, extents, laid_out, moved


def attend_sequences(problem: AttentionProblem, x: Inputs) -> tuple[Tensor, ...]:
    """(out, lse), or (out,) where the problem does not return lse."""
    sink, sequences = x.sink, x.sequences
    assert sequences is not None
    spec = problem.sequences
    assert spec is not None
    if spec.number == 0 or spec.rows_q == 0:
        return nothing(problem, x.q, (x.q, x.k, x.v, x.bias, sink))
    if spec.rows_k == 0:  # a row that no sequence has
        k, v = (torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, 1)) for rows in (x.k, x.v))
        x = x._replace(k=k, v=v)
    q, k, v, mask, bias = ready_inputs(problem, x)
    unread = bias if bias is not None and bias.numel() == 0 else None
    # One of no elements is of calls without a pair.
    mask, bias = (None if x is None or x.numel() == 0 else x for x in (mask, bias))
    flags = problem.flags
    tiled = prepare_sequences(
        sequences.bounds, mask, flags.mask_packing, extents(spec), problem.window, problem.num_heads
    )
    queries, keys = tiled.queries, tiled.keys
    of_mask: Packing | None = None
    of_bias: Packing | None = None
    if mask is not None:
        mask, of_mask = laid_out(mask, flags.mask_packing, queries, keys)
    if bias is not None:
        bias, of_bias = laid_out(bias, flags.bias_packing, queries, keys)
    q_rows, k_rows, v_rows = _in_rows(q, queries), _in_rows(k, keys), _in_rows(v, keys)
    of_rows = problem._replace(
        batch=1,
        seqlen_q=q_rows.shape[1],
        seqlen_k=k_rows.shape[1],
        q_strides=spec_of(q_rows).strides,
        k_strides=spec_of(k_rows).strides,
        v_strides=spec_of(v_rows).strides,
        return_lse=problem.return_lse or sink is not None,
    )
    places = tiled.places if of_mask is not None or of_bias is not None else None
    blocks = Blocks(*tiled.blocks[:3], places)
    results = attend(of_rows, q_rows, k_rows, v_rows, mask, bias, blocks, (of_mask, of_bias))
    if sink is not None:
        results = with_sink(results[0], results[1], sink)
    out = moved(results[0], 1, queries.row, queries.token).view(*q.shape[:3], v.shape[3])
    if unread is not None:
        out = out + unread.sum().to(out.dtype)
    if not problem.return_lse:
        return (out,)
    lse = moved(results[1], 2, queries.row, queries.token, -torch.inf)
    return out, lse if q.shape[0] == 1 else lse[0].unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _in_rows(x: Tensor, side: Side) -> Tensor:
    """The tokens of q, k or v, (entries, tokens, H, D), as (1, rows, H, D); the rows of a head follow each other."""
    # Of 4 dims, as Inductor's CPU kernel fails on a view of what a graph has computed with fewer (torch 2.13).
    return moved(x.flatten(0, 1)[None].transpose(1, 2), 2, side.token, side.row).transpose(1, 2)
