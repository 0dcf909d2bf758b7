"""One dense update: buckets of gradients are summed, and each rank's facts ride on the last one."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from thinwire._devices import moved, uploaded
from thinwire.comm import Group, Pending
from thinwire.compress.dense import by_dtype, joined, parted
from thinwire.core.checksum import checked_mean_, checked_sum, with_checksum
from thinwire.exchange.digest import RollingDigest
from thinwire.layout.traffic import travels_checksummed


class DenseUpdate:
    """The sums of one update. All ranks launch the same buckets in the same order.

    The `last` bucket waits for the facts. It ends in a slot for each rank. A rank writes its own
    slot, and zeros into the others, so that the sum has them all.
    """

    def __init__(self, ranks: Group, step: int, *, last: int) -> None:
        self.step = step
        self.names: set[str] = set()
        """Names of the tensors that have been launched."""
        self.means: dict[str, Tensor] = {}
        """Means by name, once finished."""
        self._finite = True
        self._ranks = ranks
        self._last_number = last
        self._last: Mapping[str, Tensor] = {}
        self._flying: list[tuple[Mapping[str, Tensor], Pending[Tensor]]] = []

    def launch(self, number: int, grads: Mapping[str, Tensor]) -> None:
        """Launch one bucket; the last one is only kept."""
        self.names.update(grads)
        if number == self._last_number:
            self._last = grads
        else:
            self._launch(number, by_dtype(grads))

    def launch_last(self, slot: bytes) -> None:
        """Launch the last bucket. `slot`, of equal length on all ranks, rides on it."""
        groups = by_dtype(self._last)
        like = next(iter(groups[-1].values()))
        # a number for each byte, since a sum with zeros is exact; typed as `joined` has it
        dtype = torch.float32 if like.dtype == torch.float16 else like.dtype
        slots = torch.zeros(self._ranks.size, len(slot), dtype=dtype, device="cpu")
        slots[self._ranks.rank] = torch.frombuffer(bytearray(slot), dtype=torch.uint8)
        self._launch(self._last_number, groups, [uploaded(slots, like.device)])
        self._last = {}

    def _launch(
        self, number: int, groups: Sequence[Mapping[str, Tensor]], slots: Sequence[Tensor] = ()
    ) -> None:
        purpose = f"averaging dense tensors of step {self.step}, bucket {number}"
        for group in groups:
            rides = slots if group is groups[-1] else ()
            flat = joined([*group.values(), *rides])
            self._flying.append((group, self._sum(flat, purpose)))

    def finish(self, same: RollingDigest | None = None) -> list[bytes]:
        """Wait for all sums, and average them; return the slots of all ranks.

        The digest that `same` has not read, and that of the sums' bits, become known to it.
        """
        for _, pending in self._flying:
            pending.forward()
        total = torch.empty(0)
        reports = []
        for group, pending in self._flying:
            total = uploaded(pending.wait(), next(iter(group.values())).device)
            length = sum(tensor.numel() for tensor in group.values())
            mean = total[:length]
            reports.append(checked_mean_(mean, self._ranks.size, bits=True))
            self.means |= parted(mean, group)
        slots = total[length:].real if total.is_complex() else total[length:]
        self._flying.clear()
        digest = None if same is None else same.unread
        if digest is not None:
            reports.append(digest.view(1))
        # damage that leaves no whole numbers does not fit the checksums
        pieces = [torch.cat([r.to(slots.device) for r in reports]), slots.to(torch.uint8)]
        numbers, content = moved(pieces, torch.device("cpu"))
        sums = 0
        for finite, bits in numbers[: 2 * (len(numbers) // 2)].view(-1, 2).tolist():
            self._finite &= bool(finite)
            # order counts, so that swapped sums are noticed as well
            sums = (sums * 1_000_003 + bits) % (1 << 64)
        if same is not None:
            same.sums = sums
            same.unread = numbers[-1]
        return [row.tobytes() for row in content.view(self._ranks.size, -1).numpy()]

    def bad_mean(self, order: Mapping[str, int]) -> str | None:
        """Return the first tensor, in this order, whose mean is not finite."""
        if self._finite:
            return None
        bad = [name for name, mean in self.means.items() if not bool(mean.isfinite().all())]
        return min(bad, key=order.__getitem__, default=None)

    def means_of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the means of these tensors, in their `state_dtype`."""
        # in the order of the names, in which a norm over them is summed
        found = {name: self.means[name] for name in names}
        # float16 has travelled as float32
        return {n: x.float() if x.dtype == torch.bfloat16 else x for n, x in found.items()}

    def _sum(self, flat: Tensor, action: str) -> Pending[Tensor]:
        """Launch a sum; of few bytes every rank gathers the parts, each with a checksum."""
        group = self._ranks
        if not travels_checksummed(flat.nbytes, group.size):
            return group.all_reduce_(flat, action=action)
        # not tied to a step: a rank at another one must be told why by the facts, not refused
        parts = group.all_gather(with_checksum(flat.cpu(), 0), action=action)

        def total() -> Tensor:
            found, damaged = checked_sum(parts.wait(), flat.dtype, 0)
            for source, damage in enumerate(damaged.tolist()):
                if damage:
                    raise group.ended_by_damage(source, action)
            return found

        return Pending(total)
