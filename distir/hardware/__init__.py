"""Descriptions of clusters, of their parts, and of runtimes: the TOML files beside this module, and their reader.

A cluster has a `device`, a `node` and a `network`: each a table, or the name of a file in `devices`, `nodes`,
`networks`; optionally a `host`. Nodes and networks may list the algorithms of their collectives, as `[[collective]]`;
`compute_share` is what a collective takes from compute beside it, as a share of its seconds.
A node is a domain of devices on one fast network, such as a rack of NVLink; `near` are devices in it that have a link
of their own, as on one PCIe switch. `runtimes.toml` describes runtimes; a cluster may name the one that ran on it.

Of a device's memory, `usable_gib` if `memory_gb` is but its name, software takes `context_mib` for the driver and the
kernels, `workspace_mib` for the products of each thread of the runtime that issues them (`threads`), and, in a node,
`communicator_mib` for each communicator.

`unaligned` of a device is the share of their speed that products of 16 bits reach where rows are no multiple of 16
bytes. `attention_efficiency` is that of FlashAttention-2, to which cuDNN's is `cudnn_attention` times as quick;
`attention_half_gflop`, `_keys`, `_queries`, `_width` halve it (`FusedAttention`);
`early_products` the share of their speed that products reached with the libraries of the device's first year;
`fp8_products` the share of their efficiency that products of 8 bits reach, of the peak of 8.

A cluster that was measured (`distir calibrate`) may also have the speeds of single ops, `[device.ops.DTYPE.OP]`; the
runtime it was measured with, `[runtime]`; how the ranks of its one host share its `cores`, `[sharing]` (`CoreSharing`):
`bandwidth_gbs` of the memory that they share, through which goes what the cache of a core, of `cache_mib`, does not
hold, `communication`, the share of a core that a rank takes while it communicates, `jitter_us`, how far compute varies,
`feeding_us`, how long in each step others compute for each rank, to feed it, and `cold_us`, what communication takes
longer after long compute; and for numbers of `ranks`, `[[residuals]]`: the least and greatest of measured / predicted
time of a step, `low` and `high`, in so many `steps`.

Collectives of a node that were measured (`distir bench collectives --out`) may have a table each, `[[node.measured]]`:
`collective` among `ranks` takes `us` for each of `bytes`. It counts instead of links and algorithms. `in_turn`: one
thread of the host moves all that a device sends and receives, one after the other, as MPI does.

`source` cites the origin of figures. Units: TFLOP/s, GFLOP, GB/s (1e9 bytes), GB of memory (1e9 bytes), microseconds;
MiB of memory that software takes (2**20 bytes); those of links are of a device, those of a network of a port (`ports` a
node, by default one a device). With `rails` each port has a switch of its own, which it shares with the same port of
other nodes: only what crosses them is slowed by `oversubscription`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from distir.ir.errors import InfeasibleError, UsageError, counted, did_you_mean
from distir.ir.host_runtime import Runtime
from distir.ir.measured import Measured
from distir.ir.tiles import SIDES, Tiles
from distir.ir.topology import (
    Algorithm,
    CoreSharing,
    DeviceSpec,
    FusedAttention,
    Link,
    OpSpeed,
    Regular,
    Residuals,
    Topology,
)

MIB = 1 << 20
_FOLDER = Path(__file__).parent
_DEVICES = 1 << 24
"""Limit on the devices of a cluster, each of which is an object."""
_OF_A_NODE = 1 << 16
"""Limit on the devices of a node: a link may have a bandwidth for each number of them."""
_LEAST_SHARE = 1e-6
"""Limit on shares of a peak or a bandwidth: below, seconds would overflow."""
_PARTS = ("device", "node", "network")
"""Parts of a cluster, which may have files of their own."""
_PRODUCTS = ("f64", "f32", "tf32", "bf16", "f16", "f8")
"""Types in which products have a peak: dtypes, tf32 and 8-bit floats."""


def known_clusters() -> list[str]:
    """The names of the shipped clusters."""
    return sorted(p.stem for p in _FOLDER.glob("*.toml") if p.stem != "runtimes")


def known_parts() -> dict[str, list[str]]:
    """The names of the shipped devices, nodes and networks, of which a cluster file may name one each."""
    return {key: _names(key) for key in _PARTS}


def descriptions(name: str) -> dict[str, str]:
    """The text of the file of a shipped cluster, device, node or network, which cites the sources of its figures; of a
    cluster also of those that it names. By what they are, such as "device h100-sxm". Raises UsageError for an unknown
    name."""
    parts = known_parts()
    if name in known_clusters():
        text = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
        table: Mapping[str, Any] = tomllib.loads(text)
        named = {key: table[key] for key in _PARTS if isinstance(table.get(key), str)}
        return {f"cluster {name}": text, **{f"{key} {x}": _part(key, x).read_text("utf-8") for key, x in named.items()}}
    found = {f"{key} {name}": _part(key, name).read_text("utf-8") for key, names in parts.items() if name in names}
    if not found:
        known = [*known_clusters(), *[x for names in parts.values() for x in names]]
        listed = "distir clusters lists the names"
        raise UsageError(f"unknown cluster {name!r}", did_you_mean(name.lower(), known, listed))
    return found


def _part(key: str, name: str) -> Path:
    """The file of a part of a cluster."""
    return _FOLDER / f"{key}s" / f"{name}.toml"


def _names(key: str) -> list[str]:
    """The names of the parts of a kind."""
    return sorted(p.stem for p in _part(key, "").parent.glob("*.toml"))


def device_of(cluster: str) -> str:
    """The name of a shipped cluster's devices; their kind where the cluster describes devices of its own."""
    device: Any = tomllib.loads((_FOLDER / f"{cluster}.toml").read_text(encoding="utf-8"))["device"]
    return device if isinstance(device, str) else str(device["kind"])


