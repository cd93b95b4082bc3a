/**
 * Stacked bars per step on a canvas: one row for the critical path and one per process, the selected
 * row tall and the others low, all on one axis of steps and one scale of seconds.
 *
 * new BreakdownChart(host, {hover, open, zoom, whole, choose, placed})
 *   hover(i, row, x, y)   bin i (or null) of row under the pointer or the keys, in viewport pixels
 *   open(i, byKey)        bin i was clicked, or chosen by Enter
 *   zoom(first, last)     steps that the viewer wants to see; null, null: all
 *   whole()               {first, last} of all steps there are
 *   choose(row)           another row by key
 *   placed()              the rows may have moved: see .tops
 * .set({columns, rows, chosen, share, threshold, open})  rows: [{id, phases, table, label}]; draws.
 *                       open: more steps will follow, so there is room for them: a step that closes
 *                       then draws one bar, not all of them
 * .redraw()             draws everything again, as for another theme
 * .tops                 CSS top and height of each row, for the labels beside
 * .cursor               bin under the keys, or null
 */
import { el } from "../parts/dom.js";
import { isUnexplained, phaseFill, token } from "./palette.js";
import { fitCanvas, fontOf, niceStep, niceTicks, observeSize, secondsTick, stepTicks } from "./plot.js";
import { addZoom } from "./zoom.js";

const LEFT = 46; // room for the labels of the seconds
const AXIS = 20; // and for the steps beneath
const WARN = 12; // the strip above the tall row with the flags of unexplained time
const LOW_ROW = 40;
const LEAST_ROW = 26;
const GAP = 6;
const LEAST_TALL = 150;
const WIDEST_BAR = 56;
const SCALE_STEP = 1.08; // the scale changes in such steps, so that it rarely changes

/** Top of the scale: the longest bar, unless a few compiling steps are far above all others. */
function highOf(walls) {
  const sorted = walls.filter((x) => x > 0).sort((a, b) => a - b);
  const most = sorted.at(-1) ?? 1;
  const usual = sorted[Math.max(0, sorted.length - 1 - Math.max(2, Math.floor(sorted.length / 20)))] ?? most;
  return most > 1.8 * usual && sorted.length > 4 ? 1.4 * usual : 1.02 * most;
}

export class BreakdownChart {
  constructor(host, calls) {
    this.host = host;
    this.calls = calls;
    this.bars = el("canvas", { "aria-hidden": "true" });
    this.over = el("canvas", { class: "overlay", "aria-hidden": "true" });
    this.view = { rows: [], chosen: null };
    this.tops = [];
    this.cursor = null;
    this.domain = null;
    host.append(this.bars, this.over);
    this.size = null;
    observeSize(host.parentElement, () => {
      this.size = null;
      this.redraw();
    });
    this._listen();
  }

  set(view) {
    this.view = view;
    const { columns, open } = view;
    const first = columns.steps[0] ?? 0;
    const bins = columns.steps.length;
    const room = 2 ** Math.max(2, Math.floor(Math.log2(bins / 12)));
    const most = open ? Math.ceil((bins + 1) / room) * room : bins;
    this.domain = { first, last: open || columns.bin > 1 ? first + most * columns.bin : columns.last + 1 };
    this._draw(false);
  }

  redraw() {
    if (this.view.columns) this._draw(true);
  }

  /** Draws the bars that are new; all of them if `anew` or if anything but their number changed. */
  _draw(anew) {
    if (!this.host.clientWidth) return; // in a hidden view
    this.size ??= { width: this.host.clientWidth, height: this.host.parentElement.clientHeight };
    this._place();
    const { rows, chosen, share, columns } = this.view;
    const layout = JSON.stringify([this.domain, this.width, this.height, this.top, chosen, share, columns.bin,
      rows.map((row) => [row.id, row.phases])]);
    const from = anew || layout !== this.layout || columns !== this.drawnOf ? 0 : Math.max(0, this.drawn - 1);
    [this.layout, this.drawnOf, this.drawn] = [layout, columns, columns.steps.length];
    const ctx = fitCanvas(this.bars, this.width, this.height, from === 0);
    ctx.font = fontOf(11);
    ctx.save();
    if (from > 0) {
      const x = this.x(columns.steps[from]);
      ctx.beginPath();
      ctx.rect(x, 0, this.width - x, this.height - AXIS);
      ctx.clip();
      ctx.clearRect(x, 0, this.width - x, this.height - AXIS);
    }
    rows.forEach((row, r) => this._drawRow(ctx, row, this.tops[r], from));
    ctx.restore();
    if (from === 0) {
      this._drawSteps(ctx);
      this.calls.placed();
    }
    this._drawCursor();
  }

