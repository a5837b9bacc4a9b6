// Where people type: what was typed before, a draft for each channel and thread, and completion of commands.

import { el } from "/page/render.js";

const KEPT = 100; // lines that each place remembers
const STORE = "typed";

const places = new Map(); // channel, or channel/thread -> { typed: [line], at, draft }
const stored = read();

function read() {
  try { return JSON.parse(sessionStorage.getItem(STORE)) || {}; } catch { return {}; }
}

function place(key) {
  if (!places.has(key)) {
    const typed = Array.isArray(stored[key]) ? stored[key].map(String) : [];
    places.set(key, { typed, at: typed.length, draft: "" });
  }
  return places.get(key);
}

function keep(key, line) {
  const here = place(key);
  if (here.typed[here.typed.length - 1] !== line) here.typed.push(line);
  here.typed.splice(0, here.typed.length - KEPT);
  here.at = here.typed.length;
  stored[key] = here.typed;
  try { sessionStorage.setItem(STORE, JSON.stringify(stored)); } catch { /* full, or forbidden: this page still remembers */ }
}

// `send(text)` gives an error or null. `usage` is lines such as "/sysom diagnose JOB", capitals standing for what
// people put in. Gives { show(key), fill(text) }.
export function composer(form, send, usage) {
  const field = form.querySelector("textarea");
  const hints = form.querySelector(".hints");
  const spoken = form.querySelector("[role=status]");
  const problem = form.querySelector(".error");
  const commands = usage.map((line) => ({ line, fixed: line.replace(/[A-Z]+$/, "") }));
  let key = "";
  let dismissed = false;

  const say = (error) => { problem.textContent = error || ""; problem.hidden = !error; };
  const fit = () => { field.rows = Math.min(10, field.value.split("\n").length); };
  const fill = (text) => {
    field.value = text;
    field.focus();
    field.setSelectionRange(text.length, text.length);
    changed();
  };
  const matching = () => {
    const text = field.value;
    if (dismissed || !text.startsWith("/") || text.includes("\n")) return [];
    return commands.filter(({ line, fixed }) => fixed.startsWith(text) && (text !== fixed || line !== fixed));
  };
  const hint = () => {
    const found = matching();
    hints.hidden = found.length === 0;
    hints.replaceChildren(...found.map(({ line, fixed }) => el("button", { type: "button", onclick: () => fill(fixed) }, line)));
    if (found.length) hints.append(el("span", { class: "quiet" }, el("kbd", {}, "Tab"), " completes"));
    const said = found.length ? `${found.map(({ line }) => line).join(", ")}. Tab completes.` : "";
    if (spoken.textContent !== said) spoken.textContent = said;
  };
  const changed = () => { fit(); hint(); };
  const recall = (step) => {
    const here = place(key);
    here.at = Math.max(0, Math.min(here.typed.length, here.at + step));
    dismissed = true;
    fill(here.typed[here.at] || "");
  };
  const submit = async () => {
    const text = field.value.replace(/\s+$/, "");
    if (!text) return;
    const from = key;
    keep(from, text);
    field.value = "";
    changed();
    const error = await send(text);
    if (from !== key) return;
    say(error);
    if (error && !field.value) { field.value = text; changed(); }
  };

  field.addEventListener("input", () => { dismissed = false; changed(); });
  field.addEventListener("keydown", (event) => {
    const here = place(key);
    const fresh = field.value === "" || field.value === here.typed[here.at];
    const [first] = matching();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
    if (event.key === "ArrowUp" && fresh && here.typed.length) { event.preventDefault(); recall(-1); }
    if (event.key === "ArrowDown" && fresh && here.at < here.typed.length) { event.preventDefault(); recall(1); }
    if (event.key === "Tab" && !event.shiftKey && first && first.fixed !== field.value) { event.preventDefault(); fill(first.fixed); }
    if (event.key === "Escape" && !hints.hidden) { event.stopPropagation(); dismissed = true; hint(); }
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });

  return {
    fill,
    show(next) {
      if (next === key) return;
      if (key) place(key).draft = field.value;
      key = next;
      const here = place(key);
      here.at = here.typed.length;
      field.value = here.draft;
      say(null);
      dismissed = document.activeElement !== field;
      changed();
    },
  };
}
