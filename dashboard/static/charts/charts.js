/**
 * Small line charts over steps (uPlot): several series, an interval as band, minimum and maximum
 * of a bin as shade, and a mark for a value that is not finite.
 *
 * makeChart(store, spec) -> {node, draw(columns), redraw(), destroy()}
 *   spec: {id, title, unit, series: [{name, label, band?: [low, high]}] or (columns) -> series,
 *          why?: (columns) -> text|null to show instead of a chart, zoom?(first, last), sync?: key,
 *          zero?: true for an axis that begins at 0, columnsOf?: (series) -> Columns of that series,
 *          marks?: [{step, text}] vertical lines}
 *   node: a <figure> that fills its place; draw() creates, fills or resizes the chart.
 *   Series are told apart by colour, dash and label. Values of the steps under the cursor are in the
 *   caption; all charts of one sync key share the cursor.
 */
import { el, setChildren, setText } from "../parts/dom.js";
import * as format from "../parts/format.js";
import { LINE_DASH, lineColor, token } from "./palette.js";
import { fontOf, observeSize } from "./plot.js";

const DOTS_UP_TO = 16; // few or rare values need dots to be visible
const RARE = 0.25;
const SHADE = 0.16;

export function makeChart(store, spec) {
  const values = el("span", { class: "chart-values" });
  const odd = el("span", { class: "chart-odd", hidden: true, role: "note" });
  const plot = el("div", { class: "chart-plot", tabindex: 0, role: "application", "aria-roledescription": "chart",
    "aria-label": `${spec.title} by step`, on: { keydown: (event) => key(event, u, spec) } });
  const why = el("p", { class: "chart-why muted", hidden: true });
  const heading = el("h3", null, spec.title);
  const node = el("figure", { class: "chart", "data-testid": `chart-${spec.id}`, role: "group",
    "aria-label": spec.title },
    el("figcaption", null, heading, values, odd), plot, why);
  const chart = { node, draw, redraw, destroy, shown: [], columns: null };
  let u = null;
  let layout = "";
  const labels = [];

  const of = (series) => spec.columnsOf?.(series) ?? chart.columns;
  const columnsOf = (i) => of(chart.shown[i]);

  function draw(columns) {
    chart.columns = columns;
    const wanted = typeof spec.series === "function" ? spec.series(columns) : spec.series;
    chart.shown = wanted.filter((s) => has(of(s), s.name));
    const reason = chart.shown.length ? null : spec.why?.(columns) ?? missing(columns);
    why.hidden = !reason;
    plot.hidden = Boolean(reason);
    if (reason) {
      setText(why, reason);
      setChildren(values);
      layout = "";
      showOdd();
      return;
    }
    const now = chart.shown.map((s) => s.name).join() + columns.bin;
    if (now !== layout) build();
    layout = now;
    u.setData(dataOf(chart, columnsOf));
    showOdd();
    showValues(null);
  }

  function build() {
    u?.destroy();
    setChildren(plot);
    setChildren(values, chart.shown.map((s, i) => {
      labels[i] = el("strong", null);
      return el("span", { class: "chart-value", title: s.name },
        sample(i), chart.shown.length > 1 || s.label ? el("span", { class: "muted" }, s.label) : null, labels[i]);
    }));
    u = new uPlot(optionsOf(chart, spec, columnsOf, showValues), dataOf(chart, columnsOf), plot);
  }

  function showValues(i) {
    chart.shown.forEach((s, k) => {
      const x = i === null ? columnsOf(k).latest(s.name)?.value : valueAt(u, k + 1, i);
      setText(labels[k], format.withUnit(x ?? null, spec.unit));
    });
  }

  function showOdd() {
    const marks = oddMarks(chart, columnsOf);
    odd.hidden = !marks.length;
    if (!marks.length) return;
    const [step, text] = marks.at(-1);
    setText(odd, `✕ ${text} at step ${step}${marks.length > 1 ? ` and ${marks.length - 1} more` : ""}`);
    odd.title = marks.map(([s, t]) => `${t} at step ${s}`).join(", ");
  }

  function destroy() {
    unobserve();
    u?.destroy(); // leaves the group of its sync key
  }

  function redraw() {
    if (u && layout) {
      u.redraw();
      values.querySelectorAll(".line-sample").forEach((line, i) => paintSample(line, i));
    }
  }

  const unobserve = observeSize(plot, () => {
    const { clientWidth: width, clientHeight: height } = plot;
    if (u && layout && width && height) u.setSize({ width, height });
  });
  return chart;
}

