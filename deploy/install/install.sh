#!/bin/sh
# Installs Keelson on this machine and starts it. Run again, it changes only what differs.
set -eu

usage() {
  cat <<'EOT'
install.sh: installs Keelson on this machine, and starts it.

  install.sh server --init                        the first control-plane machine of a new cluster
  install.sh server --server HOST --token T       a further one
  install.sh agent  --server HOST --token T       a worker

  --server HOST[:PORT]    a control-plane machine, with the agents' port when that is not 6444 (repeatable)
  --token T               join token, as 'server --init' printed it; --token-file FILE keeps it off the command line
  --advertise-address IP  of a server: its address for users, agents and replicas (default: that of the default route)
  --node-ip IP            of an agent: the node's address (default: found out)
  --name NAME             of this replica or node (default: the host's name)
  --standby               of a further server: it gets no vote until a replica dies, whose vote it takes (docs/how-to/replace-replicas-automatically.md)
  --init-flag FLAG        of server --init: a flag of 'keelson-controlplane init', such as --cluster-cidr=10.1.0.0/16 (repeatable)
  --settings FILE         the daemon's whole file of settings, instead of what this script would write: names and addresses stand in it,
                          and an agent's servers. What was there before is kept beside it as NAME.yaml.before
  --admin FILE            of a server: an administrator's kubeconfig, which root of this machine gets (that of init stays)
  --from FILE|URL         tarball of a release (default: the unpacked one that this script lies in)
  --sums FILE|URL         SHA256SUMS of that release (default: beside the tarball)
  --images FILE           images of that release, for an agent that reaches no registry (keelson-...-images.tar, listed in the same sums)
  --no-start              install and write settings alone: nothing is started, and no cluster made or joined

  sudo ./install.sh server --init --advertise-address 192.0.2.11
  sudo ./install.sh agent --server 192.0.2.11 --token keelson1.node... --from keelson-v1.0.0-linux-amd64.tar.gz

/usr/lib/keelson/uninstall.sh takes it all away again.
EOT
}

say() { echo "install: $*"; }
die() { echo "install: $*" >&2; exit 1; }
wrong() { echo "install: $*; see install.sh --help" >&2; exit 2; }

export LC_ALL=C # a-z are 26 letters then, and none of them a capital
root=${DESTDIR:-} # of tests and of images of machines: where everything goes instead of /
port=6444

role='' init='' servers='' token='' token_file='' address='' node_ip='' name='' init_flags='' from='' sums='' images='' start=yes given='' admin='' standby=''
arguments() {
  [ $# -gt 0 ] || { usage >&2; exit 2; }
  case $1 in
  server | agent) role=$1; shift ;;
  -h | --help) usage; exit 0 ;;
  *) wrong "$1: want server or agent" ;;
  esac
  while [ $# -gt 0 ]; do
    case $1 in
    --*=*) flag=${1%%=*} value=${1#*=}; shift; set -- "$flag" "$value" "$@" ;;
    esac
    case $1 in
    --init) init=yes; shift; continue ;;
    --no-start) start=''; shift; continue ;;
    --standby) standby=--standby; shift; continue ;;
    -h | --help) usage; exit 0 ;;
    --server | --token | --token-file | --advertise-address | --node-ip | --name | --init-flag | --from | --sums | --images | --settings | --admin) ;;
    *) wrong "$1 is no flag" ;;
    esac
    [ $# -gt 1 ] || wrong "$1 needs a value"
    [ -n "$2" ] || wrong "$1 needs a value"
    case $1 in
    --from | --sums | --images | --token-file | --settings | --admin) ;;
    *) case $2 in *[!]A-Za-z0-9._:/=,@+[-]*) wrong "$1 $2: there are characters in it that no such value has" ;; esac ;;
    esac
    case $1 in
    --server) servers="$servers $2" ;;
    --token) token=$2 ;;
    --token-file) token_file=$2 ;;
    --advertise-address) address=$2 ;;
    --node-ip) node_ip=$2 ;;
    --name) name=$2 ;;
    --init-flag) init_flags="$init_flags $2" ;;
    --from) from=$2 ;;
    --sums) sums=$2 ;;
    --images) images=$2 ;;
    --settings) given=$2 ;;
    --admin) admin=$2 ;;
    esac
    shift 2
  done
  [ -z "$token" ] || [ -z "$token_file" ] || wrong "--token and --token-file are one thing: give one of them"
  [ -z "$token_file" ] || [ -r "$token_file" ] || wrong "--token-file $token_file cannot be read"
  for f in "$given" "$admin"; do [ -z "$f" ] || [ -r "$f" ] || wrong "$f cannot be read"; done
  if [ -n "$given" ]; then
    [ -z "$name$address$node_ip" ] || wrong "--settings has all settings: --name, --advertise-address and --node-ip stand in the file"
    [ "$role" = server ] || [ -z "$servers" ] || wrong "--settings has all settings: an agent's servers stand in the file"
  fi
  if [ "$role" = agent ]; then
    [ -z "$init$address$init_flags$admin$standby" ] || wrong "--init, --init-flag, --standby, --admin and --advertise-address are of a server"
  else
    [ -z "$node_ip$images" ] || wrong "--node-ip and --images are of an agent"
  fi
  if [ -n "$init" ]; then
    [ -z "$standby" ] || wrong "--init makes a new cluster, whose first replica has a vote: --standby is of a machine that joins one"
    [ -z "$servers$token$token_file" ] || wrong "--init makes a new cluster: --server and --token are of a machine that joins one"
  else
    [ -z "$init_flags" ] || wrong "--init-flag goes with --init"
  fi
}

