"""GitHub's files: workflows, forms for issues, CITATION.cff, checked without GitHub."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import dlattn

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]
GITHUB = ROOT / ".github"
if not GITHUB.exists():
    pytest.skip("no .github/, which is not in the sdist", allow_module_level=True)

WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [p for p in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if p.name != "config.yml"]
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm"}


class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
    """Refuses a key that is there twice, of which YAML would keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise ValueError(f"{node.start_mark}: {twice} twice")
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    return yaml.load(text, Loader)


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def mistakes(text: str) -> list[str]:
    """The steps of a workflow."""
    document, found = load(text), []
    triggers = document[True]  # as YAML 1.1 reads "on"
    for trigger in triggers.values():
        for pattern in (trigger or {}).get("paths", []):
            if not any(ROOT.glob(pattern.replace("**.", "**/*."))):
                found.append(f"paths: {pattern} matches no file")
    jobs = document["jobs"]
    artifacts = {
        step["with"]["name"]: name
        for name, job in jobs.items()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    }
    for name, job in jobs.items():
        needs = job.get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        found += [f"{name}: needs {other}" for other in needs if other not in jobs]
        if job["runs-on"] not in RUNNERS:
            found.append(f"{name}: runs on {job['runs-on']}")
        if not 0 < job.get("timeout-minutes", 0) <= 120:
            found.append(f"{name}: no timeout-minutes of at most 120")
        matrix = job.get("strategy", {}).get("matrix", {})
        for used in re.findall(r"matrix\.(\w+)", str(job)):
            if used not in matrix:
                found.append(f"{name}: no matrix.{used}")
        for step in job["steps"]:
            found += [f"{name}: {what}" for what in step_mistakes(step, needs, artifacts)]
    return found


def step_mistakes(step: dict[str, Any], needs: list[str], artifacts: dict[str, str]) -> list[str]:
    found = []
    if ("uses" in step) == ("run" in step):
        found.append(f"a step has one of uses and run: {step}")
    if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step.get("uses", "a/b@v1")):
        found.append(f"{step['uses']} has no version")
    settings = step.get("with", {})
    action = step.get("uses", "").partition("@")[0]
    if action == "actions/download-artifact" and artifacts.get(settings["name"]) not in needs:
        found.append(f"{settings['name']} is of no job that this one needs")
    if action == "actions/setup-python" and not isinstance(settings["python-version"], str):
        found.append("3.10 without quotes is 3.1")
    command = step.get("run", "")
    for group in re.findall(r"\[([a-z,]+)\]", command):
        unknown = set(group.split(",")) - extras()
        if unknown:
            found.append(f"no extra {unknown}")
    for path in re.findall(r"(?:^| )((?:\.ci|tests|docs)(?:/[\w.]+)*)", command):
        if not (ROOT / path).exists():
            found.append(f"no {path}")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow(path: Path) -> None:
    assert mistakes(path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("wheels.yml", "needs: wheel\n", "needs: wheels\n", "test: needs wheels"),
        ("wheels.yml", "runs-on: ubuntu-24.04-arm", "runs-on: windows", "runs on windows"),
        ("wheels.yml", "cibuildwheel@v3.2.1", "cibuildwheel@main", "has no version"),
        ("wheels.yml", "          name: wheel\n", "          name: other\n", "of no job"),
        ("wheels.yml", "matrix.python }}", "matrix.version }}", "no matrix.version"),
        ("wheels.yml", "CMakeLists.txt", "CMakeList.txt", "CMakeList.txt matches no file"),
        ("ci.yml", 'python-version: "3.11"', "python-version: 3.11", "3.10 without quotes"),
        ("ci.yml", "run: .ci/run", "run: .ci/go", "no .ci/go"),
        ("ci.yml", "timeout-minutes: 45", "timeout-minutes: 450", "no timeout-minutes"),
        ("docs.yml", "[docs]", "[site]", "no extra"),
    ],
)
def test_mistakes_are_found(file: str, old: str, new: str, found: str) -> None:
    text = (GITHUB / "workflows" / file).read_text()
    assert old in text
    assert any(found in mistake for mistake in mistakes(text.replace(old, new, 1)))


