"""The sizes and times of published sequences of communication and compute: see `distir.models.proxies`.

Sizes are elements of a device, times microseconds of an A100; both are those of SPCL's DNN-cpp-proxies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from distir.ir.errors import UsageError
from distir.models.decoder import kind_of
from distir.models.recommender import widths_of

_MAY_BE_ZERO = ("forward", "backward")
"""How the names of fields of times end."""
Reduced = tuple[int, tuple[str, ...]]
"""An all-reduce: its elements, and its axes."""


@dataclass(frozen=True)
class _Sequence:
    """Sizes of a sequence: whole numbers of at least 1, but times, in microseconds, of at least 0.

    Raises UsageError for others.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            least = 0 if f.name.endswith(_MAY_BE_ZERO) else 1
            if kind_of(f) is int and getattr(self, f.name) < least:
                raise UsageError(f"{f.name} is a whole number of at least {least}, got {getattr(self, f.name)}")

    def numbers(self, name: str, count: int | None = None) -> Sequence[int]:
        """The numbers in a field such as "512-256". Raises UsageError for another `count` of them, or one below 1."""
        found = widths_of(name, getattr(self, name))
        if count is not None and len(found) != count:
            raise UsageError(f"{name} is {count} numbers such as {getattr(type(self), name)}, got {len(found)}")
        return found


@dataclass(frozen=True)
class DlrmSequence(_Sequence):
    """A recommender on `ranks` devices, each of which has some of the tables.

    `alltoall` elements are exchanged each way; `top` and `bottom` are the gradients of the two MLPs. Microseconds:
    `forward` of the tables, the bottom MLP, the products and the top MLP; `backward` of these in reverse order. A step
    has `batch` samples.
    """

    ranks: int = 4
    alltoall: int = 262_144
    top: int = 728_065
    bottom: int = 49_536
    forward: str = "95-341-209-455"
    backward: str = "910-209-682-190"
    batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.numbers("forward", 4)
        self.numbers("backward", 4)
        for name in ("alltoall", "batch"):
            if getattr(self, name) % self.ranks:
                raise UsageError(f"{name} is a multiple of ranks {self.ranks}, got {getattr(self, name)}")


@dataclass(frozen=True)
class CosmoflowSequence(_Sequence):
    """A convolutional network over volumes, on `dp` replicas of h * w devices, each with a part of the volume.

    Microseconds: `forward` of the layers, `backward` of these in reverse order. Before each convolution but the first
    `halos` elements are exchanged with the neighbour along h and with that along w, before each dense layer `gathers`
    are gathered of each device. After the backward pass of a dense layer each device has `scatters` of a
    reduce-scatter, after that of a convolution but the first `backward_halos` are exchanged. Gradients: `dense` of a
    device, reduced over dp, and of the `convolutions`, the last first, over all. `batch` samples a replica.

    Raises UsageError for more than 2 devices along h or w: a face has one neighbour there.
    """

    dp: int = 1
    h: int = 2
    w: int = 2
    forward: str = "6567-13135-6567-3283-1641-5-3-1"
    backward: str = "2-6-10-3283-6567-13135-26270-13135"
    halos: str = "2097152-1048576-524288-262144"
    backward_halos: str = "131072-262144-524288-1048576"
    gathers: str = "65536-256-128"
    scatters: str = "128-256-65536"
    dense: int = 1_050_737
    convolutions: str = "3539456-884992-221312-55360-3488"
    batch: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("h", "w"):
            if getattr(self, name) > 2:
                raise UsageError(f"{name} is 1 or 2, as faces go to one neighbour, got {getattr(self, name)}")
        halos, gathers = len(self.numbers("halos")), len(self.numbers("gathers"))
        for name, count in (
            *((name, 1 + halos + gathers) for name in ("forward", "backward")),
            *(("backward_halos", halos), ("scatters", gathers), ("convolutions", 1 + halos)),
        ):
            self.numbers(name, count)


