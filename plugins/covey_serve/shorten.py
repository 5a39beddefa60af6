"""Shorten a journal: the requests to a model before a saved state of it give way to a record that loads the state.

The state is the last but one that the client saved, and samples are those that were fetched before it. So a client
whose answer was lost with the server can still ask for all that happened since.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from covey_serve.journal import Change
from covey_serve.wire import read_request

OTHERS = ("begun", "create_session", "create_sampling_session", "sampler")
"""Records that belong to no model; they are short."""


class Restore(NamedTuple):
    """A model as it was after a request.

    Attributes:
        id, rank, metadata: see `tinker.Run`.
        number: number of the request.
    """

    id: str
    rank: int
    metadata: Any
    number: int

    @property
    def path(self) -> str:
        """Path of its state, which nothing writes a second time."""
        return f"tinker://{self.id}/bases/{self.number}"


def shorten(restore: Restore, old_samples: Collection[str]) -> Change:
    """Return the change of a journal that makes it begin with `restore` for this model.

    Args:
        old_samples: names of the samples that nobody asks for again.
    """

    def change(kind: str, body: bytes) -> tuple[str, bytes] | None:
        if kind in OTHERS:
            return kind, body
        if kind == "asample":
            return None if sample_key(json.loads(body), body) in old_samples else (kind, body)
        model, number = _place(kind, body)
        if model != restore.id or number > restore.number:
            return kind, body
        if kind == "save_weights_for_sampler":  # its file is there; its name is still asked for
            return "sampler", json.dumps(snapshot_names(json.loads(body))).encode()
        return ("restore", json.dumps(restore).encode()) if number == 0 else None

    return change


def _place(kind: str, body: bytes) -> tuple[str, float]:
    """Return the model of a record and its number among the requests to it: 0 for what begins it, and infinity where
    the client gave none.
    """
    if kind == "forward_backward":
        message = read_request(body)
        return message.model_id, message.seq_id or math.inf
    fields = json.loads(body)
    if kind == "restore":
        return fields[0], 0
    if kind == "create_model" or (kind == "load_weights" and fields.get("model_id") is None):
        return f"{fields['session_id']}:train:{fields['model_seq_id']}", 0
    return fields.get("model_id", ""), fields.get("seq_id") or math.inf


def sample_key(fields: Mapping[str, Any], body: bytes) -> str:
    """Return the name of a request for samples."""
    session = fields.get("sampling_session_id")
    return hashlib.sha256(body).hexdigest() if session is None else f"{session}:{fields['seq_id']}"


def snapshot_names(fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the path of a snapshot, and its sampling session unless the client gave the snapshot a name."""
    model, name = fields["model_id"], fields.get("path")
    path = f"tinker://{model}/sampler_weights/" + (name or f"snapshot-{fields['seq_id']}")
    return path, None if name else f"{model.partition(':')[0]}:sample:{fields['sampling_session_seq_id']}"
