/**
 * The processes of the run with their state and memory, the queue between them, and the controls that
 * change the number of workers.
 */
import { el, setChildren, setText } from "../../parts/dom.js";
import { bytes, clock, count, number, plural } from "../../parts/format.js";
import { makeControlDialog } from "./control_dialog.js";
import { fleetTable, lastKnownTable } from "./fleet_table.js";
import { lineChart, plain } from "../spark.js";

const MOST_LINES = 5;
const CHARTS = [
  [
    "Groups between workers and learner",
    plain,
    () => [
      ["queue/waiting_mean", "held by the learner"],
      ["queue/out_mean", "leased to workers"],
    ],
  ],
  [
    "Tokens a second, without waits",
    plain,
    () => [["throughput/train/decode_tokens_per_s", "tokens/s"]],
    "Completion tokens of a step per second of decoding; the table includes waiting time",
  ],
  [
    "Weight sync, GB/s",
    plain,
    () => [
      ["weights/gb_per_s", "workers pull"],
      ["publish/gb_per_s", "learner publishes"],
    ],
  ],
  [
    "Host memory",
    bytes,
    (store) =>
      store.columns.processes.slice(0, MOST_LINES).map((process) => [`mem/${process}/host_bytes`, process]),
  ],
];

export function keep(store) {
  return store.ensure(CHARTS.flatMap(([, , lines]) => lines(store).map(([name]) => name)));
}

export function mount(root, store) {
  const dialog = makeControlDialog();
  const tiles = new Map(
    [
      ["target", "target"],
      ["serving", "serving"],
      ["version", "policy version"],
      ["waiting", "groups waiting"],
      ["out", "groups leased"],
    ].map(([key, name]) => [key, tile(key, name)]),
  );
  const why = el("p", { class: "muted", id: "fleet-why" });
  const accepted = el("p", { class: "accepted", role: "status", id: "fleet-status" });
  const notice = el("p", { class: "fleet-notice", hidden: true });
  const add = el(
    "button",
    { type: "button", class: "button primary", id: "add-worker", "aria-describedby": "fleet-why" },
    "Add a worker",
  );
  const live = fleetTable((worker) => drain(worker));
  const old = el("div", { class: "table-wrap grow", hidden: true });
  const charts = CHARTS.map((chart) => chartCard(...chart));
  setChildren(
    root,
    el(
      "section",
      { class: "panel fleet-top" },
      el(
        "div",
        { class: "tiles" },
        [...tiles.values()].map(({ node }) => node),
      ),
      el("div", { class: "fleet-change" }, add, el("div", { class: "grow" }, why, accepted)),
    ),
    el("section", { class: "panel column fleet-processes" }, notice, live.node, old),
    el(
      "div",
      { class: "fleet-charts" },
      charts.map(({ node }) => node),
    ),
    dialog.node,
  );

  function draw() {
    const fleet = store.fleet;
    const has = Boolean(fleet?.available);
    const reason = refusal(store);
    add.disabled = Boolean(reason) || fleet.target >= fleet.max;
    setText(why, reason || bounds(fleet));
    drawTiles(has ? fleet : null);
    notice.hidden = !fleet?.notice;
    setText(notice, fleet?.notice ?? "");
    live.node.hidden = !has;
    old.hidden = has;
    if (has) live.fill(fleet, reason || tooFew(fleet));
    setChildren(old, has ? [] : lastKnownTable(store));
  }

  function drawTiles(fleet) {
    const latest = (name) => number(store.latest(name)?.value);
    tiles
      .get("target")
      .set(fleet ? `${fleet.target}` : "–", fleet ? allowed(fleet) : "");
    const serving = fleet?.workers.filter((w) => ["ready", "working"].includes(w.state)).length;
    tiles
      .get("serving")
      .set(
        fleet ? `${serving}` : "–",
        fleet ? `of ${plural(fleet.workers.length, "worker", "workers")}` : "",
      );
    tiles.get("version").set(fleet?.policy_version >= 0 ? count(fleet.policy_version) : "–", "newest published");
    tiles
      .get("waiting")
      .set(
        fleet ? count(fleet.groups_waiting) : latest("queue/waiting_mean"),
        fleet ? "held by the learner" : "mean of the last step",
      );
    tiles
      .get("out")
      .set(
        fleet ? count(fleet.groups_out) : latest("queue/out_mean"),
        fleet ? "held by workers" : "mean of the last step",
      );
  }

  const ask = (question, said) =>
    dialog.ask({
      ...question,
      done: ({ target }) =>
        setText(accepted, `Accepted at ${clock(Date.now() / 1000)}: ${said}; new target: ${target}.`),
    });

  add.addEventListener("click", () => {
    const target = store.fleet.target + 1;
    ask(
      {
        title: "Add a rollout worker?",
        confirm: `Ask for ${target} workers`,
        path: "/api/fleet",
        body: { target },
        text:
          `The target becomes ${plural(target, "worker", "workers")} instead of ${store.fleet.target}. The new one ` +
          "starts when the cluster has resources, fetches the current policy version, and then takes leases.",
      },
      "one more worker",
    );
  });

  function drain(name) {
    const target = store.fleet.target - 1;
    ask(
      {
        title: `Drain ${name}?`,
        confirm: `Drain ${name}`,
        path: "/api/fleet/drain",
        body: { name },
        text:
          `${name} finishes or returns its leases and then ends. The target becomes ${plural(target, "worker", "workers")}. ` +
          "No group is lost.",
      },
      `${name} drains`,
    );
  }

  return {
    update(event) {
      if (["fleet", "run", "step", "history"].includes(event.type)) draw();
      if (["step", "history", "theme"].includes(event.type)) for (const chart of charts) chart.draw(store);
    },
    show() {
      draw();
      for (const chart of charts) chart.draw(store);
      keep(store).catch((error) => setText(accepted, `The history cannot be loaded: ${error.message}`));
    },
    hide() {
      dialog.close();
      for (const chart of charts) chart.hide();
    },
  };
}

