// Text of a model, made visible: special tokens as chips, and marks for characters that a browser
// would hide, interpret, or draw over others. All of it becomes text nodes.

import { el } from "../../parts/dom.js";

/** Characters shown before the viewer asks for all. */
const SHOWN_AT_FIRST = 12_000;

/** Tokens such as <|im_end|> or </s>. */
const SPECIAL = String.raw`<\|[^|<>\s]{1,60}\|>|</?s>|</?think>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>`;
/** Control and format characters but tab and line feed (among them those that turn the direction of
 *  text), separators of lines, and halves of surrogate pairs. */
const HIDDEN = String.raw`(?:(?![\t\n\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}])+`;
const NOTABLE = new RegExp(`(?<special>${SPECIAL})|(?<hidden>${HIDDEN})`, "gu");

/**
 * Shows a text in a box that keeps its white space.
 *
 * @param {string} text
 * @param {string} label name of the box for screen readers.
 * @returns {HTMLElement}
 */
export function textBox(text, label) {
  const box = el("div", { class: "model-text", role: "group", "aria-label": label, tabindex: "0" });
  if (text.length <= SHOWN_AT_FIRST) {
    box.append(visible(text));
    return box;
  }
  const rest = el(
    "button",
    { type: "button", class: "button small" },
    `Show all ${text.length.toLocaleString("en")} characters`,
  );
  rest.addEventListener("click", () => box.replaceChildren(visible(text)));
  box.append(visible(text.slice(0, SHOWN_AT_FIRST)), "\u2026 ", rest);
  return box;
}

/**
 * The nodes of a text.
 *
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function visible(text) {
  const nodes = document.createDocumentFragment();
  let from = 0;
  for (const match of text.matchAll(NOTABLE)) {
    if (match.index > from) nodes.append(text.slice(from, match.index));
    const { special, hidden } = match.groups;
    nodes.append(
      special !== undefined
        ? el("span", { class: "special-token" }, special)
        : el("span", { class: "hidden-character", title: "not printable" }, codes(hidden)),
    );
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.append(text.slice(from));
  return nodes;
}

/** One line of a text for lists: no white space but single blanks, nothing hidden. */
export function oneLine(text, most = 240) {
  return text
    .slice(0, most)
    .replace(/\s+/gu, " ")
    .replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, "\ufffd")
    .trim();
}

/** Names characters by number, such as U+202E; of a long run the first few. */
function codes(text) {
  const points = [...text];
  const named = points
    .slice(0, 6)
    .map((c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
  return named.join(" ") + (points.length > 6 ? ` \u00d7${points.length}` : "");
}
