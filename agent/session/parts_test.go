package session

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

func sentObject(t *testing.T, kind, namespace, name string, rev uint64) *fleetv1.Object {
	t.Helper()
	o := newObject(kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	o.SetUID(types.UID("uid-of-" + name))
	raw, err := encodeObject(kind, o)
	if err != nil {
		t.Fatal(err)
	}
	return &fleetv1.Object{Kind: kind, Namespace: namespace, Name: name, Revision: rev, Raw: raw}
}

func fullSet(objs ...*fleetv1.Object) *fleetv1.ObjectSet {
	return &fleetv1.ObjectSet{Full: true, Upserts: objs}
}

// A full assignment replaces all objects at once, in any number of parts. Readers are notified of
// the differences when it is complete.
func TestViewFullAssignment(t *testing.T) {
	s := New(Config{NodeName: "w1"})
	v := s.view
	apply := func(set *fleetv1.ObjectSet) {
		t.Helper()
		if err := v.applyObjects(set); err != nil {
			t.Fatal(err)
		}
	}
	apply(fullSet(sentObject(t, "Service", "d", "a", 1), sentObject(t, "Pod", "d", "p", 2)))
	apply(fullSet(sentObject(t, "Service", "d", "b", 3)))
	if len(s.Services()) != 0 || s.hasAssignment() {
		t.Error("half an assignment is visible")
	}
	v.completeBatch(3, true)
	if len(s.Services()) != 2 || s.Revision() != 3 || !s.hasAssignment() {
		t.Errorf("%d services at revision %d", len(s.Services()), s.Revision())
	}
	changes := s.Changes(t.Context())
	if all := <-changes; len(all) != len(kindNames) {
		t.Errorf("the first change names %d kinds, want all %d", len(all), len(kindNames))
	}
	apply(&fleetv1.ObjectSet{Upserts: []*fleetv1.Object{sentObject(t, "ConfigMap", "d", "c", 4)},
		Deletes: []*fleetv1.Ref{{Kind: "Pod", Namespace: "d", Name: "p", Uid: "another"},
			{Kind: "Service", Namespace: "d", Name: "b", Uid: "uid-of-b"}}})
	v.completeBatch(3, false)
	got := <-changes
	if _, cm := got["ConfigMap"]; !cm || len(got) != 2 {
		t.Errorf("changed kinds %v, want ConfigMap and Service", got)
	}
	if _, ok := s.Pod("uid-of-p"); !ok {
		t.Error("a delete of another uid took the pod")
	}
	// A resumed assignment refers to known objects by their revision.
	keep := func(rev uint64) *fleetv1.Object {
		return &fleetv1.Object{Kind: "Service", Namespace: "d", Name: "a", Revision: rev}
	}
	apply(fullSet(keep(1)))
	v.completeBatch(9, true)
	if _, ok := s.Service("d", "a"); !ok || len(s.Pods()) != 0 {
		t.Error("the kept object is gone, or the replaced ones are not")
	}
	if err := v.applyObjects(fullSet(keep(7))); !errors.Is(err, errObjectMissing) {
		t.Errorf("an object of another revision was kept: %v", err)
	}
}

// Of each pod the newest status is sent, one at a time, and again in a new session. PodGone comes
// last.
func TestReporter(t *testing.T) {
	s := New(Config{NodeName: "w1"})
	r := s.reports.reporter
	sent := func() string {
		t.Helper()
		msgs, errs := r.pendingMessages()
		if len(errs) > 0 {
			t.Fatal(errs)
		}
		var out []string
		for _, m := range msgs {
			switch k := m.Kind.(type) {
			case *fleetv1.AgentMessage_PodStatus:
				o, err := decodeObject(&fleetv1.Object{Kind: "Pod", Raw: k.PodStatus.Pod})
				if err != nil {
					t.Fatal(err)
				}
				out = append(out, o.(*v1.Pod).Status.Message)
			case *fleetv1.AgentMessage_PodGone:
				out = append(out, "gone")
			default:
				out = append(out, fmt.Sprintf("%T", m.Kind))
			}
		}
		return strings.Join(out, ",")
	}
	status := func(msg string) {
		s.PodStatus(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "p", UID: "u"},
			Status: v1.PodStatus{Message: msg}})
	}
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() { status("1"); status("2") }, "2"},
		{func() { status("3"); status("4") }, ""}, // one is unacknowledged
		{func() { r.handleStatusAck("u") }, "4"},
		{func() { s.PodGone("d", "p", "u") }, ""},
		{func() { r.resetForSession() }, "4"}, // unacknowledged: sent again, before the end
		{func() { r.handleStatusAck("u") }, "gone"},
		{func() { r.resetForSession() }, "gone"},
		{func() { r.handleStatusAck("u"); r.handleStatusAck("u") }, ""},
	} {
		step.do()
		if got := sent(); got != step.want {
			t.Fatalf("step %d sent %q, want %q", i, got, step.want)
		}
	}
	if len(r.pods) != 0 {
		t.Errorf("%d pods are still held", len(r.pods))
	}
	for i := range 2 * maxPendingReports {
		s.Event(&v1.Event{Message: fmt.Sprint(i)})
		s.Stages("t", "o", []agent.StageTime{{}})
	}
	if len(r.events) != maxPendingReports || r.events[maxPendingReports-1].Message !=
		fmt.Sprint(2*maxPendingReports-1) || len(r.stages) != maxPendingReports {
		t.Errorf("%d events and %d stages wait, want the newest %d", len(r.events), len(r.stages), maxPendingReports)
	}
}

