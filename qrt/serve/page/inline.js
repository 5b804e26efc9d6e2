"use strict";
// Parses inline Markdown: the text of one block -> an array of strings and nodes {type, children | text, ...}.
//
// Follows CommonMark and GFM, with changes for chats: a line end and `<br>` are line breaks; links and images go
// to http(s) only, and both become links; HTML stays text; formulas (\( \), \[ \], $$ $$) stay unchanged.
// Time is linear in the text: searches are bounded, and at most MAX_OPEN marks wait for their end.

const MAX_OPEN = 32;
const MAX_PAIRS = 8; // pairs of one run of marks; more would nest too deeply for a browser
const SPECIAL = /[\\`*_~\[\]!<&\n$]|https?:\/\//gi;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const CJK = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}\u3000-\u303f\uff00-\uffef]/u;
const TARGET = // what follows the ] of a link: (address "title")
  /\(\s*(?:<(https?:\/\/[^<>\n]{1,2000})>|(https?:\/\/(?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.){0,2000}\)){0,2000}))(?:\s+(?:"((?:[^"\\]|\\.){0,500})"|'((?:[^'\\]|\\.){0,500})'))?\s*\)/iy;
const BARE = /https?:\/\/(?:(?!\]\()[^\s<>`\\"\u3000-\u303f\uff00-\uffef]){1,2000}/iy; // a bare address in the text
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function parseInline(text) {
  return new Inline(text).parse();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.tokens = []; // strings, nodes, delimiter runs and open brackets
    this.delimiters = [];
    this.brackets = [];
    this.ticks = null; // length of a run of backticks -> where such runs begin, the last one first
    this.missing = new Set(); // ends of formulas that the rest of the text does not have
  }

  parse() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(this.text);
      const end = found ? found.index : this.text.length;
      if (end > this.at) this.tokens.push(this.text.slice(this.at, end));
      this.at = end;
      if (found) this.special(found[0]);
    }
    pair(this.delimiters);
    return build(this.tokens);
  }

  special(mark) {
    switch (mark) {
      case "\\": return this.backslash();
      case "`": return this.code();
      case "*": case "_": case "~": return this.delimiter(mark);
      case "[": return this.openBracket(false);
      case "!": return this.text[this.at + 1] === "[" ? this.openBracket(true) : this.literal(1);
      case "]": return this.closeBracket();
      case "<": return this.angle();
      case "&": return this.entity();
      case "\n": return this.lineEnd();
      case "$": return this.text[this.at + 1] === "$" ? this.formula("$$", "$$") : this.literal(1);
      default: return this.bareLink();
    }
  }

  literal(length) {
    this.tokens.push(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  node(node, length) {
    this.tokens.push(node);
    this.at += length;
  }

  // Returns the match of a sticky expression at this place, or null.
  match(expression, at = this.at) {
    expression.lastIndex = at;
    return expression.exec(this.text);
  }

  backslash() {
    const next = this.text[this.at + 1];
    if (next === "(") return this.formula("\\(", "\\)");
    if (next === "[") return this.formula("\\[", "\\]");
    if (next === "\n") {
      this.at += 1;
      return this.lineEnd();
    }
    if (next !== undefined && /[!-\/:-@[-`{-~]/.test(next)) {
      this.tokens.push(next);
      this.at += 2;
      return;
    }
    this.literal(1);
  }

  // Keeps a formula unchanged; without an end, its opening is text.
  formula(begin, end) {
    const found = this.missing.has(end) ? -1 : this.text.indexOf(end, this.at + begin.length);
    if (found < 0) {
      this.missing.add(end);
      if (begin !== "$$") this.at += 1; // then it is an escaped bracket
      return this.literal(begin === "$$" ? 2 : 1);
    }
    const text = this.text.slice(this.at, found + end.length);
    this.node({ type: "math", text }, text.length);
  }

  code() {
    const length = this.match(/`+/y)[0].length;
    const end = this.closingTicks(length);
    if (end === undefined) return this.literal(length);
    let text = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    this.node({ type: "code", text }, end + length - this.at);
  }

  // Returns where the next run of this many backticks begins.
  closingTicks(length) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        const size = run[0].length;
        if (!this.ticks.has(size)) this.ticks.set(size, []);
        this.ticks.get(size).push(run.index);
      }
      for (const places of this.ticks.values()) places.reverse();
    }
    const places = this.ticks.get(length) ?? [];
    while (places.length && places.at(-1) <= this.at) places.pop();
    return places.at(-1);
  }

  delimiter(char) {
    const count = this.match(char === "*" ? /\*+/y : char === "_" ? /_+/y : /~+/y)[0].length;
    if (char === "~" && count < 2) return this.literal(count);
    const before = previous(this.text, this.at);
    const after = codePoint(this.text, this.at + count);
    const left = flanks(after, before);
    const right = flanks(before, after);
    const run = { char, count, length: count, opens: [], closes: [] };
    run.canOpen = left && (char !== "_" || !right || PUNCTUATION.test(before));
    run.canClose = right && (char !== "_" || !left || PUNCTUATION.test(after));
    this.delimiters.push(run);
    this.node(run, count);
  }

  openBracket(image) {
    const mark = image ? "![" : "[";
    this.brackets.push({ image, index: this.tokens.length, delimiters: this.delimiters.length, active: true });
    if (this.brackets.length > MAX_OPEN) this.brackets.shift();
    this.literal(mark.length);
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    const target = bracket?.active ? this.match(TARGET, this.at + 1) : null;
    if (!target) return this.literal(1);
    pair(this.delimiters.splice(bracket.delimiters));
    const children = withoutLinks(build(this.tokens.splice(bracket.index).slice(1)));
    if (!bracket.image) {
      // a link cannot contain a link
      for (let i = this.brackets.length - 1; i >= 0 && this.brackets[i].active; i--) {
        this.brackets[i].active = this.brackets[i].image;
      }
    }
    const href = unescaped(target[1] ?? target[2]);
    const title = unescaped(target[3] ?? target[4] ?? "");
    const node = { type: "link", href, title, children: children.length ? children : [href] };
    this.node(bracket.image ? { ...node, image: true } : node, 1 + target[0].length);
  }

  angle() {
    const lineBreak = this.match(/<br *\/?>/iy);
    if (lineBreak) return this.node({ type: "break" }, lineBreak[0].length);
    const link = this.match(/<(https?:\/\/[^\s<>]{1,2000})>/iy);
    if (!link) return this.literal(1);
    this.node({ type: "link", href: link[1], title: "", children: [link[1]] }, link[0].length);
  }

  // Makes a link of an address in the text, without the punctuation of the sentence after it.
  bareLink() {
    const inWord = /[\p{L}\p{N}]/u.test(previous(this.text, this.at));
    const href = trimmed(this.match(BARE)?.[0] ?? "");
    if (inWord || !/^https?:\/\/[^\/]/i.test(href)) return this.literal(4);
    this.node({ type: "link", href, title: "", children: [href] }, href.length);
  }

  entity() {
    const found = this.match(/&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([0-9a-f]{1,6}));/iy);
    if (!found) return this.literal(1);
    const number = found[2] ? Number(found[2]) : parseInt(found[3], 16);
    const named = ENTITIES[found[1]?.toLowerCase()];
    const valid = number > 0 && number < 0x110000 && (number < 0xd800 || number > 0xdfff);
    this.node(named ?? (valid ? String.fromCodePoint(number) : "\ufffd"), found[0].length);
  }

  lineEnd() {
    const last = this.tokens.at(-1);
    if (typeof last === "string") this.tokens[this.tokens.length - 1] = last.trimEnd();
    this.node({ type: "break" }, this.match(/\n */y)[0].length);
  }
}

