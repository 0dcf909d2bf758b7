"""The page of a run, in a real browser, with real members and ranks."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.api import SHOWN, RunView, connect
from tests.browser import CHROMIUM, browser
from tests.launched import free_port
from tests.members.places import TOKEN, host_command, token_in
from tests.processes import running
from tests.ranks import Pool
from tests.waiting import PATIENCE_S, until

MEMBER = """
import sys, time, torch, thinwire as tw
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
strategy = tw.DistributedStrategy(localsgd=tw.LocalSGD(4, compression=tw.Quantized(1)))
with tw.join(sys.argv[1], run="llm", token_file=sys.argv[2], start_members=3) as members:
    engine = strategy.prepare(model, optimizer, torch.nn.functional.mse_loss, members=members)
    while True:
        time.sleep(float(sys.argv[3]))
        members.show(total_steps=20_000, held_out_loss=0.5)
        engine.train_step(torch.randn(8, 64), torch.zeros(8, 8))
"""


def asked(url: str, **headers: str) -> tuple[int, str]:
    """Status and first line of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.readline().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def all_of(selector: str) -> str:
    """An expression: the elements of the page that match."""
    return f"[...document.querySelectorAll('{selector}')]"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_page_of_a_run_names_the_slow_member_and_the_lost_one(tmp_path: Path) -> None:
    token = str(token_in(tmp_path))
    options = ("--bind", "127.0.0.1:0", "--token-file", token, "--page", "0")
    with ExitStack() as ends:
        host, address = ends.enter_context(host_command(*options))
        assert host.stdout is not None
        url = host.stdout.readline().split()[-1]
        command = [sys.executable, "-c", MEMBER, address, token]
        named = {**os.environ, "THINWIRE_NAME": MARKUP}
        members = [
            ends.enter_context(running([*command, s], env=named)) for s in ("0.02", "0.02", "0.3")
        ]
        page = ends.enter_context(browser(tmp_path / "profile"))
        page.open(url, width=400)
        text = "document.body.innerText"
        page.wait_for(f"{text}.includes('slow: computes') && {text}.includes('kbit/s')")
        page.wait_for(f"{text}.includes(' of 20,000') && {text}.includes('0.5000')")
        slow = page.value("document.querySelector('.bad b').textContent")
        members[2].kill()
        assert slow.startswith(f"{MARKUP} (")
        assert slow.split("-")[-2] == str(members[2].pid)
        assert page.value("document.querySelectorAll('u, img').length") == 0
        page.wait_for(f"{text}.includes({slow + ' lost'!r}) && !document.querySelector('.bad')")
        assert page.value("document.querySelectorAll('.member').length") == 2
        assert page.value("document.documentElement.scrollWidth") == 400
        assert page.value("document.querySelectorAll('u, img').length") == 0
        assert slow in page.value(f"{all_of('.lane > span')}.map((one) => one.title)")
        assert page.value(f"{all_of('dt > span')}.every((one) => one.title)")
        assert page.value(f"{all_of('dt > span')}.length") > 20
        words = page.value(f"{all_of('#words dt')}.map((one) => one.textContent)")
        assert {"goodput", "averagings", "waiting", "sent in all", "lost"} <= {*words}
        page.wait_for(f"{all_of('.plot .left')}.length > 1 && {all_of('.plot .top')}.length > 1")
        assert page.value(f"{all_of('.lane .left')}.at(0).textContent") == "0 s"
        assert page.value(
            "performance.getEntriesByType('resource').every(({name}) => "
            "name.startsWith(location.origin))"
        )
        page.open(url, width=1280, dark=True)
        page.wait_for(f"{text}.includes({slow + ' lost'!r})")
        assert page.value("document.documentElement.scrollWidth") == 1280
        assert TOKEN.decode() not in page.value("document.documentElement.outerHTML")