// A checkpoint is read as it was written. A damaged one is rejected as a whole.
func TestRecording(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{NodeName: "w1", StateDir: dir, RunDir: dir, Log: slog.New(slog.DiscardHandler)}
	a := New(cfg)
	if err := a.view.applyObjects(fullSet(sentObject(t, "Pod", "d", "p", 2), sentObject(t, "Secret", "d", "s", 3),
		sentObject(t, "EndpointSlice", "d", "e", 4))); err != nil {
		t.Fatal(err)
	}
	a.view.setCluster(agent.Cluster{Name: "c", Domain: "cluster.local"})
	a.view.completeBatch(4, true)
	if err := a.writeCheckpoint(); err != nil {
		t.Fatal(err)
	}
	b := New(cfg)
	if err := b.loadCheckpoint(); err != nil {
		t.Fatal(err)
	}
	if len(b.Pods()) != 1 || len(b.EndpointSlices()) != 1 || b.Revision() != 4 ||
		!reflect.DeepEqual(b.Cluster(), a.Cluster()) {
		t.Errorf("loaded %d pods, %d slices, revision %d, %+v", len(b.Pods()), len(b.EndpointSlices()),
			b.Revision(), b.Cluster())
	}
	if _, ok := b.Secret("d", "s"); !ok {
		t.Error("the secret was not loaded")
	}
	path := filepath.Join(dir, checkpointFile)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for cut := range len(data) {
		if err := os.WriteFile(path, data[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		c := New(cfg)
		if err := c.loadCheckpoint(); err == nil || c.hasAssignment() {
			t.Fatalf("a checkpoint cut after %d of %d bytes was loaded (%v)", cut, len(data), err)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

func TestParseToken(t *testing.T) {
	hash := strings.Repeat("ab", 32)
	for in, want := range map[string]string{
		"keelson1.node.abc123.s3cret." + hash:         "",
		" keelson1.node.abc123.s3cret." + hash + "\n": "",
		"keelson1.controlplane.abc123.s3cret." + hash: `for "controlplane", not for a node`,
		"keelson1.node.abc123.s3cret":                 "malformed",
		"keelson1.node.abc123.s3cret.xyz":             "not a SHA-256 hash",
		"other.node.abc123.s3cret." + hash:            "malformed",
		"":                                            "malformed",
	} {
		tok, err := parseToken(in)
		switch {
		case want == "" && (err != nil || tok.caHash != hash):
			t.Errorf("%q: %v", in, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%q gave %v, want %q", in, err, want)
		}
	}
}

// The list of replicas survives a restart. The configured addresses are used again if no learned
// replica responds.
func TestReplicas(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	r := newReplicaList(log, dir, []string{"seed:1"})
	if got, _ := r.wantedAddresses(); !slices.Equal(got, []string{"seed:1"}) {
		t.Errorf("at first %v", got)
	}
	_, changed := r.wantedAddresses()
	r.recordReplicas(nil, []*fleetv1.Replica{{Name: "b", FleetAddress: "b:1"}, {Name: "a", FleetAddress: "a:1"}})
	select {
	case <-changed:
	default:
		t.Error("the change of the list of replicas was not signaled")
	}
	r.recordReplicas(nil, nil) // an empty report
	again := newReplicaList(log, dir, []string{"seed:1"})
	if err := again.loadFiles(); err != nil {
		t.Fatal(err)
	}
	if got, _ := again.wantedAddresses(); !slices.Equal(got, []string{"a:1", "b:1"}) {
		t.Errorf("after a restart %v", got)
	}
	again.setUseSeed(true)
	if got, _ := again.wantedAddresses(); !slices.Equal(got, []string{"a:1", "b:1", "seed:1"}) {
		t.Errorf("when none answers %v", got)
	}
}