/** Why the fleet cannot be changed; empty if it can. */
function refusal(store) {
  if (store.ended) return `The run has ended (${store.state}): its workers cannot be changed any more.`;
  if (!store.run?.live) return "This page shows the folder of a run; it cannot change the run.";
  if (!store.fleet?.available) return `The driver does not answer: ${store.fleet?.why || "no answer yet"}.`;
  if (store.run.can_control === false)
    return "This dashboard has no access to the run's driver, so it cannot change it.";
  return "";
}

function bounds(fleet) {
  if (fleet.target >= fleet.max)
    return `The run allows ${plural(fleet.max, "worker", "workers")} at most (rollout.workers.max).`;
  return "Needs a confirmation and the control token.";
}

/** The allowed number of workers, and what changes it. */
function allowed({ min, max, policy }) {
  const range = min === max ? count(min) : `${count(min)} to ${count(max)}`;
  return policy === "balance" ? `automatic, ${range}` : `manual, ${range}`;
}

function tooFew({ target, min }) {
  return target <= min ? `the run needs at least ${min} (rollout.workers.min)` : "";
}

function tile(key, name) {
  const now = el("span", { class: "tile-value" });
  const more = el("span", { class: "tile-more muted" });
  return {
    node: el(
      "div",
      { class: "tile", "data-testid": `fleet-${key}` },
      el("span", { class: "tile-name muted" }, name),
      now,
      more,
    ),
    set(text, detail) {
      setText(now, text);
      setText(more, detail);
    },
  };
}

function chartCard(name, format, lines, about) {
  const host = el("div", { class: "mini-host grow" });
  const chart = lineChart(host, { label: name, format });
  return {
    node: el("section", { class: "panel column" }, el("h2", { title: about }, name), host),
    draw(store) {
      const { steps, metrics } = store.columns;
      const known = lines(store).filter(([one]) => one in metrics);
      chart.draw({
        x: known.length ? steps : [],
        lines: known.map(([one, label]) => ({ name: label, y: metrics[one] })),
      });
    },
    hide: chart.hide,
  };
}
