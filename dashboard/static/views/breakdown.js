/**
 * The seconds of each step: stacked bars by phase, for the critical path and each process, with the
 * bottleneck, the most severe alerts and a legend with the means of the visible steps.
 */
import { BreakdownChart } from "../charts/breakdown_chart.js";
import { el, empty, setChildren, setText, toggle } from "../parts/dom.js";
import * as format from "../parts/format.js";
import { isUnexplained, lightMark, swatch } from "../charts/palette.js";
import { makeTooltip } from "../charts/plot.js";
import { go } from "../router.js";
import { makeRangeBar, zoomTo } from "../charts/range_bar.js";
import { makeStepPanel } from "../parts/step_panel.js";
import { scrolled } from "../parts/table.js";

const PATH = "path";

export function mount(root, store) {
  const state = { chosen: PATH, share: false, asTable: false };
  const tooltip = makeTooltip();
  const range = makeRangeBar(store);
  const scale = toggle([["seconds", "Seconds"], ["share", "Shares"]], "seconds", (key) => {
    state.share = key === "share";
    draw();
  }, "scale");
  const tableButton = el("button", { type: "button", class: "button small", "aria-pressed": "false",
    id: "breakdown-table-button", on: { click: switchTable } }, "Table");
  const labels = el("div", { class: "row-labels", role: "radiogroup", "aria-label": "process" });
  const host = el("div", { class: "chart-host", tabindex: 0, role: "application",
    "aria-roledescription": "chart", "aria-describedby": "breakdown-keys", "data-testid": "breakdown-chart" });
  const spoken = el("div", { class: "visually-hidden", "aria-live": "polite" });
  const scroller = el("div", { class: "breakdown-scroll" }, labels, host);
  const tableHost = el("div", { class: "table-host", hidden: true });
  const blank = el("div", { class: "blank", hidden: true }, empty("No step has closed yet",
    "The first one compiles the model's programs, which usually takes a minute."));
  const side = el("aside", { class: "side scroll", "aria-label": "bottleneck, alerts, legend" });
  const step = makeStepPanel(store, { close: closeStep, walk: openStep });
  const chart = new BreakdownChart(host, {
    hover, choose, open: (i, byKey) => openStep(store.shown.steps[i], byKey),
    zoom: (first, last) => zoomTo(store, first, last),
    placed: () => placeLabels(),
    whole: () => ({ first: store.columns.steps[0] ?? 0, last: store.columns.last + 1 }),
  });
  const facts = sideCards(side, store, () => threshold());
  setChildren(root, el("div", { class: "split" },
    el("div", { class: "panel breakdown-main" },
      el("div", { class: "row panel-head" }, range.node, el("span", { class: "grow" }), scale, tableButton),
      el("p", { class: "visually-hidden", id: "breakdown-keys" }, "Left and right move from step to " +
        "step, up and down between processes, plus and minus zoom, Enter opens the step."),
      scroller, tableHost, blank, spoken),
    el("div", { class: "side-slot" }, side, step.node)));

  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || step.step === null) return;
    event.stopPropagation(); // for the chart, Escape means: show all steps
    closeStep();
  }, true);

  function rows() {
    const columns = store.shown;
    const row = (name, label, phases, table) => ({ id: name, label, phases, table });
    return [
      ...(columns.path.length ? [row(PATH, "critical path", columns.pathPhases, columns.path)] : []),
      ...columns.processes.map((name) => row(name, name, columns.phases, columns.seconds[name])),
    ];
  }

  const threshold = () => store.run.settings.unexplained_fraction;

  function draw() {
    range.update();
    const columns = store.shown;
    const none = !columns.steps.length;
    blank.hidden = !none;
    scroller.hidden = none || state.asTable;
    tableHost.hidden = none || !state.asTable;
    if (none) {
      facts.update([], null);
      return;
    }
    const all = rows();
    if (!all.some((row) => row.id === state.chosen)) state.chosen = all[0].id;
    if (state.asTable) drawTable(all);
    else {
      chart.set({ columns, rows: all, chosen: state.chosen, share: state.share, threshold: threshold(),
        open: !store.ended && store.range.mode === "all" });
    }
    const chosen = all.find((row) => row.id === state.chosen);
    facts.update(summary(columns, chosen, threshold()), chosen);
    host.setAttribute("aria-label", `Seconds by phase, ${format.span(columns.steps[0], columns.last)}, ` +
      `${chosen.label}`);
  }

  function placeLabels() {
    const all = chart.view.rows;
    const known = [...labels.children].map((node) => node.dataset.process).join();
    if (known !== all.map((row) => row.id).join()) {
      setChildren(labels, all.map((row) => el("button", { type: "button", class: "row-label", role: "radio",
        data: { process: row.id }, title: row.label, on: { click: () => choose(row.id) } }, row.label)));
    }
    [...labels.children].forEach((node, i) => {
      node.style.top = `${chart.tops[i].top}px`;
      node.style.height = `${chart.tops[i].height}px`;
      node.setAttribute("aria-checked", String(all[i].id === state.chosen));
    });
    labels.style.height = `${chart.height}px`;
  }

  function drawTable(all) {
    const row = all.find((r) => r.id === state.chosen);
    const columns = store.shown;
    const newest = columns.steps.map((_, i) => i).reverse();
    setChildren(tableHost,
      el("div", { class: "row" }, toggle(all.map((r) => [r.id, r.label]), state.chosen, choose, "process")),
      scrolled([
        { title: columns.bin > 1 ? "steps" : "step", align: "right", cell: (i) => stepsOf(columns, i) },
        { title: "wall", align: "right", cell: (i) => format.seconds(columns.wall[i]) },
        ...row.phases.map((phase, k) => ({ title: store.phaseTitle(phase), align: "right",
          cell: (i) => (row.table[i]?.[k] > 0 ? format.seconds(row.table[i][k]) : "") })),
      ], newest, { caption: `seconds by phase of ${row.label}`, testid: "breakdown-table",
        onRow: (i) => openStep(columns.steps[i]) }));
  }

  function switchTable() {
    state.asTable = !state.asTable;
    tableButton.setAttribute("aria-pressed", String(state.asTable));
    draw();
  }

  function choose(process) {
    state.chosen = process;
    draw();
  }

  function hover(i, row, x, y) {
    if (i === null || !row) {
      tooltip.hide();
      return;
    }
    const columns = store.shown;
    const bar = row.table[i];
    const wall = columns.wall[i];
    const parts = row.phases.map((phase, k) => [phase, bar?.[k] ?? 0]).filter(([, s]) => s > 1e-6).reverse();
    const which = stepsOf(columns, i);
    tooltip.show(x, y,
      el("div", { class: "tip-head" }, el("strong", null, columns.bin > 1 ? `steps ${which}, mean` : `step ${which}`),
        el("span", null, `${row.label} · ${format.seconds(wall)}`)),
      el("table", { class: "tip-table" }, parts.map(([phase, s]) =>
        el("tr", { class: isUnexplained(phase) && s > threshold() * wall ? "loud" : null },
          el("td", null, swatch(phase)), el("td", null, store.phaseTitle(phase)),
          el("td", { class: "num" }, format.seconds(s)), el("td", { class: "num" }, format.percent(s / wall))))),
      parts.length ? null : el("p", { class: "muted" }, "this process was not running in this step"));
    setText(spoken, `step ${which}, ${row.label}: ` +
      parts.slice(0, 4).map(([p, s]) => `${store.phaseTitle(p)} ${format.seconds(s)}`).join(", "));
  }

  function openStep(number, takeFocus = false) {
    const inside = Math.max(0, Math.min(number, store.columns.last));
    side.hidden = true;
    root.classList.add("with-step");
    tooltip.hide();
    step.show(inside, takeFocus);
  }

  function closeStep() {
    step.node.hidden = true;
    step.step = null;
    side.hidden = false;
    root.classList.remove("with-step");
    host.focus({ preventScroll: true });
  }

  return {
    show(params) {
      if (params?.has("step")) openStep(Number(params.get("step")));
      draw();
    },
    hide() {
      tooltip.hide();
    },
    update({ type }) {
      if (type === "judgement") facts.judge();
      if (type === "theme") chart.redraw();
      const frozen = type === "step" && store.range.mode === "fixed";
      if (["step", "history", "range", "theme"].includes(type) && !frozen) draw();
    },
  };
}

