"""The event stream: one encoding for all, and nobody who reads slowly is waited for."""

import asyncio
import contextlib
import resource
import socket

import pytest

from benchmarks.made_run.made_run import make_run
from dashboard.stream import COMMENT_S, EventStream, Hub, TooManyViewers
from tests.dashboard.served import events, served, strict, until
from tests.deadlines import HANG_S

VIEWERS = 200
DEAF = 60
"""Of them, those that read nothing."""
EVENTS = 100
EVENT_BYTES = 20_000


def test_an_event_is_encoded_once_for_all_and_ids_count_up():
    hub = Hub()
    viewers = [hub.join() for _ in range(3)]
    hub.publish("step", {"step": 1, "loss": float("nan")})
    hub.publish("step", {"step": 2})
    got = [[viewer.queue.get_nowait() for _ in range(2)] for viewer in viewers]
    assert hub.encoded == 2
    assert all(one[0] is got[0][0] for one in got), "the same bytes, not copies"
    assert got[0][0] == b'id: 1\nevent: step\ndata: {"step":1,"loss":"NaN"}\n\n'
    assert got[0][1].startswith(b"id: 2\n")


def test_nothing_is_encoded_without_viewers():
    hub = Hub()
    hub.publish("step", {})
    assert hub.encoded == 0


def test_a_text_with_line_ends_stays_one_event():
    hub = Hub()
    event = hub.event("step", {"text": "a\n\nevent: forged\r\n\u2028"})
    assert event.count(b"\n") == 4 and event.endswith(b"\n\n")


def test_a_viewer_whose_queue_is_full_is_dropped_and_the_others_are_not():
    hub = Hub(queue_events=4)
    slow, quick = hub.join(), hub.join()
    aborted = []
    slow.abort = lambda: aborted.append(slow)
    for step in range(5):
        hub.publish("step", {"step": step})
        quick.queue.get_nowait()
    assert (hub.viewers, hub.dropped, aborted) == (1, 1, [slow])


def test_more_viewers_than_there_is_room_for_are_refused():
    hub = Hub(max_viewers=1)
    viewer = hub.join()
    with pytest.raises(TooManyViewers, match="which is the limit"):
        hub.join()
    hub.leave(viewer)
    hub.join()


def test_who_comes_after_the_end_reads_what_there_is_and_is_sent_away():
    hub = Hub()
    hub.close()
    viewer = hub.join([b"first"])
    assert viewer.queue.get_nowait() == b"first" and viewer.queue.get_nowait() is None


def test_a_quiet_stream_gives_a_sign_of_life():
    async def read() -> list[bytes]:
        hub, sent = Hub(), []

        async def send(message) -> None:
            sent.append(message)
            if len(sent) == 4:
                hub.close()

        stream = EventStream(hub, hub.join(), comment_s=0.01)
        await stream({"type": "http"}, asyncio.Event().wait, send)
        return [message.get("body") for message in sent[1:4]]

    assert asyncio.run(read()) == [b": \n\n"] * 3
    assert COMMENT_S == 10


def test_a_viewer_that_leaves_is_forgotten(tmp_path):
    make_run(tmp_path, steps=2)
    with served(tmp_path) as site, site.client() as client:
        with client.stream("GET", "/api/stream") as response:
            told = events(response)
            assert next(told).kind == "run"
            assert site.follower.hub.viewers == 1
        until(lambda: site.follower.hub.viewers == 0, "the viewer to be forgotten")


@pytest.fixture
def descriptors():
    """Room for both ends of every connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * VIEWERS + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_stream(site) -> socket.socket:
    """A viewer that has asked, and has room for little."""
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = site.url.removeprefix("http://").split(":")
    end.connect((host, int(port)))
    end.sendall(
        f"GET /api/stream HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {site.tokens.view}\r\n\r\n".encode()
    )
    return end


def read_all(ends: list[socket.socket]) -> None:
    """Takes what the readers have got by now."""
    for end in ends:
        with contextlib.suppress(BlockingIOError):
            while end.recv(1 << 16):
                pass


def test_of_200_viewers_those_that_read_nothing_are_dropped_and_nothing_is_kept_for_them(
    tmp_path, descriptors
):
    make_run(tmp_path, steps=2)
    with served(tmp_path) as site, contextlib.ExitStack() as stack:
        hub = site.follower.hub
        ends = [stack.enter_context(open_stream(site)) for _ in range(VIEWERS)]
        until(lambda: hub.viewers == VIEWERS, "all viewers to be there")
        readers = ends[DEAF:]
        for end in readers:
            end.setblocking(False)
        loop = hub_loop(site)
        rss = max_rss()
        for step in range(EVENTS):
            told = asyncio.run_coroutine_threadsafe(publish(hub, step), loop)
            told.result(HANG_S)
            until(lambda: all_read(site, readers), "the readers to have read")
        assert hub.dropped == DEAF
        assert hub.viewers == VIEWERS - DEAF
        # 100 events of 20 kB for 60 that read nothing would be 120 MB.
        assert max_rss() - rss < 50 * 2**20
        for end in ends[:DEAF]:
            end.settimeout(5)
            with contextlib.suppress(ConnectionError):  # reset, or closed after what was on its way
                while end.recv(1 << 16):
                    pass


async def publish(hub: Hub, step: int) -> None:
    hub.publish("step", {"step": step, "text": "x" * EVENT_BYTES})


def all_read(site, readers) -> bool:
    """Takes what is there; whether no viewer that reads is behind."""
    read_all(readers)
    behind = sum(viewer.queue.qsize() > 0 for viewer in tuple(site.follower.hub._viewers))
    return behind <= DEAF


def hub_loop(site) -> asyncio.AbstractEventLoop:
    """The event loop that serves."""
    return next(iter(site.follower.hub._viewers)).task.get_loop()


def max_rss() -> int:
    """Bytes, at the highest so far; both ends of each connection are of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_events_are_strict_json(tmp_path):
    make_run(tmp_path, steps=3, nonfinite=True, hostile=True)
    with served(tmp_path) as site, site.client() as client:
        with client.stream("GET", "/api/stream") as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            told = events(response)  # parses strictly
            assert [next(told).kind for _ in range(3)] == ["run", "fleet", "judgement"]
        strict(client.get("/api/judgement").content)
