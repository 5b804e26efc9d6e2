"use strict";
// The playground: chat and completion over the OpenAI endpoints, figures from /load. No other requests.

const POLL_MS = 1000;
const POINTS = 60; // of the line: a minute
const $ = (id) => document.getElementById(id);

let mode = "chat";
let conversation = []; // of the chat: {role, content}
let running = null; // AbortController of the answer that streams
let rates = [];

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function ask(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: headers() });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  throw new Error(body?.error?.message ?? `${reply.status} ${reply.statusText}`);
}

// The events of a stream of server-sent events, as parsed JSON, up to [DONE].
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue; // a comment
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function request(text) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const shared = {
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (mode === "completion") return ["v1/completions", { ...shared, prompt: text }];
  return ["v1/chat/completions", { ...shared, messages: conversation }];
}

function show(role, text) {
  const message = document.createElement("div");
  message.className = `message ${role}`;
  message.append(text);
  $("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

function fail(error) {
  $("error").textContent = error ?? "";
  $("error").hidden = !error;
}

function setRunning(controller) {
  running = controller;
  $("stop").hidden = !controller;
  $("send").hidden = Boolean(controller);
}

async function send(text) {
  fail(null);
  const answer = start(text);
  const controller = new AbortController();
  setRunning(controller);
  const began = performance.now();
  let first = null;
  let usage = null;
  let content = "";
  try {
    const [path, body] = request(text);
    const reply = await ask(path, { method: "POST", body: JSON.stringify(body), signal: controller.signal });
    for await (const event of events(reply)) {
      const choice = event.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (piece) {
        first ??= performance.now();
        content += piece;
        answer.append(piece);
        $("messages").scrollTop = $("messages").scrollHeight;
      }
      usage = event.usage ?? usage;
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    setRunning(null);
    answer.classList.remove("running");
    note(answer, usage, began, first, controller.signal.aborted);
    if (mode === "chat") conversation.push({ role: "assistant", content });
  }
}

// Show the user's text; returns where the answer goes.
function start(text) {
  if (mode === "chat") {
    conversation.push({ role: "user", content: text });
    show("user", text);
    return show("assistant running", "");
  }
  const answer = show("assistant running", "");
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = text;
  answer.append(given);
  return answer;
}

function note(answer, usage, began, first, stopped) {
  const parts = [];
  const seconds = (performance.now() - (first ?? began)) / 1000;
  if (first !== null) parts.push(`first token after ${Math.round(first - began)} ms`);
  if (usage) {
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    parts.push(`${usage.prompt_tokens_details.cached_tokens} of the prompt cached`);
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (stopped) parts.push("stopped");
  const line = document.createElement("small");
  line.textContent = parts.join(", ");
  answer.append(line);
}

function clear() {
  running?.abort();
  conversation = [];
  $("messages").replaceChildren();
  fail(null);
}

function choose(tab) {
  if (mode === tab) return;
  mode = tab;
  clear();
  for (const name of ["chat", "completion"]) $(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
  $("prompt").placeholder = tab === "chat" ? "Write a message" : "Write the beginning of a text";
}

const count = (number) => Math.round(number).toLocaleString("en");
const rate = (number) => number.toFixed(number < 100 ? 1 : 0);

function showLoad(load) {
  const part = (tokens) => `${(100 * tokens) / load.kv_pool_tokens}%`;
  $("kv-used-bar").style.width = part(load.kv_used_tokens);
  $("kv-cached-bar").style.width = part(load.kv_cached_tokens);
  $("kv-used").textContent = `${count(load.kv_used_tokens)} tokens`;
  $("kv-cached").textContent = `${count(load.kv_cached_tokens)} tokens`;
  $("kv-pool").textContent = `${count(load.kv_pool_tokens)} tokens`;
  $("running").textContent = count(load.running);
  $("waiting").textContent = count(load.waiting);
  const hits = load.prefix_query_tokens ? (100 * load.prefix_hit_tokens) / load.prefix_query_tokens : 0;
  $("hits").textContent = `${hits.toFixed(1)} %`;
  $("rate").textContent = rate(load.generation_tokens_per_second);
  $("prompt-rate").textContent = rate(load.prompt_tokens_per_second);
  $("generated").textContent = count(load.generation_tokens);
  rates = [...rates, load.generation_tokens_per_second].slice(-POINTS);
  const most = Math.max(1, ...rates);
  const points = rates.map((value, i) => `${(240 * (i + POINTS - rates.length)) / (POINTS - 1)},${58 - (54 * value) / most}`);
  $("rate-line").firstElementChild.setAttribute("points", points.join(" "));
}

async function showServer() {
  const info = await (await ask("get_server_info")).json();
  $("model").textContent = `${info.models[0]}, ${info.weight_scheme} weights, ${info.dtype} on ${info.device}`;
  $("kv-format").textContent = info.kv;
  $("kv-bytes").textContent = count(info.kv_bytes_per_token);
}

let known = false;
async function poll() {
  try {
    if (!known) await showServer();
    known = true;
    showLoad(await (await ask("load")).json());
  } catch (error) {
    known = false;
    $("model").textContent = error.message;
  }
  setTimeout(poll, POLL_MS);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  if (mode === "chat") $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("tab-chat").addEventListener("click", () => choose("chat"));
$("tab-completion").addEventListener("click", () => choose("completion"));
poll();
