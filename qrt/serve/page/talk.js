"use strict";
// A conversation with the server: one request at a time, with a streamed answer. No DOM.

// Returns the path and body of the request for the running answer. `settings` are the numbers of the form; the
// model's defaults replace missing ones.
function request(mode, conversation, settings) {
  const shared = { ...settings, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (mode === "completion") {
    const { question, answer } = conversation.begun.exchange;
    return { path: "v1/completions", body: { max_tokens: 256, ...shared, prompt: question + answer.raw } };
  }
  const messages = conversation.messages();
  const more = messages.at(-1).role === "assistant" ? { continue_final_message: true, add_generation_prompt: false } : {};
  return { path: "v1/chat/completions", body: { ...shared, ...more, messages } };
}

// Reads server-sent events from text in pieces of any size: returns the data of each complete event.
class EventReader {
  constructor() {
    this.rest = "";
  }

  feed(text) {
    this.rest += text;
    const parts = this.rest.split(/\r?\n\r?\n/);
    this.rest = parts.pop();
    const data = (part) => part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
    return parts.map((part) => data(part).map((line) => line.slice(5).trimStart()).join("\n")).filter(Boolean);
  }
}

// Yields the pieces of an answer: {content, reasoning, finish, usage}. Throws the server's message if the server
// fails, and an Error if the connection ends before the answer does.
async function* pieces(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  let finished = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done && finished) return;
    if (done) throw new Error("the connection ended before the answer did");
    for (const data of events.feed(value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? "the server broke off");
      const choice = event.choices?.[0];
      finished ||= Boolean(choice?.finish_reason);
      yield {
        content: choice?.delta?.content ?? choice?.text ?? "",
        reasoning: choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "",
        finish: choice?.finish_reason ?? null,
        usage: event.usage ?? null,
      };
    }
  }
}

async function checked(reply) {
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `${reply.status} ${reply.statusText}`);
  throw Object.assign(error, { status: reply.status });
}

class Talk {
  // `send(path, body, signal)` returns fetch's reply; `changed()` is called when the conversation changes, and
  // `failed(error)` when a request fails without any answer.
  constructor({ mode, conversation, send, settings, changed, failed, clock }) {
    Object.assign(this, { mode, conversation, send, settings, changed, failed, clock });
    this.controller = null; // aborts the running request
  }

  // Runs an exchange that the conversation has begun, to its end. Returns the question to give back, or null.
  async run(exchange) {
    if (!exchange) return null;
    const controller = new AbortController();
    this.controller = controller;
    let state = "failed";
    let problem = null;
    this.changed();
    try {
      state = await this.receive(exchange, controller.signal);
    } catch (error) {
      if (controller.signal.aborted) state = "stopped";
      else problem = error;
    }
    const current = this.conversation.isRunning(exchange);
    const question = this.conversation.end(exchange, state, problem?.message);
    if (this.controller === controller) this.controller = null;
    if (!current) return null; // the conversation was cleared
    // an exchange that stays shows the problem itself
    if (problem && !this.conversation.exchanges.includes(exchange)) this.failed(problem);
    this.changed();
    return question;
  }

  // Adds the answer's pieces to the conversation; returns its state at the end.
  async receive(exchange, signal) {
    const { path, body } = request(this.mode, this.conversation, this.settings());
    const began = this.clock();
    let first = null;
    let state = "done";
    for await (const piece of pieces(await checked(await this.send(path, body, signal)))) {
      if (!this.conversation.isRunning(exchange)) return "stopped";
      if (piece.content || piece.reasoning) first ??= this.clock();
      if (piece.finish === "length") state = "cut";
      this.conversation.add(exchange, piece);
      if (piece.usage) exchange.answer.figures = figures(piece.usage, began, first, this.clock());
      this.changed();
    }
    return state;
  }

  stop() {
    this.controller?.abort();
  }

  clear() {
    this.stop();
    this.conversation.clear();
    this.changed();
  }
}

// Returns the time to the first token, counts of tokens, and tokens per second after the first one.
function figures(usage, began, first, now) {
  const tokens = usage.completion_tokens;
  return {
    first_ms: first === null ? null : Math.round(first - began),
    prompt_tokens: usage.prompt_tokens,
    cached_tokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    completion_tokens: tokens,
    tokens_per_second: first !== null && tokens > 1 && now > first ? ((tokens - 1) * 1000) / (now - first) : null,
  };
}
