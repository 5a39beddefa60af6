"""Safe reading of an untrusted GGUF file with the package `gguf`: nothing is read beyond the file's end, and metadata
are checked for type and range.
"""

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from covey.errors import WeightsError
from covey.files import check_file
from covey.registry import import_package


def import_gguf() -> Any:
    """Import the package `gguf`.

    Raises:
        WeightsError: it is not installed.
    """
    return import_package("gguf", WeightsError, "GGUF files need the package gguf")


def open_reader(path: Path) -> Any:
    """Open the file as a `gguf.GGUFReader`.

    Raises:
        WeightsError: the package is not installed, or the file is truncated or declares more than it holds.
    """
    gguf = import_gguf()
    check_file(path)

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined, misc]
        """Reader that takes nothing beyond the file's end, an array of numbers as one slice, and strings in one loop.

        The package reads as many elements as a file declares, one by one, whether or not they exist. The file is sliced
        as a plain array: a memmap costs three times as much, and a vocabulary takes a million slices.
        """

        data = property(lambda self: self._data, lambda self, data: setattr(self, "_data", data.view(np.ndarray)))

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            elements = super()._get(offset, dtype, count, override_order)  # a slice: it ends where the file does
            if len(elements) < count:
                raise ValueError(f"it claims {count} elements at {offset}, where the file has {len(elements)}")
            return elements

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            number = self.gguf_scalar_to_np.get(int(kind[0]))
            if number is None:
                if kind[0] != gguf.GGUFValueType.STRING:
                    raise ValueError(f"an array of type {kind[0]}")  # of arrays: llama.cpp refuses them too
                self._get(orig_offs + 12, np.uint64, length[0])  # each string begins with its length
                strings, end = self._get_strings(orig_offs + 12, int(length[0]))
                types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
                return end - orig_offs, [kind, length, *strings], range(2, 2 + len(strings)), types
            values = self._get(orig_offs + 12, number, length[0])
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(int(kind[0]))]
            return 12 + int(values.nbytes), [kind, length, values], [2], types

        def _get_strings(self, offset: int, count: int) -> tuple[list[np.ndarray], int]:
            """Return the bytes of the strings from `offset` on, and the offset after them."""
            order = "<" if self.endianess == gguf.GGUFEndian.LITTLE else ">"
            read_size, values, buffer = struct.Struct(f"{order}Q").unpack_from, [], memoryview(self.data)
            for _ in range(count):
                (size,) = read_size(buffer, offset)
                begin, offset = offset + 8, offset + 8 + size
                if offset > len(buffer):
                    raise ValueError(f"it claims a string of {size} bytes at {begin}, where the file has fewer")
                values.append(self.data[begin:offset])
            return values, offset

    try:
        return Reader(path)
    except Exception as error:  # a truncated file can fail with any exception
        raise WeightsError(
            f"not a whole GGUF file: {error}",
            fix="the download may have been cut short: fetch it again",
            where=str(path),
        ) from error


class Metadata:
    """Metadata by name and type, with errors that name the key and the file.

    An absent key gets the default; without a default it is an error.
    """

    def __init__(self, fields: Mapping[str, Any], where: str):
        self._fields, self.where = fields, where

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        want = f"a whole number from {least} up"
        return int(self._get(key, default, lambda v: _is_int(v) and least <= v < 2**31, want))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        wanted = lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf  # noqa: E731
        return float(self._get(key, default, wanted, "a finite number above 0"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, default, lambda v: isinstance(v, str), "text"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, lambda v: isinstance(v, bool), "true or false"))

    def strings(self, key: str) -> list[str]:
        return list(self._get(key, None, lambda v: _is_list_of(v, lambda x: isinstance(x, str)), "a list of texts"))

    def ints(self, key: str) -> list[int]:
        return list(self._get(key, None, lambda v: _is_list_of(v, _is_int), "a list of whole numbers"))

    def numbers(self, key: str) -> list[float]:
        """Return a list of finite numbers."""
        wanted = lambda v: _is_list_of(v, lambda x: isinstance(x, float) and math.isfinite(x))  # noqa: E731
        return list(self._get(key, None, wanted, "a list of finite numbers"))

    def token_id(self, key: str, tokens: int) -> int | None:
        """Return the id of a token; None if the key is absent or -1, which is llama.cpp's way to say so."""
        if key not in self or self._read(key) == 2**32 - 1:
            return None
        return int(self._get(key, None, lambda v: _is_int(v) and 0 <= v < tokens, f"an id below {tokens}"))

    def _get(self, key: str, default: Any, right: Callable[[Any], bool], want: str) -> Any:
        if key not in self:
            if default is None:
                raise WeightsError(f"the metadata has no {key!r}", where=self.where)
            return default
        value = self._read(key)
        if not right(value):
            raise WeightsError(f"the metadata say {key!r} is {value!r:.80}", want=want, where=self.where)
        return value

    def _read(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except Exception as error:  # text that is not UTF-8; a list of lists
            raise WeightsError(f"the metadata {key!r} cannot be read: {error}", where=self.where) from error


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(right, value))
