/**
 * Two runs on the same axes: where they diverge, and their differences in configuration, code and
 * environment. The whole page of `python -m dashboard --compare A B`.
 */
import { getJSON } from "../api.js";
import { makeChart } from "../charts/charts.js";
import { Columns } from "../parts/columns.js";
import { el, empty, runText, setChildren, setText, toggle } from "../parts/dom.js";
import * as format from "../parts/format.js";
import { makeThemeSwitch } from "../header.js";
import { lightMark, lineColor, onTheme } from "../charts/palette.js";
import { scrolled } from "../parts/table.js";

const id = "compare";

const FIRST = ["reward/total/mean", "eval/accuracy/strict", "train/entropy", "rollout/completion_len_mean",
  "train/grad_norm", "time/train/step_s"];
const CHARTS = 6;
const NAMES = ["A", "B"];
/** Common steps needed to tell small differences from noise. */
const TELLING_STEPS = 30;

export function mount(root, store) {
  root.classList.add("compare");
  const head = el("header", { class: "top" });
  const verdict = el("p", { class: "banner", id: "compare-part", role: "status" }, "Reading both runs …");
  const grid = el("div", { class: "chart-grid compare-grid" });
  const side = el("aside", { class: "panel compare-side", "aria-label": "differences" });
  const find = el("input", { type: "search", placeholder: "find a metric", "aria-label": "find a metric",
    on: { input: () => page(0) } });
  const where = el("span", { class: "muted" });
  const tableHost = el("div", { class: "table-host panel", hidden: true });
  const tableButton = el("button", { type: "button", class: "button small", id: "compare-table-button",
    "aria-pressed": "false", on: { click: () => {
      tableButton.setAttribute("aria-pressed", String(tableHost.hidden));
      [grid.hidden, tableHost.hidden] = [tableHost.hidden, !tableHost.hidden];
      page(state.from);
    } } }, "Table");
  const pager = el("div", { class: "row" }, find, button("‹", "previous metrics", -1), where,
    button("›", "more metrics", 1), el("span", { class: "grow" }), tableButton);
  const themes = makeThemeSwitch();
  const state = { json: null, columns: [], charts: [], from: 0 };
  setChildren(root, head, verdict, el("main", { class: "stage" }, el("section", { class: "view",
    data: { view: id } }, el("div", { class: "split" },
    el("div", { class: "compare-main" }, pager, grid, tableHost), side))));

  function button(text, label, by) {
    return el("button", { type: "button", class: "button quiet", "aria-label": label, title: label,
      on: { click: () => page(state.from + by * CHARTS) } }, text);
  }

  function metricNames() {
    const [a, b] = state.columns;
    const diverged = (state.json.parts ?? []).map((part) => part.metric);
    const all = new Set([...FIRST.slice(0, 2), ...diverged, ...FIRST, ...Object.keys(a.metrics), ...Object.keys(b.metrics)]);
    const wanted = find.value.trim().toLowerCase();
    return [...all].filter((name) => name.toLowerCase().includes(wanted) &&
      state.columns.some((columns) => columns.metrics[name]?.some((x) => x !== null)));
  }

  function page(from) {
    const names = metricNames();
    state.from = Math.max(0, Math.min(from, Math.floor((names.length - 1) / CHARTS) * CHARTS));
    const shown = names.slice(state.from, state.from + CHARTS);
    setText(where, names.length ? `${state.from + 1}–${state.from + shown.length} of ${names.length}` : "no metric has this name");
    for (const chart of state.charts.splice(0)) chart.destroy();
    if (!tableHost.hidden) {
      setChildren(tableHost, valuesTable(state.columns, shown));
      return;
    }
    state.charts = shown.map(chartOf);
    setChildren(grid, state.charts.map((chart) => chart.node));
    for (const chart of state.charts) chart.draw(state.columns[0].steps.length ? state.columns[0] : state.columns[1]);
  }

  function chartOf(name) {
    const part = (state.json.parts ?? []).find((p) => p.metric === name);
    const chart = makeChart(store, {
      id: name.replaceAll("/", "-"), title: name, sync: "compare",
      series: NAMES.map((label, run) => ({ name, label, run })),
      columnsOf: ({ run }) => state.columns[run],
      marks: part ? [{ step: part.step }] : [],
    });
    if (part) chart.node.title = `diverges at step ${part.step}: ${part.text}`;
    return chart;
  }

  function showHead() {
    const mark = (i) => el("span", { class: "line-sample", "aria-hidden": "true",
      style: { borderTop: `2px ${i ? "dashed" : "solid"} ${lineColor(i)}` } });
    const run = (of, i) => el("div", { class: "compared", data: { run: NAMES[i] } }, mark(i),
      el("strong", null, NAMES[i]), runText(of.run, { class: "run-name run-text", title: of.folder }),
      el("span", { class: "muted", title: "From its last start or resume to its end" },
        `${of.state}, ${format.plural(of.step ?? 0, "step", "steps")}` +
        (format.isFiniteNumber(of.ended) ? `, ${format.seconds(of.ended - of.started)}` : "")));
    setChildren(head, el("div", { class: "brand" }, el("span", { class: "brand-mark", "aria-hidden": "true" })),
      el("h1", null, "Compare"), state.json.runs.map(run), el("span", { class: "grow" }), themes.node);
    document.title = `${state.json.runs.map((of) => of.run).join(" / ")} · Tandem`;
  }

  function showVerdict() {
    const { part } = state.json;
    verdict.className = `banner ${part ? "warn" : "ok"}`;
    setChildren(verdict, lightMark(part ? "warn" : "ok", ""), el("span", { class: "banner-text" },
      part ? format.sentence(part.text) : `No metric of both runs diverges beyond noise${tooFew()}.`));
  }

  function tooFew() {
    const steps = Math.min(...state.json.runs.map((of) => of.step ?? 0));
    return steps < TELLING_STEPS ? `, but ${steps} common steps only reveal large differences` : "";
  }

  async function load() {
    try {
      state.json = await getJSON("/api/compare");
    } catch (error) {
      setChildren(verdict, lightMark("bad", ""), error.message);
      return;
    }
    state.columns = state.json.histories.map((history) => new Columns(history));
    themes.show();
    showHead();
    showVerdict();
    differences(side, state.json);
    page(0);
    document.body.dataset.drawn = "true";
  }

  onTheme(() => {
    themes.show();
    if (state.json) showHead();
    for (const chart of state.charts) chart.redraw();
  });
  return { show: load, hide() {}, update() {} };
}

