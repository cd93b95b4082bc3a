/**
 * Predicted step times for other settings, and the errors of past predictions.
 */
import { el, setChildren, setText } from "../parts/dom.js";
import { isFiniteNumber, percent, plural, seconds, value } from "../parts/format.js";
import { secondsTick } from "../charts/plot.js";
import { table } from "../parts/table.js";
import { judged } from "./judged.js";
import { lineChart } from "./spark.js";

const SURE = {
  measured: ["●", "measured", "this run has used that setting: the prediction is its own step time"],
  model: ["○", "model", "this run has not used that setting: a model computes the prediction from the seconds of each phase"],
};

export function mount(root, store) {
  const note = el("span", { class: "muted" });
  const options = el("div", {
    class: "table-wrap",
    role: "region",
    "aria-label": "predictions",
    tabindex: "0",
  });
  const error = el("p", { class: "error-sentence", "data-testid": "prediction-error" });
  const host = el("div", { class: "mini-host grow" });
  const chart = lineChart(host, { label: "predicted and actual seconds of past steps", format: (x, step) => (step ? secondsTick(x, step) : seconds(x)) });
  const changes = el("div", {
    class: "table-wrap",
    role: "region",
    "aria-label": "changes of the number of workers",
    tabindex: "0",
  });
  setChildren(
    root,
    el(
      "section",
      { class: "panel what-if-options column" },
      el("div", { class: "panel-head row" }, el("h2", null, "A step, with one thing changed"), note),
      options,
    ),
    el(
      "div",
      { class: "split" },
      el(
        "section",
        { class: "panel column grow" },
        el("h2", null, "Each step, predicted one step ahead"),
        error,
        host,
      ),
      el(
        "section",
        { class: "panel column what-if-changes" },
        el("h2", null, "When the number of workers changed"),
        changes,
      ),
    ),
  );
  let drawn = "";

  function draw() {
    const found = store.judgement?.what_if ?? null;
    const key = JSON.stringify(found);
    if (key === drawn || !store.judgement) return;
    drawn = key;
    const now = found?.now ?? null;
    setText(note, now ? "median of recent steps, without evaluation and checkpoints" : "");
    setChildren(
      options,
      now
        ? optionTable(found)
        : el(
            "p",
            { class: "muted what-if-none" },
            "Predictions start after the first settled step: a step that trained without compilation or starting processes.",
          ),
    );
    setText(error, found?.error?.text ?? "");
    const past = found?.past ?? [];
    chart.draw({
      x: past.map((one) => one.step),
      lines: [
        { name: "actual", y: past.map((one) => finite(one.actual)), marks: true },
        { name: "predicted", y: past.map((one) => finite(one.predicted)) },
      ],
    });
    setChildren(changes, changeTable(found?.changes ?? []));
  }

  return {
    update: (event) => {
      if (event.type === "theme") drawn = "";
      if (["judgement", "history", "theme"].includes(event.type)) draw();
    },
    async show() {
      draw();
      await judged(store);
      draw();
    },
    hide: () => chart.hide(),
  };
}

const finite = (raw) => (isFiniteNumber(value(raw)) ? value(raw) : null);

function optionTable({ now, options, error }) {
  const times = [now, ...options].map((one) => finite(one.step_s) ?? 0);
  const longest = Math.max(...times, 1e-9);
  const off = finite(error?.median);
  const workers = `${plural(now.workers, "worker", "workers")}, max_staleness ${now.max_staleness}`;
  const rows = [{ id: "now", title: "now", note: workers, step_s: now.step_s, ratio: null, sure: "measured" }, ...options];
  const sureOf = (option) => SURE[option.sure] ?? SURE.model;
  const columns = [
    { title: "setting", heads: true, cell: (option) => option.title },
    { title: "step", align: "right", cell: (option) => el("span", { class: "check-value" }, seconds(finite(option.step_s))) },
    { title: "bar", hidden: true, class: "bar-cell",
      cell: (option) => bar(finite(option.step_s), finite(now.step_s), longest, sureOf(option)[1]) },
    { title: "change", align: "right",
      cell: (option) => [changeText(finite(option.ratio)), belowError(finite(option.ratio), off)] },
    { title: "from", class: "nowrap", cell: (option) => {
      const [mark, word, explained] = sureOf(option);
      return el("span", { title: explained }, el("span", { "aria-hidden": "true" }, `${mark} `), word);
    } },
    { title: off === null ? "why" : `why (predictions here are ${percent(off, 1)} off in the median)`,
      cell: (option) => el("span", { class: "muted" }, option.note) },
  ];
  return table(columns, rows, {
    class: "what-if-table",
    caption: "Predicted seconds of a step for each change",
    rowOf: (option) => ({ class: option.id === "now" ? "now" : null, "data-testid": "what-if-row",
      data: { id: option.id, sure: sureOf(option)[1] } }),
  });
}

function bar(time, now, longest, word) {
  const share = (x) => `${(100 * (x ?? 0)) / longest}%`;
  return el(
    "span",
    { class: "bar-track", "aria-hidden": "true" },
    el("span", { class: `bar-part ${word}`, style: { width: share(time) } }),
    el("span", { class: "bar-mark", style: { left: share(now) } }),
  );
}

function changeText(ratio) {
  if (ratio === null) return "–";
  if (Math.abs(ratio - 1) < 0.005) return "the same";
  return ratio < 1 ? `▼ ${percent(1 - ratio)} shorter` : `▲ ${percent(ratio - 1)} longer`;
}

/** Marks a predicted change that is smaller than the usual prediction error. */
function belowError(ratio, off) {
  const change = Math.abs((ratio ?? 1) - 1);
  if (off === null || change < 0.005 || change >= off) return null;
  return el("div", { class: "small muted", title: `predictions here are ${percent(off, 1)} off in the median` },
    "within the error");
}

function changeTable(changes) {
  if (!changes.length) {
    return el(
      "p",
      { class: "muted" },
      "The number of workers has not changed in this run. After a worker is added or drained, " +
        "this table compares the predicted step time with the actual one.",
    );
  }
  const columns = [
    { title: "step", align: "right", cell: (change) => change.step },
    { title: "workers", cell: (change) => `${change.from} → ${change.to}` },
    { title: "predicted", align: "right", cell: (change) => seconds(change.predicted) },
    { title: "actual", align: "right", cell: (change) => seconds(change.actual) },
    { title: "error", align: "right", cell: (change) => signed(finite(change.error)) },
  ];
  return table(columns, changes.toReversed(), {
    caption: "Predicted and actual seconds after each change",
    rowOf: () => ({ "data-testid": "what-if-change" }),
  });
}

function signed(error) {
  if (error === null) return "–";
  return `${error >= 0 ? "+" : "−"}${percent(Math.abs(error), 1)}`;
}
