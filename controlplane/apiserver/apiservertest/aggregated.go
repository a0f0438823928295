package apiservertest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/aggregation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/await"
)

// LoopNodes is an api.NodeDialer that connects to servers on loopback instead of pods on nodes.
type LoopNodes struct {
	Mu sync.Mutex
	At map[string]string // maps "NODE ADDRESS:PORT" to an address on loopback
}

// DialNode connects to the server on loopback to which n.At maps the address. It implements
// api.NodeDialer.
func (n *LoopNodes) DialNode(ctx context.Context, node string, _ types.UID, address string, port int32) (
	net.Conn, error,
) {
	n.Mu.Lock()
	to, ok := n.At[node+" "+net.JoinHostPort(address, strconv.Itoa(int(port)))]
	n.Mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("dial tcp %s: connect: connection refused", address)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", to)
}

// AggregatedReplica is a replica with aggregated API servers that run on loopback.
type AggregatedReplica struct {
	Replica      *Replica
	Nodes        *LoopNodes
	CA           *pki.CA // of the servers
	frontProxyCA func() []byte
}

// StartAggregated starts an AggregatedReplica with node w1 and without aggregated API servers.
func StartAggregated(t *testing.T) *AggregatedReplica {
	b := &AggregatedReplica{Nodes: &LoopNodes{At: map[string]string{}}}
	b.Replica = StartReplica(t, func(c *apiserver.Config) {
		c.Outbound.Nodes = b.Nodes
		ca, err := pki.NewCA("front proxy", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		b.frontProxyCA = ca.PEM
		c.Outbound.FrontProxy = &apiserver.FrontProxy{Certificate: ca.Rotator(pki.Client(pki.FrontProxyUser), time.Now),
			CA: ca.PEM, ClientCA: func() []byte { return []byte("client CA\n") }}
	})
	var err error
	if b.CA, err = pki.NewCA("servers", time.Now()); err != nil {
		t.Fatal(err)
	}
	b.Replica.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	return b
}

// Extension starts a TLS server on loopback, with handler h, as the API server behind a new Service
// of namespace default. The server verifies the front-proxy client certificate if it gets one.
func (b *AggregatedReplica) Extension(name string, h http.Handler) *httptest.Server {
	b.Replica.TB.Helper()
	cert, err := b.CA.Issue(pki.Profile{CommonName: name, DNSNames: []string{name + ".default.svc"}, Server: true},
		time.Now())
	if err != nil {
		b.Replica.TB.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(b.frontProxyCA())
	srv := httptest.NewUnstartedServer(h)
	srv.EnableHTTP2 = true
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{cert.TLS}, ClientAuth: tls.VerifyClientCertIfGiven,
		ClientCAs: pool}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	b.Replica.TB.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	b.Place(name, srv.Listener.Addr().String(), true)
	return srv
}

// Place creates a Service with one endpoint, a pod. Connections to the pod reach the address
// loopback instead.
func (b *AggregatedReplica) Place(name, loopback string, ready bool) {
	b.Replica.TB.Helper()
	b.Nodes.Mu.Lock()
	ip := fmt.Sprintf("10.64.0.%d", len(b.Nodes.At)+2)
	b.Nodes.At["w1 "+ip+":8443"] = loopback
	b.Nodes.Mu.Unlock()
	b.Replica.Must(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "https", Port: 443}}}})
	pod := b.Replica.Must(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PodSpec{NodeName: "w1",
			Containers: []corev1.Container{{Name: "c", Image: "i"}}}}).(*corev1.Pod).DeepCopy()
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
	if _, err := b.Replica.Admin().CoreV1().Pods("default").UpdateStatus(b.Replica.TB.Context(), pod,
		metav1.UpdateOptions{}); err != nil {
		b.Replica.TB.Fatal(err)
	}
	b.Slice(name, ip, ready)
}

