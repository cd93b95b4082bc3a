/**
 * Whether the numbers can be trusted: each check with value, bound and status; the history of the
 * selected check; and the staleness of the groups trained on.
 */
import { el, setChildren, setText } from "../parts/dom.js";
import { count, decimals, isFiniteNumber, percent, value, withUnit } from "../parts/format.js";
import { lightMark, WORDS } from "../charts/palette.js";
import { go } from "../router.js";
import { headOf } from "../parts/table.js";
import { judged } from "./judged.js";
import { COMPLETIONS_OF } from "./samples/sample_filters.js";
import { lineChart, plain, sparkline } from "./spark.js";
import { keepStaleness, stalenessCard } from "./staleness.js";

const FRACTIONS = new Set(["weights_truncated", "zero_variance", "reward_errors", "disagreement", "ledger"]);
const COLUMNS = [
  { title: "light" },
  { title: "check" },
  { title: "value", align: "right" },
  { title: "bound", align: "right" },
  { title: "history" },
];
const UPRIGHT = { ArrowDown: 1, ArrowUp: -1 };

export async function keep(store) {
  await store.ensure(seriesOf(store.judgement?.trust ?? []));
  await keepStaleness(store);
}

export function mount(root, store) {
  const summary = el("div", { class: "row trust-summary", role: "status", "data-testid": "trust-summary" });
  const rows = el("tbody");
  const table = el(
    "div",
    { class: "table-wrap grow", role: "region", "aria-label": "checks", tabindex: "-1" },
    el(
      "table",
      { class: "trust-table", role: "grid" },
      el("caption", { class: "visually-hidden" }, "Checks of the run with value, bound and light"),
      headOf(COLUMNS),
      rows,
    ),
  );
  const detail = detailCard(store);
  const staleness = stalenessCard(store);
  setChildren(
    root,
    el(
      "div",
      { class: "split" },
      el(
        "section",
        { class: "panel column grow" },
        el("div", { class: "panel-head row" }, el("h2", null, "Can the numbers be believed?"), summary),
        table,
      ),
      el("div", { class: "trust-side" }, detail.node, staleness.node),
    ),
  );
  /** Rows by check, changed in place: one that is being clicked stays where it is. */
  let made = new Map();
  let chosen = null;
  let asked = "";

  function draw() {
    const checks = store.judgement?.trust ?? [];
    if (!checks.length) {
      made.clear();
      setChildren(summary);
      setChildren(
        rows,
        el(
          "tr",
          null,
          el(
            "td",
            { colspan: COLUMNS.length, class: "muted" },
            store.judgement
              ? "The checks start with the first trained step."
              : "Waiting for the checks …",
          ),
        ),
      );
      detail.show(null);
      return;
    }
    load(checks);
    if (!checks.some((check) => check.id === chosen)) chosen = worst(checks).id;
    setChildren(summary, lights(checks));
    const ids = checks.map((check) => check.id);
    if (ids.join() !== [...made.keys()].join()) {
      made = new Map(ids.map((name) => [name, makeRow(name)]));
      setChildren(
        rows,
        [...made.values()].map((row) => row.node),
      );
      choose(chosen, false);
    }
    for (const check of checks) made.get(check.id).fill(check, store);
    detail.show(checks.find((check) => check.id === chosen));
  }

  /** Asks once for the history of series that the page does not load by itself. */
  function load(checks) {
    const names = seriesOf(checks);
    if (names.join() === asked) return;
    asked = names.join();
    store.ensure(names).catch((error) => setText(detail.note, `The history cannot be loaded: ${error.message}`));
  }

  function choose(name, focus) {
    chosen = name;
    for (const tr of rows.children) {
      tr.setAttribute("aria-selected", String(tr.dataset.id === name));
      tr.tabIndex = tr.dataset.id === name ? 0 : -1;
      if (focus && tr.dataset.id === name) tr.focus();
    }
    detail.show(store.judgement.trust.find((check) => check.id === name));
  }

  rows.addEventListener("click", (event) => {
    const tr = event.target.closest("tr[data-id]");
    if (tr && !event.target.closest("button")) choose(tr.dataset.id, true);
  });
  rows.addEventListener("keydown", (event) => {
    const next =
      UPRIGHT[event.key] === 1
        ? event.target.closest("tr")?.nextSibling
        : UPRIGHT[event.key] === -1
          ? event.target.closest("tr")?.previousSibling
          : null;
    if (!next?.dataset?.id) return;
    event.preventDefault();
    choose(next.dataset.id, true);
  });

  return {
    update(event) {
      if (["judgement", "history", "theme"].includes(event.type)) draw();
      if (["step", "reload"].includes(event.type)) staleness.update(event.type);
    },
    async show() {
      draw();
      await Promise.all([judged(store), staleness.show()]);
      draw();
    },
    hide: () => detail.hide(),
  };
}

