"""docker-compose.yml on a real engine: build, train, lose a node, a network, the server; keep what
was spent."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk, get_fab_filename
from flwr.cli.install import install_from_fab

from discreet.deployment.certificates import (
    give_to,
    make_authority,
    make_node,
    make_peers,
    make_server,
)
from discreet.deployment.flower_home import (
    CONNECTION,
    flower_environment,
    free_port,
    wait_until,
    write_connection,
)
from discreet.guard.patient_blocks import split_site
from tests.deployment.engine import (
    REPOSITORY,
    Engine,
    container_engine,
    copy_of_the_tree,
    fetch_torch,
)

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(3600)]
# of Flower's build
pytestmark.append(pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"))

LARGEST_IMAGE = 1.5e9
UP_SECONDS, RUN_SECONDS = 900.0, 1200.0
NODES = 4
IMAGE_USER = 10001
PROJECT = f"discreet-test-{os.getpid()}"
# A guarantee that the server accounts, beside the nodes' own: both must be carried through
# everything.
# So much noise over four nodes would drive a model; with steps this short it does not.
SETTINGS = (
    "privacy.user.enabled=true privacy.user.noise_multiplier=16 privacy.user.clip.norm=1 "
    "server.round_timeout=150 "
    "privacy.example.max_epsilon=null server.learning_rate=0.0001"
)


MAIN = "/runs/main"


@dataclass
class Deployment:
    """The compose project in a copy of the tree."""

    engine: Engine
    folder: Path
    port: int

    def compose(self, *words: str, **settings: str) -> str:
        return self.engine.docker(
            "compose", "-p", PROJECT, *words, folder=self.folder, **self.settings, **settings
        )

    @property
    def gateway(self) -> str:
        """The address under which containers reach this machine."""
        what = "{{(index .IPAM.Config 0).Gateway}}"
        return self.engine.docker("network", "inspect", "--format", what, "bridge").strip()

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
        """kill -9 from the outside: `docker kill` would count as a wish, and the restart policy
        would respect it."""
        try:
            os.kill(int(self.inspect(service, "{{.State.Pid}}")), signal.SIGKILL)
        except (
            PermissionError,
            ProcessLookupError,
        ):  # an engine that runs elsewhere, or as somebody else
            self.compose("kill", "--signal", "KILL", service)
            self.compose("start", service)

    def run(self, overrides: str, *, output: str = MAIN) -> subprocess.Popen[bytes]:
        home = self.write_connection()
        settings = self.folder.parent / "run.toml"
        settings.write_text(
            f"overrides = {json.dumps(f'{SETTINGS} {overrides} output_dir={output}')}\n"
        )
        command = ["flwr", "run", ".", CONNECTION, "--stream", "--run-config", str(settings)]
        with (self.folder.parent / "flwr-run.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=flower_environment(home), stdout=log, stderr=log
            )

    def run_inside(self, overrides: str, *, output: str) -> None:
        """A run that is started in the server's container, which needs no published port."""
        written = f"overrides={json.dumps(f'{SETTINGS} {overrides} output_dir={output}')}"
        command = ("flwr", "run", "/opt/discreet", "deployment", "--stream")
        self.in_service("superlink", *command, "--run-config", written)

    def write_connection(self) -> Path:
        """A FLWR_HOME that knows this deployment."""
        home = self.folder.parent / "flwr"
        write_connection(
            home, address=f"127.0.0.1:{self.port}", authority=self.folder / "secrets" / "ca.crt"
        )
        return home

    def rows(self, output: str = MAIN) -> list[dict[str, str]]:
        answer = self.engine.try_docker(
            "compose",
            "-p",
            PROJECT,
            "exec",
            "-T",
            "superlink",
            "cat",
            f"{output}/metrics.csv",
            folder=self.folder,
            **self.settings,
        )
        return [] if answer.returncode else list(csv.DictReader(io.StringIO(answer.stdout)))

    def spent(self) -> tuple[int, float, float]:
        """Rows of the server's ledger, its epsilon, and the largest that a node reported."""
        told = json.loads(
            self.in_service("superlink", "discreet", "status", "--json", "/runs/main")
        )
        count = self.in_service("superlink", "python", "-c", COUNT_RELEASES).strip()
        return int(count), told["epsilon"]["user"]["spent"], told["epsilon"]["example"]["spent"]