// Slice creates an EndpointSlice for the Service with this name. Its only endpoint has the address
// ip.
func (b *AggregatedReplica) Slice(name, ip string, ready bool) {
	port, portName, tcp := int32(8443), "https", corev1.ProtocolTCP
	b.Replica.Must(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &tcp}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{ip},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: name}}},
	})
}

// AddAPIService creates the APIService of group version v1.GROUP for a Service. It checks its
// availability once and returns the resulting condition. change may modify the spec; it may be nil.
func (b *AggregatedReplica) AddAPIService(
	group, service string, change func(*apiregistrationv1.APIServiceSpec),
) apiregistrationv1.APIServiceCondition {
	b.Replica.TB.Helper()
	spec := apiregistrationv1.APIServiceSpec{
		Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: service}, Group: group, Version: "v1",
		CABundle: b.CA.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
	}
	if change != nil {
		change(&spec)
	}
	b.Replica.Must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1." + group}, Spec: spec})
	b.Replica.Await(func() bool { _, ok := b.Replica.CachedAPIService(b.Replica.TB.Context(), "v1."+group); return ok })
	if err := b.Replica.CheckAPIServices(b.Replica.TB.Context(), 0); err != nil {
		b.Replica.TB.Fatal(err)
	}
	var s *apiregistrationv1.APIService
	b.Replica.Await(func() bool {
		s, _ = b.Replica.CachedAPIService(b.Replica.TB.Context(), "v1."+group)
		return len(s.Status.Conditions) == 1
	})
	return s.Status.Conditions[0]
}