real() { readlink -f "$1" 2>/dev/null || readlink "$1" 2>/dev/null || echo "$1"; }

# mounted is an error where a disk is to be mounted where data lie, above or below, and is not. What is put there would be gone once it
# is, and starting a daemon has systemd mount it (RequiresMountsFor of the units), over the data of one that runs without it. An automount
# that was asked and has nothing mounted is none. 'kctl cluster up' looks likewise (deploy/machines/facts.sh).
mounted() {
  [ -r "$root/proc/mounts" ] || return 0 # nothing tells
  data=$root/var/lib/keelson
  lies="$data $(real "$data") $data/controlplane $(real "$data/controlplane")"
  for p in $({ sed -n 's/^[[:space:]]*[^#[:space:]][^[:space:]]*[[:space:]]\{1,\}\(\/[^[:space:]]*\).*/\1/p' "$root/etc/fstab" || :
    sed -n 's/^Where=[[:space:]]*\(\/[^[:space:]]*\).*/\1/p' "$root"/etc/systemd/system/*.mount; } 2>/dev/null | sed 's/\/$//' | sort -u); do
    for d in $lies; do
      case "$d/" in
      "$root$p/"*) at=$d ;;
      *) case "$root$p/" in "$d/"*) at=$root$p ;; *) continue ;; esac ;;
      esac
      [ -e "$root$p/." ] || :
      is=$(real "$root$p")
      cut -d' ' -f2,3 "$root/proc/mounts" | sed '/ autofs$/d; s/ .*//' | grep -qxF -e "$p" -e "${is#"$root"}" || unmounted "$p" "$at"
      break
    done
  done
}

unmounted() { # PATH FOLDER: which of the data, or where they would be
  what="nothing was changed: a disk is to be mounted at $1 and is not"
  remedy="take it out of /etc/fstab, or its unit out of /etc/systemd/system"
  [ -n "$(ls -A "$2/" 2>/dev/null)" ] || die "$what: 'mount $1', or $remedy"
  die "$what, and would cover what lies in ${2#"$root"}: where that is to stay, $remedy, or move it to the disk, with the daemons stopped and in place of what is on it, and 'mount $1'; where it is of no use, stop the daemons and 'mount $1'"
}

# joining is an error where the machine is to join a cluster, and what it needs for that was not said.
joining() {
  [ -z "$init" ] || return 0
  [ -n "$servers" ] || known || wrong "--server is missing: a control-plane machine of the cluster (or server --init for a new cluster)"
  [ -n "$token$token_file" ] || joined || wrong "--token is missing: 'kctl cluster token create' makes one"
}

# known says whether the servers need not be said: an agent's stand in its settings, and a replica knows the others.
known() { [ -n "$given" ] && { [ "$role" = agent ] || joined; }; }

# joined says whether this machine has what a token brings.
joined() {
  case $role in
  server) [ -e "$root/var/lib/keelson/controlplane/cluster.json" ] ;; # it is written last
  agent) [ -n "$(ls -A "$root/var/lib/keelson/session" 2>/dev/null)" ] ;;
  esac
}

