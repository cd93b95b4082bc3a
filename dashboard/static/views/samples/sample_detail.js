/**
 * One completion in full: its origin, parsed answers, rewards and tokens.
 *
 * makeDetail({onMode(mode, other), onBack()})   {node, show(id, mode, other), clear(), focus()}: mode is
 *     "read" or "same"; other: the completion beside it in "same".
 */
import { getJSON, samplePath } from "../../api.js";
import { el, empty, setChildren, toggle } from "../../parts/dom.js";
import { count, number } from "../../parts/format.js";
import { lightMark } from "../../charts/palette.js";
import { samePrompt } from "./same_prompt.js";
import { disagrees } from "./sample_list.js";
import { textBox, visible } from "./sample_text.js";
import { shadedTokens } from "./token_shading.js";

const MODES = [
  ["read", "Read"],
  ["same", "Same prompt over time"],
];

export function makeDetail({ onMode, onBack }) {
  const node = el("section", {
    class: "panel column",
    id: "sample-detail",
    tabindex: "-1",
    "aria-label": "the completion chosen",
  });
  let shown = null;
  let asked = 0;

  node.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    onBack();
  });

  function draw(record, mode, other) {
    const body = el("div", { class: "scroll grow detail-body" });
    const modes = toggle(
      MODES,
      mode,
      (next) => {
        onMode(next, null);
        draw(record, next, null);
      },
      "what is shown of the completion",
    );
    setChildren(
      node,
      el(
        "div",
        { class: "panel-head row" },
        el("h2", null, headline(record)),
        el("span", { class: "grow" }),
        modes,
      ),
      body,
    );
    if (mode === "same") samePrompt(body, record, other, (id) => onMode("same", id));
    else setChildren(body, reading(record));
  }

  return {
    node,
    focus: () => (node.querySelector(".tokens") ?? node.querySelector(".model-text") ?? node).focus(),
    clear() {
      asked += 1;
      shown = null;
      setChildren(
        node,
        empty(
          "No completion chosen",
          "Click one in the list, or move with ↑ and ↓. Enter goes to its text, Escape comes back.",
        ),
      );
    },
    async show(id, mode, other) {
      const turn = (asked += 1);
      node.classList.add("stale");
      try {
        if (shown?.id !== id) shown = await getJSON(samplePath(id));
        if (turn === asked) draw(shown, mode, other);
      } catch (error) {
        if (turn !== asked) return;
        shown = null;
        setChildren(node, empty(`Completion ${id} cannot be shown`, error.message));
      } finally {
        if (turn === asked) node.classList.remove("stale");
      }
    },
  };
}

function headline({ kind, step, prompt_id: prompt }) {
  return `Step ${step} · ${kind}${prompt === null || prompt === undefined ? "" : ` · prompt ${prompt}`}`;
}

function reading(record) {
  const tokens = record.tokens ?? [];
  return [
    facts(record),
    record.reward_error &&
      el("p", { class: "refusal" }, lightMark("bad", "reward error"), " ", visible(record.reward_error)),
    el("div", { class: "answers-rewards" }, answers(record), rewards(record)),
    Object.entries(record.notes ?? {}).map(([name, text]) => [
      el("h3", null, "What ", el("bdi", null, name), " says"),
      textBox(text, "note"),
    ]),
    el(
      "h3",
      null,
      "Prompt",
      !record.prompt &&
        el("span", { class: "faint plain" }, " (the question; the text of the prompt was not recorded)"),
    ),
    textBox(record.prompt ?? record.question ?? "", "prompt"),
    el("h3", null, "Completion"),
    tokens.length
      ? shadedTokens(tokens, record.tokens_cut ?? 0)
      : [
          el("p", { class: "faint" }, "No logprobs were recorded for this completion."),
          textBox(record.completion ?? "", "completion"),
        ],
  ];
}

function facts(record) {
  const rows = [
    ["finish", record.finish_reason, record.finish_reason && record.finish_reason !== "stop"],
    ["tokens", count(record.completion_tokens)],
    ["policy version", record.policy_version],
    ["worker", record.worker],
    ["group", record.group_id],
    ["sample", record.sample_index],
    [
      "kept as",
      { first: "first of the step", disagreement: "parsers disagree", reward_error: "reward error" }[
        record.why
      ] ?? record.why,
    ],
    ["id", record.id],
  ];
  return el(
    "dl",
    { class: "facts" },
    rows
      .filter(([, item]) => item !== null && item !== undefined && item !== "")
      .map(([name, item, loud]) =>
        el(
          "div",
          null,
          el("dt", null, name),
          el("dd", { class: loud ? "warn-text" : null }, el("bdi", null, item)),
        ),
      ),
  );
}

/** The right answer, and the answers that the parsers found. */
function answers({ answer, parsed, ...rest }) {
  const cell = (name, text, mark) =>
    el(
      "div",
      { class: "answer", "data-testid": `answer-${name.split(" ")[0]}` },
      el("span", { class: "muted" }, name),
      el("span", { class: "answer-text" }, text),
      mark,
    );
  const found = (name) => {
    const text = parsed[name] ?? null;
    if (text === null)
      return cell(
        `${name} parser`,
        el("span", { class: "faint" }, "nothing"),
        lightMark("none", "not found"),
      );
    const same = plainAnswer(text) === plainAnswer(answer);
    return cell(
      `${name} parser`,
      el("bdi", null, visible(String(text))),
      same ? lightMark("ok", "as gold") : lightMark("bad", "differs"),
    );
  };
  return el(
    "div",
    { class: "answers" },
    cell("gold answer", el("bdi", null, visible(String(answer ?? "–"))), null),
    parsed ? [found("strict"), found("lenient")] : null,
    parsed &&
      disagrees({ parsed, ...rest }) &&
      el("p", { class: "answers-note" }, lightMark("warn", "the parsers disagree")),
  );
}

/** A number without formatting: 1,000 and $1000.0 are the same answer. */
function plainAnswer(text) {
  const bare = String(text ?? "").replace(/[$,\s]/g, "");
  return bare !== "" && Number.isFinite(Number(bare)) ? String(Number(bare)) : bare;
}

function rewards({ rewards: each, total_reward: total }) {
  const rows = Object.entries(each ?? {});
  return el(
    "table",
    { class: "rewards", "data-testid": "rewards" },
    el(
      "tbody",
      null,
      el(
        "tr",
        { class: "total" },
        el("th", { scope: "row" }, "total reward"),
        el("td", { class: "num" }, number(total)),
      ),
      rows.map(([name, x]) =>
        el(
          "tr",
          null,
          el("th", { scope: "row" }, el("bdi", null, name)),
          el("td", { class: "num" }, number(x)),
        ),
      ),
    ),
  );
}
