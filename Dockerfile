# corp-deploy without a GPU: ONNX Runtime and OpenVINO on the CPU.
#
#   docker build --tag corp-deploy:0.1.0 .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" corp-deploy:0.1.0 demo --output demo-out
#
# The ordinary torch brings CUDA along. PyTorch's installation page names an index of builds without it, which are taken
# where pip knows it: docker build --build-arg PIP_EXTRA_INDEX_URL=... . An image that is published pins its base by digest.
FROM python:3.12-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python -m venv /opt/corp-deploy
COPY constraints.txt ./
COPY pyproject.toml README.md LICENSE ./
COPY calib calib
COPY corp_deploy corp_deploy
COPY export export
COPY ground ground
COPY perf perf
RUN /opt/corp-deploy/bin/python -m pip install --constraint constraints.txt \
    ".[cpu,demo,hf,interop,openvino,sign]"

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="corp-deploy" \
      org.opencontainers.image.description="Smaller vision transformers and encoders, with proof; without a GPU" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --create-home --uid 1000 corp
COPY --from=build /opt/corp-deploy /opt/corp-deploy
ENV PATH="/opt/corp-deploy/bin:$PATH"
USER 1000:1000
WORKDIR /work
# It is a command that ends, no service.
HEALTHCHECK NONE
ENTRYPOINT ["corp-deploy"]
CMD ["--help"]
