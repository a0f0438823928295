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
for p in nft ip tar gzip sha256sum modprobe iptables iptables-save iptables-restore; do ! command -v $p >/dev/null || say program $p; done
# A part of the kernel is loaded, modprobe finds it, or the kernel's configuration has it built in. That it is not there is said where the
# configuration leaves it out, or modprobe knows the kernel's parts: nothing is said where nothing tells.
parts=$root/lib/modules/$(uname -r)
config=$( (zcat "$root/proc/config.gz" || cat "$root/boot/config-$(uname -r)" || cat "$parts/config") 2>/dev/null | grep '^CONFIG_')
for m in overlay=OVERLAY_FS br_netfilter=BRIDGE_NETFILTER nf_conntrack=NF_CONNTRACK nf_tables=NF_TABLES vxlan=VXLAN wireguard=WIREGUARD \
  ip_vs=IP_VS ip_vs_rr=IP_VS_RR dummy=DUMMY; do
  built=$(printf '%s\n' "$config" | sed -n "s/^CONFIG_${m#*=}=//p")
  m=${m%=*}
  if [ -d "$root/sys/module/$m" ] || modprobe -n -q $m 2>/dev/null || [ "$built" = y ]; then
    say module $m
  elif { [ -n "$config" ] && [ -z "$built" ]; } || { [ -e "$parts/modules.builtin" ] && command -v modprobe >/dev/null; }; then
    say lacks $m
  fi
done
[ ! -e "$root/proc/net/ip_vs" ] || say ipvs yes
say clock "$(date +%s.%N)"
say memory "$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' "$root/proc/meminfo" 2>/dev/null)"
ip -o address show 2>/dev/null | sed -n -e h -e 's/^[0-9]*: [^ ]* *inet6\{0,1\} \([^/ ]*\).*/address \1/p' \
  -e g -e 's/^[0-9]*: \([^ ]*\) *inet6\{0,1\} \([^/ ]*\)[^/]*\(\/[0-9]*\) .*/network \1 \2\3/p'
# Of routes those count that lead somewhere, but for default ones and Keelson's own, which have the protocol 75.
{ ip -o route show; ip -6 -o route show; } 2>/dev/null | sed -n -e '/ proto 75\( \|$\)/d' -e '/ dev keelson/d' -e '/ dev lo\( \|$\)/d' -e '/^fe80:/d' \
  -e 's/^\([0-9a-f.:]*\(\/[0-9]*\)\{0,1\}\) .*dev \([^ ]*\).*/route \3 \1/p' | head -n 1000
# Where the machine asks itself, by systemd-resolved, the servers count that this one asks.
cat "$root/etc/resolv.conf" "$root/run/systemd/resolve/resolv.conf" 2>/dev/null | sed -n 's/^nameserver[[:space:]]*\([0-9a-f.:]*\).*/nameserver \1/p' | sort -u
# Firewalls that are in force, unless firewalld trusts pods already, and rules by which nothing is forwarded that they do not name. An
# accept of Keelson's own does not lift them. What there is alone is asked: iptables would load its part of the kernel.
! firewall-cmd -q --state 2>/dev/null || firewall-cmd -q --zone=trusted --query-interface=keelson0 2>/dev/null || say firewall firewalld
if grep -qi '^ENABLED=yes' "$root/etc/ufw/ufw.conf" 2>/dev/null; then
  say firewall ufw
elif nft list chains 2>/dev/null | grep -q 'hook forward .*policy drop' ||
  { grep -qx filter "$root/proc/net/ip_tables_names" && iptables-legacy -S FORWARD | grep -qx -e '-P FORWARD DROP'; } 2>/dev/null; then
  say firewall forward
fi
# A socket that listens has the state 0A; the port is in hexadecimal.
cat "$root/proc/net/tcp" "$root/proc/net/tcp6" 2>/dev/null | sed -n 's/^ *[0-9]*: [0-9A-F]*:\([0-9A-F]\{4\}\) [0-9A-F]*:[0-9A-F]* 0A .*/port \1/p' | sort -u
# Of UDP those count that a process has, unconnected (07). The kernel's own are of tunnels: Keelson's outlive its agent, and tunnels of
# VXLAN share a port.
held=" $(ls -l "$root"/proc/[0-9]*/fd 2>/dev/null | sed -n 's/.* socket:\[\([0-9]*\)]$/\1/p' | sort -u | tr '\n' ' ')"
cat "$root/proc/net/udp" "$root/proc/net/udp6" 2>/dev/null | while read -r _ at _ state _ _ _ _ _ inode _; do
  case "$state $held" in "07 "*" $inode "*) say udp "$at" ;; esac
done | sort -u
for f in "$root"/etc/cni/net.d/*.conflist "$root"/etc/cni/net.d/*.conf "$root"/etc/cni/net.d/*.json; do [ ! -f "$f" ] || say othernetwork yes; done
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
# What is to be mounted where data lie, above or below, and is not: that there are no data says nothing then. An automount that was
# asked and has nothing mounted is none.
real() { readlink -f "$1" 2>/dev/null || readlink "$1" 2>/dev/null || echo "$1"; }
lies="$data $(real "$data") $data/controlplane $(real "$data/controlplane")"
for p in $({ sed -n 's/^[[:space:]]*[^#[:space:]][^[:space:]]*[[:space:]]\{1,\}\(\/[^[:space:]]*\).*/\1/p' "$root/etc/fstab"
  sed -n 's/^Where=[[:space:]]*\(\/[^[:space:]]*\).*/\1/p' "$root"/etc/systemd/system/*.mount; } 2>/dev/null | sed 's/\/$//' | sort -u); do
  for d in $lies; do
    case "$d/" in "$root$p/"*) ;; *) case "$root$p/" in "$d/"*) ;; *) continue ;; esac ;; esac
    [ -e "$root$p/." ] || :
    at=$(real "$root$p")
    cut -d' ' -f2,3 "$root/proc/mounts" | sed '/ autofs$/d; s/ .*//' | grep -qxF -e "$p" -e "${at#"$root"}" || say unmounted "$p"
    break
  done
done
say end yes
