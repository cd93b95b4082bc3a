/**
 * Starts the page: theme, run, views, stream. `window.tandem` lets tests and the console read what
 * is shown.
 */
import { ApiError } from "./api.js";
import { linkPanel } from "./banner.js";
import { el, setChildren } from "./parts/dom.js";
import { setTheme } from "./charts/palette.js";
import { VIEWS } from "./router.js";
import { makeShell } from "./shell.js";
import { Store } from "./store.js";

const RETRY_MS = 2000;

const root = document.getElementById("app");
const store = new Store();
window.tandem = { store };

/** The views that have a folder of their own. */
const FOLDERS = { fleet: "fleet/", samples: "samples/" };
const view = ([id, title]) => (
  { id, title, load: () => import(`./views/${FOLDERS[id] ?? ""}${id}.js`) });

async function start() {
  try {
    await store.load();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) {
      setChildren(root, linkPanel(store.run?.folder));
      return;
    }
    setChildren(root, el("main", { class: "gate", role: "alert" },
      el("h1", null, error.status ? "The dashboard cannot show this run" : "No connection"),
      el("p", null, error.message), el("p", { class: "muted" }, "Trying again every few seconds.")));
    setTimeout(start, RETRY_MS);
    return;
  }
  if (store.run.compare) {
    const compare = await import("./views/compare.js");
    setChildren(root);
    compare.mount(root, store).show();
  } else {
    const shown = makeShell(root, store, VIEWS.map(view));
    store.follow(); // a view may wait for what comes now
    store.loadRest();
    await shown;
  }
  document.documentElement.dataset.ready = "true";
}

const kept = localStorage.getItem("tandem-theme");
if (kept === "light" || kept === "dark") setTheme(kept);
start();
