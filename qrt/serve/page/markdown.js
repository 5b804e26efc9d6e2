"use strict";
// Markdown to HTML by marked, with POLICY for DOMPurify. No DOM: view.js makes elements of it.
//
// What differs from GFM, for chats: a line end is a line break; links and images go to http(s) only, and both become
// links; HTML, task lists and references stay text; formulas (\( \), \[ \], $$ $$) stay as written. The time is
// linear in the text, because marks pair within PIECE and what nests too deeply for its length is text.

const WEB = /^https?:\/\/[^/]/i;
// Everything that `reader` makes; DOMPurify removes all else.
const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "rel", "start", "tabindex", "target", "title"],
  ADD_URI_SAFE_ATTR: ["align", "rel", "start", "tabindex", "target"], // no addresses
  ALLOWED_URI_REGEXP: WEB,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const PIECE = 2000; // characters of inline text that are read together, and of a formula in a line
const PIECES = new RegExp(`[^]{1,${PIECE}}(?:\\s|$)|[^]{1,${PIECE}}`, "gu");
const WORK = 32; // characters read for each character of a text; nested blocks and marks are read again
const QUOTE = 2 * PIECE; // characters of a quote; its lines without a mark are read again and again
const MAX_COLUMNS = 64; // rows have all columns of their table, so a table could be as large as its text squared
const CJK = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}\u3000-\u303f\uff00-\uffef]/u;
const AFTER_MARKS = new RegExp(`(?<=[\\p{P}\\p{S}]\\*{1,3})${CJK.source}`, "gu");
const FORMULA = `\\$\\$[^]{1,${PIECE}}?\\$\\$|\\\\\\([^]{1,${PIECE}}?\\\\\\)|\\\\\\[[^]{1,${PIECE}}?\\\\\\]`;
const FORMULA_LINES = `^ {0,3}(?:${formulaLines("\\$\\$", "\\$\\$")}|${formulaLines("\\\\\\[", "\\\\\\]")})`;

// Matches a formula on lines of its own, up to its end or an empty line. If text follows the end on the first line, the
// formula is part of a paragraph.
function formulaLines(begin, end) {
  return `(?!${begin}.*?${end}[ \\t]*\\S)${begin}[^]*?(?:${end}[ \\t]*(?=\\n|$)|(?=\\n[ \\t]*\\n)|$)`;
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
}

function plain(text) {
  return { type: "text", raw: text, text, escaped: false };
}

// Returns tokens without links; a link cannot contain a link.
function unlinked(tokens) {
  return tokens.flatMap((token) => {
    if (token.type === "link" || token.type === "image") return unlinked(token.tokens);
    return [token.tokens ? { ...token, tokens: unlinked(token.tokens) } : token];
  });
}

// Returns the cells of a row that its table has no columns for; marked leaves them out.
function cellsAfter(line, columns) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).slice(columns).join("|").trim();
}

function formula(level, start, source, tag) {
  const expression = new RegExp(source);
  return {
    name: `${level}Math`,
    level,
    start,
    tokenizer(src) {
      const raw = expression.exec(src)?.[0];
      return raw ? { type: `${level}Math`, raw } : undefined;
    },
    renderer: ({ raw }) => `<${tag} class="math">${escaped(raw.trim())}</${tag}>`,
  };
}