def test_a_tag_publishes_what_was_tested() -> None:
    document = load((GITHUB / "workflows" / "wheels.yml").read_text())
    publish = document["jobs"]["publish"]
    assert "refs/tags/v" in publish["if"] and document[True]["push"] == {"tags": ["v*"]}
    taken = {
        step["with"]["name"]
        for step in publish["steps"]
        if step.get("uses", "").startswith("actions/download-artifact@")
    }
    assert "test" in publish["needs"] and taken == {*publish["needs"]} - {"test"}
    actions = [step.get("uses", "").partition("@")[0] for step in publish["steps"]]
    assert actions[-2:] == ["actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]
    assert publish["permissions"]["id-token"] == "write"
    check = publish["steps"][3]["run"]
    for name, expected in (("0.1.0", 0), ("0.1", 1), ("0.1.0.1", 1)):
        done = subprocess.run(
            [
                "bash",
                "-c",
                f"cd $(mktemp -d) && mkdir dist && touch dist/dlattn-{name}.tar.gz && {check}",
            ],
            env={**os.environ, "GITHUB_REF_NAME": "v0.1.0"},
        )
        assert done.returncode == expected, name


def test_wheels_of_two_cudas_are_told_apart() -> None:
    """The one for CUDA 12 by its version, which PyPI refuses and the release's job attaches."""
    jobs = load((GITHUB / "workflows" / "wheels.yml").read_text())["jobs"]
    settings = jobs["wheel-cuda12"]["steps"][1]["env"]
    local = re.findall(r"DLATTN_LOCAL_VERSION=(\w+)", settings["CIBW_ENVIRONMENT_LINUX"])
    compiler = re.findall(
        r"CUDACXX=/usr/local/cuda-(12)\.(\d)/", settings["CIBW_ENVIRONMENT_LINUX"]
    )
    assert local == ["cu" + "".join(compiler[0])]
    assert f'"^build: CUDA {".".join(compiler[0])},"' in settings["CIBW_TEST_COMMAND"]
    wheel = f"dlattn-0.1.0+{local[0]}-cp310-abi3-manylinux_2_28_x86_64.whl"
    make = f"cd $(mktemp -d) && mkdir dist && touch 'dist/{wheel}' && gh() {{ echo \"$@\"; }} && "
    steps = [jobs["publish"]["steps"][3], jobs["release"]["steps"][1]]
    refused, attached = (
        subprocess.run(
            ["bash", "-c", make + step["run"]],
            env={**os.environ, "GITHUB_REF_NAME": "v0.1.0"},
            capture_output=True,
            text=True,
        )
        for step in steps
    )
    assert refused.returncode == 1 and "wheel-cuda12" not in jobs["publish"]["needs"]
    assert attached.stdout == f"release create v0.1.0 --verify-tag --generate-notes dist/{wheel}\n"
    assert "DLATTN_LOCAL_VERSION" not in str({**jobs, "wheel-cuda12": None})


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        load("a: 1\na: 2\n")


def test_wheels_are_built_for_what_pyproject_names() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[tool.cibuildwheel]\n")[2]
    named = re.findall(r"cp\d+-\w+", section)
    workflow = (GITHUB / "workflows" / "wheels.yml").read_text()
    built = re.findall(r"CIBW_BUILD: (\S+)", workflow)
    assert len(named) == 2 and set(named) == set(built)
    assert len(built) == workflow.count("uses: pypa/cibuildwheel@")


def test_what_was_never_run_is_named() -> None:
    """In CONTRIBUTING.md, by a word for each such job."""
    names = [
        job["name"]
        for path in WORKFLOWS
        for job in load(path.read_text())["jobs"].values()
        if "not run yet" in job.get("name", "")
    ]
    assert len(names) == 8
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(word in told for word in ('"not run yet"', "CUDA 12", "aarch64"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_form_asks_for_what_is_needed(path: Path) -> None:
    form = load(path.read_text())
    assert {"name", "description", "labels", "body"} == set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] == "textarea" and field["attributes"]["label"]
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert "python -m dlattn info" in labels


def test_citation_is_of_this_version() -> None:
    citation = load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dlattn.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert citation["license"] in (ROOT / "pyproject.toml").read_text()
