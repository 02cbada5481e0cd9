"""What capture costs: real SGLang with and without the plugin, and its rows against transformers.

    python benchmarks/capture/measure.py all --out RESULTS            # one GPU
    python benchmarks/capture/measure.py all --out RESULTS --device cpu --shapes tiny

Run with the interpreter that has SGLang; the `cleanslate` package must be installed in it without
its dependencies (`pip install --no-deps -e .`), which is what makes SGLang find the plugin. Every
engine runs in a process of its own; a second process plays the extract stage: it reads each staged
file, checks it and removes it.
"""

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil

GIB = 1 << 30
READERS = 3  # processes
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
# Hidden width of Kimi-K2.5, with as many layers as give about the work a token of Llama-8B: the
# real model does far more work for the same bytes, so this is the harder case.
WIDE = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 16,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "initializer_range": 0.08,
}
# Real weights small enough to be fast, rows as wide as Llama-8B's: states are made several times
# faster than the writers can take them, so that the ring is full most of the time.
STRESS = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
SHAPES = {
    "llama-8b": (LLAMA_8B, (2, 16, 29)),
    "wide": (WIDE, (2, 8, 13)),
    "tiny": (TINY, (1, 3, 5)),
    "stress": (STRESS, (1, 2, 3)),
}


def make_model(folder: Path, shape: dict[str, Any], *, weights: bool) -> None:
    """A Llama folder: a config, and random bfloat16 weights where asked for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **shape,
    )
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(0)
        with torch.device(device):
            LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        if device == "cuda":
            torch.cuda.empty_cache()


def engine_arguments(folder: Path, *, device: str, **more: Any) -> dict[str, Any]:
    """Arguments of sglang.Engine that extraction needs, on a GPU or on a CPU."""
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "log_level": "warning",
        "context_length": 8192,
        "watchdog_timeout": 1200,
    }
    if device == "cpu":
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.3,
            "max_total_tokens": 16384,
            "max_running_requests": 8,
            "skip_server_warmup": True,
        }
    else:
        arguments |= {"attention_backend": "triton", "mem_fraction_static": 0.7}
    return arguments | more


def check(arguments: argparse.Namespace) -> None:
    """Rows of a tiny model against transformers in float32, with chunks, in concurrent batches."""
    import sglang
    import torch

    engine = sglang.Engine(
        **engine_arguments(
            arguments.model,
            device=arguments.device,
            chunked_prefill_size=arguments.chunk,
            enable_mixed_chunk=True,
        )
    )
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 33, 130, 900, 1, 700)
    prompts = [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in lengths]
    # Alone, then all at once beside requests that decode and are not captured.
    replies = [
        engine.generate(input_ids=ids, rid=f"m-alone-{number}", sampling_params=_params(1))
        for number, ids in enumerate(prompts)
    ]
    together = engine.generate(
        input_ids=[prompts[2][:9], *prompts],
        rid=["other", *(f"m-together-{number}" for number in range(len(prompts)))],
        sampling_params=[_params(40), *([_params(1)] * len(prompts))],
    )
    engine.shutdown()
    compare(arguments, prompts * 2, [*replies, *together[1:]])


def stress(arguments: argparse.Namespace) -> None:
    """Rows against transformers when the server runs far ahead of the writers, in chunks."""
    import sglang
    import torch

    shape, _ = SHAPES[arguments.shape]
    engine = sglang.Engine(
        **engine_arguments(arguments.model, device=arguments.device, chunked_prefill_size=4096)
    )
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(
        arguments.tokens // 4, arguments.tokens, (arguments.prompts,), generator=generator
    )
    prompts = [
        torch.randint(3, shape["vocab_size"] - 3, (n,), generator=generator).tolist()
        for n in lengths.tolist()
    ]
    engine.generate(input_ids=prompts[0], rid="other", sampling_params=_params(1))
    began = time.monotonic()
    replies = engine.generate(
        input_ids=prompts,
        rid=[f"m-{number}" for number in range(len(prompts))],
        sampling_params=_params(1),
    )
    seconds = time.monotonic() - began
    for number in range(len(prompts)):  # the writers end with the server
        wait_for(arguments.staging / f"m-{number}.safetensors", seconds=60)
    time.sleep(0.3)
    used = readings(arguments)
    engine.shutdown()
    used |= {"tokens_per_second": round(int(lengths.sum()) / seconds)}
    compare(arguments, prompts, replies, used=used)


def compare(
    arguments: argparse.Namespace,
    prompts: list[list[int]],
    replies: list[dict[str, Any]],
    **more: Any,
) -> None:
    """Every row of every request against transformers in float32; prints the worst differences."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    taps = SHAPES[arguments.shape][1]
    device = "cpu" if arguments.device == "cpu" else "cuda"
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = model.eval().to(device)
    worst = worst_row = 0.0
    spans = tokens = 0
    for ids, reply in zip(prompts, replies, strict=True):
        receipt = [entry for entry in reply["meta_info"]["cleanslate_capture"] if entry][-1]
        if not receipt["ok"]:
            raise SystemExit(f"refused: {receipt}")
        path = arguments.staging / receipt["file"]
        wait_for(path, seconds=60)
        found = load_file(path)
        with torch.no_grad():
            states = model.model(torch.tensor([ids], device=device), output_hidden_states=True)
        wanted = [states.hidden_states[tap][0] for tap in taps]
        wanted.append(states.last_hidden_state[0])
        names = [*(f"tap_{number}" for number in range(len(taps))), "final"]
        for name, reference in zip(names, wanted, strict=True):
            difference = found[name].to(device).float() - reference
            worst = max(worst, float(difference.norm() / reference.norm()))
            rows = difference.norm(dim=1) / reference.norm(dim=1)
            worst_row = max(worst_row, float(rows.max()))
        if found["input_ids"].tolist() != ids:
            raise SystemExit("other token ids in the file")
        spans = max(spans, len(receipt["spans"]))
        tokens += len(ids)
    result = {"requests": len(prompts), "tokens": tokens, "most_spans": spans}
    print(json.dumps({**result, "worst": worst, "worst_row": worst_row, **more}))


