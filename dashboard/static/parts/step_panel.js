/**
 * One step in full: seconds of every phase and process, metrics, groups by final state, warnings.
 *
 * makeStepPanel(store, {close, walk}) -> {node, show(step, takeFocus), step}; walk(step) is called when the
 * viewer goes to the step before or after. Text of the run becomes text nodes only.
 */
import { getJSON } from "../api.js";
import { el, empty, setChildren } from "./dom.js";
import * as format from "./format.js";
import { isUnexplained, lightMark, swatch } from "../charts/palette.js";
import { go } from "../router.js";
import { scrolled } from "./table.js";

export function makeStepPanel(store, { close, walk }) {
  const title = el("h2", { id: "step-title", tabindex: -1 });
  const body = el("div", { class: "step-body scroll" });
  const back = step("‹", "the step before", -1);
  const on = step("›", "the step after", 1);
  const node = el("aside", { class: "panel step-panel", "aria-labelledby": "step-title", hidden: true,
    "data-testid": "step-panel" },
    el("div", { class: "row panel-head" }, title, el("span", { class: "grow" }),
      back, on, el("button", { type: "button", class: "button quiet", "aria-label": "close the step",
        title: "Close (Esc)", on: { click: close } }, "✕")),
    body);
  const panel = { node, show, step: null };
  let asked = 0;

  function step(text, label, by) {
    return el("button", { type: "button", class: "button quiet", "aria-label": label, title: label,
      on: { click: () => walk(panel.step + by) } }, text);
  }

  /** Heading and content change together, so that no step is shown under another one's number. */
  async function show(number, takeFocus = false) {
    if (node.hidden) fill(number, el("p", { class: "muted" }, "Reading …"));
    panel.step = number;
    node.hidden = false;
    back.disabled = number <= 0;
    on.disabled = number >= store.columns.last;
    if (takeFocus) title.focus({ preventScroll: true });
    const mine = ++asked;
    try {
      const facts = await getJSON(`/api/step/${number}`);
      if (mine === asked) fill(number, content(store, facts));
    } catch (error) {
      if (mine === asked) fill(number, empty(`Step ${number} cannot be shown`, error.message));
    }
  }

  function fill(number, ...parts) {
    title.textContent = `Step ${number}`;
    setChildren(body, parts);
  }
  return panel;
}

function content(store, facts) {
  return [
    el("p", { class: "muted" }, `${format.seconds(facts.wall_s)}, closed ${format.clock(facts.time)}. `,
      link("Timeline", "timeline", facts.step), " · ", link("Samples", "samples", facts.step)),
    warnings(facts.warnings ?? []),
    el("h3", null, "Seconds by phase"), phases(store, facts),
    el("h3", null, "Groups that ended"), groups(facts),
    el("h3", null, "Metrics"), metrics(store, facts),
  ];
}

function link(text, view, step) {
  return el("button", { type: "button", class: "link",
    on: { click: () => go(view, { first: step, last: step }) } }, text);
}

function warnings(list) {
  return list.length
    ? el("ul", { class: "warnings" }, list.map((text) => el("li", null, lightMark("warn", ""), " ", text)))
    : null;
}

function phases(store, facts) {
  const names = Object.keys(facts.processes);
  const rows = store.run.phases.filter((phase) =>
    names.some((name) => (facts.processes[name][phase] ?? 0) > 0));
  const pathOf = (phase) => (isUnexplained(phase) ? facts.path?.other ?? facts.path?.unexplained
    : facts.path?.[phase]);
  const cell = (s, phase) => el("span", {
    class: isUnexplained(phase) && s > store.run.settings.unexplained_fraction * facts.wall_s ? "loud" : null,
    title: `${format.percent(s / facts.wall_s)} of the step` }, s > 0 ? format.seconds(s) : "");
  const columns = [
    { title: "phase", cell: (phase) => el("span", { class: "phase-name" }, swatch(phase), store.phaseTitle(phase)) },
    { title: "path", align: "right", cell: (phase) => cell(format.value(pathOf(phase)) ?? 0, phase) },
    ...names.map((name) => ({ title: name, align: "right",
      cell: (phase) => cell(format.value(facts.processes[name][phase]) ?? 0, phase) })),
  ];
  const seconds = (byProcess) => Object.entries(byProcess ?? {})
    .map(([name, s]) => `${name} ${format.seconds(s)}`).join(", ");
  const over = seconds(facts.overlap_s), absent = seconds(facts.absent_s);
  return [
    scrolled(columns, rows, { caption: `seconds by phase and process of step ${facts.step}`,
      testid: "step-phases" }),
    over ? el("p", { class: "muted" }, `More seconds than the step had: ${over}`) : null,
    absent ? el("p", { class: "muted" }, `Not there, or not heard of: ${absent}`) : null,
  ];
}

function groups(facts) {
  const entries = Object.entries(facts.groups ?? {});
  const size = (ids) => (Array.isArray(ids) ? ids.length : ids);
  const rows = [...entries.map(([fate, ids]) => [fate.replaceAll("_", " "), size(ids), ids]),
    ["still out", facts.outstanding ?? 0, null]];
  return scrolled([
    { title: "fate", cell: ([fate]) => fate },
    { title: "groups", align: "right", cell: ([, n]) => format.count(n) },
    { title: "ids", cell: ([, , ids]) => Array.isArray(ids) && ids.length
      ? el("details", null, el("summary", null, "show"), el("code", null, ids.join(" "))) : "" },
  ], rows, { caption: `groups that ended in step ${facts.step}`, testid: "step-groups" });
}

function metrics(store, facts) {
  const filter = el("input", { type: "search", placeholder: "find a metric", "aria-label": "find a metric" });
  const holder = el("div");
  const all = Object.entries(facts.metrics);
  const fill = () => {
    const wanted = filter.value.trim().toLowerCase();
    setChildren(holder, scrolled([
      { title: "metric", cell: ([name]) => el("span", { title: store.metric(name)?.description ?? null }, name) },
      { title: "value", align: "right", cell: ([name, x]) => {
        const shown = format.value(x);
        return el("span", { class: Number.isFinite(shown) ? null : "loud", title: String(x) },
          format.withUnit(x, store.metricUnit(name)));
      } },
    ], all.filter(([name]) => name.toLowerCase().includes(wanted)),
    { caption: `metrics of step ${facts.step}`, testid: "step-metrics", empty: "no metric of this name" }));
  };
  filter.addEventListener("input", fill);
  fill();
  return [filter, holder];
}
