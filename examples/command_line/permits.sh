#!/bin/sh
# Loads one file. Start it for as many files, on as many hosts as you like: three at a time are at work, so that the database
# has time for others as well. The rest wait in the queue.
set -eu

sqlock run --permits 3 --label "$1" load -- load-file "$1"
