"""Believing nothing: every answer of an engine is compared with its sample before it is kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor

from pipeline.capture.contract import Receipt, ids_digest
from pipeline.capture.staging import Staging, StagingFailed
from pipeline.store.index import Sample


@dataclass(frozen=True)
class Wrong:
    """Why an answer is not believed: a short stable code and a sentence with both values."""

    reason: str
    detail: str


def check_receipt(receipt: Receipt, sample: Sample, *, taps: Sequence[int]) -> Wrong | None:
    """Compares a receipt with its sample, before its file is read."""
    wanted = len(sample.input_ids)
    if receipt.rows != wanted:
        hint = " (prefix cache on?)" if receipt.rows < wanted else ""
        return Wrong("row_count", f"engine returned {receipt.rows} rows, wanted {wanted}{hint}")
    position = 0
    for start, end in receipt.spans:
        if start != position or end <= start:
            what = "overlap" if start < position else "leave a gap"
            return Wrong("spans", f"spans {list(receipt.spans)} {what} at row {position}")
        position = end
    if position != wanted:
        return Wrong("spans", f"spans {list(receipt.spans)} end at {position}, wanted {wanted}")
    if receipt.ids_sha256 != ids_digest(sample.input_ids):
        return Wrong("other_ids", "the engine ran other token ids than the sample has")
    if receipt.dtype != "bfloat16":
        return Wrong("dtype", f"states in {receipt.dtype}, wanted bfloat16")
    if tuple(receipt.taps) != tuple(taps):
        return Wrong("taps", f"captured layers {list(receipt.taps)}, wanted {list(taps)}")
    return None


def check_rows(
    tensors: dict[str, Tensor], sample: Sample, *, hidden_size: int, taps: int
) -> Wrong | None:
    """Compares a staging file's tensors with the sample: names, shapes, ids, finite, not zero."""
    names = [*(f"tap_{number}" for number in range(taps)), "final"]
    if set(tensors) != {*names, "input_ids"}:
        return Wrong("tensors", f"file holds {sorted(tensors)}, wanted {sorted(names)}, input_ids")
    if not torch.equal(tensors["input_ids"], sample.input_ids):
        return Wrong("other_ids", "the file holds other token ids than the sample has")
    shape = [len(sample.input_ids), hidden_size]
    for name in names:
        tensor = tensors[name]
        if tensor.dtype != torch.bfloat16 or list(tensor.shape) != shape:
            return Wrong("shape", f"{name} {tensor.dtype} {list(tensor.shape)}, wanted {shape}")
        if not torch.isfinite(tensor).all():
            row = int((~torch.isfinite(tensor)).any(1).nonzero()[0])
            return Wrong("not_finite", f"{name} row {row} is not finite")
        zero = (tensor == 0).all(1)
        if zero.any():
            return Wrong("zero_row", f"{name} row {int(zero.nonzero()[0])} is all zero")
    return None


def collect(
    receipt: Receipt,
    sample: Sample,
    *,
    staging: Staging,
    taps: Sequence[int],
    hidden_size: int,
    timeout_seconds: float,
) -> dict[str, Tensor] | Wrong:
    """All checks of one receipt; gives the sample's rows for the shard, or what is wrong.

    The staging file is freed either way; its room only when the rows, a map of it, are let go.
    """
    try:
        wrong = check_receipt(receipt, sample, taps=taps)
        if wrong is not None:
            return wrong
        try:
            tensors = staging.read(receipt.file, timeout_seconds=timeout_seconds)
        except StagingFailed as error:
            return Wrong(error.reason, error.detail)
        except (TimeoutError, SafetensorError, OSError, ValueError) as error:
            return Wrong("file", f"{type(error).__name__}: {error}")
        wrong = check_rows(tensors, sample, hidden_size=hidden_size, taps=len(taps))
        return wrong or {**tensors, "supervised": sample.supervised}
    finally:
        staging.free(receipt.file)
