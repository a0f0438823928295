package policy

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/test/testenv/space"
)

// inNode runs a program in the node's namespace.
func (r *rig) inNode(t *testing.T, env []string, in string, line ...string) {
	t.Helper()
	must(t, space.In(r.node, func() error {
		cmd := exec.Command(line[0], line[1:]...)
		cmd.Env, cmd.Stdin = append(os.Environ(), env...), strings.NewReader(in)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", line, err, out)
		}
		return nil
	}))
}

// to returns an attempt to connect from a place to an address that is not the server's own.
func (r *rig) to(t *testing.T, from *place, client int, ip string, port int) *try {
	t.Helper()
	a := &try{from: from, client: from.addresses[client], server: addrs(ip)[0], proto: "tcp", port: port}
	must(t, space.In(from.ns, a.begin))
	t.Cleanup(a.end)
	return a
}

// Policies are enforced behind rules of other programs: with a Service implemented by iptables
// rules of both forms, with rules that accept before Keelson's, and with a host port of the plugin
// portmap. A policy evaluates the real peer and the real port.
func TestBehindForeignRules(t *testing.T) {
	for _, program := range []string{"iptables-legacy", "iptables-nft"} {
		t.Run(program, func(t *testing.T) {
			if _, err := exec.LookPath(program); err != nil {
				t.Skip(err)
			}
			r := settled(t)
			for _, rule := range []string{ // as kube-proxy writes them
				"-t nat -N KUBE-SERVICES", "-t nat -N KUBE-SVC", "-t nat -A PREROUTING -j KUBE-SERVICES",
				"-t nat -A OUTPUT -j KUBE-SERVICES",
				"-t nat -A KUBE-SERVICES -d 10.96.0.1 -p tcp --dport 443 -j KUBE-SVC",
				"-t nat -A KUBE-SVC -p tcp -j DNAT --to-destination 10.88.0.10:80",
				"-t nat -A KUBE-SERVICES -d 10.96.0.2 -p tcp --dport 80 -j DNAT --to-destination 10.88.0.10:8080",
				"-t nat -A KUBE-SERVICES -d 10.96.0.3 -p tcp --dport 80 -j DNAT --to-destination 10.89.0.7:8080",
				"-t nat -A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE", "-I FORWARD -j ACCEPT"} {
				r.inNode(t, nil, "", append([]string{program, "-w"}, strings.Fields(rule)...)...)
			}
			r.hostPort(t)
			allow := denyAll("a")
			allow.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{
				{Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(80))}},
					From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.89.0.7/32"}},
						{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p1"}}}}}}
			// The policies name the Service's own address and port, which do not count, and the
			// selected pod.
			allow.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{
				{To: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.96.0.0/16"}}}},
				{To: []networkingv1.NetworkPolicyPeer{
					{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p0"}}}},
					Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(80))}}}}
			r.put(allow)
			r.start(t, nil)
			r.guard(t)
			r.settle(t)
			p1, p2, far, alien := r.places[1], r.places[2], r.places[4], r.places[5]
			held := map[string]*try{
				"a stranger by the Service":            r.to(t, alien, 0, "10.96.0.1", 443),
				"a pod of another namespace":           r.to(t, p2, 0, "10.96.0.1", 443),
				"a port that no policy names":          r.to(t, far, 0, "10.96.0.2", 80),
				"a Service whose address alone is may": r.to(t, p1, 0, "10.96.0.3", 80),
				"a stranger by the host port":          r.to(t, alien, 0, "10.89.0.1", 9080),
				"a host port to a port nobody named":   r.to(t, far, 0, "10.89.0.1", 9081),
			}
			for what, x := range map[string]*try{"a peer by the Service": r.to(t, far, 0, "10.96.0.1", 443),
				"a pod by the Service":    r.to(t, p1, 0, "10.96.0.1", 443),
				"whoever has no policy":   r.to(t, p2, 0, "10.96.0.3", 80),
				"a peer by the host port": r.to(t, far, 0, "10.89.0.1", 9080)} {
				if !x.reached(patience) {
					t.Errorf("%s does not get through", what)
				}
			}
			for what, x := range held {
				if x.reached(0) {
					t.Errorf("%s gets through", what)
				}
			}
			r.counted(t)
		})
	}
}

