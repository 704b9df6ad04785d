"""What the documents are made of: pictures and tables from results, reference pages from the code, links, extras."""

import re
from pathlib import Path

import pytest
import typer.main
import yaml

import specdec
from docs.make import demo, figures
from docs.make import pages as made
from recipes import functions
from specdec.cli.commands import app
from specdec.engine.engine import Engine
from specdec.options.generate import Options
from specdec.server import protocol
from tests.docs.pages import PAGES, ROOT, blocks, read


def test_pictures_and_tables_are_those_of_the_results() -> None:
    """`python docs/make/figures.py` would change nothing."""
    for path, picture in figures.pictures().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path} is old: python docs/make/figures.py"
    for name in figures.DOCUMENTS:
        text = read(name)
        assert figures.filled(text) == text, f"{name} is old: python docs/make/figures.py"
        assert "<!-- figures: beside transformers -->\n| |" in text


def test_the_recording_is_that_of_the_cast() -> None:
    """`python docs/make/demo.py` would change nothing; the last screen has the last line of the demo."""
    cast = demo.CAST.read_text(encoding="utf-8")
    picture = demo.PICTURE.read_text(encoding="utf-8")
    assert picture == demo.picture(cast)
    assert "identical: yes" in picture


def test_the_picture_is_a_round_that_happened() -> None:
    """The package's pair plays it again."""
    assert figures.record() == figures.recorded()


def test_the_loop_is_that_of_the_source() -> None:
    """The page shows `generate` and `accept` as they stand in the file."""
    [shown] = [block.code for block in blocks(ROOT / "docs" / "how" / "loop.md") if block.mark.startswith("not run")]
    source = read("specdec/engine/reference.py")
    assert shown == source[source.index("def generate(") :]
    assert "def accept(" in shown


def test_the_map_of_the_source_names_what_exists() -> None:
    """Files in the package, and the methods of a round."""
    text = read("docs/how/source.md")
    path = text.split("## The path of a request")[1].split("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", path)
    assert len(files) > 8
    assert not [name for name in files if not (ROOT / "specdec" / name.removeprefix("specdec/")).is_file()]
    loop = read("docs/how/loop.md")
    methods = re.findall(r"^\| `(_\w+)` \|", loop, re.M)
    assert len(methods) == 5
    assert {*methods} < {*vars(Engine)}