def load_cluster(name: str | Path, nodes: int | None = None, devices: int | None = None) -> Topology:
    """The topology of a shipped cluster, or of one described by a TOML file.

    `nodes`: number of nodes; by default as many as `devices` devices need, or 1. Raises UsageError for an unknown name
    (it lists the known ones), a malformed file (it names file and key), a number below 1, or more than 16,777,216
    devices; InfeasibleError if the nodes have fewer devices.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = _FOLDER / f"{name}.toml"
        if str(name) not in known_clusters():
            near = did_you_mean(str(name).lower(), known_clusters())
            if (key := next((k for k, names in known_parts().items() if str(name) in names), None)) is not None:
                near = f'it is a {key}: a cluster file may say {key} = "{name}";'
            listed = f"known: {', '.join(known_clusters())}; or a .toml file"
            raise UsageError(f"unknown cluster {str(name)!r}", f"{near} {listed}" if near else listed)
    regular = _read(path)
    if regular["sharing"] and nodes is None:  # ranks beyond its devices share them
        regular["per_node"] = max(regular["per_node"], devices or 1)
    per_node: int = regular["per_node"]
    count = nodes if nodes is not None else -(-(devices or 1) // per_node)
    if min(count, count if devices is None else devices) < 1:
        raise UsageError(f"{counted(count, 'node')} of {per_node} cannot give {devices or 'any'} devices")
    if count * per_node > _DEVICES:
        raise UsageError(f"{counted(count, 'node')} of {per_node} have more than {_DEVICES:,} devices")
    if devices is not None and devices > count * per_node:
        need = -(-devices // per_node)
        raise InfeasibleError(
            f"{counted(count, 'node')} of {per_node} cannot give {devices} devices",
            f"{counted(devices, 'device')} need {counted(need, 'node')}",
        )
    return Topology(Regular(**regular, nodes=count))


def this_host(ranks: int, cores: int | None = None) -> Topology:
    """This host, with `ranks` ranks that share its cores: "cpu-2core" as one node with this machine's number of cores.

    The speeds of cores, memory and links are those of "cpu-2core", not measured here.
    """
    regular = load_cluster("cpu-2core").regular
    if regular is None:
        raise UsageError("the shipped CPU cluster is not regular")
    cores = cores or host_cores()
    name = f"this host, {counted(ranks, 'rank')} on {counted(cores, 'core')}"
    return Topology(replace(regular, name=name, per_node=ranks, sharing=CoreSharing(cores)))


def host_cores() -> int:
    """The number of this host's cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_cache() -> int:
    """The bytes of the level-2 cache of a core of this host; 1 MiB where Linux does not say."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with suppress(OSError):
            level, size = ((folder / x).read_text().strip() for x in ("level", "size"))
            if level == "2" and size.endswith("K"):
                return int(size[:-1]) << 10
    return MIB


def interpolated(points: Sequence[tuple[int, float]], n: float) -> float:
    """The value at n of points (number, value) in ascending order: linear between them, beyond the last in proportion
    to n, below the first the first's."""
    for (a, x), (b, y) in pairwise(points):
        if a <= n <= b:
            return x + (y - x) * (n - a) / (b - a)
    a, x = points[0] if n <= points[0][0] else points[-1]
    return x * max(1.0, n / a)


