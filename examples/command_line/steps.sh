#!/bin/bash
# Several steps under one lease. Where one command can do it all, prefer `sqlock run`: it renews by itself, and stops the
# command when the lease is lost. Here the script does both: it renews before each step, and ends when it cannot.
set -euo pipefail

lease=$(sqlock acquire --timeout 5m --ttl 10m --label 'release 42' deploy)
token=$(sed 's/.*"token":\([0-9]*\).*/\1/' <<<"$lease")
trap 'sqlock release --token "$token" deploy' EXIT

step() {
    sqlock renew --token "$token" --ttl 10m deploy >/dev/null # exit code 79: no longer ours
    timeout 9m "$@"                                           # ends well before the lease does
}

step ./build
step ./upload
step ./switch-over
