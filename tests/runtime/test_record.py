"""What ranks keep of what they compute."""

from pathlib import Path

import numpy as np

import distir
from distir.api.data import Data
from distir.backends.lowering.engine import TorchRank, own_array
from distir.executor.reference.sequential import SequentialExecutor
from distir.ir.type import BFloat16, Float64
from distir.models import mlp
from distir.runtime.record import Recorder, RecordKey, recorded
from tests.backends.ranks import on_ranks
from tests.transforms.programs import Plan, distributed, small_gpt


def test_values_come_back_step_by_step(tmp_path: Path):
    recorder = Recorder(tmp_path, 3, np.array)
    recorder("f", "x", [1.0], 0)
    recorder("f", "x", [2.0], 1)
    recorder.end_step()
    recorder("f", "x", [3.0], 0)
    recorder.end_step()
    recorder("f", "x", [4.0], 0)  # of a step that did not end
    recorder.file.close()
    first, second = recorded(tmp_path, 3)
    assert {k: x.tolist() for k, x in first.items()} == {RecordKey("f", "x", 0): [1.0], RecordKey("f", "x", 1): [2.0]}
    assert list(second) == [RecordKey("f", "x", 0)]


def test_a_rank_shows_every_tensor_it_makes():
    """The same values as the reference executor's, of each microbatch."""
    model = distir.Model(mlp(3, 8, 4, Float64))
    program = distir.distribute(model, distir.Plan(microbatches=2))
    arrays = model.initial()
    data = Data(model.function, arrays).step(0)
    given = [(arrays | data)[v] for v in model.function.inputs]
    made: dict[RecordKey, np.ndarray] = {}
    rank = TorchRank(
        program, 0, tap=lambda f, name, x, microbatch: made.update({RecordKey(f, name, microbatch): own_array(x)})
    )
    rank.load(dict(enumerate(given)))
    rank.step()
    seen: dict[str, list[np.ndarray]] = {}
    SequentialExecutor(tap=lambda v, x: seen.setdefault(v.name, []).append(x) or x).compute(program, given)
    body = [k for k in made if k.microbatch is not None]
    assert {k.microbatch for k in body} == {0, 1}
    assert {k.name for k in made} >= {"y0", "a0", "y2", "dwA"} & seen.keys()
    for key in body:
        found = [x[0] for x in seen[key.name]]
        assert any(np.allclose(made[key], x, rtol=1e-12) for x in found), key


def test_arrays_are_copies():
    import torch

    x = torch.ones(3)
    copy = own_array(x)
    x.add_(1)
    assert copy.tolist() == [1, 1, 1]
    assert own_array(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
    assert BFloat16.numpy.name == "bfloat16"


def pipeline(rank: int, n: int) -> int:
    """How many tensors a rank of a pipeline shows in a step, each as soon as it is there."""
    source = small_gpt()
    program = distributed(source, Plan(pp=n, microbatches=4)).program
    names: list[str] = []
    engine = TorchRank(program, rank, tap=lambda f, name, x, microbatch: names.append(name))
    engine.load(dict(enumerate(source.arrays)))
    engine.step()
    return len(names)


def test_the_ranks_of_a_pipeline_show_what_they_make():
    """They wait for every receive where it stands: none may stand before what its sender waits for."""
    assert min(on_ranks(2, pipeline)) > 0
