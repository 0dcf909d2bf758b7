"""Exchange of a `DGCMomentum` over the ranks, and the update from its result."""

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import node_size_of
from thinwire.compress.dgc import DGC, DGCCompressor, Rule, locally_clipped
from thinwire.compress.entries import ArrivedEntries
from thinwire.compress.figures import report_coverage
from thinwire.core.arithmetic import arithmetic
from thinwire.core.checksum import bit_sums
from thinwire.core.feedback import in_chunks, rounding_seed, step_along_list_, store_
from thinwire.core.gradients import ClipByNorm, clipped
from thinwire.core.provenance import checksum_of
from thinwire.core.sharded import Shards, require_shards, shard_of
from thinwire.core.tensors import state_dtype
from thinwire.exchange.agreement import Participants
from thinwire.exchange.checks import SameHyperparameters
from thinwire.exchange.digest import RollingDigest
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.round import Round
from thinwire.exchange.synchronizer import Ranks
from thinwire.optim.dgc_settings import OF_DGC, RAMP, DGCSettings, config_of, wide_dtype
from thinwire.wire.message import WIRE_VERSION


class DGCSynchronizer:
    """The exchange of one `DGCMomentum`, for its own steps, `attach` and engines.

    `identity` tells apart the engines and optimizers over these ranks.
    """

    def __init__(self, optimizer: DGCSettings, ranks: Ranks, identity: str) -> None:
        self.optimizer, self.ranks, self._identity = optimizer, ranks, identity
        self.compressor: DGCCompressor | None = None
        """Compressor of the gradients; None before the first step."""
        self.last: GradientExchange | None = None
        """Exchange with the other ranks, kept after parameters were added."""
        self._participants = Participants()
        self._buckets: Sequence[Sequence[str]] = ()
        self._names_of_engine: Mapping[Tensor, str] = {}
        self._params: dict[str, Tensor] | None = None
        self.names: dict[Tensor, str] = {}
        """Name of each parameter, set by `joined`."""
        self._agreed: list[dict[str, Any]] | None = None
        """Ramp settings of each group, as all ranks last agreed on them."""
        self._in_force: list[dict[str, Any]] | None = None
        """Ramp settings used while buckets are launched, before the agreement of their step."""
        self._rules: dict[int, Rule] | None = None
        """Rule of each group during an update or a launch, while groups do not change."""

    @property
    def params(self) -> dict[str, Tensor]:
        """Parameters by name, in the order of the exchange; every name is unique."""
        if self._params is None:
            self._params, facts = {}, self.optimizer._facts
            for key, p in enumerate(self.optimizer._ordered_params()):
                name = self._names_of_engine.get(p) or facts(p).name or f"parameter {key}"
                name = name if name not in self._params else f"{name} (parameter {key})"
                self._params[name] = p
            self.names = {p: name for name, p in self._params.items()}
        return self._params

    def relist(self) -> None:
        """Rebuild the list of parameters after an addition or a change of names."""
        self._params = None

    @property
    def shards(self) -> Shards:
        """This rank's shard of each parameter, by its name in the exchange."""
        return Shards(self.params)

    @property
    def gradients(self) -> GradientExchange | None:
        """Exchange with the other ranks; None before the first step."""
        known = self.last
        return known if known is not None and known.names == list(self.params) else None

    def joined(self) -> GradientExchange:
        """Return the exchange, after a comparison of the settings over the ranks if needed."""
        known = self.gradients
        if known is None:
            require_shards(self.params, self.ranks.shards)
            known = self.last = self._compared()
        known.make_common()
        return known

    def bind(
        self,
        identity: str,
        digest_every: int,
        names: Mapping[Tensor, str],
        participants: Participants,
    ) -> None:
        """Bind this exchange to an engine, with its name, its parameter names and its agreement."""
        self._identity, self._names_of_engine, self._participants = identity, names, participants
        self.optimizer.digest_every = digest_every
        self.relist()
        # counters start again
        self.last = None
        self.ranks = self.ranks.fresh()
        self._report_coverage()

    def set_buckets(self, buckets: Sequence[Sequence[str]]) -> None:
        """Set which parameters travel together, for an engine; the same on all ranks."""
        self._buckets = buckets
        if self.last is not None:
            self.last.buckets = buckets

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Send, inside the block, the number of entries on which ranks agreed last."""
        self._in_force = self._agreed
        try:
            with self.fixed_rules():
                yield
        finally:
            self._in_force = None

    @contextlib.contextmanager
    def fixed_rules(self) -> Iterator[None]:
        """Cache the rule of each group during an update or a launch."""
        self._rules = {}
        try:
            yield
        finally:
            self._rules = None

    def agreed(self) -> None:
        """Take over the settings of this update, on which all ranks have just agreed."""
        groups = self.optimizer.param_groups
        self._agreed = [{key: group[key] for key in RAMP} for group in groups]

    def limited(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip gradients of shards to the local norm limit, with one norm over all shards. Return
        all others unchanged: the compression clips whole tensors.

        Communication: with a local clip, 8 bytes per tensor and rank inside the site.
        """
        group, optimizer = self.ranks.group, self.optimizer
        if group.shards is None:
            return dict(grads)

        def config(name: str) -> DGC:
            group = optimizer._facts(self.params[name]).group
            return config_of(group, group["local_grad_clip_norm"])

        return locally_clipped(
            grads,
            self.shards,
            config,
            step=optimizer.position,
            sources=optimizer.num_trainers or group.replica_count,
            gather=group.shards.gather_now,
        )

    def _rule(self, name: str) -> Rule:
        """Return the compression rule of a tensor, from its group now or as last agreed on."""
        index = self.optimizer._common.records[self.params[name]].group_index
        if self._rules is None:
            return self._rule_of(index)
        if index not in self._rules:
            self._rules[index] = self._rule_of(index)
        return self._rules[index]

    def _rule_of(self, index: int) -> Rule:
        group, clip = self.optimizer.param_groups[index], self.optimizer.grad_clip
        if self._in_force is not None:
            group = {**group, **self._in_force[index]}
        # shards are clipped before: see `limited`
        limit = group["local_grad_clip_norm"] if self.ranks.mesh is None else None
        if clip is not None:
            assert isinstance(clip, ClipByNorm), "no other is taken"
            limit = clip.c
        config = config_of(group, limit, self.optimizer.state_dtype)
        return Rule(config, group["momentum"], group["nesterov"])

    def _decayed(self, name: str, grad: Tensor) -> Tensor:
        """Apply sign, decay, regularizer and centralization to a gradient."""
        param = self.params[name]
        facts = self.optimizer._facts(param)
        group = facts.group
        if group["maximize"]:
            grad = -grad
        if facts.weight_decay or group["regularizer"] is not None or group["grad_centralization"]:
            return self.optimizer._with_decay(param, grad.to(state_dtype(param)))
        return grad

    def _compared(self) -> GradientExchange:
        """Return the exchange, after a comparison of the settings over all ranks."""
        optimizer, ranks = self.optimizer, self.ranks
        group, problem, node = ranks.group, None, 1
        try:
            if ranks.mesh is None:
                node, _ = node_size_of(group.global_ranks, optimizer.node_size)
        except ValueError as error:  # raised below, after the other ranks have received it
            problem = error
        facts = self._facts(node if problem is None else str(problem))
        ranks.compare(facts, "comparing settings and parameters")
        if problem is not None:
            raise problem
        ranks.compile(optimizer.compile_loops)
        if not self._names_of_engine:  # an engine reports it in `prepare`
            self._report_coverage()
        self.compressor = DGCCompressor(
            self.shards,
            self._rule,
            state=_StateByName(optimizer, self.params),
            value_bits=optimizer.value_bits,
            exchange=optimizer.exchange,
            num_trainers=optimizer.num_trainers,
            decayed=self._decayed,
        )
        made = self.last
        if made is None:
            sources = ranks.sources(optimizer.node_size, compared=True)
            compressors, participants = [self.compressor], self._participants
            made = GradientExchange(
                group, self.shards, compressors, sources=sources, participants=participants
            )
            made.add_check(SameHyperparameters(optimizer))
            made.launching = self.launching
        else:
            made.restart(self.shards, [self.compressor])
        made.buckets = self._buckets
        made.watch(self._digest(), self._identity)
        self.agreed()
        return made

    def _report_coverage(self) -> None:
        if self.ranks.rank_and_size[0] == 0:
            whole = {shard_of(p): p for p in self.params.values()}
            config = config_of(self.optimizer.param_groups[0])
            report_coverage(config, whole, lambda shard: self.optimizer.compresses(whole[shard]))

    def _digest(self) -> RollingDigest | None:
        if not self.optimizer.digest_every:
            return None
        digest = RollingDigest(
            lambda: {f"parameter {name}": p for name, p in self.shards.items()},
            self._common_momentum,
            every=self.optimizer.digest_every,
        )
        digest.start_from(self.optimizer.position)
        return digest

    def _common_momentum(self) -> dict[str, Tensor]:
        """Return the momentum of tensors that are always averaged densely."""
        state, compresses = self.optimizer.state, self.optimizer.compresses
        return {
            f"momentum_buffer of {name}": state[p]["momentum_buffer"]
            for name, p in self.params.items()
            if p in state and "momentum_buffer" in state[p] and not compresses(p)
        }

    def _facts(self, node: int | str) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks, the most informative first."""
        optimizer, params = self.optimizer, self.params
        plain = [
            {k: repr(v) for k, v in g.items() if k not in ("params", "param_names")}
            for g in optimizer.param_groups
        ]
        first = next((p.device for p in params.values()), torch.device("cpu"))
        return {
            "wire version": WIRE_VERSION,
            **{key: getattr(optimizer, key) for key in (*OF_DGC, "num_trainers")},
            "ranks of a node": node,
            **arithmetic(first),
            **optimizer.shared_settings(),
            "digest_every": optimizer.digest_every,
            "step": optimizer.position,
            "group": plain,
            "parameter": [
                f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)} "
                f"requires_grad={p.requires_grad}"
                for name, p in params.items()
            ],
            "decay": [optimizer._facts(p).weight_decay for p in params.values()],
            "initial value (CRC-32) of": self._initial_values(),
            "timeout in seconds": self.ranks.group.timeout_s,
        }

    def _initial_values(self) -> dict[str, Any]:
        """Return a checksum of each parameter; for a sharded one, of all its shards."""
        own, shards = [checksum_of(p) for p in self.shards.values()], self.ranks.group.shards
        if shards is None:
            return dict(zip(self.params, own, strict=True))
        packed = b"".join(crc.to_bytes(4, "little") for crc in own)
        answers = shards.gather_now(packed, "comparing shards")
        return {
            name: [int.from_bytes(answer[4 * i : 4 * i + 4], "little") for answer in answers]
            for i, name in enumerate(self.params)
        }


class _StateByName(MutableMapping[str, dict[str, Tensor]]):
    """View of an optimizer's state under the names of the exchange."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        # the optimizer, not its state: loading replaces the state object
        self._optimizer, self._params = optimizer, params

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if self._params[name] not in self._optimizer.state:
            raise KeyError(name)
        found: dict[str, Tensor] = self._optimizer.state[self._params[name]]
        return found

    def __setitem__(self, name: str, entries: dict[str, Tensor]) -> None:
        self._optimizer.state[self._params[name]] = entries

    def __delitem__(self, name: str) -> None:
        del self._optimizer.state[self._params[name]]

    def __iter__(self) -> Iterator[str]:
        return (name for name, param in self._params.items() if param in self._optimizer.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class DGCUpdate:
    """Apply the result of an exchange to parameters and state.

    Entries of compressed tensors are applied as they are, since each rank's momentum is already in
    them. Means of all other tensors go through SGD with momentum.
    """

    def __init__(self, optimizer: DGCSettings, synchronizer: DGCSynchronizer) -> None:
        self._optimizer, self._synchronizer = optimizer, synchronizer
        self._differing: frozenset[str] | None = None if optimizer.state else frozenset()
        """Tensors whose momentum differs between ranks since they were compressed; None: not known,
        after a load.
        """

    def state_loaded(self) -> None:
        """Note that momentum was loaded, so that it may differ between ranks."""
        self._differing = None

    def __call__(
        self,
        exchange: GradientExchange,
        grads: Mapping[str, Tensor],
        rates: Sequence[float],
        done: Round,
    ) -> None:
        """Make the update from the result `done` of exchanging `grads`, and commit the exchange."""
        sync = self._synchronizer
        # decide by facts common to all ranks: one may hold a row-sparse gradient, another a dense
        # one
        arrived = {name: done.arrived[name] for name in grads}
        sparse = [n for n in grads if isinstance(arrived[n], ArrivedEntries)]
        dense = [n for n in grads if not isinstance(arrived[n], ArrivedEntries)]
        self._make_momentum_common(exchange, dense)
        self._differing = None if self._differing is None else self._differing.union(sparse)
        exchange.commit_(done, grads)
        keys = {name: key for key, name in enumerate(sync.params)}
        for name in dense:
            param = sync.params[name]
            lasting = name in done.row_sparse or not self._optimizer.compresses(param)
            rate = rates[self._optimizer._facts(param).group_index]
            mean = arrived[name].mean(name, shard_of(param))
            self._apply_dense(name, mean, keys[name], rate, clip=lasting)
        for names in in_chunks({name: sync.shards[name].numel() for name in sparse}):
            self._step_along(names, rates, done)

    def _state_of(self, name: str) -> dict[str, Any]:
        """Return the state of a tensor; zeros if it has none yet, stored with the update."""
        optimizer = self._optimizer
        param, compressor = self._synchronizer.params[name], self._synchronizer.compressor
        assert compressor is not None, "made with the exchange"
        if optimizer.compresses(param):
            return compressor.state_of(name)
        found: dict[str, Any] = optimizer.state.get(param) or {}
        return found

    def _make_momentum_common(self, exchange: GradientExchange, dense: Sequence[str]) -> None:
        """Average the momentum over ranks before a dense update of tensors that were compressed."""
        optimizer, params = self._optimizer, self._synchronizer.params
        group = exchange.group.replicas or exchange.group
        states: dict[str, dict[str, Any]] = {}
        for name in [n for n in dense if self._differing is None or n in self._differing]:
            state = self._state_of(name)
            if optimizer._facts(params[name]).group["momentum"] and "momentum_buffer" in state:
                states[name] = state
        if not states or group.size == 1:
            return
        held = {name: state["momentum_buffer"] for name, state in states.items()}
        purpose = "making momentum common"
        sums = torch.stack(bit_sums(list(held.values()))).cpu().numpy().tobytes()
        rows = group.gather_bytes(sums, action=purpose)
        differ = [
            name
            for at, name in enumerate(held)
            if len({row[8 * at : 8 * at + 8] for row in rows}) > 1
        ]
        wide = {name: held[name].to(wide_dtype(params[name])) for name in differ}
        totals = [group.all_reduce_(value.clone(), action=purpose) for value in wide.values()]
        means = [total.wait().div_(group.size) for total in totals]
        if differ:
            # vote: no rank overwrites its momentum before all have received the means
            group.gather_bytes(b"", action=purpose)
        for name, mean in zip(differ, means, strict=True):
            held[name].copy_(mean)
            optimizer.state[params[name]] = states[name]
        known = frozenset(params) if self._differing is None else self._differing
        self._differing = known - set(dense)

    def _step_along(self, names: Sequence[str], rates: Sequence[float], done: Round) -> None:
        """Update p <- p - lr * mean, at the entries that any rank sent."""
        params = [self._synchronizer.params[name] for name in names]
        entries = [done.arrived[name].entries(name) for name in names]
        step_along_list_(
            [shard_of(param).detach() for param in params],
            [entry for entry in entries if entry is not None],
            [rates[self._optimizer._facts(param).group_index] for param in params],
            done.arrived[names[0]].context.sources,
            [wide_dtype(param) for param in params],
        )

    def _apply_dense(self, name: str, mean: Tensor, key: int, rate: float, *, clip: bool) -> None:
        """Make one step of SGD with momentum."""
        optimizer = self._optimizer
        param = self._synchronizer.params[name]
        shard, wide = shard_of(param).detach(), wide_dtype(param)
        state = self._state_of(name)
        if "momentum_buffer" not in state:
            zeros = torch.zeros(shard.shape, dtype=wide, device=param.device)
            state = {**state, "momentum_buffer": zeros}
        optimizer.state[param] = state
        group, stored = optimizer._facts(param).group, state["momentum_buffer"]
        buffer = stored.to(wide)
        grad = mean.to(buffer.dtype)
        if group["maximize"]:
            grad = -grad
        if clip and optimizer.grad_clip is not None:
            grad = clipped(optimizer.grad_clip, [grad])[0]
        grad = optimizer._with_decay(param, grad)
        buffer.mul_(group["momentum"]).add_(grad)
        update = grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        if shard.dtype == buffer.dtype:
            shard.add_(update, alpha=-rate)
        else:
            shard.copy_(shard.to(buffer.dtype).add_(update, alpha=-rate))
        if buffer is not stored:
            store_(stored.view(-1), buffer.view(-1), rounding_seed(optimizer.position, key))
