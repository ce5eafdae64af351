#!/bin/sh
# Make a password of Redis in a folder that has none: redis.conf for Redis, and ragkv_store, the setting of the service with
# it. Every user of a container that has the folder may read them.
set -eu
cd "$1"
[ ! -s ragkv_store ] || exit 0
umask 022
password=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
echo "requirepass $password" > new
mv new redis.conf
# Last: it says that all is there.
printf 'redis://:%s@redis:6379/0' "$password" > new
mv new ragkv_store
