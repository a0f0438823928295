package nettrace

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func aPod(namespace, name, ip, node string, labels ...string) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{}}}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		p.Labels[k] = v
	}
	p.Spec.NodeName, p.Status.PodIP, p.Spec.DNSPolicy = node, ip, corev1.DNSClusterFirst
	p.Spec.Containers = []corev1.Container{{Name: "c",
		Ports: []corev1.ContainerPort{{Name: "pg", ContainerPort: 5432}}}}
	return p
}

func aNode(name, cidr, ip string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDR: cidr}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return n
}

// aWorld has a pod shop/web-0 on w1, and a Service data/db with a pod on each of w1 and w2.
func aWorld() *World {
	web := aPod("shop", "web-0", "10.244.1.5", "w1", "app=web")
	w := &World{Domain: "cluster.local", Pod: &web,
		Nodes: []corev1.Node{aNode("w1", "10.244.1.0/24", "192.0.2.1"), aNode("w2", "10.244.2.0/24", "192.0.2.2")},
		Pods: []corev1.Pod{aPod("data", "db-0", "10.244.1.7", "w1", "app=db"),
			aPod("data", "db-1", "10.244.2.7", "w2", "app=db")}}
	for _, ns := range []string{"shop", "data", "kube-system"} {
		w.Namespaces = append(w.Namespaces, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns,
			Labels: map[string]string{corev1.LabelMetadataName: ns}}})
	}
	w.Services = []corev1.Service{{ObjectMeta: metav1.ObjectMeta{Namespace: "data", Name: "db"},
		Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.3.4", ClusterIPs: []string{"10.96.3.4"}, Selector: map[string]string{"app": "db"},
			Ports: []corev1.ServicePort{{Name: "sql", Port: 5432, Protocol: corev1.ProtocolTCP,
				TargetPort: intstr.FromString("pg")}}}}}
	s := discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "data", Name: "db-1",
		Labels: map[string]string{discoveryv1.LabelServiceName: "db"}},
		Ports: []discoveryv1.EndpointPort{{Name: new("sql"), Port: new(int32(5432)),
			Protocol: new(corev1.ProtocolTCP)}}}
	for i := range w.Pods {
		p := &w.Pods[i]
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{p.Status.PodIP},
			NodeName: &p.Spec.NodeName, Hostname: &p.Name,
			Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "data", Name: p.Name}})
	}
	w.Slices = []discoveryv1.EndpointSlice{s}
	w.Ranges = []networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}}}
	return w
}

func aPolicy(namespace, name string, spec networkingv1.NetworkPolicySpec) networkingv1.NetworkPolicy {
	return networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec}
}

// traced is a connection, in a world that differs from aWorld.
type traced struct {
	to    string
	with  func(*World)
	stops string
	says  []string // of the report as it is printed
}