def test_page_beyond_loopback_asks_for_a_token_of_its_own(tmp_path: Path) -> None:
    options = ("--bind", "0.0.0.0:0", "--public", "--token-file", str(token_in(tmp_path)))
    with host_command(*options, "--page", "0") as (host, _):
        assert host.stdout is not None
        url = host.stdout.readline().split()[-1]
        assert asked(url)[0] == 200
        assert TOKEN.decode() not in url
        assert [asked(url[:-1])[0], asked(url.partition("?")[0])[0]] == [403, 403]


HOSTILE = [10**400, -(10**400), 1.7e308, 1e-300, float("nan"), float("-inf"), True, "x", None, [1]]
"""Values of a report that is no report of ours."""
MARKUP = "<u>a</u><img src=/x>"
NAMES = {
    MARKUP: MARKUP,
    "größe": "größe",
    "a\nb\x1b[2J\u202e\ud800c": "ab[2Jc",
    "x" * 10_000: "x" * 64,
}
"""What the page shows of a name."""


def test_no_report_of_a_member_ends_the_page(tmp_path: Path) -> None:
    options = ("--bind", "127.0.0.1:0", "--token-file", str(token_in(tmp_path)), "--page", "0")
    names = [*map(str, range(len(HOSTILE) ** 2))]
    first = f"{MARKUP} (0)"
    with ExitStack() as ends:
        host, address = ends.enter_context(host_command(*options))
        assert host.stdout is not None
        url = host.stdout.readline().split()[-1]
        store = connect(address, "llm", TOKEN, timedelta(seconds=PATIENCE_S))
        store.set("members/0", json.dumps({"ids": names}))
        store.set("gen", "0")

        events = ends.enter_context(urllib.request.urlopen(f"{url}events", timeout=PATIENCE_S))

        def rows() -> dict[str, Any]:
            told, _ = events.readline().decode().removeprefix("data: "), events.readline()
            run = json.loads(told, parse_constant=pytest.fail).get("llm", {"members": []})
            return {row["name"]: row for row in run["members"]}

        for turn in range(2):
            for name, (here, other) in zip(names, product(HOSTILE, HOSTILE), strict=True):
                report = dict.fromkeys([*SHOWN, "name"], here if turn else other)
                if given := [*NAMES][int(name) : int(name) + 1]:
                    report["name"] = given[0]
                store.set(f"hb/{name}", json.dumps({"beat": other}))
                store.set(f"shown/{name}", json.dumps(report))
            store.set("shown/0", json.dumps({"at": turn, "step": turn, "name": MARKUP}))
            until(lambda: rows().get(first, {}).get("step") == turn, "the page")  # noqa: B023
        shown = [f"{name} ({at})" for at, name in enumerate(NAMES.values())]
        assert {name for name in rows() if "(" in name} >= {*shown}
        assert {name.rpartition(" (")[2].rstrip(")") for name in rows()} == set(names)
        assert host.poll() is None


def test_page_counts_members_that_have_gone_and_keeps_lines_of_the_present(
    tmp_path: Path,
) -> None:
    options = ("--bind", "127.0.0.1:0", "--token-file", str(token_in(tmp_path)), "--page", "0")
    ids = [f"id-{number}" for number in range(120)]  # more than it keeps events of
    with ExitStack() as ends:
        host, address = ends.enter_context(host_command(*options))
        assert host.stdout is not None
        url = host.stdout.readline().split()[-1]
        store = connect(address, "llm", TOKEN, timedelta(seconds=PATIENCE_S))
        events = ends.enter_context(urllib.request.urlopen(f"{url}events", timeout=PATIENCE_S))

        def run() -> Any:
            line, _ = events.readline().decode().removeprefix("data: "), events.readline()
            return json.loads(line).get("llm", {})

        for at, one in enumerate(ids):
            report = {"at": at, "bytes_sent": 1000, "step": 250 * at, "loss": 4 - at / 40}
            store.set(f"shown/{one}", json.dumps(report))
        for generation, present in enumerate((ids, ids[:-1])):
            store.set(f"members/{generation}", json.dumps({"ids": present}))
            store.set("gen", f"{generation}")
            until(lambda: run().get("generation") == generation, "the page")  # noqa: B023
        found = run()
        assert found["sent"] == 120_000
        assert {*found["stays"]} == {*ids}
        assert [one for one, [[_, end]] in found["stays"].items() if end] == ids[-1:]
        assert [len(found["members"]), len(found["events"])] == [119, 100]


