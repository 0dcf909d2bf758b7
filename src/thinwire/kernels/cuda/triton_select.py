"""Triton kernels of fold and selection.

Arrays are flat; a program works on one block of them or strides over several. The key of x is the
bit pattern of |x|; keys have the same order as magnitudes. The state of the selection is kept on
the device: `state_ptr` holds the digits of the k-th largest key found so far, and the number of
entries at or below them that are still wanted. All kernels are launched without contraction of a *
b + c, which would round once instead of twice.
"""

import triton
import triton.language as tl

VALUES = tl.constexpr(0)
PLAIN = tl.constexpr(1)
MOMENTUM = tl.constexpr(2)
NESTEROV = tl.constexpr(3)
"""Modes of the fold: none (the residual itself), v + g, v + (m u + g), or (v + m (u + g)) + g."""
LARGEST_BFLOAT16 = tl.constexpr(0x7F7F0000)
"""The bits of the largest bfloat16, as a float32."""


@triton.jit
def _widened(x):
    """Convert state to the type of the computation; bfloat16 is passed as its bits, int16."""
    if x.dtype == tl.int16:
        wide = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x
    return wide


@triton.jit
def _noise(at, seed):
    """Return 32 pseudorandom bits of position and seed; see `reference.mixed`."""
    x = (at ^ seed).to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _store(ptr, at, x, inside, seed, FOR_BUFFER: tl.constexpr):
    """Store state from the type of the computation, rounded stochastically to bfloat16."""
    if ptr.dtype.element_ty == tl.int16:
        bits = x.to(tl.uint32, bitcast=True)
        noise = _noise(at, seed)
        if FOR_BUFFER:
            noise = noise >> 16
        else:
            noise = noise & 0xFFFF
        # above the largest bfloat16 there is only infinity, and infinity and NaN must not move at
        # all
        bits += tl.where((bits & 0x7FFFFFFF) > LARGEST_BFLOAT16, 0, noise)
        tl.store(ptr + at, (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True), inside)
    else:
        tl.store(ptr + at, x, inside)


@triton.jit
def _folded(grad_ptr, residual_ptr, buffer_ptr, momentum_ptr, at, inside, MODE: tl.constexpr):
    x = _widened(tl.load(residual_ptr + at, inside, other=0))
    if MODE != VALUES:
        g = tl.load(grad_ptr + at, inside, other=0.0).to(x.dtype)
        if MODE == PLAIN:
            x = x + g
        else:
            u = _widened(tl.load(buffer_ptr + at, inside, other=0))
            m = tl.load(momentum_ptr)
            if MODE == MOMENTUM:
                x = x + (m * u + g)
            else:
                x = (x + m * (u + g)) + g
    return x


@triton.jit
def _key(x):
    if x.dtype == tl.float32:
        key = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        key = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    return key