@dataclass(frozen=True)
class _Pipeline(_Sequence, ABC):
    """Of `layers` layers, as many in each of `stages` stages; `activation` elements are sent between them."""

    layers: int = 96
    stages: int = 96
    dp: int = 1
    microbatches: int = 8
    activation: int = 25_165_824

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers % self.stages:
            raise UsageError(f"layers are a multiple of stages {self.stages}, got {self.layers}")

    @abstractmethod
    def reduced(self, stage: int) -> list[Reduced]:
        """The all-reduces of a stage's gradients, in order: the elements, and the axes."""


@dataclass(frozen=True)
class Gpt2Sequence(_Pipeline):
    """GPT-2 large without its compute: all forward sends, all backward ones, then all-reduces, one after the other.

    Gradients: `first` of the first layer, with the embeddings, `layer` of each other and `last` of the last; with
    `tensors` each tensor is reduced by itself, else a layer at once.
    """

    layers: int = 36
    stages: int = 4
    dp: int = 8
    activation: int = 808_960
    tensors: bool = False
    first: str = "64328960-1310720-1280-4915200-1638400-1280-6553600-6553600-1280-3840-1280-1280-5120-1280"
    layer: str = "1280-4915200-1638400-1280-6553600-6553600-1280-3840-1280-1280-5120-1280"
    last: str = "1280-4915200-1638400-1280-6553600-6553600-1280-64328960-1280-3840-1280-1280-5120-1280-1280"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first", "layer", "last"):
            self.numbers(name)

    def reduced(self, stage: int) -> list[Reduced]:
        found: list[Reduced] = []
        depth = self.layers // self.stages
        for k in range(stage * depth, (stage + 1) * depth):
            sizes = self.numbers("first" if k == 0 else "last" if k == self.layers - 1 else "layer")
            found += [(n, ("dp",)) for n in (sizes if self.tensors else [sum(sizes)])]
        return found


@dataclass(frozen=True)
class Gpt3Sequence(_Pipeline):
    """GPT-3 175B, each layer's matrices split over `tp` devices, whose `matrices` elements of a layer are reduced.

    A layer takes `forward` and `backward` microseconds for a microbatch; with `recompute` both in the backward pass.
    """

    tp: int = 4
    dp: int = 4
    matrices: int = 452_984_832
    forward: int = 15_915
    backward: int = 31_830
    recompute: bool = False

    @property
    def times(self) -> Mapping[str, Sequence[float]]:
        """Microseconds of a layer, by pass."""
        return {"forward": (self.forward,), "backward": (self.backward, self.forward if self.recompute else 0)}

    def reduced(self, stage: int) -> list[Reduced]:
        return [(self.matrices, ("dp",))] * (self.layers // self.stages)


@dataclass(frozen=True)
class MoeSequence(_Pipeline):
    """GPT-3 with a mixture of `experts` experts, over `ep` devices, in place of the MLP of each layer.

    Microseconds: `attention_forward`, `attention_backward`; `mlp_forward`, `mlp_backward` of a whole MLP, of which each
    device does one part in `experts`. Gradients: `attention`, and `mlp` elements in all, of which a device has a part.
    """

    ep: int = 16
    experts: int = 16
    attention: int = 603_979_776
    mlp: int = 1_207_959_552
    attention_forward: int = 22_367
    attention_backward: int = 44_734
    mlp_forward: int = 41_293
    mlp_backward: int = 82_586

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("activation", "experts", "mlp"):
            if getattr(self, name) % self.ep:
                raise UsageError(f"{name} is a multiple of ep {self.ep}, got {getattr(self, name)}")

    @property
    def times(self) -> Mapping[str, Sequence[float]]:
        """Microseconds of a layer, by pass: of attention, and of the experts of a device."""
        return {
            "forward": (self.attention_forward, self.mlp_forward / self.experts),
            "backward": (self.attention_backward, self.mlp_backward / self.experts),
        }

    def reduced(self, stage: int) -> list[Reduced]:
        return [(self.mlp // self.ep, ("dp",)), (self.attention, ("dp", "ep"))] * (self.layers // self.stages)


PipelineSizes = Gpt2Sequence | Gpt3Sequence | MoeSequence
ProxySizes = DlrmSequence | CosmoflowSequence | PipelineSizes
"""The sizes of a published sequence."""
