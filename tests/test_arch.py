"""Architectures: their names from what torch says of a device, and from what people write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flash_dmattn.explanation import parse_arch
from flash_dmattn.problem import description, device_arch, sm_number

H100 = SimpleNamespace(major=9, minor=0, gcnArchName="")
MI210 = SimpleNamespace(major=9, minor=0, gcnArchName="gfx90a:sramecc+:xnack-")


@pytest.mark.parametrize(("hip", "properties", "name"), ((None, H100, "sm_90"), ("6.4", MI210, "gfx90a")))
def test_a_gpu_is_named_by_its_vendor(
    hip: str | None, properties: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROCm gives a GPU the same number as Hopper; the kernels for Hopper must not be chosen for it."""
    monkeypatch.setattr(description, "_by_index", {})
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert device_arch(torch.device("cuda", 1)) == name
    assert {1: name} == description._by_index


@pytest.mark.parametrize("kind", ("cpu", "meta", "mps"))
def test_other_devices_are_named_by_their_type(kind: str) -> None:
    assert device_arch(torch.device(kind)) == kind


@pytest.mark.parametrize(
    ("text", "name", "number"), (("sm_80", "sm_80", 80), ("sm120", "sm_120", 120), ("sm_90a", "sm_90", 90))
)
def test_the_number_of_an_nvidia_gpu(text: str, name: str, number: int) -> None:
    assert parse_arch(text) == name
    assert sm_number(name) == number


def test_other_names_have_no_number() -> None:
    assert parse_arch("gfx942") == "gfx942" and sm_number("gfx942") is None and sm_number("cpu") is None
    with pytest.raises(ValueError, match="device is 'hopper'; it needs to be 'cpu' or the architecture of a GPU"):
        parse_arch("hopper")
