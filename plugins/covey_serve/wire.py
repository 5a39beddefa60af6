"""Messages of Tinker's API in protobuf, which `tinker.textproto` describes."""

import math
from importlib.resources import files
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClassesForFiles
from google.protobuf.unknown_fields import UnknownFieldSet

from covey_serve.errors import ApiError

FILE = text_format.Parse(files("covey_serve").joinpath("tinker.textproto").read_text("utf-8"), FileDescriptorProto())
POOL = DescriptorPool()
POOL.Add(FILE)
CLASSES = GetMessageClassesForFiles([FILE.name], POOL)
"""Classes of the messages by name."""
Top = tuple[np.ndarray, np.ndarray]
"""Ids of the most likely tokens at each of n places, [n, k], and their log-probs."""
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}


def read_request(body: bytes) -> Any:
    """Parse a request for gradients.

    Raises:
        ApiError: it is none, or has a field of a later version.
    """
    message = CLASSES["Request"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ApiError("the body is not the protobuf message of forward_backward") from error
    numbers, size = [field.field_number for field in UnknownFieldSet(message)], message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        named = f"field {numbers[0]}" if numbers else "field in its data"
        raise ApiError(f"the message has a {named}, which this server does not know")
    return message


def array_of(tensor: Any) -> np.ndarray:
    """Return the array of a tensor.

    Raises:
        ApiError: its type or size is wrong, or it is sparse.
    """
    if tensor.HasField("sparse_csr") or tensor.dtype not in DTYPES:
        raise ApiError("a tensor is sparse or of another type than float32, int64 and int32")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    count = len(tensor.dense) // dtype.itemsize
    is_wrong = shape and (min(shape) < 0 or math.prod(shape) != count)
    if len(tensor.dense) % dtype.itemsize or len(shape) > 2 or is_wrong:
        raise ApiError("a tensor has another size than its shape says, or more than two axes")
    array: np.ndarray = np.frombuffer(tensor.dense, dtype).reshape(shape or count)
    return array


def tokens_of(chunks: Any) -> np.ndarray:
    """Return the tokens of a model input, int32 [n].

    Raises:
        ApiError: it has another chunk than text.
    """
    for chunk in chunks:
        if not chunk.HasField("encoded_text") or len(chunk.encoded_text.tokens) % 4:
            raise ApiError("a chunk of a model input is no encoded_text of int32 tokens")
    return np.frombuffer(b"".join(chunk.encoded_text.tokens for chunk in chunks), "<i4").astype(np.int32)


def gradients_output(logps: list[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Return the result of a request for gradients: the log-probs of each datum, [n] or [n, k]."""
    output = CLASSES["Output"](loss_fn_output_type="ArrayRecord")
    for one in logps:
        data, ends = one.astype("<f4").tobytes(), np.array([0, 4 * one.size], "<i8").tobytes()
        value = CLASSES["Batched"](data=data, offsets=ends, dtype=1, trailing_shape=one.shape[1:])
        output.loss_fn_outputs.add(num_datums=1).fields.add(key="logprobs", value=value)
    for name, number in metrics.items():
        output.metrics.add(key=name, value=number)
    return bytes(output.SerializeToString())


def samples_output(
    completions: list[Any], sampled_top: list[Top], prompt_logps: np.ndarray | None, top: Top | None
) -> bytes:
    """Return the result of a request for samples. `sampled_top` has the most likely tokens at each token of each
    completion, or is empty, and `top` at each token of the prompt but the first.
    """
    output = CLASSES["Samples"]()
    for one in completions:
        reason = int(one.finish.was_cut)
        tokens, logps = one.tokens.astype("<i4").tobytes(), one.logps.astype("<f4").tobytes()
        output.sequences.add(stop_reason=reason, tokens=tokens, logprobs=logps)
    for sequence, likely in zip(output.sequences, sampled_top, strict=False):
        _put_top(sequence.topk_sampled_logprobs, likely)
    if prompt_logps is not None:
        output.prompt_logprobs = prompt_logps.astype("<f4").tobytes()
    if top is not None:  # the first token has none: the API's mark for that
        fills = zip(top, (0, -99999.0), strict=True)
        ids, logps = (np.pad(x, ((1, 0), (0, 0)), constant_values=fill) for x, fill in fills)
        _put_top(output.topk_prompt_logprobs, (ids, logps))
    return bytes(output.SerializeToString())


def _put_top(message: Any, top: Top) -> None:
    message.token_ids, message.logprobs = top[0].astype("<i4").tobytes(), top[1].astype("<f4").tobytes()
    message.length, message.k = top[0].shape
