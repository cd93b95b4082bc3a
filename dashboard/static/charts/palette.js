/**
 * Colours: of phases, of lines, and of the page as the canvas needs them.
 *
 * phaseColor(phase)       CSS colour in the theme shown. Built on Okabe and Ito's eight; neighbours
 *                         in the stack differ in lightness too, so order and lightness tell them
 *                         apart if hue does not. Waits are grey; time without a phase is
 *                         `unexplained` (or `other` on the critical path): hatched magenta.
 * phaseFill(ctx, phase)   the same as a fillStyle; a hatch for `unexplained`.
 * STACK                   phases in the order of the stack.
 * isUnexplained(phase)
 * phaseTitle(phase)       "forward backward"; store.phaseTitle knows the catalog's titles.
 * swatch(phase)           a small square for legends.
 * lightMark(level, word)  a traffic light: shape, colour and word; level: ok, warn, bad, info, none.
 * lineColor(i)            for the i-th line of a chart; LINE_DASH[i] goes with it.
 * token(name)             resolved value of the CSS custom property --name, such as token("ink").
 * theme() / setTheme("light"|"dark") / onTheme(f)
 */
import { el } from "../parts/dom.js";

const PHASE_COLORS = {
  //                    light      dark
  prefill: ["#7cc4ee", "#8accf0"],
  decode: ["#0072b2", "#1f86c9"],
  reward: ["#4fc29f", "#5ed3ae"],
  environment: ["#8fb339", "#a3c94b"],
  serialise: ["#b5a21c", "#b8a62a"],
  wire: ["#f0d43a", "#f0e442"],
  queue_wait: ["#7d8794", "#5d6673"],
  weights_wait: ["#aeb6c1", "#929ba8"],
  weights_swap: ["#6b4413", "#7d5424"],
  forward_backward: ["#e2711d", "#ee7f2d"],
  optimizer: ["#ffc99a", "#ffd3a8"],
  publish: ["#006b50", "#0f8a69"],
  compile: ["#3d4450", "#c5ccd6"],
  checkpoint: ["#a58fd0", "#a58fd0"],
  eval: ["#4b2e83", "#6f51ad"],
  idle: ["#dfe3e8", "#2b333e"],
};
const UNEXPLAINED = ["#d1007f", "#ff4db2"];
/** Phases in the order of the stack: those of the ledger, unexplained time last. */
export const STACK = [...Object.keys(PHASE_COLORS), "unexplained", "other"];

const LINES = [
  ["#0072b2", "#56b4e9"], ["#d55e00", "#f28a3c"], ["#009e73", "#3cc79c"], ["#8a6d00", "#e0c53a"],
  ["#5a3d94", "#b39ae3"], ["#4d5663", "#c3cad3"],
];
export const LINE_DASH = [[], [6, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2]];

const listeners = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
let resolved = new Map();
let hatches = new Map();

export function isUnexplained(phase) {
  return phase === "unexplained" || phase === "other";
}

const shade = ([light, night]) => (theme() === "dark" ? night : light);

export function phaseColor(phase) {
  return shade(isUnexplained(phase) ? UNEXPLAINED : PHASE_COLORS[phase] ?? LINES[5]);
}

export function phaseTitle(phase) {
  if (phase === "forward_backward") return "forward + backward";
  return isUnexplained(phase) ? "unexplained" : phase.replaceAll("_", " ");
}

export function phaseFill(ctx, phase) {
  if (!isUnexplained(phase)) return phaseColor(phase);
  const key = theme();
  if (!hatches.has(key)) hatches.set(key, ctx.createPattern(hatchTile(), "repeat"));
  return hatches.get(key);
}

function hatchTile() {
  const size = 8;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = shade(UNEXPLAINED);
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = theme() === "dark" ? "#4a0029" : "#ffe3f3";
  pen.lineWidth = 1.8;
  pen.beginPath();
  for (const start of [-size, 0, size]) {
    pen.moveTo(start - 1, size + 1);
    pen.lineTo(start + size + 1, -1);
  }
  pen.stroke();
  return tile;
}

export function swatch(phase) {
  const style = isUnexplained(phase) ? {} : { background: phaseColor(phase) };
  const name = isUnexplained(phase) ? "swatch hatched" : "swatch";
  return el("span", { class: name, "aria-hidden": "true", style });
}

const MARKS = { ok: "●", warn: "▲", bad: "✖", info: "◆", none: "○" };
/** The default words of a traffic light. */
export const WORDS = { ok: "fine", warn: "look", bad: "bad", info: "note", none: "no data" };

export function lightMark(level, word = WORDS[level]) {
  return el("span", { class: `light ${level}`, data: { light: level } },
    el("span", { class: "light-shape", "aria-hidden": "true" }, MARKS[level] ?? MARKS.none),
    word && el("span", { class: "light-word" }, word));
}

export function lineColor(i) {
  return shade(LINES[i % LINES.length]);
}

/** Custom properties hold light-dark(...), so the browser resolves them on an element. */
export function token(name) {
  if (!resolved.has(name)) {
    const probe = el("span", { style: { color: `var(--${name})`, display: "none" } });
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}

export function theme() {
  return document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
}

export function setTheme(wanted) {
  document.documentElement.dataset.theme = wanted;
  changed();
}

export function onTheme(f) {
  listeners.add(f);
}

function changed() {
  resolved = new Map();
  hatches = new Map();
  for (const f of listeners) f(theme());
}

dark.addEventListener("change", changed);
