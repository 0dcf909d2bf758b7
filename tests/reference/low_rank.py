"""PowerSGD with error feedback in plain loops, for matrices as lists of rows.

Vogels et al., 2019, arXiv 1905.13727, algorithms 1 and 2, with Gram-Schmidt from left to right.
"""

Matrix = list[list[float]]


class LowRankOracle:
    """The mean gradients of one matrix over several ranks, and what each rank keeps."""

    def __init__(self, factor: Matrix, rows: int, ranks: int) -> None:
        """`factor` has as many rows as the matrix has columns; it is Q at the start."""
        self.factor = [list(row) for row in factor]
        self.errors = [[[0.0] * len(factor) for _ in range(rows)] for _ in range(ranks)]

    def mean(self, grads: list[Matrix]) -> Matrix:
        """P Q^T for the gradients of all ranks; errors and factor go on."""
        ranks, rows, columns = len(grads), len(grads[0]), len(grads[0][0])
        width = len(self.factor[0])
        moved = [
            [[g + e for g, e in zip(*pair, strict=True)] for pair in zip(grad, error, strict=True)]
            for grad, error in zip(grads, self.errors, strict=True)
        ]
        left = [[0.0] * width for _ in range(rows)]
        for matrix in moved:
            for i in range(rows):
                for k in range(width):
                    left[i][k] += (
                        sum(matrix[i][j] * self.factor[j][k] for j in range(columns)) / ranks
                    )
        _orthonormalize(left)
        right = [[0.0] * width for _ in range(columns)]
        for matrix in moved:
            for j in range(columns):
                for k in range(width):
                    right[j][k] += sum(matrix[i][j] * left[i][k] for i in range(rows)) / ranks
        mean = [
            [sum(left[i][k] * right[j][k] for k in range(width)) for j in range(columns)]
            for i in range(rows)
        ]
        self.errors = [
            [[m - a for m, a in zip(*pair, strict=True)] for pair in zip(matrix, mean, strict=True)]
            for matrix in moved
        ]
        self.factor = right
        return mean


def _orthonormalize(matrix: Matrix) -> None:
    for k in range(len(matrix[0])):
        for before in range(k):
            along = sum(row[before] * row[k] for row in matrix)
            for row in matrix:
                row[k] -= along * row[before]
        length = sum(row[k] ** 2 for row in matrix) ** 0.5
        for row in matrix:
            row[k] /= length
