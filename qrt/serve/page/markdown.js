"use strict";
// Parses Markdown into an array of blocks. No DOM: view.js makes elements of them.
//
// {type: "paragraph" | "heading" (level) | "code" (language, text) | "math" (text) | "rule" | "table" (align, rows)
//  | "quote" (blocks) | "list" (ordered, start, tight, items)}, and `source`, the lines of the block.
// Follows CommonMark and GFM line by line: a line continues an open block or ends it. HTML is text.

const MAX_DEPTH = 30; // nested quotes and lists; deeper ones are text
const FENCE = /^(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const ITEM = /^([-+*]|\d{1,9}[.)])(?=[ \t]|$)/;
const RULE = /^(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const VERBATIM = new Set(["code", "math"]); // no block begins inside these

function parseMarkdown(text) {
  const lines = text.split(/\r\n?|\n/);
  if (lines.at(-1) === "") lines.pop(); // no line follows the last line end
  const reader = new BlockReader();
  for (const line of lines) reader.add(line);
  const blocks = reader.root.blocks;
  return blocks.map((block, i) => {
    const source = lines.slice(block.first, blocks[i + 1]?.first).join("\n");
    return { ...finished(block), source };
  });
}

// The rest of a line after open blocks took their part. A tab reaches to the next multiple of four columns.
class Line {
  constructor(text) {
    this.rest = text;
    this.column = 0;
  }

  get blank() {
    return /^[ \t]*$/.test(this.rest);
  }

  get indent() {
    let column = this.column;
    for (const char of this.rest) {
      if (char === "\t") column += 4 - (column % 4);
      else if (char === " ") column += 1;
      else break;
    }
    return column - this.column;
  }

  // Skips white space of at most `columns` columns.
  skip(columns) {
    let left = columns;
    let at = 0;
    for (; left > 0 && /[ \t]/.test(this.rest[at] ?? ""); at++) {
      const width = this.rest[at] === "\t" ? 4 - (this.column % 4) : 1;
      this.column += Math.min(width, left);
      left -= width;
    }
    this.rest = " ".repeat(Math.max(-left, 0)) + this.rest.slice(at);
  }

  take(length) {
    this.rest = this.rest.slice(length);
    this.column += length;
  }
}

class BlockReader {
  constructor() {
    this.number = 0; // the current line
    this.root = this.block("document", { blocks: [] });
    this.open = [this.root]; // outermost first
  }

  block(type, more) {
    return { type, first: this.number, last: this.number, ...more };
  }

  add(text) {
    const line = new Line(text);
    let depth = 1;
    let ended = false;
    for (; depth < this.open.length; depth++) {
      const goesOn = goOn(this.open[depth], line);
      if (!goesOn) break;
      ended ||= goesOn === "ended";
      if (this.open[depth].type === "quote") this.mark(depth + 1); // a bare ">" is no blank line around it
    }
    this.depth = depth;
    this.begun = false; // whether a block begins with this line
    this.consumed = false; // whether that block takes the whole line
    if (!ended && !VERBATIM.has(this.open[depth - 1].type)) while (this.begin(line));
    const tip = this.open.at(-1);
    const lazy = !this.begun && tip.type === "paragraph" && !line.blank;
    if (!lazy) this.open.length = this.depth;
    if (ended) this.mark().pop();
    else this.content(line);
    this.number += 1;
  }

  // Adds the text of a line to the innermost open block.
  content(line) {
    const tip = this.open.at(-1);
    if (tip.lines && !this.consumed && (tip.type !== "paragraph" || !line.blank)) {
      tip.lines.push(VERBATIM.has(tip.type) ? line.rest : line.rest.trimStart());
      if (!line.blank || tip.fence) this.mark();
    } else if (!this.consumed && !line.blank) {
      this.push(this.block("paragraph", { lines: [line.rest.trimStart()] }));
    }
    if (tip.whole) this.open.pop();
  }

  // Extends the open blocks, or the outermost of them, to this line, and returns the open ones.
  mark(count = this.open.length) {
    for (let i = 0; i < count; i++) this.open[i].last = this.number;
    return this.open;
  }

  // Puts a block into the innermost block that continues; blocks inside that one end.
  push(block) {
    this.open.length = this.depth;
    if (this.open.at(-1).type === "list" && block.type !== "item") this.open.length = --this.depth;
    const parent = this.open.at(-1);
    (parent.items ?? parent.blocks).push(block);
    this.open.push(block);
    this.depth = this.open.length;
    this.begun = true;
    this.mark();
    return block;
  }

  // Begins a block with this line; returns whether more blocks may begin inside it.
  begin(line) {
    const container = this.open[this.depth - 1];
    const paragraph = container.type === "paragraph" ? container : null;
    if (line.blank || container.type === "table") return line.blank ? false : this.leaveTable(line);
    if (line.indent > 3) {
      const inParagraph = this.open.at(-1).type === "paragraph" && !this.begun;
      if (!inParagraph && !paragraph) {
        line.skip(4);
        this.push(this.block("code", { language: "", lines: [] }));
      }
      return false;
    }
    const rest = line.rest.slice(line.rest.search(/[^ \t]/));
    return this.beginContainer(line, rest, paragraph) || this.beginLeaf(line, rest, paragraph);
  }

  // Returns whether a line ends a table, because another block begins with it.
  leaveTable(line) {
    const rest = line.rest.trimStart();
    const other = line.indent > 3 || FENCE.test(rest) || RULE.test(rest) || /^(?:>|#{1,6}[ \t])/.test(rest) || ITEM.test(rest);
    if (other) this.depth -= 1;
    return other;
  }

  beginContainer(line, rest, paragraph) {
    if (this.depth > MAX_DEPTH) return false;
    if (rest[0] === ">") {
      line.skip(3);
      line.take(1);
      line.skip(1);
      if (paragraph) this.depth -= 1;
      this.push(this.block("quote", { blocks: [] }));
      return true;
    }
    const mark = ITEM.exec(rest)?.[0];
    if (!mark || RULE.test(rest) || this.underlines(rest, paragraph)) return false;
    const ordered = mark.length > 1;
    const empty = !rest.slice(mark.length).trim();
    if (paragraph && (empty || (ordered && parseInt(mark, 10) !== 1))) return false;
    this.beginItem(line, mark, ordered, empty, paragraph);
    return true;
  }

  beginItem(line, mark, ordered, empty, paragraph) {
    const indent = line.indent;
    line.skip(indent);
    line.take(mark.length);
    const padding = empty || line.indent > 4 ? 1 : line.indent;
    line.skip(padding);
    if (paragraph) this.depth -= 1;
    const list = this.open[this.depth - 1];
    const kind = mark.at(-1);
    if (list.type !== "list" || list.kind !== kind) {
      this.push(this.block("list", { kind, ordered, start: ordered ? parseInt(mark, 10) : null, items: [] }));
    }
    this.push(this.block("item", { indent: indent + mark.length + padding, blocks: [] }));
  }

  underlines(rest, paragraph) {
    return paragraph !== null && paragraph.lines.length > 0 && /^(?:=+|-+)[ \t]*$/.test(rest);
  }

  beginLeaf(line, rest, paragraph) {
    const heading = /^(#{1,6})(?:[ \t]+|$)/.exec(rest);
    const fence = FENCE.exec(rest);
    const formula = /^(?:\$\$|\\\[)/.exec(rest)?.[0];
    if (this.underlines(rest, paragraph)) {
      this.become(paragraph, { type: "heading", level: rest[0] === "=" ? 1 : 2, whole: true });
    } else if (heading) {
      const text = headingText(rest.slice(heading[0].length));
      this.leaf(paragraph, "heading", { level: heading[1].length, lines: [text], whole: true });
    } else if (fence) {
      const language = fence[2].trim();
      this.leaf(paragraph, "code", { fence: fence[1], indent: line.indent, language, lines: [] });
    } else if (formula) {
      this.beginFormula(rest, formula === "$$" ? "$$" : "\\]", paragraph);
    } else if (RULE.test(rest)) {
      this.leaf(paragraph, "rule", { whole: true });
    } else if (paragraph && rest.includes("|")) {
      this.beginTable(paragraph, cells(rest));
    }
    return false;
  }

  leaf(paragraph, type, more) {
    if (paragraph) this.depth -= 1;
    this.consumed = true;
    return this.push(this.block(type, more));
  }

  // Turns a paragraph into another block, as this line requires.
  become(paragraph, more) {
    Object.assign(paragraph, more);
    this.begun = true;
    this.consumed = true;
    this.mark();
  }

  // Begins a formula on lines of its own. If text follows its end on the first line, it is part of a paragraph.
  beginFormula(rest, end, paragraph) {
    const found = rest.indexOf(end, 2);
    if (found >= 0 && rest.slice(found + 2).trim()) return;
    this.leaf(paragraph, "math", { end, lines: [rest], whole: found >= 0 });
  }

  beginTable(paragraph, delimiters) {
    const header = cells(paragraph.lines.at(-1));
    if (header.length !== delimiters.length || !delimiters.every((cell) => /^:?-+:?$/.test(cell))) return;
    const align = delimiters.map((cell) => {
      const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
      return left && right ? "center" : right ? "right" : left ? "left" : "";
    });
    const table = { type: "table", align, lines: [paragraph.lines.pop()] };
    if (paragraph.lines.length) this.leaf(paragraph, "table", table).first -= 1;
    else this.become(paragraph, table);
  }
}

// Returns whether a line continues an open block, or "ended" if it ends the block; takes the block's part off it.
function goOn(block, line) {
  switch (block.type) {
    case "quote":
      if (line.indent > 3 || line.rest.trimStart()[0] !== ">") return false;
      line.skip(3);
      line.take(1);
      line.skip(1);
      return true;
    case "list":
      return true;
    case "item":
      if (line.blank ? !block.blocks.length : line.indent < block.indent) return false;
      line.skip(block.indent);
      return true;
    case "code":
      return block.fence ? fenceGoesOn(block, line) : indentedGoesOn(line);
    case "math":
      return formulaGoesOn(block, line);
    default: // a paragraph, a table
      return !line.blank;
  }
}

function fenceGoesOn(block, line) {
  const rest = line.rest.trim();
  const closes = line.indent < 4 && rest.length >= block.fence.length && rest === block.fence[0].repeat(rest.length);
  if (closes) return "ended";
  line.skip(block.indent);
  return true;
}

function indentedGoesOn(line) {
  if (line.indent < 4 && !line.blank) return false;
  line.skip(4);
  return true;
}

function formulaGoesOn(block, line) {
  if (line.blank) return false;
  if (!line.rest.trimEnd().endsWith(block.end)) return true;
  block.lines.push(line.rest);
  return "ended";
}

// Returns a heading's text without closing marks.
function headingText(text) {
  const bare = text.trimEnd();
  let end = bare.length;
  while (bare[end - 1] === "#") end -= 1;
  return end === 0 || /[ \t]/.test(bare[end - 1]) ? bare.slice(0, end).trim() : bare;
}

// Returns the cells of a table's row; a | after a backslash belongs to its cell.
function cells(line) {
  const row = line.trim();
  const parts = row.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
  if (row[0] === "|") parts.shift();
  if (parts.length > 1 && parts.at(-1) === "") parts.pop();
  return parts;
}

// Returns a block for callers, with its text parsed.
function finished(block) {
  const { type, lines } = block;
  switch (type) {
    case "quote":
      return { type, blocks: block.blocks.map(finished) };
    case "list": {
      const { ordered, start } = block;
      return { type, ordered, start, tight: isTight(block), items: block.items.map((item) => item.blocks.map(finished)) };
    }
    case "table":
      return { type, align: block.align, rows: lines.map((line) => cells(line).map(parseInline)) };
    case "code":
      return { type, language: block.language, text: codeText(block) };
    case "math":
      return { type, text: lines.join("\n") };
    case "rule":
      return { type };
    case "heading":
      return { type, level: block.level, children: parseInline(lines.join("\n").trimEnd()) };
    default:
      return { type, children: parseInline(lines.join("\n").trimEnd()) };
  }
}

function codeText({ fence, lines }) {
  const end = fence ? lines.length : lines.findLastIndex((line) => line.trim()) + 1;
  return lines.slice(0, end).join("\n");
}

// Returns whether a list has no blank line between its items, nor between the blocks of an item.
function isTight(list) {
  const close = (blocks) => blocks.every((block, i) => i === 0 || block.first - blocks[i - 1].last < 2);
  return close(list.items) && list.items.every((item) => close(item.blocks));
}
