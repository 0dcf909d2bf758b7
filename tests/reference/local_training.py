"""The interval that follows loss and rate."""

import math


def interval(init, most, loss, first_loss, rate, first_rate):
    """The adaptive rule, with exact fractions where doubles would do."""
    if first_loss == 0:
        return init
    return int(
        min(max(math.ceil(math.sqrt((first_rate * loss) / (rate * first_loss)) * init), 1), most)
    )


def intervals(losses, rates, *, init, most, begin):
    """Interval after each step, and the steps that average; `losses` are means over ranks."""
    k, last, first, found, averaged = init, begin, None, [], []
    for step, (loss, rate) in enumerate(zip(losses, rates, strict=True), start=1):
        if first is None and rate > 0:
            first = (loss, rate)
        if step <= begin:
            last = step
            averaged.append(step)
        elif step - last == k:
            last = step
            averaged.append(step)
            if rate > 0:
                k = interval(init, most, loss, first[0], rate, first[1])
        found.append(k)
    return found, averaged
