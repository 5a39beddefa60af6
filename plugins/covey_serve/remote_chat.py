"""A conversation with the model of a server, for `covey chat --server URL`: any server of OpenAI's API."""

import json
import os
import urllib.request
from typing import Any
from urllib.error import HTTPError, URLError

from covey.config.schema import RolloutConfig
from covey.display import echo, typed_lines
from covey.errors import CoveyError

SECONDS = 600.0
"""Longest time of an answer."""


def chat(address: str, model: str, options: RolloutConfig) -> None:
    """Hold a conversation on the terminal; an empty line or end of input ends it.

    Args:
        address: address of the server, with or without `/v1`.
        model: name of the model; "" for the first that the server has.
        options: temperature and truncation; the seed is that of the first answer.

    Raises:
        CoveyError: the server does not answer, or refuses.
    """
    base = address.rstrip("/").removesuffix("/v1") + "/v1"
    fields = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    fields["model"] = model or _ask(f"{base}/models")["data"][0]["id"]
    messages: list[dict[str, str]] = []
    echo(f"You talk to {fields['model']}; an empty line ends the chat.")
    for text in typed_lines():
        messages.append({"role": "user", "content": text})
        asked = fields | {"messages": messages, "seed": options.seed + len(messages) // 2}
        answer = _ask(f"{base}/chat/completions", asked)["choices"][0]["message"]["content"]
        echo(answer, keep="\n\t")
        messages.append({"role": "assistant", "content": answer})


def _ask(url: str, fields: dict[str, Any] | None = None) -> Any:
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
    }
    body = None if fields is None else json.dumps(fields).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=SECONDS) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise CoveyError(f"the server refuses ({error.code}): {error.read(2000).decode(errors='replace')}") from error
    except (URLError, ValueError, TimeoutError) as error:
        raise CoveyError(f"{url} does not answer: {error}", fix="the address that covey serve prints") from error