def _read(path: Path) -> dict[str, Any]:
    """The arguments of `Regular` but the number of nodes."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        hint = "distir clusters lists those that are shipped; distir calibrate --out FILE.toml measures this machine"
        raise UsageError(f"cannot read cluster file {path}: {e.strerror}", hint) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not valid TOML: {e}") from None
    root = _Table(path, "", table)
    device, node, network = root.part("device"), root.part("node"), root.part("network")
    host = root.table("host") if root.has("host") else None
    per_node = node.whole("devices")
    if per_node > _OF_A_NODE:
        raise node.error("devices", f"expected at most {_OF_A_NODE:,} in a node, got {per_node:,}")
    out = {
        "name": root.text("name"),
        "kind": device.text("kind"),
        "spec": _spec(device),
        "per_node": per_node,
        "intra": _link(node),
        **_network(network, per_node),
        "host": _spec(host) if host else None,
        "host_link": _link(host) if host else None,
        "algorithms": tuple(_algorithm(t) for t in node.tables("collective")),
        "over_nodes": tuple(_algorithm(t) for t in network.tables("collective")),
        "runtime": _own_runtime(root) if root.has("runtime") else None,
        "in_turn": node.flag("in_turn"),
        "communicator": node.figure("communicator_mib", 0.0) * MIB,
    }
    if node.has("near"):
        near = node.table("near")
        out |= {"near": _near(near, per_node), "near_link": _link(near)}
    out["measured"] = tuple([_measured(t) for t in node.tables("measured")])
    out["sharing"] = _sharing(root.table("sharing")) if root.has("sharing") else None
    out["residuals"] = tuple(sorted([_residuals(t) for t in root.tables("residuals")]))
    root.done()
    return out


def _sharing(t: _Table) -> CoreSharing:
    bandwidth = t.positive("bandwidth_gbs") * 1e9 if t.has("bandwidth_gbs") else inf
    communication = t.figure("communication", 1.0)
    jitter, feeding, cold = (t.figure(key, 0.0) * 1e-6 for key in ("jitter_us", "feeding_us", "cold_us"))
    cache = t.figure("cache_mib", 0.0) * MIB
    return CoreSharing(t.whole("cores"), bandwidth, communication, jitter, feeding, cache, cold)


def _residuals(t: _Table) -> Residuals:
    low, high = t.positive("low"), t.positive("high")
    if low > high:
        raise t.error("low", f"expected at most high, {high:g}, got {low:g}")
    return Residuals(t.whole("ranks"), low, high, t.whole("steps"))


def _measured(t: _Table) -> Measured:
    sizes, micros = t.numbers("bytes"), t.numbers("us")
    if len(sizes) != len(micros) or list(sizes) != sorted(set(sizes)):
        raise t.error("bytes", f"expected ascending sizes, one for each of us, got {len(sizes)} and {len(micros)}")
    points = tuple([(n, x * 1e-6) for n, x in zip(sizes, micros, strict=True)])
    return Measured(t.text("collective"), t.whole("ranks"), points)


def _near(t: _Table, per_node: int) -> tuple[frozenset[int], ...]:
    """Sets of devices of a node, by their numbers in it."""
    given = t.get("devices")
    sets = given if isinstance(given, list) and all(isinstance(x, list) for x in given) else []
    flat = [i for x in sets for i in x]
    whole = all(type(i) is int and 0 <= i < per_node for i in flat)
    if not flat or not whole or len(set(flat)) < len(flat):
        raise t.error("devices", f"expected lists of different numbers from 0 to {per_node - 1}, got {given!r}")
    return tuple([frozenset(x) for x in sets])


def _own_runtime(root: _Table) -> Runtime:
    """The runtime that a cluster was measured with: its figures, or the name of a shipped one."""
    if not isinstance(name := root.get("runtime"), str):
        return _runtime("distir", root.table("runtime"))
    try:
        return load_runtime(name)
    except UsageError as e:
        raise root.error("runtime", f"{e.message} ({e.hint}; or a table)") from None


def known_runtimes() -> list[str]:
    """The names of the shipped runtimes."""
    return sorted(_runtimes())


FP8 = "fp8"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    FP8: {"fp8": True},
    "flash2": {"attention": 1.0, "cudnn": False},
    "sync": {"synchronous": True, "overlaps_products": False, "ring_attention": False},
}
"""What may stand behind the name of a runtime, each after a "+": products of weights are in 8 bits; fused attention is
FlashAttention-2, whatever the runtime's own is; no collective of a microbatch's values runs beside compute."""


def load_runtime(name: str, own: Runtime | None = None) -> Runtime:
    """A shipped runtime, or `own`, which counts for the shipped one of its name; or a variant of one, as
    "megatron-core+fp8". Raises UsageError, with the known names, if there is none."""
    shipped, (base, *variants) = _runtimes(), name.split("+")
    found = own if own is not None and own.name == base else shipped.get(base)
    if found is None or not VARIANTS.keys() >= set(variants) or len(set(variants)) < len(variants):
        behind = ", ".join([f"+{variant}" for variant in VARIANTS])
        if found is not None:
            raise UsageError(f"unknown runtime {name!r}", f"behind {base} may stand any of {behind}, each once")
        known = f"known: {', '.join(sorted(shipped))}; behind them any of {behind}"
        raise UsageError(f"unknown runtime {name!r}", did_you_mean(base, shipped, known))
    return _variant(found, *variants)


@cache
def _variant(runtime: Runtime, *variants: str) -> Runtime:
    """The runtime with these of VARIANTS, which its name has then."""
    for variant in variants:
        runtime = replace(runtime, name=f"{runtime.name}+{variant}", **VARIANTS[variant])
    return runtime


@cache
def _runtimes() -> dict[str, Runtime]:
    path = _FOLDER / "runtimes.toml"
    root = _Table(path, "", tomllib.loads(path.read_text()))
    found = {name: _runtime(name, root.table(name)) for name in root.values}
    root.done()
    return found


def _runtime(name: str, t: _Table) -> Runtime:
    given: dict[str, Any] = {key: t.flag(key) for key in _FLAGS}
    given |= {key: t.figure(f"{key}_us", 0.0) * 1e-6 for key in ("op", "communication", "member", "call", "gap")}
    transfer = t.figure("transfer_us") * 1e-6 if t.has("transfer_us") else None
    passes, skew = t.figure("passes", 1.0, least=1.0), t.figure("skew", 0.0)
    by = t.table("transfer_us_by") if t.has("transfer_us_by") else None
    ranks = tuple(sorted([(int(n), by.figure(n) * 1e-6) for n in by.values if n.isdecimal()])) if by else ()
    given |= {"transfer": transfer, "transfer_by": ranks, "threads": t.whole("threads", 1)}
    for prefix in ("", "sharded_"):
        given[f"{prefix}logit_bytes"] = _figures(t, f"{prefix}logit_bytes", "forward", "backward")
        given[f"{prefix}logit_memory"] = _figures(t, f"{prefix}logit_memory", "forward", "backward", "left free")
    given["bucket"] = _figures(t, "bucket", "at least", "for each replica")
    given["norm_bytes"] = _figures(t, "norm_bytes", "forward", "backward")
    given["score_block"] = t.whole("score_block", 1)
    given["quantized_bytes"] = t.figure("quantized_bytes", 4.0)
    given |= {key: t.text(key) for key in ("selective", "gathered_again", "reports") if t.has(key)}
    return Runtime(name, **given, passes=passes, skew=skew, attention=_share(t, "attention"))


def _figures(t: _Table, key: str, *of: str) -> tuple[float, ...] | None:
    """As many figures as there are names of what they are of; None if there are none."""
    if not t.has(key):
        return None
    found = tuple(t.numbers(key, zero=True))
    if len(found) != len(of):
        count = {2: "two", 3: "three"}[len(of)]
        raise t.error(key, f"expected {count} numbers, {', '.join(of[:-1])} and {of[-1]}, got {len(found)}")
    return found


_FLAGS = tuple([f.name for f in fields(Runtime) if f.type == "bool"])


def among(runtime: Runtime | None, ranks: int, kind: str, per_host: int | None = None) -> Runtime | None:
    """The runtime of so many ranks on devices of a kind, of which at most `per_host` share a host: default, all. Of one
    on a GPU, whose step is a graph, the host issues all at once."""
    if runtime is not None and runtime.graphs and ranks == 1 and kind == "gpu":
        return replace(runtime, op=0.0, communication=0.0, member=0.0, call=0.0, transfer=None, transfer_by=())
    if runtime is None or not runtime.transfer_by:
        return runtime
    here = ranks if per_host is None else min(ranks, per_host)
    return replace(runtime, transfer=interpolated(runtime.transfer_by, here), transfer_by=())


def _network(network: _Table, devices: int) -> dict[str, Any]:
    """The links of a network of nodes of so many devices: those through it, and those that stay on their rails."""
    link, less = _link(network), network.figure("oversubscription", 1.0, least=1.0)
    inter = _shared(link, network, devices, less)
    if not network.flag("rails") or less == 1:
        return {"inter": inter}
    rails = min(devices, network.whole("ports", devices))
    return {"inter": inter, "rails": rails, "rail_link": _shared(link, network, devices, 1.0)}


def _shared(link: Link, network: _Table, devices: int, oversubscription: float) -> Link:
    """A device's share of the ports of its node, and of what an oversubscribed network carries.

    Groups of some, but not all, devices of each node reach `partial_share` of it in collectives, or, where so many of
    each node have a figure of their own, that.
    """
    ports = network.whole("ports", devices)
    share = min(1.0, ports / devices) / oversubscription
    bus = link.collective() * share
    part = _share(network, "partial_share")
    some = dict.fromkeys(range(2, devices), bus * part) if part != 1 else {}
    some |= {k: measured * share for k, measured in link.bus_by}
    return link._replace(bandwidth=link.bandwidth * share, bus=bus, bus_by=tuple(some.items()))


_GREATEST = 1e30
"""The largest figure; what is to be above 0 is at least its reciprocal. Beyond these seconds would overflow."""
_MOST = 1 << 31
"""The largest whole number."""


class _Table:
    """One table of a cluster file: typed access to its keys; errors name file and key."""

    def __init__(self, path: Path, name: str, table: Mapping[str, Any]) -> None:
        self.path, self.name, self.values = path, name, table
        self.seen = {"source", "note"}
        self.parts: list[_Table] = []

    def error(self, key: str, what: str) -> UsageError:
        return UsageError(f"{self.path}: {self.name + '.' if self.name else ''}{key}: {what}")

    def has(self, key: str) -> bool:
        """Whether an optional key is given."""
        self.seen.add(key)
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise self.error(key, "missing")
        return value

    def figure(self, key: str, default: float | None = None, least: float = 0.0, most: float = _GREATEST) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            limit = f" and at most {most:g}" if isinstance(value, int | float) and value > most else ""
            raise self.error(key, f"expected a number of at least {least:g}{limit}, got {value!r}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.figure(key, default)
        if value < 1 / _GREATEST:
            raise self.error(key, f"expected a number above 0{f', got {value:g}' if value else ''}")
        return value

    def numbers(self, key: str, zero: bool = False) -> Sequence[float]:
        """A list of numbers above 0, or, with `zero`, of at least 0."""
        value = self.get(key)
        fit = isinstance(value, list) and value and all(type(x) in (int, float) and 0 <= x < inf for x in value)
        if not fit or (0 in value and not zero):
            raise self.error(key, f"expected a list of numbers {'of at least' if zero else 'above'} 0, got {value!r}")
        return [float(x) for x in value]

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            limit = f", of at most {_MOST:,}" if isinstance(value, int) and value > _MOST else ""
            raise self.error(key, f"expected a whole number above 0{limit}, got {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected text, got {value!r}")
        return value

    def table(self, key: str) -> _Table:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, f"expected a table, got {value!r}")
        self.parts.append(_Table(self.path, f"{self.name}.{key}".strip("."), value))
        return self.parts[-1]

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {value!r}")
        return value

    def part(self, key: str) -> _Table:
        """A table, or the one in a file of that name in the folder of such parts."""
        if not isinstance(name := self.get(key), str):
            return self.table(key)
        if name not in (known := _names(key)):
            raise self.error(key, f"unknown {key} {name!r} (known: {', '.join(known)}; or a table)")
        path = _part(key, name)
        self.parts.append(_Table(path, "", tomllib.loads(path.read_text("utf-8"))))
        return self.parts[-1]

    def tables(self, key: str) -> list[_Table]:
        value = self.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(t, Mapping) for t in value):
            raise self.error(key, f"expected an array of tables, got {value!r}")
        made = [_Table(self.path, f"{self.name}.{key}[{i}]".strip("."), t) for i, t in enumerate(value)]
        self.parts += made
        return made

    def done(self) -> None:
        for key in self.values:
            if key not in self.seen:
                raise self.error(key, f"unknown key (known here: {', '.join(sorted(self.seen))})")
        for part in self.parts:
            part.done()


def _spec(t: _Table) -> DeviceSpec:
    peaks = t.table("peak_tflops")
    figures = {key: peaks.positive(key) * 1e12 for key in peaks.values if key not in peaks.seen}
    if not figures:
        raise t.error("peak_tflops", "expected a figure for at least one dtype")
    if unknown := [key for key in figures if key not in _PRODUCTS]:
        raise peaks.error(unknown[0], f"unknown type of products (known: {', '.join(_PRODUCTS)})")
    size, usable = t.positive("memory_gb"), t.figure("usable_gib", 0.0)
    if usable > size:  # vendors' GB are GiB
        raise t.error("usable_gib", f"expected at most memory_gb, {size:g}, got {usable:g}")
    return DeviceSpec(
        tuple(sorted(figures.items())),
        t.positive("memory_gbs") * 1e9,
        t.figure("launch_us") * 1e-6,
        size * 1e9,
        _share(t, "compute_efficiency"),
        _share(t, "memory_efficiency"),
        t.figure("half_gflop", 0.0) * 1e9,
        _tiles(t),
        _attention(t),
        _ops(t),
        t.figure("context_mib", 0.0) * MIB,
        t.figure("workspace_mib", 0.0) * MIB,
        usable * 1024 * MIB,
        _share(t, "unaligned"),
        t.figure("cudnn_attention", 1.0, least=1.0),
        _share(t, "early_products"),
        _share(t, "fp8_products"),
    )


def _ops(t: _Table) -> tuple[tuple[tuple[str, str], OpSpeed], ...]:
    """The speeds of single ops, by op and dtype."""
    if not t.has("ops"):
        return ()
    found: dict[tuple[str, str], OpSpeed] = {}
    by_dtype = t.table("ops")
    for dtype in by_dtype.values:
        if dtype in by_dtype.seen:
            continue
        of = by_dtype.table(dtype)
        for op in of.values:
            if op not in of.seen:
                row = of.table(op)
                rates = [row.positive(k) * unit if row.has(k) else inf for k, unit in _RATES]
                found[op, dtype] = OpSpeed(row.figure("launch_us", 0.0) * 1e-6, *rates)
    return tuple(sorted(found.items()))


_RATES = ("tflops", 1e12), ("gbs", 1e9)
"""Keys of an op's rates, and their units."""


