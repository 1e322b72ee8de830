"""The package as a kernel of Hugging Face's hub: `release/hub_layout.py`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from by_path import load

ROOT = Path(__file__).resolve().parent.parent

# Loads two builds as the package `kernels` does, in addition to the installed one, and compares them through their
# operators.
LOADS = """
import importlib.util, sys
from pathlib import Path
import torch
import flash_dmattn

def load(folder):
    name = "_flash_dmattn_cpu_" + folder.name
    spec = importlib.util.spec_from_file_location(name, folder / "build" / "torch-cpu" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

copies = [load(Path(folder)) for folder in sys.argv[1:]]
q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
bias = torch.randn(4, 16, 16, requires_grad=True)

def gradient(attention):
    call = torch.compile(lambda: attention(q, k, v, None, bias, is_causal=True).square().sum(), backend="eager")
    return torch.autograd.grad(call(), bias)[0]

expected = gradient(flash_dmattn.attention)
for copy in copies:
    assert copy.attention is not flash_dmattn.attention
    torch.testing.assert_close(gradient(copy.attention), expected, rtol=0, atol=0)
    hidden = torch.randn(2, 16, 32)
    layer = copy.nn.DynamicMaskAttention(32, 4)
    twin = flash_dmattn.nn.DynamicMaskAttention(32, 4)
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(hidden), twin(hidden), rtol=0, atol=0)
    assert copy.distributed.SequenceLayout.zigzag(16, 2).length == 16

import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
tokens, padding = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
padding[1, :4] = 0
logits = model(tokens, attention_mask=padding).logits
# What transformers does with a kernel of the hub that has these two names.
assert hasattr(copies[0], "supports_flash_attn") and not hasattr(copies[0], "flash_attn_varlen_func")
transformers.AttentionInterface.register("hub", copies[0].flash_attn_forward)
transformers.AttentionMaskInterface.register("hub", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
model.set_attn_implementation("hub")
seen = padding.bool()
torch.testing.assert_close(model(tokens, attention_mask=padding).logits[seen], logits[seen])
"""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    hub_layout = load(ROOT / "release" / "hub_layout.py")
    folders = [tmp_path_factory.mktemp("hub") / name for name in ("one", "two")]
    for folder in folders:
        hub_layout.write_layout(folder, folder.name)
    return folders


def test_two_builds_and_the_package_work_in_one_process(layouts: list[Path]) -> None:
    command = [sys.executable, "-c", LOADS, *map(str, layouts)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_modules_of_the_kernel_know_no_name_of_their_own(layouts: list[Path]) -> None:
    """No absolute import of the package, and no namespace of operators other than the build's."""
    package = layouts[0] / "torch-ext" / "flash_dmattn"
    modules = list(package.rglob("*.py"))
    assert len(modules) > 80 and not (package / "_ops.py").exists()
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.split(".")[0] == "flash_dmattn" for name in node.names), path
            elif isinstance(node, ast.ImportFrom):
                assert node.level or (node.module or "").split(".")[0] != "flash_dmattn", path
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("flash_dmattn::"), path
            elif isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.ops.flash_dmattn", path