@dataclass
class AloneNode:
    """docker-compose.node.yml with files of its own, and nothing of the server's but ca.crt."""

    deployment: Deployment

    def __post_init__(self) -> None:
        self.folder = self.deployment.folder.parent / "hospital-a"
        self.secrets = self.folder / "secrets"
        make_node(self.secrets, "hospital-a")
        shutil.copy(self.deployment.folder / "secrets" / "ca.crt", self.secrets)
        data = self.folder / "data"
        data.mkdir()
        head = ",".join([*(f"p{number}" for number in range(64)), "digit"])
        rows = [
            ",".join([*(str((row * 7 + column) % 17) for column in range(64)), str(row % 10)])
            for row in range(200)
        ]
        (data / "scans.csv").write_text("\n".join([head, *rows]) + "\n")
        (data / "data.toml").write_text(
            'format = "csv"\nfile = "scans.csv"\ntarget = "digit"\ntask = "digits"\n'
            "low = 0\nhigh = 16\n"
        )
        built = build_fab_from_disk(self.deployment.folder)
        project = tomllib.loads((self.deployment.folder / "pyproject.toml").read_text())
        app = self.folder / get_fab_filename(project, hashlib.sha256(built).hexdigest())
        app.write_bytes(built)
        install_from_fab(app, self.folder / "approved", skip_prompt=True)
        if os.getuid() == 0:
            give_to(self.folder, IMAGE_USER)
        self.server = "nowhere:1"

    def compose(self, *words: str) -> str:
        settings = {
            "DISCREET_SERVER": self.server,
            "DISCREET_NODE": "hospital-a",
            "DISCREET_TASK": "digits",
            "DISCREET_DATA": str(self.folder / "data"),
            "DISCREET_SECRETS": str(self.secrets),
            "DISCREET_APPROVED": str(self.folder / "approved"),
            "DISCREET_POLICY": str(
                self.deployment.folder / "discreet" / "deployment" / "policies" / "strict.json"
            ),
            **self.deployment.settings,
        }
        where = ("compose", "-p", f"{PROJECT}-node", "-f", "docker-compose.node.yml")
        return self.deployment.engine.docker(
            *where, *words, folder=self.deployment.folder, **settings
        )

    def start(self, server: str) -> None:
        """Makes its key known to the server, as a person would, and starts it."""
        self.server = server
        public = self.secrets / "public" / "hospital-a.pub"
        shutil.copy(public, self.deployment.folder / "secrets" / "public")
        known = ("/run/keys/hospital-a.pub", "deployment", "--name", "hospital-a")
        self.deployment.in_service("superlink", "flwr", "supernode", "register", *known)
        self.compose("run", "--rm", "node", *CREATE_LEDGER)
        self.compose("up", "--wait", "--wait-timeout", str(int(UP_SECONDS)))


