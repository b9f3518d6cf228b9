"""docker-compose.yml on a real engine: build, train, lose a node, a network, the server; keep what was spent."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.approve import approve, build_app
from scripts.certificates import give_to, make_authority, make_node, make_server
from scripts.federation import flower_environment, free_port
from scripts.local_federation import wait_until
from scripts.superlink import CONNECTION, write_connection
from tests.deployment.engine import Engine, container_engine, copy_of_the_tree, fetch_torch

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(3600)]

LARGEST_IMAGE = 1.5e9
UP_SECONDS, RUN_SECONDS = 900.0, 1200.0
NODES = 4
IMAGE_USER = 10001
PROJECT = f"discreet-test-{os.getpid()}"
# A guarantee that the server accounts, beside the nodes' own: both must be carried through everything.
SETTINGS = (
    "privacy.user.enabled=true privacy.user.noise_multiplier=16 privacy.user.clip.norm=1 server.round_timeout=90 "
    "privacy.example.max_epsilon=null"
)


@dataclass
class Deployment:
    """The compose project in a copy of the tree."""

    engine: Engine
    folder: Path
    port: int

    def compose(self, *words: str) -> str:
        return self.engine.docker("compose", "-p", PROJECT, *words, folder=self.folder, **self.settings)

    @property
    def settings(self) -> dict[str, str]:
        user = str(IMAGE_USER if os.getuid() == 0 else os.getuid())
        return {"DISCREET_CONTROL_PORT": str(self.port), "DISCREET_UID": user, "DISCREET_GID": user}

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str, what: str) -> str:
        return self.engine.docker("inspect", "--format", what, self.container(service)).strip()

    def in_service(self, service: str, *words: str) -> str:
        return self.compose("exec", "-T", service, *words)

    def kill(self, service: str) -> None:
        """kill -9 from the outside: `docker kill` would count as a wish, and the restart policy would respect it."""
        try:
            os.kill(int(self.inspect(service, "{{.State.Pid}}")), signal.SIGKILL)
        except (PermissionError, ProcessLookupError):  # an engine that runs elsewhere, or as somebody else
            self.compose("kill", "--signal", "KILL", service)
            self.compose("start", service)

    def run(self, overrides: str) -> subprocess.Popen[bytes]:
        home = self.folder.parent / "flwr"
        write_connection(home, address=f"127.0.0.1:{self.port}", authority=self.folder / "secrets" / "ca.crt")
        settings = self.folder.parent / "run.toml"
        settings.write_text(f"overrides = {json.dumps(f'{overrides} {SETTINGS} output_dir=/runs/main')}\n")
        command = ["flwr", "run", ".", CONNECTION, "--stream", "--run-config", str(settings)]
        with (self.folder.parent / "flwr-run.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=flower_environment(home), stdout=log, stderr=log)

    def rows(self) -> list[dict[str, str]]:
        answer = self.engine.try_docker(
            *("compose", "-p", PROJECT, "exec", "-T", "superlink", "cat", "/runs/main/metrics.csv"),
            folder=self.folder,
            **self.settings,
        )
        return [] if answer.returncode else list(csv.DictReader(io.StringIO(answer.stdout)))

    def spent(self) -> tuple[int, float, float]:
        """Rows of the server's ledger, its epsilon, and the largest that a node reported."""
        told = json.loads(self.in_service("superlink", "python", "-m", "scripts.status", "--json", "/runs/main"))
        count = self.in_service("superlink", "python", "-c", COUNT_RELEASES).strip()
        return int(count), told["epsilon"]["user"]["spent"], told["epsilon"]["example"]["spent"]


