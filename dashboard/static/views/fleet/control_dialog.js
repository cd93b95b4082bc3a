/**
 * The confirmation before a change of the run: what will happen, and the control token for it.
 *
 * makeControlDialog()   {node, ask({title, text, confirm, path, body, done(answer)})}: the dialog
 *                       stays open until the server accepts, and shows the reason of a refusal.
 *                       The token is kept in the memory of this tab by api.js, nowhere else.
 */
import { hasControlToken, postJSON, setControlToken } from "../../api.js";
import { el, setText } from "../../parts/dom.js";

const WHERE = "python -m dashboard --run DIR --link";

export function makeControlDialog() {
  const heading = el("h2", { id: "confirm-title" });
  const text = el("p", { id: "confirm-text" });
  const token = el("input", {
    id: "control-token",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "control-token-hint",
  });
  const hint = el(
    "p",
    { id: "control-token-hint", class: "muted small" },
    "Printed by ",
    el("code", null, WHERE),
    " for this run's folder. This tab keeps it until it is closed or reloaded.",
  );
  const refusal = el("p", { id: "confirm-error", class: "refusal", role: "alert", hidden: true });
  const cancel = el("button", { type: "button", class: "button", id: "confirm-cancel" }, "Cancel");
  const confirm = el("button", { type: "submit", class: "button primary", id: "confirm-ok" });
  const form = el(
    "form",
    { class: "control-form" },
    heading,
    text,
    el("label", { for: "control-token" }, "Control token"),
    token,
    hint,
    refusal,
    el("div", { class: "row dialog-buttons" }, cancel, confirm),
  );
  const node = el(
    "dialog",
    {
      id: "confirm-dialog",
      class: "dialog",
      "aria-labelledby": "confirm-title",
      "aria-describedby": "confirm-text",
    },
    form,
  );
  let asked = null;

  function refuse(message) {
    setText(refusal, message);
    refusal.hidden = !message;
  }

  function busy(is) {
    confirm.disabled = token.readOnly = is;
    setText(confirm, is ? "Waiting for the driver …" : asked.confirm);
  }

  async function send(event) {
    event.preventDefault();
    if (confirm.disabled) return;
    if (token.value.trim() === "") {
      refuse("The control token is missing: paste it here.");
      token.focus();
      return;
    }
    const here = asked;
    refuse("");
    busy(true);
    setControlToken(token.value);
    try {
      const answer = await postJSON(here.path, here.body);
      if (asked !== here) return;
      node.close();
      here.done(answer);
    } catch (error) {
      if (asked === here) refused(error);
    } finally {
      if (asked) busy(false);
    }
  }

  function refused(error) {
    refuse(error.message);
    if (error.status !== 401) return;
    setControlToken("");
    token.select();
    token.focus();
  }

  /** Keeps Tab within the dialog: after its last control would come the browser's own bar. */
  function around(event) {
    if (event.key !== "Tab") return;
    const controls = [token, cancel, confirm].filter((control) => !control.disabled);
    const [from, to] = event.shiftKey ? [controls[0], controls.at(-1)] : [controls.at(-1), controls[0]];
    if (document.activeElement !== from) return;
    event.preventDefault();
    to.focus();
  }

  form.addEventListener("submit", send);
  node.addEventListener("keydown", around);
  cancel.addEventListener("click", () => node.close());
  node.addEventListener("close", () => {
    asked = null;
    if (!hasControlToken()) token.value = "";
  });
  return {
    node,
    ask(question) {
      asked = question;
      setText(heading, question.title);
      setText(text, question.text);
      refuse("");
      busy(false);
      node.showModal();
      (token.value ? cancel : token).focus();
    },
    close: () => node.open && node.close(),
  };
}
