"""Numbers on a device, made without a copy that the host waits for."""

import pytest
import torch

from functron.core import compat

VALUES = [True, 3, 2.5, [1, 2, 3], (0.5, 1.0), [[True], [False]]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_constants_are_those_of_torch(value, device):
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        made = compat.constant(value, device)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made, torch.tensor(value, device=device), rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(7)], ids=str)
def test_a_number_on_a_cpu_goes_anywhere(value):
    made = compat.constant(value, "meta")
    assert (made.device.type, made.dtype, made.shape) == ("meta", value.dtype, ())
    assert compat.constant(value, "cpu") is value