/** The table alternative to the charts: A and B of each metric, by step. */
function valuesTable(columns, names) {
  const steps = [...new Set(columns.flatMap((c) => c.steps))].sort((a, b) => b - a);
  const rows = columns.map((c) => new Map(c.steps.map((step, i) => [step, i])));
  const cell = (name, run) => (step) => {
    const i = rows[run].get(step);
    return columns[run].nonfinite.get(name)?.get(step) ?? format.number(columns[run].metrics[name]?.[i] ?? null);
  };
  return scrolled([
    { title: "step", align: "right", cell: (step) => step },
    ...names.flatMap((name) => NAMES.map((label, run) =>
      ({ title: `${name} ${label}`, align: "right", cell: cell(name, run) }))),
  ], steps, { caption: "both runs, by step", testid: "compare-table" });
}

function differences(side, json) {
  const tabs = [
    ["parts", `Metrics (${json.parts?.length ?? 0})`, () => parts(json)],
    ["config", `Config (${json.config_diff?.length ?? 0})`, () => pairs(json.config_diff, "config",
      "Both runs have the same configuration.")],
    ["code", `Code (${json.code_diff?.length ?? 0})`, () => code(json.code_diff)],
    ["environment", `Environment (${json.environment_diff?.length ?? 0})`, () => pairs(json.environment_diff,
      "environment", "Both runs used the same versions on the same type of machine.")],
  ];
  const body = el("div", { class: "compare-body scroll" });
  const show = (key) => setChildren(body, tabs.find(([name]) => name === key)[2]());
  setChildren(side, toggle(tabs.map(([key, text]) => [key, text]), "config", show, "differences"), body);
  show("config");
}

function parts(json) {
  return scrolled([
    { title: "step", align: "right", cell: (p) => p.step },
    { title: "metric", cell: (p) => [el("code", null, p.metric), el("div", { class: "muted" }, p.text)] },
  ], json.parts ?? [], { caption: "first step at which each metric diverges beyond noise", testid: "compare-parts",
    empty: "No metric diverges beyond noise." });
}

function pairs(rows, name, none) {
  return scrolled([
    { title: "key", cell: (row) => el("code", null, row.key) },
    { title: "A", cell: (row) => shown(row.a) },
    { title: "B", cell: (row) => shown(row.b) },
  ], rows ?? [], { caption: `differences in ${name}`, testid: `compare-${name}`, empty: none });
}

function shown(x) {
  if (x === null || x === undefined) return el("span", { class: "muted" }, "–");
  return runText(typeof x === "string" ? x : JSON.stringify(x), { class: "run-text mono" });
}

function code(files) {
  if (!files?.length) return empty("The same code", "No file of Tandem's packages differs.");
  return el("div", { "data-testid": "compare-code" }, files.map(({ file, status, diff }, i) =>
    el("details", { class: "diff", open: i === 0 || files.length <= 3 },
      el("summary", null, el("code", null, file), " ", el("span", { class: "muted" }, status)),
      el("pre", null, (diff ?? "").split("\n").map((line) => el("span", { class: lineClass(line) }, `${line}\n`))))));
}

function lineClass(line) {
  if (line.startsWith("+") && !line.startsWith("+++")) return "added";
  if (line.startsWith("-") && !line.startsWith("---")) return "removed";
  return line.startsWith("@@") ? "hunk" : null;
}
