/**
 * Small line charts as SVG, which takes its colours from the theme by itself.
 *
 * plain(x, step)             a number of an axis whose ticks are `step` apart, or of a tooltip.
 * sparkline(points, opts)    one line without axes: points [[x, y|null], ...]; opts: {bound, odd,
 *                            width, height}; odd: the x at which a value was not finite.
 * lineChart(host, opts)      axes, several lines, a bound and the numbers under the pointer or the
 *                            cursor keys; returns {draw(data)}; data: {x, lines: [{name, y, marks}],
 *                            bound, odd}; opts: {label, format(x, step)}. It fills its host.
 */
import { el, setChildren } from "../parts/dom.js";
import { decimals, number } from "../parts/format.js";
import { lineColor, LINE_DASH } from "../charts/palette.js";
import { makeTooltip, niceStep, niceTicks, observeSize, stepTicks } from "../charts/plot.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const MOST_POINTS = 240;

function svg(tag, attrs, ...children) {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, item] of Object.entries(attrs)) {
    if (item !== null && item !== undefined) node.setAttribute(name, String(item));
  }
  node.append(...children);
  return node;
}

export function plain(x, step) {
  const digits = step ? decimals(step) : 6;
  if (digits > 5 || Math.abs(x) >= 1e6) return number(x);
  return x
    .toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })
    .replace("-", "\u2212");
}

export function sparkline(points, { bound = null, odd = [], width = 150, height = 26 } = {}) {
  const known = points.filter(([, y]) => y !== null);
  const box = svg("svg", {
    class: "spark",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
  });
  if (!known.length) return box;
  const [low, high] = extent(
    known.map(([, y]) => y),
    bound,
  );
  const first = points[0][0];
  const wide = Math.max(1, points.at(-1)[0] - first);
  const at = (x) => 2 + ((x - first) / wide) * (width - 8);
  const up = (y) => height - 3 - ((y - low) / (high - low)) * (height - 6);
  if (bound !== null && bound >= low && bound <= high) {
    box.append(svg("line", { class: "spark-bound", x1: 0, x2: width, y1: up(bound), y2: up(bound) }));
  }
  box.append(svg("path", { class: "spark-line", d: pathOf(thin(points), at, up) }));
  for (const x of odd) box.append(svg("path", { class: "spark-odd", d: cross(at(x), 4, 2.5) }));
  const [lastX, lastY] = known.at(-1);
  box.append(svg("circle", { class: "spark-end", cx: at(lastX), cy: up(lastY), r: 2.2 }));
  return box;
}

export function lineChart(host, { label, format }) {
  const tooltip = makeTooltip();
  const legend = el("div", { class: "mini-legend" });
  const area = el("div", { class: "mini-area", tabindex: "0", role: "img", "aria-label": label });
  setChildren(host, legend, area);
  let data = null;
  let frame = null;
  let cursor = -1;

  function paint() {
    const { width, height } = area.getBoundingClientRect();
    if (!data || width < 60 || height < 40) return;
    frame = frameOf(data, width, height);
    setChildren(area, plotted(data, frame, format));
    setChildren(legend, data.lines.length > 1 || data.bound != null ? legendOf(data) : null);
  }

  function point(i) {
    cursor = i;
    area.querySelector(".mini-cursor")?.remove();
    if (i < 0 || !frame) return tooltip.hide();
    const x = frame.at(data.x[i]);
    area.firstChild.append(
      svg("line", { class: "mini-cursor", x1: x, x2: x, y1: frame.top, y2: frame.bottom }),
    );
    const box = area.getBoundingClientRect();
    tooltip.show(box.left + x, box.top + 20, tipOf(data, i, format));
  }

  area.addEventListener("pointermove", (event) => {
    if (!frame) return;
    const x = event.clientX - area.getBoundingClientRect().left;
    point(nearest(data.x, frame.back(x)));
  });
  area.addEventListener("pointerleave", () => point(-1));
  area.addEventListener("blur", () => point(-1));
  area.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !frame) return;
    event.preventDefault();
    const last = data.x.length - 1;
    point(cursor < 0 ? last : Math.max(0, Math.min(last, cursor + by)));
  });
  observeSize(area, paint);
  return {
    draw(next) {
      data = next.x.length ? next : null;
      frame = null;
      if (data) paint();
      else setChildren(area, el("p", { class: "muted mini-none" }, "no numbers yet"));
      point(data ? Math.min(cursor, data.x.length - 1) : -1);
    },
    hide: () => tooltip.hide(),
  };
}

function frameOf({ x, lines, bound }, width, height) {
  const [left, right, top, bottom] = [52, width - 8, 8, height - 20];
  const values = lines.flatMap(({ y }) => y.filter((v) => v !== null));
  const [low, high] = extent(values, bound ?? null);
  const first = x[0];
  const wide = Math.max(1, x.at(-1) - first);
  return {
    left,
    right,
    top,
    bottom,
    low,
    high,
    at: (v) => left + ((v - first) / wide) * (right - left),
    back: (px) => first + ((px - left) / (right - left)) * wide,
    up: (v) => bottom - ((v - low) / (high - low)) * (bottom - top),
  };
}