// ways are connections that no policy is about.
func ways() map[string]traced {
	return map[string]traced{
		"by name": {"db.data:5432", nil, "", []string{"db.data.svc.cluster.local: service data/db", "10.96.3.4",
			"5432/TCP leads to port pg", "2 of 2 ready",
			"pods 10.244.2.0/24 are behind node w2, 192.0.2.2", "on the same node w1", "no policy isolates either side",
			"nothing stands in the way"}},
		"in another namespace": {"db", nil, "name",
			[]string{"NXDOMAIN", "asked for db.shop.svc.cluster.local", "of that name in namespace data",
				"ask for db.data"}},
		"by the whole name": {"db.data.svc.cluster.local.", nil, "", []string{"service data/db"}},
		"outside":           {"example.com", nil, "", []string{"no name of the cluster", "goes on outside"}},
		"no such port":      {"db.data:80", nil, "rule", []string{"has no port 80/TCP", "it has 5432/TCP"}},
		"another protocol":  {"db.data:5432/udp", nil, "rule", []string{"has no port 5432/UDP"}},
		"by the Service's": {"10.96.3.4:5432", nil, "",
			[]string{"the cluster address of service data/db", "2 of 2 ready"}},
		"by the load balancer's": {"192.0.2.90:5432", func(w *World) {
			w.Services[0].Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.90"}}
			w.Services[0].Annotations = map[string]string{"keelson.dev/announced-by": "w2"}
		}, "", []string{"the load balancer's address of service data/db; for clients outside node w2 answers for it",
			"2 of 2 ready"}},
		"by the pod's": {"10.244.2.7:5432", nil, "", []string{"is pod data/db-1", "behind node w2"}},
		"by a node's":  {"192.0.2.2:22", nil, "", []string{"is node w2"}},
		"no pod has it": {"10.244.2.9:80", nil, "route",
			[]string{"no pod has the address 10.244.2.9 of the range of node w2", "kctl get pods -A -o wide"}},
		"no Service has it": {"10.96.0.99:80", nil, "route",
			[]string{"no Service has the address 10.96.0.99", "no route", "kctl get services -A"}},
		"the other family": {"[2001:db8::1]:80", nil, "route",
			[]string{"no route to 2001:db8::1: the pod has no address of that family", "connect to an IPv4 address"}},
		"loopback":        {"127.0.0.1:80", nil, "route", []string{"127.0.0.1 is the pod itself"}},
		"multicast":       {"224.0.0.1:80", nil, "route", []string{"no route to 224.0.0.1"}},
		"a reserved name": {"shop.invalid:80", nil, "name", []string{"shop.invalid does not resolve", "RFC 6761"}},
		"a name without addresses": {"example.com:443", func(w *World) {
			w.Reach = &Reach{Unresolved: "no such host"}
		}, "name",
			[]string{"example.com does not resolve on node w1: no such host"}},
		"a name without a route": {"example.com:443", func(w *World) {
			w.Reach = &Reach{Addresses: []string{"203.0.113.9"}, NoRoute: "network is unreachable"}
		}, "route",
			[]string{"node w1 of the pod has no route to example.com (203.0.113.9)", "network is unreachable"}},
		"no route to the world": {"203.0.113.9:443", func(w *World) {
			w.Reach = &Reach{NoRoute: "network is unreachable"}
		}, "route",
			[]string{"node w1 of the pod has no route to 203.0.113.9"}},
		"to the world": {"203.0.113.9:443", nil, "", []string{"leaves the cluster, with the node's address"}},
		"not scheduled": {"db.data", func(w *World) {
			w.Pod.Status.PodIP = ""
		}, "pod", []string{"has no address", "kctl -n shop why pod/web-0"}},
		"dnsPolicy": {"db.data", func(w *World) {
			w.Pod.Spec.DNSPolicy = corev1.DNSDefault
		}, "name", []string{"its dnsPolicy is Default"}},
		"in the node's network": {"db.data", func(w *World) {
			w.Pod.Spec.HostNetwork = true
		}, "name", []string{"ClusterFirstWithHostNet"}},
		"nobody ready": {"db.data", func(w *World) {
			for i := range w.Slices[0].Endpoints {
				w.Slices[0].Endpoints[i].Conditions.Ready = new(false)
			}
		}, "endpoint", []string{"none of 2 is ready", "kctl -n data why service/db"}},
		"no endpoints": {"db.data", func(w *World) { w.Slices = nil }, "endpoint", []string{"has none"}},
		"the last resort": {"db.data", func(w *World) {
			w.Slices[0].Endpoints = w.Slices[0].Endpoints[1:]
			w.Slices[0].Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true),
				Terminating: new(true)}
		}, "", []string{"1 of 1 ready"}},
		"headless": {"db-1.db.data:5432", func(w *World) {
			w.Services[0].Spec.ClusterIP, w.Services[0].Spec.ClusterIPs = "None", []string{"None"}
		}, "",
			[]string{"the service is headless", "1 of 1 ready", "pod data/db-1"}},
		"another name": {"db.data", func(w *World) {
			w.Services[0].Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName,
				ExternalName: "db.example.com"}
		}, "", []string{"another name for db.example.com", "outside of the cluster"}},
		"local traffic": {"db.data", func(w *World) {
			w.Services[0].Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
			w.Pod.Spec.NodeName = "w3"
			w.Nodes = append(w.Nodes, aNode("w3", "10.244.3.0/24", "192.0.2.3"))
		}, "endpoint", []string{"internalTrafficPolicy is Local, and node w3"}},
		"a node is down": {"db.data", func(w *World) {
			w.Nodes[1].Status.Conditions[0].Status = corev1.ConditionUnknown
		}, "", []string{"1 of 2 are reached", "node w2 is not Ready", "some connections get through"}},
		"no way": {"10.244.2.7:5432", func(w *World) {
			w.Nodes = w.Nodes[:1]
		}, "route", []string{"node w2 is gone"}},
		"no rights": {"db.data", func(w *World) {
			w.Policies, w.Unread = nil, []string{Policies}
		}, "", []string{"not judged: policies", "not judged, for you may not read: networkpolicies"}},
		"steers no tty": {"db\x1b[2J.data", nil, "name", []string{"db?[2j"}},
	}
}