machine() {
  [ "$(id -u)" = 0 ] || die "root is needed: run it with sudo"
  case $(uname -m) in
  x86_64) arch=amd64 ;;
  aarch64) arch=arm64 ;;
  *) die "this machine is $(uname -m): there are releases for x86_64 and aarch64" ;;
  esac
  [ -d "$root/run/systemd/system" ] || die "this machine is not run by systemd, which has to keep the daemons running"
  [ -f "$root/sys/fs/cgroup/cgroup.controllers" ] ||
    die "this machine has no cgroup v2 at /sys/fs/cgroup: boot it with systemd.unified_cgroup_hierarchy=1"
  if [ "$role" = agent ] && ! command -v nft >/dev/null; then die "nft is missing, which Service rules are written with: apt-get install nftables, or dnf install nftables"; fi
}

work=''
cache=$root/var/cache/keelson
own_cache='' # this run has made it
half=''      # a file that is being put
tidy() {
  [ -z "$half" ] || rm -f "$half"
  [ -z "$work" ] || rm -rf "$work"
  [ -z "$own_cache" ] || rmdir "$cache" 2>/dev/null || true
}
trap tidy EXIT
trap 'exit 1' HUP INT TERM

most=2000000000 # bytes of a file that is fetched
longest=1800    # seconds that it may take

# fetch bounds what a server may do to this machine before the sums are looked at: curl and wget stop at no size that the
# server has not said, and wget at no time while something comes.
fetch() { # URL FILE
  case $1 in
  https://* | http://*)
    if command -v curl >/dev/null; then get="curl -fsSL --max-time $longest"
    elif command -v wget >/dev/null; then get="timeout $longest wget -q -O -" # and no -T: Debian's static busybox crashes on it
    else die "neither curl nor wget is here: fetch $1 yourself and give --from FILE"; fi
    say "fetching $1"
    # A pipe ends as its last command does: whether the first one has ended well is noted in a file.
    # shellcheck disable=SC2086 # a program and its flags
    { $get "$1" && : >"$2.whole"; } | head -c $((most + 1)) >"$2" || die "$1 could not be written to $2"
    [ "$(wc -c <"$2")" -le "$most" ] || die "$1 has more than $most bytes, and is no file of a release"
    [ -e "$2.whole" ] || die "$1 could not be fetched, or not within $longest seconds" ;;
  *)
    [ -r "$1" ] || die "$1 cannot be read"
    cp "$1" "$2" ;;
  esac
}

# verified fails unless a file is what the sums say of the name that it was released with.
verified() { # FILE NAME
  want=$(sed -n "s/^\([0-9a-f]\{64\}\)  $(echo "$2" | sed 's/[.[\*^$]/\\&/g')\$/\1/p" "$work/SHA256SUMS" | head -n 1)
  [ -n "$want" ] || die "$2 is not in the sums of ${sums:-its release}: it may have been renamed, or is of another one"
  is=$(sha256sum "$1" | cut -d' ' -f1)
  [ "$is" = "$want" ] || die "$2 is not what its release has: its SHA-256 is $is, and the sums say $want"
  say "$2 is as it was released"
}

# workplace makes $work a folder for what is unpacked, where programs run: not that of temporary files, which may be mounted noexec.
# uninstall.sh takes the folder above it away.
workplace() {
  umask 077
  [ -d "$cache" ] || own_cache=yes
  (umask 022 && mkdir -p "${cache%/*}") && mkdir -p "$cache" || die "$cache cannot be made"
  find "$cache" -maxdepth 1 -name 'work.*' -mmin +60 -exec rm -rf {} + # of one that was killed
  work=$(mktemp -d "$cache/work.XXXXXX") || die "nothing can be written in $cache"
}

