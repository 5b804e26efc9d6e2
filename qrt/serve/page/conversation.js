"use strict";
// The state of a conversation, without DOM and network.
//
// It is a list of exchanges {question, answer}. An answer is {raw, reasoning, state, error, figures}; its state is
//   running   text is still coming
//   done      the model ended it
//   cut       it reached the token limit
//   stopped   the user stopped it
//   failed    the server or the connection failed
// Only `isPart` decides which earlier exchanges the model sees.

class Conversation {
  constructor() {
    this.system = ""; // the system prompt, sent before all messages
    this.exchanges = [];
    this.begun = null; // {exchange, typed, before, length}: the running exchange, and the state before it
  }

  // --- begin an answer: return the exchange, or null while another runs --------------------------------

  ask(question) {
    return this.begin(this.exchanges, { question, answer: newAnswer() }, question);
  }

  // Asks the last question again.
  retry() {
    const last = this.exchanges.at(-1);
    return last ? this.begin(this.exchanges.slice(0, -1), { question: last.question, answer: newAnswer() }) : null;
  }

  // Replaces an earlier question; the exchanges after it are dropped.
  edit(index, question) {
    return this.begin(this.exchanges.slice(0, index), { question, answer: newAnswer() }, question);
  }

  // Continues the last answer where it was cut or stopped.
  resume() {
    const last = this.exchanges.at(-1);
    if (!last || !canResume(last)) return null;
    const answer = { ...last.answer, state: "running", figures: null };
    return this.begin(this.exchanges.slice(0, -1), { question: last.question, answer });
  }

  // `typed` is the question if it was just typed, so that it can be given back.
  begin(earlier, exchange, typed = null) {
    if (this.begun) return null;
    this.begun = { exchange, typed, before: this.exchanges, length: exchange.answer.raw.length };
    this.exchanges = [...earlier, exchange];
    return exchange;
  }

  // --- an answer comes: an exchange that is not the running one is ignored -----------------------------

  isRunning(exchange) {
    return this.begun !== null && this.begun.exchange === exchange;
  }

  add(exchange, { content = "", reasoning = "" }) {
    if (!this.isRunning(exchange)) return;
    exchange.answer.raw += content;
    exchange.answer.reasoning += reasoning;
  }

  // Ends the running answer with `state`. An answer without any text, refused or stopped too early, is removed:
  // the exchanges are the earlier ones again, and the typed question is returned.
  end(exchange, state, error = null) {
    if (!this.isRunning(exchange)) return null;
    const { before, length, typed } = this.begun;
    const { answer } = exchange;
    this.begun = null;
    Object.assign(answer, { state, error });
    const came = answer.raw.length > length || answer.reasoning;
    if (came || state === "done" || state === "cut") return null;
    this.exchanges = before;
    return typed;
  }

  clear() {
    this.begun = null;
    this.exchanges = [];
  }

  // --- what is sent ------------------------------------------------------------------------------------

  // Returns the messages of the request for the running answer.
  messages() {
    const { question, answer } = this.begun.exchange;
    const own = [{ role: "user", content: question }];
    if (answer.raw) own.push({ role: "assistant", content: answer.raw });
    return [...this.history(), ...own];
  }

  // Returns the messages of all exchanges that are part of the conversation.
  history() {
    const past = this.exchanges.filter(isPart).flatMap(({ question, answer }) => [
      { role: "user", content: question },
      { role: "assistant", content: thoughtAndText(answer).text },
    ]);
    return this.system.trim() ? [{ role: "system", content: this.system }, ...past] : past;
  }

  // --- kept in the browser -----------------------------------------------------------------------------

  save() {
    return { system: this.system, exchanges: this.exchanges };
  }

  // Makes a conversation from what `save` returned: {conversation, question}. A running answer becomes a stopped
  // one, as its connection is gone; if it has no text, its question is returned. Other data give an empty one.
  static restored(saved) {
    const conversation = new Conversation();
    const whole = saved && typeof saved.system === "string" && Array.isArray(saved.exchanges);
    if (!whole || !saved.exchanges.every(isExchange)) return { conversation, question: null };
    conversation.system = saved.system;
    conversation.exchanges = saved.exchanges;
    const last = saved.exchanges.at(-1);
    let question = null;
    if (last?.answer.state === "running") {
      last.answer.state = "stopped";
      if (!last.answer.raw && !last.answer.reasoning) question = conversation.exchanges.pop().question;
    }
    return { conversation, question };
  }
}

function newAnswer() {
  return { raw: "", reasoning: "", state: "running", error: null, figures: null };
}

function isExchange(value) {
  const { question, answer } = value ?? {};
  return [question, answer?.raw, answer?.reasoning, answer?.state].every((text) => typeof text === "string");
}

// Returns whether later requests include an exchange: its answer has text, and only the model, the token limit or
// the user ended it.
function isPart({ answer }) {
  return ["done", "cut", "stopped"].includes(answer.state) && thoughtAndText(answer).text.trim() !== "";
}

// An answer with a thought cannot be continued, because thoughts are not sent back to the model.
function canResume({ answer }) {
  return ["cut", "stopped"].includes(answer.state) && answer.raw !== "" && !thoughtAndText(answer).thought;
}

// Splits an answer into what the model thought and what it said. Thoughts come in a field of their own, or in the
// text between <think> and </think>; some templates write <think> into the prompt.
function thoughtAndText({ raw, reasoning }) {
  const opened = /^\s*<think>/.exec(raw)?.[0];
  const end = /(?:^|\n)[ \t]*<\/think>[ \t]*(?:\n|$)/.exec(raw);
  const at = opened ? raw.indexOf("</think>") : (end?.index ?? -1);
  if (!opened && at < 0) return { thought: reasoning, text: raw, thinking: reasoning !== "" && raw === "" };
  const thought = (at < 0 ? raw : raw.slice(0, at)).slice(opened?.length ?? 0).trim();
  const text = at < 0 ? "" : raw.slice(raw.indexOf("</think>", at) + "</think>".length).trimStart();
  return { thought: [reasoning, thought].filter(Boolean).join("\n\n"), text, thinking: at < 0 };
}
