"""A conversation as token ids and the mask of what the assistant wrote, proven by rendering.

The text is the target's own template's work (apply_chat_template, sandboxed); it is tokenised as
one piece. Where a turn begins and ends in it is never looked for: it is derived from renderings of
parts of the same conversation, and a turn for which no derivation holds refuses the conversation.

Two derivations, the second tried where the first fails:

1. *By prefix*. P = the turns before, with the generation prompt; R = the turns up to this one.
   If full starts with R and R starts with P, the turn is full[len(P):len(R)], unless a role header
   may be in it: the generation prompt is empty, or the turn names its role and the answer does not.
2. *By substitution*, for templates that show an old turn otherwise than the newest one (reasoning
   stripped, empty reasoning added), or whose generation prompt does not hold the whole header. The
   answer is replaced by two probes; the two renderings may differ in nothing but the probe, and
   what stands in its place in full must be text out of the answer. Where the turn ends is read from
   the same probes with nothing behind them.

What the template writes between the generation prompt and the end of the turn (an empty reasoning
block, say) counts as written by the assistant: after its prompt, the target has to produce it. A
role header never does.

Character positions become token positions by tokenising the pieces between them: their ids must be
the ids of the whole, or (for tokenizers to which the beginning of a text means something) the ids
of every prefix must begin it. No offsets are used: slow tokenizers have none, and fast ones may
leave out spaces.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from pipeline.conversations.bounds import within
from pipeline.conversations.errors import RendererError
from pipeline.conversations.normalise import Conversation, Skip
from pipeline.conversations.template import render_template

# What a tokenizer raises on data that it was not written for.
_DATA_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
# No first or last character in common, so the probe's edges are where two renderings differ.
_PROBES = ("k7v", "w3h")
MOST_TURNS = 1000  # each answer is rendered with all turns before it, so time grows with the square
MOST_CHARACTERS = 16 << 20  # a tokenizer wants some hundred bytes of memory for each
SECONDS = 60.0
"""Most time that a tokenizer may take for a text, and a second more for this many characters:"""
_CHARACTERS_A_SECOND = 50_000  # a tenth of what slow ones do
# Not watched: a match is given up after a second, and to ask another thread costs 50 microseconds.
_SHORT_CHARACTERS = 2000
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Rendered:
    """A conversation for the target. Both lists have n entries.

    input_ids: token ids; supervised: true on what the assistant wrote, its end-of-turn included;
    cut_to_length: ids beyond max_length were left off.
    """

    input_ids: list[int]
    supervised: list[bool]
    cut_to_length: bool


class Renderer:
    """Renders conversations with one tokenizer. Holds no state between conversations."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_of_turn_ids: frozenset[int],
        max_length: int,
        too_long: Literal["cut", "skip"],
    ) -> None:
        """Refuses (RendererError) a tokenizer without a template and impossible values.

        tokenizer: a transformers tokenizer, fast or slow; end_of_turn_ids: the ids with which the
        target ends a turn; max_length: tokens; too_long: what happens to a longer conversation.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise RendererError(
                "the target's tokenizer has no chat template",
                wanted="chat_template.jinja, or chat_template in tokenizer_config.json",
                next_step="put the target's own template into its folder",
            )
        if not end_of_turn_ids:
            raise RendererError(
                "no end-of-turn token id is known for the target",
                wanted="eos_token_id in generation_config.json or config.json",
                next_step="complete the target's folder",
            )
        if max_length < 1 or too_long not in ("cut", "skip"):
            raise RendererError(
                f"max_length {max_length}, too_long {too_long!r}",
                wanted="max_length of at least 1 and too_long one of cut, skip",
                next_step="correct the profile",
            )
        self._tokenizer = tokenizer
        self._ends = end_of_turn_ids
        self._max_length = max_length
        self._too_long = too_long
        self._markers = _special_texts(tokenizer, end_of_turn_ids)

    def sample(self, conversation: Conversation) -> Rendered:
        """The ids of the whole conversation and the mask of its assistant turns. Raises Skip."""
        messages = conversation.messages
        if len(messages) > MOST_TURNS:
            raise Skip("too_many_turns", f"{len(messages)} turns, at most {MOST_TURNS}")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in answers:
            self._refuse_markers(messages[i], turn=i)
        full = self._render(messages, conversation.tools)
        ids = self._encode(full)
        if len(ids) > self._max_length and self._too_long == "skip":
            raise Skip("too_long", f"{len(ids)} tokens, max_length {self._max_length}")
        regions = [self._region(full, conversation, turn=i) for i in answers]
        supervised = [False] * len(ids)
        for i, (start, end) in zip(answers, self._token_regions(full, ids, regions), strict=True):
            last = self._end_of_turn(ids, start, end, turn=i)
            if last == start:
                raise Skip("empty_answer", f"turn {i}: the template renders nothing of the answer")
            if i == answers[-1] and conversation.cut:
                # The limit ended this answer, not the target: neither the end-of-turn nor
                # anything behind it was ever written.
                ids, supervised, last = ids[:last], supervised[:last], last - 1
            supervised[start : last + 1] = [True] * (last + 1 - start)
        return self._fit(ids, supervised)

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> list[int]:
        """The ids of messages up to where the assistant begins to answer them. Raises Skip."""
        return self._encode(self._render(messages, tools, generate=True))

    def _fit(self, ids: list[int], supervised: list[bool]) -> Rendered:
        cut = len(ids) > self._max_length
        ids, supervised = ids[: self._max_length], supervised[: self._max_length]
        if not any(supervised):
            raise Skip("nothing_supervised", f"no answer within the first {len(ids)} tokens")
        return Rendered(input_ids=ids, supervised=supervised, cut_to_length=cut)

    def _refuse_markers(self, message: dict[str, Any], *, turn: int) -> None:
        # In an answer such a text would become the control token itself: an end that is none.
        for text in _strings(message):
            for marker in self._markers:
                if marker in text:
                    raise Skip("special_token_in_answer", f"turn {turn} holds the text {marker!r}")

    def _region(self, full: str, conversation: Conversation, *, turn: int) -> tuple[int, int]:
        """Characters [start, end) of an assistant turn in full, proven; raises Skip."""
        messages, tools = conversation.messages, conversation.tools
        newest = turn + 1 == len(messages)
        upto = full if newest else self._render(messages[: turn + 1], tools)
        if full.startswith(upto):
            prompt = self._render(messages[:turn], tools, generate=True)
            if upto.startswith(prompt) and self._no_header(
                upto[len(prompt) :], conversation, turn=turn, prompt=prompt
            ):
                return len(prompt), len(upto)
        region = self._region_by_substitution(full, conversation, turn=turn)
        if region is None:
            raise Skip("boundary_unproven", f"turn {turn}: the template renders it by its context")
        return region

    def _no_header(self, text: str, conversation: Conversation, *, turn: int, prompt: str) -> bool:
        """Whether the text of a turn behind its prompt surely begins behind the role header."""
        answer = conversation.messages[turn]
        said = answer["content"].strip()
        at = text.rfind(said) if said else -1
        if at >= 0 and not text[:at].strip():
            return True  # nothing but the answer itself
        if prompt == self._render(conversation.messages[:turn], conversation.tools):
            return False
        own = [value for key, value in answer.items() if key != "role"]
        return _mentions(answer["role"], [text]) <= _mentions(answer["role"], _strings(own))

    def _region_by_substitution(
        self, full: str, conversation: Conversation, *, turn: int
    ) -> tuple[int, int] | None:
        messages, tools = list(conversation.messages), conversation.tools
        answer = messages[turn]
        bare = {key: value for key, value in answer.items() if key not in _REASONING}
        probed = [{**bare, "content": probe} for probe in _PROBES]
        behind = messages[turn + 1 :]
        whole = _around([self._render([*messages[:turn], m, *behind], tools) for m in probed])
        alone = _around([self._render([*messages[:turn], m], tools) for m in probed])
        if whole is None or alone is None:
            return None
        before, after = whole
        start, end = len(before), len(full) - len(after)
        tail = alone[1]
        if start > end or not (full.startswith(before) and full.endswith(after)):
            return None
        # What stands in the probe's place must be the answer's own text, and the turn's end the
        # same whether or not turns follow.
        if full[start:end].strip() not in answer["content"] or not after.startswith(tail):
            return None
        return start, end + len(tail)

    def _token_regions(
        self, full: str, ids: list[int], regions: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Regions in tokens for regions in characters, proven; raises Skip."""
        flat = [place for region in regions for place in region]
        if any(a > b for a, b in pairwise(flat)):
            raise Skip("boundary_unproven", "assistant turns overlap in the rendered text")
        cuts = sorted({0, *flat, len(full)})
        pieces = [self._encode(full[a:b]) for a, b in pairwise(cuts)]
        if [token for piece in pieces for token in piece] == ids:
            at = dict(zip(cuts, accumulate(map(len, pieces), initial=0), strict=True))
        else:
            at = {cut: self._prefix_length(full[:cut], ids) for cut in cuts}
        return [(at[start], at[end]) for start, end in regions]

    def _prefix_length(self, text: str, ids: list[int]) -> int:
        prefix = self._encode(text)
        if ids[: len(prefix)] != prefix:
            raise Skip("boundary_unproven", f"a token lies across character {len(text)}")
        return len(prefix)

    def _end_of_turn(self, ids: list[int], start: int, end: int, *, turn: int) -> int:
        """The position of the last end-of-turn id in [start, end); raises Skip."""
        last = next((t for t in range(end - 1, start - 1, -1) if ids[t] in self._ends), None)
        if last is None:
            raise Skip(
                "no_end_of_turn",
                f"turn {turn}: none of {sorted(self._ends)} among its tokens; target.end_of_turn "
                "names further ones",
            )
        rest = self._tokenizer.decode(ids[last + 1 : end]) if last + 1 < end else ""
        if rest.strip():
            raise Skip("boundary_unproven", f"turn {turn}: {rest!r} behind its end-of-turn")
        return last

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        *,
        generate: bool = False,
    ) -> str:
        try:
            text = render_template(self._tokenizer, messages, tools=tools, generate=generate)
        except RendererError:
            raise
        # Templates are programs: they divide by zero, and count beyond what the sandbox allows.
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise Skip("template_refused", f"{len(messages)} turns: {detail}") from error
        if not isinstance(text, str):
            raise _unexpected("apply_chat_template(tokenize=False)", text, wanted="a string")
        if len(text) > MOST_CHARACTERS:
            raise Skip("too_much_text", f"{len(text)} characters, at most {MOST_CHARACTERS}")
        return text

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, from a \ud83d in JSON
            raise Skip("bad_text", f"not encodable: {error.reason}") from error
        # transformers 4 and 5 both answer a mapping here; a template call with tokenize=True
        # answers a list in one and a mapping in the other, so that is never used.
        try:
            if len(text) <= _SHORT_CHARACTERS:
                ids = self._ids_of(text)
            else:
                seconds = SECONDS + len(text) / _CHARACTERS_A_SECOND
                ids = within(seconds, lambda: self._ids_of(text))
        except TimeoutError as error:
            raise RendererError(
                f"the tokenizer takes more than {SECONDS:.0f} s for {len(text)} characters",
                wanted="one whose regular expressions come to an end",
                next_step="see pre_tokenizer and normalizer in the target's tokenizer.json",
            ) from error
        except BaseException as error:
            # Rust's panics are not even an Exception: a regular expression out of the target's
            # folder that would try more ways than are allowed to it ends in one.
            if not isinstance(error, _DATA_FAILURES) and type(error).__name__ != "PanicException":
                raise
            raise Skip("tokenizer_refused", f"{type(error).__name__}: {error}") from error
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise _unexpected("tokenizer(text)['input_ids']", ids, wanted="a list of ints")
        return ids

    def _ids_of(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _around(renderings: list[str]) -> tuple[str, str] | None:
    """What stands before and behind the probe in two renderings that differ in nothing else."""
    one, other = renderings
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if start is None:
        return None
    ends = [start + len(probe) for probe in _PROBES]
    texts = [text[start:end] for text, end in zip(renderings, ends, strict=True)]
    if texts != list(_PROBES) or one[ends[0] :] != other[ends[1] :]:
        return None
    return one[:start], one[ends[0] :]


def _mentions(role: str, texts: Iterable[str]) -> int:
    return sum(text.casefold().count(role) for text in texts)


def _special_texts(tokenizer: Any, ends: Iterable[int]) -> tuple[str, ...]:
    """Texts that become control tokens wherever they stand."""
    added = dict(tokenizer.added_tokens_decoder)
    texts = {str(token) for i, token in added.items() if token.special or i in set(ends)}
    return tuple(sorted((texts | set(tokenizer.all_special_tokens)) - {""}))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _unexpected(call: str, found: object, *, wanted: str) -> RendererError:
    return RendererError(
        f"{call} gave a {type(found).__name__}",
        wanted=wanted,
        next_step="use the transformers version of the lock file",
    )
