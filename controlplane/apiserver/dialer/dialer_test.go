package dialer

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
)

// objects is the objects of a cluster by resource.
type objects map[string][]api.Object

func (o objects) Get(_ context.Context, resource, namespace, name string) (api.Object, bool) {
	for _, one := range o[resource] {
		if one.GetNamespace() == namespace && one.GetName() == name {
			return one, true
		}
	}
	return nil, false
}

func (o objects) List(_ context.Context, resource, namespace string, _ bool) ([]api.Object, error) {
	return slices.DeleteFunc(slices.Clone(o[resource]), func(x api.Object) bool {
		return namespace != "" && x.GetNamespace() != namespace
	}), nil
}

// agents records the connections that were requested.
type agents struct {
	asked []string
	fail  map[string]bool
}

func (a *agents) DialNode(_ context.Context, node string, pod types.UID, address string, port int32) (net.Conn, error) {
	a.asked = append(a.asked, node+" "+string(pod)+" "+net.JoinHostPort(address, strconv.Itoa(int(port))))
	if a.fail[address] {
		return nil, errors.New("connection refused")
	}
	near, far := net.Pipe()
	go func() { defer far.Close(); _, _ = io.Copy(io.Discard, far) }()
	return near, nil
}

func meta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name)}
}

func pod(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: meta("shop", name), Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{PodIP: ip}}
}

func slice(service string, port int32, ends ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: meta("shop", service+"-1"), AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: ends,
		Ports: []discoveryv1.EndpointPort{{Name: new("https"), Port: &port},
			{Name: new("dns"), Port: new(int32(53)), Protocol: new(corev1.ProtocolUDP)}}}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: service}
	return s
}

func end(ip, pod string) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{ip}}
	if pod != "" {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: pod}
	}
	return e
}

func service(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: meta("shop", name), Spec: corev1.ServiceSpec{
		Ports: []corev1.ServicePort{{Name: "https", Port: 443}, {Name: "dns", Port: 53}}}}
}

func TestEndpoints(t *testing.T) {
	notReady := end("10.64.1.3", "b")
	notReady.Conditions.Ready = new(false)
	node := &corev1.Node{ObjectMeta: meta("", "w1"), Spec: corev1.NodeSpec{PodCIDRs: []string{"10.64.1.0/24"}}}
	for _, c := range []struct {
		name string
		port int32
		ends []discoveryv1.Endpoint
		want string // of the endpoint, or of the error
	}{
		{"a pod, by the node of the Pod", 443, []discoveryv1.Endpoint{end("10.64.1.2", "a")},
			"w1 uid-a 10.64.1.2:8443"},
		{"not ready", 443, []discoveryv1.Endpoint{notReady}, `no endpoints available for service "web"`},
		{"none", 443, nil, `no endpoints available for service "web"`},
		{"a port that is not there", 80, nil, `no service port 80 found for service "web"`},
		{"a port of another protocol", 53, []discoveryv1.Endpoint{end("10.64.1.2", "a")},
			`no endpoints available for service "web"`},
		{"an address that is not the pod's", 443, []discoveryv1.Endpoint{end("10.64.1.9", "a")}, "no endpoints"},
		{"a pod that is not there", 443, []discoveryv1.Endpoint{end("10.64.1.2", "zz")}, "no endpoints"},
		{"the replica's loopback", 443, []discoveryv1.Endpoint{end("127.0.0.1", "")}, "no endpoints"},
		{"the metadata service of a cloud", 443, []discoveryv1.Endpoint{end("169.254.169.254", "")}, "no endpoints"},
		{"outside of the cluster", 443, []discoveryv1.Endpoint{end("192.0.2.7", "")}, "  192.0.2.7:8443"},
		{"hand-made, of a pod", 443, []discoveryv1.Endpoint{end("10.64.1.2", "")}, "w1 uid-a 10.64.1.2:8443"},
		{"hand-made, claimed by a node that has no right to it", 443, []discoveryv1.Endpoint{end("192.0.2.9", "")},
			"  192.0.2.9:8443"},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := objects{"services": {service("web")}, "nodes": {node},
				"endpointslices": {slice("other", 1, end("10.64.1.2", "a")), slice("web", 8443, c.ends...)},
				"pods": {pod("a", "w1", "10.64.1.2"), pod("b", "w1", "10.64.1.3"),
					pod("thief", "w1", "192.0.2.9")}}
			got, err := New(all, nil, nil).Endpoints(t.Context(), "shop", "web", c.port)
			text := ""
			if err != nil {
				text = err.Error()
				if !apierrors.IsServiceUnavailable(err) {
					t.Errorf("no 503: %v", err)
				}
			} else {
				text = got[0].Node + " " + string(got[0].Pod) + " " + got[0].String()
			}
			if !strings.HasPrefix(text, c.want) || len(got) > 1 {
				t.Errorf("%q, want %q", text, c.want)
			}
		})
	}
	if _, err := New(objects{}, nil, nil).Endpoints(t.Context(), "shop", "web", 443); err == nil ||
		err.Error() != `service "web" not found` {
		t.Errorf("no service: %v", err)
	}
}

