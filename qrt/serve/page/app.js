"use strict";
// The page: its form and buttons, the two talks, and what this tab keeps. It asks only its own server.

const STORE = `qrt ${location.pathname}`; // key in the tab's storage, which is kept until the tab closes
const NUMBERS = { "max-tokens": "max_tokens", temperature: "temperature", "top-p": "top_p", seed: "seed" };
const MODES = ["chat", "completion"];

const $ = (id) => document.getElementById(id);
const kept = keptState();
let mode = kept.mode === "completion" ? "completion" : "chat";
const talks = {};
const logs = {};

// --- the server ----------------------------------------------------------------------------------------

function ask(path, options = {}) {
  const key = $("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  return fetch(path, { ...options, headers });
}

function send(path, body, signal) {
  return ask(path, { method: "POST", body: JSON.stringify(body), signal });
}

const figuresView = new Figures(async (path) => (await checked(await ask(path))).json(), wantKey);

// Shows the key's field when the server asks for a key, and hides it when a key is right.
let keyWanted = false;
function wantKey(error) {
  if (error?.status === 401) showPanel(true, "key");
  else if (!error && keyWanted) showPanel(false);
  keyWanted = error?.status === 401;
}

function fail(error) {
  $("error").textContent = error?.message ?? "";
  $("error").hidden = !error;
  if (error) wantKey(error);
}

// --- the talks -----------------------------------------------------------------------------------------

function settings() {
  const given = Object.entries(NUMBERS).filter(([id]) => $(id).value !== "");
  return Object.fromEntries(given.map(([id, name]) => [name, Number($(id).value)]));
}

function addTalk(name) {
  const { conversation, question } = Conversation.restored(kept.talks?.[name]);
  const log = $(`log-${name}`);
  let drawn = false;
  const changed = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      logs[name].show();
      showButtons();
    });
  };
  const talk = new Talk({ mode: name, conversation, send, settings, changed, failed: fail, clock: () => performance.now() });
  const edit = (exchange, text) => start(talk, () => conversation.edit(conversation.exchanges.indexOf(exchange), text));
  const acts = { edit, retry: () => start(talk, () => conversation.retry()), resume: () => start(talk, () => conversation.resume()) };
  talks[name] = talk;
  logs[name] = new LogView(log, $("jump"), conversation, name, acts);
  return question;
}

// Runs the answer that `begin` begins. A question without an answer is put back into the field.
async function start(talk, begin) {
  if (!$("settings").checkValidity()) {
    showPanel(true);
    return $("settings").reportValidity();
  }
  fail(null);
  const exchange = begin();
  if (!exchange) return;
  logs[talk.mode].follows = true;
  takeBack(await talk.run(exchange));
  keep();
}

function takeBack(question) {
  const field = $("prompt");
  if (question === null || field.value === question) return;
  field.value = field.value ? `${question}\n${field.value}` : question;
  field.focus();
}

// --- what this tab keeps -------------------------------------------------------------------------------

function keptState() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function keep() {
  const state = { mode, key: $("key").value, form: {}, talks: {} };
  for (const id of Object.keys(NUMBERS)) state.form[id] = $(id).value;
  for (const name of MODES) state.talks[name] = talks[name].conversation.save();
  try {
    sessionStorage.setItem(STORE, JSON.stringify(state));
  } catch {
    sessionStorage.removeItem(STORE); // the state is larger than the browser's limit
  }
}

// Downloads the conversation as a file, with messages in the form of the API.
function save() {
  const messages = talks.chat.conversation.history();
  const text = JSON.stringify({ model: figuresView.model, messages }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: `conversation-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// --- the form ------------------------------------------------------------------------------------------

function showButtons() {
  const running = talks[mode].conversation.begun !== null;
  $("stop").hidden = !running;
  $("send").hidden = running;
  $("save").hidden = mode !== "chat";
  $("save").disabled = $("clear").disabled = talks[mode].conversation.exchanges.length === 0;
}

function showMode(name) {
  mode = name;
  for (const each of MODES) {
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`log-${each}`).hidden = each !== name;
  }
  $("prompt").placeholder = name === "chat" ? "Write a message" : "Write the beginning of a text";
  $("max-tokens").placeholder = name === "chat" ? "no limit" : "256";
  logs[name].show();
  showButtons();
  fail(null);
}

function showPanel(open, focus) {
  $("panel").classList.toggle("open", open);
  $("panel-button").setAttribute("aria-expanded", String(open));
  if (!open) return;
  $("settings-fold").open = true;
  if (focus && document.activeElement === document.body) $(focus).focus();
}

function submit() {
  const text = $("prompt").value;
  const talk = talks[mode];
  if (talk.conversation.begun || !text.trim()) return;
  start(talk, () => {
    if (mode === "chat") $("prompt").value = "";
    return talk.conversation.ask(text);
  });
}

function begin() {
  const lost = MODES.map(addTalk);
  $("key").value = kept.key ?? "";
  for (const id of Object.keys(NUMBERS)) $(id).value = kept.form?.[id] ?? "";
  $("system").value = talks.chat.conversation.system;
  showMode(mode);
  lost.forEach(takeBack);
  $("form").addEventListener("submit", (event) => (event.preventDefault(), submit()));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Escape") talks[mode].stop();
    if (!isEnter(event)) return;
    event.preventDefault();
    submit();
  });
  // Stop takes the place of Send, so the second click of a double click on Send is ignored
  $("stop").addEventListener("click", (event) => event.detail > 1 || talks[mode].stop());
  $("clear").addEventListener("click", () => (talks[mode].clear(), fail(null), keep()));
  $("save").addEventListener("click", save);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("system").addEventListener("input", () => (talks.chat.conversation.system = $("system").value));
  $("key").addEventListener("change", () => figuresView.poll());
  $("panel-button").addEventListener("click", () => showPanel(!$("panel").classList.contains("open")));
  for (const name of MODES) $(`tab-${name}`).addEventListener("click", () => showMode(name));
  addEventListener("pagehide", keep);
  document.addEventListener("visibilitychange", () => (document.hidden ? keep() : figuresView.poll()));
  figuresView.poll();
}

begin();
