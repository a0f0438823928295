package loadbalancer_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/loadbalancer"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// onlyBalancer is a world with this controller and no other.
func onlyBalancer(change func(c *engine.Descriptor)) testcluster.Options {
	return testcluster.Options{NoMutationGuard: true, ChangeController: change,
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{loadbalancer.New(d)}
		}}
}

// balanced is a Service that wants an address.
func balanced(name string) *corev1.Service {
	s := testcluster.NewService(name)
	s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeLoadBalancer, "", nil
	return s
}

// setPools replaces the pools; each is "name=addresses".
func setPools(w *testcluster.Cluster, pools ...string) {
	w.T.Helper()
	data := map[string]string{}
	for _, p := range pools {
		name, addresses, _ := strings.Cut(p, "=")
		data[name] = "addresses: [" + addresses + "]"
	}
	err := apply(w,
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: balancer.Namespace, Name: balancer.ConfigMap},
			Data: data})
	if err != nil {
		w.T.Fatal(err)
	}
}

func apply(w *testcluster.Cluster, c *corev1.ConfigMap) error {
	have, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, c.Namespace, c.Name)
	if apierrors.IsNotFound(err) {
		_, err = client.Create(w.Ctx, w.Admin, c)
		return err
	}
	if err != nil {
		return err
	}
	have = have.DeepCopy()
	have.Data = c.Data
	_, err = client.Update(w.Ctx, w.Admin, have)
	return err
}

// announcer creates a node that announces addresses.
func announcer(w *testcluster.Cluster, name string) {
	w.T.Helper()
	w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
		Annotations: map[string]string{balancer.Announces: "true"}}})
	w.SetNodeReady(name, corev1.ConditionTrue)
}

