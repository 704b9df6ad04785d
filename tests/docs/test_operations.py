"""What an operator and a researcher read: files to deploy, metrics, limits, variables, columns, what goes together."""

import ast
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from docs.make import compatibility
from specdec.server.metrics import Metrics
from specdec.server.settings import Limits, read_settings
from tests.docs.pages import ROOT, read

PAGE = read("docs/guides/deploying.md")


def rows(section: str) -> list[list[str]]:
    """The rows of the first table of a section, without its head."""
    lines = re.findall(r"^\| .*", PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0], re.M)
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]


def test_every_metric_has_a_row() -> None:
    """With its labels, as Prometheus reads them."""
    metrics = Metrics()

    load = {"running": 0, "waiting": 0, "kv_tokens_held": 0, "kv_tokens_free": 0}
    metrics.watch({"m": SimpleNamespace(load=load)}, SimpleNamespace(**load))
    known = {}
    for family in metrics.registry.collect():
        labels = getattr(metrics.registry._names_to_collectors.get(family.name), "_labelnames", ("model",))
        known[f"{family.name}_total" if family.type == "counter" else family.name] = {*labels}
    shown = {name.strip("`"): {*re.findall(r"`(\w+)`", labels)} for name, labels, _ in rows("Metrics")}
    assert shown == known
    for name in re.findall(r"specdec_\w+", PAGE.split("Four queries:")[1].split("\n## ")[0]):
        assert name.removesuffix("_bucket") in known, name


def test_the_files_agree_with_the_server() -> None:
    """Settings that it takes, times that cover its drain, sizes that cover its limits."""
    settings = read_settings(yaml.safe_load(read("configs/deploy/serve.yaml")))
    limits = Limits()
    nginx = read("configs/deploy/nginx.conf")
    assert f"proxy_pass http://{settings.host}:{settings.port};" in nginx
    assert f"server_name {settings.hosts[0]};" in nginx
    assert int(re.search(r"proxy_read_timeout (\d+)s", nginx)[1]) > limits.request_seconds  # type: ignore[index]
    assert int(re.search(r"body_size (\d+)m", nginx)[1]) * 2**20 > limits.audio_bytes  # type: ignore[index]
    unit = read("configs/deploy/specdec.service")
    stop = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])  # type: ignore[index]
    files = int(re.search(r"LimitNOFILE=(\d+)", unit)[1])  # type: ignore[index]
    *_, deployment, service = yaml.safe_load_all(read("configs/deploy/kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert min(stop, pod["terminationGracePeriodSeconds"]) > limits.drain_seconds + 4
    assert files > 2 * limits.connections
    assert container["readinessProbe"]["timeoutSeconds"] > 20
    assert container["resources"]["limits"]["cpu"] == container["env"][0]["value"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    [job] = yaml.safe_load(read("configs/deploy/prometheus.yaml"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{settings.host}:{settings.port}"]}]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_is_built() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("there is no Docker here")
    subprocess.run(["docker", "build", "-t", "specdec-test", "."], cwd=ROOT, check=True)
    shown = subprocess.check_output(["docker", "run", "--rm", "specdec-test", "--version"], text=True)
    assert shown.startswith("specdec ")


def test_every_variable_is_explained() -> None:
    """That the source reads, by its name or through a constant."""
    page = read("docs/reference/environment.md")
    found = set()
    for path in (ROOT / "specdec").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search("environ|cache_folder", text):
            names = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
            found |= {name for name in names if isinstance(name, str) and re.fullmatch(r"[A-Z][A-Z_]{2,}", name)}
    assert {"SPECDEC_KERNELS", "SPECDEC_PROBES", "XDG_CACHE_HOME", "CXX"} <= found
    assert not [name for name in found if f"`{name}`" not in page]


NO_FIGURES = {
    "docs/guides/cpu.md": {"0.125"},  # a step of bfloat16
    "README.md": {"3.7", "3.10", "2.11", "2.15", "5.17", "5.24"},  # gigabytes of models; versions
}


@pytest.mark.parametrize("name", NO_FIGURES)
def test_a_page_invents_no_figures(name: str) -> None:
    """Its numbers stand in the benchmarks."""
    page = read(name)
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    known = " ".join(map(read, ("docs/figures.md", "docs/zoo.md", "benchmarks/peers/README.md", *map(str, results))))
    prose = re.sub(r"```.*?```|`[^`]*`|HuggingFaceTB\S*|https?\S*|SmolLM2-\S*", "", page, flags=re.S)
    named = {*re.findall(r"\d+\.\d+", prose)} - NO_FIGURES[name]
    assert len(named) > 10
    assert not [number for number in named if number not in known]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_goes_together() -> None:
    """`python -m docs.make.compatibility` would change nothing."""
    page = compatibility.PAGE.read_text(encoding="utf-8")
    assert compatibility.filled(page, compatibility.tables()) == page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_combination_goes_if_its_pairs_do() -> None:
    """As the page says; the page tells of more that were tried."""
    assert len(compatibility.combinations(compatibility.PAGE.read_text(encoding="utf-8"))) == 2080
    compatibility.try_combinations(20)
