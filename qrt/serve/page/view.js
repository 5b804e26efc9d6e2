"use strict";
// Shows exchanges and Markdown as elements. Text of the model or the user enters the page as text nodes, or as what
// DOMPurify leaves of its Markdown.

// Makes an element with these properties and children; strings become text nodes.
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function button(label, title, act) {
  const made = element("button", { type: "button", title, onclick: act }, label);
  made.setAttribute("aria-label", title);
  return made;
}

// Copies a text. Pages over plain http from another machine have no navigator.clipboard.
async function copy(text, from) {
  const label = from.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Not copied";
  }
  setTimeout(() => (from.textContent = label), 1500);
}

function copySelected(text) {
  const field = element("textarea", { value: text, className: "offscreen" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("not copied");
}

// --- Markdown ------------------------------------------------------------------------------------------

// Makes an element of a block. Nothing of a text is markup: marked's HTML passes DOMPurify.
function blockElement(block) {
  const made = element("div");
  made.append(DOMPurify.sanitize(blockHTML(block), POLICY));
  for (const bar of made.querySelectorAll(".bar")) {
    const code = bar.nextElementSibling.textContent;
    const copied = button("Copy", "Copy the code", () => copy(code, copied));
    bar.append(copied);
  }
  return made.firstElementChild ?? made;
}

// Shows a text that grows. Elements of unchanged blocks stay, so that a selection in them stays too.
class MarkdownView {
  constructor() {
    this.element = element("div", { className: "markdown" });
    this.growing = new GrowingMarkdown();
    this.sources = [];
  }

  show(text) {
    const blocks = this.growing.parse(text);
    let same = 0;
    while (same < blocks.length && blocks[same].raw === this.sources[same]) same += 1;
    for (const old of [...this.element.children].slice(same)) old.remove();
    this.element.append(...blocks.slice(same).map(blockElement));
    this.sources = blocks.map((block) => block.raw);
  }
}

// --- exchanges -----------------------------------------------------------------------------------------

const STATES = {
  running: "",
  done: "",
  cut: "Cut off: the token limit was reached.",
  stopped: "Stopped.",
};

function stateText(exchange) {
  const { state, error } = exchange.answer;
  if (state === "failed") return `Broken off: ${error}. Not part of the conversation; try it again.`;
  if (state === "running" || isPart(exchange)) return STATES[state];
  return `${STATES[state]} There is no answer, so this is not part of the conversation.`.trim();
}

function figuresText(figures) {
  if (!figures) return "";
  const { first_ms, prompt_tokens, cached_tokens, completion_tokens, tokens_per_second } = figures;
  const parts = [`${prompt_tokens} + ${completion_tokens} tokens`, `${cached_tokens} of the prompt cached`];
  if (first_ms !== null) parts.unshift(`first token after ${first_ms} ms`);
  if (tokens_per_second) parts.push(`${tokens_per_second.toFixed(1)} tokens/s`);
  return parts.join(", ");
}

// One question and its answer. `acts` holds what the buttons do: edit(exchange, text), retry(), resume().
class ExchangeView {
  constructor(exchange, mode, acts) {
    Object.assign(this, { exchange, mode, acts, seen: "" });
    this.question = element("div", { className: mode === "chat" ? "question" : "given" });
    this.thought = element("pre");
    this.summary = element("summary");
    this.details = element("details", { className: "thought", hidden: true }, this.summary, this.thought);
    this.markdown = new MarkdownView();
    this.text = mode === "chat" ? this.markdown.element : element("span");
    this.state = element("p", { className: "state" });
    this.figures = element("small");
    this.actions = element("div", { className: "actions" });
    const body = mode === "chat" ? [this.details, this.text] : [element("div", { className: "plain" }, this.question, this.text)];
    this.answer = element("div", { className: "answer" }, ...body, this.state, element("footer", {}, this.actions, this.figures));
    this.element = element("article", {}, ...(mode === "chat" ? [this.question] : []), this.answer);
    this.showQuestion();
  }

  showQuestion() {
    const { question } = this.exchange;
    this.question.replaceChildren(question);
    if (this.mode !== "chat") return;
    const copied = button("Copy", "Copy the message", () => copy(question, copied));
    this.edit = button("Edit", "Edit the message and ask again from here", () => this.showEditor());
    this.question.replaceChildren(element("div", { className: "plain" }, question), element("div", { className: "actions" }, this.edit, copied));
  }

  showEditor() {
    const field = element("textarea", { value: this.exchange.question, rows: 3 });
    field.setAttribute("aria-label", "The message");
    const send = () => field.value.trim() && this.acts.edit(this.exchange, field.value);
    field.onkeydown = (event) => {
      if (event.key === "Escape") this.showQuestion();
      if (isEnter(event)) event.preventDefault(), send();
    };
    const cancel = button("Cancel", "Keep the message unchanged", () => this.showQuestion());
    this.question.replaceChildren(field, element("div", { className: "actions" }, button("Send", "Ask again from here", send), cancel));
    field.focus();
  }

  // `last`: this is the last exchange; `busy`: an answer is running.
  show(last, busy) {
    const { raw, reasoning, state, figures } = this.exchange.answer;
    const seen = [raw.length, reasoning.length, state, last, busy, figures?.completion_tokens].join();
    if (seen === this.seen) return;
    this.seen = seen;
    const running = state === "running";
    const { thought, text, thinking } = thoughtAndText(this.exchange.answer);
    if (this.mode === "chat") this.showAnswer(thought, text, running && thinking);
    else this.text.textContent = raw;
    this.answer.classList.toggle("running", running);
    this.element.classList.toggle("out", !running && !isPart(this.exchange));
    this.state.textContent = stateText(this.exchange);
    this.figures.textContent = figuresText(figures);
    if (this.edit) this.edit.disabled = busy;
    this.showActions(this.mode === "chat" ? text : this.exchange.question + raw, last, busy);
  }

  showAnswer(thought, text, thinking) {
    this.markdown.show(text);
    this.details.hidden = !thought && !thinking;
    this.summary.textContent = thinking ? "Thinking …" : "Thought";
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
  }

  showActions(text, last, busy) {
    const made = [];
    if (!busy && text) {
      const copied = button("Copy", "Copy the answer", () => copy(text, copied));
      made.push(copied);
    }
    if (!busy && last) made.push(button("Retry", "Answer once more", this.acts.retry));
    if (!busy && last && canResume(this.exchange)) made.push(button("Continue", "Continue the answer", this.acts.resume));
    this.actions.replaceChildren(...made);
  }
}

// Returns whether a key sends: Enter without Shift, and not the Enter that ends the input of a character (Safari
// marks that one with keyCode 229).
function isEnter(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

// Shows all exchanges of a conversation; scrolls along while the reader is at the end.
class LogView {
  constructor(log, jump, conversation, mode, acts) {
    Object.assign(this, { log, jump, conversation, mode, acts, views: new Map(), follows: true });
    log.addEventListener("scroll", () => this.scrolled());
    jump.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follows && this.toEnd()).observe(log);
  }

  scrolled() {
    if (this.log.hidden) return;
    this.follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    this.jump.hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.jump.hidden = true;
    this.log.scrollTop = this.log.scrollHeight;
  }

  show() {
    const { exchanges, begun } = this.conversation;
    const views = new Map();
    for (const exchange of exchanges) {
      views.set(exchange, this.views.get(exchange) ?? new ExchangeView(exchange, this.mode, this.acts));
    }
    for (const [exchange, view] of this.views) if (!views.has(exchange)) view.element.remove();
    this.views = views;
    let i = 0;
    for (const view of views.values()) {
      if (this.log.children[i] !== view.element) this.log.insertBefore(view.element, this.log.children[i] ?? null);
      i += 1;
      view.show(i === exchanges.length, begun !== null);
    }
    this.log.setAttribute("aria-busy", String(begun !== null));
    if (this.follows) this.toEnd();
    else this.scrolled();
  }
}
