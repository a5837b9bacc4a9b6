// The page of the local workspace: keeps what the stream of changes says, shows it, and sends what is typed.

import { block, el, rich, safeUrl, sayDate } from "/page/render.js";

const $ = (id) => document.getElementById(id);
const { bot } = document.body.dataset;
const COMPACT_SECONDS = 300; // messages of one author within this time share a heading
const NEAR_BOTTOM = 80; // pixels from the end of the log within which it follows new messages

const channels = new Map(); // id -> { id, name, direct, has_bot, messages: Map(ts -> view), unread }
let current = null; // the id of the channel that is shown
let openThread = null; // the ts of the root whose thread is shown

// Messages, sorted

const seconds = (view) => Number(view.ts);
const isReply = (view) => view.thread_ts && view.thread_ts !== view.ts;
const sorted = (views) => [...views].sort((a, b) => seconds(a) - seconds(b));
const rootsOf = (channel) => sorted(channel.messages.values()).filter((view) => !isReply(view));
const repliesOf = (channel, ts) => sorted(channel.messages.values()).filter((view) => isReply(view) && view.thread_ts === ts);
const dayOf = (view) => new Date(seconds(view) * 1000).toDateString();

// One message

function messageNode(view, previous, inThread) {
  const compact = previous && !view.ephemeral && !previous.ephemeral && previous.author === view.author
    && dayOf(previous) === dayOf(view) && seconds(view) - seconds(previous) < COMPACT_SECONDS
    && (inThread || !hasReplies(previous));
  const problem = el("p", { class: "error", role: "alert", hidden: true });
  const act = (element, option, node) => use(view, element, option, node, problem);
  const time = el("time", { title: new Date(seconds(view) * 1000).toLocaleString() }, sayDate(seconds(view), "{time}", ""));
  const heading = compact ? el("p", { class: "side" }, time) : el("div", { class: `avatar ${tone(view)}`, "aria-hidden": "true" }, view.author.slice(0, 1));
  const body = el("div", { class: "message-body" });
  if (view.ephemeral) body.append(el("p", { class: "only" }, "Only visible to you"));
  if (!compact) {
    body.append(el("p", { class: "by" },
      el("strong", {}, view.author), view.bot ? el("span", { class: "badge" }, "APP") : null, " ", time));
  }
  body.append(...view.blocks.map((item) => block(item, act)));
  if (view.edited) {
    const lines = body.querySelectorAll(".body p");
    (lines[lines.length - 1] || body).append(el("span", { class: "quiet" }, " (edited)"));
  }
  if (view.reactions.length) {
    body.append(el("p", { class: "row" }, ...view.reactions.map((reaction) =>
      el("span", { class: "reaction" }, ...rich(reaction.emoji).flatMap((p) => [...p.childNodes]), ` ${reaction.count}`))));
  }
  body.append(problem);
  if (!inThread && !view.ephemeral) body.append(threadLink(view));
  return el("li", { class: `message${compact ? " compact" : ""}${view.ephemeral ? " ephemeral" : ""}`, "data-ts": view.ts }, heading, body);
}

function hasReplies(view) {
  return repliesOf(channels.get(view.channel), view.ts).length > 0;
}

function threadLink(view) {
  const replies = repliesOf(channels.get(view.channel), view.ts);
  const open = () => showThread(view.ts);
  if (!replies.length) return el("button", { type: "button", class: "plain start-thread", onclick: open }, "Reply in thread");
  const last = replies[replies.length - 1];
  const many = replies.length === 1 ? "1 reply" : `${replies.length} replies`;
  return el("button", { type: "button", class: "plain replies", onclick: open },
    el("strong", {}, many), el("span", { class: "quiet" }, ` Last reply ${sayDate(seconds(last), "{date_short_pretty} at {time}", "")}`));
}

const tone = (view) => (view.bot ? "tone-bot" : `tone-${[...view.author].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % 5}`);

async function use(view, element, option, node, problem) {
  const url = safeUrl((option && option.url) || element.url || "");
  if (element.confirm && !(await confirmed(element.confirm))) return;
  if (url) window.open(url, "_blank", "noopener");
  node.setAttribute("aria-busy", "true");
  const error = await post("/click", { channel: view.channel, ts: view.ts, action_id: element.action_id, option: option ? option.value : null });
  node.removeAttribute("aria-busy");
  show(problem, error);
}

