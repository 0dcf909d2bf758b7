"""Versions of a model: what followers read is what was published, whatever happens between."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.processes import ran_thinwire
from tests.ranks import Pool
from tests.toys import engine_of
from thinwire.errors import StreamError

State = dict[str, Tensor]
_addresses = itertools.count()


class Net(nn.Module):
    """Tied, frozen, empty and integer tensors, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(60, 40), nn.Linear(40, 60, bias=False)
        self.head.weight = self.table.weight
        self.norm, self.inner = nn.BatchNorm1d(40), nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("none", torch.zeros(0, 3))
        self.inner.weight.requires_grad_(False)
        self.to(dtype)


def change(model: nn.Module, share: float = 0.1) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name != "inner.weight":
                step = torch.randn(param.shape) * 1e-3 * (torch.rand(param.shape) < share)
                param.add_(step.to(param.dtype))


def state_of(model: nn.Module, dtype: torch.dtype | None = None) -> State:
    return {
        name: t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True)
        for name, t in model.state_dict().items()
    }


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of this name."""
    [path] = folder.glob(pattern)
    return path


def published(publisher: tw.Publisher, step: int) -> int:
    """Update and wait until readers can see the version."""
    number = publisher.update(step)
    publisher.wait()
    return number


def require_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture(params=["folder", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, and a file system of fsspec that is none."""
    if request.param == "folder":
        return str(tmp_path / "versions")
    return f"memory://test-{os.getpid()}-{next(_addresses)}"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_versions_of_followers_equal_the_published_model(
    where: str, dtype: torch.dtype | None
) -> None:
    model = Net()
    reader = Net(dtype or torch.float32)
    publisher, early = tw.publish(where, model, dtype=dtype), tw.follow(where)
    in_place = tw.follow(where, reader)
    for step in range(0, 120, 10):
        change(model)
        assert published(publisher, step) == step // 10 + 1
        wanted = state_of(model, dtype)
        if step % 30 == 0:
            version = early.latest()
            assert (version.number, version.step) == (publisher.number, step)
            require_same(version.state_dict(), wanted)
            assert in_place.latest().digest == version.digest
            require_same(reader.state_dict(), wanted)
        require_same(tw.follow(where).latest().state_dict(), wanted)
    assert early.versions()[-1] == 12


def test_followers_of_another_dtype_convert_versions(where: str) -> None:
    model, reader = Net(), Net()
    with tw.publish(where, model, dtype=torch.bfloat16) as publisher:
        follower = tw.follow(where, reader)
        for step in range(3):
            change(model)
            published(publisher, step)
            follower.latest()
    wanted = {
        name: t.to(reader.state_dict()[name].dtype)
        for name, t in state_of(model, torch.bfloat16).items()
    }
    require_same(reader.state_dict(), wanted)


def test_models_that_tie_other_tensors_are_filled_or_refused(where: str) -> None:
    model, reader = Net(), Net()
    reader.head.weight = nn.Parameter(torch.zeros(60, 40))
    publisher, follower = tw.publish(where, model), tw.follow(where, reader)
    for step in range(2):
        change(model)
        published(publisher, step)
        follower.latest()
        require_same(reader.state_dict(), state_of(model))
    change(reader)
    published(tw.publish(where + "-untied", reader), 0)
    with pytest.raises(StreamError, match=r"head\.weight is tied"):
        tw.follow(where + "-untied", model).latest()


def test_loops_give_every_new_version_until_the_publisher_is_closed(where: str) -> None:
    model = Net()
    publisher = tw.publish(where, model)
    published(publisher, 0)
    versions = iter(tw.follow(where, poll=0.01))
    assert next(versions).number == 1
    for step in (1, 2, 3):
        published(publisher, step)
    publisher.close()
    assert [version.step for version in versions] == [1, 2, 3]
    assert [version.step for version in tw.follow(where)] == [0, 1, 2, 3]
    follower = tw.follow(where)
    assert follower.latest().number == 4
    assert [*follower] == []


def test_a_publisher_that_starts_again_continues_without_a_base(tmp_path: Path) -> None:
    model = Net()
    published(tw.publish(tmp_path, model), 0)
    follower = tw.follow(tmp_path)
    follower.latest()
    for step in (1, 2):
        change(model)
        assert published(tw.publish(tmp_path, model), step) == step + 1
        require_same(follower.latest().state_dict(), state_of(model))
    assert len([*tmp_path.glob("*.safetensors")]) == 1


def test_bases_and_differences_that_nobody_needs_are_deleted(tmp_path: Path) -> None:
    model = Net()
    publisher = tw.publish(tmp_path, model, every=3, keep=2)
    for step in range(11):
        change(model)
        published(publisher, step)
    assert tw.follow(tmp_path).versions() == list(range(7, 12))
    assert len([*tmp_path.iterdir()]) == 2 + 4 + 1
    assert tw.follow(tmp_path).latest().number == 11


def test_late_followers_take_the_shorter_of_base_and_differences(tmp_path: Path) -> None:
    model = Net()
    publisher = tw.publish(tmp_path, model, every=4)
    published(publisher, 0)
    late, later = tw.follow(tmp_path), tw.follow(tmp_path)
    late.latest()
    for step in range(1, 4):
        change(model, 1.0)
        published(publisher, step)
    later.latest()
    for step in range(4, 6):
        change(model, 1.0)
        published(publisher, step)
    only(tmp_path, "000000002-*.step").unlink()  # late needs it, unless it takes the second base
    require_same(late.latest().state_dict(), state_of(model))
    require_same(later.latest().state_dict(), state_of(model))


