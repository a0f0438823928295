#!/bin/sh
# Takes Keelson off this machine: daemons, pods, mounts, iSCSI sessions of volumes, interfaces, rules, control groups and files.
set -eu

usage() {
  cat <<'EOT'
uninstall.sh: takes Keelson off this machine: daemons, pods, mounts, iSCSI sessions of volumes, interfaces, rules, control groups, files.

  uninstall.sh              everything, the data of a control plane and of local volumes too
  uninstall.sh --keep-data  but for /etc/keelson and /var/lib/keelson

A worker is drained first (kctl drain NODE), and its Node deleted afterwards (kctl delete node NODE); a replica leaves its
cluster first (kctl cluster member remove NAME). 'kctl cluster remove NAME' does all of it, by ssh.
EOT
}
say() { echo "uninstall: $*"; }
die() { echo "uninstall: $*" >&2; exit 1; }

keep=''
for a; do
  case $a in
  --keep-data) keep=yes ;;
  -h | --help) usage; exit 0 ;;
  *) echo "uninstall: $a is no flag; see uninstall.sh --help" >&2; exit 2 ;;
  esac
done
root=${DESTDIR:-}
[ "$(id -u)" = 0 ] || die "root is needed: run it with sudo"
units='keelson-agent.service keelson-controlplane.service keelson-pods.service'
slice=/sys/fs/cgroup/keelson.slice
left=$(mktemp) # what could not be taken away: what notes it may be a shell of its own
trap 'rm -f "$left"' EXIT
trouble() { echo "uninstall: $*" >&2; echo "$*" >>"$left"; }

# lock has nobody install meanwhile.
lock() {
  command -v flock >/dev/null || return 0
  exec 9>"$root/run/keelson-install.lock"
  flock -w 900 9 || die "another install.sh or uninstall.sh has been at work on this machine for 15 minutes"
}

daemons() {
  command -v systemctl >/dev/null || return 0
  for u in $units; do
    if systemctl is-active --quiet "$u"; then say "stopping $u"; fi
    systemctl disable --quiet --now "$u" 2>/dev/null || true
  done
}

# pods are killed, with their shims: those of the slice alone.
pods() {
  [ -d "$root$slice/pods" ] || return 0
  say "ending pods"
  echo 1 >"$root$slice/pods/cgroup.kill" 2>/dev/null || find "$root$slice/pods" -name cgroup.procs -exec cat {} + | while read -r pid; do kill -9 "$pid" 2>/dev/null || true; done
  tries=0
  while grep -qs '^populated 1' "$root$slice/pods/cgroup.events"; do
    tries=$((tries + 1))
    [ $tries -le 100 ] || die "processes of pods do not end: see $slice/pods; nothing else was taken away"
    sleep 0.2
  done
}

# mounts go, the deepest first. A disk that is mounted at a folder of data is not Keelson's mount, and the next boot mounts it again:
# it stays, and what is on it goes with the other files. Images alone are a folder that the agent mounts on itself, on a disk that is
# mounted there once more. Data that are kept stay as they are seen: Keelson mounts nothing below those of a replica and of local volumes.
mounts() {
  awk -v root="$root" -v keep="$keep" 'BEGIN {
    data = root "/var/lib/keelson"
    n = split("/run/keelson /var/lib/keelson /var/lib/kubelet/pods /var/lib/kubelet/plugins", below, " ")
  } {
    gsub(/\\040/, " ", $5)
    if ($5 == data || $5 == data "/controlplane" || $5 == data "/local-volumes") next
    if ($5 == data "/images") {
      own = $4 ~ /\/images$/ || $3 " " $4 == images
      images = $3 " " $4
      if (!own) next
    }
    if (keep != "" && (index($5, data "/controlplane/") == 1 || index($5, data "/local-volumes/") == 1)) next
    for (i = 1; i <= n; i++) if ($5 == root below[i] || index($5, root below[i] "/") == 1) print $5
  }' "${MOUNTINFO:-/proc/self/mountinfo}" | sort -r | while IFS= read -r at; do umount -l "$at" || trouble "$at stays mounted"; done
}

