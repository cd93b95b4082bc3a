// The tokens of a completion, each shaded by its probability when it was drawn, with a legend
// and the numbers of the token under the pointer or the cursor keys.
//
// One hue that darkens: readable without colour vision, and unlikely tokens are underlined too.

import { el } from "../../parts/dom.js";
import { number } from "../../parts/format.js";
import { visible } from "./sample_text.js";

/** Least probability of each shade; the last takes what is below. */
const SHADES = [
  [0.9, "over 90 %"],
  [0.5, "50\u201390 %"],
  [0.1, "10\u201350 %"],
  [0.01, "1\u201310 %"],
  [0, "under 1 %"],
];

/** Below this probability a token counts as unlikely. */
const UNLIKELY = 0.1;

/**
 * Shows tokens with their shades.
 *
 * @param {[string, number|string|null][]} tokens text and natural log of the probability.
 * @param {number} cut number of tokens left out at the end.
 * @returns {HTMLElement}
 */
export function shadedTokens(tokens, cut) {
  const readout = el("output", { class: "token-readout", "data-testid": "token-readout" });
  const spans = tokens.map(([text, logprob], i) =>
    el(
      "span",
      { class: `token ${isWritten(logprob) ? "environment" : `shade-${shadeOf(logprob)}`}`, "data-i": String(i) },
      visible(String(text).replaceAll("\n", "\u21b5\n")),
    ),
  );
  const box = el(
    "div",
    {
      class: "model-text tokens",
      role: "group",
      tabindex: "0",
      "aria-label":
        "Tokens of the completion, shaded by probability. Left and right move, u goes to the next unlikely one.",
      "data-testid": "tokens",
    },
    ...spans,
  );
  if (cut > 0)
    box.append(el("span", { class: "faint" }, ` \u2026 and ${cut} tokens more that were not recorded`));
  follow(box, spans, tokens, readout);
  return el("div", { class: "token-shading" }, el("div", { class: "token-head" }, legend(tokens), readout), box);
}

/** Wires pointer and keys to the readout; one listener each, however many tokens. */
function follow(box, spans, tokens, readout) {
  const summary = summaryOf(tokens);
  let current = -1;
  const show = (i) => {
    spans[current]?.classList.remove("current");
    current = i;
    spans[i]?.classList.add("current");
    readout.textContent = i < 0 ? summary : describe(tokens, i);
  };
  show(-1);
  box.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) show(Number(token.dataset.i));
  });
  box.addEventListener("pointerleave", () => show(-1));
  box.addEventListener("blur", () => show(-1));
  box.addEventListener("keydown", (event) => {
    const next = target(event.key, current, tokens);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    show(next);
    spans[next]?.scrollIntoView({ block: "nearest" });
  });
}

/** The token that a key moves to, or null. */
function target(key, current, tokens) {
  const last = tokens.length - 1;
  if (last < 0) return null;
  if (key === "ArrowRight") return Math.min(last, current + 1);
  if (key === "ArrowLeft") return Math.max(0, current - 1);
  if (key === "Home") return 0;
  if (key === "End") return last;
  if (key !== "u") return null;
  const after = (i) => (current + 1 + i) % tokens.length;
  for (let i = 0; i < tokens.length; i += 1) {
    if (isUnlikely(tokens[after(i)][1])) return after(i);
  }
  return null;
}

function legend(tokens) {
  const keys = SHADES.map(([, text], shade) =>
    el(
      "span",
      { class: "legend-key" },
      el("span", { class: `token shade-${shade} swatch`, "aria-hidden": "true" }, "ab"),
      text,
    ),
  );
  if (tokens.some(([, logprob]) => isWritten(logprob)))
    keys.push(
      el(
        "span",
        { class: "legend-key" },
        el("span", { class: "token environment swatch", "aria-hidden": "true" }, "ab"),
        "the environment",
      ),
    );
  return el(
    "div",
    { class: "token-legend", "data-testid": "token-legend" },
    el("span", { class: "faint" }, "probability when drawn"),
    ...keys,
  );
}

function summaryOf(tokens) {
  const known = tokens.map(([, logprob]) => logprob).filter(Number.isFinite);
  if (!known.length) return `${tokens.length} tokens, no logprobs recorded`;
  const mean = known.reduce((sum, logprob) => sum + logprob, 0) / known.length;
  const least = known.reduce((a, b) => Math.min(a, b));
  const unlikely = tokens.filter(([, logprob]) => isUnlikely(logprob)).length;
  return (
    `${tokens.length} tokens \u00b7 mean logprob ${number(mean)} \u00b7 lowest ${number(least)} \u00b7 ` +
    `${unlikely} under 10 %`
  );
}

function describe(tokens, i) {
  const [text, logprob] = tokens[i];
  const shown = JSON.stringify(String(text).slice(0, 60));
  if (isWritten(logprob)) return `token ${i + 1} of ${tokens.length} \u00b7 ${shown} \u00b7 of the environment`;
  const chance = Number.isFinite(logprob) ? ` \u00b7 probability ${percent(Math.exp(logprob))}` : "";
  return `token ${i + 1} of ${tokens.length} \u00b7 ${shown} \u00b7 logprob ${number(logprob, 4)}${chance}`;
}

function percent(p) {
  if (p >= 0.1) return `${(100 * p).toFixed(1)} %`;
  return `${(100 * p).toPrecision(2)} %`;
}

function isUnlikely(logprob) {
  return Number.isFinite(logprob) && Math.exp(logprob) < UNLIKELY;
}

/** Whether an environment wrote the token: none was drawn, so that it has no logprob. */
function isWritten(logprob) {
  return logprob === null;
}

/** Index into SHADES, or `unknown`. */
function shadeOf(logprob) {
  if (!Number.isFinite(logprob)) return "unknown";
  const p = Math.exp(logprob);
  return SHADES.findIndex(([least]) => p >= least);
}
