package policy

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/test/testenv/space"
)

func denyAll(namespace string) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "deny"},
		Spec: networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}}}
}

// settled creates a site with pods p0 and p1 of namespace a, and p2 and p3 of namespace b.
func settled(t *testing.T) *rig {
	t.Helper()
	needsKernel(t)
	r := newRig(newSite(t, 4))
	for i, p := range r.places {
		p.namespace, p.labels = []string{"a", "a", "b", "b", "c", "c"}[i], map[string]string{"app": p.name}
	}
	r.putPods()
	return r
}

// nft runs nft in the node's namespace.
func (r *rig) nft(t *testing.T, args ...string) string {
	t.Helper()
	var out []byte
	must(t, space.In(r.node, func() (err error) {
		if out, err = exec.Command("nft", args...).CombinedOutput(); err != nil {
			err = fmt.Errorf("nft %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return err
	}))
	return string(out)
}

// once makes one connection.
func (r *rig) once(t *testing.T, from, to *place, port int) *try {
	t.Helper()
	a := &try{from: from, to: to, client: from.addresses[0], server: to.addresses[0], proto: "tcp", port: port}
	must(t, space.In(from.ns, a.begin))
	t.Cleanup(a.end)
	return a
}

// The first packet of a pod is already subject to its policies: when Guard returns, they are in the
// kernel. The same holds for the next pod with the same address.
func TestFirstPacket(t *testing.T) {
	r := settled(t)
	r.put(denyAll("a"))
	r.start(t, nil)
	a, b, free := r.places[0], r.places[1], r.places[2]
	for range 5 {
		must(t, r.e.Guard(t.Context(), a.object(), a.strings()))
		denied := r.once(t, a, free, 80)
		// Another pod, without policies, gets the same addresses.
		next := &place{name: "next", namespace: "b", labels: map[string]string{}, ns: a.ns,
			addresses: a.addresses, local: true}
		r.cluster.Put(next.object())
		must(t, r.e.Guard(t.Context(), next.object(), next.strings()))
		if allowed := r.once(t, next, free, 80); !allowed.reached(patience) {
			t.Fatal("the pod after one with policies is held by them")
		}
		denied.end() // before it retries: its address belongs to another pod now
	}
	must(t, r.e.Guard(t.Context(), b.object(), b.strings()))
	denied := r.once(t, b, free, 80)
	must(t, r.e.Guard(t.Context(), free.object(), free.strings()))
	if allowed := r.once(t, free, r.places[3], 80); !allowed.reached(patience) || denied.reached(0) {
		t.Error("a first packet passed, or one that may was held")
	}
}

// A pod that no policy selects does not wait. The error of a pod that waits states the reason.
func TestGuardIsBounded(t *testing.T) {
	r := settled(t)
	r.put(denyAll("a"))
	r.e = New(Config{Objects: r.cluster, Sandboxes: sandboxes{}, Disabled: r.off.Load})
	if err := r.e.Guard(t.Context(), r.places[2].object(), r.places[2].strings()); err != nil {
		t.Errorf("a pod without policies: %v", err)
	}
	host := r.places[0].object()
	host.Spec.HostNetwork = true
	must(t, r.e.Guard(t.Context(), host, nil))
	r.e.setReason("nft is missing")
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	err := r.e.Guard(ctx, r.places[0].object(), r.places[0].strings())
	if err == nil || !strings.Contains(err.Error(), "nft is missing") {
		t.Errorf("a pod whose policies are not in force: %v", err)
	}
	r.off.Store(true)
	must(t, r.e.Guard(t.Context(), r.places[0].object(), r.places[0].strings()))
}

// Allowed connections continue through changes of policies and restarts of the agent, and denied
// traffic never passes: the rules remain, and are changed atomically.
func TestRestartUnderTraffic(t *testing.T) {
	r := settled(t)
	confirm := r.cluster.Unconfirmed()
	allow := denyAll("a")
	allow.Name = "allow"
	allow.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{
		{To: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}},
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(80))}}}}
	r.put(denyAll("a"), allow)
	r.start(t, nil)
	r.guard(t) // the kernel has no rules yet: an unconfirmed view is sufficient
	a, b := r.places[0], r.places[2]
	long := r.once(t, a, b, 80)
	if !long.reached(patience) {
		t.Fatal("what is allowed does not pass")
	}
	before := sandboxes{}
	for _, p := range r.places[:4] {
		before[p.uid()] = p.strings()
	}
	// A client continuously tries a denied connection.
	ctx, cancel := context.WithCancel(t.Context())
	passed := make(chan int)
	go func() {
		n := 0
		for ctx.Err() == nil {
			x := try{from: a, to: b, client: a.addresses[0], server: b.addresses[0], proto: "tcp", port: 81}
			if space.In(a.ns, x.begin) == nil && x.reached(time.Millisecond) {
				n++
			}
			x.end()
		}
		passed <- n
	}()
	table := r.nft(t, "-s", "list", "table", "inet", Table)
	r.stop()
	if after := r.nft(t, "-s", "list", "table", "inet", Table); after != table {
		t.Error("the rules went with the agent")
	}
	// The checkpoint of the next agent lacks the policy that allows: the rules in the kernel remain
	// until the view is confirmed.
	r.put(denyAll("a"))
	r.start(t, before)
	r.putPods() // the view remains unconfirmed
	if x := r.once(t, a, b, 80); !x.reached(patience) {
		t.Error("a view that is not confirmed was programmed")
	}
	r.put(denyAll("a"), allow)
	confirm()
	r.settle(t)
	for range 5 {
		r.stop()
		r.start(t, before)
		r.settle(t)
		r.put(denyAll("a"))
		r.settle(t)
		r.put(denyAll("a"), allow)
		r.settle(t)
	}
	cancel()
	if n := <-passed; n > 0 {
		t.Errorf("%d connections came about that are denied at all times", n)
	}
	must(t, long.send())
	if !(&try{proto: "udp", fd: long.fd}).reached(patience) { // readable: the echo has arrived
		t.Error("a connection did not outlive the restarts")
	}
	if x := r.once(t, a, b, 80); !x.reached(patience) {
		t.Error("what is allowed does not pass any more")
	}
}

