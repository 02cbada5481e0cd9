"""The training-time test: weighted loss of a drafter over one pack, and its metrics.

Labels (B13): row t at step k is asked for ids[t + 2 + k]; it counts when that label is supervised
and lies in the same document. `supervised` is therefore never shifted by the caller.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.draft.attention import attend
from pipeline.draft.chain import ChainPlan, asked_rows, plan_chains
from pipeline.draft.errors import PackError
from pipeline.draft.loss import TEACHER_ROWS, LossInputs, LossKind, head_loss, plan_chunks
from pipeline.draft.model import Drafter
from pipeline.draft.rotary import rotate
from pipeline.draft.vocabulary import DraftVocabulary


@dataclasses.dataclass(frozen=True)
class Pack:
    """Whole samples laid end to end, T rows.

    ids int64 [T]; taps [T, 3 * Ht], low to high; final [T, Ht], after the target's final norm;
    supervised bool [T], by token; document int64 [T], rising from 0; position int64 [T], from 0 in
    each document. All on one device; taps and final in any float dtype.
    """

    ids: Tensor
    taps: Tensor
    final: Tensor
    supervised: Tensor
    document: Tensor
    position: Tensor


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Sums per TTT step, each float64 [K] on the CPU; add packs (or ranks) with `+`.

    count: supervised (row, step) pairs. correct: drafter's argmax in target ids is the label.
    overlap: sum over pairs of sum-min(p, q). outside: labels outside the draft vocabulary.
    loss: unweighted loss sum.
    """

    count: Tensor
    correct: Tensor
    overlap: Tensor
    outside: Tensor
    loss: Tensor

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        return StepMetrics.from_tensor(self.to_tensor() + other.to_tensor())

    @classmethod
    def zeros(cls, steps: int) -> "StepMetrics":
        """Nothing counted yet, for `steps` TTT steps."""
        return cls.from_tensor(torch.zeros(5, steps, dtype=torch.float64))

    def to_tensor(self) -> Tensor:
        """float64 [5, K], in field order: one buffer to all-reduce."""
        return torch.stack([self.count, self.correct, self.overlap, self.outside, self.loss])

    @classmethod
    def from_tensor(cls, rows: Tensor) -> "StepMetrics":
        """Inverse of `to_tensor`."""
        return cls(*rows.unbind(0))


@dataclasses.dataclass(frozen=True)
class PackLoss:
    """loss: scalar weighted SUM with its graph. weight: sum of the weights. metrics: sums."""

    loss: Tensor
    weight: float
    metrics: StepMetrics


def pack_weight(supervised: Tensor, document: Tensor, *, steps: int, decay: float) -> float:
    """Sum of decay**k over asked (row, step) pairs, from masks alone: what a loss is divided by.

    supervised bool [T], document int64 [T].
    """
    return sum(decay**k * int(asked_rows(supervised, document, step=k).sum()) for k in range(steps))


def pack_loss(
    model: Drafter,
    pack: Pack,
    *,
    embedding: Tensor,
    teacher_head: Tensor,
    draft_vocabulary: DraftVocabulary,
    steps: int,
    decay: float,
    kind: LossKind = "kl",
) -> PackLoss:
    """Weighted loss sum of `model` over `pack`, exact in the chain-sparse form.

    embedding [V, H]: the target's, frozen. teacher_head [D, H]: the target head's rows of the draft
    vocabulary. The model's parameter dtype is the compute dtype (pack, embedding and teacher_head
    are cast to it, so pass them in it where that matters); losses are float32 or wider.
    steps: K. decay: weight of step k is decay**k. Under `torch.no_grad` no gradient is made.
    A pack without a supervised label gives loss 0 with zero gradients. Errors: PackError.
    """
    _check(model, pack, embedding, teacher_head, draft_vocabulary)
    plan = plan_chains(pack.supervised, pack.document, steps=steps)
    weight = pack_weight(pack.supervised, pack.document, steps=steps, decay=decay)
    if not plan.steps:
        # Tied to every parameter, so that backward gives zeros and not a missing gradient.
        wide = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
        nothing = torch.stack([p.flatten()[0].to(wide) * 0 for p in model.parameters()]).sum()
        return PackLoss(nothing, weight, StepMetrics.zeros(steps))
    states = _run_steps(model, pack, plan, embedding=embedding)
    inputs, asked, outside = _loss_inputs(
        pack,
        plan,
        teacher_head=teacher_head.to(states[0].dtype),
        vocabulary=draft_vocabulary,
        decay=decay,
        kind=kind,
    )
    loss, sums = head_loss(model.norm(torch.cat(states)), model.lm_head.weight, inputs)
    unweighted, correct, overlap = sums.cpu()
    table = torch.zeros(5, steps, dtype=torch.float64)
    table[:, : len(plan.steps)] = torch.stack([asked, correct, overlap, outside, unweighted])
    return PackLoss(loss, weight, StepMetrics.from_tensor(table))


