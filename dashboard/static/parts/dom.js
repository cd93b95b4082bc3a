/**
 * Elements from untrusted text: a string only ever becomes a text node.
 *
 * el(tag, attrs, ...children)  an element; attrs: `class`, `on: {click: f}`, `data: {view: "x"}`,
 *                              `style: {width: "3px"}`, anything else is an attribute (true: present,
 *                              false/null/undefined: absent). Children: strings, numbers, nodes,
 *                              arrays of them; null and false are left out.
 * setText(node, text)          changes the text only if it differs (avoids layout).
 * setChildren(node, ...kids)   replaces what is inside.
 * runText(text, attrs)         a <bdi> for text from the run (a completion, a name): it cannot turn
 *                              the direction of the text around it.
 * empty(title, text)           a message for a view that has nothing to show.
 * toggle(labels, value, onPick, label)  a radio group drawn as joined buttons: labels [[value, text]];
 *                              returns the element; its `.pick(value)` sets it without calling back.
 */

export function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
    } else if (name === "data") {
      for (const [key, item] of Object.entries(value)) node.dataset[key] = item;
    } else if (name === "style") {
      Object.assign(node.style, value);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setChildren(node, ...children) {
  node.replaceChildren();
  append(node, children);
}

export function runText(text, attrs) {
  return el("bdi", { class: "run-text", ...attrs }, text);
}

export function empty(title, text) {
  return el("div", { class: "empty", role: "status" },
    el("p", { class: "empty-title" }, title), text && el("p", null, text));
}

export function toggle(labels, value, onPick, label) {
  const buttons = new Map();
  const pick = (wanted) => {
    for (const [key, button] of buttons) {
      button.setAttribute("aria-checked", String(key === wanted));
      button.tabIndex = key === wanted ? 0 : -1;
    }
  };
  const choose = (key, focus) => {
    pick(key);
    if (focus) buttons.get(key).focus();
    onPick(key);
  };
  const group = el("div", { class: "toggle", role: "radiogroup", "aria-label": label, on: {
    keydown: (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const keys = [...buttons.keys()];
      const now = keys.findIndex((k) => buttons.get(k) === document.activeElement);
      choose(keys[(now + by + keys.length) % keys.length], true);
    },
  } });
  for (const [key, text] of labels) {
    const button = el("button", { type: "button", role: "radio", "data-value": key,
      on: { click: () => choose(key, false) } }, text);
    buttons.set(key, button);
    group.append(button);
  }
  pick(value);
  group.pick = pick;
  return group;
}
