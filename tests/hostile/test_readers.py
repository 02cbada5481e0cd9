"""Any file, however spoilt, is read or refused in words: found, wanted, next step.

The readers run in a process with bounded memory (`server.py`), so a crash, an abort, an endless
loop and an allocation of gigabytes all fail here. Derandomised: the same spoilt files every time.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hostile.bounded import Bounded
from tests.hostile.host import flat
from tests.hostile.mutate import (
    canonical_sha256,
    spoilt_bytes,
    spoilt_pickle,
    spoilt_safetensors,
    spoilt_text,
    spoilt_value,
    written,
)

EXAMPLES = 100
ENDS = ("crash", "died", "endless")

Spoil = Callable[[bytes], st.SearchStrategy[bytes]]


def as_json(whole: bytes) -> st.SearchStrategy[bytes]:
    return spoilt_value(json.loads(whole)).map(written)


def as_line(whole: bytes) -> st.SearchStrategy[bytes]:
    return as_json(whole).map(lambda line: line + b"\n")


def as_lines(whole: bytes) -> st.SearchStrategy[bytes]:
    """JSON lines, all in one value while they are spoilt."""
    lines = [json.loads(line) for line in whole.splitlines()]
    return spoilt_value(lines).map(
        lambda value: b"\n".join(map(written, value if isinstance(value, list) else [value]))
    )


def as_yaml(whole: bytes) -> st.SearchStrategy[bytes]:
    """Written as JSON, which is YAML too."""
    return spoilt_value(yaml.safe_load(whole)).map(written)


def as_sealed_json(whole: bytes) -> st.SearchStrategy[bytes]:
    """A manifest that was changed by somebody who knows how it is sealed."""

    def seal(value: Any) -> bytes:
        if isinstance(value, dict):
            body = {key: one for key, one in value.items() if key != "self_sha256"}
            value = {**body, "self_sha256": canonical_sha256(body)}
        return written(value)

    return spoilt_value(json.loads(whole)).map(seal)


def as_digested_json(whole: bytes) -> st.SearchStrategy[bytes]:
    """A checkpoint's state with the digests that its parts then have."""

    def digest(value: Any) -> bytes:
        if isinstance(value, dict):
            for part in ("data", "settings"):
                value[f"{part}_digest"] = canonical_sha256(value.get(part))
        return written(value)

    return spoilt_value(json.loads(whole)).map(digest)


@dataclass(frozen=True)
class Case:
    """reader: its name; file: beside the one that the reader is given, which is spoilt."""

    reader: str
    spoil: Spoil
    file: str = ""
    examples: int = EXAMPLES


CASES = {
    "reply": Case("reply", as_json),
    "answer": Case("answer", as_json),
    "nccl-winners": Case("nccl", as_json),
    "images": Case("images", as_json),
    "ready-host": Case("ready_host", as_yaml),
    "ready-host-bytes": Case("ready_host", spoilt_bytes),
    "profile": Case("profile", as_yaml),
    "profile-bytes": Case("profile", spoilt_bytes),
    "override": Case("override", spoilt_bytes),
    "answers": Case("answers", as_line),
    "prompts": Case("prompts", as_line),
    "conversation": Case("conversations", as_line),
    "conversation-bytes": Case("conversations", spoilt_bytes),
    "json": Case("json", spoilt_bytes),
    "shard-index": Case("prepared", as_json, "samples-00000.json"),
    "shard-bytes": Case("prepared", spoilt_bytes),
    "shard-header": Case("states", spoilt_safetensors),
    "states-index": Case("states", as_json, "states-00000.json"),
    "dataset": Case("states", as_json, "dataset.json"),
    "manifest": Case("manifest", as_sealed_json),
    "manifest-bytes": Case("manifest", spoilt_bytes),
    "marker": Case("marker", as_json),
    "checkpoint-state": Case("checkpoint", as_digested_json),
    "checkpoint-bytes": Case("checkpoint", spoilt_bytes),
    "target-config": Case("target", as_json),
    "target-config-model": Case("target_model", as_json, examples=30),
    "target-config-bytes": Case("target", spoilt_bytes),
    "target-generation-config": Case("target", as_json, "generation_config.json"),
    "target-weights": Case("target", spoilt_safetensors, "model.safetensors"),
    "tokenizer": Case("tokenizer", as_json),
    "tokenizer-bytes": Case("tokenizer", spoilt_bytes),
    "tokenizer-config": Case("tokenizer", as_json, "tokenizer_config.json"),
    "drafter-config": Case("drafter", as_json),
    "drafter-weights": Case("drafter", spoilt_safetensors, "model.safetensors"),
    "vocabulary": Case("vocabulary", spoilt_safetensors),
    "gguf": Case("gguf", spoilt_bytes),
    "staging-header": Case("staging", spoilt_safetensors),
    "staging-bytes": Case("staging", spoilt_bytes),
    "dump-bytes": Case("dump", spoilt_bytes, examples=40),
    "dump-pickle": Case("dump", spoilt_pickle, examples=40),
    "journal": Case("journal", spoilt_text, examples=50),
    "journal-bytes": Case("journal", spoilt_bytes, examples=50),
    "samples": Case("samples", as_line, examples=50),
    "metrics": Case("metrics", as_lines),
    "metrics-bytes": Case("metrics", spoilt_bytes, examples=50),
    "metrics-resumed": Case("metrics_resumed", as_lines, examples=50),
    "host-gpus": Case("host", as_json, examples=50),
    "host-docker": Case("host", as_json, "docker", examples=50),
    "host-daemon": Case("host", as_json, "etc-docker-daemon.json", examples=50),
    "host-nccl": Case("host", as_json, "etc-cleanslate-nccl.json", examples=50),
    **{
        f"host-{flat(name)}": Case("host", spoilt_text, flat(name), 30)
        for name in (
            "gpus",
            "nvidia-smi",
            "lspci",
            "dpkg-query",
            "getent",
            "dkms",
            "journalctl",
            "/proc/self/mounts",
            "/proc/self/limits",
            "/proc/driver/nvidia/version",
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_spoilt_file_is_read_or_refused_in_words(
    name: str, good: dict[str, Path], bounded: Bounded
) -> None:
    case = CASES[name]
    given_path = good[case.reader]
    spoilt = given_path.with_name(case.file) if case.file else given_path
    whole = spoilt.read_bytes()
    as_it_was = bounded.read(case.reader, given_path)
    assert as_it_was["kind"] == "read", as_it_was

    @settings(
        max_examples=case.examples, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate],  # a spoilt file needs no shrinking
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(case.spoil(whole))
    def spoil(data: bytes) -> None:
        spoilt.write_bytes(data)
        outcome = bounded.read(case.reader, given_path)
        assert outcome["kind"] not in ENDS, outcome.get("trace", outcome)
        if outcome["kind"] == "fault":
            assert all(part.strip() for part in outcome["parts"]), outcome

    spoil()


def test_a_checkpoint_of_somebody_who_knows_the_digests_is_refused_in_words(
    good: dict[str, Path], bounded: Bounded
) -> None:
    """Its weights are no safetensors, and the state says so truly."""
    state = good["checkpoint"]
    weights = state.with_name("model.safetensors")
    weights.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    value = json.loads(state.read_bytes())
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    value["files"]["model.safetensors"] = {"bytes": 10, "sha256": digest}
    state.write_text(json.dumps(value))
    outcome = bounded.read("checkpoint", state)
    assert (outcome["kind"], outcome.get("type")) == ("fault", "CheckpointError"), outcome