// DiscoveryOf returns a handler that serves the discovery document of GROUP/v1 with one resource.
func DiscoveryOf(group string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"%s/v1","resources":[
			{"name":"flunders","singularName":"flunder","namespaced":true,"kind":"Flunder","verbs":["create","get","list","watch"],"shortNames":["fl"]},
			{"name":"flunders/status","singularName":"","namespaced":true,"kind":"Flunder","verbs":["get"]}]}`, group)
	}
}

// Recorder is an http.Handler that records all requests in Seen and passes them to Next.
type Recorder struct {
	Mu   sync.Mutex
	Seen []*http.Request
	Next http.Handler
}

// ServeHTTP records the request and passes it on. It implements http.Handler.
func (h *Recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.Mu.Lock()
	h.Seen = append(h.Seen, r.Clone(context.Background()))
	h.Mu.Unlock()
	h.Next.ServeHTTP(w, r)
}

// Heard repeats a request until the response contains the text, and returns this response.
// Repeating is necessary because documents of API servers are fetched in the background.
func (b *AggregatedReplica) Heard(path, text string, headers ...string) (a Response) {
	b.Replica.TB.Helper()
	b.Replica.Await(func() bool {
		a = b.Replica.Call(b.Replica.AdminHTTP(), "GET", path, "", headers...)
		return strings.Contains(a.Body, text)
	})
	return a
}

// Await waits until condition returns true. The condition must follow from objects that are already
// stored.
func (r *Replica) Await(condition func() bool) {
	r.TB.Helper()
	await.Until(r.TB.Context(), r.TB, await.Patience, time.Millisecond,
		"a condition that follows from stored objects", func() error {
			if !condition() {
				return errors.New("it is not met")
			}
			return nil
		})
}

// Hanging is the number of APIServices that AggregatedReplica.Hang creates.
const Hanging = 200

// Hang creates many APIServices. They all point to one server, which accepts connections and never
// responds.
func (b *AggregatedReplica) Hang() {
	b.Replica.TB.Helper()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Replica.TB.Fatal(err)
	}
	var mu sync.Mutex
	var taken []net.Conn
	go func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			taken = append(taken, c)
			mu.Unlock()
		}
	}()
	b.Replica.TB.Cleanup(func() {
		silent.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range taken {
			c.Close()
		}
	})
	b.Place("silent", silent.Addr().String(), true)
	for i := range Hanging {
		group := fmt.Sprintf("g%03d.silent.example.com", i)
		b.Replica.Must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1." + group},
			Spec: apiregistrationv1.APIServiceSpec{
				Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "silent"},
				Group:   group, Version: "v1",
				CABundle: b.CA.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
			}})
	}
	last := fmt.Sprintf("v1.g%03d.silent.example.com", Hanging-1)
	b.Replica.Await(func() bool { _, ok := b.Replica.CachedAPIService(b.Replica.TB.Context(), last); return ok })
}

// KeepConditions runs aggregation.Conditions, which maintains the Available conditions of
// APIServices, until the test ends.
func (b *AggregatedReplica) KeepConditions() {
	ctx, cancel := context.WithCancel(b.Replica.TB.Context())
	var kept sync.WaitGroup
	kept.Go(func() { _ = b.Replica.Server.Conditions().Run(ctx, 0) })
	b.Replica.TB.Cleanup(func() { cancel(); kept.Wait() })
}

// Reason returns the reason of the first condition of an APIService in this replica's cache; "" if
// the cache contains no condition of the APIService.
func (b *AggregatedReplica) Reason(name string) string {
	s, ok := b.Replica.CachedAPIService(b.Replica.TB.Context(), name)
	if !ok || len(s.Status.Conditions) == 0 {
		return ""
	}
	return s.Status.Conditions[0].Reason
}

// PlainServer starts an HTTP server behind a Service and a pod with the given name.
func (b *AggregatedReplica) PlainServer(name string, h http.Handler) {
	b.Replica.TB.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Replica.TB.Fatal(err)
	}
	srv := &http.Server{Handler: h}
	go func() { _ = srv.Serve(ln) }()
	b.Replica.TB.Cleanup(func() { srv.Close() })
	b.Place(name, ln.Addr().String(), true)
}

// Cached returns an object from this replica's cache; ok is false if it does not exist.
func (r *Replica) Cached(ctx context.Context, gvr schema.GroupVersionResource, namespace, name string) (
	o api.Object, ok bool,
) {
	q := &api.Request{Verb: api.VerbGet, Kind: r.Kinds.ByResource(gvr), Namespace: namespace, Name: name}
	q.Get.ResourceVersion = "0"
	o, err := r.Registry.GetObject(ctx, q)
	return o, err == nil
}

// CachedAPIService returns an APIService from this replica's cache.
func (r *Replica) CachedAPIService(ctx context.Context, name string) (*apiregistrationv1.APIService, bool) {
	o, ok := r.Cached(ctx, aggregation.APIServices, "", name)
	service, isService := o.(*apiregistrationv1.APIService)
	return service, ok && isService
}

// CachedAPIServices returns the APIServices in this replica's cache.
func (r *Replica) CachedAPIServices(ctx context.Context) []*apiregistrationv1.APIService {
	r.TB.Helper()
	q := &api.Request{Verb: api.VerbList, Kind: r.Kinds.ByResource(aggregation.APIServices),
		Internal: api.InternalOptions{Pointers: true}}
	q.List.ResourceVersion = "0"
	list, err := r.Registry.List(ctx, q)
	if err != nil {
		r.TB.Fatal(err)
	}
	var services []*apiregistrationv1.APIService
	for _, o := range list.(*api.ObjectList).Items {
		services = append(services, o.(*apiregistrationv1.APIService))
	}
	return services
}

// CheckAPIServices checks the API servers of all APIServices once and writes changed conditions.
func (r *Replica) CheckAPIServices(ctx context.Context, fence uint64) error {
	places := make(chan struct{}, aggregation.MaxChecks)
	var mu sync.Mutex
	var errs []error
	var all sync.WaitGroup
	for _, one := range r.CachedAPIServices(ctx) {
		if one.DeletionTimestamp != nil {
			continue
		}
		places <- struct{}{}
		all.Go(func() {
			defer func() { <-places }()
			if _, _, err := r.Server.Conditions().CheckService(ctx, fence, one); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
