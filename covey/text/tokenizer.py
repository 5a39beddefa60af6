"""Tokenizer: converts text to tokens and back, renders chat prompts, and lists the tokens that end a completion.

`Tokenizer` wraps the `tokenizers` library. It is read from a Hugging Face folder here and from GGUF metadata in
`covey_formats.gguf_tokenizer`. This module does not import JAX.

Control tokens: `encode` recognises the model's control tokens in its text. The content of a chat *message* is data:
there `<|im_end|>` is encoded as ordinary tokens, so no row of a data set can end its turn and write as another role.
The control tokens in the template's own text are marked while it is rendered, and compared with the control tokens
among the encoded ids. So it does not matter whether data contain a control token as it is, or whether the template or
the tokenizer's normaliser turns them into one. `render` returns plain text and cannot tell the two apart;
`encode_prompt` does.

Stop tokens: all that the generation config, the model config and the tokenizer config name, and the usual end-of-turn
tokens (`END_TOKENS`) that the vocabulary has as control tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from covey.errors import DataError, WeightsError
from covey.files import check_file
from covey.text import chat_template
from covey.text.chat_template import (
    check_messages,
    fold_system_message,
    neutralise,
    unused_mark,
    with_calls,
)
from covey.text.declared_tokens import add_declared_tokens
from covey.text.tokenizers_library import Growth, growth_of, library_errors, switch_dropout_off, unknown_id
from covey.types import Message, Prompt

END_TOKENS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|assistant_end|>",
    "<turn|>", "<|tool_response>", "<eos>", "</s>",
)  # fmt: skip
REASONING = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>": "<channel|>"}
"""Marks before and after a model's reasoning. The first may stand in the prompt."""
PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<unk>")
ToolSchema = Mapping[str, Any]
"""JSON Schema of a tool, as chat templates take it."""
MAX_REMEMBERED = 2**22
"""Maximum number of tokens of encoded prompts that a tokenizer keeps: 16 MB."""


NO_ID = 2**32 - 1
"""Id that no token has."""


