"""`explain_context_parallel`: what it says of a call is what the call does, and it sends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_calls import for_few_keys
from out_of_tree import registered, replaced
from torch.testing._internal.distributed.fake_pg import FakeStore

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.biases import Band, ListBias, Relative
from flash_dmattn.distributed import SequenceLayout, ShardedMask, explain_context_parallel
from flash_dmattn.distributed.documents import Spans
from flash_dmattn.distributed.explanation import ParallelExplanation
from flash_dmattn.distributed.slices import plan

LAYOUT = SequenceLayout.zigzag(1024, 4)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Rank 1 of 4, and no other process: what is sent goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def explained(heads: int = 4, heads_k: int = 2, grad: bool = True, **keywords: Any) -> ParallelExplanation:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 256, h, 16, requires_grad=grad) for h in (heads, heads_k, heads_k))
    arguments = {"group": dist.group.WORLD, "layout": LAYOUT, "strategy": "gather", **keywords}
    return explain_context_parallel(q, k, v, **arguments)  # type: ignore[arg-type]


def test_it_takes_the_arguments_of_the_call() -> None:
    with pytest.raises(TypeError, match=r"^explain_context_parallel\(\) .* 'causal'; write is_causal=$"):
        explained(causal=True)
    with pytest.raises(
        TypeError, match=r"'xyz'; it takes q, k, v, mask, bias, group, layout, layout_k, .*, dropout_p$"
    ):
        explained(xyz=True)


def test_nothing_is_sent_or_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("it sends or computes")

    for name in ("all_gather_object", "all_to_all_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, refuse)
    monkeypatch.setattr("flash_dmattn.distributed.exchange._all_gather", refuse)
    with replaced("sdpa", plan_forward=refuse), flash_dmattn.config(record=(made := [])):
        assert explained(reduce_bias_grad=True, bias=torch.zeros(1, 256, requires_grad=True)).forward == "sdpa"
        assert explained(strategy="ulysses", heads=4, heads_k=4).forward == "sdpa"
    assert made == []


def test_slices_are_those_of_the_rank() -> None:
    explanation = explained(window_size=(100, -1), is_causal=True)
    assert explanation.slices == plan(LAYOUT, 1, 1024, (100, 0)) and (explanation.rank, explanation.ranks) == (1, 4)
    lines = str(explanation).splitlines()
    assert "layout: 128:256, 768:896 of 1024 positions" in lines
    assert "call of rows 0:128: keys 0:256, window (100, 0)" in lines
    assert "call of rows 128:256: keys 640:896, window (100, 0)" in lines
    causal = str(explained(is_causal=True))
    assert "call of rows 0:128: keys 0:256, causal" in causal
    few = str(explained_cross(SequenceLayout.contiguous(256, 4), is_causal=True))
    assert "call of rows 0:256: no keys" in few and "layout_k: 64:128 of 256 positions" in few


def explained_cross(layout_k: SequenceLayout, **keywords: Any) -> ParallelExplanation:
    q, k = torch.randn(1, 256, 4, 16), torch.randn(1, layout_k.local_length, 4, 16)
    layout = SequenceLayout.contiguous(1024, 4)
    return explain_context_parallel(
        q, k, k, group=dist.group.WORLD, layout=layout, layout_k=layout_k, strategy="gather", **keywords
    )


@pytest.mark.parametrize(
    "keywords, strategy, why",
    [
        ({"strategy": "gather"}, "gather", "it was asked for"),
        ({"strategy": "auto"}, "ulysses", "it sends less than gather: W > (Hq / Hk + 1) / 1.5"),
        ({"strategy": "auto", "heads": 16}, "gather", "ulysses would send no less: W <= (Hq / Hk + 1) / 1.5"),
        ({"strategy": "auto", "heads": 6}, "gather", "the ranks do not divide the heads, as ulysses needs"),
        ({"strategy": "auto", "mask": torch.ones(256, 1024) > 0}, "gather", "a mask or bias has rows of this rank"),
    ],
)
def test_the_strategy_and_why(keywords: dict[str, Any], strategy: str, why: str) -> None:
    explanation = explained(**keywords)
    assert explanation.strategy == strategy and explanation.why.startswith(why)
    assert f"strategy {strategy}: {why}" in str(explanation)


def learned(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


ROWS = torch.ones(256, 1024) > 0
STAYS, GATHERED = "rows of this rank, which stay where they are", "sharded by keys, gathered"
SAME, PARTIAL = "the same on every rank, not sent", "of this rank's rows; DDP and FSDP sum it over ranks"
SUMMED = "complete, summed over ranks here"
LISTS = ShardedMask.from_lists(torch.zeros(256, 3, dtype=torch.int64), LAYOUT, 1)
NAMED = "; they may name any key that is sent"
DOCUMENTS = Sequences.packed(torch.tensor([0, 512, 1024]))
REMARKS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "rows": (
        {"bias": learned(256, 1024), "mask": ROWS},
        {"mask": STAYS, "bias": STAYS, "gradient of bias": "complete"},
    ),
    "prepared": ({"mask": ShardedMask.from_mask(ROWS, LAYOUT, 1)}, {"mask": STAYS}),
    "sharded": (
        {"bias": learned(1, 256), "mask": ROWS[:1, :256]},
        {"mask": GATHERED, "bias": GATHERED, "gradient of bias": "complete"},
    ),
    "partial": (
        {"bias": learned(1, 1024), "sink": learned(4)},
        {"bias": SAME, "gradient of bias": PARTIAL, "gradient of sink": PARTIAL},
    ),
    "summed": (
        {"bias": learned(1, 1), "sink": learned(4), "reduce_bias_grad": True},
        {"bias": SAME, "gradient of bias": SUMMED, "gradient of sink": SUMMED},
    ),
    "distances": (
        {"bias": Relative(learned(4, 2047), 1023)},
        {"bias": SAME, "gradient of bias": PARTIAL},
    ),
    "band": (
        {"bias": Band(learned(4, 256, 9), 4)},
        {"bias": STAYS, "gradient of bias": "complete"},
    ),
    "dropout": (
        {"dropout_p": 0.1},
        {"dropout": "rank 0 sends its key of 16 bytes to the other ranks, which drop what one GPU would"},
    ),
    "lists": (
        {"mask": LISTS, "bias": ListBias(learned(4, 256, 3))},
        {"mask": "lists of " + STAYS.replace("rows of this rank", "this rank's rows") + NAMED, "bias": STAYS}
        | {"gradient of bias": "complete"},
    ),
    "documents": (
        {"mask": ShardedMask.from_sequences(DOCUMENTS, LAYOUT, 1)},
        {"2 documents; a call of rows of several reads an interval mask, others none": ""},
    ),
    "groups": (
        {"head_groups": 2, "grad": False},
        {"key-value heads go in 2 groups, each on its way while the one before it is computed": ""},
    ),
}
EXCHANGED = "gradients of k and v: sent in float32, summed in float32 in the order of ranks"


@pytest.mark.parametrize("name", REMARKS)
def test_remarks(name: str) -> None:
    keywords, remarks = REMARKS[name]
    explanation, said = explained(**keywords), [f"{what}: {text}" if text else what for what, text in remarks.items()]
    assert [x for x in explanation.remarks if x != EXCHANGED] == said
    assert set(said) <= set(str(explanation).splitlines())
    assert (EXCHANGED in explanation.remarks) == (keywords.get("grad", True))


def test_a_verdict_is_of_all_slices_of_all_ranks() -> None:
    explanation = explained(is_causal=True)
    verdicts = {verdict.backend: verdict for verdict in explanation.verdicts}
    assert (explanation.forward, explanation.backward, explanation.error) == ("sdpa", "eager", None)
    assert verdicts["eager"].forward and verdicts["eager"].backward
    assert not verdicts["reference"].forward and verdicts["reference"].reasons[0].code == "composite"
    traded = {v.backend: v for v in explained(strategy="ulysses", heads=4, heads_k=4).verdicts}
    assert traded["reference"].accepts
    few = explained(is_causal=True, backend="cuda")
    assert few.forward is None and few.error is not None and "backend='cuda' would raise" in str(few)
    assert explained(grad=False).backward is None


def test_what_a_window_sends_is_said() -> None:
    explanation = explained(window_size=(10, 0), bias=torch.ones(1, 256, requires_grad=True))
    # Rank 1 has 128:256 and 768:896; it reads 0:128 and 640:768, and 128:256 and 768:896 are read by one rank each.
    sent = 2 * 128
    assert [(x.what, x.how, x.sent) for x in explanation.forward_traffic] == [
        ("bias, sharded by keys", "all_to_all", sent * 4),
        ("keys and values", "all_to_all", sent * 2 * 2 * 32 * 4),
    ]
    assert "ranks send the keys that others read: no rank more than 33.3% of what an all_gather would" in str(
        explanation
    )
    assert explanation.transient_bytes == 6 * 512 * 2 * 2 * 32 * 4
    assert {x.how for x in explained(window_size=(900, 0)).forward_traffic} == {"all_gather"}


def test_what_documents_send_is_said() -> None:
    """A rank of a zigzag layout reads the three chunks of each document that it does not have."""
    q, k, v = (torch.randn(256, h, 16) for h in (4, 2, 2))
    over: Any = {"group": dist.group.WORLD, "layout": LAYOUT, "sequences": DOCUMENTS, "is_causal": True}
    explanation = explain_context_parallel(q, k, v, **over)
    assert explanation.slices == plan(LAYOUT, 1, 1024, (-1, 0), Spans((0, 512, 512, 1024), "masked"))
    assert [(x.start, x.stop, x.is_masked) for x in explanation.slices] == [(0, 256, False), (512, 896, False)]
    assert "call of rows 128:256: keys 512:896, causal" in str(explanation).splitlines()
    (keys,) = explanation.forward_traffic
    # Chunk 1 is read by ranks 2 and 3, chunk 6 by rank 0; this one reads chunks 0, 4 and 5.
    assert (keys.how, keys.sent, keys.received) == ("all_to_all", 3 * 128 * 2 * 32 * 4, 3 * 128 * 2 * 32 * 4)


def test_calls_of_documents_with_dropout_are_said() -> None:
    """Each document counts from its begin; a call begins at a multiple of 128 keys of it."""
    q, k, v = (torch.randn(256, h, 16) for h in (4, 2, 2))
    over: Any = {"group": dist.group.WORLD, "layout": LAYOUT, "window_size": (20, 0), "dropout_p": 0.1}
    cut = Sequences.packed(torch.tensor([0, 200, 200, 1024]))
    explanation = explain_context_parallel(q, k, v, sequences=cut, strategy="gather", **over)
    assert [x[:4] for x in explanation.slices] == [(0, 72, 0, 200), (72, 128, 200, 256), (128, 256, 712, 896)]
    assert [(x.number, x.first_row, x.first_key) for x in explanation.slices] == [(0, 128, 0), (2, 0, 0), (2, 568, 512)]
    assert "3 documents, by which dropout counts; each with tokens makes a call for each run" in str(explanation)
    assert "call of rows 72:128 of sequence 2: keys 200:256, window (20, 0)" in str(explanation)
    traded = explain_context_parallel(
        q, *(x.repeat(1, 2, 1) for x in (k, v)), sequences=cut, strategy="ulysses", **over
    )
    assert "3 sequences, of which this rank has all positions; one call has them all" in traded.remarks
    assert "3 packed sequences of 1024 queries" in str(traded)


def test_calls_of_padded_entries_are_said() -> None:
    used = Sequences.padded(seqlens_q=torch.tensor([200, 0]), seqlens_k=torch.tensor([1000, 1024]))
    explanation = explained(sequences=used, is_causal=True)
    assert [x[:5] for x in explanation.slices] == [(0, 72, 0, 1000, (-1, 0))]
    assert [x.entries for x in explanation.slices] == [(0, 1)]
    assert "2 padded entries of the batch; each makes a call for each run of rows" in str(explanation)
    json.dumps(explanation.to_dict())
    equal = Sequences.padded(seqlens_k=torch.tensor([300, 300]))
    assert "call of rows 0:128 of sequence 0 to 1: keys 0:300" in str(explained(sequences=equal))


def test_what_trading_heads_sends_is_said() -> None:
    """Three quarters of q, k and v, and of out: two entries, 256 rows, 4 heads of 16 values of 4 bytes."""
    explanation = explained(strategy="ulysses", heads_k=4, bias=torch.ones(1, 4, 1, 1))
    each = 2 * 256 * 4 * 16 * 4 * 3 // 4
    assert [(x.what, x.sent, x.received) for x in explanation.forward_traffic] == [
        ("q, k and v, for heads", 3 * each, 3 * each),
        ("out, for rows", each, each),
    ]
    assert [x.sent for x in explanation.backward_traffic] == [each, 3 * each]


def test_a_backend_that_serves_some_slices_serves_none() -> None:
    with registered(for_few_keys("few_keys", most=512), before="sdpa"):
        explanation = explained(is_causal=True)
    verdict = next(v for v in explanation.verdicts if v.backend == "few_keys")
    assert (verdict.forward, verdict.backward, explanation.forward) == (False, False, "eager")
    assert [str(reason) for reason in verdict.reasons] == [f"there are {n} keys" for n in (768, 896, 1024, 640)]


def test_the_sum_of_a_bias_beside_lists_is_said() -> None:
    """A gradient of 1024 values of 4 bytes, which three other ranks send."""
    bias = ListBias(learned(4, 256, 3), learned(1, 1024))
    explanation = explained(mask=LISTS, bias=bias, reduce_bias_grad=True)
    (said,) = [x for x in explanation.backward_traffic if "with" in x.what]
    assert (said.how, said.sent, said.received) == ("all_gather", 3 * 1024 * 4, 3 * 1024 * 4)


def test_both_strategies_over_a_mesh() -> None:
    explanation = explained(heads_k=4, strategy="auto", group=dist.init_device_mesh("cpu", (2, 2)), is_causal=True)
    assert (explanation.strategy, explanation.rank, explanation.ranks, explanation.layout) == ("both", 1, 4, LAYOUT)
    assert explanation.why == "a mesh of two dims, 2 ranks gather keys and 2 trade heads"
    assert explanation.slices == plan(LAYOUT.joined(2)[0], 0, 1024, (-1, 0))


def test_it_is_plain_data_too() -> None:
    explanation = json.loads(json.dumps(explained(is_causal=True).to_dict()))
    assert (
        explanation["strategy"] == "gather"
        and explanation["rank"] == 1
        and explanation["layout"][1] == [[128, 256], [768, 896]]
    )
    assert explanation["slices"][0]["stop"] == 256 and explanation["backends"]["eager"]["accepts"]
    # 3 other ranks, 2 entries, 256 rows, 2 heads of 16 + 16 values of 4 bytes
    assert [x["sent"] for x in explanation["forward_traffic"]] == [3 * 2 * 256 * 2 * 32 * 4]
    assert explanation["transient_bytes"] == 6 * 2 * 1024 * 2 * 32 * 4