def test_the_options_page_has_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its bounds; a key without words fails the build, and so do words without a key."""
    page = made.options()
    assert "| `top_p` | number ≥ 0 ≤ 1 |" in page
    assert "| `port` | whole number ≥ 0 ≤ 65,535, `8000` |" in page
    assert "| `ranking` | `mean` or `sum` |" in page
    known = made.known()
    del known["serve"]["port"]
    monkeypatch.setattr(made, "known", lambda: known)
    with pytest.raises(ValueError, match=r"serve: the code has other keys, see port$"):
        made.options()


REPOSITORY = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md"), ROOT / "specdec" / "zoo" / "README.md"]


@pytest.mark.parametrize("page", REPOSITORY, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the repository; mkdocs looks at the links of the site."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src(?:set)?=\"([^\"]+)\"", text):
        target = link[0] or link[1]
        if not target.startswith(("http:", "https:")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page}: {target}"


def test_extras_exist() -> None:
    """Every extra that a page says to install is one; the page on installing names all."""
    project = read("pyproject.toml")
    section = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = {*re.findall(r"^(\w+) = \[", section, re.M)}
    named = {
        extra
        for page in PAGES
        for found in re.findall(r"\.\[([\w,]+)\]", page.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named <= extras
    sources = [*PAGES, *(ROOT / "specdec").rglob("*.py"), *(ROOT / "configs").rglob("*.yaml")]
    assert not [path for path in sources if "install 'specdec" in path.read_text(encoding="utf-8")]  # it is nowhere
    table = read("docs/start/install.md").split("## Extras")[1]
    assert {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))} == extras


@pytest.mark.parametrize("name", made.WRITTEN)
def test_a_page_that_is_made_is_fresh(name: str) -> None:
    """Readers of the repository found empty pages of flags and options."""
    assert read(f"docs/{name}") == made.WRITTEN[name](), "run python -m docs.make.pages"


def test_a_page_of_classes() -> None:
    """Docstrings, methods and arguments for readers of the repository, who found directives, which the site has."""
    page = made.classes("reference/api.md")
    assert "\n## SpecGenerator\n\n`SpecGenerator(target, draft=None, *, tokenizer=None" in page
    assert "| `generate(prompt=None, *, messages=None, **options)` | Decodes `prompt`: " in page
    assert "| `tokens_per_second` | New tokens of all sequences per second of wall time. |" in page
    assert "`ChainRule(most, width, choice=…, budget=…, ends=(), needs_q=False, siblings=0, text=())`" in made.classes(
        "reference/types.md"
    )
    assert "\n::: specdec.core.stats.Stats\n" in made.directives("reference/api.md")


def test_the_documents_are_short() -> None:
    """At most 35,000 words in all, without what is made from the code; a README of 120 lines."""
    generated = {ROOT / "docs" / name for name in made.WRITTEN}
    pages = [page.read_text("utf-8") for page in PAGES if page not in generated]
    made_tables = r"<!-- (made|figures): .*?<!-- /\1 -->"
    assert sum(len(re.sub(made_tables, "", page, flags=re.S).split()) for page in pages) <= 35_000
    assert len(read("README.md").splitlines()) <= 120


def test_a_page_that_is_made_has_a_stub() -> None:
    """Of the same title, in the repository; mkdocs sees to it that the navigation has every page."""
    for name, make in made.PAGES.items():
        stub = read(f"docs/{name}")
        assert make().partition("\n")[0] == stub.partition("\n")[0], name


def test_the_table_of_papers_names_all_of_the_source() -> None:
    """And files and options that exist; the bundled models' licenses name what they were trained on."""
    page = read("docs/reference/papers.md")
    cited = {
        paper
        for path in (ROOT / "specdec").rglob("*.py")
        for line in re.findall(r"arXiv.*", path.read_text(encoding="utf-8"))
        for paper in re.findall(r"\b\d{4}\.\d{5}\b", line)
    }
    assert len(cited) > 20
    assert cited - {"2411.01076"} <= {*re.findall(r"arxiv.org/abs/(\d{4}\.\d{5})", page)}  # an attack, in Serving
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert (ROOT / "specdec" / name).is_file(), name
    known = {*Options.model_fields, "draft", "assistant_tokenizer", "return_timestamps"}
    assert {*re.findall(r"`(\w+)=", page)} <= known
    licenses = read("specdec/zoo/README.md")
    assert all(name in licenses for name in (*functions.PACKAGES, "python_code", "python_summary", "speech"))


def test_the_version_is_that_of_the_package() -> None:
    """Where people cite it; the BibTeX of the guide is the entry of CITATION.cff."""
    entry = yaml.safe_load(read("CITATION.cff"))
    assert entry["version"] == specdec.__version__
    cited = read("docs/guides/comparing.md")
    assert all(f"  {key} = {{{entry[key]}}}" in cited for key in ("title", "version", "license"))
    assert f"  author = {{{{{entry['authors'][0]['name']}}}}}" in cited
    assert f"\n## {specdec.__version__}" in read("CHANGELOG.md")


def test_options_with_other_names() -> None:
    """Flags of the command line and fields of requests that are no names of options, and no others."""
    page = made.options().split("| option |")[1].split("\n\n")[0]
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 7
    commands = typer.main.get_command(app).commands
    flags = {flag for command in commands.values() for parameter in command.params for flag in parameter.opts}
    fields = {*protocol.ChatRequest.model_fields, *protocol.CompletionRequest.model_fields}
    for option, shell, http in rows:
        assert option.strip("`") in Options.model_fields
        assert {*re.findall(r"--[a-z][\w-]*", shell)} <= flags
        assert {*re.findall(r"`(\w+)", http)} <= fields
    assert ["`num_assistant_tokens`", "`--num-draft-tokens`", "`num_assistant_tokens`"] in rows
    assert ["`max_new_tokens`", "`--max-new-tokens`", "`max_tokens` or `max_completion_tokens`"] in rows


def test_the_glossary_defines_what_pages_link_to() -> None:
    """Every anchor once; mkdocs does not look at the README."""
    anchors = re.findall(r'<a id="([\w-]+)"></a>', read("docs/glossary.md"))
    assert len(anchors) == len(set(anchors)) > 30
    assert {*re.findall(r"glossary\.md#([\w-]+)\)", read("README.md"))} <= {*anchors}