// Changes of the table by other programs are detected and repaired, whatever they removed. Other
// tables are not changed.
func TestDamageIsMended(t *testing.T) {
	r := settled(t)
	open := denyAll("a")
	open.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{
		{From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}},
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromString("http"))}}}}
	open.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{
		{To: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}},
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromString("http"))}}}}
	for _, p := range r.places {
		p.ports = []NamedPort{{"http", "tcp", 80}}
	}
	r.putPods()
	r.put(open)
	r.start(t, nil)
	r.guard(t)
	r.settle(t)
	whole := r.nft(t, "-s", "list", "table", "inet", Table)
	r.nft(t, "add table inet somebody; add chain inet somebody c { type filter hook forward priority 5; }; add rule "+
		"inet somebody c counter accept")
	var names []string
	for name := range r.tableNames(t) {
		names = append(names, name)
	}
	damage := []string{"delete table inet " + Table, "flush table inet " + Table,
		"flush chain inet " + Table + " forward",
		"delete element inet " + Table + " pods-i4 { 10.88.0.10 }", "add rule inet " + Table + " sent accept"}
	for _, n := range names {
		if strings.HasPrefix(n, "group-4") || strings.HasPrefix(n, "ports-6") {
			damage = append(damage, "flush set inet "+Table+" "+n)
		}
		if strings.HasPrefix(n, "pods-i4-") {
			damage = append(damage, "flush chain inet "+Table+" "+n)
		}
	}
	for _, d := range damage {
		r.nft(t, d)
		deadline := time.Now().Add(patience)
		for r.differs(t) != nil && time.Now().Before(deadline) {
			r.e.mu.Lock()
			moved := r.e.progress
			r.e.mu.Unlock()
			if r.differs(t) == nil {
				break
			}
			select {
			case <-moved:
			case <-time.After(time.Until(deadline)):
			}
		}
		if got := r.nft(t, "-s", "list", "table", "inet", Table); len(got) != len(whole) {
			t.Errorf("after %q:\n%s\nwas\n%s", d, got, whole)
		}
	}
	r.putPods() // a step after the last repair
	r.settle(t)
	const first = "established,related accept # handle "
	chain := func() string { return r.nft(t, "-a", "list", "chain", "inet", Table, "sent") }
	_, handle, ok := strings.Cut(chain(), first)
	if handle, _, _ = strings.Cut(handle, "\n"); !ok {
		t.Fatal("the base chain's first rule is not found")
	}
	r.nft(t, "replace rule inet "+Table+" sent handle "+handle+" ct state established,related drop")
	for deadline := time.Now().Add(patience); !strings.Contains(chain(), first); {
		r.e.mu.Lock()
		moved := r.e.progress
		r.e.mu.Unlock()
		if strings.Contains(chain(), first) {
			break
		}
		select {
		case <-moved:
		case <-time.After(time.Until(deadline)):
			t.Fatal("a rule that was replaced by another one is not mended")
		}
	}
	if !strings.Contains(r.nft(t, "list", "ruleset"), "table inet somebody") {
		t.Error("a foreign table is gone")
	}
	r.judge(t, r.every(), func(a try) bool { return permitted([]*networkingv1.NetworkPolicy{open}, a) })

	r.off.Store(true) // a third-party network is installed: the next check removes the table
	deadline := time.Now().Add(patience)
	for strings.Contains(r.nft(t, "list", "tables"), Table) && time.Now().Before(deadline) {
		r.e.wakeUp()
	}
	if left := r.nft(t, "list", "tables"); strings.Contains(left, Table) {
		t.Errorf("switched off, and still there: %s", left)
	}
}

