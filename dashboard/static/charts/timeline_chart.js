/**
 * Tracks of spans on a canvas: steps above, a track per process, queue depth and staleness beneath.
 *
 * new TimelineChart(host, {hover, open, settle, titleOf}); host gets a canvas and an overlay
 *   hover(hit, x, y)      hit: {t, track, span, marks, gauge, step} or null
 *   open(step)            the step under a click or Enter
 *   settle(domain|null)   after zoom or pan; null: everything is shown
 *   titleOf(phase)        title of a phase
 * .set(timeline, domain)  draws; domain {first, last} in seconds after its start, null for all
 * .redraw()
 */
import { el } from "../parts/dom.js";
import { clock } from "../parts/format.js";
import { isUnexplained, lineColor, phaseColor, phaseFill, token } from "./palette.js";
import { fitCanvas, fontOf, niceStep, niceTicks, observeSize, secondsTick } from "./plot.js";
import { before } from "./timeline_data.js";
import { addZoom } from "./zoom.js";

const LEFT = 112;
const RULER = 18;
const AXIS = 20;
const QUEUE = [74, 120]; // least and most
const STALE = [40, 60];
const TRACK = [22, 60];
const GAP = 5;
const MARKS = 11; // above a track, for its versions and checkpoints
const NEAR_PX = 5;

export class TimelineChart {
  constructor(host, calls) {
    this.host = host;
    this.calls = calls;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.over = el("canvas", { class: "overlay", "aria-hidden": "true" });
    this.timeline = null;
    this.track = 0;
    this.at = null;
    host.append(this.canvas, this.over);
    observeSize(host.parentElement, () => this.redraw());
    this._listen();
  }

  set(timeline, domain) {
    this.timeline = timeline;
    this.domain = domain ?? { first: 0, last: Math.max(timeline.duration, 1e-3) };
    this.redraw();
  }

  redraw() {
    if (!this.timeline || !this.host.clientWidth) return;
    this._place();
    const ctx = fitCanvas(this.canvas, this.width, this.height);
    ctx.font = fontOf(11);
    this._drawSteps(ctx);
    this.timeline.tracks.forEach((track, i) => this._drawTrack(ctx, track, this.tops[i]));
    this._drawGauges(ctx);
    this._drawStaleness(ctx);
    this._drawTime(ctx);
    this._drawCursor();
  }

  _place() {
    this.width = this.host.clientWidth;
    const n = Math.max(1, this.timeline.tracks.length);
    let spare = this.host.parentElement.clientHeight - RULER - AXIS - 2 * GAP - 8 - QUEUE[0] - STALE[0];
    const each = Math.max(TRACK[0], Math.min(TRACK[1], spare / n - MARKS - GAP));
    spare -= n * (each + MARKS + GAP);
    const grown = ([least, most], share) => Math.max(least, Math.min(most, least + share * spare));
    this.trackHeight = each;
    this.queueHeight = grown(QUEUE, 0.7);
    this.staleHeight = grown(STALE, 0.3);
    this.tops = this.timeline.tracks.map((_, i) => RULER + GAP + i * (each + MARKS + GAP) + MARKS);
    this.queueTop = RULER + GAP + n * (each + MARKS + GAP) + 6;
    this.staleTop = this.queueTop + this.queueHeight + GAP;
    this.height = this.staleTop + this.staleHeight + AXIS;
  }

  x(t) {
    const { first, last } = this.domain;
    return LEFT + ((t - first) / (last - first)) * (this.width - LEFT);
  }

  timeAt(x) {
    const { first, last } = this.domain;
    return first + ((x - LEFT) / (this.width - LEFT)) * (last - first);
  }