func balancers(w *testcluster.Cluster) map[string]*corev1.Service {
	w.T.Helper()
	list, err := client.List[*corev1.Service](w.Ctx, w.Admin, "default", metav1.ListOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
	out := map[string]*corev1.Service{}
	for _, s := range list {
		out[s.Name] = s
	}
	return out
}

func outside(s *corev1.Service) string {
	var out []string
	for _, in := range s.Status.LoadBalancer.Ingress {
		out = append(out, in.IP)
	}
	return strings.Join(out, " ")
}

// accounts returns inconsistencies between Services and reservations: an address of two Services,
// an address without reservation, a reservation without Service, or a Service without address
// although an address is free.
func accounts(w *testcluster.Cluster, free int) error {
	services := balancers(w)
	reserved, err := client.List[*networkingv1.IPAddress](w.Ctx, w.Admin, "",
		metav1.ListOptions{LabelSelector: networkingv1.LabelManagedBy + "=" + balancer.Allocator})
	if err != nil {
		return err
	}
	of := map[string]string{}
	for _, a := range reserved {
		of[a.Name] = a.Spec.ParentRef.Name
	}
	used, waiting := map[string]string{}, 0
	for name, s := range services {
		for _, ip := range strings.Fields(outside(s)) {
			if other := used[ip]; other != "" {
				return fmt.Errorf("%s is that of %s and %s", ip, other, name)
			}
			if used[ip] = name; of[ip] != name {
				return fmt.Errorf("%s of %s is reserved for %q", ip, name, of[ip])
			}
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && outside(s) == "" {
			waiting++
			if c := meta.FindStatusCondition(s.Status.Conditions, balancer.Condition); c == nil ||
				c.Reason != balancer.ReasonFull {
				return fmt.Errorf("%s has none, and the condition %+v", name, c)
			}
		}
	}
	if len(of) != len(used) {
		return fmt.Errorf("%d addresses are reserved, %d used: %v %v", len(of), len(used), of, used)
	}
	if free -= len(used); waiting > 0 && free > 0 {
		return fmt.Errorf("%d Services wait while %d addresses are free", waiting, free)
	}
	return nil
}

// F117 F125: Services are created, deleted and changed at random while the controller is
// interrupted, loses events or its leadership. No address ever belongs to two Services, and none is
// lost.
func TestBalancerAddressesAreGivenOnce(t *testing.T) {
	w := testcluster.New(t, onlyBalancer(testcluster.FailReconciles("load-balancer-controller", 3, 2*time.Millisecond)))
	setPools(w, "a=192.0.2.1-192.0.2.4", "b=198.51.100.1")
	announcer(w, "w1")
	k := w.Admin.Kinds().ByType(&corev1.Service{})
	watching, err := w.Calls.Watch(w.Ctx, &api.Request{User: api.User{Name: "admin"}, Verb: api.VerbWatch, Kind: k,
		Namespace: "default"})
	if err != nil {
		t.Fatal(err)
	}
	defer watching.Stop()
	twice := make(chan error, 1)
	go func() { // each state that there ever was
		has := map[string]string{} // of each Service
		for e := range watching.ResultChan() {
			s, ok := e.Object.(*corev1.Service)
			if !ok {
				continue
			}
			if has[s.Name] = outside(s); e.Type == "DELETED" {
				delete(has, s.Name)
			}
			for other, ip := range has {
				if other != s.Name && ip != "" && ip == has[s.Name] {
					select {
					case twice <- fmt.Errorf("%s and %s have %s at once", other, s.Name, ip):
					default:
					}
				}
			}
		}
	}()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	stop := w.Lead(engine.Options{Resync: 50 * time.Millisecond})
	for range 120 {
		name := fmt.Sprint("s", dice.IntN(8))
		s, exists := balancers(w)[name]
		switch n := dice.IntN(8); {
		case !exists:
			w.CreateObject(balanced(name))
		case n == 0:
			testcluster.Update(w, name, func(s *corev1.Service) {
				s.Spec.Type = corev1.ServiceTypeClusterIP
				s.Spec.AllocateLoadBalancerNodePorts, s.Spec.ExternalTrafficPolicy = nil, ""
			})
		case n == 1:
			testcluster.Update(w, name, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer })
		case n == 2:
			testcluster.Update(w, name, func(s *corev1.Service) {
				s.Annotations = map[string]string{balancer.AddressesAnnotation: fmt.Sprint("192.0.2.", 1+dice.IntN(4))}
			})
		case n == 3:
			testcluster.Update(w, name, func(s *corev1.Service) { s.Annotations = nil })
		case n == 4 && outside(s) != "": // a user deletes a reservation
			_ = client.Delete[*networkingv1.IPAddress](w.Ctx, w.Admin, "", strings.Fields(outside(s))[0],
				metav1.DeleteOptions{})
		case n == 5:
			stop()
			stop = w.Lead(engine.Options{Resync: 50 * time.Millisecond})
		default:
			if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", name, metav1.DeleteOptions{}); err !=
				nil {
				t.Fatal(err)
			}
		}
		select {
		case err := <-twice:
			t.Fatal(err)
		default:
		}
	}
	for name, s := range balancers(w) { // wishes are followed or not: here it is about numbers
		if s.Annotations[balancer.AddressesAnnotation] != "" {
			testcluster.Update(w, name, func(s *corev1.Service) { delete(s.Annotations, balancer.AddressesAnnotation) })
		}
	}
	w.Eventually("the accounts fit", func() error { return accounts(w, 5) })
	select {
	case err := <-twice:
		t.Fatal(err)
	default:
	}
}

// F117: a Service waits while the pools are exhausted, and one event reports what to do. It gets
// the first free address, whether it was released or added to a pool. An address that is removed
// from a pool stays with its Service.
func TestBalancerPools(t *testing.T) {
	w := testcluster.New(t, onlyBalancer(nil))
	w.Lead(engine.Options{})
	announcer(w, "w1")
	setPools(w, "a=192.0.2.1")
	has := func(name, want string) {
		t.Helper()
		w.Eventually(name+" has "+want, func() error {
			if got := outside(balancers(w)[name]); got != want {
				return fmt.Errorf("it has %q", got)
			}
			return nil
		})
	}
	told := func(name, reason, part string) {
		t.Helper()
		w.Eventually("Event "+reason+" of "+name, func() error {
			events, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
			for _, e := range events {
				if e.Reason == reason && e.InvolvedObject.Name == name && strings.Contains(e.Message, part) {
					if e.Count > 1 {
						return fmt.Errorf("%d times", e.Count)
					}
					return nil
				}
			}
			return errors.Join(err, fmt.Errorf("no such event among %d", len(events)))
		})
	}
	w.CreateObject(balanced("one"))
	has("one", "192.0.2.1")
	w.CreateObject(balanced("two"))
	told("two", balancer.ReasonFull,
		"no IPv4 address is free in pool a: add addresses to ConfigMap kube-system/load-balancer-pools")
	if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", "one", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	has("two", "192.0.2.1")
	w.CreateObject(balanced("three"))
	told("three", balancer.ReasonFull, "in pool a")
	setPools(w, "a=192.0.2.1-192.0.2.2")
	has("three", "192.0.2.2")
	setPools(w, "b=198.51.100.7")
	told("two", balancer.ReasonOutside, "192.0.2.1 is no longer in a pool; the Service keeps the address")
	has("two", "192.0.2.1")
	testcluster.Update(w, "two", func(s *corev1.Service) {
		s.Annotations = map[string]string{balancer.AddressesAnnotation: "198.51.100.7"}
	})
	has("two", "198.51.100.7")
	w.Eventually("the accounts fit", func() error { return accounts(w, 1) })
	foreign := balanced("foreign") // another controller manages it
	class := "example.org/balancer"
	foreign.Spec.LoadBalancerClass = &class
	w.CreateObject(foreign)
	setPools(w, "b=198.51.100.7-198.51.100.9")
	w.CreateObject(balanced("last"))
	has("last", "198.51.100.8")
	has("foreign", "")
	// it names all addresses of a pool and keeps four of them
	thief := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "thief"}}
	for n := range 8 {
		thief.Status.Addresses = append(thief.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: fmt.Sprint("203.0.113.", n)})
	}
	setPools(w, "c=203.0.113.1-203.0.113.7") // first: a pool that overlaps the addresses of a node is refused
	w.CreateObject(thief)
	told("last", balancer.ReasonOutside, "198.51.100.8 is no longer in a pool; the Service keeps the address")
	w.Eventually("a Service gets the first that the thief does not keep", func() error {
		// Nodes have their own informer
		w.CreateObject(balanced("robbed"))
		var got string
		w.Eventually("robbed has an address", func() error {
			if got = outside(balancers(w)["robbed"]); got == "" {
				return errors.New("it has none")
			}
			return nil
		})
		if got == "203.0.113.4" {
			return nil
		}
		return errors.Join(fmt.Errorf("it has %q", got),
			client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", "robbed", metav1.DeleteOptions{}))
	})
}

