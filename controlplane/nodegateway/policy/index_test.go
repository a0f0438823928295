package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"
)

// world is a Source that a test changes.
type world struct {
	pods       map[string]map[string]*v1.Pod
	namespaces map[string]*v1.Namespace
	policies   map[string]*networkingv1.NetworkPolicy
	refused    map[string]bool // invalid addresses
}

func newWorld() *world {
	return &world{pods: map[string]map[string]*v1.Pod{}, namespaces: map[string]*v1.Namespace{},
		policies: map[string]*networkingv1.NetworkPolicy{}}
}

func (w *world) Pods(namespace string) []*v1.Pod {
	return slices.Collect(maps.Values(w.pods[namespace]))
}
func (w *world) Namespace(name string) (*v1.Namespace, bool) {
	ns, ok := w.namespaces[name]
	return ns, ok
}
func (w *world) Namespaces() []*v1.Namespace { return slices.Collect(maps.Values(w.namespaces)) }

func (w *world) Pod(namespace, name string) (*v1.Pod, bool) {
	p, ok := w.pods[namespace][name]
	return p, ok
}

// Peer omits invalid addresses, and pods with no valid one.
func (w *world) Peer(p *v1.Pod) *v1.Pod {
	if w.refused[p.Status.PodIP] {
		return nil
	}
	return p
}

// meant returns the addresses that a peer selects, computed from scratch.
func (w *world) meant(p peer) []string {
	var out []string
	for name, ns := range w.namespaces {
		if p.namespaces == nil && name != p.namespace ||
			p.namespaces != nil && !p.namespaces.Matches(labels.Set(ns.Labels)) {
			continue
		}
		for _, pod := range w.pods[name] {
			if pod.Spec.HostNetwork || pod.Status.PodIP == "" || pod.Status.Phase == v1.PodFailed ||
				!p.pods.Matches(labels.Set(pod.Labels)) {
				continue
			}
			port := "none"
			if c := pod.Spec.Containers; len(c) > 0 && len(c[0].Ports) > 0 && c[0].Ports[0].Name != "" {
				port = fmt.Sprint(c[0].Ports[0].Name, c[0].Ports[0].ContainerPort)
			}
			if p.port != (portName{}) && (p.port.proto != v1.ProtocolTCP || port != p.port.name+"80") {
				continue
			}
			out = append(out, pod.Status.PodIP+" "+port)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func shown(e *v1.Endpoints) []string {
	var out []string
	for _, s := range e.Subsets {
		port := "none"
		if len(s.Ports) > 0 {
			port = fmt.Sprint(s.Ports[0].Name, s.Ports[0].Port)
		}
		for _, a := range s.Addresses {
			out = append(out, a.IP+" "+port)
		}
	}
	slices.Sort(out)
	return out
}

// After any sequence of changes, each group has the members that its selectors select, and each pod
// the policies that select it. Every changed group is returned.
func TestIndexFollowsTheWorld(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld()
		x := New(w)
		before := map[string]string{}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			changed := step(t, w, x)
			checkWorld(t, w, x)
			now := map[string]string{}
			for name := range x.groups {
				e, _ := x.Group(name)
				now[name] = e.ResourceVersion + fmt.Sprint(shown(e))
				if old, known := before[name]; known && old != now[name] && !slices.Contains(changed, name) {
					t.Fatalf("group %s became %s from %s, and is not named in %v", name, now[name], old, changed)
				}
				if old, known := before[name]; known && old == now[name] && slices.Contains(changed, name) {
					t.Fatalf("group %s is named and did not change", name)
				}
			}
			before = now
		}
		left := len(x.groups)
		for _, p := range w.policies {
			_, gone := x.SetPolicy(p.Namespace, p.Name, nil)
			left -= len(gone)
		}
		if left != 0 {
			t.Fatalf("%d groups went without a word", left)
		}
		if len(x.groups)+len(x.namespaceGroups)+len(x.selectorGroups)+len(x.policies) > 0 {
			t.Fatalf("without policies %d groups are left", len(x.groups))
		}
	})
}

