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

// Observation is the result of connecting to a machine: its facts, or the error Err.
type Observation struct {
	Facts machines.Facts
	Err   error
}

// Finding is a problem of a machine or of the whole cluster, with its remedy. A plan must not be
// carried out while there is a finding with Blocking set.
type Finding struct {
	Machine      string // "" for the whole cluster
	Blocking     bool
	What, Remedy string
}

// Requirements of machines. Below a min value, a finding blocks the plan. Below a recommended
// value, it is a warning. Kernels before 5.6 lack openat2, which is needed to open files of
// containers safely.
const (
	minKernel, recommendedKernel       = "5.6", "5.14"
	minFreeBytes, recommendedFreeBytes = 1 << 30, 8 << 30
	minMemory, recommendedMemory       = 400 << 20, 1 << 30 // memory of a machine with a replica, in bytes
	slowSync                           = 50 * time.Millisecond
	// The limit of errors is below five minutes, because certificates are valid from five minutes
	// before their creation.
	skewWarning, skewError = 2 * time.Second, 4 * time.Minute
	// unpackFactor is the free space that an installation needs, as a multiple of the tarball's
	// size.
	unpackFactor = 6
)

// Inspect returns the findings of all observed machines, in the order of the cluster file. It
// checks the requirements of the release r and of the machine's roles. It also compares the machine
// with the cluster file and with the state s of the cluster. Findings of the whole cluster come
// first.
func Inspect(c machines.Cluster, seen map[string]Observation, r Release, s State) []Finding {
	j := inspector{c: c, seen: seen, release: r, state: s, facts: map[string]machines.Facts{}}
	for name, one := range seen {
		if one.Err == nil {
			j.facts[name] = one.Facts
		}
	}
	j.checkCluster()
	middle, apart := medianSkew(c, j.facts)
	for _, h := range c.Hosts {
		one, asked := seen[h.Name]
		switch {
		case !asked:
		case one.Err != nil:
			remedy := ""
			if other := s.Replaced[h.Name]; other != "" && s.Known && !s.isMember(h.Name) {
				remedy = "it died, and " + other + " has its vote: take it out of the file; " + rejoinRemedy(h.Name) +
					", once it is back"
			}
			j.addError(h.Name, one.Err.Error(), remedy)
		default:
			j.checkMachine(h, one.Facts)
			j.checkRanges(h, one.Facts)
			j.checkMounts(h, one.Facts)
			j.checkFirewalls(h, one.Facts)
			j.checkPorts(h, one.Facts)
			j.checkMembership(h, one.Facts)
			j.checkClock(h, one.Facts, middle, apart)
		}
	}
	return j.found
}

// BlockingFindings returns the findings with Blocking set, which block a plan.
func BlockingFindings(all []Finding) []Finding {
	return slices.DeleteFunc(slices.Clone(all), func(f Finding) bool { return !f.Blocking })
}

type inspector struct {
	c       machines.Cluster
	seen    map[string]Observation
	facts   map[string]machines.Facts
	release Release
	state   State
	found   []Finding
}

func (j *inspector) addError(machine, what, remedy string) {
	j.found = append(j.found, Finding{machine, true, what, remedy})
}

func (j *inspector) addWarning(machine, what, remedy string) {
	j.found = append(j.found, Finding{machine, false, what, remedy})
}

// checkCluster adds the findings that involve more than one machine: about standbys, an even number
// of votes, and machines with the same machine ID.
func (j *inspector) checkCluster() {
	j.checkStandbys()
	if n := j.plannedVotes(); n%2 == 0 && n > 0 {
		j.addWarning("", fmt.Sprintf("%d control planes outlive the loss of %d, as %d would", n, (n-1)/2, n-1),
			"have an odd number of them")
	}
	// Two entries of the cluster file for one machine would install it twice.
	first := map[string]string{}
	for _, h := range j.c.Hosts {
		id := j.facts[h.Name].MachineID
		if other, again := first[id]; again && id != "" {
			j.addWarning(h.Name, "has the machine ID of "+other+": one is a copy of the other, or they are one machine",
				"on a copy: rm /etc/machine-id && systemd-machine-id-setup, and reboot")
		} else {
			first[id] = h.Name
		}
	}
}

