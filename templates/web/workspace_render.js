// Messages as DOM nodes. Whatever comes from a message becomes a text node, an attribute that cannot run,
// or a link to http, https or mailto: never markup.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Rich text

export function rich(elements) {
  return elements.map((element) => {
    const children = (element.elements || []);
    if (element.type === "rich_text_list") {
      const list = el(element.style === "ordered" ? "ol" : "ul", { class: `indent-${element.indent || 0}` });
      list.append(...children.map((item) => el("li", {}, ...inline(item.elements))));
      return list;
    }
    if (element.type === "rich_text_preformatted") return el("pre", { tabindex: "0" }, el("code", {}, ...inline(children)));
    if (element.type === "rich_text_quote") return el("blockquote", {}, ...inline(children));
    return el("p", {}, ...inline(children));
  });
}

const inline = (elements) => elements.map(leaf);

function leaf(element) {
  let node = bare(element);
  const style = element.style || {};
  for (const [name, tag] of [["code", "code"], ["strike", "s"], ["italic", "em"], ["bold", "strong"]]) {
    if (style[name]) node = el(tag, {}, node);
  }
  return node;
}

function bare(element) {
  switch (element.type) {
    case "link":
      return link(element.url, element.text || element.url);
    case "emoji":
      return element.drawn && canDraw()
        ? el("span", { class: "emoji", role: "img", "aria-label": element.name.replaceAll("_", " "), title: `:${element.name}:` }, element.drawn)
        : new Text(`:${element.name}:`);
    case "user":
      return el("span", { class: "mention" }, `@${element.name}`);
    case "channel":
      return el("span", { class: "mention" }, `#${element.name}`);
    case "broadcast":
      return el("span", { class: "mention" }, `@${element.range}`);
    case "date": {
      const said = new Text(sayDate(element.timestamp, element.format || "{date} {time}", element.fallback || ""));
      return element.url ? link(element.url, said) : el("time", { title: fullDate(element.timestamp) }, said);
    }
    default:
      return new Text(element.text);
  }
}

// A machine without an emoji font would show boxes: the names say more.
let drawsEmoji = null;
function canDraw() {
  if (drawsEmoji === null) {
    const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    pen.font = "16px sans-serif";
    const ink = (text) => {
      pen.clearRect(0, 0, 32, 32);
      pen.fillText(text, 0, 20);
      return String(pen.getImageData(0, 0, 32, 32).data);
    };
    drawsEmoji = ink("\u{1f525}") !== ink("\u{1f6a8}"); // two that differ, unless both are the same box
  }
  return drawsEmoji;
}

export function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(url, label) {
  const href = safeUrl(url);
  return href ? el("a", { href, target: "_blank", rel: "noopener noreferrer" }, label) : el("span", {}, label);
}

// Dates, in the reader's own time zone

export function sayDate(timestamp, pattern, fallback) {
  const moment = new Date(timestamp * 1000);
  if (Number.isNaN(moment.getTime())) return fallback;
  let known = true;
  const said = pattern.replace(/\{(\w+)\}/g, (whole, token) => {
    const part = datePart(token, moment);
    if (part === null) known = false;
    return part;
  });
  return known ? said : fallback;
}