func step(t *rapid.T, w *world, x *Index) []string {
	ns := fmt.Sprint("n", rapid.IntRange(0, 2).Draw(t, "namespace"))
	gone := rapid.IntRange(0, 4).Draw(t, "gone") == 0
	switch rapid.IntRange(0, 2).Draw(t, "kind") {
	case 0:
		old := w.namespaces[ns]
		if gone {
			if old == nil {
				return nil
			}
			delete(w.namespaces, ns)
			changed := x.UpdateNamespace(old, nil)
			for name, p := range w.pods[ns] { // a namespace is empty when it is deleted
				delete(w.pods[ns], name)
				changed = append(changed, x.UpdatePod(p, nil)...)
			}
			return changed
		}
		now := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns, Labels: drawLabels(t, "namespace's label")}}
		w.namespaces[ns] = now
		return x.UpdateNamespace(old, now)
	case 1:
		if w.namespaces[ns] == nil {
			return nil
		}
		name := fmt.Sprint("p", rapid.IntRange(0, 3).Draw(t, "pod"))
		old := w.pods[ns][name]
		if gone {
			if old == nil {
				return nil
			}
			delete(w.pods[ns], name)
			return x.UpdatePod(old, nil)
		}
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: drawLabels(t, "label"),
			UID: types.UID(ns + name)}}
		p.Spec.HostNetwork = name == "p3"
		p.Spec.Containers = []v1.Container{{Ports: []v1.ContainerPort{{Name: strings.TrimPrefix(ns, "n0"),
			ContainerPort: 80}}}}
		if rapid.Bool().Draw(t, "has an address") {
			p.Status.PodIP = "10.0.0." + strings.TrimPrefix(name, "p")
		}
		if rapid.IntRange(0, 3).Draw(t, "failed") == 0 {
			p.Status.Phase = v1.PodFailed
		}
		if w.pods[ns] == nil {
			w.pods[ns] = map[string]*v1.Pod{}
		}
		w.pods[ns][name] = p
		return x.UpdatePod(old, p)
	}
	stepPolicy(t, w, x, ns, gone)
	return nil
}

// drawLabels returns a label with one of two values.
func drawLabels(t *rapid.T, what string) map[string]string {
	return map[string]string{"app": rapid.SampledFrom([]string{"a", "b"}).Draw(t, what)}
}

// stepPolicy changes or deletes a network policy of namespace ns.
func stepPolicy(t *rapid.T, w *world, x *Index, ns string, gone bool) {
	name := fmt.Sprint("np", rapid.IntRange(0, 2).Draw(t, "policy"))
	if gone {
		delete(w.policies, ns+"/"+name)
		x.SetPolicy(ns, name, nil)
		return
	}
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	p.Spec.PodSelector.MatchLabels = drawLabels(t, "selects")
	for range rapid.IntRange(0, 2).Draw(t, "peers") {
		var at networkingv1.NetworkPolicyPeer
		if rapid.Bool().Draw(t, "of pods") {
			at.PodSelector = &metav1.LabelSelector{MatchLabels: drawLabels(t, "of")}
		}
		if rapid.Bool().Draw(t, "of namespaces") {
			at.NamespaceSelector = &metav1.LabelSelector{}
			if rapid.Bool().Draw(t, "of some") {
				at.NamespaceSelector.MatchLabels = drawLabels(t, "in")
			}
		}
		if at.PodSelector == nil && at.NamespaceSelector == nil {
			at.IPBlock = &networkingv1.IPBlock{CIDR: "192.0.2.0/24"}
		}
		if rapid.Bool().Draw(t, "ingress") {
			p.Spec.Ingress = append(p.Spec.Ingress,
				networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{at}})
		} else {
			p.Spec.Egress = append(p.Spec.Egress,
				networkingv1.NetworkPolicyEgressRule{To: []networkingv1.NetworkPolicyPeer{at}})
		}
	}
	for range rapid.IntRange(0, 2).Draw(t, "rules by port") {
		rule := networkingv1.NetworkPolicyEgressRule{
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromString(
				rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "port")))}}}
		if rapid.Bool().Draw(t, "of UDP") {
			rule.Ports[0].Protocol = new(v1.ProtocolUDP)
		}
		switch rapid.IntRange(0, 2).Draw(t, "to") {
		case 0:
			rule.To = []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}}}
		case 1:
			// the named port is looked up in the selected pods
			rule.To = []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}
		}
		p.Spec.Egress = append(p.Spec.Egress, rule)
	}
	w.policies[ns+"/"+name] = p
	x.SetPolicy(ns, name, p)
}

func checkWorld(t *rapid.T, w *world, x *Index) {
	used := map[string]bool{}
	for _, p := range w.policies {
		sent, ok := x.SentPolicy(p.Namespace, p.Name)
		if !ok {
			t.Fatalf("policy %s/%s is not there", p.Namespace, p.Name)
		}
		groups := x.GroupsOfPolicy(p.Namespace, p.Name)
		peers, named := policyPeers(p), []string{}
		of := len(peers)
		for i, port := range egressPorts(p) {
			peers = append(peers, peer{namespaces: labels.Everything(), pods: labels.Everything(), port: port})
			named = append(named, port.String()+"="+groups[of+i])
		}
		if len(groups) != len(peers) || sent.Annotations[Annotation] != strings.Join(groups[:of], ",") ||
			sent.Annotations[PortAnnotation] != strings.Join(named, ",") {
			t.Fatalf("policy %s/%s has groups %v for %d peers: %v", p.Namespace, p.Name, groups, len(peers),
				sent.Annotations)
		}
		for i, g := range groups {
			used[g] = true
			e, ok := x.Group(g)
			if got, want := shown(e), w.meant(peers[i]); !ok || !slices.Equal(got, want) {
				t.Fatalf("peer %d of %s/%s is %v, want %v", i, p.Namespace, p.Name, got, want)
			}
		}
	}
	if len(used) != len(x.groups) {
		t.Fatalf("%d groups, of which %d are used", len(x.groups), len(used))
	}
	for _, pods := range w.pods {
		for _, pod := range pods {
			var want []string
			for _, p := range w.policies {
				if p.Namespace == pod.Namespace && !pod.Spec.HostNetwork &&
					p.Spec.PodSelector.MatchLabels["app"] == pod.Labels["app"] {
					want = append(want, p.Name)
				}
			}
			slices.Sort(want)
			if got := x.PoliciesOfPod(pod); !slices.Equal(got, want) {
				t.Fatalf("pod %s/%s is selected by %v, want %v", pod.Namespace, pod.Name, got, want)
			}
		}
	}
}

