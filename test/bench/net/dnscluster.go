package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// dnsCluster is the cluster that both servers serve, and the queries.
type dnsCluster struct {
	services []v1.Service
	parts    []discoveryv1.EndpointSlice
	queries  []dnsQuery
}

// dnsQuery is a query packet and the expected response code and number of answers.
type dnsQuery struct {
	packet         []byte
	rcode, answers int
}

// newDNSCluster returns n Services. Every tenth is headless and has three endpoints with hostnames.
// Most queries are typical of a pod's resolver: A and AAAA for each name, and names that a search
// list produces and that do not exist.
func newDNSCluster(n int) dnsCluster {
	var b dnsCluster
	ask := func(name string, kind uint16, rcode, answers int) {
		m := &dns.Msg{}
		m.SetQuestion(name, kind)
		p, err := m.Pack()
		if err != nil {
			// impossible: the names are constants of this file
			panic(fmt.Sprintf("packing the query for %s: %v", name, err))
		}
		b.queries = append(b.queries, dnsQuery{p, rcode, answers})
	}
	for i := range n {
		meta := metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s%d", i),
			UID: types.UID(fmt.Sprintf("svc-%d", i)), ResourceVersion: "1"}
		name := meta.Name + ".default.svc.cluster.local."
		svc := v1.Service{ObjectMeta: meta, Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP,
			Ports: []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}}}
		svc.Spec.ClusterIP = netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
		if i%10 == 0 {
			svc.Spec.ClusterIP = v1.ClusterIPNone
			part := discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
				Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)),
					Protocol: new(v1.ProtocolTCP)}}}
			part.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
			part.UID = types.UID(fmt.Sprintf("part-%d", i))
			for j := range 3 {
				part.Endpoints = append(part.Endpoints,
					discoveryv1.Endpoint{Addresses: []string{
						netip.AddrFrom4([4]byte{10, 244, byte(i / 10), byte(j)}).String()},
						Hostname:   new(fmt.Sprintf("pod-%d", j)),
						Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
			}
			b.parts = append(b.parts, part)
			ask(name, dns.TypeA, dns.RcodeSuccess, 3)
			ask("pod-1."+name, dns.TypeA, dns.RcodeSuccess, 1)
			ask("_http._tcp."+name, dns.TypeSRV, dns.RcodeSuccess, 3)
		} else {
			ask(name, dns.TypeA, dns.RcodeSuccess, 1)
			ask(name, dns.TypeAAAA, dns.RcodeSuccess, 0)
			ask(name+"default.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, 0)
		}
		svc.Spec.ClusterIPs = []string{svc.Spec.ClusterIP}
		b.services = append(b.services, svc)
	}
	return b
}

// objects returns the cluster's objects as an agent receives them.
func (b dnsCluster) objects() (out []any) {
	for i := range b.services {
		out = append(out, &b.services[i])
	}
	for i := range b.parts {
		out = append(out, &b.parts[i])
	}
	return out
}

// startAPI serves the lists and watches that CoreDNS uses, on loopback. Nothing ever changes.
func startAPI(b dnsCluster) (*httptest.Server, error) {
	type list struct {
		kind, version string
		items         []any
	}
	lists := map[string]list{"services": {kind: "Service", version: "v1"},
		"endpointslices": {kind: "EndpointSlice", version: "discovery.k8s.io/v1"},
		"namespaces":     {kind: "Namespace", version: "v1"}}
	add := func(name string, o any) { l := lists[name]; l.items = append(l.items, o); lists[name] = l }
	for i := range b.services {
		s := b.services[i]
		s.TypeMeta = metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}
		add("services", s)
	}
	for i := range b.parts {
		p := b.parts[i]
		p.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
		add("endpointslices", p)
	}
	add("namespaces", v1.Namespace{TypeMeta: metav1.TypeMeta{Kind: "Namespace", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "ns", ResourceVersion: "1"}})
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		enc := json.NewEncoder(w)
		l, ok := lists[r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]]
		switch {
		case !ok && r.URL.Path == "/version":
			_ = enc.Encode(map[string]string{"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
		case !ok:
			http.NotFound(w, r)
		case r.URL.Query().Get("watch") == "":
			_ = enc.Encode(map[string]any{"kind": l.kind + "List", "apiVersion": l.version,
				"metadata": map[string]string{"resourceVersion": "1"}, "items": l.items})
		default:
			if r.URL.Query().Get("sendInitialEvents") == "true" {
				for _, o := range l.items {
					_ = enc.Encode(map[string]any{"type": "ADDED", "object": o})
				}
				_ = enc.Encode(map[string]any{"type": "BOOKMARK",
					"object": map[string]any{"kind": l.kind, "apiVersion": l.version, "metadata": map[string]any{
						"resourceVersion": "1",
						"annotations":     map[string]string{"k8s.io/initial-events-end": "true"}}}})
			}
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	})), nil
}
