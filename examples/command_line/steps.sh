#!/bin/bash
# Several steps under one lease. Where one command can do it all, prefer `sqlock run`: it renews by itself, and stops the
# command when the lease is lost. Here the script does both: it renews before each step, and ends when it cannot.
set -euo pipefail

lease=$(sqlock acquire --timeout 5m --ttl 10m --label 'release 42' deploy)
token=$(sed 's/.*"token":\([0-9]*\).*/\1/' <<<"$lease")

step=
finish() { # the step ends before the name is free
    [ -z "$step" ] || { kill "$step" && wait "$step"; } 2>/dev/null || true
    sqlock release --token "$token" deploy
}
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

step() {
    sqlock renew --token "$token" --ttl 10m deploy >/dev/null # exit code 79: the token does not hold the name
    timeout -k 20s 9m "$@" &                                  # ends before the lease does
    step=$!
    wait "$step"
    step=
}

step ./build
step ./upload
step ./switch-over
