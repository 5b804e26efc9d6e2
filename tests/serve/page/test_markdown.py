"""The page's Markdown: markdown-it's tree (CommonMark, GFM tables), nothing lost, linear in time."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from javascript import Scripts
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

LINE_END = "\n"


@pytest.fixture(scope="module")
def scripts():
    return Scripts(
        "inline.js", "markdown.js", more="const read = (t) => void JSON.stringify(parseMarkdown(t));"
    )


@pytest.fixture(scope="module")
def parse(scripts):
    return lambda text: scripts.call("parseMarkdown", text)


# --- the same tree as markdown-it's -------------------------------------------------------------------

TRUTH = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
TRUTH.disable(["reference", "image"])
TRUTH.validateLink = re.compile(r"https?://[^/]").match  # the page links to nothing else


def expected(text: str) -> list:
    return [of_truth(node) for node in SyntaxTreeNode(TRUTH.parse(text)).children]


def of_truth(node: SyntaxTreeNode):
    """Return a block of markdown-it as nested tuples."""
    children = [of_truth(child) for child in node.children]
    match node.type:
        case "inline":
            return joined(children)
        case "paragraph" | "heading":
            return (node.tag, "tight" if node.hidden else "", children[0])
        case "bullet_list" | "ordered_list":
            return (node.tag, int(node.attrs.get("start", 1)) if node.tag == "ol" else None, children)
        case "list_item" | "blockquote":
            return (node.tag, children)
        case "fence" | "code_block":
            return ("code", node.info.strip(), node.content.rstrip())
        case "hr":
            return ("hr",)
        case "table":
            return ("table", [row for part in children for row in part])
        case "thead" | "tbody" | "tr":
            return children
        case "th" | "td":
            return (node.attrs.get("style", "").removeprefix("text-align:"), children[0])
        case "text":
            return node.content
        case "softbreak" | "hardbreak":
            return LINE_END
        case "code_inline":
            return ("code", re.sub(" +", " ", node.content).strip())
        case "link":
            return link(node.attrs["href"], node.attrs.get("title", ""), joined(children))
        case _:
            return (node.tag, joined(children))


def link(href: str, title: str, children: list):
    """Treat a link with its address as text, or without text, as text: markdown-it links no bare address."""
    children = children or [href]
    return href if children == [href] and not title else ("a", href, title, children)


def joined(pieces: list) -> list:
    """Join adjacent texts, and drop spaces around line ends."""
    whole: list = []
    for piece in pieces:
        if isinstance(piece, str) and whole and isinstance(whole[-1], str):
            whole[-1] += piece
        elif piece != "":
            whole.append(piece)
    trimmed = (re.sub(r" *\n *", "\n", piece) if isinstance(piece, str) else piece for piece in whole)
    return [piece for piece in trimmed if piece]


def of_page(block: dict, tight: bool = False):
    """Return a block of the page as nested tuples."""
    match block["type"]:
        case "paragraph":
            return ("p", "tight" if tight else "", inline(block["children"]))
        case "heading":
            return (f"h{block['level']}", "", inline(block["children"]))
        case "list":
            items = [("li", [of_page(child, block["tight"]) for child in item]) for item in block["items"]]
            return ("ol" if block["ordered"] else "ul", block["start"], items)
        case "quote":
            return ("blockquote", [of_page(child) for child in block["blocks"]])
        case "code":
            return ("code", block["language"], block["text"].rstrip())
        case "rule":
            return ("hr",)
        case "table":
            width = len(block["align"])
            # GFM adds missing cells of a row and drops extra ones; the page does neither
            rows = [[*map(inline, row[:width]), *[[]] * (width - len(row))] for row in block["rows"]]
            return ("table", [list(zip(block["align"], row, strict=True)) for row in rows])


def inline(nodes: list) -> list:
    def one(node):
        match node:
            case str():
                return node
            case {"type": "break"}:
                return LINE_END
            case {"type": "code"}:
                return ("code", re.sub(" +", " ", node["text"]).strip())
            case {"type": "link"}:
                return link(node["href"], node["title"], inline(node["children"]))
        return ({"del": "s"}.get(node["type"], node["type"]), inline(node["children"]))

    return joined([one(node) for node in nodes])


def page(parse, text: str) -> list:
    return [of_page(block) for block in parse(text)]


INLINE = (
    "a", "bc", " ", " ", "*", "**", "***", "_", "__", "~~", "`", "``", "\\`", "\\*", "\\\n",
    "(", ")", "[", "]", ".",
    "](<https://a.b/c>)", '](<https://a.b> "t")', "<", ">", "\n", "  \n", "é", "“", "1",
)  # fmt: skip
LINES = (
    "", "", "a", "b c", "# h", "## h ##", "- a", "- ", "* b", "+ c", "1. a",
    "2. b", "3) c", "> q", ">", "> - x",
    "```", "```py", "~~~", "````", "---", "***", "===",
    "\n| a | b |\n|---|:-:|\nc | d|", "\na | b\n--- | ---", "- - x",
    "- 1. y", "1. > z", "#no", "-no", "`c", "> ```", "- ```", "\tt", "- [ ] todo",
)  # fmt: skip
# some blocks that begin in the fourth column markdown-it takes for what they are not; not texts and lists
indented = st.builds(
    lambda n, line: " " * (n if re.match(r"$|[a-z]|[-*+] |\d", line) else min(n, 2)) + line,
    st.sampled_from((0, 0, 0, 2, 4)),
    st.sampled_from(LINES),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(INLINE), max_size=16).map("".join))
def test_inline_marks_pair_as_in_commonmark(parse, text):
    text = "x" + re.sub(r"\n\s*", "\n", text) + "x"  # one paragraph
    text = re.sub(r"\n(?=[-+=>#1`~]|\*\s)", "\ny", text)
    text = re.sub(r"\]\((?=\s*(<\s*>)?\s*\))", "] (", text)  # CommonMark links to an empty address, too
    assert page(parse, text) == expected(text)


@settings(max_examples=200, deadline=None)
@example("- a\n  > q\n  >\n  t")
@example("- > a\n  >\n- b")
@example("> - a\n>\n> - b")
@given(st.lists(indented, max_size=9).map("\n".join))
def test_blocks_nest_as_in_commonmark(parse, text):
    found, truth = page(parse, text), expected(text)
    if (
        "```" in text or "~~~" in text
    ):  # a blank line at the end of code makes lists loose in markdown-it only
        found, truth = (repr(tree).replace("'tight'", "''") for tree in (found, truth))
    assert found == truth


# --- what the page adds, and what it must never do ----------------------------------------------------


def words(nodes) -> str:
    """Return all text of a tree in order, with addresses and languages."""
    if isinstance(nodes, str):
        return nodes
    if isinstance(nodes, list):
        return "".join(map(words, nodes))
    keys = ("language", "text", "children", "href", "title", "blocks", "items", "rows")
    return "".join(words(nodes[key]) for key in keys if key in nodes)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from((*INLINE, *LINES, "\n", "$$", "\\(", "![", "](javascript:x)")), max_size=30).map(
        "".join
    )
)
def test_no_letter_of_prose_is_lost(parse, text):
    text = re.sub(r"[^\W\d_]+", "w", text).replace("&", "")
    found = words(parse(text))
    assert found.count("w") >= text.count("w")


def nodes_of(parse, text: str) -> list:
    """Return the inline nodes of one paragraph."""
    (block,) = parse(text)
    return block["children"]


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](data:text/html,x)",
        "[a]( javascript:alert(1))",
        "[a](<javascript:alert(1)>)",
        "[a](//evil.example)",
        "[a](vbscript:x)",
        "![a](data:image/png;base64,x)",
        "<javascript:alert(1)>",
        "<a href='javascript:alert(1)'>x</a>",
    ],
)
def test_only_web_addresses_become_links(parse, text):
    assert nodes_of(parse, text) == [text]


def test_images_are_links(parse):
    (image,) = nodes_of(parse, "![a *cat*](https://a.b/c.png)")
    assert image["type"] == "link" and image["image"] and image["href"] == "https://a.b/c.png"
    (badge,) = nodes_of(parse, "[![b](https://a.b/i.png)](https://a.b)")
    assert badge["href"] == "https://a.b" and badge["children"] == ["b"], "no link in a link"


@pytest.mark.parametrize(
    "text, href",
    [
        ("see https://a.b/c?d=1.", "https://a.b/c?d=1"),
        ("(https://a.b/c_(d))", "https://a.b/c_(d)"),
        ("**https://a.b/c**", "https://a.b/c"),
        ("http://a.b/x，然后", "http://a.b/x"),
        ("<https://a.b/_c_>", "https://a.b/_c_"),
        ("https://a.b/a_b_c", "https://a.b/a_b_c"),
    ],
)
def test_addresses_in_the_text_are_links(parse, text, href):
    assert re.findall(r"'href': '([^']*)'", repr(nodes_of(parse, text))) == [href]


def test_formulas_stay_as_they_were_written(parse):
    assert nodes_of(parse, r"so \(a_1 * b_1\) and $$x*y*z$$")[1::2] == [
        {"type": "math", "text": r"\(a_1 * b_1\)"},
        {"type": "math", "text": "$$x*y*z$$"},
    ]
    text = "$$\n- x_1\n+ y_1\n$$"
    assert [(b["type"], words(b)) for b in parse(f"a\n{text}\nb")] == [
        ("paragraph", "a"), ("math", text), ("paragraph", "b"),
    ]  # fmt: skip
    assert nodes_of(parse, r"an \(open one") == ["an (open one"]
    assert nodes_of(parse, "it costs $$ and $5") == ["it costs $$ and $5"]


def test_bold_beside_chinese_marks(parse):
    assert nodes_of(parse, "这是**“重点”**吗") == [
        "这是", {"type": "strong", "children": ["“重点”"]}, "吗",
    ]  # fmt: skip


def test_line_breaks_and_characters_by_name(parse):
    assert nodes_of(parse, "a<br>b<br/>c") == ["a", {"type": "break"}, "b", {"type": "break"}, "c"]
    assert nodes_of(parse, "&lt;b&gt; &amp;amp; &#33; &#0; &no;") == ["<b> &amp; ! \ufffd &no;"]


def test_code_is_shown_as_it_comes(parse):
    text = "```go\n\tx := `1`\n\n~~~\n"
    for end in range(len("```go"), len(text) + 1):
        (block,) = parse(text[:end])
        assert block["type"] == "code" and text[6:end].rstrip("\n") == block["text"].rstrip("\n")
    assert parse(text + "```\nb")[0]["text"] == "\tx := `1`\n\n~~~"
    assert parse("````md\n```\na\n```\n````")[0]["text"] == "```\na\n```", "a fence within a longer one"


def test_a_block_tells_the_lines_it_was_made_of(parse):
    text = "# a\n\nb\nc\n- d\n\n  e\n\n| f |\n|---|\n| g |\n\n```\n\nh"
    whole = parse(text)
    assert "\n".join(block["source"] for block in whole) == text
    longer = parse(text + "i")
    assert longer[:-1] == whole[:-1] and longer[-1]["source"] != whole[-1]["source"]


@pytest.mark.parametrize(
    "piece",
    ["*", "_", "~", "**a ", "*a _b ", "a* ", "`", "`a``", "[", "]", "![", "[a](", "[a](<",
    "[a](https://b", "![a ",
     "(", "\\", "\\(", "$$", "$$a", "<", "<https://", "&", "&#", "https://",
    "https://)))", ")", "|", "|a", "\n|",
     "> ", ">", "- ", "1. ", "\n- ", "\n> - ", "#", "# ", "```\n", "~~~a\n", "\t",
    " ", " a", "\n", "\n\n", "a\n", "=", "-",
     "a #", "* * ", "\n---\n", "a | b\n--- | ---\n", "</think>", "\n\\["],
)  # fmt: skip
@pytest.mark.parametrize("most", [250_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
def test_a_megabyte_of_marks_is_read_in_linear_time(scripts, piece, most):
    """A quadratic parser meets the limit of SECONDS. The tree is no deeper than JSON can be written."""
    for text in (
        piece * min(most, 1_000_000 // len(piece)),
        piece * (200_000 // len(piece)) + "a" + piece[::-1] * 1000,
    ):
        scripts.call("read", text)


def test_a_table_is_no_larger_than_its_text(parse):
    """Missing cells are not added, because that could make rows times columns of them."""
    text = "|a" * 5000 + "|\n" + "|-" * 5000 + "|\n" + "|b|\n" * 5000
    (table,) = parse(text)
    assert sum(map(len, table["rows"])) == 10_000
