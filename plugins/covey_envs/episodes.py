"""Episodes: each sample of a call with its environment, as the sampler's responder.

Where the model ends a turn, its text goes to the environment, whose messages come back as tokens to append: the
difference of the chat template (`encode_turn`). What the model sampled is never encoded again, so the tokens
that are trained are those that were sampled. If the template renders earlier turns differently once others follow, as
some do with reasoning, the episode goes on with the turns as they were sampled, and a warning says so once; or, by
`envs.history`, as a branch with the history that the template renders, in which the next turn is sampled.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.errors import DataError, EpisodeError
from covey.losses.advantages import merge_ties
from covey.sampling.responder import NewBranch, Response, SamePrompt, Turn
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, Episode, FinishReason, Message, Prompt
from covey_envs.continuation import encode_turn, keeps_history, turn_with_call
from covey_envs.protocol import Environment, LateError, Step, checked_prompt, checked_step, pays_at_end
from covey_envs.schemas import Schema

if TYPE_CHECKING:
    from covey_envs.runner import EnvironmentRunner  # which makes the episodes

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

MUCH_WAITING = 0.3
"""Share of the slots' time in a rollout beyond which a warning says that they wait for environments."""


@dataclass
class _State:
    """One sample's environment and conversation, while it is sampled.

    Attributes:
        turn_was_cut: whether a limit of tokens ended the model's last turn.
        late: whether the environment failed because it took too long.
    """

    row: Mapping[str, Any]
    environment: Environment | None = None
    chat: Prompt = ""
    start: int = 0
    turn_was_cut: bool = False
    late: bool = False
    sequence: np.ndarray | None = None
    record: Episode = field(default_factory=Episode)


