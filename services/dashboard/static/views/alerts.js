/**
 * What needs somebody's attention, in plain words and worst first, with what to do about it.
 */
import { el, setChildren } from "../dom.js";
import { plural } from "../format.js";
import { lightMark } from "../palette.js";
import { go } from "../router.js";

export const id = "alerts";
export const title = "Alerts";

const SEVERITIES = [
  ["bad", "act", "needs action", "need action"],
  ["warn", "look", "worth a look", "worth a look"],
  ["info", "note", "note", "notes"],
];
const VIEW_TITLES = {
  breakdown: "Breakdown", timeline: "Timeline", learning: "Learning", trust: "Trust",
  samples: "Samples", fleet: "Fleet", what_if: "What if",
};
const WATCHED = [
  ["Time", "who waits for whom, seconds that no phase claims, steps slower than usual, compilation in mid-run"],
  ["Learning", "reward and accuracy that stand still or fall, entropy, KL, clipped tokens, skipped updates, truncated completions"],
  ["Trust", "every check of the Trust view: logprobs, importance weights, staleness, parsers, canary, receipts, ledger"],
  ["Processes", "restarts, workers that are missing or lag, a run that fell silent, memory"],
];

export function mount(root, store) {
  const summary = el("div", { class: "row alert-summary", role: "status", "data-testid": "alert-summary" });
  const list = el("ul", { class: "alert-rows", "aria-label": "alerts, worst first" });
  const body = el("div", { class: "scroll grow alert-body", tabindex: "0", role: "region", "aria-label": "alerts" }, list);
  setChildren(root, el("section", { class: "panel column grow" },
    el("div", { class: "panel-head row" }, el("h2", null, "Alerts"), summary), body));
  let drawn = null;

  function draw() {
    const judgement = store.judgement;
    const key = JSON.stringify([judgement?.alerts, store.ended, judgement ? 1 : 0]);
    if (key === drawn) return;
    drawn = key;
    const alerts = judgement?.alerts ?? [];
    setChildren(summary, alerts.length ? counts(alerts) : null);
    if (alerts.length) setChildren(list, alerts.map(row));
    else setChildren(list, quiet(judgement, store));
  }

  return {
    update: (event) => ["judgement", "run", "history"].includes(event.type) && draw(),
    show: draw,
    hide() {},
  };
}

function counts(alerts) {
  return SEVERITIES.map(([severity, , one, many]) => {
    const n = alerts.filter((alert) => alert.severity === severity).length;
    return n ? lightMark(severity, `${n} ${n === 1 ? one : many}`) : null;
  });
}

function row(alert) {
  const word = SEVERITIES.find(([severity]) => severity === alert.severity)?.[1];
  const view = VIEW_TITLES[alert.view];
  return el("li", { class: `alert-row ${alert.severity}`, "data-testid": "alert-row",
    data: { id: alert.id, severity: alert.severity } },
  lightMark(alert.severity, word),
  el("div", { class: "grow" },
    el("p", { class: "alert-text" }, alert.text),
    alert.advice && el("p", { class: "muted" }, alert.advice)),
  el("span", { class: "muted nowrap num" },
    Number.isFinite(alert.since_step) ? `since step ${alert.since_step}` : ""),
  el("span", { class: "alert-link" }, view && el("button", { type: "button", class: "button small",
    on: { click: () => go(alert.view) } }, `Open ${view}`)));
}

function quiet(judgement, store) {
  const said = !judgement ? "No step has been judged yet"
    : `Nothing to report at step ${judgement.step ?? store.run?.step ?? 0}`;
  const more = !judgement ? "The first judgement comes with the first closed step."
    : store.ended ? `The run has ended after ${plural(store.run.step ?? 0, "step", "steps")}.` : "";
  return el("li", { class: "alert-empty", "data-testid": "alerts-empty" },
    el("p", { class: "empty-title" }, said), more && el("p", { class: "muted" }, more),
    el("p", { class: "muted" }, "Watched at every step:"),
    el("dl", { class: "watched" }, WATCHED.map(([what, which]) =>
      [el("dt", null, what), el("dd", null, which)])));
}
