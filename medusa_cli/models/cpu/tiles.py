"""Register tiles: the innermost loops of matrix products, written as LLVM vector code.

A tile multiplies R rows of activations with B *panels* of weights. A panel holds `LANES` output
channels side by side for each step of the sum, so that one vector load feeds `LANES` sums and no
sum is ever folded across lanes. Each output is therefore added up in the same order whatever other
rows are computed with it: a row's result is bit-identical alone and beside others.

While a tile multiplies, it asks for the weights of the next one: the arithmetic of several rows
takes about as long as memory needs for their weights, and neither waits for the other.
"""

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

LANES = 8
PANELS = 2  # B: with R = 4 its sums, weights and a row fill the 16 vector registers of AVX2

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_PAIRS = ir.VectorType(_I16, 2 * LANES)
_LINE = 64  # bytes that memory delivers at a time
_HAS_AVX2 = bool(binding.get_host_cpu_features().get("avx2"))


def float_tile(rows):
    """A tile of `rows` rows in float32.

    The tile is called in a jitted function with addresses and byte strides, as integers:

        tile(x, x_row, w, w_panel, w_step, ahead, steps, start, start_row, out, out_row)

    out[r, p, :] = start[r, p, :] + sum over k < steps of x[r, k] * w[p, k, :], steps >= 1.
    The weights `ahead` bytes further on are fetched into the cache, with 0 none.
    """

    @intrinsic
    def tile(
        _ctx, _x, _x_row, _w, _w_panel, _w_step, _ahead, _steps, _start, _start_row, _out, _out_row
    ):
        def codegen(context, builder, _signature, values):
            x, x_row, w, w_panel, w_step, ahead, steps, start, start_row, out, out_row = values
            sums = [
                [_load(builder, _at(builder, start, r, start_row, 32 * p), _FLOATS)
                 for p in range(PANELS)]
                for r in range(rows)
            ]  # fmt: skip
            multiply_add = _function(builder, "llvm.fma.v8f32", _FLOATS, [_FLOATS] * 3)
            # Panels are streams of their own, or lie side by side in one line.
            apart = builder.icmp_signed(">=", w_panel, ir.Constant(_I64, _LINE))
            second = builder.select(apart, w_panel, w_step)

            def step(k, sums):
                weights = [
                    _load(builder, builder.add(_at(builder, w, p, w_panel), builder.mul(k, w_step)),
                          _FLOATS)
                    for p in range(PANELS)
                ]  # fmt: skip
                after = []
                for r in range(rows):
                    address = builder.add(_at(builder, x, r, x_row), _times(builder, k, 4))
                    value = _spread(builder, _load(builder, address, _F32), _FLOATS)
                    after.append(
                        [builder.call(multiply_add, [value, weights[p], sums[r][p]])
                         for p in range(PANELS)]
                    )  # fmt: skip
                return after

            def fetch(k):
                line = builder.add(builder.add(w, ahead), builder.mul(k, w_step))
                _fetch(builder, line)
                _fetch(builder, builder.add(line, second))

            for r, row in enumerate(_loop(builder, steps, ahead, 2, sums, step, fetch)):
                for p, total in enumerate(row):
                    _store(builder, total, _at(builder, out, r, out_row, 32 * p))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), codegen

    return tile


def int8_tile(rows, portable=not _HAS_AVX2):
    """A tile of `rows` rows of 16-bit activations with 8-bit weights; sums are exact in 32 bits.

    Steps go over pairs of inputs: a panel holds [steps, LANES, 2] bytes, a row of x [steps, 2]
    16-bit numbers. Called with addresses and byte strides, as integers:

        tile(x, x_row, w, w_panel, ahead, steps, scales, row_scales, bias, out, out_row)

    out[r, p, :] = bias[p, :] + scales[p, :] * row_scales[r] * (the integer sum), steps >= 1.
    `ahead` as in `float_tile`.

    Args:
        portable: use no instruction of x86.
    """

    @intrinsic
    def tile(
        _ctx, _x, _x_row, _w, _w_panel, _ahead, _steps, _scales, _row_scales, _bias, _out, _out_row
    ):
        def codegen(context, builder, _signature, values):
            x, x_row, w, w_panel, ahead, steps, scales, row_scales, bias, out, out_row = values
            nothing = ir.Constant(_INTS, None)
            sums = [[nothing] * PANELS for _ in range(rows)]
            multiply_pairs = _multiply_pairs_portable if portable else _multiply_pairs_avx2

            def step(k, sums):
                weights = []
                for p in range(PANELS):
                    address = builder.add(
                        _at(builder, w, p, w_panel), _times(builder, k, 2 * LANES)
                    )
                    narrow = _load(builder, address, ir.VectorType(_I8, 2 * LANES))
                    weights.append(builder.sext(narrow, _PAIRS))
                after = []
                for r in range(rows):
                    address = builder.add(_at(builder, x, r, x_row), _times(builder, k, 4))
                    pair = _spread(builder, _load(builder, address, _I32), _INTS)
                    pairs = builder.bitcast(pair, _PAIRS)
                    after.append(
                        [builder.add(sums[r][p], multiply_pairs(builder, pairs, weights[p]))
                         for p in range(PANELS)]
                    )  # fmt: skip
                return after

            def fetch(k):
                for p in range(PANELS):
                    panel = builder.add(_at(builder, w, p, w_panel), ahead)
                    _fetch(builder, builder.add(panel, _times(builder, k, 2 * LANES)))

            steps_of_line = _LINE // (2 * LANES)
            for r, row in enumerate(_loop(builder, steps, ahead, steps_of_line, sums, step, fetch)):
                row_scale = _load(builder, _at(builder, row_scales, r, 4), _F32)
                for p, total in enumerate(row):
                    scale = _load(builder, _at(builder, scales, p, 32), _FLOATS)
                    value = builder.fmul(builder.sitofp(total, _FLOATS), scale)
                    value = builder.fmul(value, _spread(builder, row_scale, _FLOATS))
                    value = builder.fadd(value, _load(builder, _at(builder, bias, p, 32), _FLOATS))
                    _store(builder, value, _at(builder, out, r, out_row, 32 * p))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), codegen

    return tile


