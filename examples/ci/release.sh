#!/bin/sh
# Make a release in a CI job and publish what it found.
#
#   sh ci/release.sh RECIPE.toml RELEASE_DIR BASELINE.json RESULTS_DIR [OPTION...]
#
# Options go to corp-deploy release: --trust-paths if the recipe names files beyond its own directory, --trust-code if it
# runs code or commands of yours, --trust-engine if RELEASE_DIR came with engines that were built elsewhere. A measure of
# yours (metric under [parity]) runs in RELEASE_DIR: list the files that its command reads under metric_files, by paths
# relative to the recipe, and install the packages that it imports in this job.
# RELEASE_DIR and BASELINE.json are worth caching between jobs: finished stages are kept, measurements too, and the first
# release that passes becomes the baseline. RESULTS_DIR gets report.md, report.xml (JUnit), report.html and gate.json.
# Exit codes are corp-deploy's: 0 pass, 1 fail, 2 bad input, 3 inconclusive, 4 a target is not here, 5 not comparable.
set -u
[ $# -ge 4 ] || { echo "usage: $0 RECIPE.toml RELEASE_DIR BASELINE.json RESULTS_DIR" >&2; exit 2; }
recipe=$1 release=$2 baseline=$3 results=$4
shift 4

status=0
corp-deploy release "$recipe" --output "$release" --baseline "$baseline" --init-baseline "$@" || status=$?
case $status in
0 | 1 | 3 | 5) ;;
4)
    corp-deploy release "$recipe" --output "$release" --baseline "$baseline" --init-baseline "$@" --plan-only
    exit 4
    ;;
*) exit "$status" ;;
esac

mkdir -p "$results"
for name in report.md report.xml report.html gate.json; do
    cp "$release/$name" "$results/" || exit 70
done
corp-deploy check "$release" || exit $?
exit "$status"