# runs is an error unless the programs of the release run on this machine.
runs() {
  status=0
  program=$tree/usr/bin/keelson-controlplane
  said=$("$program" --version 2>&1) || status=$?
  [ "$status" != 0 ] || return 0
  # A shell says in which line of which script it is, and may have taken the program for one.
  said=$(printf '%s' "${said##*"$program: "}" | tr -cd '[:print:]\n' | head -n 1 | cut -c 1-200)
  elsewhere="unpack it elsewhere, or give --from with its tarball, which is unpacked in $cache"
  [ -z "$from" ] || elsewhere="have $cache on a disk from which programs run"
  case $said in
  *"ermission denied"*) said="$said: is $tree mounted noexec? Then $elsewhere" ;;
  *ELF* | *"xec format"* | *"binary file"* | *"yntax error"*) said="$said: are they of another architecture?" ;;
  '') said="it ended with status $status" ;;
  esac
  die "the programs of this release do not run on this machine: $said"
}

# release makes $tree the folder of the release.
release() {
  workplace
  if [ -z "$from" ]; then
    tree=$(cd "$(dirname "$0")" && pwd)
    [ -f "$tree/usr/bin/keelson-agent" ] || die "there is no release beside this script: give --from with its tarball"
    [ -z "$images" ] || [ -n "$sums" ] || sums=$(dirname "$images")/SHA256SUMS
  else
    file=${from##*/}
    case $file in
    keelson-*-linux-"$arch".tar.gz) ;;
    keelson-*-linux-*.tar.gz) die "$file is of another architecture: this machine needs keelson-...-linux-$arch.tar.gz" ;;
    *) die "--from $from: want keelson-VERSION-linux-$arch.tar.gz" ;;
    esac
    [ -n "$sums" ] || sums=${from%"$file"}SHA256SUMS
  fi
  [ -z "$sums" ] || fetch "$sums" "$work/SHA256SUMS"
  if [ -n "$from" ]; then
    fetch "$from" "$work/$file"
    verified "$work/$file" "$file"
    tar -xzf "$work/$file" -C "$work" --no-same-owner || die "$file cannot be unpacked"
    tree=$work/${file%.tar.gz}
  fi
  [ -z "$images" ] || verified "$images" "${images##*/}"
  runs
}

# lock has nobody else install or take away meanwhile: what somebody began from afar goes on when his connection is cut.
lock() {
  command -v flock >/dev/null || return 0
  mkdir -p "$root/run"
  exec 9>"$root/run/keelson-install.lock"
  flock -w 900 9 || die "another install.sh or uninstall.sh has been at work on this machine for 15 minutes"
  [ -d "$work" ] || die "uninstall.sh has run meanwhile, and has taken away what was unpacked: run this again"
}

# A daemon that runs without what has changed is noted before the change: when this script is cut off before it restarts the
# daemon, the next run does. A machine that is rebooted starts them anew, and forgets the notes.
notes=$root/run/keelson-changed
both='keelson-controlplane keelson-agent'

changed() { # DAEMON...
  for daemon; do
    if systemctl is-active --quiet "$daemon.service"; then mkdir -p "$notes" && : >"$notes/$daemon"; fi
  done
}

put() { # SOURCE TARGET MODE DAEMON...
  rm -f "$root$2.new" # of one that was cut off
  # What is there as it should be may still have been opened to others.
  if cmp -s "$1" "$root$2"; then
    chmod "$3" "$root$2"
    return 0
  fi
  source=$1 target=$2 mode=$3
  shift 3
  changed "$@"
  set -- "$source" "$target" "$mode"
  mkdir -p "$(dirname "$root$2")"
  # A program that runs cannot be written to; it can be replaced.
  half=$root$2.new
  { cp "$1" "$half" && chmod "$3" "$half" && mv -f "$half" "$root$2"; } || die "$2 could not be written"
  half=''
  say "installed $2"
}

