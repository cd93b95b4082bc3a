/**
 * The history of a range of steps as columns; live steps are appended without copying.
 *
 * new Columns(json)      of GET /api/history.
 * .bin                   steps per bin; above 1 every value is the mean of a bin.
 * .steps                 the first step of each bin; .last: the last step held.
 * .metrics[name]         one number per bin; null: absent or not finite (see .nonfinite).
 * .low[name], .high[name] least and most of a bin; only where bin > 1.
 * .nonfinite.get(name)   Map(step -> "NaN" | "Infinity" | "-Infinity" | "not finite").
 * .processes, .phases    phases that are non-zero somewhere, in the ledger's order.
 * .seconds[process]      mean seconds a step for each bin and phase of .phases (null: without the process).
 * .path                  the same for the critical path, by .pathPhases.
 * .wall                  mean wall seconds a step, per bin.
 * .append(step)          adds one step of the stream.
 * .merge(json)           takes more metrics of the same range; false if the bins do not match.
 * .part(first, last)     new Columns of these steps.
 * .trim(n)               keeps the newest n bins.
 * .lastOf(i)             the last step of bin i.
 * .index(step)           the bin of a step, or the nearest one.
 * .latest(name)          {step, until, value} of the newest value, or null; NaN stays NaN. The value
 *                        is the mean of step to until if the server binned it.
 */
import { value } from "./format.js";
import { STACK } from "../charts/palette.js";

export class Columns {
  constructor(json) {
    this.bin = json.bin ?? 1;
    this.steps = [...(json.steps ?? [])];
    this.last = json.last ?? this.steps.at(-1) ?? 0;
    this.processes = [...(json.processes ?? [])];
    this.phases = [...(json.phases ?? [])];
    this.pathPhases = [...(json.path_phases ?? [])];
    this.wall = (json.wall_s ?? []).map(value);
    this.seconds = {};
    for (const process of this.processes) {
      this.seconds[process] = [...(json.seconds?.[process] ?? this.steps.map(() => null))];
    }
    this.path = [...(json.path ?? [])];
    this.metrics = {};
    this.low = {};
    this.high = {};
    this.nonfinite = new Map();
    this._newest = new Map(); // only appended values: the columns have the others
    this._count = this.steps.length ? this.last - this.steps.at(-1) + 1 : 0;
    this._take(json);
  }

  _take(json) {
    for (const [name, column] of Object.entries(json.metrics ?? {})) {
      this.metrics[name] = column.map((raw, i) => this._plain(name, raw, this.steps[i]));
    }
    for (const [name, steps] of Object.entries(json.nonfinite ?? {})) {
      for (const step of steps) if (!this._odd(name).has(step)) this._odd(name).set(step, "not finite");
    }
    for (const side of ["low", "high"]) {
      for (const [name, column] of Object.entries(json[side] ?? {})) {
        this[side][name] = column.map((raw) => (typeof raw === "number" ? raw : null));
      }
    }
  }

  _odd(name) {
    if (!this.nonfinite.has(name)) this.nonfinite.set(name, new Map());
    return this.nonfinite.get(name);
  }

  /** A number to draw, or null; what is not finite is noted at its step. */
  _plain(name, raw, step) {
    const x = value(raw);
    if (x === null || Number.isFinite(x)) return x;
    if (this.bin === 1) this._odd(name).set(step, String(x));
    return null;
  }

  merge(json) {
    const same = json.bin === this.bin && json.steps.length === this.steps.length &&
      json.steps[0] === this.steps[0];
    if (same) this._take(json);
    return same;
  }

  append(step) {
    const number = step.step;
    if (this.steps.length && number <= this.last) return;
    const start = this.steps.at(-1);
    if (start === undefined || number >= start + this.bin) {
      const at = start === undefined ? number : start + this.bin * Math.floor((number - start) / this.bin);
      this._addBin(at);
    }
    const i = this.steps.length - 1;
    const n = ++this._count;
    this.last = number;
    const mean = (old, x) => (old === null || old === undefined ? x : old + (x - old) / n);
    this.wall[i] = mean(this.wall[i], value(step.wall_s));
    this._addSeconds(step, i, n);
    for (const [name, raw] of Object.entries(step.metrics)) this._addMetric(name, raw, number, i, mean);
  }

