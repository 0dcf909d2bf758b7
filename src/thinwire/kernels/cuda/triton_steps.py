"""Triton kernels of LAMB, LARS and the outer SGD, for all tensors of a list in one launch.

`addresses_ptr` holds the addresses of each tensor's arrays, one row per tensor. A program works on
one block of one tensor. `owners_ptr` has the tensor of each block, `tensors_ptr` the first block
and the number of entries of each tensor. `constants_ptr` is float64 and is rounded to the type of
the tensors, TYPE. Norms are summed in float64, within blocks and then over the blocks of a tensor,
in an order that follows from its length alone. All kernels are launched without contraction of a *
b + c, which would round once instead of twice.
"""

import triton
import triton.language as tl

NO_MOMENTUM = tl.constexpr(0)
PLAIN = tl.constexpr(1)
NESTEROV = tl.constexpr(2)
"""The kinds of momentum."""


@triton.jit
def _block_of(owners_ptr, tensors_ptr, BLOCK: tl.constexpr):
    """Return the tensor of this program, the positions of its block, and the mask of valid ones."""
    tensor = tl.load(owners_ptr + tl.program_id(0))
    block = tl.program_id(0) - tl.load(tensors_ptr + 2 * tensor)
    at = block * BLOCK + tl.arange(0, BLOCK)
    return tensor, at, at < tl.load(tensors_ptr + 2 * tensor + 1)


@triton.jit
def _array(addresses_ptr, tensor, column, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(addresses_ptr + tensor * COLUMNS + column).to(tl.pointer_type(TYPE))


@triton.jit
def _quotient(x, y):
    """Divide, rounded by IEEE 754: the plain division of float32 is only approximate on a GPU."""
    if x.dtype == tl.float32:
        z = tl.div_rn(x, y)
    else:
        z = x / y
    return z


@triton.jit
def _root(x):
    """Take the square root, rounded by IEEE 754."""
    if x.dtype == tl.float32:
        z = tl.sqrt_rn(x)
    else:
        z = tl.sqrt(x)
    return z


@triton.jit
def _store_squares(sums_ptr, x, y):
    """Store the sums over a block of x^2 and y^2, zero outside, in float64."""
    wide_x, wide_y = x.to(tl.float64), y.to(tl.float64)
    tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(wide_x * wide_x, 0))
    tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(wide_y * wide_y, 0))


@triton.jit
def trust_ratios(tensors_ptr, trust_ptr, sums_ptr, ratios_ptr, BLOCK: tl.constexpr):
    """Compute `core.norms.trust_ratio`, one tensor per program.

    `trust_ptr`: coefficient, wd, eps, low, high.
    """
    tensor = tl.program_id(0)
    first = tl.load(tensors_ptr + 2 * tensor)
    end = first + (tl.load(tensors_ptr + 2 * tensor + 1) + BLOCK - 1) // BLOCK
    params = tl.zeros([BLOCK], tl.float64)
    updates = tl.zeros([BLOCK], tl.float64)
    while first < end:
        at = first + tl.arange(0, BLOCK)
        params += tl.load(sums_ptr + 2 * at, at < end, other=0.0)
        updates += tl.load(sums_ptr + 2 * at + 1, at < end, other=0.0)
        first += BLOCK
    param, update = tl.sqrt(tl.sum(params, 0)), tl.sqrt(tl.sum(updates, 0))
    defined = (param > 0) & (update > 0)
    denominator = update + tl.load(trust_ptr + 1) * param + tl.load(trust_ptr + 2)
    ratio = tl.load(trust_ptr) * param / tl.where(defined, denominator, 1.0)
    low, high = tl.load(trust_ptr + 3), tl.load(trust_ptr + 4)
    ratio = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    tl.store(ratios_ptr + tensor, tl.where(defined, ratio, 1.0).to(ratios_ptr.dtype.element_ty))


@triton.jit
def _direction(p, m, v, constants_ptr, TYPE: tl.constexpr):
    scale1, scale2 = tl.load(constants_ptr + 5).to(TYPE), tl.load(constants_ptr + 6).to(TYPE)
    eps, wd = tl.load(constants_ptr + 7).to(TYPE), tl.load(constants_ptr + 8).to(TYPE)
    return _quotient(scale1 * m, _root(scale2 * v) + eps) + wd * p


