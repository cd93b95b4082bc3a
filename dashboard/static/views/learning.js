/**
 * Learning curves: small charts over the same steps with one cursor, the token funnel, and the newest
 * evaluation of each held-out set.
 */
import { makeChart } from "../charts/charts.js";
import { el, empty, setChildren } from "../parts/dom.js";
import * as format from "../parts/format.js";
import { makeRangeBar, zoomTo } from "../charts/range_bar.js";
import { makeFunnel } from "../charts/funnel.js";
import { makeEvaluation, setsOf } from "./evaluation.js";
import { scrolled } from "../parts/table.js";

const one = (name, label = "") => [{ name, label }];

function specs(store) {
  const noReference = () => (store.run.settings?.has_reference ? null
    : "No KL measured: algorithm.kl_coef is 0, so there is no reference model, and no teacher has been measured.");
  return [
    { id: "reward-total", title: "Reward, total", series: one("reward/total/mean", "mean") },
    { id: "reward-functions", title: "Reward by function", series: rewardSeries },
    { id: "accuracy", title: "Accuracy", unit: "fraction", series: accuracySeries,
      why: () => (store.latest("eval/reward/total/mean")
        ? "No accuracy: the first scorer gives more than 1; eval.correct_from says what is right."
        : "No evaluation yet: eval.every_steps, eval.at_start and eval.at_end schedule them.") },
    { id: "prompts-skipped", title: "Prompts skipped", series: one("rollout/prompts_skipped"), zero: true,
      optional: true },
    { id: "completion-length", title: "Completion length", unit: "tokens", zero: true, series: [
      ...one("rollout/completion_len_mean", "mean"), ...one("rollout/completion_len_p90", "p90"),
      ...one("rollout/completion_len_max", "max")] },
    { id: "entropy", title: "Entropy", unit: "nats", series: one("train/entropy") },
    { id: "kl", title: "KL to reference and teacher", unit: "nats", series: [
      ...one("train/kl", "reference"), ...one("train/distillation_kl", "teacher")], why: noReference },
    { id: "clip-fractions", title: "Clipped tokens", unit: "fraction", zero: true, series: [
      ...one("train/clip_fraction_low", "low"), ...one("train/clip_fraction_high", "high")] },
    { id: "grad-norm", title: "Gradient norm", series: one("train/grad_norm"), zero: true },
    { id: "learning-rate", title: "Learning rate", series: one("train/learning_rate"), zero: true },
    { id: "loss", title: "Loss", series: one("train/loss") },
  ];
}

function accuracySeries(columns) {
  const sets = setsOf(columns);
  if (!sets.length) return ["strict", "lenient"].map((variant) => accuracy(`eval/accuracy/${variant}`, variant));
  return sets.map((set) => accuracy(`eval/${set}/accuracy/strict`, set));
}

function accuracy(name, label) {
  return { name, label, band: [`${name}_low`, `${name}_high`] };
}

function rewardSeries(columns) {
  return Object.keys(columns.metrics)
    .map((name) => [name, name.match(/^reward\/([^/]+)\/mean$/)?.[1]])
    .filter(([, scorer]) => scorer && scorer !== "total")
    .map(([name, label]) => ({ name, label }));
}

export function mount(root, store) {
  const range = makeRangeBar(store);
  const zoom = (first, last) => zoomTo(store, first, last);
  const charts = specs(store).map((spec) => makeChart(store, { ...spec, sync: "learning", zoom }));
  const funnel = makeFunnel(store);
  const evaluation = makeEvaluation(store);
  const optional = charts.filter((_, i) => specs(store)[i].optional);
  const grid = el("div", { class: "chart-grid" }, charts.map((chart) => chart.node), funnel.node);
  const tableHost = el("div", { class: "table-host panel", hidden: true });
  const blank = el("div", { class: "blank panel", hidden: true }, empty("No step has closed yet",
    "The first one compiles the model's programs, which usually takes a minute."));
  const tableButton = el("button", { type: "button", class: "button small", id: "learning-table-button",
    "aria-pressed": "false", on: { click: () => {
      tableButton.setAttribute("aria-pressed", String(tableHost.hidden));
      tableHost.hidden = !tableHost.hidden;
      draw();
    } } }, "Table");
  setChildren(root, el("div", { class: "row" }, range.node, el("span", { class: "grow" }), tableButton),
    grid, evaluation.node, tableHost, blank);

  function draw() {
    range.update();
    const none = !store.shown.steps.length;
    const asTable = !tableHost.hidden;
    blank.hidden = !none;
    grid.hidden = none || asTable;
    if (none) return;
    if (asTable) drawTable();
    else {
      for (const chart of charts) chart.draw(store.shown);
      for (const chart of optional) chart.node.hidden = !chart.shown.length;
      funnel.draw();
    }
    evaluation.draw(store.columns);
  }

  function drawTable() {
    for (const chart of charts) chart.draw(store.shown);
    const columns = store.shown;
    const shown = charts.flatMap((chart) => chart.shown.map((s) => s.name));
    setChildren(tableHost, scrolled([
      { title: columns.bin > 1 ? "from step" : "step", align: "right", cell: (i) => columns.steps[i] },
      ...shown.map((name) => ({ title: name, align: "right",
        cell: (i) => columns.nonfinite.get(name)?.get(columns.steps[i]) ??
          format.number(columns.metrics[name][i]) })),
    ], columns.steps.map((_, i) => i).reverse(), { caption: "learning, by step", testid: "learning-table" }));
  }

  return {
    show: draw,
    hide() {},
    update({ type }) {
      if (type === "theme") charts.forEach((chart) => chart.redraw());
      const frozen = type === "step" && store.range.mode === "fixed";
      if (["step", "history", "range"].includes(type) && !frozen) draw();
    },
  };
}