def _params(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def wait_for(path: Path, *, seconds: float) -> None:
    """Waits for a file to appear."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        failed = path.with_suffix(".failed")
        if failed.exists():
            raise SystemExit(f"{failed}: {failed.read_text()}")
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear in {seconds:g} s")
        time.sleep(0.01)


def speed(arguments: argparse.Namespace) -> None:
    """Tokens a second of one engine, with its processor time and the plugin's own counters."""
    import sglang

    shape, _ = SHAPES[arguments.shape]
    began = time.monotonic()
    engine = sglang.Engine(
        **engine_arguments(
            arguments.model,
            device=arguments.device,
            load_format="dummy",
            chunked_prefill_size=-1,
            max_prefill_tokens=16384,
        )
    )
    started_seconds = time.monotonic() - began
    random = np.random.default_rng(3)
    prefix = "m-" if arguments.mode == "on" else "other-"
    rounds = []
    for number in range(arguments.warmup + arguments.rounds):
        if number == arguments.warmup:
            settle(arguments)
            before = readings(arguments)
            window = time.monotonic()
        prompts = random.integers(
            3, shape["vocab_size"] - 3, (arguments.prompts, arguments.tokens)
        ).tolist()
        began = time.monotonic()
        replies = engine.generate(
            input_ids=prompts,
            rid=[f"{prefix}{number}-{at}" for at in range(arguments.prompts)],
            sampling_params=_params(1),
        )
        seconds = time.monotonic() - began
        if number >= arguments.warmup:
            rounds.append(seconds)
        if arguments.mode == "on":
            for reply in replies:
                receipt = [entry for entry in reply["meta_info"]["cleanslate_capture"] if entry][-1]
                if not receipt["ok"] or receipt["rows"] != arguments.tokens:
                    raise SystemExit(f"refused: {receipt}")
    drained = settle(arguments)
    window = time.monotonic() - window
    after = readings(arguments)
    engine.shutdown()
    tokens = arguments.prompts * arguments.tokens
    used = {name: after[name] - before[name] for name in before}
    print(
        json.dumps(
            {
                "shape": arguments.shape,
                "mode": arguments.mode,
                "start_seconds": round(started_seconds, 1),
                "tokens_per_second": round(tokens * len(rounds) / sum(rounds)),
                "rounds": [round(tokens / seconds) for seconds in rounds],
                # Until the last file is read and gone, with the making of the prompts.
                "window_seconds": round(window, 3),
                "drain_seconds": round(drained, 3),
                "reply_seconds": round(sum(rounds), 3),
                "used": {name: round(value, 3) for name, value in used.items()},
                "gb_per_second": round(used.get("bytes", 0) / 1e9 / (sum(rounds) + drained), 3),
            }
        )
    )


def settle(arguments: argparse.Namespace) -> float:
    """Waits until the staging folder is empty and the counters are written; gives the seconds."""
    began = time.monotonic()
    if arguments.mode == "on":
        while any(".safetensors" in path.name for path in arguments.staging.iterdir()):
            time.sleep(0.005)
    waited = time.monotonic() - began
    time.sleep(0.3)
    return waited


def readings(arguments: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of the scheduler process and the plugin's counters, as they stand."""
    found: dict[str, float] = {"scheduler_cpu_seconds": 0.0, "client_cpu_seconds": 0.0}
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        if "scheduler" in " ".join(process.cmdline()):
            found["scheduler_cpu_seconds"] += times.user + times.system
    own = psutil.Process().cpu_times()
    found["client_cpu_seconds"] = own.user + own.system
    for path in arguments.staging.glob(".counters-*.json"):
        found |= json.loads(path.read_text())
    for path in arguments.staging.glob(".reader-*.json"):
        for name, value in json.loads(path.read_text()).items():
            found[name] = found.get(name, 0.0) + value
    return found


def read_files(arguments: argparse.Namespace) -> None:
    """Plays the extract stage until it is ended: every file is checked in full and removed."""
    staging = arguments.staging
    part = arguments.part
    done = 0
    while True:
        for path in staging.iterdir():
            mine = zlib.crc32(path.name.encode()) % READERS == part
            if mine and path.suffix == ".safetensors":
                check_file(path)
                done += 1
            elif path.suffix == ".failed":
                raise SystemExit(path.read_text())
        times = psutil.Process().cpu_times()
        text = json.dumps({"reader_cpu_seconds": times.user + times.system, "reader_files": done})
        aside = staging / f".reader-{part}.partial"
        aside.write_text(text)
        aside.rename(staging / f".reader-{part}.json")
        time.sleep(0.005)


def check_file(path: Path) -> None:
    """Every tensor of a staged file: its bytes, finite, no row of zeros; then removes it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        whole = np.frombuffer(data, dtype=np.uint8)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            view = whole[start + first : start + last]
            if name == "input_ids":
                continue
            bits = view.view(np.uint16).reshape(entry["shape"])
            for at in range(0, len(bits), 64):
                part = bits[at : at + 64]
                if ((part & 0x7F80) == 0x7F80).any() or not part.max(axis=1).all():
                    raise SystemExit(f"{path} {name}: rows {at}.. not finite or zero")
        size = start + max(entry["data_offsets"][1] for entry in header.values())
        if size != len(whole):
            raise SystemExit(f"{path}: {len(whole)} bytes, wanted {size}")
        del whole, view, bits, part
    path.unlink()


def gpu_memory_mib() -> int | None:
    """Memory in use on the GPU; None without one."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(told.stdout.split()[0])


def run_all(arguments: argparse.Namespace) -> None:
    """All measurements, each in its own processes; results to a JSON file and on the screen."""
    results: list[dict[str, Any]] = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "tiny", TINY, weights=True)
        for chunk in ("-1", "256") if arguments.checks == "yes" else ():
            told = ["check", "--shape", "tiny", "--chunk", chunk]
            results.append(run_one(arguments, work / "tiny", told))
        if arguments.device == "cuda" and arguments.checks != "no":
            # In a process of its own, or this one would hold GPU memory to the end.
            making = [sys.executable, __file__, "make", "--shape", "stress"]
            subprocess.run([*making, "--model", str(work / "stress")], check=True)
            told = ["stress", "--shape", "stress", "--prompts", "64", "--tokens", "2048"]
            results.append(run_one(arguments, work / "stress", told))
        for name in filter(None, arguments.shapes.split(",")):
            shape, _ = SHAPES[name]
            if name != "tiny":
                make_model(work / name, shape, weights=False)
            for mode in arguments.modes.split(","):
                told = ["speed", "--shape", name, "--mode", mode]
                for option in ("prompts", "tokens", "rounds", "warmup"):
                    told += [f"--{option}", str(getattr(arguments, option))]
                results.append(run_one(arguments, work / name, told))
                (arguments.out / "results.json").write_text(json.dumps(results, indent=1))


def run_one(arguments: argparse.Namespace, model: Path, told: list[str]) -> dict[str, Any]:
    """One engine and, for a speed run with capture, its reader; gives what it printed."""
    name = told[told.index("--shape") + 1]
    taps = SHAPES[name][1]
    small = {"tiny": 1 << 24, "stress": 1 << 29}  # so that the ring fills and wraps
    with tempfile.TemporaryDirectory(dir=arguments.staging_root) as folder:
        staging = Path(folder)
        configuration = {
            "staging": str(staging),
            "quota_bytes": int(arguments.quota_gib * GIB),
            "taps": list(taps),
            "rid_prefix": "m-",
            "ring_bytes": small.get(name, int(arguments.ring_gib * GIB)),
            "writer_threads": arguments.writer_threads,
            "timeout_seconds": 120,
        }
        file = staging / "capture.json"
        file.write_text(json.dumps(configuration))
        program = [sys.executable, str(Path(__file__).resolve())]
        shared = ["--model", str(model), "--staging", str(staging), "--device", arguments.device]
        environment = [] if "off" in told else [f"CLEANSLATE_CAPTURE={file}"]
        readers = [
            subprocess.Popen([*program, "read", "--staging", str(staging), "--part", str(part)])
            for part in range(READERS if "speed" in told and "on" in told else 0)
        ]
        log = arguments.out / f"{'-'.join(word.strip('-') for word in told[:5])}.log"
        try:
            with log.open("w") as errors:
                done = subprocess.run(
                    ["env", *environment, *program, *told, *shared],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    check=False,
                    timeout=arguments.limit_seconds,
                )
        finally:
            ended = [reader.poll() for reader in readers]
            for reader in readers:
                reader.kill()
                reader.wait()
        if done.returncode or any(code is not None for code in ended):
            raise SystemExit(f"{told} failed:\n{log.read_text()[-4000:]}\n{done.stdout[-2000:]}")
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        time.sleep(2)
        result |= {"run": " ".join(told[:5]), "gpu_mib_after": gpu_memory_mib()}
        print(json.dumps(result), flush=True)
        return result


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["all", "make", "check", "stress", "speed", "read"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--staging", type=Path)
    parser.add_argument("--staging-root", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", default="llama-8b,wide")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--modes", default="off,on,off,on,layers")
    parser.add_argument("--mode", choices=["off", "on", "layers"], default="on")
    parser.add_argument("--chunk", type=int, default=-1)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--checks", choices=["yes", "stress", "no"], default="yes")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--ring-gib", type=float, default=4)
    parser.add_argument("--quota-gib", type=float, default=24)
    parser.add_argument("--writer-threads", type=int, default=4)
    parser.add_argument("--limit-seconds", type=float, default=300)
    arguments = parser.parse_args()
    if arguments.what == "make":
        make_model(arguments.model, SHAPES[arguments.shape][0], weights=True)
        return
    programs = {"all": run_all, "check": check, "stress": stress, "speed": speed}
    {**programs, "read": read_files}[arguments.what](arguments)


if __name__ == "__main__":
    main()
