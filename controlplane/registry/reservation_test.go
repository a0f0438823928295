package registry

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// reservingEnv returns a registry in which services reserve the values in their test annotations.
// The kind's own rules are tested elsewhere.
func reservingEnv(t *testing.T) *env {
	e := newEnv(t)
	k := *e.kinds.ByType(&corev1.Service{})
	k.Writes.Default, k.Validation.Object, k.Validation.Update, k.Writes.PrepareCreate, k.Writes.PrepareUpdate = nil,
		nil, nil, nil, nil
	k.Commit.Reservations = func(o api.Object) []api.Reservation {
		var out []api.Reservation
		s := o.(*corev1.Service)
		if s.Spec.ClusterIP != "" {
			out = append(out, api.Reservation{Space: SpaceClusterIPs, Value: s.Spec.ClusterIP, Field: "spec.clusterIP"})
		}
		for i, p := range s.Spec.Ports {
			if p.NodePort != 0 {
				out = append(out, api.Reservation{Space: SpaceNodePorts, Value: fmt.Sprintf("TCP-%d", p.NodePort),
					Field: fmt.Sprintf("spec.ports[%d].nodePort", i)})
			}
		}
		return out
	}
	table := api.NewKinds(&k, e.kinds.ByType(&corev1.ConfigMap{}))
	return startEnvWith(t, e.store, table)
}

func service(name, ip string, ports ...int32) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{ClusterIP: ip}}
	for i, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: 80, NodePort: p})
	}
	return s
}