function plotted(data, frame, format) {
  const { left, right, top, bottom, at, up } = frame;
  const box = svg("svg", { class: "mini-chart", width: "100%", height: "100%", "aria-hidden": "true" });
  const most = Math.max(2, Math.floor((bottom - top) / 34));
  const step = niceStep(frame.high - frame.low, most);
  for (const tick of niceTicks(frame.low, frame.high, most)) {
    box.append(
      svg("line", { class: "mini-grid", x1: left, x2: right, y1: up(tick), y2: up(tick) }),
      svg(
        "text",
        { class: "mini-tick", x: left - 6, y: up(tick) + 4, "text-anchor": "end" },
        format(Math.abs(tick) < step / 1e6 ? 0 : Number(tick.toPrecision(8)), step),
      ),
    );
  }
  for (const tick of stepTicks(data.x[0], data.x.at(-1), Math.max(2, Math.floor((right - left) / 60)))) {
    box.append(
      svg("text", { class: "mini-tick", x: at(tick), y: bottom + 15, "text-anchor": "middle" }, tick),
    );
  }
  if (data.bound != null && data.bound >= frame.low && data.bound <= frame.high) {
    box.append(
      svg("line", { class: "spark-bound", x1: left, x2: right, y1: up(data.bound), y2: up(data.bound) }),
    );
  }
  data.lines.forEach(({ y, marks }, i) => {
    const points = data.x.map((v, k) => [v, y[k]]);
    box.append(
      svg("path", {
        class: "mini-line",
        stroke: lineColor(i),
        d: pathOf(points, at, up),
        "stroke-dasharray": LINE_DASH[i].join(" "),
      }),
    );
    if (!marks && y.filter((v) => v !== null).length > 2) return; // too few points for a line
    for (const [v, value] of points) {
      if (value !== null) box.append(svg("circle", { fill: lineColor(i), cx: at(v), cy: up(value), r: 2.4 }));
    }
  });
  for (const v of data.odd ?? [])
    box.append(svg("path", { class: "spark-odd", d: cross(at(v), top + 4, 3.5) }));
  return box;
}

function legendOf({ lines, bound }) {
  const keys = lines.map(({ name }, i) => [
    name,
    svg("line", {
      x1: 1,
      x2: 21,
      y1: 5,
      y2: 5,
      class: "mini-line",
      stroke: lineColor(i),
      "stroke-dasharray": LINE_DASH[i].join(" "),
    }),
  ]);
  if (bound != null) {
    keys.push(["bound", svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, class: "spark-bound" })]);
  }
  return keys.map(([name, line]) =>
    el(
      "span",
      { class: "legend-key" },
      svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, line),
      name,
    ),
  );
}

function tipOf(data, i, format) {
  const rows = data.lines.map(({ name, y }) =>
    el("tr", null, el("td", null, name), el("td", { class: "num" }, format(y[i]))),
  );
  return [
    el("div", { class: "tip-head" }, el("strong", null, `step ${data.x[i]}`)),
    el("table", { class: "mini-tip" }, el("tbody", null, rows)),
  ];
}

/** Minimum and maximum to draw: with a margin, and with the bound if it is near. */
function extent(values, bound) {
  let [low, high] = [Infinity, -Infinity];
  for (const v of values) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low > high) [low, high] = bound === null ? [0, 1] : [bound, bound];
  const near = 4 * Math.max(high - low, Math.abs(high) / 4);
  if (bound !== null && bound > high && bound - high <= near) high = bound;
  if (bound !== null && bound < low && low - bound <= near) low = bound;
  if (low > 0 && low < 0.4 * high) low = 0;
  const margin = (high > low ? Math.max((high - low) * 0.06, Math.abs(high) * 1e-3) : Math.abs(high) * 0.1) || 0.5;
  return [low === 0 && high > 0 ? 0 : low - margin, high + margin];
}

function pathOf(points, at, up) {
  let text = "";
  let drawing = false;
  for (const [x, y] of points) {
    if (y !== null) text += `${drawing ? "L" : "M"}${at(x).toFixed(1)} ${up(y).toFixed(1)}`;
    drawing = y !== null;
  }
  return text;
}

function cross(x, y, r) {
  return `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`;
}

/** At most MOST_POINTS points: the lowest and highest of each segment, so that no peak is lost. */
function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const stretch = Math.ceil((2 * points.length) / MOST_POINTS);
  const kept = [];
  for (let from = 0; from < points.length; from += stretch) {
    const part = points.slice(from, from + stretch).filter(([, y]) => y !== null);
    if (!part.length) {
      kept.push([points[from][0], null]);
      continue;
    }
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function nearest(xs, x) {
  let best = 0;
  xs.forEach((v, i) => {
    if (Math.abs(v - x) < Math.abs(xs[best] - x)) best = i;
  });
  return best;
}
