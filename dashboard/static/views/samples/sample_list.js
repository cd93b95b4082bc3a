/**
 * A page of completions, newest first.
 *
 * makeList({onPick(id), onOpen(id), onPage(offset)})   {node, fill(answer), pick(id), busy(),
 *     fail(message, offset), fresh(n, onShow), focus(), isResting()}: answer is that of /api/samples.
 *     Up and down pick the neighbour, across pages; Enter opens. After a page that failed, the
 *     previous one can be loaded.
 */
import { el, setChildren, setText } from "../../parts/dom.js";
import { count, number, plural } from "../../parts/format.js";
import { lightMark } from "../../charts/palette.js";
import { headOf } from "../../parts/table.js";
import { oneLine } from "./sample_text.js";

const COLUMNS = [
  { title: "step", align: "right" },
  { title: "kind", hidden: true },
  { title: "prompt", align: "right" },
  { title: "reward", align: "right" },
  { title: "finish" },
  { title: "tokens", align: "right" },
  { title: "completion" },
];

export function makeList({ onPick, onOpen, onPage }) {
  const body = el("tbody");
  const wrap = el(
    "div",
    { class: "table-wrap grow", "data-testid": "sample-list" },
    el(
      "table",
      { class: "sample-table", role: "grid" },
      el("caption", { class: "visually-hidden" }, "Completions, newest first"),
      headOf(COLUMNS),
      body,
    ),
  );
  const where = el("span", { class: "muted", role: "status", id: "sample-total" });
  const more = el("button", { type: "button", class: "button small", id: "sample-fresh", hidden: true });
  const back = el("button", { type: "button", class: "button small", id: "sample-newer" }, "‹ newer");
  const next = el("button", { type: "button", class: "button small", id: "sample-older" }, "older ›");
  const node = el(
    "section",
    { class: "panel column grow sample-list", "aria-label": "completions" },
    wrap,
    el("div", { class: "row pager" }, where, more, el("span", { class: "grow" }), back, next),
  );
  let page = { total: 0, offset: 0, limit: 50, items: [] };
  let picked = null;
  /** "first" or "last" while a page is fetched for the cursor keys. */
  let land = null;
  /** Whether the next page scrolls to the picked row; an automatic update does not. */
  let fresh = false;

  const rowOf = (name) => body.querySelector(`tr[data-id="${CSS.escape(name ?? "")}"]`);

  function pick(name, focus, scroll = true) {
    picked = name;
    for (const tr of body.children) {
      const is = tr.dataset.id === name;
      tr.setAttribute("aria-selected", String(is));
      tr.tabIndex = is ? 0 : -1;
    }
    if (!rowOf(name) && body.firstChild?.dataset.id) body.firstChild.tabIndex = 0;
    if (focus) rowOf(name)?.focus();
    if (scroll) rowOf(name)?.scrollIntoView({ block: "nearest" });
  }

  function choose(name, focus) {
    pick(name, focus);
    onPick(name);
  }

  function turn(offset, landOn) {
    if (offset < 0 || offset >= page.total) return;
    land = landOn;
    onPage(offset);
  }

  function move(by) {
    const at = page.items.findIndex((item) => item.id === picked);
    const to = page.items[at + by];
    if (at < 0 && page.items.length) choose(page.items[0].id, true);
    else if (to) choose(to.id, true);
    else if (by > 0) turn(page.offset + page.limit, "first");
    else if (page.offset > 0) turn(Math.max(0, page.offset - page.limit), "last");
  }

  body.addEventListener("click", (event) => {
    const name = event.target.closest("tr")?.dataset.id;
    if (name) choose(name, true);
  });
  body.addEventListener("keydown", (event) => {
    const act = {
      ArrowDown: () => move(1),
      ArrowUp: () => move(-1),
      Enter: () => onOpen(picked),
      PageDown: () => turn(page.offset + page.limit, "first"),
      PageUp: () => page.offset > 0 && turn(Math.max(0, page.offset - page.limit), "first"),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    if (event.key === "Enter") choose(event.target.closest("tr").dataset.id, true);
    act();
  });
  back.addEventListener("click", () => turn(Math.max(0, page.offset - page.limit), null));
  next.addEventListener("click", () => turn(page.offset + page.limit, null));

  return {
    node,
    pick(name) {
      fresh = true;
      pick(name, false);
    },
    focus: () => (rowOf(picked) ?? body.firstChild)?.focus(),
    /** Whether the viewer does not use the list, so that it may update itself. */
    isResting: () => wrap.scrollTop < 4 && !body.contains(document.activeElement),
    fill(answer) {
      const landing = land;
      land = null;
      page = answer;
      more.hidden = true;
      wrap.classList.remove("stale");
      setChildren(
        body,
        answer.items.length
          ? answer.items.map(row)
          : el(
              "tr",
              null,
              el(
                "td",
                { colspan: COLUMNS.length, class: "muted" },
                "No completion fits. Clear a filter or widen a range.",
              ),
            ),
      );
      const last = answer.offset + answer.items.length;
      setText(
        where,
        answer.total ? `${count(answer.offset + 1)}–${count(last)} of ${count(answer.total)}` : "none",
      );
      back.disabled = answer.offset === 0;
      next.disabled = last >= answer.total;
      if (landing) {
        wrap.scrollTop = 0;
        choose(answer.items.at(landing === "first" ? 0 : -1)?.id, true);
      } else pick(picked, false, fresh);
      fresh = false;
    },
    fail(message, offset) {
      page = { ...page, offset, items: [] };
      wrap.classList.remove("stale");
      setChildren(
        body,
        el("tr", null, el("td", { colspan: COLUMNS.length, class: "refusal", role: "alert" }, message)),
      );
      setText(where, "");
      back.disabled = offset === 0;
      next.disabled = true;
    },
    busy: () => wrap.classList.add("stale"),
    fresh(n, onShow) {
      more.hidden = n <= 0;
      setText(more, `${plural(n, "new one", "new ones")}: show`);
      more.onclick = onShow;
    },
  };
}

function row(item) {
  const mark = item.reward_error
    ? lightMark("bad", "error")
    : disagrees(item)
      ? lightMark("warn", "parsers differ")
      : null;
  const text = oneLine(item.completion ?? "");
  return el(
    "tr",
    { class: "opens", tabindex: "-1", "data-testid": "sample-row", data: { id: item.id } },
    el("td", { class: "num" }, item.step),
    el("td", null, el("span", { class: `kind ${item.kind}` }, item.kind)),
    el("td", { class: "num" }, item.prompt_id ?? "–"),
    el("td", { class: "num" }, item.reward_error ? "–" : number(item.total_reward)),
    el("td", { class: item.finish_reason === "stop" ? "muted" : "warn-text" }, item.finish_reason ?? "–"),
    el("td", { class: "num muted" }, count(item.completion_tokens)),
    el("td", { class: "snippet" }, mark, el("bdi", null, text || "(empty)")),
  );
}

export function disagrees({ parsed }) {
  return Boolean(parsed) && (parsed.strict ?? null) !== (parsed.lenient ?? null);
}
