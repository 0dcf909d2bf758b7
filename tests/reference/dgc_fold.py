"""Slow oracle of selection, fold and sparse sum: entry by entry, one rounding per operation."""

import numpy as np


def largest(values, k):
    """Positions of the k largest magnitudes, ascending; of equal ones the lowest."""
    by_magnitude = sorted(range(len(values)), key=lambda i: (-abs(float(values[i])), i))
    return sorted(by_magnitude[:k])


def folded(grad, residual, buffer, momentum, nesterov):
    """(u', v') as lists of NumPy scalars of the residual's type; `buffer` None gives u' None."""
    kind = np.asarray(residual).dtype.type
    new_buffer, new_residual = [], []
    for i in range(len(residual)):
        g, v = kind(grad[i]), kind(residual[i])
        if buffer is None:
            new_residual.append(kind(v + g))
            continue
        u = kind(buffer[i])
        if nesterov:
            u = kind(kind(momentum) * kind(u + g))
            new_residual.append(kind(kind(v + u) + g))
        else:
            u = kind(kind(kind(momentum) * u) + g)
            new_residual.append(kind(v + u))
        new_buffer.append(u)
    return (None if buffer is None else new_buffer), new_residual


def sparse_sum(parts, kind):
    """Dictionary from position to sum, parts added in order starting from zero."""
    sums = {}
    for indices, values in parts:
        for i, value in zip(indices, values, strict=True):
            sums[int(i)] = kind(sums.get(int(i), kind(0)) + kind(value))
    return dict(sorted(sums.items()))