CREATE_LEDGER = ("discreet", "ledger", "create", "/ledger/ledger.db")
COUNT_RELEASES = (
    "from pathlib import Path; from discreet.ledger.durable_ledger import DurableLedger as L; "
    "l = L(Path('/runs/main/ledger.db')); assert l.verify() == []; print(len(l.releases()))"
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
    deployment = Deployment(engine, folder, free_port())
    make_server(secrets, ["localhost", deployment.gateway])
    for number in range(NODES):
        make_node(secrets, f"node-{number}")
    make_peers(secrets)
    if os.getuid() == 0:
        give_to(secrets, IMAGE_USER)
    try:
        yield deployment
    finally:
        print(deployment.compose("ps", "--all"))
        print(deployment.compose("logs", "--tail", "40"))
        deployment.compose("down", "--volumes", "--timeout", "20")


def test_the_image_is_small_and_holds_no_secret(deployment: Deployment) -> None:
    fetch_torch(deployment.engine, deployment.folder / "wheels")
    deployment.compose("build")
    size = int(
        deployment.engine.docker("image", "inspect", "--format", "{{.Size}}", "discreet:latest")
    )
    assert size < LARGEST_IMAGE
    unwanted = " -o ".join(
        f"-name {name}" for name in ("*.key", "*.pub", "*.crt", "uv", "pip", "pip3")
    )
    names = f"find /opt /usr/local/bin /runs /state /flwr -type f ( {unwanted} )"
    found = deployment.engine.docker(
        "run", "--rm", "--network", "none", "discreet:latest", *names.split()
    )
    assert found.split() == []


def test_everything_comes_up_healthy_and_locked_down(deployment: Deployment) -> None:
    for number in range(NODES):
        deployment.compose("run", "--rm", "--no-deps", f"node-{number}", *CREATE_LEDGER)
    deployment.compose("up", "--wait", "--wait-timeout", str(int(UP_SECONDS)))
    for service in ("superlink", "gate", *(f"node-{number}" for number in range(NODES))):
        assert deployment.inspect(service, "{{.State.Health.Status}}") == "healthy"
        assert (
            deployment.inspect(service, "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}")
            == "true [ALL]"
        )
        assert not deployment.inspect(service, "{{.Config.User}}").startswith("0")
        assert int(deployment.inspect(service, "{{.HostConfig.Memory}}")) > 0
    assert "127.0.0.1" in deployment.inspect("superlink", "{{json .NetworkSettings.Ports}}")


def test_a_node_reaches_the_node_proxy_and_what_it_lets_through(deployment: Deployment) -> None:
    reach = "import socket; socket.create_connection(('{}', {}), timeout=5)"
    deployment.in_service("node-0", "python", "-c", reach.format("gate", 9092))
    for host in ("superlink", "node-1"):
        with pytest.raises(AssertionError, match=r"not known|name resolution|refused|timed out"):
            deployment.in_service("node-0", "python", "-c", reach.format(host, 8000))
    post = (
        "import ssl, urllib.request as u; c = "
        "ssl.create_default_context(cafile='/run/secrets/ca.crt'); "
        "u.urlopen(u.Request('https://gate:9092/v1/{}', b'', {{'Content-Type': "
        "'application/protobuf'}}), context=c)"
    )
    for path in ("control/start-run", "runtime/acquire-task", "fleet/register-node"):
        with pytest.raises(AssertionError, match="404"):
            deployment.in_service("node-0", "python", "-c", post.format(path))
    with pytest.raises(AssertionError, match="401"):
        deployment.in_service("node-0", "python", "-c", post.format("fleet/pull-messages"))


def test_it_trains_and_survives_a_killed_node_a_lost_network_and_a_killed_server(
    deployment: Deployment,
) -> None:
    run = deployment.run("rounds=100")
    wait_until(lambda: len(deployment.rows()) >= 1, RUN_SECONDS, "the first round is done")
    assert int(deployment.rows()[0]["replies"]) == NODES

    network, lost = f"{PROJECT}_fleet", deployment.container("node-2")
    deployment.engine.docker("network", "disconnect", network, lost)
    deployment.kill("node-1")
    few = len(deployment.rows())
    wait_until(
        lambda: any(int(row["replies"]) <= NODES - 1 for row in deployment.rows()[few:]),
        RUN_SECONDS,
        "a round without",
    )
    deployment.engine.docker("network", "connect", network, lost)
    few = len(deployment.rows())
    wait_until(
        lambda: any(int(row["replies"]) == NODES for row in deployment.rows()[few:]),
        RUN_SECONDS,
        "a round with all",
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


def test_a_node_on_its_own_host_serves_its_data_and_runs_approved_code(
    deployment: Deployment,
) -> None:
    deployment.compose("down", "--timeout", "20")
    apart = AloneNode(deployment)
    proxy_port = str(free_port())
    server = ("-f", "docker-compose.yml", "-f", "docker-compose.server.yml")
    open_proxy = {"DISCREET_GATE_PORT": proxy_port, "DISCREET_OVERRIDES": "experiment=deployment"}
    deployment.compose(
        *server, "up", "--wait", "--wait-timeout", str(int(UP_SECONDS)), **open_proxy
    )
    running = deployment.compose(*server, "ps", "--services", **open_proxy)
    assert sorted(running.split()) == ["gate", "superlink"]
    try:
        apart.start(f"{deployment.gateway}:{proxy_port}")
        alone = "data.num_clients=1 sampling.min_nodes=1 rounds=1"
        deployment.run_inside(alone, output="/runs/alone")
        assert [row["replies"] for row in deployment.rows("/runs/alone")] == ["1"]
        copied = ("/runs/alone/ledger.db", "/runs/alone-copy.db")
        assert "/runs/alone-copy.db" in deployment.in_service(
            "superlink", "discreet", "ledger", "backup", *copied
        )

        other = deployment.folder / "client_app" / "other.py"
        other.write_text('"""Code that is installed nowhere."""\n')
        assert deployment.run(alone, output="/runs/other").wait(RUN_SECONDS) == 1
        assert deployment.rows("/runs/other") == []  # the server refuses to start it
        other.unlink()
        for app in (apart.folder / "approved" / "apps").iterdir():
            shutil.rmtree(app)  # the node's owner withdraws the approval
        assert deployment.run(alone, output="/runs/refused").wait(RUN_SECONDS) == 0
        assert [row["replies"] for row in deployment.rows("/runs/refused")] == ["0"]
        told = deployment.in_service("superlink", "discreet", "status", "/runs/refused")
        assert "error 1" in told
        assert "OSError (code 2); the client's own log says why" in told
        assert "Read-only file system" not in told  # the server keeps no word of a client's error
        assert "Read-only file system" in apart.compose("logs")
    finally:
        print(apart.compose("logs", "--tail", "40"))
        apart.compose("down", "--volumes")
        deployment.compose(*server, "down", "--timeout", "20", **open_proxy)


@dataclass
class GuardedSite:
    """docker-compose.guard.yml with a site's split, under the engine's own seccomp profile."""

    deployment: Deployment
    name = "hospital-b.guard"

    def __post_init__(self) -> None:
        self.folder = self.deployment.folder.parent / "hospital-b"
        self.secrets = self.folder / "secrets"
        make_node(self.secrets, self.name)
        shutil.copy(self.deployment.folder / "secrets" / "ca.crt", self.secrets)
        site = self.folder / "site"
        site.mkdir()
        rows = [f"p{each},{each % 3 - 1},{each % 7 - 3},{int(each % 3 > 1)}" for each in range(40)]
        self.table = self.folder / "train.csv"
        self.table.write_text("\n".join(["patient,one,two,disease", *rows]) + "\n")
        split_site(self.table, site / "site", id_column="patient", count=GUARDED_BLOCKS)
        (site / "guard.toml").write_text(GUARD_TOML)
        if os.getuid() == 0:
            give_to(self.folder, IMAGE_USER)
        self.server = "nowhere:1"

    def compose(self, *words: str) -> str:
        settings = {
            "DISCREET_SERVER": self.server,
            "DISCREET_NODE": self.name,
            "DISCREET_SITE": str(self.folder / "site"),
            "DISCREET_SECRETS": str(self.secrets),
            **self.deployment.settings,
        }
        where = ("compose", "-p", f"{PROJECT}-guard", "-f", "docker-compose.guard.yml")
        folder = self.deployment.folder
        return self.deployment.engine.docker(*where, *words, folder=folder, **settings)

    def asked(self, *words: str) -> str:
        """What a command says in the site's container."""
        return self.compose("run", "--rm", "guard", "discreet", *words)

    def runs(self, home: Path) -> subprocess.CompletedProcess[str]:
        """A researcher's `flwr run` of an app that the site has not read."""
        app = self.folder / "app"
        shutil.copytree(REPOSITORY / "examples" / "patients", app)
        written = (
            f'features=2 nodes=1 num-server-rounds=2 guard-noise-multiplier=4.0 test="{TABLE}"'
        )
        command = ["flwr", "run", str(app), CONNECTION, "--stream", "--run-config", written]
        environment = flower_environment(home)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


GUARDED_BLOCKS = 4
TABLE = "/runs/test.csv"  # where the server has the researcher's public rows
GUARD_TOML = f"""ledger = "/ledger/ledger.db"
any = true
charge = "all-blocks"
max-epsilon = 20.0
max-delta = 1e-5
min-noise-multiplier = 4.0
block-seconds = 8
enclosure = "landlock"
[blocks]
folder = "site"
id = "patient"
count = {GUARDED_BLOCKS}
"""


def test_a_guarded_site_in_a_container_holds_a_hostile_app_and_answers_a_server(
    deployment: Deployment,
) -> None:
    guarded = GuardedSite(deployment)
    proxy_port = str(free_port())
    server = ("-f", "docker-compose.yml", "-f", "docker-compose.server.yml")
    open_proxy = {"DISCREET_GATE_PORT": proxy_port, "DISCREET_OVERRIDES": "experiment=deployment"}
    up = ("up", "--wait", "--wait-timeout", str(int(UP_SECONDS)))
    deployment.compose(*server, *up, **open_proxy)
    try:
        guarded.asked("ledger", "create", "/ledger/ledger.db")
        checked = guarded.asked("site", "check", "/site/guard.toml")
        assert "none of the tried ways out of landlock is open" in checked

        guarded.server = f"{deployment.gateway}:{proxy_port}"
        home = deployment.write_connection()
        public = str(guarded.secrets / "public" / f"{guarded.name}.pub")
        register = ["flwr", "supernode", "register", public, CONNECTION, "--name", guarded.name]
        subprocess.run(register, env=flower_environment(home), check=True)
        guarded.compose("up", "--detach")
        rows = guarded.table.read_text()
        write = f"open({TABLE!r}, 'w').write({rows!r})"
        deployment.in_service("superlink", "python", "-c", write)
        ran = guarded.runs(home)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.count("Received 1 results and 0 failures") == 2
        told = guarded.asked("site", "status", "/site/guard.toml")
        assert "which one unit moves by 8C" in told
        assert "in 2 releases" in told
    finally:
        print(guarded.compose("logs", "--tail", "40"))
        guarded.compose("down", "--volumes")
        deployment.compose(*server, "down", "--timeout", "20", **open_proxy)