  _place() {
    const { rows, chosen, columns, share } = this.view;
    this.width = this.size.width;
    const room = this.size.height - AXIS - 2;
    const others = Math.max(0, rows.length - 1);
    const low = Math.max(LEAST_ROW, Math.min(LOW_ROW, (room - LEAST_TALL) / Math.max(1, others) - GAP));
    const tall = Math.max(LEAST_TALL, room - others * (low + GAP));
    let y = 0;
    this.tops = rows.map((row) => {
      const height = row.id === chosen ? tall : low;
      const at = { top: y, height, tall: row.id === chosen };
      y += height + GAP;
      return at;
    });
    this.height = y - GAP + AXIS;
    const high = highOf(columns.wall);
    this.top = share ? 1 : SCALE_STEP ** Math.ceil(Math.log(high) / Math.log(SCALE_STEP));
  }

  x(step) {
    const { first, last } = this.domain;
    return LEFT + ((step - first) / (last - first)) * (this.width - LEFT);
  }

  stepAt(x) {
    const { first, last } = this.domain;
    return first + ((x - LEFT) / (this.width - LEFT)) * (last - first);
  }

  /** Left edge and width of the bar of bin i. */
  _slot(i) {
    const { columns } = this.view;
    const start = this.x(columns.steps[i]);
    const slot = this.x(columns.steps[i] + columns.bin) - start;
    const wide = Math.min(WIDEST_BAR, slot >= 4 ? slot - 1 : slot);
    return [start + (slot - wide) / 2, wide];
  }

  _drawRow(ctx, row, { top, height, tall }, from) {
    const { columns, share, threshold } = this.view;
    const head = tall ? WARN : 3;
    const [base, size] = [top + height, height - head];
    ctx.save();
    ctx.fillStyle = token("line");
    ctx.fillRect(LEFT, base - 0.5, this.width - LEFT, 1);
    if (tall) this._drawSeconds(ctx, base, size);
    ctx.beginPath();
    ctx.rect(LEFT, top, this.width - LEFT, height);
    ctx.clip();
    const n = columns.steps.length;
    const heights = new Float64Array(n);
    const scale = new Float64Array(n);
    for (let i = from; i < n; i++) {
      const bar = row.table[i];
      const total = bar ? bar.reduce((a, b) => a + b, 0) : 0;
      scale[i] = total > 0 ? size / (share ? total : this.top) : 0;
    }
    const flagged = [];
    row.phases.forEach((phase, k) => {
      const odd = isUnexplained(phase);
      ctx.fillStyle = phaseFill(ctx, phase);
      ctx.beginPath();
      for (let i = from; i < n; i++) {
        const s = row.table[i]?.[k];
        if (!(s > 0)) continue;
        const part = s / (columns.wall[i] || 1);
        let high = s * scale[i];
        if (odd && part > 0.01) high = Math.max(high, 2);
        if (odd && part > threshold) flagged.push(i);
        const [x, wide] = this._slot(i);
        const bottom = base - heights[i];
        ctx.rect(x, bottom - high, wide, high > 3 ? high - 0.75 : high);
        heights[i] += high;
      }
      ctx.fill();
    });
    ctx.restore();
    this._drawFlags(ctx, flagged, top, tall);
    this._drawCut(ctx, heights, size, top + head);
  }

  /** Points at bars whose unexplained share is above the run's threshold. */
  _drawFlags(ctx, flagged, top, tall) {
    ctx.fillStyle = token("unexplained");
    let drawn = -Infinity;
    for (const i of flagged) {
      const [x, wide] = this._slot(i);
      if (!tall) {
        ctx.fillRect(x, top, Math.max(wide, 2), 3);
        continue;
      }
      const middle = x + wide / 2;
      if (middle < drawn + 6) continue;
      drawn = middle;
      ctx.beginPath();
      ctx.moveTo(middle - 5, top + 1);
      ctx.lineTo(middle + 5, top + 1);
      ctx.lineTo(middle, top + 9);
      ctx.fill();
    }
  }

  /** A bar that is longer than the scale ends in a notch that shows the cut. */
  _drawCut(ctx, heights, size, top) {
    ctx.fillStyle = token("panel");
    for (let i = 0; i < heights.length; i++) {
      if (heights[i] <= size + 3) continue;
      const [x, wide] = this._slot(i);
      ctx.beginPath();
      ctx.moveTo(x - 1, top + 8);
      ctx.lineTo(x + wide + 1, top + 3);
      ctx.lineTo(x + wide + 1, top + 5.5);
      ctx.lineTo(x - 1, top + 10.5);
      ctx.fill();
    }
  }

