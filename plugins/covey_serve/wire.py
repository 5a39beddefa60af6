"""Messages of Tinker's API in protobuf. Names and numbers of the fields are the API's (package tinker 0.38); the
classes are made here, because the API's own module comes without a source.
"""

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from covey_serve.errors import ApiError

MESSAGES = {
    "Text": "tokens:1:bytes",
    "Opaque": "",
    "Chunk": "encoded_text:1:Text image:2:Opaque dmel:3:Opaque",
    "Sparse": "values:1:bytes crow_indices:2:bytes col_indices:3:bytes",
    "Tensor": "dense:1:bytes sparse_csr:2:Sparse dtype:3:int32 shape:4:int64*",
    "Input": "key:1:string value:2:Tensor",
    "Datum": "model_input:1:Chunk* loss_fn_inputs:2:Input* spans:3:Opaque* input_spans:4:Opaque*",
    "Number": "key:1:string value:2:double",
    "Value": "number:1:double text:2:string",
    "Named": "key:1:string value:2:Value",
    "Request": "model_id:1:string seq_id:2:int32 data:3:Datum* loss_fn:4:string loss_fn_config:5:Number*"
    " forward_only:6:bool loss_fn_config_v2:7:Named*",
    "Batched": "data:1:bytes offsets:2:bytes dtype:3:int32 trailing_shape:4:int64*",
    "Field": "key:1:string value:2:Batched",
    "Record": "type_tag:1:string fields:2:Field* num_datums:3:int64",
    "Metric": "key:1:string value:2:double",
    "Output": "loss_fn_output_type:1:string loss_fn_outputs:2:Record* metrics:3:Metric*",
    "TopK": "token_ids:1:bytes logprobs:2:bytes k:3:uint32 length:4:uint32",
    "Sampled": "stop_reason:1:int32 tokens:2:bytes logprobs:3:bytes topk_sampled_logprobs:4:TopK",
    "Samples": "sequences:1:Sampled* prompt_logprobs:2:bytes topk_prompt_logprobs:3:TopK",
}
"""Fields of each message as name:number:type; a map is a list of entries, which is the same on the wire."""
OPAQUE = "Opaque"
"""Message whose fields nobody reads here."""
Top = tuple[np.ndarray, np.ndarray]
"""Ids of the most likely tokens at each of n places, [n, k], and their log-probs."""
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="covey_serve.proto", package="covey_serve", syntax="proto3")
    scalar = {"bytes": 12, "string": 9, "double": 1, "bool": 8, "int32": 5, "int64": 3, "uint32": 13}
    for name, described in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in described.split():
            field_name, number, kind = field.split(":")
            one = message.field.add(name=field_name, number=int(number), label=3 if kind.endswith("*") else 1)
            kind = kind.rstrip("*")
            one.type = scalar.get(kind, 11)
            if kind not in scalar:
                one.type_name = f".covey_serve.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"covey_serve.{name}")) for name in MESSAGES
    }


CLASSES = _make()


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
    _check_known(message)
    return message


def _check_known(message: Message) -> None:
    name = message.DESCRIPTOR.name
    if name != OPAQUE and len(unknown := UnknownFieldSet(message)):
        raise ApiError(f"the message {name} has a field {unknown[0].field_number}, which this server does not know")
    for _, value in message.ListFields():
        for one in value if hasattr(value, "__iter__") and not isinstance(value, str | bytes) else [value]:
            if isinstance(one, Message):
                _check_known(one)


def array_of(tensor: Any) -> np.ndarray:
    """Return the array of a tensor.

    Raises:
        ApiError: its type or size is wrong, or it is sparse.
    """
    if tensor.HasField("sparse_csr") or tensor.dtype not in DTYPES:
        raise ApiError("a tensor is sparse or of another type than float32, int64 and int32")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    count = len(tensor.dense) // dtype.itemsize
    if len(tensor.dense) % dtype.itemsize or len(shape) > 2 or (shape and np.prod(shape) != count):
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
