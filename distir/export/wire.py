"""The wire format of protocol buffers, as far as Chakra's traces need it: written by hand, without the library.

A field is a key, number << 3 | kind, and a value: kind 0 a varint, kind 2 a length and so many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable


def varint(n: int) -> bytes:
    """A number in groups of seven bits, the lowest first; negative ones as 64 bits."""
    n &= (1 << 64) - 1
    if n < 128:
        return _SMALL[n]
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


_SMALL = [bytes((n,)) for n in range(128)]


def number(field: int, n: int) -> bytes:
    """A field of an integer type, an enum or a bool."""
    return varint(field << 3) + varint(n)


def block(field: int, content: bytes) -> bytes:
    """A field that is a message, or bytes."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def text(field: int, content: str) -> bytes:
    """A field that is a string."""
    return block(field, content.encode())


def numbers(field: int, given: Iterable[int]) -> bytes:
    """A repeated field of numbers, packed; nothing if there are none."""
    content = b"".join(map(varint, given))
    return block(field, content) if content else b""


def delimited(message: bytes) -> bytes:
    """A message after its length, as it stands in a stream of messages."""
    return varint(len(message)) + message
