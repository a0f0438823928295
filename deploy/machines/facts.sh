# Says what this machine is and has, a line "key value" each; changes nothing. Words that may hold anything are in base64.
say() { echo "$1 $2"; }
text() { [ ! -r "$2" ] || say "$1" "$(head -c 262144 "$2" | base64 | tr -d '\n')"; }
root=${DESTDIR:-}
data=$root/var/lib/keelson
say hostname "$(uname -n)"
say machine "$(head -c 64 "$root/etc/machine-id" 2>/dev/null | tr -cd 0-9a-f)"
say arch "$(uname -m)"
say kernel "$(uname -r)"
[ ! -d "$root/run/systemd/system" ] || say systemd yes
[ ! -f "$root/sys/fs/cgroup/cgroup.controllers" ] || say cgroup "$(cat "$root/sys/fs/cgroup/cgroup.controllers" | tr ' ' ,)"
[ "$(id -u)" != 0 ] || say root yes
for p in nft ip tar gzip sha256sum modprobe; do ! command -v $p >/dev/null || say program $p; done
for m in overlay br_netfilter nf_conntrack nf_tables; do
  if [ -d "$root/sys/module/$m" ] || modprobe -n -q $m 2>/dev/null; then say module $m; fi
done
say clock "$(date +%s.%N)"
say memory "$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' "$root/proc/meminfo" 2>/dev/null)"
ip -o address show 2>/dev/null | sed -n 's/^[0-9]*: [^ ]* *inet6\{0,1\} \([^/ ]*\).*/address \1/p'
# A socket that listens has the state 0A; the port is in hexadecimal.
cat "$root/proc/net/tcp" "$root/proc/net/tcp6" 2>/dev/null | sed -n 's/^ *[0-9]*: [0-9A-F]*:\([0-9A-F]\{4\}\) [0-9A-F]*:[0-9A-F]* 0A .*/port \1/p' | sort -u
at=$data
while [ ! -d "$at" ]; do at=$(dirname "$at"); done
df -Pk "$at" | { read -r _; read -r _ _ _ free _; say room "$free"; }
if t=$(mktemp "$at/.keelson-XXXXXX" 2>/dev/null); then
  trap 'rm -f "$t"' EXIT
  before=$(date +%s%N)
  ! dd if=/dev/zero of="$t" bs=4096 count=20 oflag=dsync 2>/dev/null || say sync $((($(date +%s%N) - before) / 20000))
fi
for u in keelson-controlplane keelson-agent; do
  if systemctl is-active --quiet $u.service 2>/dev/null; then say active $u; fi
  if systemctl is-enabled --quiet $u.service 2>/dev/null; then say enabled $u; fi
  [ ! -e "$root/run/keelson-changed/$u" ] || say stale $u
done
for f in "$root"/usr/bin/kctl "$root"/usr/bin/keelson-* "$root"/usr/lib/keelson/uninstall.sh "$root"/usr/lib/systemd/system/keelson* \
  "$root"/opt/cni/bin/bridge "$root"/opt/cni/bin/host-local "$root"/opt/cni/bin/loopback "$root"/opt/cni/bin/portmap "$data"/images.d/*.tar "$root"/var/cache/keelson/*.tar*; do
  [ ! -f "$f" ] || say sum "$(sha256sum "$f" | cut -d' ' -f1) ${f#"$root"}"
done
[ ! -x "$root/usr/bin/keelson-controlplane" ] || say version "$("$root/usr/bin/keelson-controlplane" --version 2>/dev/null | head -n 1 | head -c 200 | base64 | tr -d '\n')"
text controlplane "$root/etc/keelson/controlplane.yaml"
text agent "$root/etc/keelson/agent.yaml"
[ ! -d "$data/controlplane/pki" ] || say replica begun
[ ! -f "$data/controlplane/cluster.json" ] || say replica whole
[ ! -f "$data/controlplane/standby.json" ] || say waiting yes
[ ! -f "$data/controlplane/peers.json" ] || say joining yes
text cluster "$data/controlplane/cluster.json"
[ ! -f "$data/controlplane/admin.kubeconfig" ] || say admin yes
if [ -f "$data/session/node.pem" ]; then
  say node yes
  # The key beside the certificate stays there.
  say nodecert "$(sed -n '/-BEGIN CERTIFICATE-/,/-END CERTIFICATE-/p' "$data/session/node.pem" | head -c 65536 | base64 | tr -d '\n')"
fi
text nodeca "$data/session/ca.crt"
text replicaca "$data/controlplane/pki/ca.crt"
say end yes