/** Left and right move the cursor of all charts of the group; plus, minus and 0 zoom. */
function key(event, u, spec) {
  if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
  const steps = u.data[0];
  const now = u.cursor.idx;
  const to = { ArrowLeft: (now ?? steps.length) - 1, ArrowRight: (now ?? -1) + 1, Home: 0,
    End: steps.length - 1 }[event.key];
  const factor = { "+": 0.6, "=": 0.6, "-": 1 / 0.6 }[event.key];
  if (to !== undefined) {
    const i = Math.max(0, Math.min(steps.length - 1, to));
    u.setCursor({ left: u.valToPos(steps[i], "x"), top: 10 });
  } else if (factor && spec.zoom) {
    const [first, last] = [steps[0], steps.at(-1) + 1];
    const middle = now === null || now === undefined ? (first + last) / 2 : steps[now];
    spec.zoom(Math.max(0, middle - (middle - first) * factor), middle + (last - middle) * factor);
  } else if ((event.key === "0" || event.key === "Escape") && spec.zoom) spec.zoom(null, null);
  else return;
  event.preventDefault();
}

function has(columns, name) {
  return columns.metrics[name]?.some((x) => x !== null) || columns.nonfinite.get(name)?.size > 0;
}

function missing(columns) {
  return columns.steps.length ? "Not measured in these steps." : "Nothing yet.";
}

function sample(i) {
  const line = el("span", { class: "line-sample", "aria-hidden": "true" });
  paintSample(line, i);
  return line;
}

function paintSample(line, i) {
  const solid = !LINE_DASH[i % LINE_DASH.length].length;
  line.style.borderTop = `2px ${solid ? "solid" : i % 2 ? "dashed" : "dotted"} ${lineColor(i)}`;
}

/**
 * The steps that any series has, and the values of each at them. To uPlot null is a gap in the line,
 * for a value that is not finite; undefined, for a step without this metric, is skipped.
 */
function dataOf(chart, columnsOf) {
  const steps = chart.shown.map((_, i) => columnsOf(i).steps);
  const own = chart.shown.map((s, i) => {
    const marks = columnsOf(i).nonfinite.get(s.name);
    return columnsOf(i).metrics[s.name].map((x, k) => x ?? (marks?.has(steps[i][k]) ? null : undefined));
  });
  if (steps.every((list) => list === steps[0])) return [steps[0], ...own];
  const all = [...new Set(steps.flat())].sort((a, b) => a - b);
  const place = new Map(all.map((step, i) => [step, i]));
  return [all, ...own.map((column, k) => {
    const spread = new Array(all.length).fill(undefined);
    column.forEach((x, i) => (spread[place.get(steps[k][i])] = x));
    return spread;
  })];
}

function oddMarks(chart, columnsOf) {
  const marks = new Map();
  chart.shown.forEach((s, i) => {
    const { steps, nonfinite } = columnsOf(i);
    for (const [step, text] of nonfinite.get(s.name) ?? []) if (step >= steps[0]) marks.set(step, text);
  });
  return [...marks].sort(([a], [b]) => a - b);
}

function optionsOf(chart, spec, columnsOf, showValues) {
  const axis = { stroke: () => token("muted"), font: fontOf(11), ticks: { show: false },
    grid: { stroke: () => token("grid"), width: 1 } };
  return {
    width: 100, height: 60, padding: [6, 8, 0, 0], legend: { show: false },
    cursor: {
      y: false, drag: { x: Boolean(spec.zoom), y: false, setScale: false }, points: {
        size: 7, width: 0, fill: (_, i) => lineColor(i - 1), stroke: (_, i) => lineColor(i - 1),
      },
      sync: spec.sync ? { key: spec.sync, setSeries: false } : undefined,
    },
    scales: { x: { time: false, range: (_, low, high) => (high > low ? [low, high] : [low - 1, low + 1]) },
      y: { range: () => rangeOf(chart, spec, columnsOf) } },
    axes: [
      { ...axis, size: 20, gap: 4, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] },
      { ...axis, size: 46, gap: 4, space: 28, values: (_, ticks, i, space, step) => ticks.map((t) => tickText(t, spec.unit, step)) },
    ],
    series: [{}, ...chart.shown.map((s, i) => ({
      label: s.label, stroke: () => lineColor(i), width: 1.5, dash: LINE_DASH[i % LINE_DASH.length],
      points: { size: 5, fill: () => token("panel"), show: hasFew },
    }))],
    hooks: {
      drawAxes: [(u) => drawBands(u, chart, columnsOf)],
      draw: [(u) => drawMarks(u, chart, spec, columnsOf)],
      setCursor: [(u) => showValues(u.cursor.idx ?? null)],
      setSelect: [(u) => {
        const [from, to] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        if (to - from >= 1) spec.zoom?.(from, to + 1);
      }],
    },
  };
}

