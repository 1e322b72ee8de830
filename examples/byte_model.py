"""A byte-level language model with dynamic-mask or full attention; its text, the sources of the standard library."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flash_dmattn import BackendChoice
from flash_dmattn.nn import DynamicMaskAttention

VOCABULARY = 256
MINIMUM_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """Bytes of the training files and of the held-out files, with the files they came from."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]


def is_held_out(path: Path) -> bool:
    """Tell whether a file is never trained on: one in ten, by a checksum of its name, the same on every machine.

    >>> is_held_out(Path("argparse.py")), is_held_out(Path("elsewhere/argparse.py"))
    (False, False)
    """
    return zlib.crc32(path.name.encode()) % 10 == 0


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the standard library's top-level modules, in the order of their names.

    Args:
        folder: where to read ``*.py`` from; default the standard library of the running Python.

    Returns:
        A `Corpus` of uint8 tensors, about 4 MB for training and 0.4 MB held out.

    Raises:
        FileNotFoundError: the folder holds less than 1 MB of sources, as in a Python whose library is a zip file.

    >>> corpus = load_corpus()
    >>> set(corpus.train_files) & set(corpus.held_out_files)
    set()
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    # _sysconfigdata* is written by the build of each Python: a table of one machine's compiler flags, not prose.
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    train_files = tuple(path for path in files if not is_held_out(path))
    held_out_files = tuple(path for path in files if is_held_out(path))
    train, held_out = _read(train_files), _read(held_out_files)
    if len(train) + len(held_out) < MINIMUM_BYTES:
        raise FileNotFoundError(
            f"{folder} holds {len(train) + len(held_out)} bytes of .py files; it needs at least {MINIMUM_BYTES}. "
            "Run it with a Python whose standard library is installed as files"
        )
    return Corpus(train, held_out, train_files, held_out_files)


def _read(files: tuple[Path, ...]) -> torch.Tensor:
    text = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def random_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw int64 windows (count, length) of the text; a window holds inputs and targets, shifted by one."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; about 1.0 million parameters as they stand."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_heads_k: int = 2
    mlp_size: int = 512
    keep_window_size: int | None = 64
    local_window_size: int = 0
    backend: BackendChoice = "auto"


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.RMSNorm(width)
        self.attention = DynamicMaskAttention(
            width,
            config.num_heads,
            config.num_heads_k,
            keep_window_size=config.keep_window_size,
            local_window_size=config.local_window_size,
            backend=config.backend,
        )
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ByteLanguageModel(nn.Module):
    """A decoder over bytes whose output weights are its embedding.

    Args:
        config: sizes; ``keep_window_size=None`` gives full attention.

    >>> model = ByteLanguageModel(ModelConfig(num_layers=1))
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.apply(self._initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute logits (B, L, 256) of the byte after each token (B, L)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats per byte, of windows (B, L + 1): each byte after the ones before."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # The residual path sums 2 * num_layers branches: each starts small, so that the sum starts near unit size.
            for branch in (module.attention.o_proj, module.down):
                nn.init.normal_(branch.weight, std=0.02 / (2 * self.config.num_layers) ** 0.5)
