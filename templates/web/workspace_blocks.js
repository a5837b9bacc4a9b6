// Blocks and their elements as DOM nodes. `act(element, choice, node)` is called when somebody uses one; `fields`,
// in a form, collects how to read each input: block_id -> { read, node }.

import { el, inlineOf, link, rich, safeUrl, textOf } from "/page/render.js";

export function block(view, act, fields = null) {
  switch (view.type) {
    case "header":
      return el("h3", { class: "header" }, ...rich(view.text));
    case "section":
      return section(view, act);
    case "context":
      return el("div", { class: "context" }, ...view.elements.map((item) => el("span", {}, ...element(item, act))));
    case "actions":
      return el("div", { class: "actions", role: "group" }, ...view.elements.flatMap((item) => element(item, act)));
    case "image":
      return el("figure", {}, view.title ? el("figcaption", {}, ...rich(view.title)) : null, picture(view.url, view.alt));
    case "rich_text":
      return el("div", { class: "rich" }, ...rich(view.elements));
    case "table":
      return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table(view));
    case "input":
      return input(view, act, fields);
    default:
      return el("hr");
  }
}

function section(view, act) {
  const body = el("div", { class: "body" });
  if (view.text) body.append(...rich(view.text));
  if (view.fields.length) body.append(el("div", { class: "fields" }, ...view.fields.map((field) => el("div", {}, ...rich(field)))));
  return el("div", { class: "section" }, body, ...(view.accessory ? element(view.accessory, act) : []));
}

function table(view) {
  const align = (column) => ({ center: "center", right: "right" }[view.columns[column]]);
  const cells = (row, tag) => row.map((cell, column) => el(tag, { class: align(column), scope: tag === "th" && "col" }, ...rich(cell)));
  const [head, ...body] = view.rows;
  return el("table", {},
    el("thead", {}, el("tr", {}, ...cells(head, "th"))),
    el("tbody", {}, ...body.map((row) => el("tr", {}, ...cells(row, "td")))));
}

// A picture of this workspace is shown. Slack would fetch another one; this page asks no other host for anything.
export function picture(url, alt) {
  if (/^\/files\/[\w-]+$/.test(url)) {
    return el("a", { class: "shown", href: url, target: "_blank", rel: "noopener" }, el("img", { src: url, alt }));
  }
  const href = safeUrl(url);
  return el("span", { class: "picture" }, href ? link(href, alt) : `${alt} (the picture is gone)`);
}

function element(view, act) {
  switch (view.type) {
    case "text":
      return rich(view.text);
    case "image":
      return [picture(view.url, view.alt)];
    case "button": {
      const node = el("button", {
        type: "button", class: view.style, "data-action": view.action_id, "aria-label": view.accessibility_label,
        onclick: () => act(view, null, node),
      }, ...inlineOf(view.text));
      return [node];
    }
    case "overflow": case "static_select": case "users_select": case "channels_select": case "conversations_select":
      return [menu(view, act)];
    default: {
      const { node, read } = field(view, textOf(view.placeholder || []) || "Choose");
      node.dataset.action = view.action_id;
      node.addEventListener("change", () => act(view, read(), node));
      return [node];
    }
  }
}

// A menu that does something when one of its entries is chosen. Not a <select>: there the arrow keys choose at once.

let menus = 0;

function menu(view, act) {
  const more = view.type === "overflow";
  const name = more ? "More actions" : textOf(view.placeholder || []) || "Choose";
  const chosen = more ? null : view.options.find((option) => option.value === view.chosen);
  menus += 1;
  const list = el("div", { id: `menu-${menus}`, class: "options", role: "menu", popover: "auto", "aria-label": name });
  const button = el("button", {
    type: "button", class: more ? "overflow" : "select", "data-action": view.action_id, popovertarget: list.id,
    "aria-haspopup": "menu", "aria-expanded": "false", "aria-label": chosen ? `${name}: ${textOf(chosen.text)}` : name,
    onkeydown: (event) => { if (event.key === "ArrowDown") { event.preventDefault(); list.showPopover(); } },
  }, more ? "⋯" : chosen ? textOf(chosen.text) : name);
  for (const option of view.options) {
    const entry = el("button", {
      type: "button", role: more ? "menuitem" : "menuitemradio", tabindex: "-1",
      "aria-checked": more ? null : String(option === chosen),
      onclick: () => { list.hidePopover(); act({ ...view, url: option.url }, option.value, button); },
    }, ...inlineOf(option.text), option.description ? el("span", { class: "quiet" }, ...inlineOf(option.description)) : null);
    list.append(entry);
  }
  list.addEventListener("beforetoggle", (event) => { if (event.newState === "open") place(list, button); });
  list.addEventListener("toggle", (event) => {
    const open = event.newState === "open";
    button.setAttribute("aria-expanded", String(open));
    if (open) { place(list, button); (list.querySelector("[aria-checked=true]") || list.firstChild)?.focus(); }
  });
  list.addEventListener("keydown", (event) => walk(event, list));
  return el("span", { class: "menu" }, button, list);
}

