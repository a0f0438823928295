package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/test/testenv"
)

// policyTest is a test's namespace with a server, and clients that try to reach it.
type policyTest struct {
	testNamespace
	server  *v1.Pod
	service *v1.Service
	other   string // a second namespace, with a client of the name "guest"
}

func (p policyTest) createPolicy(name string, spec networkingv1.NetworkPolicySpec) {
	p.Helper()
	if _, err := p.cs.NetworkingV1().NetworkPolicies(p.ns).Create(p.Context(),
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec},
		metav1.CreateOptions{}); err != nil {
		p.Fatalf("creating policy %s: %v", name, err)
	}
}

func (p policyTest) deletePolicy(name string) {
	p.Helper()
	if err := p.cs.NetworkingV1().NetworkPolicies(p.ns).Delete(context.Background(), name,
		metav1.DeleteOptions{}); err != nil {
		p.Fatalf("deleting policy %s: %v", name, err)
	}
}

// awaitReachable waits until a client ("name", or "namespace/name") can reach an address, or cannot
// reach it.
func (p policyTest) awaitReachable(client, address string, reaches bool) {
	p.Helper()
	ns, name, ok := strings.Cut(client, "/")
	if !ok {
		ns, name = p.ns, client
	}
	testenv.Eventually(p, soon, func() error {
		out, err := testenv.Try(p, testenv.Lab().Config.BinDir+"/kctl", "-n", ns, "exec", name, "--", "wget", "-q",
			"-T", "2", "-O", "-", "http://"+address+"/")
		if reaches && err != nil {
			return fmt.Errorf("%s to %s: %w: %s", client, address, err, out)
		}
		if !reaches && err == nil {
			return errors.New(client + " reaches " + address)
		}
		return nil
	})
}

// Network policies hold in a cluster: deny all, by label, by namespace, by block, by a port's name, of egress, through
// a Service and on one node as across nodes; and they hold before a pod does anything.
func TestNetworkPolicies(t *testing.T) {
	t.Parallel() // it waits for connections that time out
	p := policyTest{testNamespace: newNamespace(t), other: testenv.Namespace(t)}
	server := newPod("server", hello)
	server.Spec.NodeName = "w2"
	server.Spec.Containers[0].Ports = []v1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	p.createPod(server)
	p.service = p.createService(webService("server", v1.ServiceTypeClusterIP))
	for name, node := range map[string]string{"near": "w2", "far": "w1"} {
		c := sleeperPod(name)
		c.Spec.NodeName = node
		p.createPod(c)
	}
	guest := sleeperPod("guest")
	if _, err := p.cs.CoreV1().Pods(p.other).Create(t.Context(), guest, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.server = p.awaitPod("server", requireReady)
	for _, name := range []string{"near", "far"} {
		p.awaitPod(name, requireReady)
	}
	testNamespace{t, p.cs, p.other}.awaitPod("guest", requireReady)
	at := p.server.Status.PodIP + ":8080"
	everybody := []string{"near", "far", p.other + "/guest"}
	for _, c := range everybody {
		p.awaitReachable(c, at, true)
		p.awaitReachable(c, p.service.Spec.ClusterIP, true)
	}
	t.Run("ingress", func(t *testing.T) { p.T = t; p.checkIngress(at, everybody) })
	t.Run("egress", func(t *testing.T) { p.T = t; p.checkEgress(at) })
	t.Run("first packet", func(t *testing.T) { p.T = t; p.checkFirstPacket(at) })
}

func (p policyTest) checkIngress(at string, everybody []string) {
	p.createPolicy("deny",
		networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}})
	for _, c := range everybody {
		p.awaitReachable(c, at, false)
		p.awaitReachable(c, p.service.Spec.ClusterIP, false)
	}
	p.checkDropCounts()
	chosen := metav1.LabelSelector{MatchLabels: map[string]string{"app": "server"}}
	allow := func(name string, peer networkingv1.NetworkPolicyPeer, ports ...networkingv1.NetworkPolicyPort) {
		p.Helper()
		p.createPolicy(name, networkingv1.NetworkPolicySpec{PodSelector: chosen,
			Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{peer},
				Ports: ports}}})
	}
	allow("label",
		networkingv1.NetworkPolicyPeer{
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "near"}}},
		networkingv1.NetworkPolicyPort{Port: new(intstr.FromString("http"))})
	p.awaitReachable("near", at, true)
	p.awaitReachable("near", p.service.Spec.ClusterIP, true)
	p.awaitReachable("far", at, false)
	allow("namespace",
		networkingv1.NetworkPolicyPeer{
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{v1.LabelMetadataName: p.other}}})
	p.awaitReachable(p.other+"/guest", at, true)
	p.awaitReachable("far", at, false)
	allow("block",
		networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: p.getPod("far").Status.PodIP + "/32"}},
		networkingv1.NetworkPolicyPort{Port: new(intstr.FromInt32(8000)), EndPort: new(int32(8100))})
	p.awaitReachable("far", at, true)
	for _, name := range []string{"label", "namespace", "block"} {
		p.deletePolicy(name)
	}
	for _, c := range everybody {
		p.awaitReachable(c, at, false)
	}
	p.deletePolicy("deny")
	for _, c := range everybody {
		p.awaitReachable(c, at, true)
	}
}

