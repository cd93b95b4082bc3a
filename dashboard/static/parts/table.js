/**
 * Tables: the head of a column looks and reads the same in all of them.
 *
 * A column is {title, cell(row) -> string|node, align?: "right", about?: what its numbers are (on
 * hover), hidden?: true where the title is for screen readers only, heads?: true where its cells
 * name their rows, class?: of its head and cells}.
 *
 * headOf(columns)                the <thead>, for views that change their rows in place.
 * table(columns, rows, opts)     a <table>; opts: {caption, captionClass, class, onRow(row), empty,
 *                                rowOf(row) -> attributes}. A row with onRow is reachable and opens
 *                                by Enter; a caption is for screen readers unless it has a class.
 * scrolled(columns, rows, opts)  the same in a region that scrolls under a head that stays; opts
 *                                also: testid.
 */
import { el } from "./dom.js";

const classOf = (column) => [column.align === "right" && "num", column.class].filter(Boolean).join(" ") || null;

export function headOf(columns) {
  return el("thead", null, el("tr", null, columns.map((column) =>
    el("th", { scope: "col", class: classOf(column), title: column.about },
      column.hidden ? el("span", { class: "visually-hidden" }, column.title) : column.title))));
}

export function table(columns, rows, opts = {}) {
  const { caption, captionClass = "visually-hidden", onRow, rowOf, empty: none } = opts;
  const body = rows.map((row) => {
    const open = onRow && (() => onRow(row));
    const cells = columns.map((column) => el(column.heads ? "th" : "td",
      { scope: column.heads ? "row" : null, class: classOf(column) }, column.cell(row)));
    return el("tr", {
      class: onRow ? "opens" : null,
      tabindex: onRow ? 0 : null,
      on: open ? { click: open, keydown: (e) => e.key === "Enter" && open() } : {},
      ...rowOf?.(row),
    }, cells);
  });
  if (!rows.length && none) {
    body.push(el("tr", null, el("td", { colspan: columns.length, class: "muted" }, none)));
  }
  return el("table", { class: opts.class }, caption && el("caption", { class: captionClass }, caption),
    headOf(columns), el("tbody", null, body));
}

export function scrolled(columns, rows, { testid, ...opts } = {}) {
  return el("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": opts.caption,
    "data-testid": testid }, table(columns, rows, opts));
}