func (j *inspector) checkMachine(h machines.Host, f machines.Facts) {
	if !f.Root {
		j.addError(h.Name, h.SSH.User+" does not become root there",
			"name root in ssh.user, or a user who may use sudo without a password")
	}
	if !f.Systemd {
		j.addError(h.Name, "is not run by systemd, which has to keep the daemons running",
			"install another system on it")
	}
	archive, ok := j.release.Archives[f.Arch]
	if !ok {
		j.addError(h.Name, fmt.Sprintf("is %s, and the release has no file for that: there are %s",
			quotePrintable(f.Arch), strings.Join(slices.Sorted(maps.Keys(j.release.Archives)), ", ")),
			"take a release that has keelson-"+j.release.Version+"-linux-"+printable(f.Arch)+".tar.gz")
	}
	switch {
	case isOlderVersion(f.Kernel, minKernel):
		j.addError(h.Name, "has Linux "+quotePrintable(f.Kernel)+", and "+minKernel+" is needed",
			"install a newer kernel")
	case isOlderVersion(f.Kernel, recommendedKernel):
		j.addWarning(h.Name, "has Linux "+quotePrintable(f.Kernel)+": before "+recommendedKernel+
			" some things are missing, such as project quotas of volumes", "install a newer kernel")
	}
	if len(f.Cgroup) == 0 {
		j.addError(h.Name, "has no cgroup v2 at /sys/fs/cgroup", "boot it with systemd.unified_cgroup_hierarchy=1")
	} else if missing := missingFrom(f.Cgroup, "cpu", "memory", "pids"); len(missing) > 0 &&
		h.HasRole(machines.Worker) {
		j.addError(h.Name, "has cgroup v2 without "+strings.Join(missing, ", "),
			"boot it without cgroup_disable, and with cgroup_enable=memory on boards that need it")
	}
	needed := []string{"tar", "gzip", "sha256sum"}
	if h.HasRole(machines.Worker) {
		needed = append(needed, "nft", "ip")
	}
	for _, p := range needed {
		if !f.Programs[p] {
			j.addError(h.Name, "has no "+p, "install the package that has it, such as "+packages[p])
		}
	}
	if h.HasRole(machines.Worker) {
		j.checkKernelParts(h, f, "", "overlay", "nf_tables", "nf_conntrack", "br_netfilter")
		j.checkNetwork(h, f)
	}
	if !slices.Contains(f.Addresses, h.Address) && len(f.Addresses) > 0 {
		j.addError(h.Name, "does not have the address "+h.Address+" of the file: it has "+
			printable(strings.Join(f.Addresses[:min(8, len(f.Addresses))], ", ")),
			"put the address by which the others reach it into the file, and that by which you reach it "+
				"into ssh.address")
	}
	j.checkResources(h, f, archive)
}

var packages = map[string]string{"tar": "tar", "gzip": "gzip", "sha256sum": "coreutils", "nft": "nftables",
	"ip": "iproute2"}

func (j *inspector) checkResources(h machines.Host, f machines.Facts, a Archive) {
	least := int64(minFreeBytes)
	if !f.HasPrograms() {
		least = max(least, unpackFactor*a.Tarball.Size)
	}
	switch {
	case f.FreeBytes < least:
		j.addError(h.Name, fmt.Sprintf("has room for %s at /var/lib/keelson, and %s is needed",
			formatBytes(f.FreeBytes), formatBytes(least)), "use a larger disk, or free some space")
	case f.FreeBytes < recommendedFreeBytes:
		j.addWarning(h.Name, fmt.Sprintf("has room for %s at /var/lib/keelson: images and data want more",
			formatBytes(f.FreeBytes)), "give it a larger disk there")
	}
	if !h.HasReplica() {
		return
	}
	switch {
	case f.Memory < minMemory:
		j.addError(h.Name, fmt.Sprintf("has %s of memory, and a replica needs %s", formatBytes(f.Memory),
			formatBytes(minMemory)), "give it more")
	case f.Memory < recommendedMemory:
		j.addWarning(h.Name, fmt.Sprintf("has %s of memory: a replica of more than a small cluster wants more",
			formatBytes(f.Memory)), "give it more")
	}
	if f.SyncLatency > slowSync {
		j.addWarning(h.Name, fmt.Sprintf("takes %v for a synchronous write: every change of the cluster waits for it",
			f.SyncLatency.Round(time.Millisecond)), "give a replica a disk of its own, an SSD")
	}
}