func (r *rig) tableNames(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for line := range strings.Lines(r.nft(t, "list", "table", "inet", Table)) {
		if f := strings.Fields(line); len(f) > 1 && (f[0] == "set" || f[0] == "chain" || f[0] == "map") {
			out[f[1]] = true
		}
	}
	return out
}

// differs compares the kernel with the complete rules for the enforcer's input.
func (r *rig) differs(t *testing.T) error {
	t.Helper()
	pods, _, _ := r.e.podsWithAddresses(true)
	want := compileRules(pods, r.e.policies.parseAll(r.cluster.NetworkPolicies(), r.e.cfg.Log)).withSets(nil,
		func(string) bool { return true }, r.cluster.AddressGroup)
	return space.In(r.node, func() error {
		have, err := listTable(t.Context())
		if err != nil {
			return err
		}
		return have.findDifference(want)
	})
}

// The kernel accepts a thousand policies and groups of ten thousand addresses.
func TestLargeInTheKernel(t *testing.T) {
	r := settled(t)
	g := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "large"}, Subsets: []v1.EndpointSubset{{}}}
	for i := range 10000 {
		g.Subsets[0].Addresses = append(g.Subsets[0].Addresses,
			v1.EndpointAddress{IP: netip.AddrFrom4([4]byte{10, 90, byte(i >> 8), byte(i)}).String()})
	}
	g.Subsets[0].Addresses = append(g.Subsets[0].Addresses, v1.EndpointAddress{IP: "10.88.0.13"})
	r.cluster.Put(g)
	for i := range 1000 {
		p := denyAll("a")
		p.Name, p.Annotations = fmt.Sprint("p", i), map[string]string{agent.AddressGroups: "large"}
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}},
				Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(int32(1000 + i)))}}}}
		if i == 999 {
			p.Spec.Ingress[0].Ports[0].Port = new(intstr.FromInt32(80))
		}
		r.cluster.Put(p)
	}
	r.start(t, nil)
	r.guard(t)
	r.settle(t)
	denied, other := r.once(t, r.places[3], r.places[0], 81), r.once(t, r.places[2], r.places[0], 80)
	if x := r.once(t, r.places[3], r.places[0], 80); !x.reached(patience) {
		t.Error("what the last of a thousand policies allows does not pass")
	}
	if denied.reached(0) || other.reached(0) {
		t.Error("what none of a thousand policies allows passes")
	}
}