COUNT_RELEASES = (
    "from pathlib import Path; from discreet.durable_ledger import DurableLedger as L; "
    "l = L(Path('/runs/main/ledger.db')); assert l.verify() == []; print(len(l.releases()))"
)
INSTALL = (
    "import sys; from pathlib import Path; from flwr.cli.install import install_from_fab; "
    "print(install_from_fab(Path(sys.argv[1]).read_bytes(), skip_prompt=True))"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with container_engine(tmp_path_factory.mktemp("lab")) as engine:
        yield engine


@pytest.fixture(scope="module")
def deployment(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = copy_of_the_tree(tmp_path_factory.mktemp("deployment") / "discreet")
    secrets = folder / "secrets"
    make_authority(secrets)
    make_server(secrets, ["localhost"])
    for number in range(NODES):
        make_node(secrets, f"node-{number}")
    if os.getuid() == 0:
        give_to(secrets, IMAGE_USER)
    deployment = Deployment(engine, folder, free_port())
    try:
        yield deployment
    finally:
        print(deployment.compose("ps", "--all"))
        print(deployment.compose("logs", "--tail", "40"))
        deployment.compose("down", "--volumes", "--timeout", "20")


def test_the_image_is_small_and_holds_no_secret(
    deployment: Deployment, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fetch_torch(deployment.engine, deployment.folder / "wheels")
    started = time.monotonic()
    deployment.compose("build")
    seconds = time.monotonic() - started
    size = int(deployment.engine.docker("image", "inspect", "--format", "{{.Size}}", "discreet:latest"))
    with capsys.disabled():
        print(f"\nimage: {size / 1e9:.2f} GB, built in {seconds:.0f} s")
    assert size < LARGEST_IMAGE
    names = (
        "find /opt /runs /state /flwr -type f ( -name *.key -o -name *.pub -o -name *.crt -o -name uv -o -name pip )"
    )
    found = deployment.engine.docker("run", "--rm", "--network", "none", "discreet:latest", *names.split())
    assert found.split() == []


def test_everything_comes_up_healthy_and_locked_down(deployment: Deployment) -> None:
    deployment.compose("up", "--wait", "--wait-timeout", str(int(UP_SECONDS)))
    for service in ("superlink", "gate", *(f"node-{number}" for number in range(NODES))):
        assert deployment.inspect(service, "{{.State.Health.Status}}") == "healthy"
        assert deployment.inspect(service, "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}") == "true [ALL]"
        assert not deployment.inspect(service, "{{.Config.User}}").startswith("0")
        assert int(deployment.inspect(service, "{{.HostConfig.Memory}}")) > 0
    assert "127.0.0.1" in deployment.inspect("superlink", "{{json .NetworkSettings.Ports}}")


def test_a_node_reaches_the_gate_and_what_the_gate_lets_through(deployment: Deployment) -> None:
    reach = "import socket; socket.create_connection(('{}', {}), timeout=5)"
    deployment.in_service("node-0", "python", "-c", reach.format("gate", 9092))
    for host in ("superlink", "node-1"):
        with pytest.raises(AssertionError, match=r"not known|name resolution|refused|timed out"):
            deployment.in_service("node-0", "python", "-c", reach.format(host, 8000))
    post = (
        "import ssl, urllib.request as u; c = ssl.create_default_context(cafile='/run/secrets/ca.crt'); "
        "u.urlopen(u.Request('https://gate:9092/v1/{}', data=b'', method='POST'), context=c)"
    )
    for path in ("control/start-run", "runtime/acquire-task", "fleet/register-node"):
        with pytest.raises(AssertionError, match="404"):
            deployment.in_service("node-0", "python", "-c", post.format(path))
    with pytest.raises(AssertionError, match="401"):
        deployment.in_service("node-0", "python", "-c", post.format("fleet/pull-messages"))


def test_it_trains_and_survives_a_killed_node_a_lost_network_and_a_killed_server(deployment: Deployment) -> None:
    run = deployment.run("rounds=100")
    wait_until(lambda: len(deployment.rows()) >= 1, RUN_SECONDS, "the first round is done")
    assert int(deployment.rows()[0]["replies"]) == NODES

    network, lost = f"{PROJECT}_fleet", deployment.container("node-2")
    deployment.engine.docker("network", "disconnect", network, lost)
    deployment.kill("node-1")
    few = len(deployment.rows())
    wait_until(
        lambda: any(int(row["replies"]) <= NODES - 1 for row in deployment.rows()[few:]), RUN_SECONDS, "a round without"
    )
    deployment.engine.docker("network", "connect", network, lost)
    few = len(deployment.rows())
    wait_until(
        lambda: any(int(row["replies"]) == NODES for row in deployment.rows()[few:]), RUN_SECONDS, "a round with all"
    )

    deployment.kill("superlink")
    run.wait(RUN_SECONDS)
    wait_until(
        lambda: deployment.inspect("superlink", "{{.State.Health.Status}}") == "healthy",
        UP_SECONDS,
        "the server is back",
    )
    rounds, (releases, user, example) = len(deployment.rows()), deployment.spent()
    assert releases >= rounds
    resumed = deployment.run(f"rounds={rounds + 1} resume=true")
    assert resumed.wait(RUN_SECONDS) == 0
    after = deployment.spent()
    assert after[0] > releases
    assert after[1] > user
    assert after[2] > example


def test_what_was_spent_outlives_down_and_up(deployment: Deployment) -> None:
    before, rounds = deployment.spent(), len(deployment.rows())
    deployment.compose("down", "--timeout", "20")
    deployment.compose("up", "--wait", "--wait-timeout", str(int(UP_SECONDS)))
    assert deployment.spent() == before
    resumed = deployment.run(f"rounds={rounds + 1} resume=true")
    assert resumed.wait(RUN_SECONDS) == 0
    assert len(deployment.rows()) == rounds + 1
    assert all(now > then for now, then in zip(deployment.spent(), before, strict=True))


def test_a_node_with_approved_apps_runs_nothing_else(deployment: Deployment, tmp_path: Path) -> None:
    app = build_app(tmp_path)
    approve(app, tmp_path / "approved")
    other = tmp_path / "other.fab"
    other.write_bytes(app.read_bytes() + b"\0")  # a zip file may have something behind it, and its hash differs
    for path in tmp_path.rglob("*"):
        with suppress(PermissionError):
            path.chmod(0o755)
    mounts = ("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/flwr:mode=1777", "--network", "none")
    volumes = ("-v", f"{tmp_path}:/in:ro", "-v", f"{tmp_path / 'approved' / 'apps'}:/flwr/apps:ro")

    def try_app(name: str) -> str:
        words = ("run", "--rm", *mounts, *volumes, "discreet:latest", "python", "-c", INSTALL, f"/in/{name}")
        return deployment.engine.docker(*words)

    assert "/flwr/apps/discreet.discreet" in try_app(app.name)
    with pytest.raises(AssertionError, match="Read-only file system"):
        try_app(other.name)


def test_the_overrides_for_other_hosts_are_whole(deployment: Deployment) -> None:
    server = deployment.compose("-f", "docker-compose.yml", "-f", "docker-compose.server.yml", "config", "--services")
    assert sorted(server.split()) == ["gate", "superlink"]
    node = {"DISCREET_SERVER": "fl.example.org:9092", "DISCREET_NODE": "node-0", "DISCREET_TASK": "digits"}
    words = ("compose", "-f", "docker-compose.node.yml", "config", "--format", "json")
    told = json.loads(deployment.engine.docker(*words, folder=deployment.folder, **node, DISCREET_DATA="/srv/data"))
    apps = [volume for volume in told["services"]["node"]["volumes"] if volume["target"] == "/flwr/apps"]
    assert apps[0]["read_only"] is True


def test_down_with_volumes_leaves_nothing(deployment: Deployment) -> None:
    deployment.compose("down", "--volumes", "--timeout", "20")
    label = f"label=com.docker.compose.project={PROJECT}"
    for kind in ("volume", "network", "container"):
        assert deployment.engine.docker(kind, "ls", "--quiet", "--filter", label).split() == []
