"""Reading one reply of `/generate`: nothing in it is believed because it is there."""

import math
from collections.abc import Mapping
from typing import Any

from pipeline.capture.contract import Receipt, Refusal, Request

_META = "cleanslate_capture"
_REASON_LENGTH, _DETAIL_LENGTH = 40, 500


class BadReply(Exception):
    """A reply that cannot be used: a short stable reason and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def read_reply(request: Request, reply: Mapping[str, Any], *, rid: str) -> Receipt | Refusal:
    """The plugin's receipt or refusal out of a reply, in the contract's form.

    rid: the request id that was sent; a reply or a receipt of another one is refused. BadReply for
    everything that is not a whole reply to this request.
    """
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise BadReply("reply", f"a reply without meta_info: {sorted(reply)}")
    if meta.get("id") != rid:
        raise BadReply("other_reply", f"the reply is to {meta.get('id')!r}, not to {rid}")
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        raise BadReply("aborted", str(finish.get("message") or "(no message)")[:_DETAIL_LENGTH])
    count = len(request.input_ids)
    if meta.get("prompt_tokens") != count:
        raise BadReply("row_count", f"the server ran {meta.get('prompt_tokens')} of {count} tokens")
    cached = meta.get("cached_tokens")
    if cached != 0:
        raise BadReply("prefix_cache", f"{cached} of {count} tokens came from the prefix cache")
    said = _last_receipt(meta.get(_META))
    if said.get("rid") != rid:
        raise BadReply("other_reply", f"the receipt is for {said.get('rid')!r}, not for {rid}")
    if said.get("ok") is not True:
        reason = str(said.get("reason") or "unknown")[:_REASON_LENGTH]
        return Refusal(request.id, reason, str(said.get("detail") or "(nothing)")[:_DETAIL_LENGTH])
    if said.get("file") != f"{rid}.safetensors":
        raise BadReply("receipt", f"the receipt names the file {said.get('file')!r}")
    try:
        return Receipt(
            id=request.id,
            rows=_integer(said["rows"]),
            spans=tuple((_integer(start), _integer(end)) for start, end in said["spans"]),
            ids_sha256=str(said["ids_sha256"]),
            dtype=str(said["dtype"]),
            taps=tuple(_integer(tap) for tap in said["taps"]),
            file=f"{rid}.safetensors",
            logprobs=_logprobs(meta, request) if request.logprobs else None,
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise BadReply("receipt", f"{type(error).__name__}: {error}") from error


def _last_receipt(found: Any) -> Mapping[str, Any]:
    # One entry for each output slot; the slots before the last chunk's are null.
    said = [one for one in found if one is not None] if isinstance(found, list) else []
    if not said or not isinstance(said[-1], dict):
        raise BadReply("no_receipt", "the reply has no receipt: the capture plugin did not run")
    return said[-1]


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _logprobs(meta: Mapping[str, Any], request: Request) -> tuple[float, ...]:
    """Those of tokens 1 to n - 1; the reply holds [value, id, text] a token, the first null."""
    found = meta.get("input_token_logprobs")
    ids = request.input_ids.tolist()
    if not isinstance(found, list) or [entry[1] for entry in found] != ids:
        raise BadReply("logprobs", "log-probabilities are not those of the prompt's tokens")
    values = tuple(float(entry[0]) for entry in found[1:])
    if not all(math.isfinite(value) for value in values):
        raise BadReply("logprobs", "a log-probability is not finite")
    return values
