"""Records of token ids: what another system tokenised, taken as it stands.

    {"input_ids": [1, 42, 7], "loss_mask": [0, 1, 1], "id": "optional"}

loss_mask is 1 on the tokens to learn from. Nothing is cut: states that were made of these ids have
a row for each.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.conversations.normalise import Skip

IDS, MASK = "input_ids", "loss_mask"


@dataclass(frozen=True)
class Tokens:
    """One record: input_ids and supervised flags of one length."""

    input_ids: list[int]
    supervised: list[bool]


def read_tokens(value: Any, *, vocabulary_size: int, max_length: int) -> Tokens:
    """A record's ids and mask, checked. Skip with the reason for one that cannot be used."""
    if not isinstance(value, dict):
        raise Skip("not_a_record", f"a JSON {type(value).__name__}, wanted an object with {IDS}")
    ids, mask = (_list(value, key) for key in (IDS, MASK))
    if len(ids) != len(mask):
        raise Skip("lengths_differ", f"{len(ids)} {IDS}, {len(mask)} values of {MASK}")
    if not ids:
        raise Skip("no_tokens", f"{IDS} is empty")
    if any(type(one) is not int for one in ids):
        raise Skip("bad_ids", f"{IDS} holds something else than whole numbers")
    if min(ids) < 0 or max(ids) >= vocabulary_size:
        found = min(ids) if min(ids) < 0 else max(ids)
        raise Skip("outside_vocabulary", f"id {found}; the target has {vocabulary_size} tokens")
    # Some systems store the mask as numbers of their loss: 0.0 and 1.0 are taken, 0.5 is not.
    if any(not isinstance(one, int | float) or one not in (0, 1) for one in mask):
        raise Skip("bad_mask", f"{MASK} holds something else than 0 and 1")
    if len(ids) > max_length:
        raise Skip("too_long", f"{len(ids)} tokens, prepare.max_length is {max_length}")
    # A supervised first token has no row that predicts it.
    if not any(mask[1:]):
        raise Skip("nothing_supervised", f"{MASK} is 1 nowhere behind the first token")
    return Tokens(ids, [bool(one) for one in mask])


def _list(value: dict[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        kind = "absent" if found is None else f"a {type(found).__name__}"
        raise Skip("no_tokens", f"{key} is {kind}, wanted a list of numbers")
    return found