@pytest.mark.parametrize("span", [5e-324, 1e-9, 0.3, 4.0, 1e23, 9e59])
def test_marks_of_an_axis_are_few_and_inside_it(span: float) -> None:
    for low in (-9e59, -span / 3, 0.0, 1e-300, 1.0, 1e23):
        view = RunView()
        for step, loss in ((0.0, low), (span, low + span)):
            view.update(0, {"a": (step, {"at": step, "step": step, "loss": loss})})
        axes = view.latest["axes"]
        assert all(len(marks) <= 6 for marks in axes.values())
        assert len(axes["losses"]) >= 2 or span < 1e-90 or low + span - low != span


@pytest.mark.parametrize("given", [MARKUP, None])
def test_member_has_its_name_before_its_first_round(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_NAME", "größe")
    token = token_in(tmp_path)
    options = ("--bind", "127.0.0.1:0", "--token-file", str(token), "--page", "0")
    with host_command(*options) as (host, address):
        assert host.stdout is not None
        url = host.stdout.readline().split()[-1]

        def names() -> Any:
            run = json.loads(asked(f"{url}events")[1].removeprefix("data: ")).get("llm")
            return run and [run["events"][0]["who"], run["members"][0]["name"]]

        with tw.join(address, run="llm", token_file=token, name=given) as members:
            label = f"{given or 'größe'} ({members.id})"
            until(lambda: names() == [label, label], "the name")


def test_page_on_loopback_refuses_names_of_other_sites() -> None:
    with host_command("--bind", "127.0.0.1:0", "--page", "0") as (host, _):
        assert host.stdout is not None
        url = host.stdout.readline().split()[-1]
        assert asked(url)[0] == asked(url, Host="localhost:80")[0] == 200
        assert asked(url, Host="rebound.example:80")[0] == 403
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(url, data=b"written")


def page_of_ranks(rank: int, size: int, port: int) -> list[str]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(model, optimizer, torch.nn.functional.mse_loss)
    url, names, seen = f"http://127.0.0.1:{port}", [], torch.zeros(())
    generator = torch.Generator().manual_seed(rank)
    while seen < size:
        engine.train_step(torch.randn(8, 4, generator=generator), torch.zeros(8, 1))
        tw.log_stats(engine, url)
        if rank == 0:
            time.sleep(0.2)  # the server notices after a second that a reader has gone
            runs = json.loads(asked(f"{url}/events")[1].removeprefix("data: "))
            names = [one["name"] for one in runs.get("ranks", {"members": []})["members"]]
        seen = torch.tensor(float(len(names)))
        torch.distributed.broadcast(seen, 0)
    return names


def test_log_stats_serves_a_page_of_fixed_ranks(ranks: Pool) -> None:
    names, _ = ranks.run(page_of_ranks, free_port(), size=2)
    assert [name.partition(" on ")[0] for name in names] == ["rank 0", "rank 1"]


def test_log_stats_serves_localhost_and_refuses_an_address_that_is_no_page() -> None:
    model = torch.nn.Linear(4, 1)
    engine = tw.DistributedStrategy().prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss
    )
    port = free_port()
    tw.log_stats(engine, f"http://localhost:{port}")
    assert asked(f"http://127.0.0.1:{port}/")[0] == 200
    for url in ("http://localhost", "http://a.example:80", "http://127.0.0.1:x"):
        with pytest.raises(ValueError, match=rf"'{url}' must be http://ADDRESS:PORT"):
            tw.log_stats(engine, url)