// checkPorts adds an error for each TCP port that a daemon of the machine h needs, but that another
// program uses. The ports of a daemon that is running already are not checked.
func (j *inspector) checkPorts(h machines.Host, f machines.Facts) {
	taken := func(r machines.Role, port int, setting string) {
		if !f.Ports[port] || f.Active[r.UnitName()] {
			return
		}
		remedy := fmt.Sprintf("'ss -ltnp sport = :%d' there says by whom", port)
		if setting != "" {
			remedy += "; " + setting + " of the file names another one"
		}
		j.addError(h.Name, fmt.Sprintf("port %d, which %s needs, is taken", port, r.UnitName()), remedy)
	}
	if h.HasReplica() {
		for _, port := range replicaPorts {
			taken(machines.ControlPlane, port, "")
		}
	}
	if h.HasRole(machines.Worker) {
		if port := portOf(h.Agent["kubelet-port"], kubeletPort); port != 0 {
			taken(machines.Worker, port, "agent.kubelet-port")
		}
		// A replica uses this port at the address of the machine. There, the agent uses it on
		// loopback only.
		if port := portOf(h.Agent["local-api-address"], 6443); port != 0 && !h.HasReplica() {
			taken(machines.Worker, port, "agent.local-api-address")
		}
	}
}

// portOf returns the port in the setting v, which is PORT or ADDRESS:PORT. It returns defaultPort
// if v is not set, and 0 if v contains no port.
func portOf(v machines.Value, defaultPort int) int {
	if len(v.Text) == 0 {
		return defaultPort
	}
	s := strings.Trim(v.Text[0], `"`)
	n, err := strconv.ParseUint(s[strings.LastIndex(s, ":")+1:], 10, 16)
	if err != nil {
		return 0
	}
	return int(n)
}

// checkMembership adds a finding if the machine h belongs to another cluster, or has another name
// in the cluster than in the cluster file. It also adds a warning for each role that the machine
// has, but that the cluster file does not give it.
func (j *inspector) checkMembership(h machines.Host, f machines.Facts) {
	const away = "'/usr/lib/keelson/uninstall.sh' there takes away what it has"
	why := ForeignReason(j.c, j.facts, h.Name)
	if why != "" {
		remedy := away
		if f.ReplicaWhole && f.ClusterName != j.c.Name {
			remedy = "give the file that name, or take the machine out of it"
		}
		j.addError(h.Name, strings.TrimPrefix(why, h.Name+" "), remedy)
	}
	_, ca, _ := j.fileCluster()
	if f.Node && ca == "" {
		j.addError(h.Name, "is a node of a cluster, of which no machine of the file has a replica",
			"name the control planes of that cluster in the file; or "+away)
	}
	if why == "" && !(f.Node && ca == "") && !j.checkNames(h, f) {
		return // Further findings would be about another machine, because the names differ.
	}
	for _, of := range []struct {
		has, is bool
		role    machines.Role
		what    string
	}{{f.ReplicaWhole, h.HasReplica(), machines.ControlPlane, "a replica"},
		{f.Node, h.HasRole(machines.Worker), machines.Worker, "a node"}} {
		if of.has && !of.is {
			j.addWarning(h.Name, fmt.Sprintf("is %s, and the file gives it no role %s: it stays one", of.what, of.role),
				"'kctl cluster remove "+h.Name+"' takes it out of the cluster, and 'up' takes it in again "+
					"as the file says")
		}
	}
	j.checkVote(h, f)
	n, known := j.state.Nodes[h.Name]
	if known && h.HasRole(machines.Worker) && !f.Node && n.Ready && n.Address != h.Address {
		j.addError(h.Name, "the cluster has a node of this name that is ready, at "+printable(n.Address),
			"give one of them another name")
	}
}