class Tokenizer:
    """Tokenizer of one model.

    Args:
        inner: the `tokenizers` object; truncation, padding and BPE dropout saved in it are turned off.
        eos_id: the token that ends a text; it is also a stop token.
        stop_ids: further stop tokens, by id.
        bos_id: the token that begins a text, if the model has one.
        pad_id: the declared padding token.
        add_bos: whether a plain string is encoded with `bos_id` before it.
        chat_template: jinja2 source; None if the model has no chat format.
        named: texts of special tokens by the name under which a template may write them, as `pad_token`.
        rows: number of tokens that the model embeds. A published tokenizer may have more, as for images: a text that
            needs one is refused.

    Attributes:
        variables: variables that the chat template gets in every rendering.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_id: int,
        stop_ids: Iterable[int] = (),
        bos_id: int | None = None,
        pad_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        named: Mapping[str, str] = {},
        rows: int | None = None,
    ):
        inner.no_truncation()
        inner.no_padding()
        switch_dropout_off(inner)
        self.inner, self.eos_id, self._rows = inner, eos_id, 2**31 if rows is None else rows
        self.bos_id = bos_id if add_bos or (bos_id or 0) < self._rows else None
        self.add_bos, self.chat_template, self._named = add_bos and bos_id is not None, chat_template, named
        self._encoding_growth, self._decoding_growth = map(_growth_of_part, (inner.normalizer, inner.decoder))
        self._special = {i: t.content for i, t in inner.get_added_tokens_decoder().items() if t.special}
        ends = {i for i, text in self._special.items() if text in END_TOKENS and i < self._rows}
        self.stop_ids: tuple[int, ...] = tuple(sorted({eos_id, *stop_ids, *ends}))
        self.pad_id = self._choose_pad_id(pad_id)
        self.max_remembered, self.variables = MAX_REMEMBERED, dict[str, Any]()
        self._remembered: dict[Any, np.ndarray] = {}
        self._num_remembered = 0

    @classmethod
    def from_folder(cls, folder: str | Path, rows: int | None = None) -> "Tokenizer":
        """Read tokenizer.json, and the config files in its folder, which may declare further tokens.

        Args:
            rows: number of tokens that the model embeds, if it is known.

        Raises:
            WeightsError: a file is missing or malformed, or no file names an end-of-text token.
        """
        folder = Path(folder)
        inner = _read_inner(folder / "tokenizer.json")
        settings = read_json(folder / "tokenizer_config.json", missing={})
        names = ("generation_config.json", "config.json")
        configs: list[Mapping[str, Any]] = [read_json(folder / name, missing={}) for name in names]
        part = configs[-1].get("text_config")  # of a model that also reads images
        configs += [part] if isinstance(part, Mapping) else []
        named = add_declared_tokens(
            inner,
            settings,
            lambda name: read_json(folder / name, missing={}),
            _growth_of_part(inner.normalizer),
            str(folder),
        )
        bos, eos, pad = (_special_id(inner, named, configs, role, rows) for role in ("bos", "eos", "pad"))
        before = _token_before(inner)
        stops = [i for c in configs for i in _valid_ids(c.get("eos_token_id"))] + ([] if eos is None else [eos])
        if not stops:
            raise WeightsError("no file names the end-of-text token", want="eos_token_id", where=str(folder))
        return cls(
            inner,
            eos_id=stops[0] if eos is None else eos,
            stop_ids=stops,
            bos_id=bos if before is None else before,
            pad_id=pad,
            add_bos=before is not None,
            chat_template=_read_template(folder, settings),
            named=named,
            rows=rows,
        )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the highest token id plus 1, and no more than the model embeds. The embedding may have more
        rows, for padding.
        """
        return min(max(self.inner.get_vocab().values()) + 1, self._rows)

    def encode(self, text: str) -> np.ndarray:
        """Encode text to int32 [n], without BOS or EOS; control tokens in it are recognised.

        Raises:
            DataError: it is not valid Unicode, or has a token that the model does not embed.
        """
        return self._embedded(self._encode_with(self.inner, text))

    def _embedded(self, tokens: np.ndarray) -> np.ndarray:
        """Return `tokens` if the model embeds all of them."""
        if (beyond := tokens[tokens >= self._rows]).size:
            raise DataError(
                f"the token {self._text(int(beyond[0]))!r}, with the id {beyond[0]}, stands in "
                f"{self.decode(tokens, skip_special=False)!r:.120}",
                want=f"tokens below {self._rows}, which the model embeds",
                fix="remove it from the text: the model has no weights for it",
            )
        return tokens

    def decode(self, tokens: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Decode `tokens` to text; stop and other control tokens are left out unless `skip_special` is False."""
        if self._decoding_growth != Growth():  # only then is the size worth its time
            self._decoding_growth.require_room("".join(self._text(int(token)) for token in tokens))
        with library_errors(f"the tokenizer cannot decode {np.asarray(tokens)[:8].tolist()}"):
            return self.inner.decode([int(token) for token in tokens], skip_special_tokens=skip_special)

    def encode_prompt(
        self, prompt: Prompt, *, add_generation_prompt: bool = True, tools: Sequence[ToolSchema] = ()
    ) -> np.ndarray:
        """Encode a prompt to int32 [n]: a string, after BOS if the model uses one, or messages in the chat template.

        The result is read-only and remembered: a run checks the lengths of all prompts and samples them many times.

        Args:
            prompt: text or chat messages.
            add_generation_prompt: whether the beginning of the model's turn follows.
            tools: JSON Schemas of tools that the chat template lists.

        Raises:
            DataError: messages are malformed, the template refuses them, or data become a control token and cannot be
                encoded as ordinary text.
        """
        chat = prompt if isinstance(prompt, str) else tuple(tuple(m.items()) for m in check_messages(prompt))
        tokens = self._remembered.get(key := (chat, add_generation_prompt, json.dumps(tools) if tools else ""))
        if tokens is None:
            tokens = self._encode_prompt(prompt, add_generation_prompt, tools)
            tokens.setflags(write=False)
            if self._num_remembered + tokens.size <= self.max_remembered:
                self._remembered[key], self._num_remembered = tokens, self._num_remembered + tokens.size
        return tokens

    def _encode_prompt(self, prompt: Prompt, add_generation_prompt: bool, tools: Sequence[ToolSchema]) -> np.ndarray:
        if isinstance(prompt, str):
            tokens = self.encode(prompt)
            doubled = tokens.size > 0 and tokens[0] == self.bos_id
            return np.concatenate([[self.bos_id], tokens]).astype(np.int32) if self.add_bos and not doubled else tokens
        mark, variables = unused_mark(prompt), tools_variable(tools)
        return self.encode_guarded(
            lambda chat: self.render_marked(chat, add_generation_prompt, mark, variables), prompt, mark
        )

    def encode_completion(self, prompt: Prompt, completion: str) -> np.ndarray:
        """Encode a completion to int32 [n]: the tokens to learn after `encode_prompt(prompt)`, with the stop token.

        After messages it is the assistant's turn as the chat template renders it, up to and including its stop token;
        control tokens in `completion` are data. After text it is the text itself and the end-of-text token. Prompt and
        completion are encoded separately, so no token spans their border, as in sampling.

        Raises:
            DataError: messages are malformed, the template refuses them, or data become a control token and cannot be
                encoded as ordinary text.
        """
        if isinstance(prompt, str):
            tokens = self.encode(completion)
            return tokens if tokens.size and tokens[-1] in self.stop_ids else np.append(tokens, np.int32(self.eos_id))
        chat = [*prompt, {"role": "assistant", "content": completion}]
        mark = unused_mark(chat)

        def finished(chat: Sequence[Message]) -> str:
            return self.render_marked(chat, False, mark)

        def written(chat: Sequence[Message]) -> str:
            asked, whole = self.render_marked(chat[:-1], True, mark), finished(chat)
            self._check_reasoning(chat[-1]["content"], whole)
            # The template may render a finished turn differently from its generation prompt: then learn the content.
            return whole.removeprefix(asked) if whole.startswith(asked) else chat[-1]["content"]

        return self._through_stop(
            self.encode_guarded(written, chat, mark), lambda: self.encode_guarded(finished, chat, mark)
        )

    def _check_reasoning(self, answer: str, shown: str) -> None:
        """Refuse an answer whose reasoning would not be learnt: the chat template leaves it out, or its marks are
        control tokens, which text in messages never becomes.
        """
        for end in REASONING.values():
            last_words = re.split("[]>]", answer.partition(end)[0])[-1].strip()
            if end in answer and (last_words not in shown or end in self._control_ids):
                raise DataError(
                    f"the reasoning before {end} in an answer cannot be learnt through the model's chat template",
                    want="an answer without reasoning",
                    fix="give prompt and completion as text, in the form in which the model writes them",
                )

    def _through_stop(self, tokens: np.ndarray, chat: Callable[[], np.ndarray]) -> np.ndarray:
        """Return `tokens` up to and including the first stop token; if there is none, append the last one of `chat`."""
        stops = np.flatnonzero(np.isin(tokens, self.stop_ids))
        if stops.size:
            return tokens[: stops[0] + 1]
        whole = chat()
        ends = whole[np.isin(whole, self.stop_ids)]
        return np.append(tokens, ends[-1] if ends.size else np.int32(self.eos_id))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Render `messages` with the chat template; `variables` are passed on to it.

        A system message that the template refuses (as Gemma 2's does) or leaves out is put at the start of the user's
        first message instead, followed by a blank line.

        >>> tokenizer.render([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
        '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'

        Raises:
            DataError: messages are malformed, or the template refuses them.
            WeightsError: the model has no template, or its template is too long or does not parse.
        """
        return self.render_marked(messages, add_generation_prompt, "", variables)

    def render_marked(
        self, messages: Sequence[Message], add_generation_prompt: bool, mark: str, variables: Mapping[str, Any] = {}
    ) -> str:
        """Render as `render` does, with `mark` on both sides of each control token in the template's own text."""
        ids = {name: self.inner.token_to_id(text) for name, text in self._named.items()}
        special = {
            name: self._mark_token(token, mark)
            for name, token in ({"bos_token": self.bos_id, "eos_token": self.eos_id} | ids).items()
        }
        context = {**special, "add_generation_prompt": add_generation_prompt, **self.variables, **variables}
        controls = list(self.controls.values()) if mark else []

        def shown(chat: Sequence[Message]) -> str:
            values = context | {"messages": [with_calls(message) for message in chat]}
            return chat_template.render(self._template, values, mark=mark, controls=controls)

        chat, folded = check_messages(messages), fold_system_message(messages)
        if folded is None:
            return shown(chat)
        try:
            text = shown(chat)
        except DataError:
            return shown(folded)
        return text if chat[0]["content"].strip() in text else shown(folded)

    @cached_property
    def _template(self) -> str:
        if self.chat_template is None:
            raise WeightsError(
                "this model has no chat template, so it cannot take chat messages",
                fix="give prompts as plain text, or use the model's instruction-tuned variant",
            )
        return chat_template.check(self.chat_template)

    def encode_guarded(
        self, shown: Callable[[Sequence[Message]], str], chat: Sequence[Message], mark: str
    ) -> np.ndarray:
        """Encode the text that `shown` renders from `chat`, and make sure that no control token comes from the data.

        Args:
            shown: renders the text, with `mark` on both sides of the template's own control tokens.
            chat: the messages that are data.

        Raises:
            DataError: one does, and cannot be encoded as ordinary text.
        """
        pieces, own, tokens = self._split_at_controls(shown(chat), mark)
        if self._control_tokens(tokens) == own:
            return self._embedded(tokens)
        _, usual_own, usual = self._split_at_controls(shown(neutralise(chat)), mark)
        if self._control_tokens(usual) != usual_own:  # the template builds control tokens from pieces
            if self._control_tokens(tokens) == self._control_tokens(usual):
                return self._embedded(tokens)
        elif self._control_tokens(literal := self._encode_literally(pieces)) == own:
            return self._embedded(literal)
        raise DataError(
            "text in these messages becomes a control token in the model's chat template",
            want="messages that spell none of: "
            + ", ".join(sorted({self.controls[i] for i in self._control_tokens(tokens)})),
            fix="remove it from the row, or leave the row out",
        )

    def _split_at_controls(self, text: str, mark: str) -> tuple[list[str], list[int], np.ndarray]:
        """Split `text` at marked control tokens; return pieces (every second a token), their ids, and all ids."""
        pieces = [piece.replace(mark, "") for piece in re.split(f"{mark}({self._control_pattern}){mark}", text)]
        encoded = self._encode_with(self.inner, "".join(pieces))
        return pieces, [self._control_ids[piece] for piece in pieces[1::2]], encoded

    def _encode_literally(self, pieces: Sequence[str]) -> np.ndarray:
        """Encode the pieces of `_split_at_controls`: every second one as a control token, others as ordinary text."""
        ids = [
            [self._control_ids[piece]] if odd else self._encode_with(self._literal_tokenizer, piece)
            for odd, piece in zip(cycle([False, True]), pieces, strict=False)
        ]
        return np.concatenate(ids).astype(np.int32)

    def _control_tokens(self, tokens: np.ndarray) -> list[int]:
        """Return the control tokens among `tokens`, in order."""
        return [token for token in tokens.tolist() if token in self.controls]

    def _mark_token(self, token: int | None, mark: str) -> str:
        return f"{mark}{self._text(token)}{mark}" if token in self.controls else self._text(token)

    @cached_property
    def controls(self) -> dict[int, str]:
        """Text by id of the tokens that data must not become: special tokens, BOS, stop tokens, and tokens without a
        row in the model's embedding.

        The token for unknown characters is not one of them, since ordinary text contains it.
        """
        ends = {*self.stop_ids, self.bos_id}
        unknown = unknown_id(self.inner)
        added = self.inner.get_added_tokens_decoder().items()
        return {i: t.content for i, t in added if i in ends or i >= self._rows or (t.special and i != unknown)}

    @cached_property
    def _control_ids(self) -> dict[str, int]:
        return {text: token for token, text in self.controls.items()}

    @cached_property
    def _control_pattern(self) -> str:
        return "|".join(map(re.escape, sorted(self.controls.values(), key=len, reverse=True))) or r"(?!)"

    @cached_property
    def _literal_tokenizer(self) -> tokenizers.Tokenizer:
        """Copy of the tokenizer that encodes control tokens as ordinary text."""
        saved = json.loads(self.inner.to_str())
        for token in saved["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self.controls
        copy = tokenizers.Tokenizer.from_str(json.dumps(saved))
        copy.encode_special_tokens = True
        return copy

    def _encode_with(self, inner: tokenizers.Tokenizer, text: str) -> np.ndarray:
        self._encoding_growth.require_room(text)
        with library_errors(f"the tokenizer cannot encode {text!r:.80}"):
            try:
                return np.asarray(inner.encode(text, add_special_tokens=False).ids, np.int32)
            except (TypeError, UnicodeEncodeError) as error:
                raise DataError(
                    f"this is not text that can be encoded: {text!r:.80}", want="valid Unicode text"
                ) from error

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.inner.id_to_token(token) or ""

    def _choose_pad_id(self, declared: int | None) -> int:
        """Return the declared padding token, or another if that is a stop token (a padding mask would hide the stop) or
        one that the model does not embed.
        """
        usual = [self.inner.token_to_id(text) for text in PAD_TOKENS]
        spare = [token for token in sorted(self._special, reverse=True) if token != self.bos_id]
        ids = (token for token in (declared, *usual, *spare) if token is not None and token < self._rows)
        return next((token for token in ids if token not in self.stop_ids), self.eos_id)


def tools_variable(tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Make the variable of a template that lists tools; {} without tools, as templates expect."""
    return {"tools": list(tools)} if tools else {}


def read_json(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object from a file; return `missing`, if given, when there is no file."""
    if missing is not None and not path.is_file():
        return missing
    text = _read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise WeightsError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets a thousand deep
        raise WeightsError(f"cannot be read: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise WeightsError("holds no JSON object", where=str(path))
    return value


def _read_text(path: Path) -> str:
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"cannot be read: {error}", where=str(path)) from error


# --- a Hugging Face folder


def _read_inner(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        what, needs, folder = "no tokenizer.json in this folder", "transformers", str(path.parent)
        if path.with_name("tokenizer.model").is_file():
            what += ", only a sentencepiece vocabulary (tokenizer.model), which is not read"
            needs = "transformers, sentencepiece and protobuf"
        convert = f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
        raise WeightsError(what, want="tokenizer.json", fix=f"write one with {needs}: {convert}", where=folder)
    check_file(path)
    _check_growth_of_tokens(path)
    with library_errors("not a tokenizer", where=str(path)):
        return tokenizers.Tokenizer.from_file(str(path))


def _check_growth_of_tokens(path: Path) -> None:
    """Check that a tokenizer's rules do not make its own added tokens too long: the library normalises them as it reads
    the file, and encodes an empty text to see what stands before it.
    """
    try:
        saved = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # the library names the place
    if isinstance(saved, dict):
        listed = saved.get("added_tokens")
        growth = growth_of(saved.get("normalizer"))
        for token in listed if isinstance(listed, list) else ():
            text = token.get("content") if isinstance(token, dict) else ""
            growth.require_room(text if isinstance(text, str) else "", str(path))
        growth.require_room("", str(path))


def _growth_of_part(part: Any) -> Growth:
    """Compute the growth by the normalizer or the decoder of a tokenizer, which may have none."""
    return Growth() if part is None else growth_of(json.loads(part.__getstate__()))


def _special_id(
    inner: tokenizers.Tokenizer,
    named: Mapping[str, str],
    configs: Sequence[Mapping[str, Any]],
    role: str,
    rows: int | None,
) -> int | None:
    """Return the id of `bos_token`, `eos_token` or `pad_token`: by its text, else by an id of a config; the first that
    the model embeds, if there is one.
    """
    text = named.get(f"{role}_token")
    ids = [] if text is None else _valid_ids(inner.token_to_id(text))
    ids += [i for config in configs for i in _valid_ids(config.get(f"{role}_token_id"))]
    return next((i for i in ids if rows is None or i < rows), next(iter(ids), None))


def _valid_ids(value: Any) -> list[int]:
    """Return the integers in `value` that can be ids: some published files have -1 for "none"."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31]


def _token_before(inner: tokenizers.Tokenizer) -> int | None:
    """Return the token that tokenizer.json puts before a text, if any. Beside that file transformers 5 ignores the
    setting `add_bos_token`.
    """
    with library_errors("the tokenizer cannot encode a text"):
        word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": NO_ID}, "a"))  # without the rules for texts
        word.post_processor = inner.post_processor
        first: int = word.encode("a").ids[0]
    return None if first == NO_ID else first


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Read chat_template.jinja, or else the config's template; of several named ones, the one named `default`."""
    if (file := folder / "chat_template.jinja").is_file():
        return _read_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None