function datePart(token, moment) {
  if (token.endsWith("_pretty")) {
    const midnight = (date) => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();
    const days = Math.round((midnight(moment) - midnight(new Date())) / 86400000);
    if (Math.abs(days) <= 1) return ["yesterday", "today", "tomorrow"][days + 1];
    token = token.slice(0, -"_pretty".length);
  }
  const part = (options) => moment.toLocaleString("en-US", options);
  const day = `${moment.getDate()}${ordinal(moment.getDate())}`;
  const two = (number) => String(number).padStart(2, "0");
  switch (token) {
    case "date_num": return `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
    case "date_slash": return `${two(moment.getMonth() + 1)}/${two(moment.getDate())}/${moment.getFullYear()}`;
    case "date": return `${part({ month: "long" })} ${day}, ${moment.getFullYear()}`;
    case "date_short": return part({ month: "short", day: "numeric", year: "numeric" });
    case "date_long": return `${part({ weekday: "long" })}, ${part({ month: "long" })} ${day}, ${moment.getFullYear()}`;
    case "time": return moment.toLocaleTimeString([], { hour: "numeric", minute: "2-digit" });
    case "time_secs": return moment.toLocaleTimeString([], { hour: "numeric", minute: "2-digit", second: "2-digit" });
    case "ago": return ago((Date.now() - moment.getTime()) / 1000);
    default: return null;
  }
}

function ago(seconds) {
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]]) {
    const count = Math.floor(Math.abs(seconds) / size);
    if (count) {
      const amount = `${count} ${unit}${count > 1 ? "s" : ""}`;
      return seconds > 0 ? `${amount} ago` : `in ${amount}`;
    }
  }
  return "now";
}

const ordinal = (day) => (day % 100 > 10 && day % 100 < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[day % 10] || "th");
const fullDate = (timestamp) => new Date(timestamp * 1000).toLocaleString();

// Blocks; `act(element, option, node)` is called when somebody uses one of their elements

export function block(view, act) {
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
      return el("figure", {}, view.title ? el("figcaption", {}, ...rich(view.title)) : null, ...element(view, act));
    case "rich_text":
      return el("div", { class: "rich" }, ...rich(view.elements));
    case "table":
      return el("div", { class: "table", tabindex: "0" }, table(view.rows));
    default:
      return el("hr");
  }
}

function section(view, act) {
  const body = el("div", { class: "body" });
  if (view.text) body.append(...rich(view.text));
  if (view.fields && view.fields.length) {
    body.append(el("div", { class: "fields" }, ...view.fields.map((field) => el("div", {}, ...rich(field)))));
  }
  return el("div", { class: "section" }, body, ...(view.accessory ? element(view.accessory, act) : []));
}

function table(rows) {
  const cells = (row, tag) => row.map((cell) => el(tag, tag === "th" ? { scope: "col" } : {}, ...rich(cell)));
  const [head, ...body] = rows;
  return el("table", {},
    el("thead", {}, el("tr", {}, ...cells(head, "th"))),
    el("tbody", {}, ...body.map((row) => el("tr", {}, ...cells(row, "td")))));
}

function element(view, act) {
  switch (view.type) {
    case "text":
      return rich(view.text);
    case "image": {
      // Slack would fetch it; this page asks no other host for anything, and says what is there.
      const href = safeUrl(view.url);
      return [el("span", { class: "picture" }, "🖼 ", href ? link(href, view.alt) : view.alt)];
    }
    case "button": {
      const node = el("button", {
        type: "button", class: view.style, "data-action": view.action_id, "aria-label": view.accessibility_label,
        onclick: () => act(view, null, node),
      }, ...rich(view.text).flatMap((p) => [...p.childNodes]));
      return [node];
    }
    default:
      return [menu(view, act)];
  }
}

function menu(view, act) {
  const more = view.type === "overflow";
  const label = more ? "More actions" : textOf(view.placeholder || []) || "Choose";
  const node = el("select", { class: more ? "overflow" : "", "aria-label": label, "data-action": view.action_id,
    onchange: () => {
      const option = view.options.find((candidate) => candidate.value === node.value);
      act(view, option, node);
      if (more) node.selectedIndex = 0;
    },
  }, el("option", { value: "", hidden: true, selected: !view.chosen }, more ? "⋯" : label));
  for (const option of view.options) {
    const text = textOf(option.text) + (option.description ? ` — ${textOf(option.description)}` : "");
    node.append(el("option", { value: option.value, selected: option.value === view.chosen }, text));
  }
  return node;
}

const textOf = (elements) => rich(elements).map((node) => node.textContent).join("\n");