function place(list, button) {
  const at = button.getBoundingClientRect();
  const below = at.bottom + list.offsetHeight + 8 < innerHeight || at.top < list.offsetHeight;
  list.style.top = `${below ? at.bottom + 4 : at.top - list.offsetHeight - 4}px`;
  list.style.left = `${Math.max(8, Math.min(at.left, innerWidth - list.offsetWidth - 8))}px`;
}

function walk(event, list) {
  const entries = [...list.children];
  const at = entries.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1 + entries.length, Home: 0, End: entries.length - 1 }[event.key];
  if (event.key === "Tab") list.hidePopover();
  if (to === undefined) return;
  event.preventDefault();
  entries[to % entries.length].focus();
}

// Inputs. Each is { node, read }: what is shown, and a function that gives what it stands at.

let names = 0;

function field(view, label) {
  names += 1;
  const name = `field-${names}`;
  const common = { "aria-label": label, placeholder: textOf(view.placeholder || []) || null };
  const single = (node) => ({ node, read: () => node.value || null });
  switch (view.type) {
    case "plain_text_input": {
      const bounds = { minlength: view.min_length, maxlength: view.max_length || 3000 };
      const node = view.multiline ? el("textarea", { rows: "4", ...common, ...bounds }) : el("input", { type: "text", ...common, ...bounds });
      node.value = view.chosen || "";
      return single(node);
    }
    case "number_input":
      return single(el("input", {
        type: "number", step: view.is_decimal_allowed ? "any" : "1", min: view.min_value, max: view.max_value, value: view.chosen, ...common,
      }));
    case "datepicker": case "timepicker":
      return single(el("input", { type: view.type === "datepicker" ? "date" : "time", value: view.chosen, ...common }));
    case "checkboxes": case "multi_static_select": case "radio_buttons":
      return several(view, label, name);
    default: {
      const node = el("select", { "aria-label": label }, el("option", { value: "" }, common.placeholder || "Choose"));
      for (const option of view.options) {
        node.append(el("option", { value: option.value, selected: option.value === view.chosen }, textOf(option.text)));
      }
      return single(node);
    }
  }
}

function several(view, label, name) {
  const one = view.type === "radio_buttons";
  const chosen = [].concat(view.chosen || []);
  const boxes = view.options.map((option) => el("input", {
    type: one ? "radio" : "checkbox", name, value: option.value, checked: chosen.includes(option.value),
  }));
  const node = el("fieldset", { class: "choices", "aria-label": label }, ...view.options.map((option, index) =>
    el("label", {}, boxes[index], el("span", {}, ...inlineOf(option.text),
      option.description ? el("span", { class: "quiet" }, ...inlineOf(option.description)) : null))));
  const read = () => boxes.filter((box) => box.checked).map((box) => box.value);
  return { node, read: one ? () => read()[0] || null : read };
}

function input(view, act, fields) {
  const label = textOf(view.label);
  const { node, read } = field(view.element, label);
  node.dataset.action = view.element.action_id;
  if (view.dispatch) node.addEventListener("change", () => act(view.element, read(), node));
  if (fields) fields.set(view.block_id, { node, read });
  const hint = view.hint ? el("p", { class: "quiet" }, ...inlineOf(view.hint)) : null;
  return el("div", { class: "input", "data-block": view.block_id },
    el("p", { class: "label", "aria-hidden": "true" }, ...inlineOf(view.label), view.optional ? el("span", { class: "quiet" }, " (optional)") : null),
    node, hint, el("p", { class: "error", role: "alert", hidden: true }));
}