function seriesOf(checks) {
  return [...new Set(checks.flatMap((check) => check.series))];
}

function lights(checks) {
  return ["bad", "warn", "ok", "none"].map((light) => {
    const n = checks.filter((check) => check.light === light).length;
    return n ? lightMark(light, `${n} ${WORDS[light]}`) : null;
  });
}

function worst(checks) {
  return (
    ["bad", "warn"].map((light) => checks.find((check) => check.light === light)).find(Boolean) ?? checks[0]
  );
}

function makeRow(name) {
  const light = el("td");
  const heading = el("div", { class: "check-title" });
  const text = el("span");
  const link =
    COMPLETIONS_OF[name] &&
    el(
      "button",
      {
        type: "button",
        class: "link",
        "data-testid": `samples-of-${name}`,
        on: { click: () => go("samples", COMPLETIONS_OF[name]) },
      },
      "Read them",
    );
  const now = el("span", { class: "check-value" });
  const bound = el("td", { class: "num muted" });
  const spark = el("td", { class: "check-spark" });
  const node = el(
    "tr",
    { class: "opens", "data-testid": "trust-row", data: { id: name } },
    light,
    el("td", null, heading, el("div", { class: "check-text muted" }, text, link && [" ", link])),
    el("td", { class: "num" }, now),
    bound,
    spark,
  );
  return {
    node,
    fill(check, store) {
      if (node.dataset.light !== check.light) setChildren(light, lightMark(check.light));
      node.dataset.light = check.light;
      setText(heading, check.title);
      setText(text, check.text);
      setText(now, shown(check, check.value));
      setText(bound, boundText(check));
      setChildren(spark, sparkline(...history(check, store)));
    },
  };
}

/** The value of a check, which may be text. */
function shown(check, x) {
  if (x === null || x === undefined) return "–";
  if (typeof x === "string" && !/^(NaN|-?Infinity)$/.test(x)) return x;
  if (FRACTIONS.has(check.id)) return percent(x, x === 0 ? 0 : 1);
  if (["groups", "steps", "metrics", "versions"].includes(check.unit)) return count(x);
  return withUnit(x, check.unit);
}

/** A bound is exact, unlike a measured value: 0.02 and not 0.0200. */
function boundText(check) {
  const x = check.bound;
  if (FRACTIONS.has(check.id) && x !== null) return percent(x, Number.isInteger(100 * x) ? 0 : 1);
  if (typeof x !== "number") return shown(check, x);
  const unit = ["groups", "steps", "metrics", "versions"].includes(check.unit) ? "" : check.unit;
  return `${Number(x.toPrecision(6))} ${unit ?? ""}`.trim();
}

/** The bound as a number to draw beside a metric, or null if it is of another kind. */
function drawnBound(check, name, store) {
  const others = ["s", "bytes"].filter((unit) => unit !== check.unit);
  const bound = value(check.bound);
  return isFiniteNumber(bound) && !others.includes(store.metricUnit(name)) ? bound : null;
}

function history(check, store) {
  const { metrics, steps, nonfinite } = store.columns;
  const name = check.series.find((one) => one in metrics);
  if (!name) return [[]];
  const bound = drawnBound(check, name, store);
  return [
    steps.map((step, i) => [step, metrics[name][i] ?? null]),
    { bound, odd: [...(nonfinite.get(name)?.keys() ?? [])] },
  ];
}

function detailCard(store) {
  const head = el("h2", { id: "trust-detail-title" });
  const note = el("p", { class: "muted" });
  const host = el("div", { class: "mini-host" });
  let chosen = null;
  const format = (x, step) =>
    FRACTIONS.has(chosen.id) && store.metricUnit(chosen.series[0]) !== "s" ? percent(x, step && decimals(100 * step)) : plain(x, step);
  const chart = lineChart(host, { label: "history of the selected check", format });
  const node = el(
    "section",
    { class: "panel column trust-detail", "aria-labelledby": "trust-detail-title" },
    head,
    note,
    host,
  );
  return {
    node,
    note,
    show(check) {
      chosen = check;
      node.hidden = !check;
      if (!check) return;
      const { metrics, steps, nonfinite } = store.columns;
      const names = check.series.filter((name) => name in metrics).slice(0, 5);
      setText(head, check.title);
      setText(note, names.map((name) => store.metric(name)?.description).find(Boolean) ?? check.text);
      const odd = names.flatMap((name) => [...(nonfinite.get(name)?.keys() ?? [])]);
      chart.draw({
        x: names.length ? steps : [],
        lines: names.map((name) => ({
          name: store.metric(name)?.name ? store.metricTitle(name) : name,
          y: metrics[name],
        })),
        bound: names.length ? drawnBound(check, names[0], store) : null,
        odd: odd.filter((step) => step >= steps[0]),
      });
    },
    hide: () => chart.hide(),
  };
}
