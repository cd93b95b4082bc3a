/**
 * The newest evaluation of each held-out set, as a table: accuracy with its interval, pass@k, and the
 * paired test against the evaluation before.
 *
 * setsOf(columns)        names of the sets that have metrics; empty where a run has a single set.
 * makeEvaluation(store)  {node, draw(columns)}; hidden before the first evaluation.
 */
import { el, setChildren } from "../parts/dom.js";
import * as format from "../parts/format.js";
import { table } from "../parts/table.js";

const OF_A_SET = /^eval\/([^/]+)\/completions$/;
const PASS = /^pass_at_(\d+)$/;

export function setsOf(columns) {
  return Object.keys(columns.metrics).map((name) => name.match(OF_A_SET)?.[1]).filter(Boolean);
}

export function makeEvaluation(store) {
  const host = el("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": "evaluation" });
  const node = el("section", { class: "panel", hidden: true, "data-testid": "evaluation" },
    el("h3", null, "Evaluation"), host);

  function draw(columns) {
    const sets = setsOf(columns);
    const rows = (sets.length ? sets : [""]).map((set) => rowOf(store, columns, set))
      .filter((row) => row.completions);
    node.hidden = !rows.length;
    setChildren(host, table([
      { title: "set", heads: true, cell: (row) => row.set || "held-out" },
      { title: "accuracy", align: "right", cell: (row) => fraction(row.of("accuracy/strict")),
        about: "share of completions that are right" },
      { title: "95 % interval", align: "right", cell: (row) => interval(row) },
      { title: "pass@k", align: "right", cell: (row) => row.passes || "–" },
      { title: "mean reward", align: "right", cell: (row) => format.number(row.of("reward/total/mean")) },
      { title: "completions", align: "right", cell: (row) => format.count(row.completions.value) },
      { title: "step", align: "right", cell: (row) => row.of("step") ?? row.completions.step,
        about: "after which the policy was evaluated" },
      { title: "against the one before", cell: (row) => change(row),
        about: "prompts with more and with fewer right completions, and p of the exact sign test" },
    ], rows, { caption: "newest evaluation of each held-out set" }));
  }

  return { node, draw };
}

function rowOf(store, columns, set) {
  const prefix = set ? `eval/${set}/` : "eval/";
  const of = (name) => store.latest(prefix + name)?.value ?? null;
  const passes = Object.keys(columns.metrics).filter((name) => name.startsWith(prefix))
    .map((name) => name.slice(prefix.length).match(PASS)?.[1]).filter((k) => k && k !== "1")
    .map(Number).sort((a, b) => a - b)
    .map((k) => `@${k} ${fraction(of(`pass_at_${k}`))}`).join(", ");
  return { set, of, passes, completions: store.latest(`${prefix}completions`) };
}

function fraction(x) {
  return x === null ? "–" : format.percent(x, 1);
}

function interval(row) {
  const low = row.of("accuracy/strict_low");
  return low === null ? "–" : `${fraction(low)} – ${fraction(row.of("accuracy/strict_high"))}`;
}

function change(row) {
  const p = row.of("paired/p_value");
  if (p === null) return "–";
  const [better, worse] = [row.of("paired/better"), row.of("paired/worse")].map((n) => format.count(n));
  return `${better} better, ${worse} worse, p = ${format.number(p)}`;
}
