"""Threads that share one short product: whoever is awake takes the next piece.

The caller works too, and waits at the end only for pieces that somebody has begun. A helper thread
that sleeps, or whose core another program has taken, is missed but holds nobody up; at a barrier,
as OpenMP has them, each product would wait for the last thread to be given a core.

A job is an array of 64-bit numbers in memory that all threads see: a word that pieces are claimed
from, a count of finished pieces, and the arguments. This module knows how pieces are handed out;
what a piece does is `jobs`' matter.
"""

import sys
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

# Words of a job. The first four change often: each has a cache line of its own.
CLAIM, DONE, STOP, RUNNING, KIND, ARGUMENTS = 0, 8, 16, 24, 32, 33
WORDS = 64
# A claim word holds (number of the job, pieces, next piece): one atomic read tells all three.
PIECES, NUMBER, MASK = 20, 40, (1 << 20) - 1

SPINS, NAPS, NAP_MICROSECONDS = 3000, 200, 50  # some 1 ms, then 10 to 20 ms; then a helper ends
_WINDOWS = sys.platform == "win32"
_I64 = ir.IntType(64)


@intrinsic
def atomic_add(_ctx, _address, _value):
    """Adds to the 64-bit number at an address; returns what was there."""

    def codegen(_context, builder, _signature, values):
        address = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.atomic_rmw("add", address, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(_ctx, _address):
    """The 64-bit number at an address."""

    def codegen(_context, builder, _signature, values):
        address = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.load_atomic(address, "seq_cst", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(_ctx, _address, _value):
    """Writes the 64-bit number at an address, behind all that was written before."""

    def codegen(context, builder, _signature, values):
        address = builder.inttoptr(values[0], _I64.as_pointer())
        builder.store_atomic(values[1], address, "seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def yield_core(_ctx):
    """Lets another thread run that wants this core."""

    def codegen(context, builder, _signature, _values):
        name = "SwitchToThread" if _WINDOWS else "sched_yield"
        _call(builder, name, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nap(_ctx):
    """Sleeps for `NAP_MICROSECONDS`, or the shortest time that the system knows."""

    def codegen(context, builder, _signature, _values):
        name, time = ("Sleep", 1) if _WINDOWS else ("usleep", NAP_MICROSECONDS)
        _call(builder, name, [ir.Constant(ir.IntType(32), time)])
        return context.get_dummy_value()

    return types.void(), codegen


def _call(builder, name, arguments):
    kind = ir.FunctionType(ir.IntType(32), [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, arguments)


@njit
def publish(job, pieces):
    """Offers the pieces of a job whose arguments are written."""
    claim = job.ctypes.data + 8 * CLAIM
    number = (atomic_load(claim) >> NUMBER) + 1
    atomic_store(job.ctypes.data + 8 * DONE, 0)
    atomic_store(claim, (number << NUMBER) | (pieces << PIECES))


@njit
def take(job):
    """Claims a piece; -1 where none is left. A claimed piece keeps the job's arguments in place."""
    claim = job.ctypes.data + 8 * CLAIM
    offer = atomic_load(claim)
    if offer & MASK >= (offer >> PIECES) & MASK:
        return -1
    offer = atomic_add(claim, 1)
    piece = offer & MASK
    return piece if piece < (offer >> PIECES) & MASK else -1


@njit
def finish(job):
    """Says that a claimed piece is done."""
    atomic_add(job.ctypes.data + 8 * DONE, 1)


@njit
def wait(job, pieces):
    """Returns when all pieces are done."""
    while atomic_load(job.ctypes.data + 8 * DONE) < pieces:
        yield_core()


@njit
def stopped(job):
    """Whether helpers shall end."""
    return atomic_load(job.ctypes.data + 8 * STOP) != 0


class Pool:
    """A job, and helper threads that start when there is work and end when there is none.

    Kernels hold Python's lock, so one job runs at a time; helpers do not need it.

    Attributes:
        threads: that work on a job, the caller among them.
        job: [WORDS] int64.
        scratch: [threads, elements] float32, room for each thread to work in.
    """

    def __init__(self, threads: int, helper: Callable[[NDArray[Any], int], None]) -> None:
        self.threads, self._helper = threads, helper
        self.job = np.zeros(WORDS, dtype=np.int64)
        self.scratch = np.empty((threads, 0), dtype=np.float32)
        self._helpers: list[Thread] = []
        weakref.finalize(self, _stop, self.job, self._helpers)

    def ready(self) -> NDArray[Any]:
        """The job, with helpers awake or on their way."""
        if self.job[RUNNING] < self.threads - 1:
            self._start()
        return self.job

    def reserve(self, elements: int) -> None:
        """Makes room for each thread to work in."""
        if self.scratch.shape[1] < elements:
            self.scratch = np.empty((self.threads, 2 * elements), dtype=np.float32)

    def _start(self) -> None:
        self._helpers[:] = [thread for thread in self._helpers if thread.is_alive()]
        names = {thread.name for thread in self._helpers}
        for number in range(1, self.threads):
            name = f"medusa-{number}"
            if name not in names:
                self.job[RUNNING] += 1
                arguments = (self.job, number)
                thread = Thread(target=self._helper, args=arguments, name=name, daemon=True)
                self._helpers.append(thread)
                thread.start()


def _stop(job: NDArray[Any], helpers: list[Thread]) -> None:
    job[STOP] = 1
    for thread in helpers:
        thread.join()
