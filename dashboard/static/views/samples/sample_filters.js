/**
 * Which completions are listed.
 *
 * FIELDS                     names of the parameters of /api/samples that the viewer sets.
 * COMPLETIONS_OF             parameters that list the completions of an alert or check, by its id.
 * makeFilters(onChange)      {node, set(query)}: onChange(query) a moment after the last key; a field
 *                            that is invalid is marked and left out.
 */
import { el } from "../../parts/dom.js";

export const FIELDS = [
  "q",
  "kind",
  "first",
  "last",
  "prompt",
  "reward_min",
  "reward_max",
  "finish",
  "why",
  "disagree",
  "error",
];
export const COMPLETIONS_OF = {
  disagreement: { disagree: 1 },
  reward_errors: { error: 1 },
  truncated: { finish: "length" },
  aborted: { finish: "aborted" },
};
const PAUSE_MS = 250;
const SELECTS = {
  kind: [
    "kind",
    [
      ["", "train and eval"],
      ["train", "train"],
      ["eval", "eval"],
    ],
  ],
  finish: [
    "finish reason",
    [
      ["", "any finish"],
      ["stop", "stop"],
      ["length", "length"],
      ["aborted", "aborted"],
    ],
  ],
  why: [
    "why it was kept",
    [
      ["", "kept for any reason"],
      ["first", "first of the step"],
      ["disagreement", "parsers disagree"],
      ["reward_error", "reward error"],
    ],
  ],
};
const CHECKS = {
  disagree: ["parsers disagree", "strict and lenient parser found different answers"],
  error: ["reward errors", "a reward function failed"],
};
const NUMBERS = {
  first: ["step from", "any", 0],
  last: ["step to", "any", 0],
  prompt: ["prompt id", "any", 0],
  reward_min: ["reward from", "any", null],
  reward_max: ["reward to", "any", null],
};
const RANGES = [
  ["first", "last"],
  ["reward_min", "reward_max"],
];

export function makeFilters(onChange) {
  const inputs = {
    q: el("input", {
      type: "search",
      id: "sample-search",
      placeholder: "Search prompt, completion, answer …",
      "aria-label": "search prompts, completions and answers",
      autocomplete: "off",
      spellcheck: "false",
    }),
  };
  for (const [name, [label, options]] of Object.entries(SELECTS)) {
    inputs[name] = el(
      "select",
      { id: `sample-${name}`, "aria-label": label },
      options.map(([key, text]) => el("option", { value: key }, text)),
    );
  }
  for (const [name, [label, any, least]] of Object.entries(NUMBERS)) {
    inputs[name] = el("input", {
      type: "number",
      id: `sample-${name}`,
      "aria-label": label,
      placeholder: any,
      min: least,
      step: least === null ? "any" : 1,
      class: "narrow",
    });
  }
  for (const name of Object.keys(CHECKS))
    inputs[name] = el("input", { type: "checkbox", id: `sample-${name}` });
  const clear = el("button", { type: "button", class: "button small", id: "sample-clear" }, "Clear");
  const node = el(
    "form",
    { class: "sample-filters", role: "search", "aria-label": "filter completions" },
    el("div", { class: "filter-line" }, inputs.q, inputs.kind, inputs.finish),
    el(
      "div",
      { class: "filter-line" },
      pair("step", inputs.first, inputs.last),
      el("label", { class: "filter-pair" }, "prompt ", inputs.prompt),
      pair("reward", inputs.reward_min, inputs.reward_max),
    ),
    el(
      "div",
      { class: "filter-line" },
      inputs.why,
      Object.entries(CHECKS).map(([name, [text, about]]) =>
        el("label", { class: "filter-check", title: about }, inputs[name], text),
      ),
      clear,
    ),
  );
  let timer = 0;

  function read() {
    const query = {};
    for (const [from, to] of RANGES) {
      const turned =
        inputs[from].value && inputs[to].value && Number(inputs[from].value) > Number(inputs[to].value);
      inputs[to].setCustomValidity(turned ? "must not be below the first number" : "");
    }
    for (const name of FIELDS) {
      const input = inputs[name];
      const bad = !input.validity.valid;
      input.setAttribute("aria-invalid", String(bad));
      input.title = bad ? input.validationMessage : "";
      const text = input.type === "checkbox" ? (input.checked ? "1" : "") : input.value.trim();
      if (text && !bad) query[name] = text;
    }
    return query;
  }

  function changed(pause) {
    clearTimeout(timer);
    timer = setTimeout(() => onChange(read()), pause);
  }

  function set(query) {
    clearTimeout(timer);
    for (const name of FIELDS) {
      if (inputs[name].type === "checkbox") inputs[name].checked = query[name] === "1";
      else inputs[name].value = query[name] ?? "";
      inputs[name].setAttribute("aria-invalid", "false");
    }
    mark(query);
  }

  function mark(query) {
    clear.disabled = !Object.keys(query).length;
    for (const name of FIELDS) inputs[name].classList.toggle("used", name in query);
  }

  node.addEventListener("input", (event) => {
    mark(read());
    changed(event.target.matches("select, [type=checkbox]") ? 0 : PAUSE_MS);
  });
  node.addEventListener("submit", (event) => {
    event.preventDefault();
    changed(0);
  });
  clear.addEventListener("click", () => {
    set({});
    changed(0);
    inputs.q.focus();
  });
  return { node, set };
}

function pair(name, from, to) {
  return el("span", { class: "filter-pair", role: "group", "aria-label": name }, `${name} `, from, "–", to);
}
