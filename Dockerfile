# One image for the server, the gate and the nodes. How to build and run it: docs/deployment.md
# The base, which a digest pins: BASE_IMAGE=python:3.11-slim-bookworm@sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE} AS build

# A package index with CPU builds of torch: the default one has CUDA builds, several GB. A torch wheel in wheels/ goes
# before it.
ARG TORCH_INDEX=

WORKDIR /src
COPY constraints.txt pyproject.toml wheel[s] /src/
# What pyproject.toml asks for, with the extras that deployment and simulation name, without Ray, which only simulations need; then
# without what nothing uses at run time: headers, tests, compilers' tools, uv (nothing is installed later), Arrow's servers.
RUN python -m venv --without-pip /opt/venv \
 && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; \
print(*p['dependencies'], *(n for x in ('federation', 'tables', 'report', 'deployment', 'simulation') for n in e[x]), sep='\n')" \
    | sed '/^discreet\[/d; /^ray/d; s/^flwr\[simulation\]/flwr/; s/^flwr-datasets\[vision\]/flwr-datasets/' > requirements.txt \
 && if ls torch-*.whl >/dev/null 2>&1; then torch=$(ls torch-*.whl); else torch="torch ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX}"; fi \
 && python -m pip --python /opt/venv/bin/python install --no-cache-dir --constraint constraints.txt $torch \
 && python -m pip --python /opt/venv/bin/python install --no-cache-dir --constraint constraints.txt -r requirements.txt \
 && cd /opt/venv/lib/python3.11/site-packages \
 && rm -rf /opt/venv/bin/uv /opt/venv/bin/uvx torch/include torch/share torch/test pyarrow/include hf_xet \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && for part in flight s3 s3fs; do rm -f pyarrow/libarrow_$part* pyarrow/_$part*; done \
 && find . -name '*.a' -delete \
 && find numpy pandas pyarrow scipy sklearn sympy matplotlib -depth -type d -name tests -exec rm -rf {} + \
 && find fontTools networkx sympy torch/_inductor torch/_dynamo torch/onnx -name '*.pyc' -delete


FROM ${BASE_IMAGE}

# Volumes are made with the rights of these folders: any user number that compose.yml chooses can write to its own.
# Nothing is installed later, so what installs goes.
RUN python -m pip uninstall --quiet --yes pip setuptools wheel \
 && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin discreet \
 && mkdir -m 0777 /runs /state /ledger /flwr /held
COPY --from=build /opt/venv /opt/venv
COPY pyproject.toml LICENSE README.md /opt/discreet/
COPY conf /opt/discreet/conf
COPY discreet /opt/discreet/discreet
COPY strategies /opt/discreet/strategies
COPY client_app /opt/discreet/client_app
COPY server_app /opt/discreet/server_app
RUN printf '#!/opt/venv/bin/python\nfrom discreet.cli.main import main\n\nraise SystemExit(main())\n' > /opt/venv/bin/discreet \
 && chmod 0755 /opt/venv/bin/discreet
# The base image comes without bytecode of the standard library, and nothing can be written later: a process for each
# message would compile it each time. What is imported here is compiled once.
RUN cd /opt/discreet && python -m compileall -q . \
 && /opt/venv/bin/python -c "import client_app.client_app, server_app.server_app, discreet.deployment.superlink, discreet.deployment.gate, \
discreet.deployment.supernode, discreet.deployment.flower_fixes.commands, discreet.deployment.flower_fixes.supernode_fixes, \
discreet.deployment.flower_fixes.superlink_fixes, \
discreet.cli.status, flwr.cli.app, flwr.supernode.cli, \
flwr.superlink.cli, flwr.superlink.main, flwr.supercore.superexec.run_superexec, flwr.supernode.main, sklearn.datasets, urllib.request, \
dp_accounting.pld, dp_accounting.rdp, scipy.optimize, scipy.signal"

ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/discreet PYTHONUNBUFFERED=1 HOME=/tmp FLWR_HOME=/flwr DISCREET_STATE=/state \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2 HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /runs
CMD ["discreet", "--help"]
