"""transformers: whole models compile without a break, and static caches decode in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from transformers_fixture import Counted
from transformers_models import FAMILIES, VERSION, inputs, lacks_interface, make, padding, step


@pytest.mark.parametrize(
    ("name", "side"), [("llama", "right"), ("mistral", "right"), ("gpt_oss", None), ("t5", "right"), ("bert", "right")]
)
def test_training_in_one_graph(name: str, side: str | None, counted: Counted) -> None:
    reason = lacks_interface(name)
    if reason is not None:
        pytest.skip(reason)
    model = make(name, torch.float64 if name == "t5" else torch.float32).train()
    given = inputs(model, FAMILIES[name].kind, side)
    wanted = step(model, given, "dmattn")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = step(model, given, "dmattn", compiled)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)
    scale = max(float(x.abs().max()) for x in wanted.gradients.values() if x is not None)
    for x, y in zip(found.gradients.values(), wanted.gradients.values()):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("side", [None, "left"])
def test_a_static_cache_decodes_in_one_graph(side: str | None, counted: Counted) -> None:
    """The lengths are tensors: one graph serves every step."""
    model = make("llama").eval()
    tokens = inputs(model, "causal", side)["input_ids"]
    logits = {}
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        name = "cache" if VERSION.release >= (5, 20) else "past_key_values"
        mask = padding(tokens.shape[1], side)
        decode = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        given: dict[str, Any] = {name: cache, "use_cache": True}
        found = []
        with torch.no_grad():
            where = (mask.cumsum(-1) - 1).clamp(min=0)
            now = torch.arange(tokens.shape[1])
            out = model(tokens, attention_mask=mask, position_ids=where, **given, **_positions(now))
            for index in range(3):
                token = tokens[:, index : index + 1]
                mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
                ready = torch.nn.functional.pad(mask, (0, 24 - mask.shape[1]))
                where, now = ready.cumsum(-1)[:, mask.shape[1] - 1 : mask.shape[1]] - 1, now[-1:] + 1
                out = decode(token, attention_mask=ready, position_ids=where, **given, **_positions(now))
                found.append(out.logits)
        logits[implementation] = torch.cat(found, 1)
        if implementation == "dmattn":
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    error = (logits["dmattn"] - logits["eager"]).abs().max() / logits["eager"].abs().max()
    assert float(error) < 5e-5 and counted.calls


def _positions(now: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"cache_position": now} if VERSION.release < (5, 4) else {}