@triton.jit
def count_digits(
    grad_ptr,
    residual_ptr,
    buffer_ptr,
    momentum_ptr,
    state_ptr,
    histogram_ptr,
    numel,
    low,
    DIGIT_BITS: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make a histogram of the digit above bit `low`.

    Only entries that share the state's higher digits count.
    """
    prefix = tl.load(state_ptr)
    counts = tl.zeros([1 << DIGIT_BITS], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < numel:
        at = first + tl.arange(0, BLOCK)
        inside = at < numel
        key = _key(_folded(grad_ptr, residual_ptr, buffer_ptr, momentum_ptr, at, inside, MODE))
        matches = inside & ((key >> (low + DIGIT_BITS)).to(tl.int64) == prefix)
        digit = ((key >> low) & ((1 << DIGIT_BITS) - 1)).to(tl.int32)
        counts += tl.histogram(digit, 1 << DIGIT_BITS, mask=matches)
        first += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.atomic_add(
        histogram_ptr + tl.arange(0, 1 << DIGIT_BITS), counts.to(tl.int64), mask=counts > 0
    )


@triton.jit
def choose_digit(histogram_ptr, state_ptr, DIGIT_BITS: tl.constexpr):
    """Append the digit at which the wanted number is reached from the largest; clear the counts."""
    at = tl.arange(0, 1 << DIGIT_BITS)
    counts = tl.load(histogram_ptr + at)
    wanted = tl.load(state_ptr + 1)
    reached = tl.cumsum(counts, 0, reverse=True) >= wanted
    digit = tl.sum(reached.to(tl.int64), 0) - 1
    tl.store(state_ptr, (tl.load(state_ptr) << DIGIT_BITS) | digit)
    tl.store(state_ptr + 1, wanted - tl.sum(tl.where(at > digit, counts, 0), 0))
    tl.store(histogram_ptr + at, tl.zeros_like(counts))


@triton.jit
def count_chosen(
    grad_ptr,
    residual_ptr,
    buffer_ptr,
    momentum_ptr,
    state_ptr,
    counts_ptr,
    numel,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count per block the keys above the k-th largest, and in a second row those that equal it."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    key = _key(_folded(grad_ptr, residual_ptr, buffer_ptr, momentum_ptr, at, inside, MODE)).to(
        tl.int64
    )
    last = tl.load(state_ptr)
    tl.store(counts_ptr + block, tl.sum((inside & (key > last)).to(tl.int64), 0))
    tl.store(
        counts_ptr + tl.num_programs(0) + block, tl.sum((inside & (key == last)).to(tl.int64), 0)
    )


@triton.jit
def write_chosen(
    grad_ptr,
    residual_ptr,
    buffer_ptr,
    momentum_ptr,
    state_ptr,
    before_ptr,
    indices_ptr,
    values_ptr,
    numel,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the chosen positions and values in ascending order; of equal magnitudes the first ones.

    `before_ptr` has the two counts of `count_chosen`, summed over the blocks before each.
    """
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    x = _folded(grad_ptr, residual_ptr, buffer_ptr, momentum_ptr, at, inside, MODE)
    key = _key(x).to(tl.int64)
    last = tl.load(state_ptr)
    wanted = tl.load(state_ptr + 1)
    above_before = tl.load(before_ptr + block)
    tied_before = tl.load(before_ptr + tl.num_programs(0) + block)
    tied = (inside & (key == last)).to(tl.int64)
    number = tied_before + tl.cumsum(tied, 0) - tied
    chosen = inside & ((key > last) | ((tied > 0) & (number < wanted)))
    taken = chosen.to(tl.int64)
    position = above_before + tl.minimum(tied_before, wanted) + tl.cumsum(taken, 0) - taken
    tl.store(indices_ptr + position, at, chosen)
    tl.store(values_ptr + position, x, chosen)


@triton.jit
def keep_rest(
    grad_ptr,
    residual_ptr,
    buffer_ptr,
    momentum_ptr,
    indices_ptr,
    sent_ptr,
    rest_ptr,
    count,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the folded residual minus the sent values, at their positions, before rounding."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    at = tl.load(indices_ptr + i, inside, other=0)
    x = _folded(grad_ptr, residual_ptr, buffer_ptr, momentum_ptr, at, inside, MODE)
    tl.store(rest_ptr + i, x - tl.load(sent_ptr + i, inside, other=0.0).to(x.dtype), inside)


@triton.jit(do_not_specialize=["seed"])
def fold_(
    grad_ptr,
    residual_ptr,
    buffer_ptr,
    momentum_ptr,
    numel,
    seed,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold the gradient; changes residual and momentum buffer."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    v = _widened(tl.load(residual_ptr + at, inside, other=0))
    g = tl.load(grad_ptr + at, inside, other=0.0).to(v.dtype)
    if MODE == PLAIN:
        v = v + g
    else:
        u = _widened(tl.load(buffer_ptr + at, inside, other=0))
        m = tl.load(momentum_ptr)
        if MODE == MOMENTUM:
            u = m * u + g
            v = v + u
        else:
            u = m * (u + g)
            v = (v + u) + g
        _store(buffer_ptr, at, u, inside, seed, FOR_BUFFER=True)
    _store(residual_ptr, at, v, inside, seed, FOR_BUFFER=False)


@triton.jit(do_not_specialize=["seed"])
def put_rest_(
    residual_ptr,
    buffer_ptr,
    indices_ptr,
    rest_ptr,
    count,
    seed,
    HAS_BUFFER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the result of `keep_rest` into the residual, and zero into the momentum buffer."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    at = tl.load(indices_ptr + i, inside, other=0)
    x = tl.load(rest_ptr + i, inside, other=0.0)
    _store(residual_ptr, at, x, inside, seed, FOR_BUFFER=False)
    if HAS_BUFFER:
        _store(buffer_ptr, at, tl.zeros_like(x), inside, seed, FOR_BUFFER=True)


@triton.jit(do_not_specialize=["seed"])
def round_(target_ptr, values_ptr, numel, seed, BLOCK: tl.constexpr):
    """Round values into a buffer."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    _store(
        target_ptr, at, tl.load(values_ptr + at, inside, other=0.0), inside, seed, FOR_BUFFER=True
    )
