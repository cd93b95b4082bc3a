"""Small pieces of the page that no view shows from every side, called as the views call them."""

import pytest

from tests.chromium import Watched

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(browser, served):
    watched = Watched(browser)
    served("finished").open(watched.page)
    yield watched.page
    watched.context.close()
    watched.check()


@pytest.fixture
def call(page):
    """The value of an expression that uses `it`, a module of the page."""
    return lambda module, body: page.evaluate(
        f"async () => {{ const it = await import('/static/{module}.js'); return {body}; }}"
    )


@pytest.mark.parametrize(
    "step, decimals", [(1, 0), (20, 0), (0.5, 1), (0.25, 2), (2.5, 1), (0.002, 3), (1e-9, 6)]
)
def test_numbers_have_the_decimals_that_their_distance_needs(call, step, decimals):
    assert call("parts/format", f"it.decimals({step})") == decimals


@pytest.mark.parametrize(
    "low, high", [(1.0e9, 1.2e9), (1.131e9, 1.133e9), (0, 3e9), (9.4e8, 1.06e9), (5e12, 9e12)]
)
def test_no_two_ticks_of_an_axis_of_bytes_look_the_same(call, low, high):
    ticks = call(
        "charts/plot",
        f"""await import('/static/parts/format.js').then(({{ bytes }}) =>
            it.niceTicks({low}, {high}, 5).map((x) => bytes(x, it.niceStep({high} - {low}, 5))))""",
    )
    assert len(ticks) >= 3 and len(set(ticks)) == len(ticks)


def test_bytes_alone_stay_short(call):
    texts = call("parts/format", "[1.13e9, 9.1e8, 12, 1.5e12, 0].map((x) => it.bytes(x))")
    assert texts == ["1.1 GB", "910 MB", "12 B", "1.5 TB", "0 B"]


def test_a_flat_line_has_room_above_and_below(call):
    """Ticks a ten-thousandth apart would say that something moves."""
    ticks = call(
        "views/spark",
        """await (async () => {
            const host = document.createElement("div");
            host.style.cssText = "width:300px;height:200px;display:flex;flex-direction:column";
            document.body.append(host);
            const chart = it.lineChart(host, { label: "flat", format: it.plain });
            host.lastChild.style.height = "150px";
            chart.draw({ x: [1, 2], lines: [{ name: "a", y: [0.162, 0.162] }] });
            const found = [...host.querySelectorAll("[text-anchor=end]")].map((t) => t.textContent);
            host.remove();
            return found;
        })()""",
    )
    assert len(set(ticks)) == len(ticks) >= 2
    assert float(ticks[0]) < 0.162 * 0.97


COLUMNS = """(() => {
    const columns = new it.Columns({ bin: 10, first: 0, last: 24, steps: [0, 10, 20],
      metrics: { a: [1, 2, 3], b: [5, null, null] }, low: { a: [0, 1, 2] }, high: { a: [2, 3, 4] },
      wall_s: [1, 1, 1], processes: [], phases: [], path: [], path_phases: [] });
    const step = (n, a) => ({ step: n, wall_s: 1, metrics: { a }, processes: {}, path: {} });
    WHAT
})()"""


def test_a_step_that_comes_live_is_averaged_into_its_bin(call):
    body = """for (let n = 25; n < 32; n++) columns.append(step(n, 13));
      return [columns.steps, columns.metrics.a, columns.high.a, columns.last];"""
    steps, values, high, last = call("parts/columns", COLUMNS.replace("WHAT", body))
    assert steps == [0, 10, 20, 30] and last == 31
    assert values == [1, 2, pytest.approx((5 * 3 + 5 * 13) / 10), 13]
    assert high == [2, 3, 13, 13]


def test_the_newest_value_says_of_which_steps_it_is(call):
    body = "return [columns.latest('a'), columns.latest('b'), columns.latest('none')];"
    a, b, none = call("parts/columns", COLUMNS.replace("WHAT", body))
    assert a == {"step": 20, "until": 24, "value": 3}
    assert b == {"step": 0, "until": 9, "value": 5} and none is None
    body = "columns.append(step(25, 7)); return columns.latest('a');"
    newest = call("parts/columns", COLUMNS.replace("WHAT", body))
    assert newest == {"step": 25, "until": 25, "value": 7}


TIMELINE = """(() => {
    const made = (start, from, n, spans) => ({
      start, phases: ["a"], staleness: [[0, 1]],
      gauges: { t: [0], waiting: [from], out: [0], policy_version: [from] },
      steps: Array.from({ length: n }, (_, i) =>
        ({ step: from + i, start: 10 * i, end: 10 * i + 10 })),
      lanes: [{ process: "p", marks: [[1, `version ${from}`]],
        spans: Array.from({ length: spans }, (_, i) =>
          [0, (10 * n * i) / spans, (10 * n) / spans]) }] });
    WHAT
})()"""


def test_later_steps_join_and_old_ones_go(call):
    body = """const timeline = new it.Timeline(made(1000, 0, 3, 6));
      const moved = timeline.join(made(1030, 3, 2, 4), 25);
      const { start, steps, tracks: [{ spans, marks }], gauges, crowded } = timeline;
      const at = timeline.stepAt(25)?.step;
      return [moved, start, steps, spans.length, marks, gauges.t, at, crowded];"""
    moved, start, steps, spans, marks, gauges, at, crowded = call(
        "charts/timeline_data", TIMELINE.replace("WHAT", body)
    )
    assert (moved, start) == (20, 1020)
    shown = [(one["step"], one["start"], one["end"]) for one in steps]
    assert shown == [(2, 0, 10), (3, 10, 20), (4, 20, 30)]
    assert spans == 6 and marks == [[11, "version 3"]] and gauges == [10] and at == 4
    assert crowded is False


def test_a_track_of_very_many_spans_asks_to_be_thinned(call):
    body = """const timeline = new it.Timeline(made(1000, 0, 3, 4000));
      timeline.join(made(1030, 3, 3, 3990), 600);
      const before = timeline.crowded;
      timeline.join(made(1060, 6, 3, 100), 600);
      return [before, timeline.crowded];"""
    assert call("charts/timeline_data", TIMELINE.replace("WHAT", body)) == [False, True]