function hasFew(u, i) {
  const known = u.data[i].reduce((n, x) => n + isNumber(x), 0);
  return known <= DOTS_UP_TO || known < RARE * u.data[i].length;
}

/** The value at a step; for a rarely measured series the last one before it. */
function valueAt(u, k, i) {
  if (!hasFew(u, k)) return u.data[k][i];
  return u.data[k].slice(0, i + 1).findLast(isNumber);
}

/** A tick with the decimals that the distance between two ticks needs. */
function tickText(x, unit, step) {
  if (unit === "fraction" || unit === "share") return format.percent(x, format.decimals(100 * step));
  if (Math.abs(x) >= 10_000) return `${format.number(x / 1000)}k`;
  const short = step >= 1000 || (step < 1e-3 && Math.abs(x) < 100 * step);
  return short ? format.number(x, 3) : x.toFixed(format.decimals(step)).replace("-", "−");
}

/** Minimum and maximum of everything drawn, bands included, with a margin. */
function rangeOf(chart, spec, columnsOf) {
  let [low, high] = spec.zero ? [0, 0] : [Infinity, -Infinity];
  const look = (column) => {
    for (const x of column ?? []) {
      if (x === null || x === undefined) continue;
      if (x < low) low = x;
      if (x > high) high = x;
    }
  };
  chart.shown.forEach((s, i) => {
    const columns = columnsOf(i);
    look(columns.metrics[s.name]);
    for (const column of bandOf(columns, s)) look(column);
  });
  if (!(high >= low)) return [0, 1];
  if (low === 0 && high === 0) return [0, spec.unit === "fraction" ? 0.01 : 1];
  const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [spec.zero || (low >= 0 && low - room < 0) ? Math.min(0, low) : low - room, high + room];
}

/** [low, high] columns around a series, or nothing. */
function bandOf(columns, series) {
  if (series.band) return series.band.map((name) => columns.metrics[name] ?? []);
  return columns.bin > 1 && columns.low[series.name] ? [columns.low[series.name], columns.high[series.name]] : [];
}

function drawBands(u, chart, columnsOf) {
  const { ctx } = u;
  chart.shown.forEach((s, k) => {
    const columns = columnsOf(k);
    const [low, high] = bandOf(columns, s);
    if (!low) return;
    const known = columns.steps.map((_, i) => i).filter((i) => isNumber(low[i]) && isNumber(high[i]));
    const at = (column, i) => [u.valToPos(columns.steps[i], "x", true), u.valToPos(column[i], "y", true)];
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = lineColor(k);
    ctx.globalAlpha = SHADE;
    ctx.beginPath();
    for (const i of known) ctx.lineTo(...at(high, i));
    for (const i of known.toReversed()) ctx.lineTo(...at(low, i));
    ctx.fill();
    if (s.band && known.length <= 4 * DOTS_UP_TO) {
      ctx.globalAlpha = 0.7;
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      for (const i of known) {
        ctx.moveTo(...at(low, i));
        ctx.lineTo(...at(high, i));
      }
      ctx.stroke();
    }
    ctx.restore();
  });
}

const isNumber = (x) => x !== null && x !== undefined;

/** A line and a cross at each value that is not finite; and the spec's marks. */
function drawMarks(u, chart, spec, columnsOf) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.font = u.axes[0].font[0];
  const line = (step, color, dash) => {
    const x = u.valToPos(step, "x", true);
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(dash.map((d) => d * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    return x;
  };
  for (const { step } of spec.marks ?? []) line(step, token("ink"), [4, 3]);
  for (const [step] of oddMarks(chart, columnsOf)) {
    const x = line(step, token("bad"), [2, 3]);
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    ctx.fillText("✕", x, bbox.top + bbox.height - 1);
  }
  ctx.restore();
}
