"""transformers: whole models compile without a break, and static caches decode in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from transformers_models import FAMILIES, VERSION, errors, inputs, limits, make, padding, softmax_in_float64, step

from flash_dmattn.integrations.transformers import register


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts our operators in each."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, graph: GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        parts = [part for part in graph.modules() if isinstance(part, GraphModule)]
        self.calls.append(sum("flash_dmattn" in str(node.target) for part in parts for node in part.graph.nodes))
        return graph


@pytest.mark.parametrize("name", ["mistral", "bert"])
def test_training_in_one_graph(name: str) -> None:
    """Closures of mask functions are hidden from a compiler: the window is read from flags."""
    register()
    model = make(name, num_hidden_layers=1).train()
    given = inputs(model, FAMILIES[name].kind, "right")
    wanted = step(model, given, "dmattn")
    torch._dynamo.reset()
    graphs = Graphs()
    found = step(model, given, "dmattn", torch.compile(model, backend=graphs, fullgraph=True))
    assert len(graphs.calls) == 1 and graphs.calls[0] >= 1
    assert all((x is None) == (y is None) for x, y in zip(found.gradients.values(), wanted.gradients.values()))
    assert all(x <= y for x, y in zip(errors(found, wanted), limits(name))), errors(found, wanted)


def test_a_static_cache_decodes_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is on the left; the length is a tensor, and one graph serves every step."""
    register()
    softmax_in_float64(monkeypatch)
    model = make("llama", num_hidden_layers=1).eval()
    tokens = inputs(model, "causal", "left")["input_ids"]
    logits = {}
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        torch._dynamo.reset()
        graphs = Graphs()
        decode = torch.compile(model.forward, backend=graphs, fullgraph=True, dynamic=False)
        name = "cache" if VERSION.release >= (5, 20) else "past_key_values"
        given: dict[str, Any] = {name: transformers.StaticCache(config=model.config, max_cache_len=24)}
        mask, found = padding(tokens.shape[1], "left"), []
        with torch.no_grad():
            now = torch.arange(tokens.shape[1])
            where = (mask.cumsum(-1) - 1).clamp(min=0)
            model(tokens, attention_mask=mask, position_ids=where, use_cache=True, **given, **_positions(now))
            for index in range(3):
                mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
                ready = torch.nn.functional.pad(mask, (0, 24 - mask.shape[1]))
                token = tokens[:, index : index + 1].clone()  # a graph is for one kind of strides
                where, now = mask.cumsum(-1)[:, -1:].clone() - 1, torch.tensor([mask.shape[1] - 1])
                more = {"attention_mask": ready, "position_ids": where, "use_cache": True, **_positions(now)}
                found.append(decode(token, **more, **given).logits)
        logits[implementation] = torch.cat(found, 1)
        assert [calls >= 1 for calls in graphs.calls] == [implementation == "dmattn"]
    error = (logits["dmattn"] - logits["eager"]).abs().max() / logits["eager"].abs().max()
    assert float(error) < limits("llama")[0]


def _positions(now: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"cache_position": now} if VERSION.release < (5, 4) else {}
