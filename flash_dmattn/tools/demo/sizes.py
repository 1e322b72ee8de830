"""The sizes of the demo: small ones anywhere, and on a Hopper GPU those at which "auto" takes the cuda backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_dmattn.problem import device_arch

HOPPER = "sm_90"


class Sizes(NamedTuple):
    """What the command line leaves open: the batches, the masks, the dtype and the width of the model.

    The number of layers and of steps, and the width of the MLP, are smaller in a quick run.
    """

    batch_size: int
    context: int
    keep: int
    dtype: str
    hidden_size: int
    mlp_size: int
    quick_mlp_size: int
    steps: int
    quick_steps: int


# Two minutes and a half on one CPU core, so that `make demo` ends within four on a slow machine, downloads included.
# Other GPUs train it too: their kernels take every call of it in fp32.
SMALL = Sizes(4, 256, 64, "fp32", 128, 512, 256, 240, 60)
# The rules of cuda ask for 16 bits, and of calls without a mask (the model with full attention) for heads wider than
# 32 and 512 tiles of 128 queries: 16 texts x 4 heads x 8 tiles. A quarter of the keys is kept, as in the small sizes.
# After 60 steps the wider model is, from some seeds and by every backend, still on the plateau at the unigram entropy
# (held-out 3.05 of 3.14 nats per byte from seed 0), after 120 it has left it (2.56 to 3.02).
ON_HOPPER = Sizes(16, 1024, 256, "bf16", 256, 1024, 512, 400, 180)


def sizes_for(device: torch.device) -> Sizes:
    """The sizes of a run on a device.

    >>> sizes_for(torch.device("cpu")).context
    256
    """
    return ON_HOPPER if device_arch(device) == HOPPER else SMALL
