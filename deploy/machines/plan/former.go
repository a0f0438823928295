package plan

import (
	"strconv"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Former says of a plan that it would have machines run a release that is not known to be later than what the cluster runs: with which
// machine of the cluster that shows, and what that one runs; "" where it is no such plan. A machine of the cluster goes to no release but
// a later one; one that joins comes with no earlier one than others have.
func Former(c machines.Cluster, facts map[string]machines.Facts, r Release, steps []Step) (machine, runs string) {
	running := map[string]string{}
	also := false // somebody runs this release
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
		switch order, ok := releases(r.Version, own); {
		case !s.Puts && s.Begin != Join:
		case part && s.Puts && !sameRelease(r.Version, own) && !(ok && order > 0):
			return s.Machine, own
		case part:
		default:
			for _, h := range c.Hosts {
				v, is := running[h.Name]
				if order, ok := releases(r.Version, v); is && (ok && order < 0 || !ok && !also) {
					return h.Name, v
				}
			}
		}
	}
	return "", ""
}

// sameRelease compares without the v that some say and others do not.
func sameRelease(a, b string) bool {
	return strings.TrimPrefix(a, "v") == strings.TrimPrefix(b, "v")
}

// releases says which of two is the later one, by the numbers that they begin with: less than 0 when it is b. It is not ok where that
// cannot be told, as of two builds of different commits.
func releases(a, b string) (order int, ok bool) {
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

// releaseNumbers are those of v1.2.3, with anything behind a - or +. A single number is one only behind a v: it may be a commit's.
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
