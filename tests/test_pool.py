"""The thread pool: every piece runs once, a missing helper holds nobody up, threads come and go."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from medusa_cli.models.cpu import jobs, pool
from medusa_cli.models.cpu.pool import ARGUMENTS, RUNNING, STOP, Pool

PIECES = 64


@njit(nogil=True)
def count_pieces(job, number):  # type: ignore[no-untyped-def]
    """A helper whose pieces count themselves, and who took them, in the words of the arguments."""
    while not pool.stopped(job):
        piece = pool.take(job)
        if piece >= 0:
            pool.atomic_add(job.ctypes.data + 8 * (ARGUMENTS + number), 1)
            pool.finish(job)
        else:
            pool.yield_core()


@njit
def run(job, pieces):  # type: ignore[no-untyped-def]
    """Runs a job as its caller does."""
    pool.publish(job, pieces)
    while pool.take(job) >= 0:
        pool.atomic_add(job.ctypes.data + 8 * ARGUMENTS, 1)
        pool.finish(job)
    pool.wait(job, pieces)


def taken(job: NDArray[np.int64]) -> int:
    return int(job[ARGUMENTS : ARGUMENTS + 4].sum())


@pytest.fixture
def stopped() -> Iterator[Callable[[Pool], Pool]]:
    """Ends a pool's helpers with the test."""
    made: list[Pool] = []

    def keep(made_one: Pool) -> Pool:
        made.append(made_one)
        return made_one

    yield keep
    for one in made:
        one.job[STOP] = 1


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_piece_of_many_jobs_is_taken_once(
    threads: int, stopped: Callable[[Pool], Pool]
) -> None:
    shared = stopped(Pool(threads, count_pieces))
    for number in range(1, 3000):
        run(shared.ready(), number % PIECES)
        assert taken(shared.job) == sum(n % PIECES for n in range(1, number + 1)), number


def test_a_helper_that_never_comes_holds_nobody_up() -> None:
    lazy = Pool(2, lambda _job, _number: None)
    run(lazy.ready(), PIECES)
    assert taken(lazy.job) == PIECES
    assert lazy.job[ARGUMENTS] == PIECES


def test_a_claimed_piece_is_waited_for() -> None:
    job = np.zeros(pool.WORDS, dtype=np.int64)
    pool.publish(job, 2)
    assert pool.take(job) == 0
    assert pool.take(job) == 1
    assert pool.take(job) == -1
    pool.finish(job)
    ended = threading.Event()

    @njit(nogil=True)
    def wait(job):  # type: ignore[no-untyped-def]
        pool.wait(job, 2)

    def waiting() -> None:
        wait(job)
        ended.set()

    thread = threading.Thread(target=waiting)
    thread.start()
    assert not ended.wait(0.2)
    pool.finish(job)
    thread.join(20)
    assert ended.is_set()


def test_helpers_that_have_left_are_started_again() -> None:
    ended = threading.Event()

    def brief(job: NDArray[np.int64], _number: int) -> None:
        job[RUNNING] -= 1
        ended.set()

    shared = Pool(2, brief)
    for _ in range(3):
        ended.clear()
        shared.ready()
        assert ended.wait(10)
        while any(thread.is_alive() for thread in shared._helpers):
            time.sleep(0.001)


def test_idle_helpers_of_the_engine_leave() -> None:
    shared = Pool(2, jobs.helper)
    x, out = np.ones((1, 16), np.float32), np.empty((1, 16), np.float32)
    panels, bias = np.ones((2, 16, 8), np.float32), np.zeros(16, np.float32)
    jobs.matmul_float(shared.ready(), 2, x, panels, bias, out)
    assert (out == 16).all()
    for thread in shared._helpers:
        thread.join(60)
        assert not thread.is_alive()
    assert shared.job[RUNNING] == 0
    jobs.matmul_float(shared.ready(), 2, x, panels, bias, out)
    assert shared.job[RUNNING] == 1


def test_a_process_ends_with_helpers_awake() -> None:
    program = (
        "import numpy as np\n"
        "from medusa_cli.models.cpu import jobs\n"
        "from medusa_cli.models.cpu.pool import Pool\n"
        "pool = Pool(3, jobs.helper)\n"
        "x, out = np.ones((1, 16), np.float32), np.empty((1, 16), np.float32)\n"
        "panels, bias = np.ones((2, 16, 8), np.float32), np.zeros(16, np.float32)\n"
        "jobs.matmul_float(pool.ready(), 3, x, panels, bias, out)\n"
        "print(out[0, 0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "16.0\n", "")