def _attention(t: _Table) -> FusedAttention | None:
    """The speed of fused attention, if the file gives it."""
    if not t.has("attention_efficiency"):
        return None
    halves = [t.figure(f"attention_half_{name}", 0.0) for name in ("gflop", "keys", "queries", "width")]
    return FusedAttention(_share(t, "attention_efficiency"), halves[0] * 1e9, *halves[1:])


def _tiles(t: _Table) -> Tiles | None:
    """The speed of products in float32, if the file gives it."""
    if not t.has("wide_efficiency"):
        return None
    batched = t.whole("batched_tile", SIDES[-1])
    if batched not in SIDES:
        raise t.error("batched_tile", f"expected one of {', '.join(map(str, SIDES))}, got {batched}")
    edge, depth = t.figure("wide_edge", 0.0), t.figure("wide_depth", 0.0)
    return Tiles(t.whole("multiprocessors"), _share(t, "wide_efficiency"), edge, depth, batched)


def _share(t: _Table, key: str, default: float = 1.0) -> float:
    value = t.figure(key, default)
    if not _LEAST_SHARE <= value <= 1:
        raise t.error(key, f"expected a share above 0, at least {_LEAST_SHARE:g}, and at most 1, got {value:g}")
    return value


def _link(t: _Table) -> Link:
    bandwidth = t.positive("link_gbs") * 1e9
    by = t.table("bus_gbs_by") if t.has("bus_gbs_by") else None
    sizes = {int(n): by.positive(n) * 1e9 for n in by.values if n.isdecimal()} if by else {}
    bus, slows = t.positive("bus_gbs", bandwidth / 1e9) * 1e9, t.figure("compute_share", 0.0, most=1.0)
    if full_mesh := t.flag("full_mesh"):
        devices = t.whole("devices")
        sizes = {n: bus * (n - 1) / (devices - 1) for n in range(2, devices)} | sizes
    return Link(bandwidth, t.figure("link_us") * 1e-6, bus, tuple(sizes.items()), slows, full_mesh)


def _algorithm(t: _Table) -> Algorithm:
    kind = t.text("kind")
    if kind not in ("ring", "tree", "in-network"):
        raise t.error("kind", f"expected ring, tree or in-network, got {kind!r}")
    base, intra, inter = (t.figure(key) * 1e-6 for key in ("base_us", "intra_us", "inter_us"))
    return Algorithm(kind, base, intra, inter, t.positive("share", 1.0), t.figure("saturation", 0.0))
