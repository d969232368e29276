"""Which process does which task of a search."""

from distir.search.simulating import Price, Refine, Simulate, _Tasks, placed_for
from distir.search.space import Candidate


def candidate(tp, dp=1):
    return Candidate(dp, tp, 1, 1)


def tasks_of(processes, left):
    """Tasks of processes, of templates of equal degrees."""
    return _Tasks(
        processes, lambda: left.pop(0) if left else None, lambda task: placed_for(task, lambda c: (c.tp, c.dp))
    )


def test_tasks_go_to_the_process_that_has_placed_the_model_for_them():
    left = [Price([((tp, False, "none", ()), [1])], 8) for tp in (1, 2)]
    left += [Simulate(candidate(1)), Simulate(candidate(2)), Simulate(candidate(2, 4))]
    tasks = tasks_of(2, left)
    one, two = tasks.next(0), tasks.next(1)
    assert isinstance(one, Price)
    assert isinstance(two, Price)
    assert tasks.next(1) == Simulate(candidate(2))  # the first one waits for the other process
    assert tasks.next(1) == Simulate(candidate(2, 4))
    assert tasks.next(0) == Simulate(candidate(1))
    assert tasks.next(0) is tasks.next(1) is None


def test_bounds_are_refined_where_their_template_is_placed():
    """Not where another one of the same degree of tensor parallelism is."""
    left = [Refine((candidate(2, n),)) for n in (1, 4, 4, 1, 1)]
    tasks = tasks_of(2, left)
    done = [tasks.next(k) for k in (0, 1, 0, 1, 0)]
    assert done == [Refine((candidate(2, n),)) for n in (1, 4, 1, 4, 1)]


def test_a_process_does_not_wait_for_tasks_of_its_own():
    """It takes one that waits for another process when enough of these wait, and then has placed the model, too."""
    left = [Simulate(candidate(2, n)) for n in range(1, 9)]
    tasks = tasks_of(2, left)
    assert tasks.next(0) == Simulate(candidate(2, 1))
    assert tasks.next(1) == Simulate(candidate(2, 2))
    assert len(left) == 3  # of five that were asked for three wait
    assert [tasks.next(1) for _ in range(6)] == [Simulate(candidate(2, n)) for n in (6, 7, 8, 3, 4, 5)]


def test_no_task_is_lost():
    left = [Refine((candidate(tp, n),)) for n in range(5) for tp in (1, 2, 4)]
    every = list(left)
    tasks = tasks_of(3, left)
    done = []
    while row := [x for k in (2, 0, 0, 1) if (x := tasks.next(k)) is not None]:
        done += row
    assert sorted(done) == sorted(every)
