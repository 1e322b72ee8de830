"""Tensor descriptors in small calls of the Triton kernels, which otherwise take them only where they pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from flash_dmattn.caches import ClockCache


@contextmanager
def descriptors_wherever_they_serve() -> Iterator[None]:
    """Plan as for calls so large that the host time of descriptors does not count; plans made before are set aside."""
    # Not at the top: Triton need not be installed where tests of it are only collected.
    from flash_dmattn.triton_kernels import launch
    from flash_dmattn.triton_kernels.plan import Call

    always = property(lambda call: True, lambda call, value: None)
    plans = ClockCache(4096)
    with mock.patch.object(Call, "pays_for_tma", always, create=True), mock.patch.object(launch, "plans", plans):
        yield
