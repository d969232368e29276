"""The peers' settings: of each list of candidates the first is used in comparisons.

`python benchmarks/execution.py --sweep` times all candidates; the first was the fastest.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

TUNED = {"bucket_cap_mb": 4, "gradient_as_bucket_view": True, "static_graph": True}

DDP_DEFAULT: dict[str, Settings] = {"mlp": {}, "gpt2": {}}

DDP: dict[str, list[Settings]] = {
    "mlp": [
        {"ddp": TUNED},
        {"ddp": TUNED, "implementation": "loop"},
        {"ddp": TUNED, "implementation": "foreach"},
        {"ddp": TUNED | {"bucket_cap_mb": 1}},
        {"ddp": TUNED | {"bucket_cap_mb": 8}},
        {"ddp": TUNED | {"bucket_cap_mb": 25}},
    ],
    "gpt2": [
        {"ddp": TUNED},
        {"ddp": TUNED, "attention": "eager"},
        {"ddp": TUNED, "implementation": "loop"},
        {"ddp": TUNED, "implementation": "foreach"},
        {"ddp": TUNED | {"bucket_cap_mb": 1}},
        {"ddp": TUNED | {"bucket_cap_mb": 8}},
    ],
}

FSDP: dict[str, list[Settings]] = {
    "mlp": [
        {},
        {"prefetch": 1},
        {"prefetch": 2},
        {"fsdp": {"reshard_after_forward": False}},
        {"implementation": "foreach"},
    ],
    "gpt2": [
        {},
        {"prefetch": 1},
        {"fsdp": {"reshard_after_forward": False}},
        {"implementation": "foreach"},
    ],
}

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
"""Names of schedules: distir's -> torch's."""

PIPELINE: dict[tuple[str, str], list[Settings]] = {
    ("mlp", "gpipe"): [{"cut": [4, 4]}, {"cut": [4, 4], "outputs": True}, {"cut": [4, 4], "implementation": "loop"}],
    ("mlp", "1f1b"): [{"cut": [4, 4]}, {"cut": [4, 4], "outputs": True}, {"cut": [4, 4], "implementation": "loop"}],
    ("mlp", "interleaved"): [
        {"cut": [2, 2, 2, 2]},
        {"cut": [2, 2, 2, 2], "outputs": True},
        {"cut": [2, 2, 2, 2], "implementation": "loop"},
    ],
    ("gpt2", "gpipe"): [{"cut": [3, 1]}, {"cut": [2, 2]}, {"cut": [4, 0]}],
    ("gpt2", "1f1b"): [{"cut": [3, 1]}, {"cut": [2, 2]}, {"cut": [4, 0]}],
    ("gpt2", "interleaved"): [{"cut": [1, 1, 1, 1]}, {"cut": [2, 1, 1, 0]}, {"cut": [1, 2, 1, 0]}],
}