class Episodes:
    """Episodes of the samples of some rows: a `sampling.responder.Conversations`.

    Args:
        runner: makes and calls the environments.
        rows: data rows.
        samples: number of episodes per row.
        tokenizer: the model's.

    Attributes:
        requests: samples that begin with the same prompt: all of a row, unless `begin` finds different ones and
            `envs.different_prompts` lets it group them.
    """

    pause_id: None = None
    is_async = True

    def __init__(
        self, runner: "EnvironmentRunner", rows: Sequence[Mapping[str, Any]], samples: int, tokenizer: Tokenizer
    ):
        self._runner, self._tokenizer = runner, tokenizer
        self.turn_limit, self.max_num_seqs = runner.config.max_turn_tokens, runner.config.max_live
        self.answer_lag = runner.answer_lag
        self._states = [[_State(row) for _ in range(samples)] for row in rows]
        self.requests = [SamePrompt(row, 0, samples) for row in range(len(rows))]
        self._rewrites = runner.config.history == "template"
        self._warned = False
        self._waited = 0.0
        runner.prepare(tokenizer.chat_template)
        self._tools = runner.tools

    def begin(self) -> list[Prompt]:
        """Make and reset all environments; return the prompt of each of `requests`.

        Raises:
            EpisodeError: an environment failed and the policy is to raise, or those of a row gave different prompts and
                may not be grouped.
        """
        futures = [[self._runner.submit(self._reset(state)) for state in group] for group in self._states]
        prompts = [[future.result() for future in group] for group in futures]
        by_prompt = [
            (number, *group)
            for number, states in enumerate(self._states)
            for group in self._group(number, prompts[number], states)
        ]
        for _, prompt, states in by_prompt:
            for state in states:
                state.chat, state.sequence = prompt, self.encode_prompt(prompt) if self._rewrites else None
        self._states, self.requests = [states for _, _, states in by_prompt], []
        for row, _, states in by_prompt:
            first = sum(request.size for request in self.requests if request.row == row)
            self.requests.append(SamePrompt(row, first, len(states)))
        return [prompt for _, prompt, _ in by_prompt]

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """Encode a prompt that `begin` returned to int32 [n]; the chat template lists the tools, if there are any."""
        return self._tokenizer.encode_prompt(prompt, tools=self._schemas)

    def answer(self, turn: Turn) -> "Future[Response]":
        """Return the future response of the environment to a turn of the model."""
        return self._runner.submit(self._respond(self._states[turn.sample.request][turn.sample.number], turn))

    def completion(self, request: int, number: int, completion: Completion) -> Completion:
        """Return a finished completion with its episode, how that ended, and its text: with tools, the model's last
        turn, which is the answer behind all calls and results.
        """
        state = self._states[request][number]
        branches = (completion.branches or ()) if self._rewrites else None
        ended = replace(completion, episode=state.record, finish=self._finish(state), branches=branches)
        if self._tools:
            text = next((m["content"] for m in reversed(state.record.messages) if m["role"] == "assistant"), "")
            return replace(ended, text=text)
        return ended.with_text(self._tokenizer.decode)

    def _finish(self, state: _State) -> FinishReason:
        """Return the reason why an episode ended."""
        record = state.record
        if record.failure:
            return FinishReason.TIME if state.late else FinishReason.FAILURE
        if state.turn_was_cut:
            return FinishReason.LENGTH
        if record.done:
            return FinishReason.STOP
        return FinishReason.TURNS if len(record.turn_ends) >= self._runner.config.max_turns else FinishReason.LENGTH

    def warn_of_waiting(self, slots: int, seconds: float, chunk_seconds: float) -> None:
        """Warn, once in a run, if the episodes of a rollout waited much for their environments and `envs.max_live` or
        `envs.answer_lag` would help.

        Args:
            slots: number of the sampler's slots.
            seconds: time that the sampler took.
            chunk_seconds: time that it took for a chunk of decode steps.
        """
        turns = sum(len(state.record.turn_ends) for states in self._states for state in states)
        under_way = max(slots, self.max_num_seqs or 0)
        share, per_turn = self._waited / max(under_way * seconds, 1e-9), self._waited / max(turns, 1)
        advice = self._more_live(slots, share) + self._longer_lag(per_turn, chunk_seconds)
        if self._runner.warned_of_waiting or share < MUCH_WAITING or not advice:
            return
        self._runner.warned_of_waiting = True
        log.warning(
            f"the environment {self._runner.name!r} took {per_turn:.2g} s to answer a turn, and the {under_way} "
            f"episodes under way waited for it in {share:.0%} of the rollout's time; {'; '.join(advice)}"
        )

    def _more_live(self, slots: int, share: float) -> list[str]:
        """Return the advice to begin more episodes than there are slots, if there are any and nobody has set it."""
        samples = sum(map(len, self._states))
        if not samples > slots >= (self.max_num_seqs or 0):
            return []
        live = useful_live(slots, min(samples, slots + self._runner.config.concurrency), share)
        caches = f"with memory for the caches of {live - slots} more"
        return [f"envs.max_live: {live} lets {live} episodes be under way, {caches}"]

    def _longer_lag(self, per_turn: float, chunk_seconds: float) -> list[str]:
        """Return the advice to take answers so late that they are there, if all slots wait for them now."""
        if self.answer_lag is None or per_turn <= (self.answer_lag + 1) * chunk_seconds or not chunk_seconds:
            return []
        lag = math.ceil(per_turn / chunk_seconds)
        return [f"envs.answer_lag: {lag} lets the others decode {lag} chunks before all wait for an answer"]

    async def _reset(self, state: _State) -> Prompt | None:
        """Make and reset the environment of a sample; return its prompt, or None when it failed."""
        limit, began = self._runner.config.max_characters, time.perf_counter()
        try:
            state.environment = await self._runner.make(state.row)
            prompt = checked_prompt(await self._runner.call("reset", state.environment.reset), limit)
        except EpisodeError as error:
            await self._close(state)
            self._fail(state, error)
            prompt = None
        state.record = replace(state.record, seconds=time.perf_counter() - began)
        return prompt

    def _group(
        self, number: int, prompts: Sequence[Prompt | None], states: Sequence[_State]
    ) -> list[tuple[Prompt, list[_State]]]:
        """Group the samples of a row by prompt. One whose environment failed goes with the first prompt, which is the
        row's own if all failed.
        """
        known = [prompt for prompt in prompts if prompt is not None] or [states[0].row["prompt"]]
        different = [prompt for index, prompt in enumerate(known) if prompt not in known[:index]]
        if len(different) > 1 and self._runner.config.different_prompts == "refuse":
            raise EpisodeError(
                f"the environments {self._runner.name!r} of row {number} of a step gave different prompts",
                want="one prompt for all samples of a row, which are compared with each other",
                fix="draw what differs between rows from the row, not at random; or envs.different_prompts: group, "
                "which compares samples with equal prompts",
            )
        groups: list[list[_State]] = [[] for _ in different]
        for prompt, state in zip(prompts, states, strict=True):
            groups[0 if prompt is None else different.index(prompt)].append(state)
        return list(zip(different, groups, strict=True))

    async def _respond(self, state: _State, turn: Turn) -> Response:
        """Give the model's turn to the environment; return the tokens to append, or None at the end of the episode."""
        if state.record.failure:
            return None
        tokens = turn.tokens[state.start :]
        state.turn_was_cut = turn.ending.reason.was_cut
        text_tokens = tokens[:-1] if turn.ending.reason is FinishReason.STOP else tokens
        reply = turn.ending.visible(self._tokenizer.decode(text_tokens))
        ends, began = (*state.record.turn_ends, len(turn.tokens)), time.perf_counter()
        message: Message = {"role": "assistant", "content": reply}
        state.record = replace(state.record, turn_ends=ends, messages=(*state.record.messages, message))
        try:
            assert state.environment is not None, "an episode without a failure has an environment"
            # A family may mark its calls by control tokens, which are left out of a reply otherwise.
            raw = self._tokenizer.decode(text_tokens, skip_special=False) if self._tools else ""
            text = turn.ending.visible(raw) if self._tools else reply
            result = await self._runner.call("step", state.environment.step, text)
            step = checked_step(result, not isinstance(state.chat, str), self._runner.config.max_characters)
            response = self._append(state, turn, reply, step)
            if self._runner.scores:
                await self._pay(state, step, over=response is None)
        except (EpisodeError, DataError) as error:
            await self._close(state)  # first, because the policy may be to raise
            self._fail(state, error if isinstance(error, EpisodeError) else _unusable(error))
            response = None
        seconds = time.perf_counter() - began
        self._waited += seconds
        state.record = replace(state.record, seconds=state.record.seconds + seconds)
        if response is None:
            await self._close(state)
        return response

    def _append(self, state: _State, turn: Turn, reply: str, step: Step) -> Response:
        """Record the environment's response, and return it as tokens; None at the end of the episode."""
        record, messages = state.record, step.messages
        if isinstance(messages, str):
            messages = [{"role": "environment", "content": messages}]
        state.record = replace(
            record,
            messages=(*record.messages, *(message for message in messages if message["content"])),
            turn_rewards=(*record.turn_rewards, step.reward or 0.0),
            done=step.done,
            tool_calls=record.tool_calls + _count(step, "tool_calls"),
            tool_failures=record.tool_failures + _count(step, "tool_failures"),
            numbers={**record.numbers, **self._runner.own_numbers.select(step.info)},
        )
        if step.done or len(record.turn_ends) >= self._runner.config.max_turns or not turn.remaining_tokens:
            return None
        calls = self._tools is not None and self._tools.format.turn_has_calls
        message = turn_with_call("call") if calls else {"role": "assistant", "content": reply}
        response = self._continue(state, turn, message, step.messages, calls)
        count = len(response.tokens if isinstance(response, NewBranch) else response)
        if count >= turn.remaining_tokens:
            return None
        state.chat, state.start = _continue_chat(state.chat, message, step.messages), len(turn.tokens) + count
        return response

    async def _pay(self, state: _State, step: Step, over: bool) -> None:
        """Add up the rewards of an episode, at its end with what the environment pays then. Where nothing was paid, an
        episode that a limit ends is not scored.
        """
        *before, last = state.record.turn_rewards
        paid, rest = step.done or step.reward is not None or state.record.reward is not None, None
        if over and pays_at_end(state.environment, step):
            rest = await self._runner.ask_reward(state.environment)
            paid = rest is not None
        rewards = (*before, last + (rest or 0.0))
        [total] = merge_ties(np.array([sum(rewards)]), np.array([sum(map(abs, rewards))]))
        state.record = replace(state.record, turn_rewards=rewards, reward=float(total) if paid else None)
        if over and not paid and not self._runner.warned_of_unscored:
            self._runner.warned_of_unscored = True
            log.warning(
                f"a limit ended an episode of the environment {self._runner.name!r} before it paid anything; such "
                "episodes are not scored. A method get_reward can say what they earn; so can Step(..., reward=0.0)"
            )

    def _continue(
        self, state: _State, turn: Turn, message: Message, messages: Prompt, calls: bool
    ) -> np.ndarray | NewBranch:
        """Continue a sequence: return the tokens to append, or the branch where the template rewrites its history."""
        last, tools = int(turn.tokens[-1]), self._schemas
        response = encode_turn(self._tokenizer, state.chat, messages, last, tools=tools, turn_has_calls=calls)
        if calls:  # the template writes such a turn anew from its calls, which are not kept
            return response
        if state.sequence is None:
            if not turn.sample.number:  # rendering takes time, and the samples of a row are alike
                self._warn_of_rewritten_history(state.chat, message["content"], messages)
            return response
        before = np.concatenate([state.sequence, turn.tokens[state.start :]])
        state.sequence = np.concatenate([before, response])
        if keeps_history(self._tokenizer, state.chat, message["content"], messages, tools=tools):
            return response
        state.sequence = self.encode_prompt(_continue_chat(state.chat, message, messages))
        kept = min(common_prefix(before, state.sequence), len(before) - 1, len(state.sequence) - 1)
        return NewBranch(kept, state.sequence[kept:])

    def _fail(self, state: _State, error: EpisodeError) -> None:
        """End an episode by the policy for failures."""
        reward, state.late = self._runner.accept(error), isinstance(error, LateError)
        state.record = replace(state.record, failure=error.what, reward=reward)

    async def _close(self, state: _State) -> None:
        """Close the environment, if it can be closed."""
        environment, state.environment = state.environment, None
        await self._runner.close_environment(environment)

    @property
    def _schemas(self) -> Sequence[Schema]:
        """Schemas of the tools that the chat template lists."""
        return self._tools.template_schemas if self._tools else ()

    def _warn_of_rewritten_history(self, chat: Prompt, reply: str, messages: Prompt) -> None:
        if self._warned or keeps_history(self._tokenizer, chat, reply, messages, tools=self._schemas):
            return
        self._warned = True
        log.warning(
            "the model's chat template renders earlier turns of an episode differently once others follow (it may drop"
            " reasoning); episodes go on with the turns as they were sampled. With envs.history: template they go on as"
            " the template renders them"
        )


def useful_live(slots: int, most: int, share: float) -> int:
    """Return the number of episodes that keep the slots busy, at most `most`, if with as many as slots each waits for
    this share of the time (Little's law).

    >>> useful_live(16, 192, 0.75), useful_live(16, 20, 0.75), useful_live(16, 192, 0.0)
    (64, 20, 17)
    """
    return max(slots + 1, min(most, math.ceil(slots / max(1 - share, 1e-9))))


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Count the equal tokens at the beginning of two sequences.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])), common_prefix(np.array([1]), np.array([1, 2]))
    (2, 1)
    """
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _continue_chat(chat: Prompt, turn: Message, messages: Prompt) -> Prompt:
    return chat if isinstance(chat, str) or isinstance(messages, str) else [*chat, turn, *messages]


def _count(step: Step, name: str) -> int:
    """Return the count of this name in `Step.info`, or 0."""
    value = step.info.get(name, 0) if isinstance(step.info, Mapping) else 0
    return value if isinstance(value, int) and value >= 0 else 0


def _unusable(error: DataError) -> EpisodeError:
    """Make the error for messages that the chat template or the tokenizer refuses."""
    return EpisodeError(f"returned messages from step that cannot be used: {error.what}", want=error.want)