// unheard sets the time since which a node has not responded.
func unheard(w *testcluster.Cluster, node, since string) {
	w.T.Helper()
	w.Eventually("lease of "+node, func() error {
		l, err := client.Get[*coordinationv1.Lease](w.Ctx, w.Admin, corev1.NamespaceNodeLease, node)
		if err != nil {
			return err
		}
		l = l.DeepCopy()
		if l.Annotations = nil; since != "" {
			l.Annotations = map[string]string{balancer.MissingSince: since}
		}
		_, err = client.Update(w.Ctx, w.Admin, l)
		return err
	})
}

// by is which node answers for a Service.
func by(w *testcluster.Cluster, name string) string {
	return balancers(w)[name].Annotations[balancer.AnnouncedBy]
}

// whoGets waits until a node announces a Service.
func whoGets(w *testcluster.Cluster, name string) (node string) {
	w.T.Helper()
	w.Eventually("somebody answers for "+name, func() error {
		if node = by(w, name); node == "" {
			return errors.New("nobody does")
		}
		return nil
	})
	return node
}

// untilItGets creates Services until a node announces one: then the controller has observed that it
// may. Nodes, leases and Services have separate informers, each of which may be behind.
func untilItGets(w *testcluster.Cluster, node, prefix string) {
	w.T.Helper()
	made := 0
	w.Eventually(node+" gets a new one", func() error {
		name := fmt.Sprint(prefix, made)
		w.CreateObject(balanced(name))
		made++
		if got := whoGets(w, name); got != node {
			return fmt.Errorf("%s got %s", got, name)
		}
		return nil
	})
}

