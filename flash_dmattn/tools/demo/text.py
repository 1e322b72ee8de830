"""The text of the demo: the Python standard library's own sources, split into training and held-out files."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

MINIMUM_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """Bytes of the training files and of the held-out files, with the files they came from."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]


def is_held_out(path: Path) -> bool:
    """Whether a file is never trained on: one in ten, by a checksum of its name, the same on every machine.

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
            f"{folder} holds {len(train) + len(held_out)} bytes of .py files; the demo needs at least {MINIMUM_BYTES}. "
            "Run it with a Python whose standard library is installed as files"
        )
    return Corpus(train, held_out, train_files, held_out_files)


def _read(files: tuple[Path, ...]) -> torch.Tensor:
    text = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def unigram_entropy(text: torch.Tensor) -> float:
    """Entropy of the byte frequencies of a text, in nats per byte: the loss of a model that knows only those.

    Equivalent to ``-(p * p.log()).sum()`` with p the relative frequencies of the bytes that occur.

    >>> round(unigram_entropy(torch.tensor([0, 1, 0, 1], dtype=torch.uint8)), 4)
    0.6931
    """
    counts = torch.bincount(text.long(), minlength=256).double()
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())


def random_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """(count, length) int64 windows of the text at random places; a window holds inputs and targets, shifted by one."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def even_windows(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """(count, length) int64 windows of the text at evenly spaced places, the same at every call."""
    starts = torch.linspace(0, len(text) - length, count).long()[:, None]
    return text[starts + torch.arange(length)].long()
