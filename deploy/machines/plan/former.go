package plan

import (
	"strconv"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// FindDowngrade checks whether steps would install a release r that is not later than the releases
// in the cluster. A machine that is already in the cluster may only get r if r is known to be later
// than its release. A machine that joins may get r unless a machine in the cluster has a later
// release. If the two releases cannot be compared, a machine in the cluster must already have r.
// FindDowngrade returns the first machine with a release that violates these rules, and that
// release. It returns "" if there is no such machine.
func FindDowngrade(c machines.Cluster, facts map[string]machines.Facts, r Release, steps []Step) (
	machine, runs string,
) {
	running := map[string]string{}
	also := false // a machine of the cluster already has the release r
	for _, h := range c.Hosts {
		f := facts[h.Name]
		v := f.Version[strings.LastIndex(f.Version, " ")+1:]
		if (f.ReplicaWhole || f.Node) && v != "" {
			running[h.Name] = printable(v)
			also = also || sameRelease(v, r.Version)
		}
	}
	for _, s := range steps {
		own, part := running[s.Machine]
		switch order, ok := compareReleases(r.Version, own); {
		case !s.ChangesPrograms && s.Start != Join:
		case part && s.ChangesPrograms && !sameRelease(r.Version, own) && !(ok && order > 0):
			return s.Machine, own
		case part:
		default:
			for _, h := range c.Hosts {
				v, is := running[h.Name]
				if order, ok := compareReleases(r.Version, v); is && (ok && order < 0 || !ok && !also) {
					return h.Name, v
				}
			}
		}
	}
	return "", ""
}

// sameRelease reports whether two release versions are equal. A leading v is ignored.
func sameRelease(a, b string) bool {
	return strings.TrimPrefix(a, "v") == strings.TrimPrefix(b, "v")
}

// compareReleases compares two release versions by their numbers. The result order is negative if a
// is earlier than b, 0 if they are equal, and positive if a is later. The result ok is false if
// they cannot be compared, such as two builds of different commits with the same numbers.
func compareReleases(a, b string) (order int, ok bool) {
	if sameRelease(a, b) {
		return 0, true
	}
	x, ok := releaseNumbers(a)
	y, ok2 := releaseNumbers(b)
	if !ok || !ok2 {
		return 0, false
	}
	for i := range x {
		if x[i] != y[i] {
			return x[i] - y[i], true
		}
	}
	return 0, false
}

// releaseNumbers returns the numbers of a release version such as v1.2.3, and 0 for missing
// numbers. It ignores anything after - or +. ok is false for another text. Without the v, there
// must be at least two numbers, because a single number may be the hash of a commit.
func releaseNumbers(s string) (n [3]int, ok bool) {
	s, v := strings.CutPrefix(s, "v")
	if i := strings.IndexAny(s, "-+"); i >= 0 {
		s = s[:i]
	}
	parts := strings.Split(s, ".")
	if len(parts) > 3 || len(parts) == 1 && !v {
		return n, false
	}
	for i, p := range parts {
		one, err := strconv.ParseUint(p, 10, 31)
		if err != nil {
			return n, false
		}
		n[i] = int(one)
	}
	return n, true
}
