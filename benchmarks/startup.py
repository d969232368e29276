"""How long the command line takes to answer: `distir --help`, beside an interpreter that does nothing.

    python benchmarks/startup.py [--runs N] [--json]

Wall-clock seconds of whole processes, medians, alternating; the goal for --help is 0.3 s.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from laps import machine, parser

COMMANDS = {"python -c pass": ["-c", "pass"], "distir --help": ["-m", "distir", "--help"]}


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    flags = parser(__doc__, 11)
    args = flags.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(args.runs):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    medians = {name: statistics.median(found) for name, found in times.items()}
    where = machine()
    if args.json:
        print(json.dumps({"machine": where, "seconds": medians}, indent=2))
        return
    print(f"wall-clock seconds, median of {args.runs}; {where}")
    for name, median in medians.items():
        print(f"{name:16}{median:8.3f}")


if __name__ == "__main__":
    main()
