// Text as DOM nodes. Whatever comes from a message becomes a text node, an attribute that cannot run,
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
      return emoji(element);
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

// A machine without an emoji font would show boxes: the names say more, and a circle can be drawn.
const CIRCLES = ["red", "white", "black", "large_green", "large_yellow", "large_orange", "large_blue"].map((name) => `${name}_circle`);

function emoji(element) {
  const said = { role: "img", "aria-label": element.name.replaceAll("_", " "), title: `:${element.name}:` };
  if (element.drawn && canDraw()) return el("span", { class: "emoji", ...said }, element.drawn);
  if (CIRCLES.includes(element.name)) return el("span", { class: `circle ${element.name}`, ...said });
  return new Text(`:${element.name}:`);
}

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

export function link(url, label) {
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

export const textOf = (elements) => rich(elements).map((node) => node.textContent).join("\n");
export const inlineOf = (elements) => rich(elements).flatMap((node) => [...node.childNodes]);
