/**
 * The state of the page, and its listeners.
 *
 * store.run         GET /api/run; store.state: its `state`; store.ended: true when it has ended.
 * store.catalog     Map(name -> {title, unit, description, view, group}); metricTitle(name),
 *                   metricUnit(name) and phaseTitle(name) also know patterns such as time/{x}/y.
 * store.columns     Columns of the whole run (downsampled); store.shown: of the selected range, which
 *                   is store.columns itself while the range is {mode: "all"}.
 * store.setRange(r) {mode: "all"} | {mode: "last", n} | {mode: "fixed", first, last}; fetches.
 * store.ensure(names) loads metrics that the default history leaves out into both; a promise.
 * store.lastStep    the newest step event ({step, wall_s, metrics, processes, path, ...}) or null.
 * store.latest(name) {step, until, value} of the newest value of a metric, or null: the value of a
 *                   step, or the mean of step to until.
 * store.judgement, store.fleet, store.samplesTotal, store.timelineStep
 * store.connection  {state: "connecting"|"live"|"waiting"|"refused", since, lostAt, retryInMs}; since
 *                   and lostAt in ms, lostAt null while live
 * store.timed(f)    runs an update from outside the stream inside the same measure.
 * store.on(f)       f(event) for each event; event.type: run, step, fleet, judgement, timeline,
 *                   samples, reload, history (columns were fetched again), range, connection, theme,
 *                   ended (the run has just ended: its server ends soon).
 *
 * Events of the stream are queued and dispatched once per frame (once a second in a hidden tab, which
 * draws nothing); performance.measure("tandem-update") spans processing and drawing.
 */
import { ApiError, getJSON, openStream, setGoneMessage } from "./api.js";
import { Columns } from "./parts/columns.js";
import { value } from "./parts/format.js";
import { phaseTitle } from "./charts/palette.js";

const POINTS = 600;
const MOST_MEASURES = 500;
const OVER = ["finished", "failed", "interrupted", "lost"];

export class Store {
  constructor() {
    this.run = null;
    this.catalog = new Map();
    this.columns = new Columns({});
    this.shown = this.columns;
    this.range = { mode: "all" };
    this.lastStep = null;
    this.judgement = null;
    this.fleet = null;
    this.samplesTotal = null;
    this.timelineStep = null;
    this.connection = { state: "connecting", since: Date.now(), lostAt: null, retryInMs: 0 };
    this.problem = ""; // why the requested range is not shown
    this._listeners = new Set();
    this._queue = [];
    this._planned = false;
    this._extra = new Set();
    this._patterns = [];
    this._phases = new Map();
    this._measures = 0;
    this._caughtUp = null;
    this._refetching = false;
    this._again = false; // requested again during a fetch
    this._fetches = new Set();
    this._wasLive = false;
    this._rangeAsked = 0;
  }

  on(f) {
    this._listeners.add(f);
    return () => this._listeners.delete(f);
  }

  emit(type, data = null) {
    for (const f of this._listeners) f({ type, data });
  }

  get state() {
    return this.run?.state ?? "unknown";
  }

  get ended() {
    return OVER.includes(this.state);
  }

  /** The value of the newest step if it has the metric; otherwise a bin of the columns, which is a mean. */
  latest(name) {
    const { lastStep, columns } = this;
    if (lastStep?.step === columns.last && name in lastStep.metrics) {
      return { step: lastStep.step, until: lastStep.step, value: value(lastStep.metrics[name]) };
    }
    return columns.latest(name);
  }

  /** Loads what the first paint needs. Throws ApiError. */
  async load() {
    const all = [getJSON("/api/run"), getJSON("/api/history", { points: POINTS }),
      getJSON("/api/catalog").catch((error) => this._optional(error))];
    for (const one of all) one.catch(() => {}); // a server that compares two runs only has the first
    this._setRun(await all[0]);
    if (this.run.compare) return;
    const [, history, catalog] = await Promise.all(all);
    this._setCatalog(catalog);
    this.columns = this.shown = new Columns(history);
  }

  /** Loads what the first paint does not need; judgement and fleet arrive by the stream. */
  async loadRest() {
    try {
      await this._loadLastStep();
      if (this.lastStep) this.emit("history");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the stream reports the problem
    }
  }

  async _loadLastStep() {
    if (!this.columns.steps.length) return;
    this.lastStep = await getJSON(`/api/step/${this.columns.last}`)
      .catch((error) => this._optional(error));
  }

  /** Something that this server does not have is null; a refused token or lost connection is an error. */
  _optional(error) {
    if (error instanceof ApiError && error.status >= 402) return null;
    throw error;
  }

  follow() {
    this.stream = openStream({
      event: (type, data) => this._enqueue(type, data),
      state: (next) => {
        const back = next.state === "live" && this.connection.state !== "live";
        const lostAt = next.state === "live" ? null : this.connection.lostAt ?? Date.now();
        this.connection = { ...next, since: Date.now(), lostAt };
        this.emit("connection", this.connection);
        if (back && this._wasLive) this.refetch();
        if (next.state === "live") this._wasLive = true;
      },
    });
  }

  _enqueue(type, data) {
    this._queue.push({ type, data });
    if (type === "run" && OVER.includes(data.state)) { // hidden tabs are slow, and the server ends soon
      this._flush();
      return;
    }
    if (this._planned) return;
    this._planned = true;
    if (document.hidden) setTimeout(() => this._flush(), 1000);
    else requestAnimationFrame(() => this._flush());
  }

  _flush() {
    this._planned = false;
    this.timed(() => {
      const events = this._queue.splice(0);
      const wasRunning = this.state === "running";
      for (const event of events) this._apply(event);
      if (wasRunning && this.ended) this.emit("ended");
      for (const { type, data } of newestOfEach(events)) this.emit(type, data);
    });
  }

