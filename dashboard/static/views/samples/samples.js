/**
 * The completions of the model: search, page and read them; the address has the state of the view.
 */
import { getJSON, keepJSON, samplePath } from "../../api.js";
import { el, setChildren } from "../../parts/dom.js";
import { noteParams } from "../../router.js";
import { makeDetail } from "./sample_detail.js";
import { FIELDS, makeFilters } from "./sample_filters.js";
import { makeList } from "./sample_list.js";

const id = "samples";

const LIMIT = 50;
const PICK_PAUSE_MS = 70;
const REFRESH_MS = 2000;

const pageOf = (query, offset) => ({ ...query, offset, limit: LIMIT });

export async function keep() {
  const { items } = await keepJSON("/api/samples", pageOf({}, 0));
  if (items.length) await keepJSON(samplePath(items[0].id));
}

export function mount(root, store) {
  /** What is shown: `query` by FIELDS, and the rest of the address. */
  let shown = { query: {}, offset: 0, id: null, mode: "read", other: null };
  let total = 0;
  let asked = 0;
  let isShown = false;
  let fetchedAt = 0;
  let waiting = 0;
  let pickTimer = 0;

  const filters = makeFilters((query) => {
    change({ query, offset: 0 });
    load();
  });
  const list = makeList({
    onPick(name) {
      change({ id: name, mode: shown.mode, other: null });
      clearTimeout(pickTimer);
      pickTimer = setTimeout(showDetail, PICK_PAUSE_MS);
    },
    async onOpen() {
      clearTimeout(pickTimer);
      await showDetail();
      detail.focus();
    },
    onPage(offset) {
      change({ offset });
      load();
    },
  });
  const detail = makeDetail({ onMode: (mode, other) => change({ mode, other }), onBack: () => list.focus() });
  setChildren(
    root,
    el(
      "div",
      { class: "split samples" },
      el("div", { class: "samples-left" }, el("section", { class: "panel" }, filters.node), list.node),
      detail.node,
    ),
  );

  function change(part) {
    shown = { ...shown, ...part };
    const { query, offset, id: chosen, mode, other } = shown;
    noteParams(id, {
      ...query,
      offset: offset || null,
      id: chosen,
      mode: mode === "read" ? null : mode,
      other,
    });
  }

  function showDetail() {
    if (!shown.id) return detail.clear();
    return detail.show(shown.id, shown.mode, shown.other);
  }

  async function load() {
    const turn = (asked += 1);
    fetchedAt = Date.now();
    list.busy();
    try {
      const answer = await getJSON("/api/samples", pageOf(shown.query, shown.offset));
      if (turn !== asked) return;
      total = answer.total;
      list.fill(answer);
      if (!shown.id && answer.items.length) {
        shown.id = answer.items[0].id;
        list.pick(shown.id);
        await showDetail();
      }
    } catch (error) {
      if (turn === asked) list.fail(error.message, shown.offset);
    }
  }

  /** New completions: an unused list loads them itself, but rarely; else a button offers them. */
  function grown() {
    const unfiltered = !Object.keys(shown.query).length;
    if (shown.offset === 0 && list.isResting()) {
      clearTimeout(waiting);
      waiting = setTimeout(() => isShown && load(), Math.max(0, fetchedAt + REFRESH_MS - Date.now()));
    } else if (unfiltered && store.samplesTotal > total) {
      list.fresh(store.samplesTotal - total, () => {
        change({ offset: 0 });
        load();
      });
    }
  }

  return {
    update(event) {
      if (event.type === "samples") grown();
      else if (event.type === "reload") load();
    },
    async show(params) {
      isShown = true;
      if (params?.size) shown = stateOf(params);
      change({});
      filters.set(shown.query);
      list.pick(shown.id);
      await Promise.all([load(), showDetail()]);
    },
    hide() {
      isShown = false;
      clearTimeout(waiting);
    },
  };
}

function stateOf(params) {
  const query = Object.fromEntries(FIELDS.map((name) => [name, params.get(name)]).filter(([, text]) => text));
  return {
    query,
    offset: Math.max(0, Number.parseInt(params.get("offset"), 10) || 0),
    id: params.get("id"),
    mode: params.get("mode") === "same" ? "same" : "read",
    other: params.get("other"),
  };
}