function stepsOf(columns, i) {
  const [first, last] = [columns.steps[i], columns.lastOf(i)];
  return first === last ? String(first) : `${first}–${last}`;
}

/** Mean seconds by phase over the visible steps, from the top of the stack down. */
function summary(columns, row, threshold) {
  const bars = row.table.map((bar, i) => [bar, columns.wall[i]]).filter(([bar]) => bar);
  const wall = bars.reduce((sum, [, w]) => sum + w, 0);
  const parts = row.phases.map((phase, k) => {
    const sum = bars.reduce((total, [bar]) => total + (bar[k] ?? 0), 0);
    const loud = isUnexplained(phase) ? bars.filter(([bar, w]) => bar[k] > threshold * w).length : 0;
    return { phase, mean: sum / Math.max(1, bars.length), share: wall ? sum / wall : 0, loud, of: bars.length };
  });
  return parts.filter((part) => part.mean > 0).reverse();
}

/** The right-hand column: bottleneck, alerts and legend. */
function sideCards(side, store, threshold) {
  const sentence = el("p", { class: "bottleneck", "data-testid": "bottleneck" });
  const alerts = el("ul", { class: "alert-list", "data-testid": "top-alerts" });
  const more = el("button", { type: "button", class: "link", on: { click: () => go("alerts") } });
  const heading = el("h2", null, "Seconds");
  const legend = el("div");
  setChildren(side,
    el("section", { class: "panel" }, el("h2", null, "Bottleneck"), sentence),
    el("section", { class: "panel" }, el("h2", null, "Alerts"), alerts, more),
    el("section", { class: "panel legend-card" }, heading, legend));
  let listed = "";

  function judge() {
    const list = store.judgement?.alerts ?? [];
    const said = store.judgement?.bottleneck?.text;
    setText(sentence, said ? format.sentence(said) : "No bottleneck yet: no step has trained.");
    const key = JSON.stringify(list.slice(0, 3)) + list.length;
    if (key === listed) return;
    listed = key;
    setChildren(alerts, list.slice(0, 3).map((alert) => el("li", null, lightMark(alert.severity, ""),
      el("div", null, el("p", null, format.sentence(alert.text)),
        el("p", { class: "muted advice", title: alert.advice }, format.sentence(alert.advice))))));
    if (!list.length) setChildren(alerts, el("li", null, lightMark("ok", ""), "No alerts."));
    more.hidden = list.length <= 3;
    setText(more, `all ${list.length} alerts`);
  }

  function update(parts, row) {
    judge();
    heading.parentElement.hidden = !row;
    setText(heading, row ? `Mean of steps ${store.shown.steps[0]}–${store.shown.last}: ${row.label}` : "");
    setChildren(legend, el("table", { class: "legend" }, el("tbody", null, parts.flatMap(legendRows))));
  }

  function legendRows(part) {
    const loud = part.loud > 0 ? "loud" : null;
    const what = store.shown.bin > 1 ? "bars" : "steps";
    return [
      el("tr", { class: loud, title: store.phaseText(part.phase) },
        el("td", null, swatch(part.phase)), el("td", null, store.phaseTitle(part.phase)),
        el("td", { class: "num" }, format.seconds(part.mean)),
        el("td", { class: "num muted" }, format.percent(part.share))),
      loud && el("tr", { class: "loud small" }, el("td"), el("td", { colspan: 3 },
        `more than ${format.percent(threshold())} in ${part.loud} of ${part.of} ${what}`)),
    ];
  }

  return { update, judge };
}