@triton.jit
def lamb_moments_(
    addresses_ptr,
    owners_ptr,
    tensors_ptr,
    constants_ptr,
    sums_ptr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Update the moments m and v of p, g, m, v; sum the squares of p and of the direction.

    `constants_ptr`: lr, b1, 1 - b1, b2, 1 - b2, 1/(1 - b1^t), 1/(1 - b2^t), eps, wd.
    """
    tensor, at, inside = _block_of(owners_ptr, tensors_ptr, BLOCK)
    m_ptr = _array(addresses_ptr, tensor, 2, 4, TYPE)
    v_ptr = _array(addresses_ptr, tensor, 3, 4, TYPE)
    p = tl.load(_array(addresses_ptr, tensor, 0, 4, TYPE) + at, inside, other=0.0)
    g = tl.load(_array(addresses_ptr, tensor, 1, 4, TYPE) + at, inside, other=0.0)
    b1, rest1 = tl.load(constants_ptr + 1).to(TYPE), tl.load(constants_ptr + 2).to(TYPE)
    b2, rest2 = tl.load(constants_ptr + 3).to(TYPE), tl.load(constants_ptr + 4).to(TYPE)
    m = b1 * tl.load(m_ptr + at, inside, other=0.0) + rest1 * g
    v = b2 * tl.load(v_ptr + at, inside, other=0.0) + rest2 * (g * g)
    tl.store(m_ptr + at, m, inside)
    tl.store(v_ptr + at, v, inside)
    _store_squares(sums_ptr, p, _direction(p, m, v, constants_ptr, TYPE))


@triton.jit
def lamb_move_(
    addresses_ptr,
    owners_ptr,
    tensors_ptr,
    constants_ptr,
    ratios_ptr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Compute the directions again, and move p along them."""
    tensor, at, inside = _block_of(owners_ptr, tensors_ptr, BLOCK)
    p_ptr = _array(addresses_ptr, tensor, 0, 4, TYPE)
    p = tl.load(p_ptr + at, inside, other=0.0)
    m = tl.load(_array(addresses_ptr, tensor, 2, 4, TYPE) + at, inside, other=0.0)
    v = tl.load(_array(addresses_ptr, tensor, 3, 4, TYPE) + at, inside, other=0.0)
    rate = tl.load(constants_ptr).to(TYPE) * tl.load(ratios_ptr + tensor)
    tl.store(p_ptr + at, p - rate * _direction(p, m, v, constants_ptr, TYPE), inside)


@triton.jit
def lars_squares(
    addresses_ptr, owners_ptr, tensors_ptr, sums_ptr, BLOCK: tl.constexpr, TYPE: tl.constexpr
):
    """Sum the squares of p and g."""
    tensor, at, inside = _block_of(owners_ptr, tensors_ptr, BLOCK)
    p = tl.load(_array(addresses_ptr, tensor, 0, 3, TYPE) + at, inside, other=0.0)
    g = tl.load(_array(addresses_ptr, tensor, 1, 3, TYPE) + at, inside, other=0.0)
    _store_squares(sums_ptr, p, g)


@triton.jit
def _with_momentum(step, b_ptr, at, inside, momentum, KIND: tl.constexpr):
    """Return the step with momentum, from a step and the momentum b, which changes."""
    change = step
    if KIND != NO_MOMENTUM:
        velocity = momentum * tl.load(b_ptr + at, inside, other=0.0) + step
        tl.store(b_ptr + at, velocity, inside)
        if KIND == PLAIN:
            change = velocity
        else:
            change = step + momentum * velocity
    return change


@triton.jit
def lars_move_(
    addresses_ptr,
    owners_ptr,
    tensors_ptr,
    constants_ptr,
    ratios_ptr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Update p, g and, with momentum, b by LARS; `constants_ptr`: lr, momentum, wd."""
    tensor, at, inside = _block_of(owners_ptr, tensors_ptr, BLOCK)
    p_ptr = _array(addresses_ptr, tensor, 0, 3, TYPE)
    b_ptr = _array(addresses_ptr, tensor, 2, 3, TYPE)
    p = tl.load(p_ptr + at, inside, other=0.0)
    g = tl.load(_array(addresses_ptr, tensor, 1, 3, TYPE) + at, inside, other=0.0)
    rate = tl.load(constants_ptr).to(TYPE) * tl.load(ratios_ptr + tensor)
    momentum, wd = tl.load(constants_ptr + 1).to(TYPE), tl.load(constants_ptr + 2).to(TYPE)
    tl.store(
        p_ptr + at,
        p - _with_momentum(rate * (g + wd * p), b_ptr, at, inside, momentum, KIND),
        inside,
    )


@triton.jit
def outer_(
    addresses_ptr,
    owners_ptr,
    tensors_ptr,
    constants_ptr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Take the outer step of s by the change c, with momentum b; `constants_ptr`: lr, momentum."""
    tensor, at, inside = _block_of(owners_ptr, tensors_ptr, BLOCK)
    s_ptr = _array(addresses_ptr, tensor, 0, 3, TYPE)
    b_ptr = _array(addresses_ptr, tensor, 2, 3, TYPE)
    s = tl.load(s_ptr + at, inside, other=0.0)
    c = tl.load(_array(addresses_ptr, tensor, 1, 3, TYPE) + at, inside, other=0.0)
    rate, momentum = tl.load(constants_ptr).to(TYPE), tl.load(constants_ptr + 1).to(TYPE)
    tl.store(s_ptr + at, s - rate * _with_momentum(c, b_ptr, at, inside, momentum, KIND), inside)
