/**
 * Completions of one prompt over time: two of them side by side, with their different words marked.
 */
import { getJSON, samplePath } from "../../api.js";
import { el, setChildren, setText } from "../../parts/dom.js";
import { number, percent, plural, value } from "../../parts/format.js";
import { textBox, visible } from "./sample_text.js";
import { diff } from "./text_diff.js";

/** Characters of each text that are compared and shown. */
const MOST_CHARS = 12_000;

/**
 * Shows the comparison in `place`.
 *
 * @param {HTMLElement} place
 * @param {object} record the completion chosen, in full.
 * @param {string|null} other id of the one beside it; the one before it in time if null.
 * @param {(id: string) => void} onPick called with the other completion that the viewer picks.
 */
export async function samePrompt(place, record, other, onPick) {
  setChildren(place, el("p", { class: "muted" }, "Looking for the same prompt …"));
  let items;
  try {
    ({ items } = await getJSON(`${samplePath(record.id)}/same`));
  } catch (error) {
    setChildren(place, el("p", { class: "refusal", role: "alert" }, error.message));
    return;
  }
  const rest = items.filter((item) => item.id !== record.id);
  if (!rest.length) {
    setChildren(
      place,
      el(
        "p",
        { class: "muted" },
        "This prompt was recorded once only, so there is nothing to set beside it.",
      ),
    );
    return;
  }
  const start = rest.find((item) => item.id === other) ?? before(items, record.id) ?? rest[0];
  const sides = el("div", { class: "sides" });
  const common = el("p", { class: "muted", role: "status" });
  const buttons = items.map((item) => occurrence(item, record.id));
  const strip = el(
    "div",
    { class: "occurrences", role: "group", "aria-label": "completions of this prompt, oldest first" },
    buttons,
  );
  const choose = (id) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.id === id));
    return compare(sides, common, record, id);
  };
  strip.addEventListener("click", (event) => {
    const id = event.target.closest("button")?.dataset.id;
    if (!id || id === record.id) return;
    onPick(id);
    choose(id);
  });
  setChildren(
    place,
    textBox(record.prompt ?? record.question ?? "", "prompt"),
    el(
      "p",
      { class: "muted" },
      `${plural(items.length, "completion", "completions")} by step, \u25cf with and \u25cb without reward. ` +
        `Choose one to set beside that of step ${record.step}.`,
    ),
    strip,
    common,
    sides,
  );
  await choose(start.id);
}

/** One completion of the prompt as a button: its step, and whether its reward is above 0. */
function occurrence(item, chosen) {
  const reward = value(item.total_reward);
  const mark = item.reward_error ? "\u2716" : reward > 0 ? "\u25cf" : "\u25cb";
  const sample = item.sample_index == null ? "" : `, sample ${item.sample_index}`;
  const about = `step ${item.step}${sample}: reward ${number(item.total_reward)}`;
  return el(
    "button",
    {
      type: "button",
      class: `occurrence ${item.id === chosen ? "chosen" : ""}`,
      title: about,
      "aria-label": about,
      "aria-pressed": "false",
      disabled: item.id === chosen,
      "data-testid": "occurrence",
      data: { id: item.id },
    },
    el("span", { class: "occurrence-mark" }, mark),
    item.step,
  );
}

async function compare(sides, common, record, otherId) {
  let other;
  try {
    other = await getJSON(samplePath(otherId));
  } catch (error) {
    setChildren(sides, el("p", { class: "refusal", role: "alert" }, error.message));
    return;
  }
  const [left, right] = other.step <= record.step ? [other, record] : [record, other];
  const texts = [left, right].map((one) => (one.completion ?? "").slice(0, MOST_CHARS));
  const found = diff(...texts);
  const pieces = found ? [found.before, found.after] : texts.map((text) => [[text, false]]);
  setText(
    common,
    found
      ? `${percent(found.same)} of the words are the same; those that only one has are marked`
      : "too long to mark what differs",
  );
  setChildren(sides, side(left, pieces[0], record.id), side(right, pieces[1], record.id));
}

function side(one, pieces, chosen) {
  const text = pieces.map(([piece, lone]) =>
    lone ? el("mark", { class: "lone" }, visible(piece)) : visible(piece),
  );
  const cut = (one.completion ?? "").length > MOST_CHARS;
  return el(
    "article",
    { class: "side-text", "data-testid": "same-prompt-side", data: { id: one.id } },
    el(
      "h3",
      null,
      `Step ${one.step}`,
      one.id === chosen && el("span", { class: "muted" }, " (the one chosen)"),
    ),
    el(
      "p",
      { class: "muted" },
      [
        `reward ${number(one.total_reward)}`,
        one.finish_reason,
        one.completion_tokens != null && plural(one.completion_tokens, "token", "tokens"),
        one.policy_version != null && `version ${one.policy_version}`,
      ]
        .filter(Boolean)
        .join(" · "),
    ),
    el(
      "div",
      { class: "model-text", tabindex: "0", role: "group", "aria-label": `completion of step ${one.step}` },
      text,
      cut && " …",
      !one.completion && el("span", { class: "faint" }, "(empty)"),
    ),
  );
}

/** The newest one that is older than the one chosen. */
function before(items, id) {
  return items[items.findIndex((item) => item.id === id) - 1];
}