@intrinsic
def float_of_bits(_ctx, _bits):
    """The float32 with these 32 bits."""

    def codegen(_context, builder, _signature, values):
        return builder.bitcast(values[0], _F32)

    return types.float32(types.int32), codegen


@intrinsic
def floats_at(_ctx, _address):
    """A pointer to float32 numbers."""

    def codegen(_context, builder, _signature, values):
        return builder.inttoptr(values[0], _F32.as_pointer())

    return types.CPointer(types.float32)(types.int64), codegen


@intrinsic
def ints_at(_ctx, _address):
    """A pointer to 64-bit whole numbers."""

    def codegen(_context, builder, _signature, values):
        return builder.inttoptr(values[0], _I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@intrinsic
def multiply_add(_ctx, _a, _b, _c):
    """a * b + c with one rounding, as the tiles add."""

    def codegen(_context, builder, _signature, values):
        return builder.call(_function(builder, "llvm.fma.f32", _F32, [_F32] * 3), values)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _loop(builder, steps, ahead, unroll, sums, step, fetch):
    """Emits `for k in range(steps): sums = step(k, sums)` with the sums in registers.

    Where `ahead` is not 0, `fetch(k)` comes every `unroll` steps.
    """
    nothing = ir.Constant(_I64, 0)
    groups = builder.sdiv(steps, ir.Constant(_I64, unroll))
    whole = builder.select(builder.icmp_signed("==", ahead, nothing), nothing, groups)

    def together(group, sums):
        k = _times(builder, group, unroll)
        fetch(k)
        for more in range(unroll):
            sums = step(builder.add(k, ir.Constant(_I64, more)), sums)
        return sums

    sums = _repeat(builder, nothing, whole, sums, together)
    return _repeat(builder, _times(builder, whole, unroll), steps, sums, step)


def _repeat(builder, first, end, sums, step):
    """Emits `for k in range(first, end): sums = step(k, sums)`."""
    before = builder.block
    body, behind = builder.append_basic_block("step"), builder.append_basic_block("behind")
    builder.cbranch(builder.icmp_signed("<", first, end), body, behind)
    builder.position_at_end(body)
    k = builder.phi(_I64)
    k.add_incoming(first, before)
    carried = []
    for row in sums:
        carried.append([builder.phi(value.type) for value in row])
        for phi, value in zip(carried[-1], row, strict=True):
            phi.add_incoming(value, before)
    after = step(k, carried)
    following = builder.add(k, ir.Constant(_I64, 1))
    k.add_incoming(following, body)
    for phis, values in zip(carried, after, strict=True):
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, behind)
    builder.position_at_end(behind)
    results = []
    for befores, afters in zip(sums, after, strict=True):
        results.append([builder.phi(value.type) for value in befores])
        for phi, early, late in zip(results[-1], befores, afters, strict=True):
            phi.add_incoming(early, before)
            phi.add_incoming(late, body)
    return results


def _multiply_pairs_avx2(builder, a, b):
    """[LANES, 2] x [LANES, 2] -> the sums of each pair of products, [LANES]."""
    function = _function(builder, "llvm.x86.avx2.pmadd.wd", _INTS, [_PAIRS, _PAIRS])
    return builder.call(function, [a, b])


def _multiply_pairs_portable(builder, a, b):
    wide = ir.VectorType(_I32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    undefined = ir.Constant(wide, ir.Undefined)
    halves = [
        builder.shuffle_vector(
            products, undefined, ir.Constant(_INTS, [2 * lane + odd for lane in range(LANES)])
        )
        for odd in (0, 1)
    ]
    return builder.add(*halves)


def _function(builder, name, result, arguments):
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _times(builder, value, factor):
    return builder.mul(value, ir.Constant(_I64, factor))


def _at(builder, base, index, stride, offset=0):
    """Address of element `index`, a number known now, at a stride that may be known only later."""
    if isinstance(stride, int):
        return builder.add(base, ir.Constant(_I64, index * stride + offset))
    address = builder.add(base, _times(builder, stride, index))
    return builder.add(address, ir.Constant(_I64, offset))


def _load(builder, address, kind):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _fetch(builder, address):
    """Asks for a line of memory, which may be none of ours, without waiting for it."""
    pointer = _I8.as_pointer()
    function = _function(
        builder, "llvm.prefetch.p0i8", ir.VoidType(), [pointer, _I32, _I32, _I32]
    )  # fmt: skip
    read, near, data = (ir.Constant(_I32, number) for number in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, pointer), read, near, data])


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _spread(builder, scalar, kind):
    """A vector with the scalar in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, None))
