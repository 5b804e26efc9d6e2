"""The page's Markdown: marked's HTML keeps the policy for DOMPurify, nothing is lost, linear in time.

DOMPurify needs a browser: `test_page.py` runs it in one. Here V8 makes the HTML, in which DOMPurify
has nothing to remove.
"""

import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from javascript import PAGE, Scripts

VENDOR = PAGE / "vendor"
VOID = {"br", "hr"}  # elements without an end
LINK = {"target": "_blank", "rel": "noopener noreferrer"}
MORE = """
const made = (blocks) => blocks.map((block) => [block.raw.trimEnd(), blockHTML(block)]);
const blocks = (text) => made(new GrowingMarkdown().parse(text));
const html = (text) => blocks(text).map(([, html]) => html).join("");
const read = (text) => void html(text);
const grown = (parts) => {
  const growing = new GrowingMarkdown();
  return parts.map((_, i) => made(growing.parse(parts.slice(0, i + 1).join(""))));
};
const policy = () => ({ ...POLICY, ALLOWED_URI_REGEXP: POLICY.ALLOWED_URI_REGEXP.source });
const isAllowed = (address) => POLICY.ALLOWED_URI_REGEXP.test(address);
"""


class Tree(HTMLParser):
    """HTML as elements (tag, attributes) and its text; each element that begins must end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    handle_decl = handle_pi = unknown_decl = handle_comment

    def of(self, tag: str) -> list[dict]:
        """Attributes of the elements with this tag."""
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def scripts():
    return Scripts("vendor/marked.umd.js", "markdown.js", more=MORE)


@pytest.fixture(scope="module")
def html(scripts):
    return lambda text: scripts.call("html", text)


# --- the libraries ------------------------------------------------------------------------------------


def test_vendored_files_are_those_of_their_packages():
    rows = re.findall(
        r"^\| `([\w.]+)` .*\| ([\d.]+) \| `(\w{64})` \|", (VENDOR / "README.md").read_text(), re.M
    )
    assert [name for name, *_ in rows] == sorted(path.name for path in VENDOR.glob("*.js"))
    page = (PAGE / "index.html").read_text()
    for name, version, sum_ in rows:
        text = (VENDOR / name).read_bytes()
        assert hashlib.sha256(text).hexdigest() == sum_ and version.encode() in text[:200]
        assert f'<script src="page/vendor/{name}" defer>' in page
        assert "Copyright" in (VENDOR / f"{name.split('.')[0]}.LICENSE.txt").read_text()


def test_all_markdown_passes_dompurify():
    calls = {file.name: re.findall(r"blockHTML|sanitize", file.read_text()) for file in PAGE.glob("*.js")}
    assert {name for name, found in calls.items() if found} == {"markdown.js", "view.js"}
    assert calls["markdown.js"] == ["blockHTML"] and calls["view.js"] == ["sanitize", "blockHTML"]
    assert "DOMPurify.sanitize(blockHTML(block), POLICY)" in (PAGE / "view.js").read_text()


def test_the_policy_allows_no_markup_of_its_own(scripts):
    policy = scripts.call("policy")
    dompurify = (VENDOR / "purify.min.js").read_text()
    assert all(option in dompurify for option in policy), "DOMPurify ignores names that it does not know"
    active = "img script style iframe svg math form input button object base link"
    assert not {*active.split()} & {*policy["ALLOWED_TAGS"]}
    assert not any(re.match("on|src|style|id|name", name) for name in policy["ALLOWED_ATTR"])
    assert {"href", "class", "title"} == {*policy["ALLOWED_ATTR"]} - {*policy["ADD_URI_SAFE_ATTR"]}
    assert policy["ALLOW_DATA_ATTR"] is policy["ALLOW_ARIA_ATTR"] is False
    for address in ("javascript:x", "data:text/html,x", "//e.x", "http:///x", "x", " https://a.b"):
        assert not scripts.call("isAllowed", address)
    assert scripts.call("isAllowed", "https://a.b") and scripts.call("isAllowed", "HTTP://a.b/c")


# --- what comes of a text -----------------------------------------------------------------------------

PIECES = (
    "a", "bc", " ", "*", "**", "_", "~~", "~", "`", "\\`", "\\*", "\\\n", "(", "[", "]",
    "](<https://a.b/c>)", '](https://a.b "t")', "](javascript:x)", "![", "<", ">", "\n", "\n\n", "  \n",
    "é", "“", "中", "&amp;", "&#60;", "$$", "\\(", "\\)", "\\[", "<https://a.b>", "https://a.b", "<br>",
    "<b onclick=x>", "<pre>", "<script>", "<!--", "<img src=x ", "'\">", "\n# h\n", "\n- ", "\n  - ",
    "\n1. ", "\n> ", "\n> - ", "\n```", "\n```py\n", "\n~~~\n", "\n---\n", "\n===\n",
    "\n| a | b |\n|---|:-:|\n| c | d |", "\n[x]: javascript:y\n", "[ ] todo", "    ", "\t",
)  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_html_keeps_the_policy_before_dompurify(scripts, html, text):
    policy, tree = scripts.call("policy"), Tree(html(text))
    for tag, attributes in tree.elements:
        assert tag in policy["ALLOWED_TAGS"] and {*attributes} <= {*policy["ALLOWED_ATTR"]}
        assert attributes.get("class", "code") in ("code", "bar", "table", "math")
    for link in tree.of("a"):
        assert re.match(policy["ALLOWED_URI_REGEXP"], link["href"], re.I) and link.items() >= LINK.items()
    assert not re.search("<a (?:(?!</a>).)*<a ", html(text)), "no link in a link"


@settings(max_examples=300, deadline=None)
@example("[w](https://a.b)\n\n[w]: x\n<w>w</w>\n&w;\n```w w\nw")
@given(texts)
def test_no_letter_of_prose_is_lost(html, text):
    text = re.sub(r"[^\W\d_]+", "w", text).replace("<w>", "")
    tree = Tree(html(text))
    found = tree.text + "".join(link["href"] + link["title"] for link in tree.of("a"))
    assert found.count("w") >= text.count("w")


@settings(max_examples=200, deadline=None)
@example(["a", "\n1. ", "\n- ", "a"])
@example(list("> q\n-b\n\n- c\n\n  d\n\ne\n\n\n```\n\nf\n```\n\ng\n$$\nh\n$$ i\n\n1. j\n\n-\n"))
@given(st.lists(st.sampled_from(PIECES), max_size=20))
def test_a_growing_text_is_shown_as_if_it_came_at_once(scripts, parts):
    for i, blocks in enumerate(scripts.call("grown", parts)):
        assert blocks == scripts.call("blocks", "".join(parts[: i + 1]))


def test_blocks_that_stay_are_not_read_again(scripts):
    """So a long answer costs as much as its last blocks with each token."""
    left = (
        "(n) => { const g = new GrowingMarkdown(); g.parse('*a*\\n\\n'.repeat(n)); return g.source.length; }"
    )
    assert scripts.call(f"({left})", 1000) == 998 * 5


def test_markdown_becomes_elements(html):
    text = "# a *b*\n3. **c**\n   - ~~d~~ ~e~\n\n> `f`\n\n| g | h |\n|:-:|---|\n| i | j |k|\n***\n- [ ] k"
    assert [tag for tag, _ in Tree(html(text)).elements] == [
        "h3", "em", "ol", "li", "strong", "ul", "li", "del", "blockquote", "p", "code", "div", "table",
        "thead", "tr", "th", "th", "tbody", "tr", "td", "td", "td", "hr", "ul", "li",
    ]  # fmt: skip
    assert '<ol start="3">' in html(text) and html(text).count('<td align="center">') == 1
    assert "~e~" in html(text) and "[ ] k" in html(text)


@pytest.mark.parametrize(
    "text",
    ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<pre><b>x</b></pre>",
     "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](data:text/html,x)",
     "[a]( javascript:alert(1))", "[a](<javascript:alert(1)>)", "[a](&#106;avascript:alert(1))",
     "[a](//evil.example)", "[a](vbscript:x)", "![a](data:image/png;base64,x)", "<javascript:alert(1)>",
     "<a href='javascript:alert(1)'>x</a>",
     "www.a.b a@b.c <a@b.c>", "[a]: https://a.b [a]"],
)  # fmt: skip
def test_only_web_addresses_become_links(html, text):
    tree = Tree(html(text))
    assert [tag for tag, _ in tree.elements if tag != "a"] == ["p"] and tree.text.strip() == text
    assert [link["href"] for link in tree.of("a")] == (["https://a.b"] if "https" in text else [])


def test_images_are_links(html):
    image = Tree(html("![a *cat*](https://a.b/c.png)"))
    assert image.of("a")[0]["href"] == "https://a.b/c.png" and image.text.strip() == "image: a cat"
    badge = Tree(html("[![b](https://a.b/i.png)](https://a.b)"))
    assert [link["href"] for link in badge.of("a")] == ["https://a.b"] and badge.text.strip() == "b"


@pytest.mark.parametrize(
    "text, href",
    [
        ("see https://a.b/c?d=1.", "https://a.b/c?d=1"),
        ("(https://a.b/c_(d))", "https://a.b/c_(d)"),
        ("**https://a.b/c**", "https://a.b/c"),
        ("http://a.b/x，然后", "http://a.b/x"),
        ("<https://a.b/_c_>", "https://a.b/_c_"),
        ("https://a.b/a_b_c", "https://a.b/a_b_c"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
    ],
)
def test_addresses_in_the_text_are_links(html, text, href):
    assert [link["href"] for link in Tree(html(text)).of("a")] == [href]


def test_formulas_stay_as_they_were_written(html):
    inline = html(r"so \(a_1 * b_1\) and $$x*y*z$$ *b*")
    assert re.findall(">([^<>]+)</span>", inline) == [r"\(a_1 * b_1\)", "$$x*y*z$$"] and "<em>b" in inline
    text = "$$\n- x_1\n+ y_1\n$$"
    assert html(f"a\n{text}\nb") == f'<p>a</p>\n<div class="math">{text}</div><p>b</p>\n'
    assert html("\\[ x_1") == '<div class="math">\\[ x_1</div>', "it has no end yet"
    assert Tree(html(r"an \(open one")).text.strip() == "an (open one"
    assert Tree(html("it costs $$ and $5")).text.strip() == "it costs $$ and $5"


def test_bold_beside_chinese_marks(html):
    assert html("这是**“重点”**吗").strip() == "<p>这是<strong>“重点”</strong>吗</p>"


def test_line_breaks_and_characters_by_name(html):
    assert html("a<br>b<br/>c\nd").strip() == "<p>a<br>b<br>c<br>d</p>"
    assert Tree(html("&lt;b&gt; &amp;amp; &#33; &#0; &no;")).text.strip() == "<b> &amp; ! \ufffd &no;"


def test_code_is_shown_as_it_comes(html):
    text = "```go <x>\n\tx := `<b>`\n\n~~~\n"
    for end in range(len("```go <x>"), len(text) + 1):
        tree = Tree(html(text[:end]))
        assert [tag for tag, _ in tree.elements] == ["div", "div", "span", "pre", "code"]
        assert tree.text.rstrip("\n") == "go <x>" + text[10:end].rstrip("\n")
    assert "<code>```\na\n```</code>" in html("````md\n```\na\n```\n````"), "a fence within a longer one"


@pytest.mark.parametrize(
    "piece",
    [
        "*", "_", "~", "**a ", "*a _b ", "a* ", "*a*", "~~a ", "`", "`a``", "[", "]", "![", "[a](",
        "[a](<", "[a](https://b", "[[a](b:c)](d:e)", "![a ", "(", "\\", "\\(", "$$", "$$a", "\n$$a\n\n",
        "<", "<https://", "a@", "&", "&#", "https://", "https://)))", ")", "|", "|a", "\n|", "|a|\n|-|\n",
        "> ", ">", "> a\nb\n", " > - a\nb\n", "- ", "- > ", "1. ", "\n- ", "\n> - ", "- a\nb\n",
        "- [ ] a\n", "\n - a\n\n", "#", "# ", "a\n# b\n", "```\n", "~~~a\n", "\t", " ", " a", "\n", "\n\n",
        "a\n", "=", "-", "a #", "* * ", "\n---\n", "a | b\n--- | ---\n", "</think>", "\n\\[",
    ],
)  # fmt: skip
@pytest.mark.parametrize("most", [250_000, pytest.param(500_000, marks=pytest.mark.exhaustive)])
def test_marks_are_read_in_linear_time(scripts, piece, most):
    """A quadratic reader meets the limit of SECONDS."""
    for text in (piece * (most // len(piece)), piece * (most // len(piece)) + "a" + piece[::-1] * 1000):
        scripts.call("read", text)


def test_a_table_is_not_much_larger_than_its_text(html):
    """Rows get all columns of their table, so a table of very many columns stays text."""
    text = "|a" * 5000 + "|\n" + "|-" * 5000 + "|\n" + "|b|\n" * 5000
    assert len(html(text)) < 10 * len(text)


def test_nesting_is_bounded(html):
    for mark in ("> ", "- ", "1. ", "*a **b "):
        assert len(re.findall("<(?:blockquote|[uo]l|em|strong)>", html(mark * 50_000))) < 100