// A connection goes by the agent, passes over an endpoint that refuses, and its place is free once
// it is closed.
func TestDial(t *testing.T) {
	all := objects{"services": {service("web")},
		"endpointslices": {slice("web", 8443, end("10.64.1.2", "a"), end("10.64.2.3", "b"))},
		"pods":           {pod("a", "w1", "10.64.1.2"), pod("b", "w2", "10.64.2.3")}}
	a := &agents{fail: map[string]bool{"10.64.1.2": true}}
	d := New(all, a, nil)
	for range 20 {
		conn, at, err := d.Dial(t.Context(), "shop", "web", 443)
		if err != nil || at.Node != "w2" {
			t.Fatalf("%v %v", at, err)
		}
		conn.Close()
		conn.Close()
	}
	if d.open != 0 || len(d.openByTarget) != 0 {
		t.Errorf("%d places are taken by nobody: %v", d.open, d.openByTarget)
	}
	if !slices.Contains(a.asked, "w1 uid-a 10.64.1.2:8443") {
		t.Errorf("the other endpoint was never tried: %v", a.asked)
	}
	a.fail["10.64.2.3"] = true
	if _, _, err := d.Dial(t.Context(), "shop", "web", 443); err == nil ||
		!strings.Contains(err.Error(), "connection refused") {
		t.Errorf("all refuse: %v", err)
	}
}