// A policy that allows cluster DNS by its usual label contains the addresses at which nodes answer.
func TestDNSIsAPeer(t *testing.T) {
	w := newWorld()
	w.namespaces[DNSNamespace] = &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: DNSNamespace,
		Labels: map[string]string{v1.LabelMetadataName: DNSNamespace}}}
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "dns"}}
	p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{v1.LabelMetadataName: DNSNamespace}},
		PodSelector:       &metav1.LabelSelector{MatchLabels: map[string]string{"k8s-app": "kube-dns"}}}}}}
	x := New(w)
	x.SetPolicy("n", "dns", p)
	name := x.GroupsOfPolicy("n", "dns")[0]
	expect := func(want string) {
		t.Helper()
		e, _ := x.Group(name)
		if got := fmt.Sprint(shown(e)); got != want {
			t.Errorf("the group is %s, want %s", got, want)
		}
	}
	expect("[]")
	if changed := x.SetDNSAddresses([]string{"10.96.0.10", "169.254.20.10"}); !slices.Equal(changed, []string{name}) {
		t.Errorf("changed %v", changed)
	}
	expect("[10.96.0.10 dns53 169.254.20.10 dns53]")
	x.SetPolicy("n", "dns", nil)
	x.SetPolicy("n", "dns", p)
	expect("[10.96.0.10 dns53 169.254.20.10 dns53]")
}

// Each named port of an egress rule without selectors has a group, with the pods of all namespaces
// that declare the port and protocol. Rules with selectors and ingress rules have no such group.
func TestNamedPortsWithoutSelectors(t *testing.T) {
	w := newWorld()
	pod := func(namespace, ip string, host bool, ports ...v1.ContainerPort) {
		w.namespaces[namespace] = &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p"}, Status: v1.PodStatus{PodIP: ip}}
		p.Spec.HostNetwork, p.Spec.Containers = host, []v1.Container{{Ports: ports}}
		w.pods[namespace] = map[string]*v1.Pod{"p": p}
	}
	pod("a", "10.0.0.1", false, v1.ContainerPort{Name: "http", ContainerPort: 8080})
	pod("b", "10.0.0.2", false, v1.ContainerPort{Name: "http", ContainerPort: 80, Protocol: v1.ProtocolTCP})
	pod("c", "10.0.0.3", false, v1.ContainerPort{Name: "http", ContainerPort: 81, Protocol: v1.ProtocolSCTP})
	pod("d", "10.0.0.4", true, v1.ContainerPort{Name: "http", ContainerPort: 80})
	pod("e", "10.0.0.5", false, v1.ContainerPort{ContainerPort: 80})
	named := func(name string, proto *v1.Protocol) []networkingv1.NetworkPolicyPort {
		return []networkingv1.NetworkPolicyPort{{Protocol: proto, Port: new(intstr.FromString(name))},
			{Port: new(intstr.FromInt32(443))}}
	}
	block := []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}}}
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "out"}}
	p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{
		{Ports: named("http", nil)}, {Ports: named("http", new(v1.ProtocolTCP)), To: block},
		{Ports: named("http", new(v1.ProtocolSCTP))},
		{Ports: named("metrics", nil), To: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}}}
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{Ports: named("http", nil)}}
	x := New(w)
	x.SetPolicy("a", "out", p)
	sent, _ := x.SentPolicy("a", "out")
	got := map[string]string{}
	for part := range strings.SplitSeq(sent.Annotations[PortAnnotation], ",") {
		port, group, _ := strings.Cut(part, "=")
		e, ok := x.Group(group)
		if !ok {
			t.Errorf("group %s of %s is not there", group, port)
			continue
		}
		got[port] = fmt.Sprint(shown(e))
	}
	want := map[string]string{"tcp/http": "[10.0.0.1 http8080 10.0.0.2 http80]", "sctp/http": "[10.0.0.3 http81]"}
	if !maps.Equal(got, want) {
		t.Errorf("ports %v, want %v", got, want)
	}
}