programs() {
  umask 022
  # shellcheck disable=SC2086 # both are words
  for f in "$tree"/usr/bin/*; do put "$f" "/usr/bin/${f##*/}" 755 $both; done
  # Plugins that somebody else has brought go by the same names: uninstall.sh takes away what was not there before.
  mkdir -p "$root/usr/lib/keelson"
  for f in "$tree"/opt/cni/bin/*; do
    [ -e "$root/opt/cni/bin/${f##*/}" ] || echo "${f##*/}" >>"$root/usr/lib/keelson/cni-plugins"
    put "$f" "/opt/cni/bin/${f##*/}" 755 keelson-agent
  done
  # shellcheck disable=SC2086
  for f in "$tree"/usr/lib/systemd/system/*; do put "$f" "/usr/lib/systemd/system/${f##*/}" 644 $both; done
  put "$tree/uninstall.sh" /usr/lib/keelson/uninstall.sh 755
}

# list has words in YAML's brackets, with the agents' port where there is none.
list() {
  out=''
  for s in $1; do
    case $s in
    \[*\]) s=$s:$port ;;
    \[*\]:* ) ;;
    *:*:*) s="[$s]:$port" ;;
    *:*) ;;
    *) s=$s:$port ;;
    esac
    out="$out${out:+, }\"$s\""
  done
  echo "[$out]"
}

# prepare makes $yaml the place of a daemon's settings, and $new the file that this machine is to get, or '' where
# one stays that somebody has changed.
prepare() { # NAME
  yaml=/etc/keelson/$1.yaml new=$work/settings former=''
  if [ -n "$given" ]; then
    new=$given
  else
    {
      cat "$tree/etc/keelson/$1.yaml"
      echo "# Written by install.sh:"
      if [ "$1" = agent ]; then
        echo "server: $(list "$servers")"
        echo "token-file: /var/lib/keelson/join-token"
        [ -z "$name" ] || echo "node-name: \"$name\""
        [ -z "$node_ip" ] || echo "node-ip: [\"$node_ip\"]"
      else
        echo "advertise-address: \"$address\""
        [ -z "$name" ] || echo "name: \"$name\""
      fi
    } >"$new"
    if [ -e "$root$yaml" ] && ! cmp -s "$new" "$root$yaml" && ! cmp -s "$tree/etc/keelson/$1.yaml" "$root$yaml" && ! cut_off; then
      say "kept $yaml, which is there and says something else than this command: what differs is"
      diff "$root$yaml" "$new" | sed -n 's/^[<>]/install:   &/p' || true
      new=''
    fi
  fi
  judged "$1" "${new:-$root$yaml}"
}

# cut_off says whether the settings are those of a run of this script after which the machine has not become part of a cluster: the
# next run may have been told something better.
cut_off() { ! joined && grep -q '^# Written by install.sh:' "$root$yaml"; }

# named refuses what the verbs init and join would refuse when everything else is in its place.
named() {
  { [ -z "$given" ] && ! joined; } || return 0
  # Settings of somebody's own stay, and may say a name.
  own=$root/etc/keelson/controlplane.yaml
  if grep -qs '^name:' "$own" && ! grep -q '^# Written by install.sh:' "$own"; then return 0; fi
  is=${name:-$(uname -n)}
  case $is in
  *[!a-z0-9-]* | -* | *-) ;;
  *) [ "${#is}" -gt 63 ] || return 0 ;;
  esac
  die "nothing was changed: a replica's name has small letters, digits and - alone, 63 at most, and this one would be $is: give --name"
}

