/**
 * Shared by the canvas charts (breakdown, timeline): sharp canvases, ticks, a tooltip.
 *
 * fitCanvas(canvas, width, height, clear)  sizes it in CSS pixels for this screen; returns its context.
 * niceTicks(low, high, most)        round numbers in between, at most about `most`.
 * stepTicks(first, last, most)      the same, whole numbers only.
 * secondsTick(x, step)              a tick of a seconds axis, with the decimals that `step` needs.
 * fontOf(px)                        the page's font for a canvas.
 * makeTooltip()                     {show(x, y, ...children), hide()}; x, y in viewport pixels.
 * observeSize(node, f)              f() in a frame after the size of node has changed; returns what ends it.
 * sizesSeen()                       a promise: what has its size now was drawn with it.
 */
import { el, setChildren } from "../parts/dom.js";
import { decimals } from "../parts/format.js";

export function fitCanvas(canvas, width, height, clear = true) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  if (clear) ctx.clearRect(0, 0, width, height);
  return ctx;
}

export function niceStep(span, most) {
  const raw = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw * 0.999);
}

export function niceTicks(low, high, most) {
  if (!(high > low)) return [low];
  const step = niceStep(high - low, most);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

export function stepTicks(first, last, most) {
  const step = Math.max(1, Math.round(niceStep(Math.max(1, last - first), most)));
  const ticks = [];
  for (let s = Math.ceil(first / step) * step; s <= last; s += step) ticks.push(s);
  return ticks;
}

export function secondsTick(x, step) {
  return `${x.toFixed(decimals(step))} s`;
}

export function fontOf(px) {
  return `${px}px ${getComputedStyle(document.body).fontFamily}`;
}

export function makeTooltip() {
  const node = el("div", { class: "tooltip", role: "presentation", hidden: true });
  document.body.append(node);
  return {
    node,
    show(x, y, ...children) {
      setChildren(node, children);
      node.hidden = false;
      const { width, height } = node.getBoundingClientRect();
      const right = x + 14 + width > innerWidth - 4;
      node.style.left = `${Math.max(4, right ? x - 14 - width : x + 14)}px`;
      node.style.top = `${Math.max(4, Math.min(y + 10, innerHeight - height - 4))}px`;
    },
    hide() {
      node.hidden = true;
    },
  };
}

export function observeSize(node, f) {
  let planned = false;
  const observer = new ResizeObserver(() => {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      f();
    });
  });
  observer.observe(node);
  return () => observer.disconnect();
}

export async function sizesSeen() {
  // A frame is laid out, then observers are called, then those plan a frame, and then it is over.
  for (let frame = 0; frame < 3 && !document.hidden; frame++) {
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
}