const defaults = marked.Tokenizer.prototype;
const reader = new marked.Marked({
  breaks: true,
  extensions: [
    formula("block", (src) => src.slice(0, PIECE).search(/\n {0,3}(?:\$\$|\\\[)/), FORMULA_LINES, "div"),
    formula("inline", (src) => src.indexOf("$$"), `^(?:${FORMULA})`, "span"),
  ],
  hooks: {
    // Hides what has no emphasis: formulas. Chinese and Japanese write no spaces around marks; they count as spaces.
    emStrongMask: (masked) =>
      masked
        .replace(new RegExp(FORMULA, "g"), (found) => "a".repeat(found.length))
        .replace(AFTER_MARKS, (char) => " ".repeat(char.length)),
  },
  // false: as marked does it; undefined: not at all
  tokenizer: {
    html: () => undefined,
    def: () => undefined,
    tag(src) {
      const raw = /^<br *\/?>/i.exec(src)?.[0];
      return raw ? { type: "br", raw } : undefined;
    },
    table(src) {
      if (src.split("\n", 2).at(-1).split("|").length > MAX_COLUMNS) return undefined;
      const table = defaults.table.call(this, src);
      const lines = table?.raw.split("\n").slice(2) ?? [];
      for (const [i, row] of table?.rows.entries() ?? []) {
        const text = cellsAfter(lines[i], table.header.length);
        if (text) row.push({ text, tokens: this.lexer.inline(text), header: false, align: null });
      }
      return table;
    },
    blockquote(src) {
      const end = src.indexOf("\n", QUOTE);
      return end < 0 ? false : defaults.blockquote.call(this, src.slice(0, end));
    },
    emStrong(src, masked, before) {
      return src[0] === "*" && CJK.test(before) ? defaults.emStrong.call(this, src, masked, " ") : false;
    },
    del: (src) => (src.startsWith("~~") ? false : undefined),
    url(src) {
      const end = src.search(/[\s<>`\\"\u3000-\u303f\uff00-\uffef]/);
      return WEB.test(src) ? defaults.url.call(this, end < 0 ? src : src.slice(0, end)) : undefined;
    },
  },
  renderer: {
    checkbox: ({ checked }) => (checked ? "[x] " : "[ ] "),
    code({ lang, text }) {
      const bar = `<div class="bar"><span>${escaped(lang || "text")}</span></div>`;
      return `<div class="code">${bar}<pre tabindex="0"><code>${escaped(text)}</code></pre></div>`;
    },
    heading({ depth, tokens }) {
      const tag = `h${Math.min(depth + 2, 6)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    image(token) {
      return this.link(token);
    },
    link({ type, href, title, raw, tokens }) {
      if (!WEB.test(href)) return escaped(raw);
      const text = this.parser.parseInline(unlinked(tokens)) || escaped(href);
      const attributes = `title="${escaped(title || href)}" target="_blank" rel="noopener noreferrer"`;
      return `<a href="${escaped(href)}" ${attributes}>${type === "image" ? "image: " : ""}${text}</a>`;
    },
    table(token) {
      return `<div class="table" tabindex="0">${marked.Renderer.prototype.table.call(this, token)}</div>`;
    },
  },
});

// Reads in linear time: inline text in pieces, and text that would cost too much as plain text.
class BoundedLexer extends marked.Lexer {
  lex(text) {
    this.left = WORK * (text.length + PIECE);
    return super.lex(text);
  }

  blockTokens(text, tokens = [], clipped = false) {
    this.left -= text.length;
    if (this.left > 0) return super.blockTokens(text, tokens, clipped);
    tokens.push({ type: "paragraph", raw: text, text, tokens: [plain(text)] });
    return tokens;
  }

  inlineTokens(text, tokens = []) {
    for (const piece of text.match(PIECES) ?? []) {
      this.left -= piece.length;
      if (this.left > 0) super.inlineTokens(piece, tokens);
      else tokens.push(plain(piece));
    }
    return tokens;
  }
}

// Reads a text that grows. Only its end is read again, from an empty line before its last two blocks: a new line may
// belong to the last block, or to the one that it seemed to end.
class GrowingMarkdown {
  constructor() {
    this.source = ""; // of the blocks that stay
    this.blocks = [];
  }

  // Returns all blocks: marked's tokens, of which `raw` is what the block was made of.
  parse(text) {
    const source = text.replace(/\r\n?/g, "\n");
    if (!source.startsWith(this.source)) Object.assign(this, { source: "", blocks: [] });
    const tokens = new BoundedLexer(reader.defaults).lex(source.slice(this.source.length));
    const isBlock = (token) => token.type !== "space";
    let end = tokens.indexOf(tokens.filter(isBlock).at(-2));
    while (end > 0 && !/\n[ \t]*\n$/.test(tokens[end - 1].raw)) end -= 1;
    const stay = tokens.slice(0, Math.max(end, 0));
    this.source += stay.map((token) => token.raw).join("");
    this.blocks.push(...stay.filter(isBlock));
    return [...this.blocks, ...tokens.slice(stay.length).filter(isBlock)];
  }
}

function blockHTML(block) {
  return reader.parser([block]);
}
