"""An exported drafter on an SGLang server: the flags that load it, and the proof that they took.

Sources: SGLang 0.5.17 and 0.5.23 `srt/server_args.py`. One chain of drafts (topk 1): each pass of
the target judges the newest token and `draft_tokens` drafts, as this project's own loop does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

ALGORITHM = "EAGLE3"

# Found by running it: with the plain torch backend alone the server refuses to verify drafts on a
# CPU; under this name it picks a way that works and falls back to plain torch by itself.
_CPU_FLAGS = (
    *("--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx"),
)


def drafter_flags(folder: Path, *, draft_tokens: int, device: Literal["cuda", "cpu"]) -> list[str]:
    """Arguments that make `sglang.launch_server` draft with the export in `folder`.

    draft_tokens: drafts of one pass of the target (>= 1). SGLang counts the verified token with
    them, hence one more there.
    """
    return [
        *("--speculative-algorithm", ALGORITHM),
        *("--speculative-draft-model-path", str(folder)),
        *("--speculative-num-steps", str(draft_tokens)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(draft_tokens + 1)),
        *(_CPU_FLAGS if device == "cpu" else ()),
    ]


def wrong_drafting(info: Mapping[str, Any], *, draft_tokens: int | None, dtype: str) -> list[str]:
    """What of a running server's flags (`/server_info`) stands against a fair comparison.

    draft_tokens None: a server that must not draft. One sentence each; empty when all is right.
    SGLang changes some of these by itself where it thinks better, hence the look.
    """
    wanted: dict[str, Any] = {"speculative_algorithm": None}
    if draft_tokens is not None:
        wanted = {
            "speculative_algorithm": ALGORITHM,
            "speculative_num_steps": draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": draft_tokens + 1,
        }
    wanted["dtype"] = dtype
    return [
        f"{name} is {info.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if info.get(name) != value
    ]