def _run_steps(model: Drafter, pack: Pack, plan: ChainPlan, *, embedding: Tensor) -> list[Tensor]:
    """Layer outputs [A_k, H] of each step's asked rows, before the final norm."""
    config, layer, dtype = model.config, model.midlayer, model.lm_head.weight.dtype
    H, Q, d = config.hidden_size, config.query_width, config.head_dim
    attention = layer.self_attn
    weight = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    by_embed, by_hidden = weight[:, :H], weight[:, H:].contiguous()

    def embedded(rows: Tensor) -> Tensor:
        normed: Tensor = layer.input_layernorm(embedding[pack.ids[rows]].to(dtype))
        return normed

    # The embedding half of (row, step k) is that of token row + 1 + k: projected once, read often.
    embed_query = functional.linear(embedded(plan.query_tokens), by_embed[:Q])
    embed_key = functional.linear(embedded(plan.key_tokens), by_embed[Q:])

    fused = model.fuse(pack.taps[plan.keys].to(dtype))
    normed = layer.hidden_norm(fused)
    key_value = functional.linear(normed, by_hidden[Q:]) + embed_key[plan.key_token]
    key, value = key_value.view(-1, 2 * config.kv_heads, d).chunk(2, 1)
    key = rotate(key, model.rotary(pack.position[plan.keys]))

    at_keys = torch.searchsorted(plan.keys, plan.steps[0].rows)
    hidden, normed, states = fused[at_keys], normed[at_keys], []
    own = hidden.new_empty(2, 0, hidden.shape[0], config.kv_heads, d)
    for k, step in enumerate(plan.steps):
        if step.kept is not None:
            hidden, own = hidden[step.kept], own[:, :, step.kept]
        table = model.rotary(pack.position[step.rows] + k)
        if k == 0:
            query = functional.linear(normed, by_hidden[:Q])
        else:
            mixed = functional.linear(layer.hidden_norm(hidden), by_hidden)
            query = mixed[:, :Q]
            fresh = (mixed[:, Q:] + embed_key[step.key_token]).view(-1, 2, config.kv_heads, d)
            pair = torch.stack([rotate(fresh[:, 0], table), fresh[:, 1]])
            own = torch.cat([own, pair[:, None]], 1)  # [2, k, R, kv_heads, d]
        query = rotate((query + embed_query[step.query_token]).view(-1, config.heads, d), table)
        attended = attend(query, key, value, own_key=own[0], own_value=own[1], plan=step)
        output = model.finish(hidden, attended)
        states.append(output if step.asked is None else output[step.asked])
        hidden = model.recurrent(output)
    return states


def _loss_inputs(
    pack: Pack,
    plan: ChainPlan,
    *,
    teacher_head: Tensor,
    vocabulary: DraftVocabulary,
    decay: float,
    kind: LossKind,
) -> tuple[LossInputs, Tensor, Tensor]:
    """Teachers and labels of the asked rows; counts of asked rows and of labels outside, [K]."""
    rows = [step.rows if step.asked is None else step.rows[step.asked] for step in plan.steps]
    judges = [asked + 1 + k for k, asked in enumerate(rows)]  # pack rows
    marked = torch.zeros(pack.ids.shape[0], dtype=torch.bool, device=pack.ids.device)
    marked[torch.cat(judges)] = True
    teachers = marked.nonzero().flatten()
    judges = [torch.searchsorted(teachers, judge) for judge in judges]
    draft_ids = vocabulary.draft_ids().to(pack.ids.device)
    labels = [draft_ids[pack.ids[asked + 2 + k]] for k, asked in enumerate(rows)]
    inputs = LossInputs(
        teacher=pack.final[teachers].to(teacher_head.dtype),
        teacher_head=teacher_head,
        chunks=plan_chunks(judges, teachers.shape[0], rows=TEACHER_ROWS[_kind_of(pack.ids)]),
        judge=torch.cat(judges),
        label=torch.cat(labels),
        weights=tuple(decay**k for k in range(len(rows))),
        kind=kind,
    )
    asked = torch.tensor([label.shape[0] for label in labels], dtype=torch.float64)
    outside = torch.stack([(label < 0).sum() for label in labels]).cpu().to(torch.float64)
    return inputs, asked, outside


def _kind_of(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def _check(
    model: Drafter, pack: Pack, embedding: Tensor, teacher_head: Tensor, vocabulary: DraftVocabulary
) -> None:
    """PackError unless all sizes fit the drafter's config."""
    config, T = model.config, pack.ids.shape[0]
    H, D = config.hidden_size, config.draft_vocabulary_size
    V = config.target_vocabulary_size
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "ids": (pack.ids, (T,)),
        "taps": (pack.taps, (T, len(config.taps) * H)),
        "final": (pack.final, (T, H)),
        "supervised": (pack.supervised, (T,)),
        "document": (pack.document, (T,)),
        "position": (pack.position, (T,)),
        "embedding": (embedding, (embedding.shape[0], H)),
        "teacher_head": (teacher_head, (D, H)),
        "d2t": (vocabulary.d2t, (D,)),
        "t2d": (vocabulary.t2d, (V,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise PackError(
                f"pack of {T} rows with {name} {list(tensor.shape)}",
                wanted=f"{list(shape)}",
                next_step="make the pack from states of the drafter's own target: make extract",
            )
