"""Loops that compile for longer than the group waits for anybody do not end a run."""

import time

import pytest
import torch.distributed as dist

import thinwire as tw
from tests.api import ranks as ranks_module
from tests.laws.frontends import AttachedStep, Case, Frontend, LocalBlock, OwnStep, WithEngine

pytest.importorskip("numba")

WAIT_S, COMPILING_S = 5.0, 8.0


LAMB = Case(fields={}, optimizer=tw.optim.Lamb)
WAYS: dict[str, tuple[type[Frontend], Case]] = {
    "engine": (WithEngine, Case()),
    "lamb": (WithEngine, LAMB),
    "alone": (OwnStep, Case()),
    "attached": (AttachedStep, Case()),
    "local": (LocalBlock, Case(local=tw.LocalSGD(2, compression=tw.Sparse(0.99)))),
}


def trained_beside_a_slow_compiler(rank, size, way):
    compiled, compile_ = [], ranks_module.Ranks.compile

    def slowly(self, loops):
        def act():
            compiled.append(loops)
            if rank == 1 and len(compiled) == 1:
                time.sleep(COMPILING_S)
            loops()

        compile_(self, act)

    ranks_module.Ranks.compile = slowly
    try:
        dist.barrier()  # ranks do not begin at the same moment
        begun = time.monotonic()
        frontend, case = WAYS[way]
        trainer = frontend(case)
        ready_s = time.monotonic() - begun
        trainer.train(rank, 0, 3)
        trainer.end()
    finally:
        ranks_module.Ranks.compile = compile_
    return len(compiled), ready_s


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_compilation_longer_than_the_time_out_does_not_end_a_run(ranks, way):
    answers = ranks.run(trained_beside_a_slow_compiler, way, group_timeout_s=WAIT_S)
    assert all(count >= 1 for count, _ in answers)
    if way != "alone":  # its construction is no place to wait for others; the first step is
        assert all(ready_s >= COMPILING_S for _, ready_s in answers), "not in the first step"
