"""Numbers on their way from the device to the host, past what is queued after them."""

import torch
from torch import Tensor


class Reading:
    """Starts copying a tensor to the host, behind all that is queued on the present stream.

    `wait` gives it on the CPU. Work queued in between goes on: the host reads what a step found
    while the device is still at its update, and queues the next step in that time.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> Tensor:
        """The tensor, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