# judged has the daemon of this release judge its settings, before anything is changed: one that runs would end for a letter too many.
# It is told of the file alone: where a unit of the operator's says more, what it refuses may be what the daemon takes. It looks from where
# the unit runs it.
judged() { # NAME FILE
  case $2 in /*) file=$2 ;; *) file=$(pwd)/$2 ;; esac
  said=$(cd / && "$tree/usr/bin/keelson-$1" check --config "$file" 2>&1) || refused "$1" '' "$said"
  [ "$1" = controlplane ] || return 0
  # Folders of which its unit has none (ProtectHome), or its own (PrivateTmp).
  said=$(sed -nE '/^[[:space:]]*#/d; s/[[:space:]]#.*//; s/^(.*[][[:space:]"'\'',=])?(\/(home|root|run\/user|tmp|var\/tmp)\/[^][:space:]"'\'',]*).*/\2/p' "$file" | head -n 1)
  [ -n "$said" ] || return 0
  said="keelson-controlplane: it does not see $said, for its unit shows it no /home, /root and /run/user, and a /tmp and /var/tmp of its own: put it below /etc/keelson or /var/lib, and name it there"
  # A replica that has run with such settings so far is not kept from an upgrade.
  if cmp -s "$file" "$root$yaml"; then say "$said"; else refused "$1" '|ProtectHome=|PrivateTmp=|Bind(ReadOnly)?Paths=' "$said"; fi
}

# refused ends the run, unless a file of the operator's may say otherwise than the settings: of variables and flags, or what MORE matches.
refused() { # NAME MORE WHY
  # The file as it will be called: the other one may be a temporary one.
  case $3 in *"$file"*) set -- "$1" "$2" "${3%%"$file"*}$yaml${3#*"$file"}" ;; esac
  # The units of the release read /etc/keelson/NAME.env.
  for f in "$root/etc/keelson/$1.env" "$root/etc/systemd/system/keelson-$1.service" "$root/etc/systemd/system/keelson-$1.service.d"/*; do
    grep -Eqs "^(Environment=|EnvironmentFile=|ExecStart=|[[:space:]]*KEELSON_$2)" "$f" || continue
    say "$3, unless $f says otherwise"
    return 0
  done
  die "nothing was changed, since $yaml would be wrong: $3"
}

# settings puts what was prepared.
settings() { # NAME
  [ -n "$new" ] || return 0
  umask 077
  if [ -e "$root$yaml" ] && ! cmp -s "$new" "$root$yaml"; then
    former=$work/former
    cp "$root$yaml" "$former"
    cmp -s "$tree/etc/keelson/$1.yaml" "$root$yaml" || cp "$root$yaml" "$root$yaml.before"
  fi
  put "$new" "$yaml" 600 "keelson-$1"
}

own_address() {
  [ -z "$address$given" ] || return 0
  # Of a test network: the kernel says what it would use, and sends nothing.
  address=$(ip -o route get 192.0.2.1 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p')
  [ -n "$address" ] || die "this machine has no default route that would say its address: give --advertise-address"
  say "this replica's address is $address"
}

secret() { # FILE: the token
  umask 077
  mkdir -p "$(dirname "$1")"
  if [ -n "$token" ]; then printf '%s\n' "$token" >"$1"; else cp "$token_file" "$1"; fi
}

# unused takes away the keys of an init or join that was cut off: no replica has run with them, for none starts without cluster.json.
unused() {
  data=$root/var/lib/keelson/controlplane
  [ -e "$data/pki" ] || return 0
  [ ! -e "$data/raft" ] || die "$data has a store and no cluster.json: it may be what is left of a cluster. Move it away, or bring cluster.json back"
  say "an init or join was cut off here: it is begun again"
  rm -rf "$data/pki"
}

# rights gives the unit what the settings need beyond what it has: an address that the replicas share is added to an interface,
# and told to the link. Who does not share one keeps the fewest rights.
rights() {
  file=/etc/systemd/system/keelson-controlplane.service.d/api-address-shared.conf
  if grep -Eqs '^api-address-shared: *["'\'']?[0-9]' "$root/etc/keelson/controlplane.yaml"; then
    printf '# Written by install.sh, for api-address-shared in /etc/keelson/controlplane.yaml.\n[Service]\n%s\n%s\n' \
      'CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW' 'RestrictAddressFamilies=AF_PACKET' >"$work/rights"
    (umask 022 && put "$work/rights" "$file" 644 keelson-controlplane)
  elif [ -e "$root$file" ]; then
    changed keelson-controlplane
    rm -f "$root$file"
    rmdir "$root${file%/*}" 2>/dev/null || true
    say "removed $file"
  fi
}

server() {
  settings controlplane
  rights
  [ -n "$start" ] || return 0
  if joined; then
    say "this machine is a replica already: nothing is made or joined"
  elif [ -n "$init" ]; then
    unused
    say "making a new cluster"
    # shellcheck disable=SC2086 # each of them is a word
    "$root/usr/bin/keelson-controlplane" init --config "$root/etc/keelson/controlplane.yaml" $init_flags
  else
    unused
    say "joining the cluster of$servers"
    secret "$work/token"
    # shellcheck disable=SC2086 # it is a word, or none
    set -- $standby
    for s in $servers; do set -- "$@" --server "$s"; done
    "$root/usr/bin/keelson-controlplane" join --config "$root/etc/keelson/controlplane.yaml" --token-file "$work/token" "$@"
  fi
  if [ -n "$admin" ] && [ ! -e "$root/var/lib/keelson/controlplane/admin.kubeconfig" ]; then
    (umask 077 && put "$admin" /var/lib/keelson/controlplane/admin.kubeconfig 600)
  fi
  run keelson-controlplane
}

agent() {
  settings agent
  if ! joined; then
    secret "$root/var/lib/keelson/join-token"
  elif [ -n "$token$token_file" ]; then
    say "this machine is a node already, and has no use for the token; where its cluster refuses it, put the token into /var/lib/keelson/join-token and restart keelson-agent"
  fi
  if [ -n "$images" ]; then
    mkdir -p "$root/var/lib/keelson/images.d" "$work/images"
    tar -xf "$images" -C "$work/images" --no-same-owner || die "$images cannot be unpacked"
    for f in "$work"/images/*.tar; do put "$f" "/var/lib/keelson/images.d/${f##*/}" 644 keelson-agent; done
  fi
  [ -n "$start" ] || return 0
  run keelson-agent
}