# notes are what the agent writes of an iSCSI target before it does anything for it: while one is there, so may be a session or a record.
notes() { find "$root/var/lib/kubelet/plugins/kubernetes.io/iscsi" -xdev -mindepth 3 -maxdepth 3 -name target.json 2>/dev/null || true; }

# volumes are unmounted: what they have made beside that goes by the agent, which knows what was there before. One of a release before
# does not do it. A note that stays is that of an agent which is installed again, too.
volumes() {
  [ -n "$(notes)" ] || return 0
  say "logging out of iSCSI targets"
  if [ -x "$root/usr/bin/keelson-agent" ]; then
    "$root/usr/bin/keelson-agent" remove-volumes || trouble "what volumes have made on this machine is not all gone"
  fi
  notes | while IFS= read -r f; do
    target=${f%/target.json}
    target=${target##*/}
    trouble "sessions with iSCSI target $target or iscsiadm's records of it, which may hold a password, may be there still: 'iscsiadm -m session' and 'iscsiadm -m node -T $target' show them, $f says what was made; delete that when they are gone"
  done
}

network() {
  if [ -x "$root/usr/bin/keelson-agent" ]; then
    say "removing what led to other nodes' pods"
    "$root/usr/bin/keelson-agent" remove-network || trouble "what led to other nodes' pods is not all gone"
  fi
  if command -v ip >/dev/null; then
    # Which virtual servers of IPVS are of Services the agent knows, and takes this interface away with them. One of a release before
    # does not; the interface would say so no longer.
    if ip link show keelson-ipvs0 >/dev/null 2>&1 && grep -qsE '^(TCP|UDP|SCTP) ' "$root/proc/net/ip_vs"; then
      trouble "virtual servers of Services may be in IPVS still, which keelson-agent has not taken away: 'ipvsadm -Ln' shows them, 'ipvsadm -D' deletes one"
    fi
    # The bridge of pods goes with what is left of their ends of links.
    for l in $(ip -o link show master keelson0 2>/dev/null | sed -n 's/^[0-9]*: \([^@:]*\).*/\1/p') \
      $(ip -o link show 2>/dev/null | sed -n 's/^[0-9]*: \(keelson[^@: ]*\).*/\1/p'); do
      ip link show "$l" >/dev/null 2>&1 || continue
      if ip link delete "$l"; then say "removed interface $l"; else trouble "interface $l stays"; fi
    done
  fi
  # The addresses of the node's DNS are on the loopback device; the agent has noted which.
  if [ -r "$root/run/keelson/dns-addresses.json" ]; then
    tr -d '[]" \n' <"$root/run/keelson/dns-addresses.json" | tr , '\n' | while read -r a || [ -n "$a" ]; do
      ip address delete "$a" dev lo 2>/dev/null || ! ip -o address show dev lo | grep -qwF "$a" || trouble "$a stays on the loopback device"
    done
  fi
  if command -v nft >/dev/null; then
    nft list tables 2>/dev/null | while read -r word family table; do
      case $word/$table in
      table/keelson | table/keelson-*) ;;
      table/cni_hostport) [ -z "$(ls -A "$root/etc/cni/net.d" 2>/dev/null)" ] || continue ;; # of whoever has host ports
      *) continue ;;
      esac
      if nft delete table "$family" "$table"; then say "removed rules $family $table"; else trouble "rules $family $table stay"; fi
    done
  fi
  for tables in iptables ip6tables; do
    command -v $tables-save >/dev/null || continue
    $tables-save 2>/dev/null | grep -q KEELSON- || continue
    # What remains is what others wrote, as it is.
    if $tables-save | grep -v KEELSON- | $tables-restore; then say "removed chains of $tables"; else trouble "chains of $tables stay"; fi
  done
}

groups() {
  [ -d "$root$slice" ] || return 0
  systemctl stop keelson.slice 2>/dev/null || true
  find "$root$slice" -depth -type d -exec rmdir {} \; 2>/dev/null || true
  [ ! -d "$root$slice/pods" ] || trouble "control groups below $slice stay"
}

