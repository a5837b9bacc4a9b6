// The page of the local workspace: keeps what the stream of changes says, shows it, and sends what is typed.

import { block, picture } from "/page/blocks.js";
import { composer } from "/page/composer.js";
import { leaveWith, showModal } from "/page/modal.js";
import { el, inlineOf, rich, safeUrl, sayDate } from "/page/render.js";

const $ = (id) => document.getElementById(id);
const { bot } = document.body.dataset;
const usage = JSON.parse(document.body.dataset.usage);
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
    && (inThread ? isReply(previous) : !hasReplies(previous));
  const problem = el("p", { class: "error", role: "alert", hidden: true });
  const act = (element, choice, node) => use({ channel: view.channel, ts: view.ts }, element, choice, node, problem);
  const time = el("time", { title: new Date(seconds(view) * 1000).toLocaleString() }, sayDate(seconds(view), "{time}", ""));
  const heading = compact ? el("p", { class: "side" }, time) : el("div", { class: `avatar ${tone(view)}`, "aria-hidden": "true" }, view.author.slice(0, 1));
  const body = el("div", { class: "message-body" });
  if (view.ephemeral) body.append(el("p", { class: "only" }, "Only visible to you"));
  if (!compact) {
    body.append(el("p", { class: "by" },
      el("strong", {}, view.author), view.bot ? el("span", { class: "badge" }, "APP") : null, " ", time));
  }
  body.append(...view.blocks.map((item) => block(item, act)), ...view.files.map(file));
  if (view.edited) {
    const lines = body.querySelectorAll(".body p");
    (lines[lines.length - 1] || body).append(el("span", { class: "quiet" }, " (edited)"));
  }
  if (view.reactions.length) {
    body.append(el("p", { class: "row" }, ...view.reactions.map((reaction) =>
      el("span", { class: "reaction" }, ...inlineOf(reaction.emoji), ` ${reaction.count}`))));
  }
  body.append(problem);
  if (!inThread && !view.ephemeral) body.append(threadLink(view));
  return el("li", { class: `message${compact ? " compact" : ""}${view.ephemeral ? " ephemeral" : ""}`, "data-ts": view.ts }, heading, body);
}

function file(view) {
  const name = el("figcaption", { class: "quiet" }, view.name);
  if (view.picture) return el("figure", {}, name, picture(view.url, view.alt));
  return el("a", { class: "picture", href: view.url, download: view.name }, view.name, el("span", { class: "quiet" }, ` ${view.size.toLocaleString()} bytes`));
}

function hasReplies(view) {
  return repliesOf(channels.get(view.channel), view.ts).length > 0;
}

function threadLink(view) {
  const replies = repliesOf(channels.get(view.channel), view.ts);
  const open = () => showThread(view.ts);
  if (!replies.length) return el("button", { type: "button", class: "plain start-thread", onclick: open }, "Reply in thread");
  const last = replies[replies.length - 1];
  const many = countOf(replies.length);
  return el("button", { type: "button", class: "plain replies", onclick: open },
    el("strong", {}, many), el("span", { class: "quiet" }, ` Last reply ${sayDate(seconds(last), "{date_short_pretty} at {time}", "")}`));
}

const countOf = (replies) => (replies === 1 ? "1 reply" : `${replies} replies`);
const tone = (view) => (view.bot && view.author === bot ? "tone-bot" : `tone-${[...view.author].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % 5}`);