# run has systemd run a daemon, as a new program where something has changed: pods go on meanwhile. One that ends with new settings
# gets those of before again.
run() { # DAEMON
  systemctl daemon-reload
  systemctl enable --quiet "$1.service"
  if ! systemctl is-active --quiet "$1.service"; then
    say "starting $1"
    deed=start
  elif [ -e "$notes/$1" ]; then
    say "restarting $1, since something has changed"
    deed=restart
  else
    say "$1 is running, and nothing has changed"
    deed=
  fi
  if [ -n "$deed" ] && ! systemctl "$deed" "$1.service" || ! stays "$1"; then
    lately "$1"
    restored "$1"
  fi
  rm -f "$notes/$1"
  rmdir "$notes" 2>/dev/null || true
}

# stays says whether a daemon goes on. What is wrong it says at once, and ends; a second later systemd has it run again, as another process.
stays() { # DAEMON
  before=$(systemctl show -p MainPID "$1.service")
  sleep 2
  systemctl is-active --quiet "$1.service" && [ "$(systemctl show -p MainPID "$1.service")" = "$before" ]
}

lately() { # DAEMON: its last words
  command -v journalctl >/dev/null || return 0
  journalctl -u "$1.service" -n 5 -o cat --no-pager 2>/dev/null | sed 's/^/install:   /' >&2 || true
}

# restored has a daemon that has ended run with the settings of before, where they have changed, and is an error in any case.
restored() { # DAEMON
  [ -n "$former" ] || die "$1 did not start, or has ended: journalctl -u $1 says why"
  new=$former
  (umask 077 && put "$new" "$yaml" 600) >/dev/null
  [ "$role" = agent ] || rights
  systemctl daemon-reload
  if systemctl restart "$1.service" && stays "$1"; then
    rm -f "$notes/$1"
    die "$1 did not start, or has ended, with its new settings: $yaml is as it was before, and it runs with that; journalctl -u $1 says why"
  fi
  die "$1 did not start, or has ended, with its new settings, and with those of before, which are in $yaml again: journalctl -u $1 says why"
}

arguments "$@"
mounted # before joining, which would miss what is on the disk
joining
machine
[ "$role" = agent ] || own_address
[ "$role" = agent ] || named
release
lock
case $role in
server) prepare controlplane ;;
agent) prepare agent ;;
esac
programs
"$role"
say "done; 'journalctl -u keelson-*' shows what the daemons say"
