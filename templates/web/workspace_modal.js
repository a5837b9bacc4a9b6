// The modal that the app has opened for this person. What was typed stays when the app changes the view.

import { block } from "/page/blocks.js";
import { el, inlineOf, textOf } from "/page/render.js";

const dialog = document.getElementById("modal");
let shown = null; // the view as it came
let fields = new Map(); // block_id -> { node, read }

export function showModal(view, post, use) {
  if (!view) {
    shown = null;
    dialog.close();
    return;
  }
  const typed = shown && shown.id === view.id ? new Map([...fields].map(([id, field]) => [id, field.read()])) : new Map();
  const before = dialog.contains(document.activeElement) ? document.activeElement.dataset.action : null;
  shown = view;
  fields = new Map();
  draw(view, typed, post, use);
  if (!dialog.open) dialog.showModal();
  focus(view, before);
}

function draw(view, typed, post, use) {
  const problem = el("p", { class: "error", role: "alert", hidden: true });
  const act = (element, choice, node) => use({ view: view.id }, element, choice, node, problem);
  const form = el("form", { method: "dialog" });
  const close = () => post("/close", { view: view.id });
  const leave = (label, text) => el("button", { type: "button", class: "leave", "aria-label": label, onclick: close }, text);
  form.append(el("header", {}, el("h2", { id: "modal-title" }, ...inlineOf(view.title)), leave("Close", "✕")));
  const body = el("div", { class: "modal-body" }, ...view.blocks.map((item) => block(filled(item, typed), act, fields)), problem);
  form.append(body);
  const footer = el("footer", { class: "row end" });
  if (view.close || view.submit) footer.append(leave(null, view.close ? textOf(view.close) : "Cancel"));
  if (view.submit) footer.append(el("button", { class: "primary" }, ...inlineOf(view.submit)));
  form.append(footer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    form.setAttribute("aria-busy", "true");
    const values = Object.fromEntries([...fields].map(([id, field]) => [id, field.read()]));
    say(problem, await post("/submit", { view: view.id, values }));
    form.removeAttribute("aria-busy");
  });
  say(problem, view.errors[""]);
  dialog.replaceChildren(form);
  for (const [id, error] of Object.entries(view.errors)) {
    const place = dialog.querySelector(`[data-block="${CSS.escape(id)}"] > .error`);
    if (place) say(place, error);
    fields.get(id)?.node.setAttribute("aria-invalid", "true");
  }
}

function filled(view, typed) {
  if (view.type !== "input" || !typed.has(view.block_id)) return view;
  return { ...view, element: { ...view.element, chosen: typed.get(view.block_id) } };
}

function focus(view, before) {
  const bad = fields.get(Object.keys(view.errors)[0])?.node;
  const same = before && dialog.querySelector(`[data-action="${CSS.escape(before)}"]`);
  const first = dialog.querySelector(".modal-body :is(input, textarea, select, button)");
  (bad || same || first || dialog.querySelector("footer button"))?.focus();
}

function say(place, error) {
  place.textContent = error || "";
  place.hidden = !error;
}

export function leaveWith(post) {
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault(); // it closes when the workspace says so
    if (shown) post("/close", { view: shown.id });
  });
}
