# mypy: allow-untyped-calls
"""Every kernel of a training step compiled for a device that need not be there."""

import dataclasses

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels.cuda import adamw, attention, judge, norms, rows
from pipeline.kernels.cuda.blocks import Device, Launch, Shape

SHAPES = {
    "kimi": Shape(hidden=7168, intermediate=12288, heads=56, kv=8, head_dim=128, vocabulary=32000),
    "llama-8b": Shape(
        hidden=4096, intermediate=14336, heads=32, kv=8, head_dim=128, vocabulary=32000
    ),
}
"""Drafters that kernels are compiled ahead for, by name."""


MODULES = {"norms": norms, "rows": rows, "judge": judge, "adamw": adamw, "attention": attention}
"""Where kernels are, by name."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel that compiled: shape/kernel, bytes of shared memory a block, and the program."""

    name: str
    shared_bytes: int
    cubin: bytes = dataclasses.field(repr=False)


def compile_all(device: Device) -> list[Compiled]:
    """Every kernel for every shape of SHAPES in bfloat16, as launched on `device`; no GPU wanted.

    Errors are Triton's own: the kernel does not compile.
    """
    return [
        compile_launch(launch, device, prefix=f"{shape}/")
        for shape in SHAPES
        for module in MODULES
        for launch in launches(module, shape, device)
    ]


def launches(module: str, shape: str, device: Device) -> list[Launch]:
    """The kernels of one of MODULES as launched for one of SHAPES in bfloat16."""
    found: list[Launch] = MODULES[module].launches(SHAPES[shape], torch.bfloat16, device)
    return found


def compile_launch(launch: Launch, device: Device, *, prefix: str = "") -> Compiled:
    """One kernel for `device`, whose blocks the launch was described for."""
    made = triton.compile(
        source(launch),
        target=GPUTarget("cuda", device.capability, 32),
        options={"num_warps": launch.tuning.num_warps, "num_stages": launch.tuning.num_stages},
    )
    return Compiled(prefix + launch.name, made.metadata.shared, made.asm["cubin"])


def source(launch: Launch) -> ASTSource:
    """A launch as Triton's JIT describes it; an argument that is not given is the constant None."""
    kernel, constants = launch.kernel, dict(launch.tuning.constexprs)
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        given = launch.signature.get(name)
        signature[name] = given or "constexpr"
        if given is None:
            constants.setdefault(name, None)
        elif name in launch.aligned or (
            given.startswith("*") and not parameter.do_not_specialize_on_alignment
        ):
            attributes[(place,)] = [["tt.divisibility", 16]]
    unknown = (launch.signature.keys() | constants.keys()) - signature.keys()
    assert not unknown, f"{launch.name}: {sorted(unknown)} are no arguments of its kernel"
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