  timed(f) {
    const start = performance.now();
    f();
    // Charts draw in microtasks that the listeners queued; this one runs after them.
    queueMicrotask(() => {
      if (++this._measures % MOST_MEASURES === 0) performance.clearMeasures("tandem-update");
      performance.measure("tandem-update", { start, end: performance.now() });
    });
  }

  _apply({ type, data }) {
    if (type === "run") {
      this._setRun(data);
      this._catchUp(data.step);
    }
    else if (type === "step") this._addStep(data);
    else if (type === "fleet") this.fleet = data;
    else if (type === "judgement") this.judgement = data;
    else if (type === "samples") this.samplesTotal = data.total;
    else if (type === "timeline") this.timelineStep = data.step;
    else if (type === "reload") this.refetch();
  }

  _setRun(run) {
    this.run = run;
    setGoneMessage(this.ended ? "the run and its server have ended; to see everything: " +
      `python -m dashboard --run ${run.folder ?? "RUN_FOLDER"}` : null);
  }

  _addStep(step) {
    this._catchUp(step.step - 1);
    this.lastStep = step;
    this.run.step = Math.max(this.run.step ?? 0, step.step);
    this.columns.append(step);
    if (this.shown !== this.columns && this.range.mode === "last") {
      this.shown.append(step);
      this.shown.trim(this.range.n);
    }
    if (this.columns.steps.length > 1.5 * POINTS) this.refetch();
  }

  /** The link is no longer valid: the page keeps its contents and stops asking. */
  _refused() {
    this.stream?.close();
    this.connection = { state: "refused", since: Date.now(), lostAt: Date.now(), retryInMs: 0 };
    this.emit("connection", this.connection);
  }

  /** Fetches, once, the steps that closed between the first fetch and the stream. */
  _catchUp(step) {
    if (!(step > this.columns.last) || this._caughtUp === step) return;
    this._caughtUp = step;
    this.refetch();
  }

  /** Says, after the end, that this page needs nothing more of the server; it looks for the next one. */
  async leave() {
    while (this._fetches.size) await Promise.allSettled([...this._fetches]);
    this.stream.leave();
  }

  /** Fetches the history again: after a lost connection, a rewound run, or too many bins. */
  refetch() {
    const fetched = this._fetchAgain();
    const forget = () => this._fetches.delete(fetched);
    this._fetches.add(fetched);
    fetched.then(forget, forget);
    return fetched;
  }

  async _fetchAgain() {
    if (this._refetching) {
      this._again = true;
      return;
    }
    [this._refetching, this._again] = [true, false];
    try {
      const names = await this._names();
      this.columns = new Columns(await getJSON("/api/history", { points: POINTS, names }));
      await this._loadLastStep();
      await this._fetchRange();
      this.emit("history");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) this._refused();
      // Without a connection, the stream's next success fetches again.
    } finally {
      this._refetching = false;
      if (this._again && this.run.step > this.columns.last) this.refetch();
    }
  }

  async _names() {
    if (!this._extra.size) return null;
    return [...new Set([...Object.keys(this.columns.metrics), ...this._extra])].join(",");
  }

  async setRange(range) {
    const before = this.range;
    this.range = range;
    this.problem = "";
    try {
      await this._fetchRange();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.range = before;
      this.problem = error.message;
    }
    this.emit("range", this.range);
  }

  async _fetchRange() {
    const asked = ++this._rangeAsked;
    const { mode, n } = this.range;
    if (mode === "all") {
      this.shown = this.columns;
      return;
    }
    const { first, last } = mode === "fixed" ? this.range
      : { first: Math.max(0, this.columns.last - n + 1), last: this.columns.last };
    if (this.columns.bin === 1) {
      this.shown = this.columns.part(first, last);
      return;
    }
    const names = await this._names();
    const json = await getJSON("/api/history", { first, last, points: POINTS, names });
    if (asked === this._rangeAsked) this.shown = new Columns(json);
  }

  async ensure(names) {
    const missing = names.filter((name) => !(name in this.columns.metrics) && !this._extra.has(name));
    if (!missing.length) return;
    for (const name of missing) this._extra.add(name);
    const { steps, last } = this.columns;
    if (!steps.length) return;
    const json = await getJSON("/api/history",
      { first: steps[0], last, points: POINTS, names: missing.join(",") });
    if (!this.columns.merge(json)) await this.refetch();
    else if (this.shown !== this.columns) await this._fetchRange();
    this.emit("history");
  }

  _setCatalog(json) {
    for (const entry of json?.metrics ?? []) {
      if (entry.name) this.catalog.set(entry.name, entry);
      else if (entry.pattern) this._patterns.push({ match: patternOf(entry.pattern), entry });
    }
    for (const phase of json?.phases ?? []) this._phases.set(phase.name, phase);
  }

  metric(name) {
    return this.catalog.get(name) ??
      this._patterns.find(({ match }) => match.test(name))?.entry ?? null;
  }

  metricTitle(name) {
    const entry = this.metric(name);
    return entry?.name ? entry.title : name;
  }

  metricUnit(name) {
    return this.metric(name)?.unit ?? "";
  }

  phaseTitle(name) {
    return this._phases.get(name)?.title ?? phaseTitle(name);
  }

  phaseText(name) {
    return this._phases.get(name)?.description ?? "";
  }
}

/** time/{process}/{phase}_s and time/<process>/<phase>_s both stand for any text there. */
function patternOf(pattern) {
  const parts = pattern.split(/\{[^}]*\}|<[^>]*>|\*/);
  const quoted = parts.map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${quoted.join(".+")}$`);
}

function newestOfEach(events) {
  return [...new Map(events.map((event) => [event.type, event])).values()];
}
