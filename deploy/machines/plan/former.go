package plan

import (
	"strconv"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// FindDowngrade reports whether a plan would install a release that is not known to be later than
// the cluster's. It returns a machine of the cluster and its release, or "". A machine of the
// cluster may only get a later release. A machine that joins must not get an earlier release than
// others have.
func FindDowngrade(c machines.Cluster, facts map[string]machines.Facts, r Release, steps []Step) (machine, runs string) {
	running := map[string]string{}
	also := false // a machine already runs this release
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

// sameRelease compares releases regardless of a leading v.
func sameRelease(a, b string) bool {
	return strings.TrimPrefix(a, "v") == strings.TrimPrefix(b, "v")
}

// compareReleases compares two releases by their version numbers: the result is negative if b is
// later. ok is false if they cannot be compared, for example two builds of different commits.
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

// releaseNumbers returns the numbers of v1.2.3, ignoring anything after - or +. A single number
// needs a leading v, because it could be a commit.
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