func (e *env) reservedKeys() string {
	e.t.Helper()
	l, err := e.store.List(e.ctx, storedform.ReservationsRoot, raftstore.ListOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	var out []string
	for _, it := range l.Items {
		out = append(out, strings.TrimPrefix(it.Key, storedform.ReservationsRoot))
	}
	return strings.Join(out, " ")
}

func TestReservationsFollowTheObject(t *testing.T) {
	e := reservingEnv(t)
	e.create(service("a", "10.96.0.7", 30001, 30002))
	if got, want := e.reservedKeys(), "clusterips/10.96.0.7 nodeports/TCP-30001 nodeports/TCP-30002"; got != want {
		t.Fatalf("reserved %q, want %q", got, want)
	}
	for _, c := range []struct {
		obj           *corev1.Service
		field, detail string
	}{
		{service("b", "10.96.0.7"), "spec.clusterIP", "provided IP is already allocated"},
		{service("b", "", 30009, 30002), "spec.ports[1].nodePort", "provided port is already allocated"},
	} {
		before := e.store.Applied()
		_, err := e.tryCreate(c.obj)
		s := refused(t, err, 422, metav1.StatusReasonInvalid)
		if len(s.Details.Causes) != 1 || s.Details.Causes[0].Field != c.field ||
			!strings.Contains(s.Message, c.detail) {
			t.Fatalf("message %q causes %+v", s.Message, s.Details.Causes)
		}
		if e.store.Applied() != before {
			t.Fatal("a refused create left something") // F44
		}
	}
	e.update(service("a", "10.96.0.7", 30002, 30003), "")
	if got, want := e.reservedKeys(), "clusterips/10.96.0.7 nodeports/TCP-30002 nodeports/TCP-30003"; got != want {
		t.Fatalf("after the update %q, want %q", got, want)
	}
	e.create(service("b", "", 30001))
	_, err := e.tryUpdate(service("b", "", 30003), "")
	refused(t, err, 422, metav1.StatusReasonInvalid)
	e.delete(service("a", ""), metav1.DeleteOptions{})
	if got, want := e.reservedKeys(), "nodeports/TCP-30001"; got != want {
		t.Fatalf("after the delete %q, want %q", got, want)
	}
	dry := e.request(api.VerbCreate, service("c", ""))
	dry.Object, dry.Create.DryRun = service("c", "", 30001), []string{metav1.DryRunAll}
	if err := e.cache.WaitFor(e.ctx, e.store.Applied()); err != nil {
		t.Fatal(err)
	}
	_, err = e.Registry.Create(e.ctx, dry, e.admit)
	refused(t, err, 422, metav1.StatusReasonInvalid)
}

// Concurrent allocations from a small range get different values. Admission runs again for requests
// that lose a race.
func TestAllocationRace(t *testing.T) {
	e := reservingEnv(t)
	cidr := netip.MustParsePrefix("10.96.0.0/26") // 61 usable addresses
	e.admit = Stages{Mutating: func(_ context.Context, a *api.Attempt) error {
		s, ok := a.Whole.(*corev1.Service)
		if !ok || s.Spec.ClusterIP != "" {
			return nil
		}
		ip, err := e.AllocateClusterIP(a, cidr)
		if err != nil {
			return err
		}
		s.Spec.ClusterIP = ip.String()
		return nil
	}}
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := make(map[string]string)
	for n := range 61 {
		wg.Go(func() {
			name := fmt.Sprint("s", n)
			made, err := e.tryCreate(service(name, ""))
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ip := made.(*corev1.Service).Spec.ClusterIP
			if holder := got[ip]; holder != "" {
				t.Errorf("%s is held by %s and %s", ip, holder, name)
			}
			got[ip] = name
		})
	}
	wg.Wait()
	for _, never := range []string{"10.96.0.0", "10.96.0.1", "10.96.0.63"} {
		if got[never] != "" {
			t.Errorf("%s was given to %s", never, got[never])
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	if err := e.cache.WaitFor(e.ctx, e.store.Applied()); err != nil {
		t.Fatal(err)
	}
	_, err := e.tryCreate(service("one-too-many", ""))
	s := refused(t, err, 500, metav1.StatusReasonInternalError)
	if !strings.Contains(s.Message, "range is full") {
		t.Fatalf("message %q", s.Message)
	}
}

func TestNodePortRange(t *testing.T) {
	e := reservingEnv(t)
	seen := make(map[int32]bool)
	for n := range 40 {
		p, err := e.AllocateNodePort(&api.Attempt{}, 30000, 30039, "TCP", "UDP")
		if err != nil {
			t.Fatalf("port %d: %v", n, err)
		}
		if seen[p] || p < 30000 || p > 30039 {
			t.Fatalf("port %d again or out of range", p)
		}
		if n < 24 && p < 30016 {
			t.Fatalf("port %d comes from the part for fixed choices", p)
		}
		seen[p] = true
		e.create(service(fmt.Sprint("s", n), "", p))
		if err := e.cache.WaitFor(e.ctx, e.store.Applied()); err != nil {
			t.Fatal(err)
		}
	}
	_, err := e.AllocateNodePort(&api.Attempt{}, 30000, 30039, "TCP")
	refused(t, err, 500, metav1.StatusReasonInternalError)
}

func TestAddresses(t *testing.T) {
	for _, c := range []struct {
		prefix string
		n      uint64
		want   string
	}{
		{"10.96.0.0/16", 258, "10.96.1.2"},
		{"fd00::/64", 1 << 40, "fd00::100:0:0"},
	} {
		if got := addrAt(netip.MustParsePrefix(c.prefix), c.n).String(); got != c.want {
			t.Errorf("address %d of %s is %s, want %s", c.n, c.prefix, got, c.want)
		}
	}
	e := newEnv(t)
	if ip, err := e.AllocateClusterIP(&api.Attempt{}, netip.MustParsePrefix("fd00:96::/108")); err != nil ||
		!netip.MustParsePrefix("fd00:96::/108").Contains(ip) {
		t.Fatalf("%v, %v", ip, err)
	}
}

// A value that an object contains without a reservation, stored before reservations existed, is not
// released from its later holder.
func TestReservationOfAnotherIsNotReleased(t *testing.T) {
	e := reservingEnv(t)
	old := service("old", "", 30001)
	sc := e.cache.ByKind(e.kinds.ByType(old))
	old.UID = "u"
	value, err := sc.Codec().Encode(old)
	if err != nil {
		t.Fatal(err)
	}
	rev, err := e.store.Commit(e.ctx,
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Create(sc.Storage().Prefix+
			storedform.ObjectKey(sc.Kind, "default", "old"), value)}})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.cache.WaitFor(e.ctx, rev); err != nil {
		t.Fatal(err)
	}
	made := e.create(service("new", "", 30001))
	if err := e.cache.WaitFor(e.ctx, revisionOf(t, made)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := e.tryDelete(old, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := e.reservedKeys(); got != "nodeports/TCP-30001" {
		t.Errorf("reserved %q after the one was deleted that does not hold it", got)
	}
}
