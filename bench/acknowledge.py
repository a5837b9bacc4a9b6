"""How soon Slack hears from us while batches come as fast as they are taken and ten diagnoses run.

Three processes besides the server's own: the local workspace with the person who types (here), the server with its
bot, and the nodes that send. Commands are typed one after the other; an acknowledgement is measured by the
workspace, from sending the command to the bot until it has answered. On a machine that others use, too, that is
their doing as much as ours, so the server also says how long its event loop was held at a time, in CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import msgspec

from probes import codec
from probes.records import SCHEMA, Batch, Collectives, Communicator, RankBatch, Role, ThreadTime

NODES, RANKS, SECONDS = 10, 16, 300
"""Nodes that send, ranks on each (one job a node), and the most batches of each node."""
STEPS, CUTS = 25, 100
"""Per rank and second: collectives, and rows of thread time."""
PREFILL = 40
"""Batches of each node before anything is measured, so that a diagnosis has work to do."""
MEASURE_S = 25.0
PAUSE_S = 0.03
SECOND = 1_000_000_000


def main() -> None:
    asyncio.run(_measure())


async def _measure() -> None:
    import httpx

    from bot.workspace import Workspace

    with tempfile.TemporaryDirectory(prefix="sysom-bench-") as folder:
        async with Workspace() as workspace, httpx.AsyncClient(trust_env=False) as client:
            with _process(
                "serve", folder, workspace.api_url, workspace.bot_token, workspace.app_token
            ) as server:
                assert server.stdout is not None
                assert server.stdin is not None
                url = (await asyncio.to_thread(server.stdout.readline)).strip()
                ada = workspace.person("ada")

                async def typed(seconds: float) -> list[float]:
                    """How long each command took to be acknowledged, in ms."""
                    took, end = [], time.monotonic() + seconds
                    while time.monotonic() < end:
                        begin = time.perf_counter()
                        delivery = await ada.command("/sysom jobs")
                        took.append((time.perf_counter() - begin) * 1e3)
                        assert delivery.acknowledged, delivery.error
                        await asyncio.sleep(PAUSE_S)
                    return took

                async def stored() -> int:
                    return int((await client.get(f"{url}/healthz")).json()["counts"].get("stored", 0))

                await typed(2.0)  # imports, first connections
                idle = await typed(MEASURE_S / 2)
                with _process("load", url) as load:
                    assert load.stdout is not None
                    while await stored() < NODES * PREFILL:  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                    server.stdin.write("diagnose\n")
                    server.stdin.flush()
                    await typed(3.0)  # until the processes for diagnoses are there
                    before, begin = await stored(), time.monotonic()
                    busy = await typed(MEASURE_S)
                    rate = (await stored() - before) / (time.monotonic() - begin)
                    assert load.poll() is None, "the nodes had sent everything before the end"
                    numbers = (await client.get(f"{url}/metrics")).text
                    server.stdin.write("report\n")
                    server.stdin.flush()
                    held = (await asyncio.to_thread(server.stdout.readline)).strip()
    ended = {
        line.split()[0].partition('"')[2].partition('"')[0]: float(line.split()[1])
        for line in numbers.splitlines()
        if line.startswith("sysom_diagnoses_total")
    }
    print(f"idle: {len(idle)} commands, acknowledged within {_figures(idle)}")
    ratio = statistics.median(busy) / statistics.median(idle)
    print(
        f"full: {len(busy)} commands, acknowledged within {_figures(busy)}; {ratio:.1f} times idle's median"
    )
    print(f"meanwhile the event loop was held at a time, in CPU time, for {held}")
    print(
        f"meanwhile {rate:.0f} batches/s of {RANKS} ranks stored ({rate * RANKS:.0f} rank-seconds a second), and "
        f"of ten diagnoses at all times {ended['finished']:.0f} finished, {ended['failed']:.0f} failed"
    )


def _figures(ms: list[float]) -> str:
    ordered = sorted(ms)
    middle, most = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
    return f"{middle:.1f} ms (median), {most:.1f} ms (99 %), {ordered[-1]:.1f} ms (all)"


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.acknowledge", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


# --- the server


async def _serve(folder: str, api_url: str, bot_token: str, app_token: str) -> None:
    from bot.server import running_server
    from bot.settings import Settings
    from bot.slack import running_bot

    tokens: dict[str, str | list[str]] = {f"node-{number}": f"token-{number}" for number in range(NODES)}
    settings = Settings(state=folder, listen="127.0.0.1:0", node_tokens=tokens)
    async with (
        running_server(settings) as running,
        running_bot(bot_token, app_token, running.diagnoses, base_url=api_url, meter=running.metrics),
    ):
        print(running.url, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def ask(job: str) -> None:
            while True:
                await running.diagnoses.diagnose(job)

        held: list[float] = []

        async def watch() -> None:
            while True:
                begin = time.thread_time()
                await asyncio.sleep(0.002)
                held.append((time.thread_time() - begin) * 1e3)

        tasks = [asyncio.create_task(ask(f"job-{number % NODES}")) for number in range(10)]
        tasks.append(asyncio.create_task(watch()))
        await asyncio.to_thread(sys.stdin.readline)
        for task in tasks:
            task.cancel()
        print(_figures(held), flush=True)
        await asyncio.Event().wait()


# --- the nodes


def _load(url: str) -> None:
    os.nice(5)  # whoever makes the load must not be what is measured
    wires: list[list[bytes]] = [[] for _ in range(NODES)]
    start = time.time_ns() - SECONDS * SECOND
    for second in range(SECONDS):
        ranks = [_rank(rank, second) for rank in range(RANKS)]
        for number in range(NODES):
            batch = Batch(
                schema=SCHEMA,
                node=f"node-{number}",
                boot_id="boot",
                agent="agent",
                seq=second,
                start_ns=second * SECOND,
                end_ns=(second + 1) * SECOND,
                utc_offset_ns=start,
                ranks=[msgspec.structs.replace(rank, job=f"job-{number}") for rank in ranks],
            )
            wires[number].append(codec.encode(batch))
    threads = [
        threading.Thread(target=_send, args=(url, number, wires[number]), daemon=True)
        for number in range(NODES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(url: str, number: int, wires: list[bytes]) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    for wire in wires:
        while True:
            connection.request("POST", "/api/v1/batches", wire, {"Authorization": f"Bearer token-{number}"})
            response = connection.getresponse()
            said = json.loads(response.read())
            if response.status == 200:
                break
            assert response.status in (429, 503), said
            time.sleep(float(response.headers["Retry-After"]))


def _rank(rank: int, second: int) -> RankBatch:
    """A second of a healthy rank: 40 ms a step, of which it runs 12 and waits for the others 8."""
    base, step = second * SECOND, SECOND // STEPS
    enter = [base + number * step + 30_000_000 + rank * 1000 for number in range(STEPS)]
    at = [base + number * SECOND // CUTS for number in range(CUTS)]
    return RankBatch(
        job="",
        rank=rank,
        world_size=RANKS,
        local_rank=rank,
        pid=1000 + rank,
        start_ns=0,
        name="python3",
        env={"RANK": str(rank)},
        communicators=[Communicator(uid="0", desc="default_pg", rank=rank, size=RANKS)],
        collectives=Collectives(
            communicator=[0] * STEPS,
            seq=list(range(second * STEPS, (second + 1) * STEPS)),
            op=[1] * STEPS,
            bytes=[790_528] * STEPS,
            dtype=["f32"] * STEPS,
            enter_ns=enter,
            duration_ns=[8_000_000 - rank * 1000] * STEPS,
            failed=[False] * STEPS,
        ),
        threads=[
            ThreadTime(
                tid=2000 + rank,
                role=Role.DRIVING,
                since_ns=0,
                at_ns=at,
                running_ns=[one // 10 * 3 for one in at],
                runnable_ns=[one // 50 for one in at],
                blocked_ns=[one - one // 10 * 3 - one // 50 for one in at],
                uninterruptible_ns=[0] * CUTS,
                interrupted_ns=[0] * CUTS,
            )
        ],
    )


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve(*sys.argv[2:]))
    else:
        _load(sys.argv[2])
