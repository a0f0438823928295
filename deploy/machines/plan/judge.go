package plan

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"keelson.dev/keelson/deploy/machines"
)

// Seen is what asking a machine has brought: facts, or why there are none.
type Seen struct {
	Facts machines.Facts
	Err   error
}

// Finding is something about a machine that a person should know. With a grave one nothing is begun.
type Finding struct {
	Machine      string // "" where it is about the cluster
	Grave        bool
	What, Remedy string
}

// What machines need. Kernels before 5.6 have no openat2, by which files of containers are reached; some things want a later one.
const (
	leastKernel, fullKernel = "5.6", "5.14"
	leastRoom, goodRoom     = 1 << 30, 8 << 30
	leastMemory, goodMemory = 400 << 20, 1 << 30 // of a replica
	slowSync                = 50 * time.Millisecond
	// Certificates are good from five minutes before they are made.
	clockApart, clockWrong = 2 * time.Second, 4 * time.Minute
	// unpacked is how many times the size of its tarball a release takes on a machine while it is installed.
	unpacked = 6
)

// Judge says what is wrong with machines, in the order of the file: what the file wants of them, what they are, and where they belong.
func Judge(c machines.Cluster, seen map[string]Seen, r Release, s State) []Finding {
	j := judge{c: c, seen: seen, release: r, state: s, facts: map[string]machines.Facts{}}
	for name, one := range seen {
		if one.Err == nil {
			j.facts[name] = one.Facts
		}
	}
	j.whole()
	middle, apart := clocks(c, j.facts)
	for _, h := range c.Hosts {
		one, asked := seen[h.Name]
		switch {
		case !asked:
		case one.Err != nil:
			remedy := ""
			if other := s.Replaced[h.Name]; other != "" && s.Known && !s.has(h.Name) {
				remedy = "it died, and " + other + " has its vote: take it out of the file; " + anew(h.Name) + ", once it is back"
			}
			j.grave(h.Name, one.Err.Error(), remedy)
		default:
			j.machine(h, one.Facts)
			j.ranges(h, one.Facts)
			j.mounts(h, one.Facts)
			j.firewalls(h, one.Facts)
			j.daemons(h, one.Facts)
			j.belongs(h, one.Facts)
			j.clock(h, one.Facts, middle, apart)
		}
	}
	return j.found
}

// Grave are those with which nothing is begun.
func Grave(all []Finding) []Finding {
	return slices.DeleteFunc(slices.Clone(all), func(f Finding) bool { return !f.Grave })
}

type judge struct {
	c       machines.Cluster
	seen    map[string]Seen
	facts   map[string]machines.Facts
	release Release
	state   State
	found   []Finding
}

func (j *judge) grave(machine, what, remedy string) {
	j.found = append(j.found, Finding{machine, true, what, remedy})
}

func (j *judge) light(machine, what, remedy string) {
	j.found = append(j.found, Finding{machine, false, what, remedy})
}

// whole judges what no single machine shows.
func (j *judge) whole() {
	j.standbys()
	if n := j.votes(); n%2 == 0 && n > 0 {
		j.light("", fmt.Sprintf("%d control planes outlive the loss of %d, as %d would", n, (n-1)/2, n-1), "have an odd number of them")
	}
	// One machine under two names would be installed over itself.
	first := map[string]string{}
	for _, h := range j.c.Hosts {
		id := j.facts[h.Name].MachineID
		if other, again := first[id]; again && id != "" {
			j.light(h.Name, "has the machine ID of "+other+": one is a copy of the other, or they are one machine",
				"on a copy: rm /etc/machine-id && systemd-machine-id-setup, and reboot")
		} else {
			first[id] = h.Name
		}
	}
}

