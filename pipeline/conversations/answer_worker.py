"""The child that lets the target answer prompts: greedy, in batches, resumable.

Request (paths are strings): folder, prompts (JSON lines of id, messages and tools), out,
batch_size, max_new_tokens, dtype ("float32" or "bfloat16"), threads, end_of_turn_ids, and
optionally remote_code. Events: {"event": "batch", "done", "total", "tokens", "cut"}, the first of
them with what a resumed run found done.

Why not transformers' generate(): it keeps computing rows that have ended until the last one of
their batch does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from pipeline.conversations.answering import (
    answer_record,
    bind_answers,
    check_lengths,
    encode_prompt,
    read_prompt_file,
)
from pipeline.conversations.answers import append_batch, plan_batches, take_back
from pipeline.conversations.errors import ConversationError
from pipeline.slate.worker import Channel, run_worker
from pipeline.target.load import load_target, with_cache
from pipeline.target.tokenizer import load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PLAN_KEYS = ("batch_size", "max_new_tokens", "dtype", "threads", "end_of_turn_ids")


def main(request: dict[str, Any], channel: Channel) -> None:
    """Answers every prompt that has no answer in `out` yet. See the module for the request."""
    folder, out = Path(request["folder"]), Path(request["out"])
    end_ids = frozenset(map(int, request["end_of_turn_ids"]))
    limit = int(request["max_new_tokens"])
    torch.set_num_threads(int(request["threads"]))
    if request["dtype"] not in _DTYPES or limit < 1 or not end_ids:
        raise ConversationError(
            f"dtype {request['dtype']!r}, {limit} new tokens, end-of-turn ids {sorted(end_ids)}",
            wanted=f"one of {sorted(_DTYPES)}, at least 1 token and one end-of-turn id",
            next_step="correct the answers' settings in the profile",
        )
    remote_code = bool(request.get("remote_code", False))
    tokenizer = load_tokenizer(folder, remote_code=remote_code)
    prompts = read_prompt_file(Path(request["prompts"]))
    encoded = [encode_prompt(tokenizer, one["messages"], one["tools"]) for one in prompts]
    check_lengths(folder, prompts, encoded, limit=limit)

    batches = plan_batches([len(ids) for ids in encoded], batch_size=int(request["batch_size"]))
    bind_answers(out, {key: request[key] for key in _PLAN_KEYS}, folder=folder, encoded=encoded)
    finished = take_back(out, [[prompts[place]["id"] for place in batch] for batch in batches])
    done = sum(len(batch) for batch in batches[:finished])
    event = {"event": "batch", "total": len(prompts)}
    channel.emit(event | {"done": done, "tokens": 0, "cut": 0})
    if finished == len(batches):
        return
    model = load_target(
        folder, dtype=_DTYPES[request["dtype"]], device="cpu", remote_code=remote_code
    )
    for batch in batches[finished:]:
        written = greedy_batch(
            model, [encoded[place] for place in batch], end_ids=end_ids, max_new_tokens=limit
        )
        answers = [
            answer_record(prompts[place], encoded[place], ids, end_ids=end_ids, tokenizer=tokenizer)
            for place, ids in zip(batch, written, strict=True)
        ]
        append_batch(out, answers)
        done += len(batch)
        cut = sum(answer.finish_reason == "length" for answer in answers)
        tokens = sum(len(ids) for ids in written)
        channel.emit(event | {"done": done, "tokens": tokens, "cut": cut})


@torch.inference_mode()
def greedy_batch(
    model: Any, prompts: Sequence[Sequence[int]], *, end_ids: frozenset[int], max_new_tokens: int
) -> list[list[int]]:
    """What the model writes after each prompt, greedily; the end of turn is kept.

    prompts: token ids, each at least one. Each answer stops after its first id of `end_ids` or at
    `max_new_tokens`. Prompts are padded on the left and padding is masked, so positions count from
    each prompt's own first token. Rows that ended leave the batch and its cache.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    )  # [B, width]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    cached = with_cache(model, cache)
    alive = list(range(len(prompts)))  # which prompt each row of the batch is
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **cached,
            logits_to_keep=1,
        ).logits[:, -1]
        chosen = logits.argmax(dim=-1)  # [B]; the lowest id of equal logits
        for row, token in zip(alive, chosen.tolist(), strict=True):
            written[row].append(token)
        going = [at for at, row in enumerate(alive) if written[row][-1] not in end_ids]
        if not going:
            break
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        if len(going) < len(alive):
            rows = torch.tensor(going)
            cache.batch_select_indices(rows)
            ids, positions, mask = ids[rows], positions[rows], mask[rows]
            alive = [alive[at] for at in going]
    return written


if __name__ == "__main__":
    run_worker(main)
