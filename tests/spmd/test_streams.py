"""Page-locked memory: locked before it is used, and until nothing uses it any more."""

import contextlib
import types

import pytest
import torch

from functron.spmd.shared_memory import CUDA


def test_memory_is_locked_exactly_as_long_as_it_is_used(monkeypatch):
    locked, codes = {}, [0]

    def register(address, nbytes, flags):
        locked[address] = nbytes
        return codes[-1]

    calls = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    memory = CUDA.pinned(1000, 0)
    view = memory[8:16].view(torch.float32).numpy()
    assert locked == {memory.data_ptr(): 1000}
    del memory
    assert len(locked) == 1
    del view
    assert not locked
    codes.append(2)
    with pytest.raises(MemoryError, match="got CUDA's error 2 for 8 bytes; wanted them locked"):
        CUDA.pinned(8, 0)


def test_pages_are_locked_once_and_on_the_card_that_is_named(monkeypatch):
    """CUDA refuses a page that is locked already (712), and opens a context on the current card."""
    pages, devices = set(), []

    def register(address, nbytes, flags):
        own = set(range(address // 4096, (address + nbytes - 1) // 4096 + 1))
        clash = bool(own & pages)
        pages.update(own)
        return 712 if clash else 0

    def device(number):
        devices.append(number)
        return contextlib.nullcontext()

    calls = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "device", device)
    kept = [CUDA.pinned(nbytes, 5) for nbytes in [100, 10_000, 0, 4096, 8] * 20]
    assert len(kept) == 100
    assert devices == [5] * 80


@pytest.mark.gpu
def test_cuda_knows_that_memory_is_locked():
    memory = CUDA.pinned(1 << 20, 0)
    assert memory.is_pinned()
    assert memory[5:].is_pinned()
    stream = CUDA.new(torch.device("cuda"))
    near = torch.arange(1 << 18, device="cuda")
    stream.wait_event(CUDA.current(near.device).record_event())
    CUDA.copy_(stream, memory.view(torch.int32)[: 1 << 18], near.int())
    stream.synchronize()
    assert torch.equal(memory.view(torch.int32), near.cpu().int())