// Pairs opening and closing marks, the inner ones first, with CommonMark's rule of three.
function pair(delimiters) {
  const openers = [];
  for (const closer of delimiters) {
    for (let i = openers.length - 1; closer.canClose && closer.count && i >= 0; ) {
      const opener = openers[i];
      if (!fits(opener, closer)) {
        i -= 1;
        continue;
      }
      const used = Math.min(opener.count, closer.count, 2);
      const type = closer.char === "~" ? "del" : used === 2 ? "strong" : "em";
      opener.opens.unshift(type);
      closer.closes.push(type);
      opener.count -= used;
      closer.count -= used;
      openers.length = opener.count ? i + 1 : i;
      i = openers.length - 1;
    }
    if (closer.canOpen && closer.count) openers.push(closer);
    if (openers.length > MAX_OPEN) openers.shift();
  }
}

function fits(opener, closer) {
  if (opener.char !== closer.char || opener.opens.length === MAX_PAIRS) return false;
  if (closer.char === "~") return opener.count > 1 && closer.count > 1;
  const both = opener.canClose || closer.canOpen;
  return !both || (opener.length + closer.length) % 3 !== 0 || opener.length % 3 === 0;
}

// Builds the tree from tokens with paired delimiters.
function build(tokens) {
  const path = [[]];
  const text = (piece) => {
    const top = path.at(-1);
    if (typeof top.at(-1) === "string") top[top.length - 1] += piece;
    else if (piece) top.push(piece);
  };
  for (const token of tokens) {
    if (typeof token === "string") text(token);
    else if (!token.char) path.at(-1).push(token);
    else {
      for (const _ of token.closes) path.pop();
      text(token.char.repeat(token.count));
      for (const type of token.opens) {
        const children = [];
        path.at(-1).push({ type, children });
        path.push(children);
      }
    }
  }
  return path[0];
}

function withoutLinks(nodes) {
  return nodes.flatMap((node) => {
    if (node.type === "link") return withoutLinks(node.children);
    return [node.children ? { ...node, children: withoutLinks(node.children) } : node];
  });
}

// Returns whether a run of marks between the characters `outer` and `inner` may enclose text on inner's side.
// Chinese and Japanese write no spaces around marks, so such an outer character counts as a space.
function flanks(inner, outer) {
  if (/\s/.test(inner) || inner === "") return false;
  return !PUNCTUATION.test(inner) || outer === "" || /\s/.test(outer) || PUNCTUATION.test(outer) || CJK.test(outer);
}

function codePoint(text, at) {
  return at < text.length ? String.fromCodePoint(text.codePointAt(at)) : "";
}

// Returns the character before a place; it may be two units long.
function previous(text, at) {
  if (at === 0) return "";
  const low = at > 1 && /[\udc00-\udfff]/.test(text[at - 1]);
  return low ? text.slice(at - 2, at) : text[at - 1];
}

// Cuts off what belongs to the sentence after an address: punctuation, and brackets that the address did not open.
function trimmed(address) {
  const open = { ")": 0, "]": 0 };
  for (const char of address) {
    if (char in open) open[char] -= 1;
    else if (char === "(") open[")"] += 1;
    else if (char === "[") open["]"] += 1;
  }
  let end = address.length;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (open[last] < 0) open[last] += 1;
    else if (!"?!.,:;*_~'|".includes(last)) break;
  }
  return address.slice(0, end);
}

function unescaped(text) {
  return text.replace(/\\([!-\/:-@[-`{-~])/g, "$1");
}
