/**
 * The top of the page: run, state, progress, key numbers and the bottleneck.
 *
 * makeHeader({onAlerts, onHelp}) -> {node, sentence, update(store)}; `sentence` is the bottleneck
 * line, which the shell puts beside the tabs.
 * makeThemeSwitch() -> {node, change(), show()}; show() when the theme has changed.
 */
import { el, runText, setText } from "./parts/dom.js";
import * as format from "./parts/format.js";
import { lightMark, setTheme, theme } from "./charts/palette.js";

const STATES = {
  running: ["ok", "running"],
  finished: ["ok", "finished"],
  failed: ["bad", "failed"],
  interrupted: ["warn", "interrupted"],
  lost: ["bad", "lost"],
  unknown: ["none", "unknown"],
};

export function makeHeader({ onAlerts, onHelp }) {
  const fact = (id, label, title) => {
    const node = el("span", { class: "fact-value", id }, "–");
    const name = el("span", { class: "fact-label" }, label);
    return { node, name, box: el("div", { class: "fact", title }, name, node) };
  };
  const name = runText("", { class: "run-name run-text", id: "header-run" });
  const state = el("span", { class: "badge", id: "header-state" });
  const step = el("span", { id: "header-step", class: "fact-value" }, "–");
  const bar = el("div", { class: "bar-fill" });
  const left = el("span", { id: "header-remaining", class: "muted" });
  const progress = el("div", { class: "bar", id: "header-progress", role: "progressbar",
    "aria-label": "steps done", "aria-valuemin": 0, "aria-valuemax": 100 }, bar);
  const stepTime = fact("header-step-time", "step time", "Mean of the last ten trained steps, without steps that compiled");
  const reward = fact("header-reward", "reward", "reward/total/mean of the newest step with a reward");
  const accuracy = fact("header-accuracy", "accuracy", accuracyTitle());
  const alerts = el("button", { type: "button", class: "button quiet", id: "header-alerts",
    on: { click: onAlerts } });
  const themes = makeThemeSwitch();
  const help = el("button", { type: "button", class: "button quiet", id: "help-button",
    "aria-label": "keyboard shortcuts", title: "Keys (?)", on: { click: onHelp } }, "?");
  const sentence = el("p", { class: "sentence", id: "header-bottleneck" });

  const node = el("header", { class: "top" },
    el("div", { class: "brand" }, el("span", { class: "brand-mark", "aria-hidden": "true" }),
      el("span", { class: "visually-hidden" }, "Tandem")),
    name, state,
    el("div", { class: "progress" },
      el("div", { class: "progress-line" }, el("span", { class: "fact-label" }, "step"), step, left),
      progress),
    stepTime.box, reward.box, accuracy.box,
    el("div", { class: "grow" }), alerts, themes.node, help);

  let seen = "";
  function update(store) {
    const { run, judgement } = store;
    setText(name, run.run);
    name.title = `${run.run_id} on ${run.host ?? "?"}, ${run.folder ?? ""}`;
    const [level, word] = STATES[store.state] ?? STATES.unknown;
    if (seen !== word) state.replaceChildren(lightMark(level, word));
    seen = word;
    showProgress(run, judgement?.progress, store.ended);
    setText(stepTime.node, format.seconds(judgement?.progress?.step_s ?? recentSeconds(store.columns)));
    setText(reward.node, format.number(store.latest("reward/total/mean")?.value ?? null));
    const strict = store.latest("eval/accuracy/strict");
    setText(accuracy.name, strict ? `accuracy, ${format.span(strict.step, strict.until)}` : "accuracy");
    setText(accuracy.node, accuracyText(store, strict));
    accuracy.box.title = accuracyTitle(store.latest("eval/correct_from")?.value);
    showAlerts(judgement?.alerts ?? []);
    setText(sentence, format.sentence(judgement?.bottleneck?.text ?? ""));
    sentence.title = sentence.textContent;
    themes.show();
    const of = run.steps_total ? `/${run.steps_total}` : "";
    document.title = `${run.step ?? 0}${of} ${run.run} · Tandem`;
  }

  function showProgress(run, known, ended) {
    const total = known?.total ?? run.steps_total ?? 0;
    const done = run.step ?? 0;
    setText(step, total ? `${format.count(done)} / ${format.count(total)}` : format.count(done));
    const share = total ? Math.min(1, done / total) : 0;
    bar.style.transform = `scaleX(${share})`;
    progress.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    setText(left, ended ? "" : format.remaining(known?.remaining_s ?? null));
  }

  function showAlerts(list) {
    const bad = list.filter((a) => a.severity === "bad").length;
    const warn = list.filter((a) => a.severity === "warn").length;
    const text = list.length ? format.plural(list.length, "alert", "alerts") : "no alerts";
    const level = bad ? "bad" : warn ? "warn" : list.length ? "info" : "ok";
    if (alerts.dataset.shown === level + text) return;
    alerts.dataset.shown = level + text;
    alerts.replaceChildren(lightMark(level, text));
  }

  return { node, sentence, update, switchTheme: themes.change };
}

export function makeThemeSwitch() {
  const node = el("button", { type: "button", class: "button quiet", id: "theme-switch",
    on: { click: change } });
  const other = () => (theme() === "dark" ? "light" : "dark");

  function change() {
    setTheme(other());
    localStorage.setItem("tandem-theme", theme());
  }

  function show() {
    setText(node, other() === "dark" ? "☾" : "☀");
    node.setAttribute("aria-label", `switch to the ${other()} theme`);
    node.title = `Switch to the ${other()} theme (t)`;
  }
  return { node, change, show };
}

/** Until the judgement arrives: the mean of the last ten steps, or of the last bin. */
function recentSeconds({ wall, bin }) {
  const last = wall.slice(bin === 1 ? -10 : -1).filter((x) => x !== null);
  return last.length ? last.reduce((a, b) => a + b, 0) / last.length : null;
}

function accuracyTitle(from) {
  const right = format.isFiniteNumber(from) ? `; right is a reward of at least ${format.number(from)}` : "";
  return `eval/accuracy/strict with its 95 % interval${right}`;
}

function accuracyText(store, strict) {
  if (!strict) return "–";
  const low = store.latest("eval/accuracy/strict_low")?.value;
  const high = store.latest("eval/accuracy/strict_high")?.value;
  const known = format.isFiniteNumber(low) && format.isFiniteNumber(high);
  const spread = known ? ` ± ${format.number((high - low) / 2, 2)}` : "";
  return `${format.number(strict.value)}${spread}`;
}