func (j *judge) machine(h machines.Host, f machines.Facts) {
	if !f.Root {
		j.grave(h.Name, h.SSH.User+" does not become root there", "name root in ssh.user, or a user who may use sudo without a password")
	}
	if !f.Systemd {
		j.grave(h.Name, "is not run by systemd, which has to keep the daemons running", "install another system on it")
	}
	archive, ok := j.release.Archives[f.Arch]
	if !ok {
		j.grave(h.Name, fmt.Sprintf("is %s, and the release has no file for that: there are %s", quoted(f.Arch), strings.Join(slices.Sorted(maps.Keys(j.release.Archives)), ", ")),
			"take a release that has keelson-"+j.release.Version+"-linux-"+printable(f.Arch)+".tar.gz")
	}
	switch {
	case before(f.Kernel, leastKernel):
		j.grave(h.Name, "has Linux "+quoted(f.Kernel)+", and "+leastKernel+" is needed", "install a newer kernel")
	case before(f.Kernel, fullKernel):
		j.light(h.Name, "has Linux "+quoted(f.Kernel)+": before "+fullKernel+" some things are missing, such as project quotas of volumes", "install a newer kernel")
	}
	if len(f.Cgroup) == 0 {
		j.grave(h.Name, "has no cgroup v2 at /sys/fs/cgroup", "boot it with systemd.unified_cgroup_hierarchy=1")
	} else if missing := without(f.Cgroup, "cpu", "memory", "pids"); len(missing) > 0 && h.Is(machines.Worker) {
		j.grave(h.Name, "has cgroup v2 without "+strings.Join(missing, ", "), "boot it without cgroup_disable, and with cgroup_enable=memory on boards that need it")
	}
	needed := []string{"tar", "gzip", "sha256sum"}
	if h.Is(machines.Worker) {
		needed = append(needed, "nft", "ip")
	}
	for _, p := range needed {
		if !f.Programs[p] {
			j.grave(h.Name, "has no "+p, "install the package that has it, such as "+packages[p])
		}
	}
	if h.Is(machines.Worker) {
		j.parts(h, f, "", "overlay", "nf_tables", "nf_conntrack", "br_netfilter")
		j.network(h, f)
	}
	if !slices.Contains(f.Addresses, h.Address) && len(f.Addresses) > 0 {
		j.grave(h.Name, "does not have the address "+h.Address+" of the file: it has "+printable(strings.Join(f.Addresses[:min(8, len(f.Addresses))], ", ")),
			"put the address by which the others reach it into the file, and that by which you reach it into ssh.address")
	}
	j.room(h, f, archive)
}

var packages = map[string]string{"tar": "tar", "gzip": "gzip", "sha256sum": "coreutils", "nft": "nftables", "ip": "iproute2"}

func (j *judge) room(h machines.Host, f machines.Facts, a Archive) {
	least := int64(leastRoom)
	if !f.Installed() {
		least = max(least, unpacked*a.Tarball.Size)
	}
	switch {
	case f.Room < least:
		j.grave(h.Name, fmt.Sprintf("has room for %s at /var/lib/keelson, and %s is needed", size(f.Room), size(least)), "give it a larger disk, or make room")
	case f.Room < goodRoom:
		j.light(h.Name, fmt.Sprintf("has room for %s at /var/lib/keelson: images and data want more", size(f.Room)), "give it a larger disk there")
	}
	if !h.Replica() {
		return
	}
	switch {
	case f.Memory < leastMemory:
		j.grave(h.Name, fmt.Sprintf("has %s of memory, and a replica needs %s", size(f.Memory), size(leastMemory)), "give it more")
	case f.Memory < goodMemory:
		j.light(h.Name, fmt.Sprintf("has %s of memory: a replica of more than a small cluster wants more", size(f.Memory)), "give it more")
	}
	if f.Sync > slowSync {
		j.light(h.Name, fmt.Sprintf("takes %v to write to its disk for good: every change of the cluster waits for that", f.Sync.Round(time.Millisecond)), "give a replica a disk of its own, an SSD")
	}
}

// daemons judges what would keep them from starting.
func (j *judge) daemons(h machines.Host, f machines.Facts) {
	taken := func(r machines.Role, port int, setting string) {
		if !f.Ports[port] || f.Active[r.Unit()] {
			return
		}
		remedy := fmt.Sprintf("'ss -ltnp sport = :%d' there says by whom", port)
		if setting != "" {
			remedy += "; " + setting + " of the file names another one"
		}
		j.grave(h.Name, fmt.Sprintf("port %d, which %s needs, is taken", port, r.Unit()), remedy)
	}
	if h.Replica() {
		for _, port := range replicaPorts {
			taken(machines.ControlPlane, port, "")
		}
	}
	if h.Is(machines.Worker) {
		if port := portOf(h.Agent["kubelet-port"], kubeletPort); port != 0 {
			taken(machines.Worker, port, "agent.kubelet-port")
		}
		// Beside a replica, which has it at the machine's address, the agent has it on loopback.
		if port := portOf(h.Agent["local-api-address"], 6443); port != 0 && !h.Replica() {
			taken(machines.Worker, port, "agent.local-api-address")
		}
	}
}

// portOf reads a setting that is a port, or an address with one; 0 where there is none.
func portOf(v machines.Value, otherwise int) int {
	if len(v.Text) == 0 {
		return otherwise
	}
	s := strings.Trim(v.Text[0], `"`)
	n, err := strconv.ParseUint(s[strings.LastIndex(s, ":")+1:], 10, 16)
	if err != nil {
		return 0
	}
	return int(n)
}