  _drawSeconds(ctx, base, size) {
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const most = Math.max(2, Math.floor(size / 44));
    const step = niceStep(this.top, most);
    for (const tick of niceTicks(0, this.top, most)) {
      const y = Math.round(base - (tick / this.top) * size) + 0.5;
      ctx.fillStyle = token("line");
      ctx.fillRect(LEFT, y - 0.5, this.width - LEFT, 1);
      ctx.fillStyle = token("muted");
      ctx.fillText(this.view.share ? `${Math.round(100 * tick)} %` : secondsTick(tick, step), LEFT - 6, y);
    }
  }

  _drawSteps(ctx) {
    const { first, last } = this.domain;
    const middle = Math.min(WIDEST_BAR, this.x(first + 1) - this.x(first)) < 3 ? 0 : 0.5;
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    ctx.fillStyle = token("muted");
    const y = this.height - AXIS + 5;
    for (const step of stepTicks(Math.ceil(first), Math.floor(last - middle), Math.floor(this.width / 80))) {
      const x = this.x(step + middle);
      if (x < LEFT + 8 || x > this.width - ctx.measureText(String(step)).width / 2) continue;
      ctx.fillText(String(step), x, y);
    }
    ctx.textAlign = "left";
    ctx.fillText("step", 2, y);
  }

  _drawCursor() {
    const ctx = fitCanvas(this.over, this.width, this.height);
    const drag = this.drag;
    if (drag) {
      const [a, b] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
      ctx.globalAlpha = 0.18;
      ctx.fillStyle = token("accent");
      ctx.fillRect(a, 0, b - a, this.height - AXIS);
    }
    if (this.cursor === null || this.cursor >= this.view.columns.steps.length) return;
    const [x, wide] = this._slot(this.cursor);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = token("ink");
    ctx.lineWidth = 1;
    for (const { top, height, tall } of this.tops) {
      ctx.strokeRect(x - 0.5, top + (tall ? WARN : 3) - 0.5, Math.max(wide, 2) + 1, height - (tall ? WARN : 3) + 0.5);
    }
  }

  move(i, row, x, y) {
    this.cursor = i;
    this._drawCursor();
    this.calls.hover(i, row, x, y);
  }

  _listen() {
    const at = (event) => {
      const box = this.over.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const bin = (x) => {
      const { columns } = this.view;
      if (!columns?.steps.length || x < LEFT) return null;
      const step = this.stepAt(x);
      return step < columns.steps[0] || step >= columns.last + 1 ? null : columns.index(step);
    };
    const rowAt = (y) => this.tops.findIndex(({ top, height }) => y >= top && y <= top + height + GAP);
    this.host.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      const i = this.drag?.moved ? null : bin(x);
      this.move(i, this.view.rows[rowAt(y)] ?? null, event.clientX, event.clientY);
    });
    this.host.addEventListener("pointerleave", () => this.move(null, null));
    addZoom(this.host, {
      left: LEFT,
      width: () => this.width,
      domain: () => this.domain,
      whole: () => this.calls.whole(),
      least: 4,
      center: () => (this.cursor === null ? null : this.view.columns.steps[this.cursor] ?? null),
      show: (domain) => {
        this.domain = domain;
        this.redraw();
      },
      dragging: (drag) => {
        this.drag = drag;
        this._drawCursor();
      },
      settle: (first, last) => this.calls.zoom(first, last),
      click: (x) => bin(x) !== null && this.calls.open(bin(x)),
    });
    this.host.addEventListener("keydown", (event) => this._key(event));
  }

  _key(event) {
    const { columns, rows, chosen } = this.view;
    const n = columns?.steps.length ?? 0;
    if (!n || event.shiftKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    const place = rows.findIndex((row) => row.id === chosen);
    if (by || event.key === "Home" || event.key === "End") {
      const from = this.cursor ?? (by < 0 ? n : -1);
      const to = event.key === "Home" ? 0 : event.key === "End" ? n - 1 : from + by;
      const i = Math.max(0, Math.min(n - 1, to));
      const box = this.over.getBoundingClientRect();
      const [x, wide] = this._slot(i);
      this.move(i, rows[place], box.left + x + wide, box.top + (this.tops[place]?.top ?? 0) + 30);
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const next = rows[place + (event.key === "ArrowUp" ? -1 : 1)];
      if (next) this.calls.choose(next.id);
    } else if (event.key === "Enter" && this.cursor !== null) {
      this.calls.open(this.cursor, true);
    } else return;
    event.preventDefault();
  }
}