// fileCluster returns the ID and the CA of the cluster to which the machines of the cluster file
// belong. It reads them from the first machine with a complete replica, and also returns the name
// of that machine. All results are "" if no machine has a complete replica.
func (j *inspector) fileCluster() (id, ca, machine string) {
	for _, h := range j.c.Hosts {
		if f := j.facts[h.Name]; f.ReplicaWhole {
			return f.ClusterID, f.ReplicaCA, h.Name
		}
	}
	return "", "", ""
}

// shareCertificate reports whether two PEM bundles have a certificate in common. It ignores text
// around the certificates, such as the agent's comments about rotated CAs.
func shareCertificate(a, b string) bool {
	const begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
	for one := range strings.SplitSeq(a, end) {
		_, body, ok := strings.Cut(one, begin)
		if ok && strings.Contains(b, begin+body+end) {
			return true
		}
	}
	return false
}

func (j *inspector) checkClock(h machines.Host, f machines.Facts, middle, unsure time.Duration) {
	apart := (f.Skew - middle).Abs() - f.SkewError - unsure
	if apart < skewWarning {
		return
	}
	what := fmt.Sprintf("its clock is %v from the median of the machines",
		(f.Skew - middle).Abs().Round(100*time.Millisecond))
	const remedy = "have it follow a time server: 'timedatectl set-ntp true', or install chrony"
	if apart > skewError {
		j.addError(h.Name, what+": it would treat certificates as not yet valid, or as expired", remedy)
		return
	}
	j.addWarning(h.Name, what, remedy)
}

// medianSkew returns the median of the clock skews of all machines, and its maximum error.
func medianSkew(c machines.Cluster, facts map[string]machines.Facts) (median, maxError time.Duration) {
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
	return m.Skew, m.SkewError
}

// isOlderVersion reports whether kernel, such as 5.15.0-91-generic, is a lower kernel version than
// required. Only the first two numbers are compared. It returns false if kernel is not a version.
func isOlderVersion(kernel, required string) bool {
	a, ok := twoNumbers(kernel)
	b, _ := twoNumbers(required)
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

func missingFrom(has []string, want ...string) (missing []string) {
	for _, w := range want {
		if !slices.Contains(has, w) {
			missing = append(missing, w)
		}
	}
	return missing
}

// printable returns a text from a machine in a form that is safe for a terminal. It has at most 200
// bytes, with '?' for each character that cannot be printed.
func printable(s string) string {
	s = strings.ToValidUTF8(s[:min(len(s), 200)], "?")
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

func quotePrintable(s string) string { return strconv.Quote(printable(s)) }

// formatBytes formats a number of bytes in MiB or GiB.
func formatBytes(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// ForeignReason returns an explanation if the named machine belongs to another cluster than the
// cluster file c describes, and "" otherwise. For a machine with a replica, it compares the
// cluster's name with c.Name, and the cluster ID with that of the first replica in c. For a node,
// it compares the CA with that of the first replica in c.
func ForeignReason(c machines.Cluster, facts map[string]machines.Facts, name string) string {
	j := inspector{c: c, facts: facts}
	id, ca, from := j.fileCluster()
	f := facts[name]
	switch {
	case f.ReplicaWhole && f.ClusterName != c.Name:
		return fmt.Sprintf("%s is a replica of the cluster %s, and the file's is %q", name,
			quotePrintable(f.ClusterName), c.Name)
	case f.ReplicaWhole && f.ClusterID != id:
		return name + " is a replica of another cluster than " + from
	case f.Node && ca != "" && !shareCertificate(f.NodeCA, ca):
		return name + " is a node of another cluster than " + from
	}
	return ""
}