// policed are connections that policies are about.
func policed() map[string]traced {
	ofShop := []networkingv1.NetworkPolicyPeer{
		{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: "shop"}},
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}
	toDNS := networkingv1.NetworkPolicyEgressRule{
		To: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{},
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"k8s-app": "kube-dns"}}}},
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: new(corev1.ProtocolUDP), Port: new(intstr.FromInt32(53))}}}
	in := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	out := []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
	return map[string]traced{
		"ingress is shut": {"db.data:5432", func(w *World) {
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "deny",
				networkingv1.NetworkPolicySpec{PolicyTypes: in})}
		}, "policy", []string{"pod data/db-0 does not take it: policy deny",
			"kctl -n data apply -f FILE   # a further NetworkPolicy for pods app=db with a rule of ingress from pods " +
				"app=web of namespace shop, port 5432/TCP; leave policy deny as it is"}},
		"ingress is open": {"db.data:5432", func(w *World) {
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "deny",
				networkingv1.NetworkPolicySpec{PolicyTypes: in}),
				aPolicy("data", "shop", networkingv1.NetworkPolicySpec{PolicyTypes: in,
					Ingress: []networkingv1.NetworkPolicyIngressRule{{From: ofShop,
						Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromString("pg"))}}}}})}
		}, "", []string{"taking it is allowed by policy shop"}},
		"another port is open": {"10.244.2.7:22", func(w *World) {
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "shop",
				networkingv1.NetworkPolicySpec{PolicyTypes: in,
					Ingress: []networkingv1.NetworkPolicyIngressRule{{From: ofShop,
						Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(1000)),
							EndPort: new(int32(6000))}}}}})}
		}, "policy", []string{"does not take it"}},
		"one is shut": {"db.data:5432", func(w *World) {
			w.Pods[1].Labels["role"] = "replica"
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "deny",
				networkingv1.NetworkPolicySpec{PolicyTypes: in,
					PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"role": "replica"}}})}
		}, "", []string{"only 1 of 2 are allowed", "some hang"}},
		"names are shut": {"db.data", func(w *World) {
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("shop", "deny",
				networkingv1.NetworkPolicySpec{PolicyTypes: out})}
		}, "name", []string{"may not ask for names", "k8s-app=kube-dns"}},
		"egress is shut": {"db.data", func(w *World) {
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("shop", "dns",
				networkingv1.NetworkPolicySpec{PolicyTypes: out,
					Egress: []networkingv1.NetworkPolicyEgressRule{toDNS}})}
		}, "policy", []string{"pod shop/web-0 may not send to 10.244.1.7:5432",
			"kctl -n shop apply -f FILE   # a further NetworkPolicy for pods app=web with a rule of egress to pods " +
				"app=db of namespace data", "leave policy dns as it is"}},
		"a block with a hole": {"10.244.2.7:5432", func(w *World) {
			block := &networkingv1.IPBlock{CIDR: "10.244.0.0/16", Except: []string{"10.244.2.0/24"}}
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("shop", "block",
				networkingv1.NetworkPolicySpec{Egress: []networkingv1.NetworkPolicyEgressRule{
					{To: []networkingv1.NetworkPolicyPeer{{IPBlock: block}}}}})}
		}, "policy", []string{"may not send"}},
	}
}

// Where a connection stops, and what is said of it.
func TestTrace(t *testing.T) {
	for name, c := range ways() {
		t.Run(name, func(t *testing.T) { trace(t, c) })
	}
	for name, c := range policed() {
		t.Run(name, func(t *testing.T) { trace(t, c) })
	}
}

func trace(t *testing.T, c traced) {
	w := aWorld()
	if c.with != nil {
		c.with(w)
	}
	target, err := ParseTarget(c.to)
	if err != nil {
		t.Fatal(err)
	}
	r := Trace(w, target)
	var b strings.Builder
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
	if r.Stops != c.stops {
		t.Errorf("it stops at %q, want %q", r.Stops, c.stops)
	}
	for _, want := range c.says {
		if !strings.Contains(b.String(), want) {
			t.Errorf("nothing is said of %q", want)
		}
	}
	if t.Failed() {
		t.Log(b.String())
	}
}

func TestParseTarget(t *testing.T) {
	for in, want := range map[string]Target{
		"db": {Host: "db"}, "db:80": {Host: "db", Port: 80},
		"db:53/udp": {Host: "db", Port: 53, Proto: corev1.ProtocolUDP}, "svc/db:80": {Host: "db", Port: 80},
		"service/db": {Host: "db"},
		"https://a.example/b?c=d": {Host: "a.example", Port: 443, Proto: corev1.ProtocolTCP, Scheme: "https",
			Path: "/b?c=d"},
		"HTTP://[fd00::1]:8": {Host: "fd00::1", Port: 8, Proto: corev1.ProtocolTCP, Scheme: "http", Path: "/"},
		"10.0.0.1":           {Host: "10.0.0.1"}, "10.0.0.1:8": {Host: "10.0.0.1", Port: 8},
		"fd00::1": {Host: "fd00::1"}, "[fd00::1]:8": {Host: "fd00::1", Port: 8},
	} {
		if got, err := ParseTarget(in); err != nil || got != want {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", ":80", "db:0", "db:70000", "db:http", "db:80/icmp", "db:", "ftp://a.example",
		"http://", "http://a:0/", "http://a:70000", "http://a b/"} {
		if got, err := ParseTarget(in); err == nil {
			t.Errorf("%q is taken for %+v", in, got)
		}
	}
}