// hostPort forwards ports 9080 and 9081 of the node to 80 and 8080 of the first pod.
func (r *rig) hostPort(t *testing.T) {
	t.Helper()
	const plugin = "../../bin/cni/portmap"
	if _, err := os.Stat(plugin); err != nil {
		t.Logf("the plugin portmap is not built, a rule like its own stands in for it: %v", err)
		for from, to := range map[string]string{"9080": "80", "9081": "8080"} {
			r.nft(t, "add table ip portmap; add chain ip portmap pre { type nat hook prerouting priority dstnat; }; "+
				"add rule ip portmap pre ip daddr 10.89.0.1 tcp dport "+
				from+" dnat to 10.88.0.10:"+to)
		}
		return
	}
	r.inNode(t, []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c0",
		fmt.Sprintf("CNI_NETNS=/proc/%d/fd/%d", os.Getpid(), int(r.places[0].ns)), "CNI_IFNAME=eth0",
		"CNI_PATH=../../bin/cni"}, `{"cniVersion":"1.0.0","name":"net","type":"portmap",
		"capabilities":{"portMappings":true},"snat":true,"runtimeConfig":{"portMappings":[{"hostPort":9080,"containerPort":80,"protocol":"tcp"},{"hostPort":9081,"containerPort":8080,"protocol":"tcp"}]},
		"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.88.0.10/24","interface":0}]}}`, plugin)
}

// counted checks the metrics of dropped packets: by direction and pod, and only for isolated pods.
func (r *rig) counted(t *testing.T) {
	t.Helper()
	var page bytes.Buffer
	must(t, space.In(r.node, func() error { return r.e.WriteMetrics(t.Context(), &page) }))
	rows := map[string]int{}
	for line := range strings.Lines(page.String()) {
		if name, n, ok := strings.Cut(strings.TrimSpace(line), "} "); ok {
			rows[name+"}"] = atoi(n)
		}
	}
	at := func(name, pod, direction string) int {
		n, ok := rows[fmt.Sprintf("%s{namespace=%q,pod=%q,direction=%q}", name, "a", pod, direction)]
		if !ok {
			t.Errorf("no row %s of %s, %s:\n%s", name, pod, direction, page.String())
		}
		return n
	}
	if in, out := at(MetricPackets, "p0", "ingress"), at(MetricPackets, "p1", "egress"); in < 5 || out < 1 ||
		at(MetricPackets, "p0", "egress") != 0 {
		t.Errorf("%d packets to p0 were dropped, and %d of p1: five connections and one were", in, out)
	}
	before := at(MetricPackets, "p0", "ingress")
	if in := at(MetricBytes, "p0", "ingress"); in < 5*40 {
		t.Errorf("%d bytes to p0 were dropped", in)
	}
	if len(rows) != 8 {
		t.Errorf("two pods are isolated both ways, and %d rows speak of them:\n%s", len(rows), page.String())
	}
	// When another pod gets the address, its counter starts at zero.
	p0 := r.places[0]
	next := &place{name: "next", namespace: "a", labels: map[string]string{}, addresses: p0.addresses, local: true}
	r.cluster.Put(next.object())
	must(t, r.e.Guard(t.Context(), next.object(), next.strings()))
	page.Reset()
	must(t, space.In(r.node, func() error { return r.e.WriteMetrics(t.Context(), &page) }))
	_, n, ok := strings.Cut(page.String(), MetricPackets+`{namespace="a",pod="next",direction="ingress"} `)
	n, _, _ = strings.Cut(n, "\n")
	if !ok || atoi(n) >= before || strings.Contains(page.String(), `pod="p0"`) { // clients retry in the meantime
		t.Errorf("the address is another pod's, %d packets were dropped of the one before:\n%s", before, page.String())
	}
}