// F117 F118: one suitable node announces each address, spread evenly, and stays while it is
// suitable. If it stops responding, is cordoned, excluded or lost, another node replaces it at
// once. It gets nothing back when it returns.
func TestBalancerAnnouncers(t *testing.T) {
	w := testcluster.New(t, onlyBalancer(nil))
	w.Lead(engine.Options{})
	setPools(w, "a=192.0.2.1-192.0.2.250")
	w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "old"}}) // its agent answers for nothing
	w.SetNodeReady("old", corev1.ConditionTrue)
	for i := range 9 {
		w.CreateObject(balanced(fmt.Sprint("s", i)))
	}
	w.Eventually("addresses", func() error { return accounts(w, 250) })
	if got := by(w, "s0"); got != "" {
		t.Fatalf("%s answers, whose agent cannot", got)
	}
	spread := func(want map[string]int) error {
		got := map[string]int{}
		for i := range 9 {
			got[by(w, fmt.Sprint("s", i))]++
		}
		for n, most := range want {
			if got[n] != most {
				return fmt.Errorf("%v, want %v", got, want)
			}
		}
		return nil
	}
	for _, n := range []string{"w1", "w2", "w3"} {
		w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n,
			Annotations: map[string]string{balancer.Announces: "true"}}})
		w.CreateObject(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease,
			Name: n}})
	}
	w.SetNodeReady("w1", corev1.ConditionTrue)
	w.Eventually("the only one answers", func() error { return spread(map[string]int{"w1": 9}) })
	w.SetNodeReady("w2", corev1.ConditionTrue)
	w.SetNodeReady("w3", corev1.ConditionTrue)
	untilItGets(w, "w2", "second")
	untilItGets(w, "w3", "third")
	unheard(w, "w1", "2026-01-02T03:04:05Z")
	w.Eventually("the others share", func() error {
		got := map[string]int{}
		for _, s := range balancers(w) {
			got[s.Annotations[balancer.AnnouncedBy]]++
		}
		if diff := got["w2"] - got["w3"]; got["w1"] != 0 || got[""] != 0 || diff > 1 || diff < -1 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	before := map[string]string{}
	for i := range 9 {
		before[fmt.Sprint("s", i)] = by(w, fmt.Sprint("s", i))
	}
	unheard(w, "w1", "")
	untilItGets(w, "w1", "first")
	for _, name := range []string{"yet", "another"} { // it still has less than the others
		w.CreateObject(balanced(name))
		if got := whoGets(w, name); got != "w1" {
			t.Errorf("%s answers for %s, want w1, which has least", got, name)
		}
	}
	for name, node := range before {
		if got := by(w, name); got != node {
			t.Errorf("%s went from %s to %s for no reason", name, node, got)
		}
	}
	testcluster.Update(w, "w2", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	w.Eventually("a cordoned node gives its own away", func() error { return spread(map[string]int{"w2": 0}) })
	testcluster.Update(w, "w3", func(n *corev1.Node) {
		n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	})
	w.Eventually("an excluded node too", func() error { return spread(map[string]int{"w1": 9}) })
	w.SetNodeReady("w1", corev1.ConditionUnknown)
	testcluster.Update(w, "w3", func(n *corev1.Node) { n.Labels = nil })
	w.Eventually("a lost one too", func() error { return spread(map[string]int{"w3": 9}) })
	testcluster.Update(w, "another", func(s *corev1.Service) { s.Annotations = nil })
	w.Eventually("what somebody took away comes back", func() error {
		if by(w, "another") != "w3" {
			return errors.New("nobody answers")
		}
		return nil
	})
	testcluster.Update(w, "another", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.AllocateLoadBalancerNodePorts = corev1.ServiceTypeClusterIP,
			"", nil
	})
	w.Eventually("nobody answers for a Service without addresses", func() error {
		if _, there := balancers(w)["another"].Annotations[balancer.AnnouncedBy]; there {
			return errors.New("somebody does")
		}
		return nil
	})
}

// F117: a Service with externalTrafficPolicy Local is announced by a node with ready endpoints, or
// by none.
func TestBalancerAnnouncesWhereEndpointsAre(t *testing.T) {
	w := testcluster.New(t, onlyBalancer(nil))
	w.Lead(engine.Options{})
	setPools(w, "a=192.0.2.1-192.0.2.20")
	for _, n := range []string{"w1", "w2"} {
		announcer(w, n)
	}
	s := balanced("web")
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	w.CreateObject(s)
	w.CreateObject(slice("web", "w2", true))
	expect := func(what, want string) {
		t.Helper()
		w.Eventually(what, func() error {
			if got := by(w, "web"); got != want || outside(balancers(w)["web"]) == "" {
				return fmt.Errorf("%q answers", got)
			}
			return nil
		})
	}
	expect("the node with the endpoint", "w2")
	setSlice(w, "web", "w1", true)
	expect("where it went", "w1")
	setSlice(w, "web", "w1", false)
	expect("nobody", "")
	if _, err := netip.ParseAddr(outside(balancers(w)["web"])); err != nil {
		t.Errorf("the address went too: %v", err)
	}
}

// slice is the EndpointSlice of a Service with one endpoint.
func slice(service, node string, ready bool) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: service,
			Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.9"}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
}