// belongs judges whether a machine belongs to another cluster than the file's.
func (j *judge) belongs(h machines.Host, f machines.Facts) {
	const away = "'/usr/lib/keelson/uninstall.sh' there takes away what it has"
	why := Stranger(j.c, j.facts, h.Name)
	if why != "" {
		remedy := away
		if f.ReplicaWhole && f.ClusterName != j.c.Name {
			remedy = "give the file that name, or take the machine out of it"
		}
		j.grave(h.Name, strings.TrimPrefix(why, h.Name+" "), remedy)
	}
	_, ca, _ := j.own()
	if f.Node && ca == "" {
		j.grave(h.Name, "is a node of a cluster, of which no machine of the file has a replica", "name the control planes of that cluster in the file; or "+away)
	}
	if why == "" && !(f.Node && ca == "") && !j.named(h, f) {
		return // by another name all else is said of another machine
	}
	for _, of := range []struct {
		has, is bool
		role    machines.Role
		what    string
	}{{f.ReplicaWhole, h.Replica(), machines.ControlPlane, "a replica"}, {f.Node, h.Is(machines.Worker), machines.Worker, "a node"}} {
		if of.has && !of.is {
			j.light(h.Name, fmt.Sprintf("is %s, and the file gives it no role %s: it stays one", of.what, of.role), "'kctl cluster remove "+h.Name+"' takes it out of the cluster, and 'up' takes it in again as the file says")
		}
	}
	j.vote(h, f)
	n, known := j.state.Nodes[h.Name]
	if known && h.Is(machines.Worker) && !f.Node && n.Ready && n.Address != h.Address {
		j.grave(h.Name, "the cluster has a node of this name that is ready, at "+printable(n.Address), "give one of them another name")
	}
}

// own is the cluster of the first machine that has a replica, which is then that of all.
func (j *judge) own() (id, ca, from string) {
	for _, h := range j.c.Hosts {
		if f := j.facts[h.Name]; f.ReplicaWhole {
			return f.ClusterID, f.ReplicaCA, h.Name
		}
	}
	return "", "", ""
}

// share says whether two bundles of certificates have one in common. Words around them count for nothing: an agent notes since when
// it believes an authority that was exchanged.
func share(a, b string) bool {
	const begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
	for one := range strings.SplitSeq(a, end) {
		_, body, ok := strings.Cut(one, begin)
		if ok && strings.Contains(b, begin+body+end) {
			return true
		}
	}
	return false
}

func (j *judge) clock(h machines.Host, f machines.Facts, middle, unsure time.Duration) {
	apart := (f.Skew - middle).Abs() - f.SkewUnsure - unsure
	if apart < clockApart {
		return
	}
	what := fmt.Sprintf("its clock is %v from that of most", (f.Skew - middle).Abs().Round(100*time.Millisecond))
	const remedy = "have it follow a time server: 'timedatectl set-ntp true', or install chrony"
	if apart > clockWrong {
		j.grave(h.Name, what+": it would take certificates for not yet good, or for expired", remedy)
		return
	}
	j.light(h.Name, what, remedy)
}

// clocks is how far the clock in the middle is ahead of ours, and how sure that is.
func clocks(c machines.Cluster, facts map[string]machines.Facts) (middle, unsure time.Duration) {
	var all []machines.Facts
	for _, h := range c.Hosts {
		if f, ok := facts[h.Name]; ok {
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		return 0, 0
	}
	slices.SortStableFunc(all, func(a, b machines.Facts) int { return int(max(-1, min(1, a.Skew-b.Skew))) })
	m := all[len(all)/2]
	return m.Skew, m.SkewUnsure
}

// before compares versions such as 5.15.0-91-generic by their first two numbers. What is no version is not before any.
func before(is, want string) bool {
	a, ok := twoNumbers(is)
	b, _ := twoNumbers(want)
	return ok && (a[0] < b[0] || a[0] == b[0] && a[1] < b[1])
}

func twoNumbers(s string) (n [2]int, ok bool) {
	major, rest, _ := strings.Cut(s, ".")
	minor, _, _ := strings.Cut(rest, ".")
	if i := strings.IndexFunc(minor, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		minor = minor[:i]
	}
	var err, err2 error
	n[0], err = strconv.Atoi(major)
	n[1], err2 = strconv.Atoi(minor)
	return n, err == nil && err2 == nil
}

func without(has []string, want ...string) (missing []string) {
	for _, w := range want {
		if !slices.Contains(has, w) {
			missing = append(missing, w)
		}
	}
	return missing
}

// printable is what a machine says of itself, for a terminal.
func printable(s string) string {
	s = strings.ToValidUTF8(s[:min(len(s), 200)], "?")
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

func quoted(s string) string { return strconv.Quote(printable(s)) }

// size is a number of bytes for a person.
func size(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// Stranger says why a machine belongs to another cluster than the other machines, or than the file names; "" where it does not.
func Stranger(c machines.Cluster, facts map[string]machines.Facts, name string) string {
	j := judge{c: c, facts: facts}
	id, ca, from := j.own()
	f := facts[name]
	switch {
	case f.ReplicaWhole && f.ClusterName != c.Name:
		return fmt.Sprintf("%s is a replica of the cluster %s, and the file's is %q", name, quoted(f.ClusterName), c.Name)
	case f.ReplicaWhole && f.ClusterID != id:
		return name + " is a replica of another cluster than " + from
	case f.Node && ca != "" && !share(f.NodeCA, ca):
		return name + " is a node of another cluster than " + from
	}
	return ""
}