// `place` is { channel, ts } of a message, or { view } of a modal.
async function use(place, element, choice, node, problem) {
  const url = safeUrl(element.url || "");
  if (element.confirm && !(await confirmed(element.confirm))) return;
  if (url) window.open(url, "_blank", "noopener");
  node.setAttribute("aria-busy", "true");
  const error = await post("/click", { ...place, action_id: element.action_id, choice });
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
    if (inThread && previous && !isReply(previous)) {
      const many = countOf(views.length - 1);
      wanted.push(keep(nodes, "replies", many, () => el("li", { class: "day left" }, el("span", {}, many))));
    }
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

const scrollers = [$("stream"), $("replies").parentElement];
const leftEnd = new Set(); // scrollers in which somebody has scrolled up, away from the newest

// A picture that arrives, or a field that grows, does not push the newest message out of sight.
const resized = new ResizeObserver(() => {
  for (const scroller of scrollers) if (!leftEnd.has(scroller)) scroller.scrollTop = scroller.scrollHeight;
});
for (const scroller of scrollers) {
  for (const part of [scroller, scroller.querySelector("ol")]) resized.observe(part);
  scroller.addEventListener("scroll", () => {
    const near = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_BOTTOM;
    if (near) leftEnd.delete(scroller);
    else leftEnd.add(scroller);
  });
}

function follow(scroller, change) {
  const atEnd = !leftEnd.has(scroller);
  change();
  if (atEnd) toEnd(scroller);
  return atEnd;
}

function toEnd(scroller) {
  leftEnd.delete(scroller);
  scroller.scrollTop = scroller.scrollHeight;
}

function drawChannel() {
  const channel = channels.get(current);
  if (!channel) return;
  const roots = rootsOf(channel);
  $("title").textContent = (channel.direct ? "" : "# ") + channel.name;
  const about = [channel.private && "private", channel.archived && "archived: nobody can write here any more",
    !channel.has_bot && `${bot} is not in this channel: /invite @${bot}`];
  $("about").textContent = about.filter(Boolean).join(" · ");
  for (const part of $("composer").elements) part.disabled = Boolean(channel.archived);
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
  $("stream").setAttribute("aria-busy", "true"); // a screen reader reads what is new, not the whole channel
  channels.get(id).unread = 0;
  document.body.classList.remove("show-sidebar");
  $("menu").setAttribute("aria-expanded", "false");
  history.replaceState(null, "", `#${id}`);
  drawChannels();
  drawChannel();
  drawThread();
  channelComposer.show(id);
  toEnd($("stream"));
  $("stream").removeAttribute("aria-busy");
  $("newer").hidden = true;
}

function showThread(ts) {
  openThread = ts;
  threadComposer.show(`${current}/${ts}`);
  drawThread();
  toEnd(scrollers[1]);
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
  if (change.kind === "modal") return showModal(change.modal, post, use);
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
  follow(scrollers[1], drawThread);
  return undefined;
}

function begin(state) {
  channels.clear();
  for (const channel of state.channels) channels.set(channel.id, { ...channel, messages: new Map(), unread: 0 });
  for (const view of state.messages) channels.get(view.channel).messages.set(view.ts, view);
  presence(state.online);
  showModal(state.modal, post, use);
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

const channelComposer = composer($("composer"), (text) => post("/send", { channel: current, text }), usage);
const threadComposer = composer($("thread-composer"), (text) => post("/send", { channel: current, text, thread_ts: openThread }), []);
leaveWith(post);
$("thread-close").addEventListener("click", closeThread);
$("newer").addEventListener("click", () => toEnd($("stream")));
$("stream").addEventListener("scroll", () => { if (!leftEnd.has($("stream"))) $("newer").hidden = true; });
$("menu").addEventListener("click", () => {
  const open = document.body.classList.toggle("show-sidebar");
  $("menu").setAttribute("aria-expanded", String(open));
  if (open) document.querySelector(".channel[aria-current]")?.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
  if (document.body.classList.contains("show-sidebar")) $("menu").click();
  else if (openThread) closeThread();
});
for (const button of document.querySelectorAll("[data-try]")) {
  button.addEventListener("click", () => channelComposer.fill(button.dataset.try));
}
$("welcome").querySelector(".avatar").textContent = bot.slice(0, 1);

const stream = new EventSource("/changes");
stream.onmessage = (event) => hear(JSON.parse(event.data));
stream.onerror = () => { $("presence").className = "presence"; $("presence-text").textContent = "the workspace is gone; waiting for it"; };
