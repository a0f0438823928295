package node

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// using are the pods with attached volumes.
type using struct{ pods []types.UID }

func (u *using) VolumesInUse() (_, _ []v1.UniqueVolumeName, _ error) { return nil, nil, nil }
func (u *using) ExclusiveClaims() ([]agent.HeldClaim, error)         { return nil, nil }
func (u *using) PodsWithAttachedVolumes() ([]types.UID, error)       { return u.pods, nil }
func (u *using) UsesChanged() <-chan struct{}                        { return nil }

// F110: pods with attached volumes are terminated after a long disconnection, counted from the last
// contact of the previous agent.
func TestFence(t *testing.T) {
	var now, heard time.Duration
	var ended []types.UID
	u := &using{}
	file := filepath.Join(t.TempDir(), "heard.json")
	begin := func(boot string) *fence {
		f := &fence{after: 20 * time.Second, lastAck: func() time.Duration {
			return heard
		}, clock: func() time.Duration { return now }, volumes: u,
			fencePod: func(uid types.UID, _ string) {
				ended = append(ended, uid)
			}, contact: lastContact{file: file, boot: boot}, boot: boot, log: slog.New(slog.DiscardHandler)}
		f.contact.loadRecord(f.clock(), f.log)
		return f
	}
	at := func(f *fence, when, last int, want ...types.UID) {
		t.Helper()
		now, heard, ended = time.Duration(when)*time.Second, time.Duration(last)*time.Second, nil
		if err := f.checkFence(); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ended, want) {
			t.Errorf("at %d s: ended %v, want %v", when, ended, want)
		}
	}
	now = 100 * time.Second
	f := begin("b1")
	at(f, 119, 0)
	at(f, 121, 0) // no pod is affected
	if !f.isFenced() {
		t.Error("volumes may be mounted after 21 s of silence")
	}
	u.pods = []types.UID{"u1"}
	at(f, 130, 129)
	at(f, 148, 129)
	at(f, 149, 129, "u1")
	at(f, 150, 150)
	// The next agent has no contact. It counts from the last contact of the previous one.
	heard, now = 0, 160*time.Second
	f = begin("b1")
	at(f, 169, 0)
	at(f, 171, 0, "u1")
	// After a reboot it counts from its own start: no pods run.
	now = 5 * time.Second
	f = begin("b2")
	at(f, 24, 0)
	at(f, 25, 0, "u1")
	f.after = 0
	if f.isFenced() {
		t.Error("a node that never fences does")
	}
}

// F110: a node reports which volumes in use it may have mounted. If the list is too long for an
// object, all volumes count as mounted. A node that cannot read its volumes in use reports nothing.
func TestNodesTellWhatTheyHold(t *testing.T) {
	f := &fence{}
	tells := func(inUse, held []v1.UniqueVolumeName, alone ...agent.HeldClaim) *v1.Node {
		n := &v1.Node{}
		n.Annotations = map[string]string{}
		f.annotate(n, volumeUses{inUse, held, alone})
		return n
	}
	many := make([]v1.UniqueVolumeName, 4000)
	for i := range many {
		many[i] = v1.UniqueVolumeName(fmt.Sprintf("kubernetes.io/csi/disk.example^%d", i))
	}
	for _, c := range []struct {
		inUse, held []v1.UniqueVolumeName
		want        string
	}{
		{[]v1.UniqueVolumeName{}, nil, "[]"},
		{[]v1.UniqueVolumeName{"a", "b"}, []v1.UniqueVolumeName{"b"}, `["b"]`},
		{many, many, "all"},
	} {
		if n := tells(c.inUse, c.held); n.Annotations[VolumesHeldAnnotation] != c.want ||
			len(n.Status.VolumesInUse) != len(c.inUse) {
			t.Errorf("%d in use, %d held: %v", len(c.inUse), len(c.held), n.Annotations)
		}
	}
	if n := tells([]v1.UniqueVolumeName{}, nil); n.Annotations[agent.ClaimsHeldAnnotation] != "[]" {
		t.Errorf("no claims: %v", n.Annotations)
	}
	one := agent.HeldClaim{Pod: "p", Claim: "c", Volume: "v"}
	for _, claims := range [][]agent.HeldClaim{{one}, slices.Repeat([]agent.HeldClaim{one}, 4000)} {
		n := tells([]v1.UniqueVolumeName{}, nil, claims...)
		if got, want := n.Annotations[agent.ClaimsHeldAnnotation],
			`[{"pod":"p","claim":"c","volume":"v"}]`; !agent.NodeReportsClaim(n, one) ||
			len(claims) == 1 && got != want || len(claims) > 1 && got != "all" {
			t.Errorf("%d claims: %.100s", len(claims), got)
		}
		if two := (agent.HeldClaim{Pod: "p2", Claim: "c"}); agent.NodeReportsClaim(n, two) != (len(claims) > 1) {
			t.Errorf("of %d claims another one is told: %v", len(claims), len(claims) == 1)
		}
	}
	if n := tells(nil, nil, one); n.Annotations[agent.ClaimsHeldAnnotation] != "" ||
		n.Annotations[VolumesHeldAnnotation] != "" || n.Annotations[VolumesInUseAnnotation] != "" {
		t.Errorf("not known: %v", n.Annotations)
	}
}
