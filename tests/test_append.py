"""`append_to_cache`: what it writes, what attention then reads, compilation, graphs, and every refusal."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_write_calls import assert_written, draw
from cases import DEVICE
from conftest import Runner
from torch import Tensor

from flash_dmattn import Sequences, append_to_cache, attention
from flash_dmattn.sequences.cache_writes import CacheWrite, write_by_pytorch

EXAMPLES = int(os.environ.get("FLASH_DMATTN_EXAMPLES", 200))


def by_sequences(call: Any) -> Callable[[CacheWrite], None]:
    """A writer that calls the public function, with the tensors of a call in its layout."""

    def write(options: CacheWrite) -> None:
        caches = [x[0] if options.packs_keys and x is not None else x for x in (options.k_cache, options.v_cache)]
        new = [x[0] if options.packs_tokens and x is not None else x for x in (options.k, options.v)]
        assert append_to_cache(*caches, *new, call.sequences) is None

    return write


def test_random_writes() -> None:
    """With NaN in the caches and around them, and any strides: tokens go where they belong, and nothing else moves."""
    for number in range(EXAMPLES):
        call = draw(number)
        assert_written(call, by_sequences(call))


def test_wrong_tables_write_nowhere_else() -> None:
    """Tables that the front end refuses on a CPU, given to PyTorch's writer."""
    ran = 0
    for number in range(EXAMPLES):
        call = draw(number, is_wrong=True)
        if not call.write.is_empty:
            assert_written(call, write_by_pytorch)
            ran += 1
    assert ran > EXAMPLES // 2


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_random_writes_of_the_kernel() -> None:
    from forked import interpret

    assert " 0 failed" in interpret("run_calls.py", "interpreter", "appends", "0", "50")


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU interprets the kernel")
def test_random_writes_of_the_kernel_on_a_gpu() -> None:
    from flash_dmattn.triton_kernels.append import write

    for number in range(EXAMPLES):
        call = draw(number, number % 3 == 2, (torch.float32, torch.float16, torch.bfloat16))
        if not call.write.is_empty:
            assert_written(call, write)