// checkDropCounts checks the reported isolation of the server and the count of packets that its
// policy dropped.
func (p policyTest) checkDropCounts() {
	p.Helper()
	testenv.Eventually(p, soon, func() error { // nodes read their counters periodically
		out, err := testenv.Try(p, testenv.Lab().Config.BinDir+"/kctl", "-n", p.ns, "net", "policies", "-o", "json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return requireIsolation(out)
	})
}

// requireIsolation returns an error unless the output reports that only policy deny isolates the
// server on w2, and the packets that the policy dropped.
func requireIsolation(out string) error {
	var told []struct {
		Pod, Node       string
		IngressPolicies []string
		EgressPolicies  []string
		DroppedIn       struct{ Packets, Bytes uint64 }
		DroppedOut      struct{ Packets uint64 }
	}
	if err := json.Unmarshal([]byte(out), &told); err != nil {
		return fmt.Errorf("kctl net policies: %w: %s", err, out)
	}
	for _, u := range told {
		if u.Pod == "server" {
			if u.DroppedIn.Packets == 0 || u.DroppedIn.Bytes == 0 || u.DroppedOut.Packets != 0 || u.Node != "w2" ||
				!slices.Equal(u.IngressPolicies, []string{"deny"}) || len(u.EgressPolicies) != 0 {
				return fmt.Errorf("policy deny dropped packets of clients on node w2, and the report is %+v", u)
			}
			return nil
		}
	}
	return fmt.Errorf("there is no report about the server: %s", out)
}

func (p policyTest) checkEgress(at string) {
	far := metav1.LabelSelector{MatchLabels: map[string]string{"app": "far"}}
	p.createPolicy("mute", networkingv1.NetworkPolicySpec{PodSelector: far,
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}})
	p.awaitReachable("far", at, false)
	p.awaitReachable("near", at, true)
	p.createPolicy("named", networkingv1.NetworkPolicySpec{PodSelector: far,
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
		Egress: []networkingv1.NetworkPolicyEgressRule{{
			To: []networkingv1.NetworkPolicyPeer{
				{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "server"}}}},
			Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromString("http"))}}}}})
	p.awaitReachable("far", at, true)
	p.awaitReachable("far", p.service.Spec.ClusterIP, true)
	p.deletePolicy("named")
	p.awaitReachable("far", at, false)
	p.deletePolicy("mute")
	p.awaitReachable("far", at, true)
}

// checkFirstPacket creates a pod on each node that connects to the server as its first action.
func (p policyTest) checkFirstPacket(at string) {
	p.createPolicy("eager",
		networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{
			MatchLabels: map[string]string{"app": "eager"}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}})
	for _, node := range []string{"w1", "w2"} {
		for i := range 3 {
			name := fmt.Sprintf("eager-%s-%d", node, i)
			c := newPod(name, tools, "sh", "-c", "wget -q -T 2 -O - http://"+at+
				"/ && echo reached || echo held; sleep 1000000")
			c.Labels["app"], c.Spec.NodeName = "eager", node
			p.createPod(c)
		}
	}
	for _, c := range p.livingPods("eager") {
		p.awaitPod(c.Name, requireReady)
		testenv.Eventually(p, soon, func() error {
			out, err := testenv.Try(p, testenv.Lab().Config.BinDir+"/kctl", "-n", p.ns, "logs", c.Name)
			if err != nil {
				return err
			}
			if strings.Contains(out, "reached") {
				p.Fatalf("the first packet of %s passed: %s", c.Name, out)
			}
			if !strings.Contains(out, "held") {
				return fmt.Errorf("%s says %q", c.Name, out)
			}
			return nil
		})
	}
}
