/**
 * The steps that the charts show: all, the newest, or a zoomed range. Shared by all views that draw
 * store.shown.
 *
 * makeRangeBar(store) -> {node, update()}: a toggle and a chip that names a zoomed range.
 * zoomTo(store, first, last)  sets it from a drag; (null, null) shows all.
 */
import { el, setText, toggle } from "../parts/dom.js";
import { plural, span } from "../parts/format.js";

export function zoomTo(store, first, last) {
  if (first === null) return store.setRange({ mode: "all" });
  const from = Math.floor(first);
  return store.setRange({ mode: "fixed", first: from, last: Math.max(from, Math.ceil(last) - 1) });
}

export function makeRangeBar(store) {
  const picks = toggle([["all", "All steps"], ["200", "Last 200"], ["50", "Last 50"]], "all",
    (key) => store.setRange(key === "all" ? { mode: "all" } : { mode: "last", n: Number(key) }), "steps shown");
  const chip = el("button", { type: "button", class: "button small", hidden: true,
    title: "Back to all steps (0)", on: { click: () => store.setRange({ mode: "all" }) } });
  const note = el("span", { class: "muted", "data-testid": "bin-note",
    title: "So many steps that each bar or point stands for several: zoom in for single ones" });

  function update() {
    const { mode, n, first, last } = store.range;
    picks.pick(mode === "all" ? "all" : mode === "last" ? String(n) : "");
    chip.hidden = mode !== "fixed";
    if (mode === "fixed") setText(chip, `${span(first, last)} ✕`);
    const { bin } = store.shown;
    setText(note, store.problem || (bin > 1 ? `mean of ${plural(bin, "step", "steps")} each` : ""));
  }
  return { node: el("div", { class: "row range-bar" }, picks, chip, note), update };
}
