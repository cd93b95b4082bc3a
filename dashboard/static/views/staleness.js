/**
 * Staleness of the groups that the last steps trained on, as a histogram: each bar is a share of the
 * groups, with a mark for the newest step.
 */
import { getJSON, keepJSON } from "../api.js";
import { el, setChildren, setText } from "../parts/dom.js";
import { count, percent, plural, span, value } from "../parts/format.js";

const STEPS = 100;
const NAME = /^offpolicy\/staleness_(\d+)$/;

export function stalenessCard(store) {
  const note = el("p", { class: "muted" });
  const bars = el("div", { class: "bars", role: "list", "aria-label": "groups by staleness" });
  const node = el(
    "section",
    { class: "panel column", "data-testid": "staleness" },
    el("h2", null, "Staleness of the groups trained on"),
    bars,
    note,
  );
  /** Step -> Map(versions behind -> groups); the newest STEPS steps. */
  let steps = new Map();
  let problem = "";

  async function load() {
    const names = await known(store);
    if (!names.length) return;
    try {
      const json = await getJSON("/api/history", queryOf(store, names));
      steps = new Map(
        json.steps.map((step, i) => [step, ofMetrics((name) => json.metrics[name]?.[i], names)]),
      );
      problem = "";
    } catch (error) {
      problem = error.message;
    }
  }

  function add(step) {
    if (!step || steps.has(step.step)) return;
    const names = Object.keys(step.metrics).filter((name) => NAME.test(name));
    steps.set(
      step.step,
      ofMetrics((name) => step.metrics[name], names),
    );
    while (steps.size > STEPS) steps.delete(steps.keys().next().value);
  }

  function draw() {
    const used = [...steps].filter(([, groups]) => groups.size);
    if (!used.length) {
      setChildren(bars);
      setText(note, problem || "No groups have been trained on yet.");
      return;
    }
    const total = new Map();
    for (const [, groups] of used) {
      for (const [n, x] of groups) total.set(n, (total.get(n) ?? 0) + x);
    }
    const [lastStep, newest] = used.at(-1);
    const most = Math.max(store.run?.settings?.max_staleness ?? 0, ...total.keys());
    const rows = Array.from({ length: most + 1 }, (_, n) => [n, total.get(n) ?? 0, newest.get(n) ?? 0]);
    setChildren(
      bars,
      rows.map((row) => bar(row, sum(total), sum(newest), store)),
    );
    setText(
      note,
      `${span(used[0][0], lastStep)}, ${plural(sum(total), "group", "groups")}; ` +
        `the mark is step ${lastStep}. ${allowed(store)}`,
    );
  }

  return {
    node,
    async show() {
      await load();
      draw();
    },
    update(type) {
      if (type === "reload") load().then(draw);
      else {
        add(store.lastStep);
        draw();
      }
    },
  };
}

export async function keepStaleness(store) {
  const names = await known(store);
  if (names.length) await keepJSON("/api/history", queryOf(store, names));
}

function queryOf({ columns: { last } }, names) {
  return { first: Math.max(0, last - STEPS + 1), last, points: STEPS, names: names.join(",") };
}

/** The metrics that may exist: up to the greatest staleness that the run saw or allows. */
async function known(store) {
  await store.ensure(["offpolicy/staleness_max"]).catch(() => {});
  const { metrics, high } = store.columns;
  const name = "offpolicy/staleness_max";
  const seen = [...(high[name] ?? []), ...(metrics[name] ?? [])].filter((x) => x !== null);
  if (!seen.length) return [];
  const most = seen.reduce((a, b) => Math.max(a, b), store.run?.settings?.max_staleness ?? 0);
  return Array.from({ length: Math.min(33, Math.ceil(most) + 1) }, (_, n) => `offpolicy/staleness_${n}`);
}

function ofMetrics(get, names) {
  const pairs = names.map((name) => [Number(NAME.exec(name)[1]), value(get(name))]);
  return new Map(pairs.filter(([, x]) => Number.isFinite(x) && x > 0));
}

function sum(groups) {
  return [...groups.values()].reduce((a, b) => a + b, 0);
}

function allowed(store) {
  const most = store.run?.settings?.max_staleness;
  return most === undefined ? "" : `rollout.max_staleness allows ${most}.`;
}

function bar([n, groups, newest], all, allNewest, store) {
  const share = all ? groups / all : 0;
  const beyond = n > (store.run?.settings?.max_staleness ?? Infinity);
  const says = n === 0 ? "current" : n === 1 ? "1 behind" : `${n} behind`;
  return el(
    "div",
    {
      class: `bar-row ${beyond ? "beyond" : ""}`,
      role: "listitem",
      "data-testid": "staleness-bar",
      data: { n, groups: String(groups) },
      title: `${count(groups)} groups; step: ${count(newest)}`,
    },
    el(
      "span",
      { class: "bar-name" },
      says,
      beyond && el("span", { class: "visually-hidden" }, " (more than allowed)"),
    ),
    el(
      "span",
      { class: "bar-track" },
      el("span", { class: "bar-part", style: { width: `${100 * share}%` } }),
      el("span", { class: "bar-mark", style: { left: `${allNewest ? (100 * newest) / allNewest : 0}%` } }),
    ),
    el("span", { class: "bar-value" }, percent(share)),
  );
}
