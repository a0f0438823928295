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

// policies is a test's namespace with a server, and clients that try to reach it.
type policies struct {
	world
	server  *v1.Pod
	service *v1.Service
	other   string // a second namespace, with a client of the name "guest"
}

func (p policies) policy(name string, spec networkingv1.NetworkPolicySpec) {
	p.Helper()
	if _, err := p.cs.NetworkingV1().NetworkPolicies(p.ns).Create(p.Context(), &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{}); err != nil {
		p.Fatalf("creating policy %s: %v", name, err)
	}
}

func (p policies) without(name string) {
	p.Helper()
	if err := p.cs.NetworkingV1().NetworkPolicies(p.ns).Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
		p.Fatalf("deleting policy %s: %v", name, err)
	}
}

// asks waits until a client ("name", or "namespace/name") reaches an address, or until it does not any more.
func (p policies) asks(client, address string, reaches bool) {
	p.Helper()
	ns, name, ok := strings.Cut(client, "/")
	if !ok {
		ns, name = p.ns, client
	}
	testenv.Eventually(p, soon, func() error {
		out, err := testenv.Try(p, testenv.Lab().Config.BinDir+"/kctl", "-n", ns, "exec", name, "--", "wget", "-q", "-T", "2", "-O", "-", "http://"+address+"/")
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
	t.Parallel() // it waits for connections that nobody answers
	p := policies{world: begin(t), other: testenv.Namespace(t)}
	server := pod("server", hello)
	server.Spec.NodeName = "w2"
	server.Spec.Containers[0].Ports = []v1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	p.createPod(server)
	p.service = p.createService(front("server", v1.ServiceTypeClusterIP))
	for name, node := range map[string]string{"near": "w2", "far": "w1"} {
		c := sleeper(name)
		c.Spec.NodeName = node
		p.createPod(c)
	}
	guest := sleeper("guest")
	if _, err := p.cs.CoreV1().Pods(p.other).Create(t.Context(), guest, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.server = p.waitPod("server", isReady)
	for _, name := range []string{"near", "far"} {
		p.waitPod(name, isReady)
	}
	world{t, p.cs, p.other}.waitPod("guest", isReady)
	at := p.server.Status.PodIP + ":8080"
	everybody := []string{"near", "far", p.other + "/guest"}
	for _, c := range everybody {
		p.asks(c, at, true)
		p.asks(c, p.service.Spec.ClusterIP, true)
	}
	t.Run("ingress", func(t *testing.T) { p.T = t; p.ingress(at, everybody) })
	t.Run("egress", func(t *testing.T) { p.T = t; p.egress(at) })
	t.Run("first packet", func(t *testing.T) { p.T = t; p.firstPacket(at) })
}

func (p policies) ingress(at string, everybody []string) {
	p.policy("deny", networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}})
	for _, c := range everybody {
		p.asks(c, at, false)
		p.asks(c, p.service.Spec.ClusterIP, false)
	}
	p.counted()
	chosen := metav1.LabelSelector{MatchLabels: map[string]string{"app": "server"}}
	allow := func(name string, peer networkingv1.NetworkPolicyPeer, ports ...networkingv1.NetworkPolicyPort) {
		p.Helper()
		p.policy(name, networkingv1.NetworkPolicySpec{PodSelector: chosen, Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{peer}, Ports: ports}}})
	}
	allow("label", networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "near"}}},
		networkingv1.NetworkPolicyPort{Port: ptr(intstr.FromString("http"))})
	p.asks("near", at, true)
	p.asks("near", p.service.Spec.ClusterIP, true)
	p.asks("far", at, false)
	allow("namespace", networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{v1.LabelMetadataName: p.other}}})
	p.asks(p.other+"/guest", at, true)
	p.asks("far", at, false)
	allow("block", networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: p.pod("far").Status.PodIP + "/32"}},
		networkingv1.NetworkPolicyPort{Port: ptr(intstr.FromInt32(8000)), EndPort: ptr(int32(8100))})
	p.asks("far", at, true)
	for _, name := range []string{"label", "namespace", "block"} {
		p.without(name)
	}
	for _, c := range everybody {
		p.asks(c, at, false)
	}
	p.without("deny")
	for _, c := range everybody {
		p.asks(c, at, true)
	}
}

// counted looks at what is told of the server: which policy isolates it, and that packets were dropped for that.
func (p policies) counted() {
	p.Helper()
	testenv.Eventually(p, soon, func() error { // nodes read what they count now and then
		out, err := testenv.Try(p, testenv.Lab().Config.BinDir+"/kctl", "-n", p.ns, "net", "policies", "-o", "json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return serverIsTold(out)
	})
}

// serverIsTold wants an output to tell that the server is isolated on w2 by policy deny alone, and what that held back.
func serverIsTold(out string) error {
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
			if u.DroppedIn.Packets == 0 || u.DroppedIn.Bytes == 0 || u.DroppedOut.Packets != 0 || u.Node != "w2" || !slices.Equal(u.IngressPolicies, []string{"deny"}) || len(u.EgressPolicies) != 0 {
				return fmt.Errorf("clients were held back by policy deny on node w2, and told is %+v", u)
			}
			return nil
		}
	}
	return fmt.Errorf("nothing is told of the server: %s", out)
}

func (p policies) egress(at string) {
	far := metav1.LabelSelector{MatchLabels: map[string]string{"app": "far"}}
	p.policy("mute", networkingv1.NetworkPolicySpec{PodSelector: far, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}})
	p.asks("far", at, false)
	p.asks("near", at, true)
	p.policy("named", networkingv1.NetworkPolicySpec{PodSelector: far, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}, Egress: []networkingv1.NetworkPolicyEgressRule{{
		To:    []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "server"}}}},
		Ports: []networkingv1.NetworkPolicyPort{{Port: ptr(intstr.FromString("http"))}}}}})
	p.asks("far", at, true)
	p.asks("far", p.service.Spec.ClusterIP, true)
	p.without("named")
	p.asks("far", at, false)
	p.without("mute")
	p.asks("far", at, true)
}

// firstPacket has a pod knock as the first thing that it does, on each node.
func (p policies) firstPacket(at string) {
	p.policy("eager", networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "eager"}}, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}})
	for _, node := range []string{"w1", "w2"} {
		for i := range 3 {
			name := fmt.Sprintf("eager-%s-%d", node, i)
			c := pod(name, tools, "sh", "-c", "wget -q -T 2 -O - http://"+at+"/ && echo reached || echo held; sleep 1000000")
			c.Labels["app"], c.Spec.NodeName = "eager", node
			p.createPod(c)
		}
	}
	for _, c := range p.pods("eager") {
		p.waitPod(c.Name, isReady)
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
