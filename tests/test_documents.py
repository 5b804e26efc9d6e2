"""What documents and comments point to is there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = {"build", "demo-out", "node_modules"}  # folders of what is made, not written; dotted ones too
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:calibrate|docs|eval|examples|qrt|tests|tools)/[\w./-]+)`")
MODULE = re.compile(r"python -m (qrt(?:_calibrate|_eval)?[\w.]*\w)")
PLACEHOLDER = re.compile(r"\b(?:NAME|DEVICE)\b")
CITED = re.compile(r"(?<![\w/])(?:docs|research)/[\w./#-]*[\w/]")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")  # 8,192 and 0.20, but neither 8B nor H200
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def files(suffix: str) -> Iterator[Path]:
    """Every file of the repository with this suffix."""
    for path in sorted(ROOT.rglob(f"*{suffix}")):
        folders = path.relative_to(ROOT).parts[:-1]
        if not any(folder in OTHERS or folder.startswith(".") for folder in folders):
            yield path


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked."""
    text = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[ -]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", files(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page):
    text = FENCE.sub("", page.read_text())
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: link to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: link to {link}"
    for path in PATH.findall(text):
        assert PLACEHOLDER.search(path) or (ROOT / path).exists(), f"{page.name}: `{path}`"
    for module in MODULE.findall(page.read_text()):
        places = [ROOT / base / f"{module.replace('.', '/')}.py" for base in (".", "calibrate", "eval")]
        assert any(place.exists() for place in places), f"{page.name}: python -m {module}"


def test_paths_cited_in_code_exist():
    own = Path(__file__)
    for path in files(".py"):
        for cited in CITED.findall(path.read_text()) if path != own else ():
            name, _, anchor = cited.partition("#")
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {cited}"
            assert not anchor or anchor in anchors(ROOT / name), f"{path.relative_to(ROOT)}: {cited}"


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A head: with `code`\n\n```\n[no](none.md)\n```\n[here](#a-head-with-code)\n")
    test_links_and_paths_of_a_page_exist(page)
    for bad in ("[x](none.md)", "[x](#none)", "`qrt/none.py`", "python -m qrt.none"):
        page.write_text(f"# Head\n\n{bad}\n")
        with pytest.raises(AssertionError, match="none"):
            test_links_and_paths_of_a_page_exist(page)


def recorded(name):
    """A result file."""
    return json.loads((ROOT / "eval/results" / f"{name}.json").read_text())


def rows_of(page, head):
    """The cells of a page's table that begins with `head`."""
    table = next(part for part in (ROOT / page).read_text().split("\n\n") if part.startswith(head))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_readme_numbers_are_those_of_the_result_files():
    fits = {
        (cell["weights"], cell["kv"]): cell["max_concurrent_requests"]
        for cell in recorded("h200/sweep_llama-3-8b")["cells"]
    }
    (load,) = recorded("h200/throughput_8b_w4a8_int4_head8_sharegpt")["loads"]
    plain, int4 = (
        next(row for row in recorded(f"h200/latency_8b_{name}")["rows"] if row["batch"] == 64)
        for name in ("bf16", "w4a8_int4")
    )
    agreement = {run["kv"]: run["top1_agreement"] for run in recorded("cpu/kld_wikitext_smollm2")["runs"]}
    tools = {
        row["by"].partition(", ")[2]: row
        for row in recorded("cpu/calibration_real_peers")["calibration_real_peers"]
    }
    own, best, other = tools["awq-yaqa"], tools["AWQ + GPTQ"], tools["IQ4_XS, importance matrix"]
    measured = [
        *(str(fits[pair]) for pair in (("fp16", "fp16"), ("w4a16", "int8"), ("w4a16", "int4"))),
        f"{load['output_tokens_per_second']:,.0f}",
        f"{100 * load['host_gap']:.2f}",
        *(f"{row['decode_ms_per_step']:.2f}" for row in (int4, plain)),
        f"{100 * agreement['int8']:.2f}",
        *(f"{own['kl']:.3f}", f"{own['bits_per_weight']:.2f}"),
        *(f"{best['kl']:.3f}", f"{other['kl']:.3f}", f"{other['bits_per_weight']:.2f}"),
    ]
    conditions = "80 8,192 16 1,000 64".split()  # GiB, tokens, bits or windows, requests, requests or windows
    claims = (ROOT / "README.md").read_text().partition("## Why")[2].partition("The table")[0]
    assert [number for number in NUMBER.findall(claims) if number not in conditions] == measured


def test_quality_of_int4_on_the_real_model_is_as_recorded():
    shown = {tuple(row[2:]) for row in rows_of("docs/quality.md", "| windows | by | bits")}
    assert shown == {
        (
            f"{r['bits_per_weight']:.2f}",
            f"{r['kl']:.3f}",
            f"{r['ppl']:.2f}",
            f"{r['same_top1']:.1%}".replace("%", " %"),
        )
        for r in recorded("cpu/calibration_real_peers")["calibration_real_peers"]
    }


def test_quality_of_the_bundled_model_is_as_recorded():
    made = recorded("cpu/calibration_quality")["calibration_quality"]
    made += recorded("h200/calibration_tune")["tune"]["product"]
    for model, *_, kl, perplexity, _ in rows_of("docs/quality.md", "| model | grid | windows"):
        kl, perplexity = float(kl), float(perplexity.replace(",", ""))
        near = [r for r in made if abs(r["kl"] - kl) < 6e-5 and abs(r["ppl"] - perplexity) < 6e-4]
        assert model in {r["model"] for r in near}, f"{model}, KL {kl}"
