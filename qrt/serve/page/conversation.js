"use strict";
// The state of a conversation, without DOM and network.
//
// It is a list of exchanges {question, answer}. An answer is {raw, reasoning, state, error, figures}; its state is
//   running   its text still comes
//   done      the model ended it
//   cut       at the most tokens
//   stopped   by the user
//   failed    by the server or the connection
// What the model is told of earlier exchanges is decided in `isPart`, and nowhere else.

class Conversation {
  constructor() {
    this.system = ""; // the system prompt, sent before all messages
    this.exchanges = [];
    this.begun = null; // {exchange, typed, before, length}: the one whose answer runs, and what was there before
  }

  // --- beginning an answer: the exchange, or null while another runs -----------------------------------

  ask(question) {
    return this.begin(this.exchanges, { question, answer: newAnswer() }, question);
  }

  // The last question once more.
  retry() {
    const last = this.exchanges.at(-1);
    return last ? this.begin(this.exchanges.slice(0, -1), { question: last.question, answer: newAnswer() }) : null;
  }

  // Another question in the place of an earlier one; what came after that is dropped.
  edit(index, question) {
    return this.begin(this.exchanges.slice(0, index), { question, answer: newAnswer() }, question);
  }

  // The last answer goes on where it was cut or stopped.
  resume() {
    const last = this.exchanges.at(-1);
    if (!last || !canResume(last)) return null;
    const answer = { ...last.answer, state: "running", figures: null };
    return this.begin(this.exchanges.slice(0, -1), { question: last.question, answer });
  }

  // `typed` is a question that stands nowhere else.
  begin(earlier, exchange, typed = null) {
    if (this.begun) return null;
    this.begun = { exchange, typed, before: this.exchanges, length: exchange.answer.raw.length };
    this.exchanges = [...earlier, exchange];
    return exchange;
  }

  // --- an answer comes: nothing happens for one that is not the running one any more -------------------

  isRunning(exchange) {
    return this.begun !== null && this.begun.exchange === exchange;
  }

  add(exchange, { content = "", reasoning = "" }) {
    if (!this.isRunning(exchange)) return;
    exchange.answer.raw += content;
    exchange.answer.reasoning += reasoning;
  }

  // The answer has ended so. One that was refused, or stopped before it began, is taken back: all is as it was
  // before, and a question that was typed for it is returned.
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

  // The messages of the request for the running answer.
  messages() {
    const { question, answer } = this.begun.exchange;
    const own = [{ role: "user", content: question }];
    if (answer.raw) own.push({ role: "assistant", content: answer.raw });
    return [...this.history(), ...own];
  }

  // The messages of all that is part of the conversation so far.
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

  // Of what `save` gave, perhaps in the middle of an answer, whose connection is gone: {conversation, question}
  // with the question that got no answer. What is not of that form is an empty conversation.
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

// Whether later requests tell the model of an exchange: its answer has a text, and nothing broke it off but the
// most tokens or the user.
function isPart({ answer }) {
  return ["done", "cut", "stopped"].includes(answer.state) && thoughtAndText(answer).text.trim() !== "";
}

// A thought is not handed back to the model, so an answer with one cannot be gone on with.
function canResume({ answer }) {
  return ["cut", "stopped"].includes(answer.state) && answer.raw !== "" && !thoughtAndText(answer).thought;
}

// The parts of an answer: what the model thought, and what it said. Thoughts come apart from the text, or in it
// between <think> and </think>; some templates write the first of these themselves.
function thoughtAndText({ raw, reasoning }) {
  const opened = /^\s*<think>/.exec(raw)?.[0];
  const end = /(?:^|\n)[ \t]*<\/think>[ \t]*(?:\n|$)/.exec(raw);
  const at = opened ? raw.indexOf("</think>") : (end?.index ?? -1);
  if (!opened && at < 0) return { thought: reasoning, text: raw, thinking: reasoning !== "" && raw === "" };
  const thought = (at < 0 ? raw : raw.slice(0, at)).slice(opened?.length ?? 0).trim();
  const text = at < 0 ? "" : raw.slice(raw.indexOf("</think>", at) + "</think>".length).trimStart();
  return { thought: [reasoning, thought].filter(Boolean).join("\n\n"), text, thinking: at < 0 };
}
