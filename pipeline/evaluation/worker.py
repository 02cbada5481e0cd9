"""The child process of the evaluate stage: loads target and drafter, decodes every prompt twice.

    python -m pipeline.evaluation.worker        request on stdin, events on stdout

Request: target, drafter (folders), prompts (JSON lines of {"id", "prompt_ids"}), max_new_tokens,
draft_tokens, dtype ("float32", "bfloat16", "float64"), threads, end_ids, device ("cpu"),
remote_code (false). Events: {"event": "loaded", "total"}, then for each prompt {"event": "prompt",
"done", "total", "outcome"}; see `acceptance.py`, whose `summarise` adds them up.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.draft.config import DrafterConfig
from pipeline.draft.export import load_exported
from pipeline.evaluation.acceptance import Outcome
from pipeline.evaluation.errors import EvaluationError, WrongDrafter
from pipeline.evaluation.serving import ServingDrafter
from pipeline.evaluation.speculative import decode_twice
from pipeline.slate.files import named
from pipeline.slate.worker import run_worker
from pipeline.target.load import load_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Emitter(Protocol):
    """Where events go: the channel to the parent."""

    def emit(self, event: dict[str, Any]) -> None:
        """Sends one event."""


def read_prompts(path: Path) -> list[tuple[str, list[int]]]:
    """(id, token ids) of each line. EvaluationError names a line that is something else."""
    prompts = []
    with named(path):
        lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            name, ids = value["id"], value["prompt_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise _bad_prompt(path, number, f"{type(error).__name__}: {error}") from error
        if not isinstance(name, str) or not _are_ids(ids):
            raise _bad_prompt(path, number, f"id {name!r}, prompt_ids {str(ids)[:60]}")
        prompts.append((name, ids))
    if not prompts:
        raise _bad_prompt(path, 0, "no prompts")
    return prompts


def main(request: dict[str, Any], channel: Emitter) -> None:
    """Runs a request and emits its events."""
    torch.set_num_threads(request["threads"])
    device, dtype = request.get("device", "cpu"), DTYPES[request["dtype"]]
    prompts = read_prompts(Path(request["prompts"]))
    target = load_target(
        Path(request["target"]),
        dtype=dtype,
        device=device,
        remote_code=request.get("remote_code", False),
    )
    model, vocabulary, config = load_exported(Path(request["drafter"]))
    longest = max(len(ids) for _, ids in prompts) + request["max_new_tokens"]
    check_fit(target, config, longest=longest)
    drafter = ServingDrafter(
        model.to(device=device, dtype=dtype).eval(),
        vocabulary,
        embedding=target.get_input_embeddings().weight.detach(),
    )
    channel.emit({"event": "loaded", "total": len(prompts)})
    for done, outcome in enumerate(decode_all(target, drafter, prompts, request=request), start=1):
        channel.emit(
            {"event": "prompt", "done": done, "total": len(prompts), "outcome": outcome.to_json()}
        )


def decode_all(
    target: Any,
    drafter: ServingDrafter,
    prompts: list[tuple[str, list[int]]],
    *,
    request: dict[str, Any],
) -> Iterator[Outcome]:
    """Every prompt in order, after one that is thrown away: first calls cost more than others."""
    settings: dict[str, Any] = {
        "draft_tokens": request["draft_tokens"],
        "end_ids": frozenset(request["end_ids"]),
    }
    name, ids = prompts[0]
    decode_twice(name, target, drafter, prompt_ids=ids, max_new_tokens=4, **settings)
    settings["max_new_tokens"] = request["max_new_tokens"]
    for name, ids in prompts:
        yield decode_twice(name, target, drafter, prompt_ids=ids, **settings)


def check_fit(target: Any, config: DrafterConfig, *, longest: int) -> None:
    """WrongDrafter when width or vocabulary differ; EvaluationError when an answer cannot fit.

    longest: tokens of the longest prompt with the longest answer.
    """
    V, H = target.get_input_embeddings().weight.shape
    if (config.target_vocabulary_size, config.target_hidden_size) != (V, H):
        raise WrongDrafter(
            f"a drafter for vocabulary {config.target_vocabulary_size} and width "
            f"{config.target_hidden_size}",
            wanted=f"vocabulary {V} and width {H}, as the target has",
            next_step="evaluate the drafter with the target it was trained on",
        )
    if longest > config.max_position_embeddings:
        raise EvaluationError(
            f"a prompt and answer of {longest} tokens",
            wanted=f"at most the drafter's {config.max_position_embeddings} positions",
            next_step="lower evaluate.max_new_tokens or leave the long prompts out",
        )


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(one) is int and one >= 0 for one in ids)


def _bad_prompt(path: Path, number: int, found: str) -> EvaluationError:
    return EvaluationError(
        f"{path} line {number}: {found}",
        wanted='lines of {"id": text, "prompt_ids": [token ids]}',
        next_step="make prepare",
    )


if __name__ == "__main__":
    run_worker(main)
