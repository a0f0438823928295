package clusterid_test

import (
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/clusterid"
)

// Only an earlier incarnation of the same, known cluster is before another identity. F53
func TestEarlierIncarnation(t *testing.T) {
	for _, c := range []struct {
		a, b   clusterid.Identity
		before bool
	}{
		{clusterid.Identity{Cluster: "c", Incarnation: 0}, clusterid.Identity{Cluster: "c", Incarnation: 1}, true},
		{clusterid.Identity{Cluster: "c", Incarnation: 7}, clusterid.Identity{Cluster: "c", Incarnation: 7}, false},
		{clusterid.Identity{Cluster: "c", Incarnation: 8}, clusterid.Identity{Cluster: "c", Incarnation: 7}, false},
		{clusterid.Identity{Cluster: "c", Incarnation: 0}, clusterid.Identity{Cluster: "d", Incarnation: 1}, false},
		{clusterid.Identity{}, clusterid.Identity{Incarnation: 1}, false},
	} {
		if got := c.a.Before(c.b); got != c.before {
			t.Errorf("%s before %s: %v", c.a, c.b, got)
		}
		if back, err := clusterid.Parse(c.b.String()); err != nil || back != c.b {
			t.Errorf("%s decodes as %+v, %v", c.b, back, err)
		}
	}
	for _, text := range []string{"", "c", "c/", "c/x", "c/-1", "c/9007199254740992", "c/99999999999999999999",
		strings.Repeat("c", 600) + "/1"} {
		if i, err := clusterid.Parse(text); err == nil {
			t.Errorf("%.40q decodes as %+v", text, i)
		}
	}
}

// A new incarnation is later than every previous one, whatever the clock shows. F53
func TestNextIncarnation(t *testing.T) {
	now := time.UnixMilli(5000)
	for _, c := range []struct{ known, want uint64 }{{0, 5000}, {4999, 5000}, {5000, 5001}, {1 << 40, 1<<40 + 1}} {
		if got := clusterid.Next(c.known, now); got != c.want {
			t.Errorf("after %d: %d, want %d", c.known, got, c.want)
		}
	}
	if got := clusterid.Next(0, time.Time{}); got != 1 {
		t.Errorf("with a clock before 1970: %d", got)
	}
}