// Behind a Service, the selected pod counts, and a pod reaches itself through it whatever the
// policies are. Objects of an earlier release, including base chains with other names, are removed
// when the table is rebuilt.
func TestServicesAndOldTables(t *testing.T) {
	r := settled(t)
	r.nft(t, "add table inet "+Table+"; add chain inet "+Table+
		" elder { type filter hook input priority 7; }; add chain inet "+Table+" x; add map inet "+Table+
		" m { type ipv4_addr : verdict; }; add element inet "+Table+" m { 10.0.0.1 : goto x }; add rule inet "+Table+
		" elder ip saddr vmap @m; add set inet "+Table+
		" pods-e4 { type inet_service; }") // a set with the name of one of our maps: only a new table helps
	r.nft(t, "add table ip nat; add chain ip nat pre { type nat hook prerouting priority dstnat; }; add chain ip nat "+
		"post { type nat hook postrouting priority srcnat; };"+
		"add rule ip nat pre ip daddr 10.96.0.1 tcp dport 80 dnat to 10.88.0.10:8080; add rule ip nat pre ip daddr "+
		"10.96.0.2 tcp dport 80 dnat to 10.89.0.7:8080;"+
		"add rule ip nat post ct status dnat masquerade")
	allow := denyAll("a")
	allow.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{
		{From: []networkingv1.NetworkPolicyPeer{
			{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p1"}}}},
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(8080))}}}}
	allow.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{
		{
			To: []networkingv1.NetworkPolicyPeer{
				{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p0"}}}},
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(8080))}}}}
	r.put(allow)
	r.start(t, nil)
	r.guard(t)
	r.settle(t)
	service := func(from *place, ip string) *try {
		a := &try{from: from, client: from.addresses[0], server: addrs(ip)[0], proto: "tcp", port: 80}
		must(t, space.In(from.ns, a.begin))
		t.Cleanup(a.end)
		return a
	}
	stranger, beyond := service(r.places[2], "10.96.0.1"), service(r.places[1], "10.96.0.2")
	for _, from := range []*place{r.places[1], r.places[0]} {
		if !service(from, "10.96.0.1").reached(patience) {
			t.Errorf("%s does not reach the pod behind the Service", from.name)
		}
	}
	if !service(r.places[2], "10.96.0.2").reached(patience) {
		t.Error("who has no policies does not reach a Service")
	}
	if stranger.reached(0) || beyond.reached(0) {
		t.Error("a Service leads past the policies of its pod, or of its client")
	}
	if list := r.nft(t, "list", "table", "inet", Table); strings.Contains(list, "elder") {
		t.Errorf("what an elder release made is still there:\n%s", list)
	}
}

// Packets that the node sends with another source address, as IPVS does for clients of Services,
// are evaluated like the client's.
func TestSentForOthers(t *testing.T) {
	r := settled(t)
	allow := denyAll("a")
	allow.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{
		{From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.89.0.128/25"}}}}}
	r.put(allow)
	r.start(t, nil)
	r.guard(t)
	r.settle(t)
	r.nft(t, "add table inet watch; add chain inet watch out { type filter hook postrouting priority 0; }")
	for _, c := range []struct {
		from, to string
		passes   bool
	}{
		{"10.89.0.7", "10.88.0.10", false}, {"10.89.0.130", "10.88.0.10", true}, {"10.89.0.7", "10.88.0.12", true},
		{"10.88.0.1", "10.88.0.10", true},
		{"10.88.0.10", "10.89.0.7", false}, {"10.88.0.12", "10.89.0.7", true}, {"10.88.0.12", "10.88.0.11", false},
	} {
		// Responses to earlier packets may still arrive: they are not counted.
		r.nft(t, "flush chain inet watch out; add rule inet watch out ip saddr "+c.from+" ip daddr "+c.to+
			" udp dport 80 counter")
		must(t, space.In(r.node, func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1); err != nil {
				return err
			}
			if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: addrs(c.from)[0].As4()}); err != nil {
				return err
			}
			err = unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 80, Addr: addrs(c.to)[0].As4()})
			if err != nil && err != unix.EPERM { // a rule that drops on output returns an error
				return err
			}
			return nil
		}))
		sent := r.nft(t, "list", "table", "inet", "watch") // a packet has passed all rules when the call returns
		if passes := !strings.Contains(sent, "packets 0 "); passes != c.passes {
			t.Errorf("%s to %s: passes=%v, want %v", c.from, c.to, passes, c.passes)
		}
	}
}