function confirmed(texts) {
  const dialog = $("confirm");
  $("confirm-title").replaceChildren(...rich(texts.title));
  $("confirm-text").replaceChildren(...rich(texts.text));
  $("confirm-yes").replaceChildren(...rich(texts.confirm));
  $("confirm-no").replaceChildren(...rich(texts.deny));
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// Lists of messages. A node is kept as long as its message and its neighbour stay the same, so that focus,
// selection and screen readers are not disturbed by what happens elsewhere.

const drawn = new WeakMap(); // li -> what it was drawn from

function fill(list, views, inThread) {
  const nodes = new Map([...list.children].map((node) => [node.dataset.key, node]));
  const wanted = [];
  let previous = null;
  for (const view of views) {
    if (!inThread && (!previous || dayOf(previous) !== dayOf(view))) {
      wanted.push(keep(nodes, `day ${dayOf(view)}`, dayOf(view), () => el("li", { class: "day" }, el("span", {}, sayDate(seconds(view), "{date_long_pretty}", "")))));
      previous = null;
    }
    const replies = inThread ? [] : repliesOf(channels.get(view.channel), view.ts);
    const from = JSON.stringify([view, previous && previous.ts, previous && hasReplies(previous), replies.map((reply) => reply.ts)]);
    const before = previous;
    wanted.push(keep(nodes, view.ts, from, () => messageNode(view, before, inThread)));
    previous = view;
  }
  const focus = list.contains(document.activeElement) ? where(document.activeElement) : null;
  wanted.forEach((node, index) => {
    if (list.children[index] !== node) list.insertBefore(node, list.children[index] || null);
  });
  while (list.children.length > wanted.length) list.lastChild.remove();
  if (focus && !list.contains(document.activeElement)) {
    list.querySelector(`[data-key="${CSS.escape(focus.key)}"] [data-action="${CSS.escape(focus.action)}"]`)?.focus();
  }
}

function keep(nodes, key, from, make) {
  const old = nodes.get(key);
  if (old && drawn.get(old) === from) return old;
  const node = make();
  node.dataset.key = key;
  drawn.set(node, from);
  return node;
}

const where = (node) => ({ key: node.closest("li[data-key]")?.dataset.key || "", action: node.dataset.action || "" });

// What is shown

function follow(scroller, change) {
  const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_BOTTOM;
  change();
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  return atEnd;
}

function drawChannel() {
  const channel = channels.get(current);
  if (!channel) return;
  const roots = rootsOf(channel);
  $("title").textContent = (channel.direct ? "" : "# ") + channel.name;
  $("about").textContent = channel.has_bot ? "" : `${bot} is not in this channel: /invite @${bot}`;
  $("composer-label").textContent = `Message ${channel.name}`;
  $("composer-text").placeholder = `Message ${channel.direct ? "" : "#"}${channel.name}, or ${document.body.dataset.command} help`;
  $("welcome").hidden = roots.length > 0;
  $("welcome-title").textContent = channel.direct ? `You and ${channel.name}` : `Welcome to #${channel.name}`;
  fill($("messages"), roots, false);
}

function drawThread() {
  const channel = channels.get(current);
  const root = channel && openThread ? channel.messages.get(openThread) : null;
  const panel = $("thread");
  if (!root) {
    openThread = null;
    panel.hidden = true;
    document.body.classList.remove("in-thread");
    return;
  }
  panel.hidden = false;
  document.body.classList.add("in-thread");
  $("thread-about").textContent = (channel.direct ? "" : "# ") + channel.name;
  fill($("replies"), [root, ...repliesOf(channel, root.ts)], true);
}

function drawChannels() {
  for (const [list, direct] of [[$("channels"), false], [$("directs"), true]]) {
    list.replaceChildren(...[...channels.values()].filter((channel) => channel.direct === direct).map((channel) =>
      el("li", {}, el("button", {
        type: "button", class: "channel", "aria-current": channel.id === current ? "page" : false,
        onclick: () => openChannel(channel.id),
      }, el("span", { class: "mark", "aria-hidden": "true" }, direct ? "●" : "#"), channel.name,
      channel.unread ? el("span", { class: "unread", "aria-label": `${channel.unread} unread` }, String(channel.unread)) : null))));
  }
}

function openChannel(id) {
  if (current !== id) openThread = null;
  current = id;
  channels.get(id).unread = 0;
  document.body.classList.remove("show-sidebar");
  $("menu").setAttribute("aria-expanded", "false");
  history.replaceState(null, "", `#${id}`);
  drawChannels();
  drawChannel();
  drawThread();
  $("stream").scrollTop = $("stream").scrollHeight;
  $("newer").hidden = true;
}

function showThread(ts) {
  openThread = ts;
  drawThread();
  const scroller = $("replies").parentElement;
  scroller.scrollTop = scroller.scrollHeight;
  $("thread-text").focus();
}

function closeThread() {
  const back = $("messages").querySelector(`[data-key="${CSS.escape(openThread || "")}"] .replies, [data-key="${CSS.escape(openThread || "")}"] .start-thread`);
  openThread = null;
  drawThread();
  (back || $("composer-text")).focus();
}

// What changes

function hear(change) {
  if (change.kind === "state") return begin(change);
  if (change.kind === "app") return presence(change.online);
  if (change.kind === "channel") {
    const known = channels.get(change.channel.id) || { messages: new Map(), unread: 0 };
    channels.set(change.channel.id, { ...known, ...change.channel });
    drawChannels();
    return drawChannel();
  }
  const id = change.kind === "message" ? change.message.channel : change.channel;
  const channel = channels.get(id);
  if (!channel) return undefined;
  const isNew = change.kind === "message" && !channel.messages.has(change.message.ts);
  if (change.kind === "message") channel.messages.set(change.message.ts, change.message);
  else channel.messages.delete(change.ts);
  if (id !== current) {
    if (isNew) channel.unread += 1;
    return drawChannels();
  }
  const followed = follow($("stream"), drawChannel);
  if (isNew && !followed && !isReply(change.message)) $("newer").hidden = false;
  follow($("replies").parentElement, drawThread);
  return undefined;
}

function begin(state) {
  channels.clear();
  for (const channel of state.channels) channels.set(channel.id, { ...channel, messages: new Map(), unread: 0 });
  for (const view of state.messages) channels.get(view.channel).messages.set(view.ts, view);
  presence(state.online);
  const [id, ts] = decodeURIComponent(location.hash.slice(1)).split("/");
  const asked = channels.get(id);
  const first = channels.get(current) || asked || channels.values().next().value;
  const kept = current === first.id ? openThread : null;
  openChannel(first.id);
  openThread = kept;
  drawThread();
  if (asked === first && ts && channels.get(id).messages.has(ts)) point(channels.get(id), ts);
}

function point(channel, ts) {
  const view = channel.messages.get(ts);
  if (isReply(view)) showThread(view.thread_ts);
  const node = document.querySelector(`li[data-key="${CSS.escape(ts)}"]`);
  node?.scrollIntoView({ block: "center" });
  node?.classList.add("pointed");
}

function presence(online) {
  $("presence").className = `presence ${online ? "online" : ""}`;
  $("presence-text").textContent = online ? `${bot} is connected` : `${bot} is not connected`;
}

const stream = new EventSource("/changes");
stream.onmessage = (event) => hear(JSON.parse(event.data));
stream.onerror = () => { $("presence").className = "presence"; $("presence-text").textContent = "the workspace is gone; waiting for it"; };

// What is sent

async function post(path, body) {
  try {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (response.ok) return null;
    const text = await response.text();
    try { return JSON.parse(text).error; } catch { return text; }
  } catch {
    return "The workspace does not answer. Is it still running?";
  }
}

function show(place, error) {
  place.textContent = error || "";
  place.hidden = !error;
}

function composer(form, thread) {
  const field = form.querySelector("textarea");
  const typed = [];
  let at = 0;
  const fit = () => { field.rows = Math.min(10, field.value.split("\n").length); };
  const recall = (step) => {
    at = Math.max(0, Math.min(typed.length, at + step));
    field.value = typed[at] || "";
    fit();
    field.setSelectionRange(field.value.length, field.value.length);
  };
  const send = async () => {
    const text = field.value.replace(/\s+$/, "");
    if (!text) return;
    typed.push(text);
    at = typed.length;
    field.value = "";
    fit();
    const error = await post("/send", { channel: current, text, thread_ts: thread() });
    show(form.querySelector(".error"), error);
    if (error && !field.value) field.value = text;
  };
  field.addEventListener("input", fit);
  field.addEventListener("keydown", (event) => {
    const fresh = field.value === "" || field.value === typed[at];
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && fresh && typed.length) { event.preventDefault(); recall(-1); }
    if (event.key === "ArrowDown" && fresh && at < typed.length) { event.preventDefault(); recall(1); }
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
}

composer($("composer"), () => null);
composer($("thread-composer"), () => openThread);
$("thread-close").addEventListener("click", closeThread);
$("newer").addEventListener("click", () => { $("stream").scrollTop = $("stream").scrollHeight; });
$("stream").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = $("stream");
  if (scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM) $("newer").hidden = true;
});
$("menu").addEventListener("click", () => {
  const open = document.body.classList.toggle("show-sidebar");
  $("menu").setAttribute("aria-expanded", String(open));
  if (open) document.querySelector(".channel[aria-current]")?.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("confirm").open) return;
  if (document.body.classList.contains("show-sidebar")) $("menu").click();
  else if (openThread) closeThread();
});
for (const button of document.querySelectorAll("[data-try]")) {
  button.addEventListener("click", () => { $("composer-text").value = button.dataset.try; $("composer-text").focus(); });
}
$("welcome").querySelector(".avatar").textContent = bot.slice(0, 1);
