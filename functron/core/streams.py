"""Copies between a GPU and host memory, on streams beside the one that computes."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch


class Streams:
    """CUDA's streams and memory, in the few words in which copies are arranged.

    Streams have torch.cuda.Stream's `record_event`, `wait_event` and `synchronize`. What arranges
    copies takes one of these as an argument, so that a test can put others in its place, which see
    the order of everything.
    """

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of a GPU."""
        return tensor.is_cuda

    def current(self, device: torch.device) -> Any:
        """The stream on which a device computes what is called now."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Any:
        """Another stream of the device."""
        return torch.cuda.Stream(device)

    def copy_(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have `stream` copy `source` into `target`, while the caller goes on."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the device, uint8 [nbytes], for the stream that computes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host, uint8 [nbytes], as long as a tensor uses it.

        Not of torch's allocator, which takes the next power of two: up to twice as much.

        Raises:
            MemoryError: the system locks no more pages.
        """
        memory = np.empty(nbytes, np.uint8)
        cudart: Any = torch.cuda.cudart()
        address = memory.ctypes.data
        if nbytes:
            code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
            if code:
                raise MemoryError(
                    f"page-locked memory: got CUDA's error {code} for {nbytes} bytes; wanted them "
                    "locked; fix: free host memory, or raise `ulimit -l`"
                )
            # NumPy calls this before it frees the memory, which may be the last that a tensor does
            last = weakref.finalize(memory, cudart.cudaHostUnregister, address)
            last.atexit = False
        return torch.from_numpy(memory)


_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of the process

CUDA = Streams()
