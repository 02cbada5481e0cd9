"""How kernels are launched: facts of a device, and descriptions shared with `ahead`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Device:
    """What block sizes are chosen by.

    capability: 90 for sm_90. shared_bytes: shared memory that one block may have.
    multiprocessors: their count.
    """

    capability: int
    shared_bytes: int
    multiprocessors: int


HOPPER = Device(90, 232448, 132)
"""H100 and H200."""

BLACKWELL = Device(120, 101376, 188)
"""Workstation Blackwell, sm_120: 99 KiB of shared memory a block."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """Facts of a CUDA device; of BLACKWELL, the smallest, for a CPU (Triton's interpreter)."""
    if device.type != "cuda":
        return BLACKWELL
    found = torch.cuda.get_device_properties(device)
    return Device(
        found.major * 10 + found.minor,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch 2.13's stub
        found.multi_processor_count,
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of a drafter, which kernels are compiled for: counts as in its config."""

    hidden: int
    intermediate: int
    heads: int
    kv: int
    head_dim: int
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How one kernel is compiled: its constexpr arguments, warps a block, pipeline stages."""

    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch: kernel[grid](*arguments, **tuning.options)."""
        return {
            **self.constexprs,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel as it is launched, for compiling without a GPU.

    name: unique within a shape. kernel: the JIT function. signature: type of every argument that
    is neither constexpr nor None, as Triton writes them ("*bf16", "i32", "fp32"). aligned: integer
    arguments that are multiples of 16 as launched; tensors are taken to be so, as torch's are.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    tuning: Tuning
    aligned: tuple[str, ...] = ()


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
}


def pointer(dtype: torch.dtype) -> str:
    """Triton's name for a tensor argument of `dtype`: "*bf16"."""
    return "*" + _TYPES[dtype]


def power_of_two(width: int) -> int:
    """The least power of two that is at least `width`: what a block's side must be."""
    return 1 << max(0, width - 1).bit_length()