  _clipped(ctx, top, height, draw) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, top, this.width - LEFT, height);
    ctx.clip();
    draw();
    ctx.restore();
  }

  _drawSteps(ctx) {
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillStyle = token("muted");
    ctx.fillText("step", 2, RULER / 2);
    const { steps } = this.timeline;
    const seen = steps.filter((s) => this.x(s.end) > LEFT && this.x(s.start) < this.width);
    if (!seen.length) return;
    const each = (this.x(seen.at(-1).end) - this.x(seen[0].start)) / seen.length;
    const wide = ctx.measureText(String(seen.at(-1).step)).width + 14;
    const every = Math.max(1, niceStep(Math.ceil(wide / each), 1));
    this._clipped(ctx, 0, this.height - AXIS, () => {
      for (const { step, start, end } of seen) {
        const x = this.x(start);
        if (each > 3) {
          ctx.fillStyle = token("line");
          ctx.fillRect(x, 0, 1, this.height - AXIS);
        }
        if (step % every) continue;
        ctx.fillStyle = token("muted");
        const label = Math.max(x, LEFT) + 4;
        if (label + wide - 14 < this.x(end) || every > 1) ctx.fillText(String(step), label, RULER / 2);
      }
    });
  }

  _drawTrack(ctx, track, top) {
    const height = this.trackHeight;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillStyle = token("ink");
    ctx.fillText(track.process, 2, top + height / 2, LEFT - 8);
    ctx.fillStyle = token("sunken");
    ctx.fillRect(LEFT, top, this.width - LEFT, height);
    this._clipped(ctx, top - MARKS, height + MARKS, () => {
      this._drawSpans(ctx, track, top, height);
      this._drawMarks(ctx, track, top, height);
    });
  }

  _drawSpans(ctx, track, top, height) {
    const first = Math.max(0, before(track.spans.length, (i) => track.spans[i][1] <= this.domain.first));
    let drawn = -Infinity;
    for (let i = first; i < track.spans.length; i++) {
      const [phase, t, seconds] = track.spans[i];
      if (t > this.domain.last) break;
      const [x, x2] = [this.x(t), this.x(t + seconds)];
      const name = this.timeline.phases[phase];
      if (x2 - drawn < 0.4 && !isUnexplained(name)) continue; // too narrow to be visible
      ctx.fillStyle = phaseFill(ctx, name);
      ctx.fillRect(x, top, Math.max(x2 - x - (x2 - x > 3 ? 0.75 : 0), 0.6), height);
      drawn = x2;
      if (x2 - x > 34) this._nameSpan(ctx, name, Math.max(x, LEFT), x2, top + height / 2);
    }
  }

  _nameSpan(ctx, phase, x, x2, y) {
    const text = this.calls.titleOf(phase);
    const wide = ctx.measureText(text).width;
    if (wide + 8 > x2 - x) return;
    if (isUnexplained(phase)) {
      ctx.fillStyle = token("panel");
      ctx.fillRect(x + 3, y - 7, wide + 4, 14);
      ctx.fillStyle = token("unexplained");
    } else ctx.fillStyle = inkOn(phaseColor(phase));
    ctx.fillText(text, x + 5, y);
  }

  _drawMarks(ctx, track, top, height) {
    ctx.textBaseline = "alphabetic";
    const marks = track.marks.map(([t, text]) => [this.x(t), text])
      .filter(([x]) => x >= LEFT - 1 && x <= this.width);
    const dense = marks.length * 9 > this.width - LEFT;
    marks.forEach(([x, text], i) => {
      const checkpoint = text.startsWith("checkpoint");
      ctx.fillStyle = checkpoint ? token("warn") : token("ink");
      ctx.globalAlpha = dense ? 0.5 : 1;
      ctx.fillRect(x - 0.5, top - 3, 1, height + 3);
      ctx.globalAlpha = 1;
      if (!dense || checkpoint) drawMark(ctx, x, top, checkpoint);
      const short = text.replace("version ", "v").replace("checkpoint ", "ckpt ");
      const free = (marks[i + 1]?.[0] ?? this.width) - x;
      if (free > ctx.measureText(short).width + 12) ctx.fillText(short, x + 6, top - 2);
    });
  }

  _frame(ctx, title, top, height, most, lines) {
    ctx.fillStyle = token("line");
    ctx.fillRect(LEFT, top + height, this.width - LEFT, 1);
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    ctx.fillStyle = token("ink");
    ctx.fillText(title, 2, top + 1);
    lines.forEach(([text, color], i) => {
      ctx.fillStyle = color;
      ctx.fillRect(2, top + 21 + 14 * i, 12, i ? 1 : 2.5);
      ctx.fillStyle = token("muted");
      ctx.fillText(text, 18, top + 16 + 14 * i);
    });
    ctx.textAlign = "right";
    ctx.fillStyle = token("muted");
    ctx.fillText(String(most), LEFT - 5, top);
    ctx.textBaseline = "bottom";
    ctx.fillText("0", LEFT - 5, top + height + 3);
  }

  _stairs(ctx, times, values, top, height, most, color, width) {
    ctx.strokeStyle = color;
    ctx.lineWidth = width;
    ctx.beginPath();
    let y = null;
    times.forEach((t, i) => {
      if (values[i] === null || values[i] === undefined) return;
      const x = this.x(t);
      if (y !== null) ctx.lineTo(x, y);
      y = top + height - (values[i] / most) * (height - 4);
      ctx.lineTo(x, y);
    });
    if (y !== null) ctx.lineTo(this.x(this.timeline.duration), y);
    ctx.stroke();
  }

  _drawGauges(ctx) {
    const { t, waiting, out } = this.timeline.gauges;
    const most = Math.max(1, ...waiting, ...out);
    this._frame(ctx, "groups", this.queueTop, this.queueHeight - 6, most,
      [["waiting", lineColor(0)], ["out", lineColor(1)]]);
    this._clipped(ctx, this.queueTop, this.queueHeight, () => {
      this._stairs(ctx, t, waiting, this.queueTop, this.queueHeight - 6, most, lineColor(0), 2);
      this._stairs(ctx, t, out, this.queueTop, this.queueHeight - 6, most, lineColor(1), 1);
    });
  }

  /** One value for each step, drawn over the whole step. */
  _drawStaleness(ctx) {
    const { staleness, steps } = this.timeline;
    const most = Math.max(1, ...staleness.map(([, x]) => x ?? 0));
    this._frame(ctx, "staleness", this.staleTop, this.staleHeight - 6, most, []);
    this._clipped(ctx, this.staleTop, this.staleHeight, () => {
      ctx.fillStyle = lineColor(4);
      for (const [t, x] of staleness) {
        const step = steps.find((s) => t >= s.start - 1e-6 && t <= s.end + 1e-6);
        if (!step || !(x >= 0)) continue;
        const high = Math.max(1.5, (x / most) * (this.staleHeight - 10));
        const [left, right] = [this.x(step.start), this.x(step.end)];
        ctx.fillRect(left, this.staleTop + this.staleHeight - 6 - high, Math.max(0.7, right - left - 0.75), high);
      }
    });
  }

  _drawTime(ctx) {
    const { first, last } = this.domain;
    const most = Math.max(2, Math.floor((this.width - LEFT) / 96));
    const step = niceStep(last - first, most);
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    ctx.fillStyle = token("muted");
    for (const t of niceTicks(first, last, most)) {
      const text = step >= 1 ? clock(this.timeline.start + t).split(" ").at(-1) : `+${secondsTick(t, step)}`;
      const half = ctx.measureText(text).width / 2;
      if (this.x(t) - half < LEFT - 4 || this.x(t) + half > this.width) continue;
      ctx.fillText(text, this.x(t), this.height - AXIS + 5);
    }
  }

  _drawCursor() {
    const ctx = fitCanvas(this.over, this.width, this.height);
    if (this.at === null) return;
    ctx.fillStyle = token("ink");
    ctx.globalAlpha = 0.55;
    ctx.fillRect(Math.round(this.x(this.at)), RULER, 1, this.height - AXIS - RULER);
  }

  /** What is at x of track i. */
  _hit(x, i) {
    if (x < LEFT || !this.timeline) return null;
    const t = this.timeAt(x);
    const track = this.timeline.tracks[i] ?? null;
    const k = track ? this.timeline.spanAt(track, t) : -1;
    const near = (NEAR_PX / (this.width - LEFT)) * (this.domain.last - this.domain.first);
    return {
      t, track, span: k < 0 ? null : track.spans[k],
      marks: (track?.marks ?? []).filter(([at]) => Math.abs(at - t) < near).map(([, text]) => text),
      gauge: this.timeline.gaugeAt(t), step: this.timeline.stepAt(t),
    };
  }

  _move(hit, x, y) {
    this.at = hit?.t ?? null;
    if (this.timeline) this._drawCursor();
    this.calls.hover(hit, x, y);
  }

  _listen() {
    const place = (event) => {
      const box = this.over.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.host.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      const i = this.tops?.findIndex((top) => y >= top - MARKS && y <= top + this.trackHeight) ?? -1;
      this._move(this._hit(x, i), event.clientX, event.clientY);
    });
    this.host.addEventListener("pointerleave", () => this._move(null));
    addZoom(this.host, {
      left: LEFT, dragPans: true, least: 0.005, width: () => this.width,
      center: () => this.at,
      domain: () => this.timeline && this.domain,
      whole: () => ({ first: 0, last: Math.max(this.timeline.duration, 1e-3) }),
      show: (domain) => {
        this.domain = domain;
        this.redraw();
      },
      settle: (first, last) => this.calls.settle(first === null ? null : { first, last }),
      click: (x) => {
        const step = x > LEFT && this.timeline.stepAt(this.timeAt(x));
        if (step) this.calls.open(step.step);
      },
    });
    this.host.addEventListener("keydown", (event) => this._key(event));
  }

  _key(event) {
    const tracks = this.timeline?.tracks ?? [];
    if (!tracks.length || event.shiftKey) return;
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const up = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!side && !up) {
      if (event.key !== "Enter" || this.at === null) return;
      const step = this.timeline.stepAt(this.at);
      if (step) this.calls.open(step.step);
      event.preventDefault();
      return;
    }
    if (up) this.track = Math.max(0, Math.min(tracks.length - 1, this.track + up));
    const { spans } = tracks[this.track];
    const from = this.at ?? this.domain.first;
    const i = before(spans.length, (k) => spans[k][1] <= from);
    const next = spans[Math.max(0, Math.min(spans.length - 1, i + (side ?? 0)))];
    if (!next) return;
    const t = next[1] + Math.min(next[2] / 2, (this.domain.last - this.domain.first) / 50);
    const x = Math.max(LEFT, Math.min(this.width, this.x(t)));
    const box = this.over.getBoundingClientRect();
    this._move(this._hit(this.x(t), this.track), box.left + x, box.top + this.tops[this.track] + this.trackHeight);
    event.preventDefault();
  }
}

/** A square for a checkpoint, a triangle for a policy version. */
function drawMark(ctx, x, top, checkpoint) {
  ctx.beginPath();
  if (checkpoint) ctx.rect(x - 3, top - 7, 6, 6);
  else {
    ctx.moveTo(x - 3.5, top - 6);
    ctx.lineTo(x + 3.5, top - 6);
    ctx.lineTo(x, top);
  }
  ctx.fill();
}

/** Dark or light text on a colour of the form #rrggbb. */
function inkOn(color) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10161d" : "#ffffff";
}
