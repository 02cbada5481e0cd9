"""What one optimizer step of the trainer costs on one device: tokens a second, memory, kernels.

    python benchmarks/train_step/measure.py --shape kimi --tokens 4096 --supervised 0.3 0.67 1.0

The pack lies on the device already (the loader is measured elsewhere); a step is forward, backward,
gradient collection, norm, clipping and AdamW on float32 masters. Random weights and states; every
document is 1024 tokens, a question and then its supervised answer.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor

from pipeline.draft.config import DrafterConfig
from pipeline.draft.model import Drafter
from pipeline.draft.ttt import Pack, pack_loss
from pipeline.draft.vocabulary import DraftVocabulary, build_vocabulary
from pipeline.training.optimizer import MasterAdamW

DOCUMENT = 1024
SHAPES: dict[str, dict[str, int]] = {
    "kimi": {"H": 7168, "I": 12288, "heads": 56, "kv": 8, "d": 128, "V": 163840, "D": 32000},
    "llama-8b": {"H": 4096, "I": 14336, "heads": 32, "kv": 8, "d": 128, "V": 128256, "D": 32000},
    "tiny": {"H": 64, "I": 128, "heads": 4, "kv": 2, "d": 16, "V": 512, "D": 256},
}


def make_config(shape: dict[str, int]) -> DrafterConfig:
    """The drafter of a shape."""
    return DrafterConfig(
        hidden_size=shape["H"],
        target_hidden_size=shape["H"],
        intermediate_size=shape["I"],
        heads=shape["heads"],
        kv_heads=shape["kv"],
        head_dim=shape["d"],
        draft_vocabulary_size=shape["D"],
        target_vocabulary_size=shape["V"],
        rope_theta=50000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        norm_output=False,
        taps=(2, 16, 29),
    )


def make_pack(tokens: int, *, supervised: float, H: int, V: int, device: torch.device) -> Pack:
    """Random states of documents of 1024 tokens, the last share of each supervised."""
    generator = torch.Generator(device=device).manual_seed(0)

    def states(width: int) -> Tensor:
        return torch.randn(tokens, width, generator=generator, device=device).to(torch.bfloat16)

    at = torch.arange(tokens, device=device)
    return Pack(
        ids=torch.randint(0, V, (tokens,), generator=generator, device=device),
        taps=states(3 * H),
        final=states(H),
        supervised=at % DOCUMENT >= round(DOCUMENT * (1 - supervised)),
        document=at // DOCUMENT,
        position=at % DOCUMENT,
    )


def measure(arguments: argparse.Namespace, share: float) -> dict[str, Any]:
    """Median step of one share of supervised tokens."""
    device = torch.device(arguments.device)
    shape = SHAPES[arguments.shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = make_config(shape)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 9, (shape["V"],), generator=generator)
    vocabulary: DraftVocabulary = build_vocabulary(counts, shape["D"])
    rows = torch.randn(shape["D"], shape["H"], generator=generator) / shape["H"] ** 0.5
    model = Drafter.initialised(config, head_rows=rows, seed=1).to(device)
    optimizer = MasterAdamW(model, dtype=dtype, betas=(0.9, 0.95), weight_decay=0.0)
    teacher_head = rows.to(device, dtype)
    embedding = torch.randn(shape["V"], shape["H"], device=device, dtype=dtype)
    pack = make_pack(arguments.tokens, supervised=share, H=shape["H"], V=shape["V"], device=device)

    def step() -> float:
        optimizer.zero()
        result = pack_loss(
            model,
            pack,
            embedding=embedding,
            teacher_head=teacher_head,
            draft_vocabulary=vocabulary,
            steps=arguments.steps,
            decay=0.8,
        )
        (result.loss / result.weight).backward()
        optimizer.collect()
        optimizer.step(1e-4, norm=optimizer.norm(), clip_norm=0.5)
        return float(result.loss.detach()) / result.weight

    began = time.perf_counter()
    first = step()
    synchronise(device)
    compiled = time.perf_counter() - began
    for _ in range(2):
        step()
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(arguments.updates):
        began = time.perf_counter()
        last = step()
        synchronise(device)
        times.append(time.perf_counter() - began)
    seconds = sorted(times)[len(times) // 2]
    if arguments.profile:
        show_kernels(step, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "shape": arguments.shape,
        "tokens": arguments.tokens,
        "supervised": share,
        "ttt_steps": arguments.steps,
        "milliseconds": round(seconds * 1e3, 1),
        "tokens_per_second": round(arguments.tokens / seconds),
        "peak_gib": round(peak, 1),
        "first_step_seconds": round(compiled, 1),
        "loss": [round(first, 4), round(last, 4)],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def synchronise(device: torch.device) -> None:
    """Waits for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def show_kernels(step: Any, device: torch.device) -> None:
    """Prints where the time of one step goes."""
    with torch.profiler.profile() as profile:
        step()
        synchronise(device)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(
        profile.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=60),
        flush=True,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--supervised", type=float, nargs="+", default=[0.67])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for share in arguments.supervised:
        print(json.dumps(measure(arguments, share)), flush=True)


if __name__ == "__main__":
    main()
