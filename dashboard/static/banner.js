/**
 * The message shown while the page is not live: the run has ended, its driver is gone, the connection
 * is lost, or the link is no longer valid.
 *
 * makeBanner() -> {node, update(store)}
 * linkPanel(folder) -> a panel that explains how to get a new link, with a field for a token.
 */
import { el, setChildren } from "./parts/dom.js";
import * as format from "./parts/format.js";
import { lightMark } from "./charts/palette.js";

const PATIENCE_MS = 1500; // a connection that returns sooner shows no message

export function makeBanner() {
  const node = el("div", { class: "banner", id: "banner", role: "status", hidden: true });
  let shown = "";
  let timer = 0;

  function update(store) {
    clearTimeout(timer);
    const said = lostConnection(store) ?? endOfRun(store);
    if (said && store.ended && said.kind !== "refused") said.text += withoutServer(store);
    const { state } = store.connection;
    if (state !== "live" && state !== "refused") timer = setTimeout(() => update(store), 1000);
    node.hidden = !said;
    if (!said) {
      shown = "";
      return;
    }
    if (shown === said.text) return;
    shown = said.text;
    node.className = `banner ${said.level}`;
    node.dataset.banner = said.kind;
    setChildren(node, lightMark(said.level, ""), el("span", { class: "banner-text" }, said.text),
      said.retry && el("button", { type: "button", class: "button small",
        on: { click: () => store.stream?.retry() } }, "Try now"),
      said.login && el("a", { class: "button small", href: "/" }, "Enter a token"));
  }
  return { node, update };
}

function isAway({ connection: { state, since, lostAt } }) {
  return state !== "live" && Date.now() - (lostAt ?? since) >= PATIENCE_MS;
}

function lostConnection(store) {
  const { state, since, retryInMs } = store.connection;
  if (state === "refused") {
    return { kind: "refused", level: "bad", login: true, text: "This link is no longer valid: the " +
      `page shows step ${store.columns.last} and is not updated. ${newLink(store.run?.folder)}` };
  }
  if (!isAway(store) || store.ended) return null;
  const wait = Math.max(0, Math.ceil((since + retryInMs - Date.now()) / 1000));
  const soon = state === "waiting" && wait > 0 ? `; trying again in ${wait} s` : "; trying again";
  return { kind: "disconnected", level: "warn", retry: true, text:
    `No connection to the dashboard${soon}. The page shows step ${store.columns.last}.` };
}

/** The server ends with its run: this is no error, but limits which views can be opened. */
function withoutServer(store) {
  return isAway(store) ? " Its server is gone too: the views keep what they last had. For all steps and samples: " +
    `python -m dashboard --run ${store.run.folder ?? "RUN_FOLDER"}` : "";
}

function endOfRun(store) {
  const { run } = store;
  const took = format.isFiniteNumber(run.ended) && format.isFiniteNumber(run.started)
    ? `, ${format.seconds(run.ended - run.started)} after it was started or resumed` : "";
  const at = `at step ${format.count(run.step ?? 0)}` +
    (run.steps_total ? ` of ${format.count(run.steps_total)}` : "");
  const why = run.reason ? `: ${run.reason}` : "";
  const resume = run.last_checkpoint !== null && run.last_checkpoint !== undefined
    ? ` The last checkpoint is of step ${run.last_checkpoint}.` : " There is no checkpoint.";
  const code = run.exit_code === null || run.exit_code === undefined ? "" : ` (exit code ${run.exit_code})`;
  if (store.state === "finished") {
    return { kind: "finished", level: "ok", text: `The run finished ${at}${took}, ` +
      `${format.clock(run.ended)}. This page is not updated any more.` };
  }
  if (store.state === "failed") {
    return { kind: "failed", level: "bad", text: `The run failed ${at}${took}${code}${why}.${resume}` };
  }
  if (store.state === "interrupted") {
    return { kind: "interrupted", level: "warn",
      text: `The run was interrupted ${at}${took}${code}${why}.${resume}` };
  }
  if (store.state === "lost") {
    return { kind: "lost", level: "bad", text: `The driver (process ${run.pid ?? "?"} on ` +
      `${run.host ?? "?"}) ended without a reason, ${at}.${resume}` };
  }
  if (!run.live && store.state === "running") {
    return { kind: "replay", level: "info",
      text: "Read from the run's folder: the fleet cannot be queried or changed here." };
  }
  return null;
}

function newLink(folder) {
  return `For a new one: python -m dashboard --run ${folder ?? "RUN_FOLDER"} --link`;
}

export function linkPanel(folder) {
  const field = el("input", { type: "password", id: "token-field", autocomplete: "off",
    "aria-label": "token", placeholder: "token" });
  const open = (event) => {
    event.preventDefault();
    if (field.value.trim()) location.assign(`/?token=${encodeURIComponent(field.value.trim())}`);
  };
  return el("main", { class: "gate", "data-testid": "link-panel" },
    el("h1", null, "This page needs a new link"),
    el("p", null, "The token in this link is not valid for this run, or not valid any more. " +
      "Run on the machine of the run:"),
    el("pre", { class: "command" }, `python -m dashboard --run ${folder ?? "RUN_FOLDER"} --link`),
    el("p", null, "Open the link that the command prints, or paste its token:"),
    el("form", { class: "inline-form", on: { submit: open } }, field,
      el("button", { class: "button", type: "submit" }, "Open")));
}
