/**
 * The frame around the views: header, tabs, routes, keys, banner. A view is loaded when it is first
 * shown and works only while it is shown.
 *
 * makeShell(root, store, views): views: [{id, title, load() -> Promise<module>}] in tab order. The
 * module exports {mount(root, store) -> {update(event), show(params), hide()}, keep?(store)}; `params`
 * are the URLSearchParams after "?" of the route, and show() is called again when they change. A view
 * whose show() waits for data returns a promise: body[data-drawn] is "true" once it has drawn what
 * it has and every view is loaded. keep()
 * fetches what the view shows first, so that it can be opened after the run and its server have ended.
 */
import { makeBanner } from "./banner.js";
import { el, empty, setChildren } from "./parts/dom.js";
import { makeHeader } from "./header.js";
import { onTheme } from "./charts/palette.js";
import { sizesSeen } from "./charts/plot.js";
import { go, route } from "./router.js";

const KEYS = [
  ["1 – 8", "show a view"],
  ["← →", "with a tab in focus: the next view"],
  ["t", "light or dark"],
  ["?", "this list"],
  ["← →", "in a chart: move from step to step"],
  ["↑ ↓", "in the breakdown or timeline: another process"],
  ["+ −, wheel, drag", "zoom"],
  ["Shift ← →", "in a zoomed chart: scroll"],
  ["0 or Esc", "back to the whole range; close a panel"],
  ["Enter", "open the step under the cursor"],
];

export function makeShell(root, store, views) {
  const header = makeHeader({ onAlerts: () => go("alerts"), onHelp: () => help.showModal() });
  const banner = makeBanner();
  const help = helpDialog();
  const tabs = new Map(views.map((view, i) => [view.id, tabOf(view, i)]));
  const panels = new Map();
  const mounted = new Map();
  const strip = el("div", { class: "tabs", role: "tablist", "aria-label": "views",
    on: { keydown: moveByArrow } }, [...tabs.values()]);
  const stage = el("main", { class: "stage", id: "stage" });
  let current = null;

  setChildren(root, header.node, el("nav", { class: "strip" }, strip, header.sentence), banner.node,
    stage, help);

  function tabOf(view, i) {
    return el("button", { type: "button", role: "tab", class: "tab", id: `tab-${view.id}`,
      "aria-controls": `view-${view.id}`, "aria-selected": "false", tabindex: -1,
      title: `${view.title} (${i + 1})`, on: { click: () => go(view.id) } },
      view.title);
  }

  function moveByArrow(event) {
    const ids = [...tabs.keys()];
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = by ? (ids.indexOf(current) + by + ids.length) % ids.length
      : { Home: 0, End: ids.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    go(ids[next]);
    tabs.get(ids[next]).focus();
  }

  function panelOf(view) {
    if (!panels.has(view.id)) {
      const panel = el("section", { class: `view view-${view.id}`, id: `view-${view.id}`,
        role: "tabpanel", "aria-labelledby": `tab-${view.id}`, data: { view: view.id } });
      panels.set(view.id, panel);
      stage.append(panel);
    }
    return panels.get(view.id);
  }

  async function mount(view) {
    if (!mounted.has(view.id)) {
      const module = await view.load();
      if (!mounted.has(view.id)) mounted.set(view.id, module.mount(panelOf(view), store));
    }
    return mounted.get(view.id);
  }

  async function showRoute() {
    document.body.dataset.drawn = "false";
    const { id, params } = route();
    const view = views.find((v) => v.id === id) ?? views[0];
    if (current !== view.id) leave();
    current = view.id;
    for (const [key, tab] of tabs) {
      tab.setAttribute("aria-selected", String(key === view.id));
      tab.tabIndex = key === view.id ? 0 : -1;
    }
    const panel = panelOf(view);
    for (const other of panels.values()) other.hidden = other !== panel;
    let shown;
    try {
      shown = await mount(view);
    } catch (error) {
      setChildren(panel, empty("This view could not be loaded", String(error.message ?? error)));
      reportError(error);
      return;
    }
    if (current !== view.id) return;
    await shown.show?.(params);
    await Promise.all([sizesSeen(), ...views.map(loaded)]);
    if (current === view.id) document.body.dataset.drawn = "true";
  }

  function leave() {
    mounted.get(current)?.hide?.();
  }

  function update(event) {
    if (event.type === "ended") keepAll();
    header.update(store);
    banner.update(store);
    mounted.get(current)?.update?.(event);
  }

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const number = Number(event.key);
    if (number >= 1 && number <= views.length) go(views[number - 1].id);
    else if (event.key === "?") help.showModal();
    else if (event.key === "t") header.switchTheme();
    else return;
    event.preventDefault();
  });
  addEventListener("hashchange", showRoute);
  onTheme(() => store.emit("theme"));
  store.on(update);
  header.update(store);
  banner.update(store);
  return showRoute();

  /** The run may end, and its server with it: views that were not opened by then work all the same. */
  function loaded(view) {
    return view.load().catch(() => null); // the error is shown with the view
  }

  /** Fetches what they show, and then lets the server end. */
  async function keepAll() {
    await Promise.allSettled(views.map(async (view) => (await loaded(view))?.keep?.(store)));
    store.leave();
  }
}

function helpDialog() {
  const dialog = el("dialog", { class: "help", id: "help", "aria-labelledby": "help-title" },
    el("h2", { id: "help-title" }, "Keys"),
    el("dl", { class: "keys" }, KEYS.map(([key, what]) =>
      [el("dt", null, el("kbd", null, key)), el("dd", null, what)])),
    el("form", { method: "dialog" }, el("button", { class: "button" }, "Close")));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  return dialog;
}
