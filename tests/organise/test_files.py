"""The files for servers: one source for `tt init` and for configs/deploy/, and what their own programs say of them."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.build_deploy import EXAMPLE, FOLDER
from tt_cli.cli.main import COMMANDS, loaded
from tt_cli.organise.server_files import ServerFacts, rendered
from tt_cli.run import load_run

SOURCE = Path(__file__).parents[2]


def test_the_examples_are_what_init_writes() -> None:
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == rendered(EXAMPLE), "write them anew: scripts/build_deploy.py"
    assert not any("@{" in text for text in found.values())


def test_a_service_names_the_package_that_has_what_the_run_needs() -> None:
    files = rendered(ServerFacts.of(load_run("words"), ""))
    assert "/pip install '.[lm]'      … in a clone of tt's source\n" in files["tt-words.service"]


@pytest.mark.parametrize("facts", [EXAMPLE, ServerFacts("mine", 4000), ServerFacts("mine", 4000, "203.0.113.7")])
def test_the_aux_peer_takes_the_flags(facts: ServerFacts) -> None:
    command = loaded(next(command for command in COMMANDS if command.name == "aux-peer"))
    files = rendered(facts)
    service = re.search(r"^ExecStart=\S+/tt aux-peer (.*)$", files[f"tt-{facts.name}.service"], re.MULTILINE)
    assert service is not None
    compose = yaml.safe_load(files["compose.yaml"])["services"]["aux-peer"]["command"]
    for flags in (service[1].split(), compose):
        given = command.make_context("aux-peer", list(flags)).params
        assert given["port"] == facts.port and given["authority"] == bool(facts.authority)
        assert [address.split("/")[2] for address in given["announce"]] == ([facts.address] if facts.address else [])


def test_compose_keeps_the_aux_peer_from_what_it_does_not_need() -> None:
    content = yaml.safe_load(rendered(EXAMPLE)["compose.yaml"])
    services = content["services"]
    aux = services["aux-peer"]
    assert aux["read_only"] and aux["cap_drop"] == ["ALL"] and aux["init"]
    assert aux["depends_on"]["database"]["condition"] == "service_healthy"
    assert services["prometheus"]["profiles"] == ["prometheus"]
    outside = [port for service in services.values() for port in service.get("ports", [])]
    assert [port for port in outside if not port.startswith("127.0.0.1:")] == ["31337:31337", "31338:31338"]
    assert set(content["volumes"]) == {"database", "prometheus"}
    gateway = content["networks"]["default"]["ipam"]["config"][0]["subnet"].replace(".0/24", ".1")
    assert aux["command"][-1] == gateway


def test_the_dockerfile_and_what_stays_out_of_it() -> None:
    text = (SOURCE / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[-2:] == ['ENTRYPOINT ["tt", "aux-peer"]', 'CMD ["emoji"]']
    assert "USER tt" in lines and " TT_HOME=/data " in text and "/health" in text
    kept_out = (SOURCE / ".dockerignore").read_text().splitlines()
    for name in (".git", ".venv", "**/node_modules", "**/.env", "**/home"):
        assert name in kept_out
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((SOURCE / name).exists() for name in copied.split())


def test_the_service_is_shut_in() -> None:
    service = rendered(EXAMPLE)["tt-my-run.service"]
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(service)
    found = parser["Service"]
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert found[key] == "yes"
    assert (found["ProtectSystem"], found["User"], found["Restart"]) == ("strict", "tt", "always")
    assert found["ReadWritePaths"] == found["Environment"].split()[0].removeprefix("TT_HOME=")


@pytest.mark.debian
def test_systemd_takes_the_service(tmp_path: Path) -> None:
    """With this machine's own program and folder, for systemd looks whether they are there."""
    text = rendered(EXAMPLE)["tt-my-run.service"].replace("/opt/tt/bin/tt", "/bin/true")
    unit = tmp_path / "tt-my-run.service"
    unit.write_text(text)
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert said.returncode == 0 and "tt-my-run" not in said.stderr, said.stderr
    exposed = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert exposed.returncode == 0, exposed.stdout[-600:]


def test_a_certificate_is_asked_for_every_name_under_which_nginx_answers() -> None:
    text = rendered(ServerFacts("mine", 4000, "tt.example.org", "https://passes.example.org"))["nginx.conf"]
    (asked,) = re.findall(r"certbot certonly --nginx (.*)", text)
    (served,) = set(re.findall(r"server_name (.*);", text))
    assert asked == "-d tt.example.org -d passes.example.org" == " ".join(f"-d {name}" for name in served.split())
    assert "/live/tt.example.org/fullchain.pem" in text, "where certbot puts it: by the first"


@pytest.mark.debian
def test_nginx_takes_its_file(tmp_path: Path) -> None:
    text = rendered(EXAMPLE)["nginx.conf"]
    key, certificate = tmp_path / "privkey.pem", tmp_path / "fullchain.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tt.example.org"]
        + ["-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    text = text.replace("/etc/letsencrypt/live/tt.example.org", str(tmp_path))
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\nevents {{}}\nhttp {{\n{text}\n}}\n")
    said = subprocess.run(["/usr/sbin/nginx", "-t", "-c", str(whole)], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "warn" not in said.stderr


@pytest.mark.debian
def test_caddy_takes_its_file(tmp_path: Path) -> None:
    file = tmp_path / "Caddyfile"
    file.write_text(rendered(EXAMPLE)["Caddyfile"])
    adapted = subprocess.run(
        ["caddy", "adapt", "--config", str(file), "--validate"],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert adapted.returncode == 0, adapted.stderr
    assert '"flush_interval":-1' in adapted.stdout.replace(" ", "")
