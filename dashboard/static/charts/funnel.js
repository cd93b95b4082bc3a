/**
 * The generated tokens of the newest trained step by stage, as bars.
 *
 * makeFunnel(store) -> {node, draw()}
 */
import { el, setChildren } from "../parts/dom.js";
import * as format from "../parts/format.js";

const STAGES = [
  ["generated", "generated", ""],
  ["scored", "scored", "stale, in error, or truncated"],
  ["nonzero_advantage", "non-zero advantage", "in groups of equal rewards"],
  ["unclipped", "unclipped", "outside the trust region"],
  ["contributed", "contributed", "removed by off-policy correction"],
];

export function makeFunnel(store) {
  const body = el("div", { class: "funnel", role: "table", "aria-label": "token funnel" });
  const heading = el("h3", null, "Token funnel");
  const node = el("figure", { class: "chart wide", "data-testid": "funnel" },
    el("figcaption", null, heading), body);
  let said = "";

  function draw() {
    const newest = STAGES.map(([name]) => store.latest(`funnel/${name}`));
    const generated = newest[0]?.value;
    const key = JSON.stringify(newest);
    if (key === said) return;
    said = key;
    if (!(generated > 0)) {
      heading.textContent = "Token funnel";
      setChildren(body, el("p", { class: "muted" }, "No step has trained yet."));
      return;
    }
    heading.textContent = `Token funnel of step ${newest[0].step}`;
    setChildren(body, STAGES.map(([name, title, lost], i) => {
      const tokens = newest[i]?.value ?? null;
      const before = newest[i - 1]?.value ?? tokens;
      const share = tokens / generated;
      const gone = before > 0 && tokens !== null ? (before - tokens) / before : 0;
      return el("div", { class: "funnel-row", role: "row", data: { stage: name } },
        el("span", { role: "rowheader" }, title),
        el("span", { class: "funnel-track", role: "presentation" },
          el("span", { class: "funnel-bar", style: { width: `${100 * Math.min(1, share)}%` } })),
        el("span", { class: "num", role: "cell" }, format.count(tokens)),
        el("span", { class: "num", role: "cell" }, format.percent(share)),
        el("span", { class: "muted", role: "cell" }, gone > 0.0005 ? `−${format.percent(gone)} ${lost}` : ""));
    }));
  }
  return { node, draw };
}
