"""The interval between two averagings that follows loss and learning rate, a pure function."""

import math

__all__ = ["adapted_interval"]


def adapted_interval(
    init_k_steps: int,
    max_k_steps: int,
    *,
    loss: float,
    first_loss: float,
    rate: float,
    first_rate: float,
) -> int:
    """Steps until the next averaging: clip(ceil(sqrt((lr0 F) / (lr F0)) * init_k_steps), 1,
    max_k_steps).

    As the loss falls ranks average more often; as the rate falls they average less often.

    Args:
        init_k_steps: Interval at the start, 1 <= init_k_steps <= max_k_steps.
        max_k_steps: Largest interval.
        loss: F, the mean loss now, >= 0. 0 gives the interval 1.
        first_loss: F0, the mean loss at the start, >= 0. 0 says nothing, and the interval is
            `init_k_steps`.
        rate: lr, the learning rate now, > 0.
        first_rate: lr0, the learning rate at the start, > 0.

    Returns:
        Between 1 and `max_k_steps`; float64 arithmetic, clipped before it becomes an integer.

    Source: Wang and Joshi, 2018, arXiv 1810.08313, section 4. Differs: guards where a loss is 0.
    """
    if first_loss == 0:
        return init_k_steps
    above, below = first_rate * loss, rate * first_loss
    if below > 0 and math.isfinite(above) and math.isfinite(below):
        root = math.sqrt(above / below)
    else:  # a product left the range of a double; the quotients need not
        root = math.sqrt(first_rate / rate) * math.sqrt(loss / first_loss)
    wanted = root * init_k_steps
    return max_k_steps if wanted >= max_k_steps else max(1, math.ceil(wanted))
