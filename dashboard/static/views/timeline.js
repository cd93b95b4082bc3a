/**
 * The activity of each process over time: a track per process, for the last minutes or chosen steps.
 */
import { getJSON, keepJSON } from "../api.js";
import { el, empty, setChildren, setText, toggle } from "../parts/dom.js";
import * as format from "../parts/format.js";
import { swatch } from "../charts/palette.js";
import { makeTooltip } from "../charts/plot.js";
import { go, noteParams } from "../router.js";
import { scrolled } from "../parts/table.js";
import { TimelineChart } from "../charts/timeline_chart.js";
import { Timeline } from "../charts/timeline_data.js";

const id = "timeline";

const WINDOWS = [["30", "30 s"], ["120", "2 min"], ["300", "5 min"], ["600", "10 min"]];
const MOST_ROWS = 500;
const KEEP_S = 120;

export function keep() {
  return keepJSON("/api/timeline", { last_s: KEEP_S });
}

export function mount(root, store) {
  const state = { keep_s: KEEP_S, steps: null, shown: false, busy: false, domain: null, again: false };
  let timeline = new Timeline({});
  const tooltip = makeTooltip();
  const windows = toggle(WINDOWS, String(KEEP_S), (key) => go(id, { last_s: key }), "time range");
  const first = stepField("timeline-first", "first step");
  const last = stepField("timeline-last", "last step");
  const form = el("form", { class: "row steps-form", on: { submit: chooseSteps } },
    el("label", { for: "timeline-first", class: "muted" }, "steps"), first, "–", last,
    el("button", { type: "submit", class: "button small" }, "Show"),
    walkButton("‹", "earlier steps", -1), walkButton("›", "later steps", 1));
  const note = el("span", { class: "muted", "data-testid": "timeline-note" });
  const tableButton = el("button", { type: "button", class: "button small", id: "timeline-table-button",
    "aria-pressed": "false", on: { click: switchTable } }, "Table");
  const trace = el("a", { class: "button small", id: "timeline-export", download: "" }, "Export for Perfetto");
  const host = el("div", { class: "chart-host pans", tabindex: 0, role: "application",
    "aria-roledescription": "chart", "aria-label": "timeline", "aria-describedby": "timeline-keys",
    "data-testid": "timeline-chart" });
  const scroller = el("div", { class: "timeline-scroll" }, host);
  const tableHost = el("div", { class: "table-host", hidden: true });
  const legend = el("div", { class: "row timeline-legend", "aria-label": "phases" });
  const blank = el("div", { class: "blank", hidden: true });
  const spoken = el("div", { class: "visually-hidden", "aria-live": "polite" });
  const chart = new TimelineChart(host, {
    hover, open: (step) => go("breakdown", { step }), settle,
    titleOf: (phase) => store.phaseTitle(phase),
  });
  setChildren(root, el("div", { class: "panel timeline-main" },
    el("div", { class: "row panel-head" }, windows, form, note, el("span", { class: "grow" }), tableButton, trace),
    el("p", { class: "visually-hidden", id: "timeline-keys" }, "Left and right move from span to span, " +
      "up and down between processes, plus and minus zoom, Shift and arrows scroll, Enter opens the step."),
    scroller, tableHost, blank, legend, spoken));

  function stepField(name, label) {
    return el("input", { type: "number", id: name, min: 0, step: 1, class: "step-field", "aria-label": label,
      required: true });
  }

  function walkButton(text, label, by) {
    return el("button", { type: "button", class: "button quiet", "aria-label": label, title: label, on: { click: () => {
      const [from, to] = state.steps ?? [timeline.lastStep ?? 0, timeline.lastStep ?? 0];
      const size = to - from + 1;
      const start = Math.max(0, Math.min(from + by * size, store.columns.last));
      go(id, { first: start, last: Math.min(start + size - 1, store.columns.last) });
    } } }, text);
  }

  function chooseSteps(event) {
    event.preventDefault();
    const ends = [Number(first.value), Number(last.value)].sort((a, b) => a - b);
    go(id, { first: ends[0], last: ends[1] });
  }

  async function load() {
    state.busy = true;
    try {
      const query = state.steps ? { first: state.steps[0], last: state.steps[1] } : { last_s: state.keep_s };
      timeline = new Timeline(await getJSON("/api/timeline", query));
      draw();
    } catch (error) {
      if (timeline.steps.length) setText(note, error.message);
      else say("The timeline cannot be shown", error.message);
    }
    done();
  }

  function done() {
    state.busy = false;
    if (!state.again) return;
    state.again = false;
    follow();
  }

  /** Fetches only the steps closed since the last fetch; one request at a time. */
  async function follow() {
    if (state.steps || !state.shown) return;
    if (state.busy) {
      state.again = true;
      return;
    }
    if (timeline.lastStep === null || timeline.crowded) {
      await load();
      return;
    }
    if (store.timelineStep <= timeline.lastStep) return;
    state.busy = true;
    try {
      const json = await getJSON("/api/timeline", { first: timeline.lastStep + 1, last: store.timelineStep });
      store.timed(() => take(json));
    } catch (error) {
      if (error.status > 0) return load(); // too many steps for one answer, or another run's
      setText(note, error.message);
    }
    done();
  }

  function take(json) {
    const moved = timeline.join(json, state.keep_s);
    if (timeline.crowded) state.again = true;
    if (state.domain) {
      state.domain = { first: Math.max(0, state.domain.first - moved), last: Math.max(0.01, state.domain.last - moved) };
    }
    if (state.shown) draw();
  }

  function say(heading, text) {
    blank.hidden = false;
    scroller.hidden = tableHost.hidden = legend.hidden = true;
    setChildren(blank, empty(heading, text));
  }

  function draw() {
    const asTable = tableButton.getAttribute("aria-pressed") === "true";
    if (!timeline.steps.length) {
      const none = !store.columns.steps.length;
      say(none ? "No step has closed yet" : "No timeline of these steps", none
        ? "The timeline of a step is written when the step closes. The first step compiles the model's " +
          "programs, which usually takes a minute."
        : "The run has no record of them in timeline.jsonl: log.timeline may be off, or the steps are too old.");
      return;
    }
    blank.hidden = true;
    scroller.hidden = asTable;
    tableHost.hidden = !asTable;
    legend.hidden = false;
    const ends = [timeline.firstStep, timeline.lastStep];
    if (document.activeElement !== first && document.activeElement !== last) {
      [first.value, last.value] = ends;
    }
    trace.href = `/api/trace?first=${ends[0]}&last=${ends[1]}`;
    setText(note, `${format.seconds(timeline.duration)}${timeline.thinned ? ", thinned: zoom in for every span" : ""}`);
    showLegend();
    if (asTable) drawTable();
    else chart.set(timeline, state.domain);
  }

  function showLegend() {
    const used = new Set(timeline.tracks.flatMap((track) => track.spans.map(([phase]) => phase)));
    const key = [...used].sort((a, b) => a - b).join() + document.documentElement.dataset.theme;
    if (legend.dataset.shown === key) return;
    legend.dataset.shown = key;
    setChildren(legend, timeline.phases.filter((_, i) => used.has(i)).map((phase) =>
      el("span", { class: "phase-name" }, swatch(phase), store.phaseTitle(phase))),
    el("span", { class: "muted" }, "▾ policy version published or swapped in  ■ checkpoint"));
  }

  function drawTable() {
    const { first: from, last: to } = state.domain ?? { first: 0, last: Infinity };
    const rows = timeline.tracks.flatMap(({ process, spans, marks }) => [
      ...spans.map(([phase, t, d]) => ({ process, t, d, what: store.phaseTitle(timeline.phases[phase]) })),
      ...marks.map(([t, text]) => ({ process, t, d: null, what: text })),
    ]).filter(({ t, d }) => t + (d ?? 0) >= from && t <= to).sort((a, b) => b.t - a.t);
    setChildren(tableHost,
      el("p", { class: "muted" }, rows.length > MOST_ROWS ? `The newest ${MOST_ROWS} of ${rows.length} spans.` : ""),
      scrolled([
        { title: "step", align: "right", cell: (r) => timeline.stepAt(r.t)?.step ?? "" },
        { title: "offset in step", align: "right",
          cell: (r) => format.seconds(r.t - (timeline.stepAt(r.t)?.start ?? 0)) },
        { title: "process", cell: (r) => r.process },
        { title: "phase or mark", cell: (r) => r.what },
        { title: "duration", align: "right", cell: (r) => (r.d === null ? "" : format.seconds(r.d)) },
      ], rows.slice(0, MOST_ROWS), { caption: "spans, newest first", testid: "timeline-table" }));
  }

  function switchTable() {
    tableButton.setAttribute("aria-pressed", String(tableHost.hidden));
    draw();
  }

  function hover(hit, x, y) {
    if (!hit) {
      tooltip.hide();
      return;
    }
    const { track, span, marks, gauge, step, t } = hit;
    const where = `${step ? `step ${step.step}` : "between steps"}, +${format.seconds(t - (step?.start ?? 0))}`;
    const phase = span && timeline.phases[span[0]];
    const line = (label, text) => el("tr", null, el("td", null, label), el("td", { class: "num" }, text));
    tooltip.show(x, y,
      el("div", { class: "tip-head" }, el("strong", null, track?.process ?? "run"), el("span", null, where)),
      span && el("p", { class: "phase-name" }, swatch(phase), store.phaseTitle(phase),
        el("strong", null, format.seconds(span[2]))),
      marks.length ? el("p", null, marks.join(", ")) : null,
      gauge && el("table", { class: "tip-table" }, line("groups waiting", format.number(gauge.waiting)),
        line("groups out", format.number(gauge.out)), line("policy version", format.number(gauge.policy_version))));
    if (track && span) setText(spoken, `${track.process}, ${store.phaseTitle(phase)}, ${format.seconds(span[2])}, ${where}`);
  }

  /** If the server thinned the timeline, zooming in fetches the visible steps in full. */
  function settle(domain) {
    state.domain = domain;
    if (!domain || !timeline.thinned) return;
    const seen = timeline.steps.filter((s) => s.end > domain.first && s.start < domain.last);
    if (!seen.length || seen.length === timeline.steps.length) return;
    go(id, { first: seen[0].step, last: seen.at(-1).step });
  }

  return {
    async show(params) {
      state.shown = true;
      const from = Number(params?.get("first"));
      if (params?.has("first")) state.steps = [from, Number(params.get("last") ?? from)];
      else {
        state.steps = null;
        if (params?.has("last_s")) state.keep_s = Number(params.get("last_s"));
        noteParams(id, { last_s: state.keep_s });
      }
      windows.pick(state.steps ? "" : String(state.keep_s));
      state.domain = null;
      await load();
    },
    hide() {
      state.shown = false;
      tooltip.hide();
    },
    update({ type }) {
      if (type === "timeline") follow();
      else if (type === "reload" || (type === "history" && store.columns.last < timeline.lastStep)) load();
      else if (type === "theme" && timeline.steps.length) draw();
    },
  };
}