func setSlice(w *testcluster.Cluster, service, node string, ready bool) {
	w.T.Helper()
	testcluster.Update(w, service, func(e *discoveryv1.EndpointSlice) {
		e.Endpoints = slice(service, node, ready).Endpoints
	})
}

// F117: an address whose deletion was not confirmed is not assigned to its Service again before it
// is certainly deleted.
func TestBalancerAddressWithUnconfirmedDeletionIsNotReused(t *testing.T) {
	var w *testcluster.Cluster
	deletes := 0
	ofAddress := func(r *api.Request) bool { return r.Verb == api.VerbDelete && r.Kind.Resource == "ipaddresses" }
	o := onlyBalancer(nil)
	o.WrapBackend = func(b api.Backend) api.Backend {
		return &testcluster.UnconfirmedWrites{Backend: b, Match: func(r *api.Request) bool {
			if !ofAddress(r) {
				return false
			}
			if deletes++; deletes == 1 { // the Service wants the address back
				testcluster.Update(w, "a", func(s *corev1.Service) {
					s.Annotations = map[string]string{balancer.AddressesAnnotation: "192.0.2.1"}
				})
				services := client.Informer[*corev1.Service](w.Informers)
				w.Eventually("the cache shows the change", func() error {
					if s, ok := engine.Cached[*corev1.Service](services, "default", "a"); !ok ||
						s.Annotations[balancer.AddressesAnnotation] != "192.0.2.1" {
						return errors.New("not yet")
					}
					return nil
				})
			}
			return true
		}}
	}
	w = testcluster.New(t, o)
	setPools(w, "a=192.0.2.1-192.0.2.2")
	announcer(w, "w1")
	wrong := make(chan struct{}, 100)
	asks := func(r *api.Request) {
		if s, ok := r.Object.(*corev1.Service); ok && r.Subresource == "status" && deletes == 1 &&
			outside(s) == "192.0.2.1" {
			wrong <- struct{}{}
		}
	}
	w.Calls.OnRequest.Store(&asks)
	a := balanced("a")
	a.Annotations = map[string]string{balancer.AddressesAnnotation: "192.0.2.1"}
	w.CreateObject(a)
	w.Lead(engine.Options{})
	has := func(want string) {
		t.Helper()
		w.Eventually("a has "+want, func() error {
			if got := outside(balancers(w)["a"]); got != want {
				return fmt.Errorf("it has %q", got)
			}
			return nil
		})
	}
	has("192.0.2.1")
	testcluster.Update(w, "a", func(s *corev1.Service) {
		s.Annotations = map[string]string{balancer.AddressesAnnotation: "192.0.2.2"}
	})
	has("192.0.2.2")
	w.Eventually("the accounts fit", func() error { return accounts(w, 2) })
	has("192.0.2.1")
	if len(wrong) > 0 {
		t.Errorf("the Service got an address whose deletion could still be committed")
	}
}