def decoded(backend: str, device: str, steps: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """Texts that grow chunk by chunk in pages: the last queries' outputs, and the outputs of each text alone."""
    random = torch.Generator().manual_seed(3)
    texts = torch.randn(3, 3, 40, 2, 16, generator=random).to(device)
    pools = torch.full((2, 15, 4, 2, 16), torch.nan, device=device)
    table = torch.randperm(15, generator=random).view(3, 5).to(device)
    lengths, out = [0, 0, 0], []
    for news in steps:
        begins, lengths = lengths, [n + m for n, m in zip(lengths, news, strict=True)]
        q, k, v = (torch.cat([x[s, begins[s] : lengths[s]] for s in range(3)]) for x in texts)
        edges = torch.tensor([0, *news], device=device).cumsum(0)
        cache = Sequences.paged(table, torch.tensor(lengths, device=device), cu_seqlens_q=edges, max_seqlen_q=max(news))
        append_to_cache(*pools, k, v, cache)
        result = attention(q, *pools, is_causal=True, sequences=cache, backend=backend)
        assert isinstance(result, Tensor)
        out.append(result)
    alone = [attention(*(x[s : s + 1, :n] for x in texts), is_causal=True)[0] for s, n in enumerate(lengths)]
    rows, counts = [], [0, 0, 0]
    for news in steps:
        for s, n in enumerate(news):
            rows.append(alone[s][counts[s] : counts[s] + n])
            counts[s] += n
    return torch.cat(out), torch.cat(rows)


def test_what_was_appended_is_attended_to(serving: Runner) -> None:
    """A prompt in chunks, then tokens one by one, while other texts do not grow: as the whole texts in dense calls."""
    with torch.no_grad():
        result, wanted = decoded(serving.name, DEVICE, ((5, 1, 9), (4, 0, 1), (1, 1, 1), (1, 1, 0)))
    torch.testing.assert_close(result, wanted)


def decode(pools: Tensor, table: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    cache = Sequences.paged(table, lengths)
    append_to_cache(pools[0], pools[1], x, x, cache)
    out = attention(x, pools[0], pools[1], is_causal=True, sequences=cache)
    assert isinstance(out, Tensor)
    return out


def test_compiled_with_changing_lengths() -> None:
    """One graph for writing and reading, which leaves in the caches what eager leaves there."""
    compiled = torch.compile(decode, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([1, 1], [7, 20], [20, 3, 9]):
        pools = torch.randn(2, 12, 5, 2, 8, device=DEVICE)
        table = torch.randperm(12, device=DEVICE)[: 4 * len(lengths)].view(-1, 4)
        options = (table, torch.tensor(lengths, device=DEVICE), torch.randn(len(lengths), 1, 2, 8, device=DEVICE))
        other = pools.clone()
        with torch.no_grad():
            torch.testing.assert_close(compiled(pools, *options), decode(other, *options))
        assert torch.equal(pools, other)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are captured on a GPU")
def test_a_graph_follows_lengths() -> None:
    pools, table = torch.zeros(2, 12, 5, 2, 16, device=DEVICE), torch.randperm(12, device=DEVICE).view(3, 4)
    lengths, x = torch.ones(3, dtype=torch.int32, device=DEVICE), torch.randn(3, 1, 2, 16, device=DEVICE)
    with torch.no_grad():
        decode(pools.clone(), table, lengths, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decode(pools, table, lengths, x)
        pools.zero_()
        other = pools.clone()
        for _ in range(8):
            graph.replay()
            torch.testing.assert_close(out, decode(other, table, lengths, x))
            assert torch.equal(pools, other)
            lengths += 1
            x.normal_()


def test_nothing_is_read_from_the_host() -> None:
    """Shapes do not depend on values: the call runs on tensors that have none."""
    with torch.device("meta"):
        cache = Sequences.paged(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
        pool, new = torch.zeros(6, 4, 2, 8), torch.zeros(2, 1, 2, 8)
        append_to_cache(pool, pool.clone(), new, new, cache)


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


POOL, NEW, SLOTS = torch.zeros(3, 4, 2, 8), torch.zeros(2, 1, 2, 8), torch.zeros(2, 5, 2, 8)
PAGES = Sequences.paged(torch.tensor([[0, 2], [1, 2]]), cu(3, 4))
PADDED, PACKED = Sequences.padded(seqlens_k=cu(3, 4)), Sequences.packed(cu(0, 1, 3), cu(0, 4, 8), seqlens_k=cu(1, 3))
TOKENS, ROWS = torch.zeros(3, 2, 8), torch.zeros(8, 2, 8)

GOOD = {
    "paged": {"k_cache": POOL, "v_cache": POOL, "k": NEW, "v": NEW, "sequences": PAGES},
    "padded": {"k_cache": SLOTS, "v_cache": SLOTS, "k": NEW, "v": NEW, "sequences": PADDED},
    "packed": {"k_cache": ROWS, "v_cache": ROWS, "k": TOKENS, "v": TOKENS, "sequences": PACKED},
}
# The layout, what is changed, and the error.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("paged", {"sequences": None}, "TypeError: sequences is a NoneType; it needs to be a flash_dmattn."),
    ("paged", {"v_cache": None}, "TypeError: v_cache is a NoneType; it needs to be a torch.Tensor"),
    ("paged", {"k_cache": POOL.int()}, "TypeError: k_cache has dtype int32; it needs float16, bfloat16, float32 or fl"),
    ("paged", {"v": NEW.half()}, "TypeError: v has dtype float16; it needs that of k_cache, float32"),
    ("paged", {"k": NEW.to("meta")}, "ValueError: k is on meta; it needs to be on the device of sequences, cpu"),
    (
        "paged",
        {"k": TOKENS, "v": TOKENS},
        "ValueError: k has 3 dimensions, shape (3, 2, 8); with paged sequences it needs 4, (sequences, new tokens, h",
    ),
    (
        "packed",
        {"k": NEW, "v": NEW},
        "ValueError: k has 4 dimensions, shape (2, 1, 2, 8); with packed sequences it needs 3, (new tokens of all se",
    ),
    (
        "padded",
        {"k_cache": ROWS, "v_cache": ROWS},
        "ValueError: k_cache has 3 dimensions, shape (8, 2, 8); with padded sequences it needs 4, (sequences, keys, ",
    ),
    (
        "paged",
        {"v": NEW.clone().requires_grad_()},
        "ValueError: v requires grad; what is written to a cache has no gradient (call under torch.no_grad())",
    ),
    ("paged", {"k_cache": POOL.clone().requires_grad_()}, "ValueError: k_cache requires grad"),
    (
        "paged",
        {"v_cache": POOL[:, :, :1].expand(3, 4, 2, 8)},
        "ValueError: v_cache has shape (3, 4, 2, 8) and strides (64, 16, 0, 1); it needs memory of its own for each",
    ),
    (
        "paged",
        {"k_cache": torch.zeros(100).as_strided((3, 4, 2, 8), (24, 8, 8, 1))},
        "ValueError: k_cache has shape (3, 4, 2, 8) and strides (24, 8, 8, 1); it needs memory of its own for each",
    ),
    ("paged", {"v": NEW[:1]}, "ValueError: v has shape (1, 1, 2, 8); but for the last size it needs that of k, (2, 1"),
    ("paged", {"v_cache": POOL[:2]}, "ValueError: v_cache has shape (2, 4, 2, 8); but for the last size it needs that"),
    ("paged", dict.fromkeys("kv", NEW[:, :, :1]), "ValueError: k has 1 heads of 8; it needs those of k_cache, 2 of 8"),
    ("paged", {"v": NEW[..., :4]}, "ValueError: v has 2 heads of 4; it needs those of v_cache, 2 of 8"),
    ("padded", dict.fromkeys("kv", NEW[:1]), "ValueError: k has 1 entries; it needs one for each sequence, 2"),
    (
        "padded",
        {"k_cache": SLOTS[:1], "v_cache": SLOTS[:1]},
        "ValueError: k_cache has 1 entries; it needs one for each sequence, 2",
    ),
    ("packed", dict.fromkeys("kv", TOKENS[:2]), "ValueError: cu_seqlens_q ends with 3; k has 2 tokens"),
    (
        "paged",
        {"k_cache": POOL[:2], "v_cache": POOL[:2], "sequences": Sequences.paged(torch.tensor([[0], [2]]), cu(3, 4))},
        "ValueError: block_table names page 2 for sequence 1; k_cache",
    ),
    (
        "padded",
        dict.fromkeys("kv", SLOTS[:, :4]),
        "ValueError: sequence 0 has 4 new tokens and 3 keys; seqlens_k needs to count the new tokens",
    ),
    (
        "paged",
        {"sequences": Sequences.paged(torch.tensor([[1], [1]]), cu(3, 3))},
        "ValueError: 2 new tokens go to row 2 of page 1; block_table needs a page for each of them",
    ),
]


@pytest.mark.parametrize(("layout", "changes", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_by_name(layout: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        append_to_cache(**{**GOOD[layout], **changes})
    assert f"{caught.typename}: {caught.value}".startswith(message)


def test_pages_may_be_shared_where_nothing_is_written() -> None:
    """A prefix of several sequences."""
    cache = Sequences.paged(torch.tensor([[0, 1], [0, 2]]), cu(5, 5))
    pool = torch.zeros(3, 4, 2, 8)
    append_to_cache(pool, pool.clone(), NEW + 1, NEW, cache)
    assert pool[1, 0].all() and pool[2, 0].all() and pool.sum() == 32