# data deletes what is below /var/lib/keelson, and on disks that are mounted where a replica, local volumes and images have theirs. A
# mount point cannot be deleted, and stays.
data() {
  at=$root/var/lib/keelson
  if [ -L "$at" ]; then
    # Where it leads there may be more than Keelson's.
    trouble "$at was a link to another folder: what is there stays"
    rm -f "$at"
    return 0
  fi
  for d in "$at/controlplane" "$at/local-volumes" "$at/images" "$at"; do
    if [ -L "$d" ]; then
      trouble "$d was a link to another folder: what is there stays"
      rm -f "$d"
    fi
    [ -d "$d" ] || continue
    find "$d" -xdev -mindepth 1 ! -path "$d/lost+found" -delete 2>/dev/null || true
    stays=$(find "$d" -xdev -mindepth 1 ! -type d 2>/dev/null | head -n 1)
    [ -z "$stays" ] || trouble "$stays stays, and perhaps more of $d"
    rmdir "$d" 2>/dev/null || true
  done
}

# gone deletes a file that install.sh has put, and what is there of it where that was cut off.
gone() { rm -f "$root$1" "$root$1.new"; }

files() {
  if [ -z "$root" ] && command -v dpkg-query >/dev/null && dpkg-query -W keelson >/dev/null 2>&1; then
    say "removing the package"
    if [ -n "$keep" ]; then apt-get remove -y -qq keelson >/dev/null; else apt-get purge -y -qq keelson >/dev/null; fi || trouble "the package stays"
  fi
  for f in kctl keelson-agent keelson-controlplane keelson-csi-local keelson-oci keelson-pause keelson-shim; do gone "/usr/bin/$f"; done
  for f in $units keelson.slice; do gone "/usr/lib/systemd/system/$f"; done
  gone /etc/systemd/system/keelson-controlplane.service.d/api-address-shared.conf
  rmdir "$root/etc/systemd/system/keelson-controlplane.service.d" 2>/dev/null || true
  if [ -f "$root/usr/lib/keelson/cni-plugins" ]; then
    while read -r f; do gone "/opt/cni/bin/${f##*/}"; done <"$root/usr/lib/keelson/cni-plugins"
  fi
  for f in bridge host-local loopback portmap; do rm -f "$root/opt/cni/bin/$f.new"; done # also of those that were there before Keelson
  rmdir "$root/opt/cni/bin" "$root/opt/cni" 2>/dev/null || true
  # Mounts that could not go are somebody's data: nothing is deleted through them.
  if [ -d "$root/var/log/containers" ]; then # links to the logs of pods; others' files stay
    find "$root/var/log/containers" -maxdepth 1 -type l -lname '/var/log/pods/*' -delete
    rmdir "$root/var/log/containers" 2>/dev/null || true
  fi
  rm -rf --one-file-system "$root/run/keelson" "$root/run/keelson-changed" "$root/var/log/pods" "$root/usr/lib/keelson" "$root/var/cache/keelson"
  for d in pods plugins_registry device-plugins pod-resources; do rm -rf --one-file-system "$root/var/lib/kubelet/$d"; done
  if [ -z "$(notes)" ]; then
    rm -rf --one-file-system "$root/var/lib/kubelet/plugins"
  else
    find "$root/var/lib/kubelet/plugins" -xdev -mindepth 1 ! -path "*/kubernetes.io/iscsi/*/target.json" -delete 2>/dev/null || true
  fi
  rmdir "$root/var/lib/kubelet" 2>/dev/null || true
  if [ -n "$keep" ]; then
    rm -f "$root/etc/keelson"/*.new "$root/var/lib/keelson/images.d"/*.new "$root/var/lib/keelson/controlplane/admin.kubeconfig.new"
    say "kept /etc/keelson and /var/lib/keelson"
  else
    rm -rf --one-file-system "$root/etc/keelson"
    data
  fi
  if command -v systemctl >/dev/null; then systemctl daemon-reload || true; fi
}

lock
daemons
pods
network
mounts
volumes
groups
files
rm -f "$root/run/keelson-install.lock"
[ ! -s "$left" ] || die "not everything is gone, as said above"
say "Keelson is gone from this machine"
