/**
 * The table of processes: the learner first, then the workers.
 *
 * fleetTable(onDrain)     {node, fill(fleet, noDrain)}: rows are updated in place, so that a button
 *                         does not move while it is clicked; noDrain: why no worker can be drained, or "".
 * lastKnownTable(store)   the last known numbers of each process, if no driver answers.
 */
import { el, setChildren, setText } from "../../parts/dom.js";
import { bytes, count, number, percent, value } from "../../parts/format.js";
import { lightMark, phaseTitle } from "../../charts/palette.js";
import { headOf, table } from "../../parts/table.js";

const STATES = {
  starting: ["info", "starting"],
  ready: ["ok", "ready"],
  working: ["ok", "working"],
  draining: ["warn", "draining"],
  gone: ["none", "gone"],
};
const WAITS = new Set(["idle", "queue_wait", "weights_wait", "unexplained"]);
const COLUMNS = [
  { title: "process" },
  { title: "state" },
  { title: "version", align: "right" },
  { title: "leased", align: "right" },
  { title: "slots", align: "right" },
  {
    title: "tokens/s with waits",
    align: "right",
    about: "Completion tokens over the last 10 s of wall time, waits and all; the chart counts only the time of decoding",
  },
  { title: "pull GB/s", align: "right" },
  { title: "host memory", align: "right" },
  { title: "device memory", align: "right" },
  { title: "groups done", align: "right" },
  { title: "restarts", align: "right" },
  { title: "where" },
  { title: "change", hidden: true },
];
/** Index of the column tokens/s, which has a bar too. */
const SPEED = 5;
const MEMORY = [
  ["host_bytes", "host memory"],
  ["device_bytes", "device memory"],
  ["device_peak_bytes", "device peak"],
];

export function fleetTable(onDrain) {
  const body = el("tbody");
  const node = el(
    "div",
    { class: "table-wrap grow", role: "region", "aria-label": "processes", tabindex: "0" },
    el(
      "table",
      { class: "fleet-table" },
      el("caption", { class: "visually-hidden" }, "The learner and the rollout workers"),
      headOf(COLUMNS),
      body,
    ),
  );
  let made = new Map();
  return {
    node,
    fill(fleet, noDrain) {
      const names = ["learner", ...fleet.workers.map((worker) => worker.name)];
      if (names.join() !== [...made.keys()].join()) {
        made = new Map(
          names.map((name) => [
            name,
            made.get(name) ?? (name === "learner" ? makeRow(name, null) : makeRow(name, onDrain)),
          ]),
        );
        setChildren(
          body,
          [...made.values()].map((row) => row.nodes),
        );
      }
      made.get("learner").fill(learnerCells(fleet), fleet.learner?.last_error);
      for (const worker of fleet.workers) {
        const row = made.get(worker.name);
        row.fill(workerCells(worker, fleet), worker.last_error);
        row.bar(worker.state === "gone" ? 0 : worker.tokens_per_s, fleet.workers);
        row.drain(worker, noDrain);
      }
      if (!fleet.workers.length) body.append(...nobody());
      else body.querySelector(".no-workers")?.remove();
    },
  };
}

function makeRow(name, onDrain) {
  const cells = COLUMNS.map(({ align }, i) =>
    i === 0
      ? el("th", { scope: "row" }, el("bdi", null, name))
      : el("td", { class: align === "right" ? "num" : null }),
  );
  const bar = el("span", { class: "cell-bar", "aria-hidden": "true" });
  const speed = el("span");
  setChildren(cells[SPEED], speed, onDrain && bar);
  const button =
    onDrain &&
    el(
      "button",
      {
        type: "button",
        class: "button small",
        "data-testid": "drain",
        data: { worker: name },
        on: { click: () => onDrain(name) },
      },
      "Drain",
    );
  if (button) cells.at(-1).append(button);
  const error = el("td", { colspan: COLUMNS.length - 1, class: "last-error" });
  const under = el("tr", { class: "error-row", hidden: true }, el("td"), error);
  const row = el(
    "tr",
    { "data-testid": onDrain ? "worker-row" : "learner-row", data: { worker: name } },
    cells,
  );
  return {
    nodes: [row, under],
    fill(texts, problem) {
      texts.forEach((text, i) => {
        const cell = i + 1 === SPEED ? speed : cells[i + 1];
        if (text instanceof Node) setChildren(cell, text);
        else setText(cell, text);
      });
      under.hidden = !problem;
      row.classList.toggle("with-error", Boolean(problem));
      setText(error, problem ? `last error: ${problem}` : "");
    },
    bar(tokens, workers) {
      const most = Math.max(1e-9, ...workers.map((worker) => value(worker.tokens_per_s) || 0));
      bar.style.width = `${(100 * (value(tokens) || 0)) / most}%`;
    },
    drain(worker, noDrain) {
      const leaving = ["draining", "gone"].includes(worker.state);
      const reason = leaving ? `${worker.name} is ${worker.state} already` : noDrain;
      button.disabled = Boolean(reason);
      button.title = reason || `Let ${worker.name} go`;
      row.dataset.state = worker.state;
    },
  };
}