def test_a_follower_behind_damage_takes_the_next_base(tmp_path: Path) -> None:
    model = Net()
    publisher, follower = tw.publish(tmp_path, model, every=4), tw.follow(tmp_path, patience=0.2)
    published(publisher, 0)
    follower.latest()
    for step in range(1, 4):
        change(model)
        published(publisher, step)
    only(tmp_path, "000000003-*.step").write_bytes(b"damaged")
    with pytest.raises(StreamError, match="000000003"):
        follower.latest()
    change(model)
    published(publisher, 4)
    with pytest.warns(UserWarning, match="000000003"):
        require_same(follower.latest().state_dict(), state_of(model))


def test_a_model_that_was_changed_since_takes_a_base_or_is_an_error(tmp_path: Path) -> None:
    model, reader = Net(), Net()
    publisher, follower = tw.publish(tmp_path, model), tw.follow(tmp_path, reader)
    published(publisher, 0)
    follower.latest()
    change(reader, 1.0)
    change(model)
    published(publisher, 1)
    with pytest.warns(UserWarning, match="weights were changed"):
        follower.latest()
    require_same(reader.state_dict(), state_of(model))


def test_models_that_do_not_fit_are_refused_by_name(where: str) -> None:
    published(tw.publish(where, Net()), 0)
    with pytest.raises(StreamError, match=r"it has no inner\.bias"):
        tw.follow(where, nn.ModuleDict({"inner": nn.Linear(40, 40, bias=False)})).latest()
    with pytest.raises(StreamError, match="no version so far"):
        tw.follow(where + "-nothing").latest(wait=0.1)


def of_shards(rank: int, size: int, folder: str) -> State:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=mesh)
    publisher = tw.publish(folder, model)
    published(publisher, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01)
    assert published(publisher, 1) == 2
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_sharded_models_are_published_as_a_whole(ranks: Pool, tmp_path: Path) -> None:
    wanted, _ = ranks.run(of_shards, str(tmp_path), size=2)
    require_same(tw.follow(tmp_path).latest().state_dict(), wanted)


def of_engine(rank: int, size: int, folder: str, local: bool) -> list[State]:
    torch.manual_seed(2)
    model = nn.Linear(6, 4)
    fields = {"localsgd": tw.LocalSGD(k_steps=4, begin_step=1)} if local else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, optimizer=optimizer, **fields)
    publisher = engine.publish(folder, updates=4)
    found = []
    for step in range(1, 17):
        torch.manual_seed(100 * step + rank)
        engine.train_step(torch.randn(8, 6), torch.randn(8, 4))
        if engine.sync.synced if local else step % 4 == 0:
            found.append(state_of(model))
            publisher.wait()
    engine.close()
    return found


@pytest.mark.parametrize("local", [False, True])
def test_engines_publish_the_model_of_all_ranks(ranks: Pool, tmp_path: Path, local: bool) -> None:
    states, others = ranks.run(of_engine, str(tmp_path), local, size=2)
    steps = [version.step for version in tw.follow(tmp_path)]
    assert steps == ([1, 5, 9, 13] if local else [4, 8, 12, 16])
    require_same(states[-1], others[-1])
    follower = tw.follow(tmp_path)
    assert follower.versions() == [1, 2, 3, 4]
    require_same(follower.latest().state_dict(), states[-1])


def of_one_bit(rank: int, size: int, folder: str, sharded: bool) -> State:
    torch.manual_seed(2)
    model, mesh = nn.Linear(256, 256).bfloat16(), None
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
    local = tw.LocalSGD(k_steps=4, compression=tw.Quantized(value_bits=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, optimizer=optimizer, localsgd=local, options={"mesh": mesh})
    publisher = engine.publish(folder, every=100)
    for step in range(1, 14):
        torch.manual_seed(100 * step + rank)
        engine.train_step(torch.randn(8, 256).bfloat16(), torch.randn(8, 256).bfloat16())
        publisher.wait()
    engine.close()
    return {name: t.full_tensor() if sharded else t for name, t in state_of(model).items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_local_updates_publish_their_anchors(ranks: Pool, tmp_path: Path, sharded: bool) -> None:
    state, *_ = ranks.run(of_one_bit, str(tmp_path), sharded, size=4 if sharded else 2)
    copy = nn.Linear(256, 256).bfloat16()
    for version in tw.follow(tmp_path, copy):
        anchors = version.state_dict()
    assert {tensor.dtype for tensor in anchors.values()} == {torch.float32}
    require_same(state_of(copy), state)
    require_same({name: tensor.bfloat16() for name, tensor in anchors.items()}, state)
    [*_, last] = sorted(tmp_path.glob("*.step"))
    bits = 3.2 if sharded else 2.2  # one of each rank; the shards' values differ
    assert last.stat().st_size * 8 < bits * 256 * 256


def test_the_command_writes_the_newest_version_and_lists_all(tmp_path: Path) -> None:
    folder, token, file = tmp_path / "versions", tmp_path / "token", tmp_path / "model.safetensors"
    assert ran_thinwire("host", "--new-token", str(token)).returncode == 0
    model = Net()
    with tw.publish(folder, model, token=token.read_text().strip()) as publisher:
        for step in range(3):
            change(model)
            published(publisher, step)
    done = ran_thinwire("follow", str(folder), "--to", str(file), "--token-file", str(token))
    assert done.returncode == 0, done.stderr
    assert "version 3, step 2" in done.stdout
    require_same(load_file(file), state_of(model))
    listed = ran_thinwire("versions", str(folder), "--token-file", str(token)).stdout
    assert [line.split()[0] for line in listed.splitlines()[1:4]] == ["1", "2", "3"]
    refused = ran_thinwire("follow", str(folder), "--to", str(file), "--once")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "with a token" in refused.stderr