  _addBin(start) {
    this._count = 0;
    this.steps.push(start);
    this.wall.push(null);
    this.path.push(null);
    for (const rows of Object.values(this.seconds)) rows.push(null);
    for (const side of [this.metrics, this.low, this.high]) {
      for (const column of Object.values(side)) column.push(null);
    }
  }

  _addMetric(name, raw, number, i, mean) {
    const x = value(raw);
    this._newest.set(name, { step: number, until: number, value: x });
    if (!(name in this.metrics)) this.metrics[name] = this.steps.map(() => null);
    if (!Number.isFinite(x)) {
      if (x !== null) this._odd(name).set(number, String(x));
      return;
    }
    this.metrics[name][i] = mean(this.metrics[name][i], x);
    if (this.bin === 1) return;
    for (const [side, pick] of [[this.low, Math.min], [this.high, Math.max]]) {
      if (!(name in side)) side[name] = this.steps.map(() => null);
      side[name][i] = side[name][i] === null ? x : pick(side[name][i], x);
    }
  }

  _addSeconds(step, i, n) {
    for (const [process, row] of Object.entries(step.processes)) {
      if (!(process in this.seconds)) {
        this.processes.push(process);
        this.seconds[process] = this.steps.map(() => null);
      }
      this._learn(row, this.phases, [...Object.values(this.seconds)]);
      this.seconds[process][i] = blend(this.seconds[process][i], row, this.phases, n);
    }
    if (step.path) {
      this._learn(step.path, this.pathPhases, [this.path]);
      this.path[i] = blend(this.path[i], step.path, this.pathPhases, n);
    }
  }

  /** Inserts a phase that occurs for the first time into the stack. */
  _learn(row, phases, tables) {
    for (const [phase, s] of Object.entries(row)) {
      if (phases.includes(phase) || !(s > 0)) continue;
      const later = phases.findIndex((other) => STACK.indexOf(other) > STACK.indexOf(phase));
      const at = later < 0 ? phases.length : later;
      phases.splice(at, 0, phase);
      for (const rows of tables) for (const old of rows) old?.splice(at, 0, 0);
    }
  }

  trim(n) {
    const extra = this.steps.length - n;
    if (extra <= 0) return;
    const all = [this.steps, this.wall, this.path, ...Object.values(this.seconds),
      ...Object.values(this.metrics), ...Object.values(this.low), ...Object.values(this.high)];
    for (const column of all) column.splice(0, extra);
    for (const marks of this.nonfinite.values()) {
      for (const step of marks.keys()) if (step < this.steps[0]) marks.delete(step);
    }
  }

  part(first, last) {
    const [from, to] = [this.index(first), this.index(last) + 1];
    const cut = (column) => column.slice(from, to);
    const each = (table) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, cut(column)]));
    const columns = new Columns({});
    const ends = { bin: this.bin, last: Math.min(this.last, (this.steps[to] ?? Infinity) - 1) };
    Object.assign(columns, ends, {
      steps: cut(this.steps), wall: cut(this.wall), path: cut(this.path),
      processes: [...this.processes], phases: [...this.phases], pathPhases: [...this.pathPhases],
      seconds: each(this.seconds), metrics: each(this.metrics), low: each(this.low), high: each(this.high),
    });
    for (const [name, marks] of this.nonfinite) {
      const inside = [...marks].filter(([step]) => step >= columns.steps[0] && step <= columns.last);
      if (inside.length) columns.nonfinite.set(name, new Map(inside));
    }
    return columns;
  }

  index(step) {
    let [low, high] = [0, this.steps.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.steps[middle] <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The last step of bin i. */
  lastOf(i) {
    return Math.min(this.last, this.steps[i] + this.bin - 1);
  }

  latest(name) {
    if (this._newest.has(name)) return this._newest.get(name);
    const column = this.metrics[name] ?? [];
    const i = column.findLastIndex((x) => x !== null);
    const marks = this.nonfinite.get(name) ?? new Map();
    const step = Math.max(-1, ...marks.keys());
    if (step >= (i < 0 ? 0 : this.steps[i + 1] ?? Infinity)) return odd(step, marks.get(step));
    return i < 0 ? null : { step: this.steps[i], until: this.lastOf(i), value: column[i] };
  }
}

function odd(step, text) {
  return { step, until: step, value: text === "not finite" ? NaN : value(text) };
}

function blend(old, row, phases, n) {
  return phases.map((phase, k) => {
    const x = row[phase] ?? 0;
    const before = old?.[k] ?? 0;
    return before + (x - before) / n;
  });
}