/** The texts of the columns after the first, up to `where`. */
function workerCells(worker, fleet) {
  const [level, word] = STATES[worker.state] ?? ["none", worker.state];
  const speed = worker.state === "gone" ? 0 : worker.tokens_per_s;
  return [
    lightMark(level, word),
    versionText(worker.policy_version, fleet.policy_version),
    count(worker.groups_leased),
    some(worker.slots, count),
    some(speed, count),
    some(worker.pull_gb_per_s, number),
    some(worker.host_bytes, bytes),
    deviceText(worker),
    count(worker.groups_done),
    restartText(worker.restarts),
    placeText(worker),
  ];
}

function learnerCells({ learner, policy_version: newest }) {
  if (!learner) return [lightMark("none", "not known"), count(newest), ...Array(9).fill("–")];
  const stuck = ["failed", "gone", "restarting"].includes(learner.doing);
  return [
    lightMark(stuck ? "warn" : "ok", phaseTitle(learner.doing || "running")),
    learner.policy_version >= 0 ? count(learner.policy_version) : "–",
    "–",
    "–",
    "–",
    "–",
    some(learner.host_bytes, bytes),
    deviceText(learner),
    "–",
    restartText(learner.restarts),
    placeText(learner),
  ];
}

/** A number that is absent, or 0 or below where that stands for "not known yet". */
function some(raw, format) {
  const x = value(raw);
  return x === null || x <= 0 ? "–" : format(x);
}

function versionText(version, newest) {
  if (!(version >= 0)) return "none yet";
  const lag = newest - version;
  return el(
    "span",
    { data: { lag: String(lag) } },
    count(version),
    el("span", { class: "lag muted" }, lag > 0 ? `${count(lag)} behind` : "current"),
  );
}

function deviceText({ device_bytes: now, device_peak_bytes: peak }) {
  if (!(value(now) >= 0)) return "–";
  return el(
    "span",
    null,
    bytes(now),
    value(peak) >= 0 && el("span", { class: "lag muted" }, `peak ${bytes(peak)}`),
  );
}

function restartText(n) {
  return n > 0 ? el("strong", { class: "warn-text" }, `▲ ${count(n)}`) : count(n);
}

function placeText({ host, pid, devices, address }) {
  const place = [host, pid > 0 ? `pid ${pid}` : ""].filter(Boolean).join(" · ");
  return el(
    "span",
    { class: "place muted", title: [devices, address].filter(Boolean).join(", ") },
    el("bdi", null, place || "waits for room"),
    devices ? el("bdi", { class: "lag" }, devices) : null,
  );
}

function nobody() {
  return [
    el(
      "tr",
      { class: "no-workers" },
      el(
        "td",
        { colspan: COLUMNS.length, class: "muted" },
        "No rollout workers: they start, or the learner's own devices do their work (placement.mode colocated).",
      ),
    ),
  ];
}

export function lastKnownTable(store) {
  const step = store.lastStep;
  const rows = Object.entries(step?.processes ?? {});
  if (!rows.length) {
    return el("p", { class: "muted" }, "No step has been closed yet, so nothing is known of the processes.");
  }
  const metric = (name) => step.metrics[name] ?? store.latest(name)?.value ?? null;
  const columns = [
    { title: "process", heads: true, cell: ([process]) => el("bdi", null, process) },
    { title: "busy", align: "right", cell: ([, phases]) => percent(busy(phases, step.wall_s)) },
    ...MEMORY.map(([name, title]) => ({
      title,
      align: "right",
      cell: ([process]) => bytes(metric(`mem/${process}/${name}`)),
    })),
  ];
  return table(columns, rows, {
    class: "fleet-table",
    caption: `As step ${step.step} left them, by the run's logs.`,
    captionClass: "table-note",
    rowOf: ([process]) => ({ "data-testid": "process-row", data: { worker: process } }),
  });
}

function busy(phases, wall) {
  const seconds = Object.entries(phases).reduce(
    (sum, [phase, s]) => sum + (WAITS.has(phase) ? 0 : value(s)),
    0,
  );
  return wall > 0 ? Math.min(1, seconds / wall) : null;
}
