"""Tokens after a sampled turn: the difference of two renderings by the chat template. What was sampled is never encoded
again.
"""

import json
from collections.abc import Sequence

import numpy as np

from covey.errors import DataError
from covey.text.chat_template import NEUTRAL, unused_mark
from covey.text.tokenizer import Tokenizer, ToolSchema, tools_variable
from covey.types import Message, Prompt


def encode_turn(
    tokenizer: Tokenizer,
    chat: Prompt,
    messages: Prompt,
    last: int,
    *,
    tools: Sequence[ToolSchema] = (),
    turn_has_calls: bool = False,
) -> np.ndarray:
    """Encode the continuation of a sampled turn to int32 [n]: the end of that turn, `messages`, and the beginning
    of the model's next turn.

    It is the difference of two renderings by the chat template, with a placeholder where the sampled turn stands:
    what the model sampled is never encoded again. Text is encoded as it is.

    Args:
        chat: the conversation before the sampled turn.
        messages: the messages after it; text if `chat` is text.
        last: last sampled token. If the template ends a turn with it, the result begins after it.
        tools: JSON Schemas of tools that the chat template lists.
        turn_has_calls: whether the placeholder is a tool call: some templates take a result only after a call.

    Raises:
        DataError: messages are malformed, the template refuses them or leaves out the sampled turn, or data become
            a control token and cannot be encoded as ordinary text.
    """
    if isinstance(chat, str) or isinstance(messages, str):
        if isinstance(chat, str) and isinstance(messages, str):
            return tokenizer.encode(messages)
        raise DataError("a chat is continued by text, or text by chat messages", want="one form throughout")
    mark = unused_mark([*chat, *messages])
    placeholder = unused_mark([*chat, *messages, {"role": "user", "content": mark}])
    turn = turn_with_call(placeholder) if turn_has_calls else {"role": "assistant", "content": placeholder}

    def after_turn(following: Sequence[Message], add_generation_prompt: bool) -> str:
        text = tokenizer.render_marked([*chat, turn, *following], add_generation_prompt, mark, tools_variable(tools))
        _, separator, after = text.rpartition(placeholder)
        if not separator:
            raise DataError("the model's chat template leaves out an assistant's turn", fix="use another template")
        return after

    end = f"{mark}{tokenizer.controls[last]}{mark}" if last in tokenizer.controls else ""
    ending = after_turn([], False)
    through = ending[: ending.index(end)] if end and end in ending else None

    def written(following: Sequence[Message]) -> str:
        text = after_turn(following, True)
        return text if through is None else text.removeprefix(through)

    tokens = tokenizer.encode_guarded(written, messages, mark)
    return tokens[1:] if tokens.size and tokens[0] == last and through is not None else tokens


def keeps_history(
    tokenizer: Tokenizer, chat: Prompt, turn: str, messages: Prompt, *, tools: Sequence[ToolSchema] = ()
) -> bool:
    """Tell whether the chat template renders `chat` and the sampled `turn` as before once `messages` follow."""
    if isinstance(chat, str) or isinstance(messages, str):
        return True
    variables = tools_variable(tools)
    whole = tokenizer.render([*chat, {"role": "assistant", "content": turn}, *messages], **variables)
    return whole.startswith(tokenizer.render(chat, **variables) + turn)


def turn_with_call(name: str) -> dict[str, str]:
    """Make an assistant's turn that is a call of the tool `name` and nothing else."""
    calls = [{"id": NEUTRAL, "type": "function", "function": {"name": name, "arguments": {}}}]
    return {"role": "assistant", "content": "", "tool_calls": json.dumps(calls)}