// judge returns an Index of the cluster's Nodes and pods.
func judge(t *testing.T, all objects, r podaddress.Rules) func() *podaddress.Index {
	t.Helper()
	var stores []podaddress.Informer
	for _, resource := range []string{"nodes", "pods"} {
		s := informer{cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
		for _, o := range all[resource] {
			if err := s.Add(o); err != nil {
				t.Fatal(err)
			}
		}
		stores = append(stores, s)
	}
	x, err := podaddress.New(r, stores[0], stores[1], nil)
	if err != nil {
		t.Fatal(err)
	}
	return func() *podaddress.Index { return x }
}

type informer struct{ cache.Indexer }

func (i informer) GetIndexer() cache.Indexer { return i.Indexer }

// Neither a Service nor a pod is dialed at an address that the pod cannot have, and no mirror pod
// is dialed for a Service unless the administrator allows it. A pod that is named is dialed, also a
// mirror pod.
func TestReportedAddresses(t *testing.T) {
	node := func(name, cidr string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: meta("", name), Spec: corev1.NodeSpec{PodCIDRs: []string{cidr}}}
		n.Annotations = map[string]string{podaddress.NetworkAnnotation: podaddress.OwnNetwork}
		return n
	}
	mirror, liar := pod("mirror", "w1", "10.64.1.3"), pod("liar", "w1", "10.64.2.3")
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	all := objects{"nodes": {node("w1", "10.64.1.0/24"), node("w2", "10.64.2.0/24")},
		"services": {service("web")}, "pods": {pod("a", "w1", "10.64.1.2"), liar, mirror},
		"endpointslices": {slice("web", 8443, end("10.64.1.2", "a"), end("10.64.2.3", "liar"),
			end("10.64.1.3", "mirror"), end("10.64.1.3", ""))}}
	for mirrors, want := range map[bool][]string{false: {"10.64.1.2:8443 uid-a", "10.64.1.3:8443 "},
		true: {"10.64.1.2:8443 uid-a", "10.64.1.3:8443 uid-mirror", "10.64.1.3:8443 uid-mirror"}} {
		d := New(all, &agents{}, judge(t, all, podaddress.Rules{MirrorPeers: mirrors}))
		ends, err := d.Endpoints(t.Context(), "shop", "web", 443)
		var got []string
		for _, e := range ends {
			got = append(got, e.String()+" "+string(e.Pod))
		}
		if slices.Sort(got); err != nil || !slices.Equal(got, want) {
			t.Errorf("mirror pods allowed %v: %v %v, want %v", mirrors, got, err, want)
		}
		if _, _, err := d.DialPod(t.Context(), liar, 80); !errors.Is(err, ErrAddressNotAllowed) {
			t.Errorf("a pod with an address of another node's range: %v", err)
		}
		conn, _, err := d.DialPod(t.Context(), mirror, 80)
		if err != nil {
			t.Fatalf("a mirror pod that is named: %v", err)
		}
		conn.Close()
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	all := objects{"services": {service("web")}, "endpointslices": {slice("web", 8443, end("10.64.1.2", "a"))},
		"pods": {pod("a", "w1", "10.64.1.2")}}
	d := New(all, &agents{}, nil)
	var last net.Conn
	for range maxPerTarget {
		conn, _, err := d.Dial(t.Context(), "shop", "web", 443)
		if err != nil {
			t.Fatal(err)
		}
		last = conn
		defer conn.Close()
	}
	if _, _, err := d.Dial(t.Context(), "shop", "web", 443); !errors.Is(err, ErrFull) {
		t.Errorf("one too many: %v", err)
	}
	last.Close()
	conn, _, err := d.Dial(t.Context(), "shop", "web", 443)
	if err != nil {
		t.Fatalf("a place was given back: %v", err)
	}
	conn.Close()
}

// What a name resolves to is looked at before any packet is sent.
func TestDirectAddresses(t *testing.T) {
	svc := service("out")
	svc.Spec.Type, svc.Spec.ExternalName = corev1.ServiceTypeExternalName, "localhost"
	if _, _, err := New(objects{"services": {svc}}, nil, nil).Dial(t.Context(), "shop", "out", 9); !errors.Is(err,
		ErrAddressNotAllowed) {
		t.Errorf("a name of the replica itself: %v", err)
	}
	for ip, want := range map[string]bool{"127.0.0.1": false, "::1": false, "::ffff:127.0.0.1": false,
		"169.254.1.1": false,
		"fe80::1":     false, "224.0.0.1": false, "0.0.0.0": false, "192.0.2.1": true, "10.0.0.1": true,
		"2001:db8::1": true} {
		if got := Proxyable(netip.MustParseAddr(ip)); got != want {
			t.Errorf("%s: %v", ip, got)
		}
	}
}

// Who chooses the Service chooses none but pods of its namespace.
func TestForPods(t *testing.T) {
	elsewhere := end("10.64.1.2", "a")
	elsewhere.TargetRef.Namespace = "kube-system"
	out := service("out")
	out.Spec.Type, out.Spec.ExternalName = corev1.ServiceTypeExternalName, "db.example.com"
	for name, want := range map[string]bool{"pod": true, "address": false, "another namespace's": false, "out": false} {
		all := objects{"services": {service("pod"), service("address"), service("another namespace's"), out},
			"pods": {pod("a", "w1", "10.64.1.2")}, "endpointslices": {
				slice("pod", 8443, end("10.64.1.2", "a")),
				slice("address", 8443, end("192.0.2.7", ""), end("10.64.1.2", "")),
				slice("another namespace's", 8443, elsewhere)}}
		d := New(all, &agents{}, nil)
		d.direct = func(context.Context, string, string) (net.Conn, error) {
			t.Errorf("%s: dialled", name)
			return nil, net.ErrClosed
		}
		conn, err := d.ForPods("shop", name, 443)(t.Context(), "", "")
		if (err == nil) != want || err != nil && !apierrors.IsServiceUnavailable(err) {
			t.Errorf("%s: %v", name, err)
		}
		if conn != nil {
			conn.Close()
		}
	}
}

// A Service that somebody made leads to no address of this machine or of another replica, whoever
// asks it and whatever its endpoints, its name, its pods or its node say. F72
func TestAddressesOfReplicas(t *testing.T) {
	var own string
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && Proxyable(p.Addr()) {
			own = p.Addr().String()
		}
	}
	api := slice("kubernetes", 6443, end("192.0.2.66", ""))
	api.Namespace, api.Name = "default", "kubernetes"
	refused := []string{"127.0.0.1", "169.254.169.254", "::ffff:169.254.169.254", "0.0.0.0", "192.0.2.66",
		"::ffff:192.0.2.66"}
	if own != "" {
		refused = append(refused, own)
	}
	for _, ip := range refused {
		of := objects{"services": {service("trap")}, "endpointslices": {slice("trap", 443, end(ip, "")), api}}
		d := New(of, &agents{}, nil)
		for name, dial := range map[string]func(context.Context, string, string) (net.Conn, error){
			"webhooks and aggregation": d.ForService("shop", "trap", 443),
			"the proxy subresource":    d.ForPods("shop", "trap", 443),
		} {
			if _, err := dial(t.Context(), "tcp", ""); err == nil ||
				!errors.Is(err, ErrAddressNotAllowed) && !apierrors.IsServiceUnavailable(err) {
				t.Errorf("%s by %s: %v", ip, name, err)
			}
		}
	}
	a := &agents{}
	d := New(objects{}, a, nil)
	node := &corev1.Node{ObjectMeta: meta("", "w1"), Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "169.254.169.254"}}}}
	if _, _, err := d.DialNode(t.Context(), node, 80); !errors.Is(err, ErrAddressNotAllowed) {
		t.Errorf("a node: %v", err)
	}
	if _, _, err := d.DialPod(t.Context(), pod("a", "w1", "127.0.0.1"), 80); !errors.Is(err, ErrAddressNotAllowed) {
		t.Errorf("a pod: %v", err)
	}
	if len(a.asked) > 0 {
		t.Errorf("agents were asked for %v", a.asked)
	}
}
