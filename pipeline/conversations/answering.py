"""What both ways of writing answers share: the prompts, the tie of a file to its run, the record.

The one way is `answer_worker.py` (transformers, in a child), the other `server_answers.py` (an
SGLang server); both write the lines that `answers.py` reads.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.conversations.answers import Answer, FinishReason
from pipeline.conversations.errors import ConversationError, RendererError
from pipeline.conversations.template import render_template
from pipeline.settings.strict_json import parse_json
from pipeline.slate.files import named, read_json, sha256_json, write_json
from pipeline.target.facts import fingerprint, read_facts


def encode_prompt(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins, by the target's template.

    tools: declarations for the template. ConversationError when the template refuses the messages.
    """
    try:
        text = render_template(tokenizer, messages, tools=tools, generate=True)
    except RendererError:
        raise
    # Templates are Jinja programs: they raise what they like, and so do the functions they call.
    except Exception as error:
        raise ConversationError(
            f"chat template: {type(error).__name__}: {error}",
            wanted="messages that the target's template can render",
            next_step="check the prompts and the target's chat template",
        ) from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [int(token) for token in ids]


def answer_record(
    prompt: Mapping[str, Any],
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    end_ids: frozenset[int],
    tokenizer: Any,
) -> Answer:
    """The record of one finished answer. prompt: id and messages; answer_ids: at least one."""
    ended = answer_ids[-1] in end_ids
    reason: FinishReason = "stop" if ended else "length"
    text = tokenizer.decode(answer_ids[:-1] if ended else answer_ids)
    return Answer(
        id=prompt["id"],
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
        finish_reason=reason,
        messages=(*prompt["messages"], {"role": "assistant", "content": text}),
    )


def read_prompt_file(path: Path) -> list[dict[str, Any]]:
    """The prompts, each with an id of its own. ConversationError when one is broken."""
    prompts: list[dict[str, Any]] = []
    seen: set[str] = set()
    with named(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                prompt = parse_json(line)
                prompt_id, messages, tools = prompt["id"], prompt["messages"], prompt.get("tools")
                if not (isinstance(prompt_id, str) and isinstance(messages, list) and messages):
                    raise ValueError(f"id {prompt_id!r} with {type(messages).__name__}")
                if tools is not None and not isinstance(tools, list):
                    raise ValueError(f"id {prompt_id!r}: tools is a {type(tools).__name__}")
                if prompt_id in seen:
                    raise ValueError(f"id {prompt_id!r} a second time")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConversationError(
                    f"{path}:{number}: {type(error).__name__}: {error}",
                    wanted="a line with an id of its own and a list of messages",
                    next_step="run make prepare again",
                ) from error
            seen.add(prompt_id)
            prompts.append({"id": prompt_id, "messages": messages, "tools": tools})
    return prompts


def check_lengths(
    folder: Path,
    prompts: Sequence[dict[str, Any]],
    encoded: Sequence[Sequence[int]],
    *,
    limit: int,
) -> None:
    """Passes when every prompt leaves room for its answer. ConversationError naming one else."""
    positions = read_facts(folder).max_position_embeddings
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) <= positions - limit:
            raise ConversationError(
                f"prompt {prompt['id']!r} has {len(ids)} tokens",
                wanted=f"1..{positions - limit}: the target has {positions} positions and the "
                f"answer may take {limit}",
                next_step="leave this prompt out or shorten the answers",
            )


def bind_answers(
    out: Path, plan: Mapping[str, Any], *, folder: Path, encoded: Sequence[Sequence[int]]
) -> None:
    """Ties an answers file to what it was begun with, in a file beside it.

    plan: the settings that decide the answers. ConversationError when answers are there that were
    begun with anything else: the two halves would come from different runs.
    """
    beside = out.with_name(out.name + ".begun.json")
    begun = {
        **plan,
        "target": fingerprint(folder),
        "prompts_sha256": sha256_json(list(encoded)),
    }
    if out.exists() and out.stat().st_size:
        found = read_json(beside) if beside.exists() else {}
        if found != begun:
            changed = sorted(key for key in begun | found if found.get(key) != begun.get(key))
            raise ConversationError(
                f"{out} was begun with another {', '.join(changed)}",
                wanted="the same settings, prompts and target for the rest",
                next_step="run the stage without RESUME=1",
            )
    write_json(beside, begun)
