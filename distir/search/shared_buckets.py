"""Reductions that may become part of a bucket, which reduces them together with a later one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from distir.ir.function import Op
from distir.transforms.pipeline.bucket import buckets


def may_share(ops: Iterable[Op], axes: Collection[str], ends: bool) -> set[Op]:
    """The reductions along `axes`, of ops that a body has in this order, that may share a bucket with a later one. The
    bucket takes no less than its last member, and no part of it before that is ready.

    The limit of buckets is left out. The body `ends` with these ops, or may have more of them.
    """
    closed, left = buckets(ops, axes)
    found = {op for members in (*closed, *left) for op in members[:-1]}
    return found if ends else found.union(*left)
