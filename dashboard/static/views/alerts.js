/**
 * The alerts of the run, the most severe first, each with advice.
 */
import { el, setChildren, setText } from "../parts/dom.js";
import { plural } from "../parts/format.js";
import { lightMark } from "../charts/palette.js";
import { go, VIEWS } from "../router.js";
import { judged } from "./judged.js";
import { COMPLETIONS_OF } from "./samples/sample_filters.js";

const SEVERITIES = [
  ["bad", "act", "needs action", "need action"],
  ["warn", "look", "worth a look", "worth a look"],
  ["info", "note", "note", "notes"],
];
const TITLES = new Map(VIEWS);
const WATCHED = [
  [
    "Time",
    "processes that wait for each other, unexplained seconds, repeated compilation, slower steps or decoding, weight transfer, checkpoints and evaluations",
  ],
  [
    "Learning",
    "falling reward, low entropy, gradient norm, clipped tokens, skipped updates, numbers that are not finite, groups without a learning signal, truncated or aborted completions",
  ],
  [
    "Trust",
    "logprob gap, canary, staleness, receipts, reward errors, parser disagreement, phases that do not add up to the step",
  ],
  ["Processes", "no new step, restarts, a worker slower than the others, growing memory"],
];

export function mount(root, store) {
  const summary = el("div", { class: "row alert-summary", role: "status", "data-testid": "alert-summary" });
  const about = watched();
  const list = el("ul", { class: "alert-rows", "aria-label": "alerts, worst first" });
  const body = el(
    "div",
    { class: "scroll grow alert-body", tabindex: "0", role: "region", "aria-label": "alerts" },
    list,
    about,
  );
  setChildren(
    root,
    el(
      "section",
      { class: "panel column grow" },
      el("div", { class: "panel-head row" }, el("h2", null, "Alerts"), summary),
      body,
    ),
  );
  /** Rows by alert, updated in place, so that a button does not move while it is clicked. */
  let made = new Map();

  function draw() {
    const judgement = store.judgement;
    const alerts = judgement?.alerts ?? [];
    setChildren(summary, alerts.length ? counts(alerts) : null);
    if (!alerts.length) {
      made.clear();
      setChildren(list, quiet(judgement, store));
      return;
    }
    const keys = alerts.map((alert) => `${alert.severity} ${alert.id} ${alert.view}`);
    if (keys.join() !== [...made.keys()].join()) {
      made = new Map(keys.map((key, i) => [key, made.get(key) ?? makeRow(alerts[i])]));
      setChildren(
        list,
        [...made.values()].map((row) => row.node),
      );
    }
    alerts.forEach((alert, i) => made.get(keys[i]).fill(alert));
  }

  return {
    update: (event) => ["judgement", "run", "history"].includes(event.type) && draw(),
    async show() {
      draw();
      await judged(store);
      draw();
    },
    hide() {},
  };
}

function counts(alerts) {
  return SEVERITIES.map(([severity, , one, many]) => {
    const n = alerts.filter((alert) => alert.severity === severity).length;
    return n ? lightMark(severity, `${n} ${n === 1 ? one : many}`) : null;
  });
}

function makeRow({ id: name, severity, view }) {
  const word = SEVERITIES.find(([one]) => one === severity)?.[1];
  const text = el("p", { class: "alert-text" });
  const advice = el("p", { class: "muted" });
  const since = el("span", { class: "muted nowrap num" });
  const open =
    TITLES.has(view) &&
    el(
      "button",
      {
        type: "button",
        class: "button small",
        on: { click: () => go(view, view === "samples" ? COMPLETIONS_OF[name] : null) },
      },
      `Open ${TITLES.get(view)}`,
    );
  const node = el(
    "li",
    { class: `alert-row ${severity}`, "data-testid": "alert-row", data: { id: name, severity } },
    lightMark(severity, word),
    el("div", { class: "grow" }, text, advice),
    since,
    el("span", { class: "alert-link" }, open),
  );
  return {
    node,
    fill(alert) {
      setText(text, alert.text);
      setText(advice, alert.advice ?? "");
      setText(since, Number.isFinite(alert.since_step) ? `since step ${alert.since_step}` : "");
    },
  };
}

function quiet(judgement, store) {
  if (!judgement)
    return el("li", { class: "alert-empty muted" }, "Waiting for the first judgement …");
  const ended = store.ended && `The run has ended after ${plural(store.run.step ?? 0, "step", "steps")}.`;
  return el(
    "li",
    { class: "alert-empty", "data-testid": "alerts-empty" },
    el("p", { class: "empty-title" }, `Nothing to report at step ${judgement.step ?? store.run?.step ?? 0}`),
    ended && el("p", { class: "muted" }, ended),
  );
}

function watched() {
  return el(
    "section",
    { class: "alert-watched", "data-testid": "alerts-watched" },
    el("h3", null, "Checked at every step"),
    el(
      "dl",
      { class: "watched" },
      WATCHED.map(([what, which]) => [el("dt", null, what), el("dd", null, which)]),
    ),
  );
}
