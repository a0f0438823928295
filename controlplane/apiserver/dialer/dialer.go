// Package dialer connects the API to what runs in the cluster: an endpoint of a Service, a pod, a node.
//
// Pods and nodes are reached by the tunnel of the agent on whose node they are, so that it works where no packet finds
// its way from a replica to a node. What is on no node of the cluster, as the addresses of hand-made EndpointSlices
// and ExternalName Services may be, is dialled directly.
//
// Who asks a Service by HTTP (webhooks of admission and conversion, aggregated APIs, the proxy subresources) gives
// Dialer.ForService as the DialContext of an http.Transport, and the name SERVICE.NAMESPACE.svc to TLS:
//
//	t := &http.Transport{
//		DialContext:     d.ForService("shop", "admission", 443),
//		TLSClientConfig: &tls.Config{ServerName: "admission.shop.svc", RootCAs: pool, MinVersion: tls.VersionTLS12},
//		// bounds: MaxConnsPerHost, IdleConnTimeout, ResponseHeaderTimeout, MaxResponseHeaderBytes
//	}
//
// The number of connections, per destination and in all, and the time of dialling are bounded here; time and bytes of
// what is said over a connection are its user's to bound (contexts, deadlines, io.LimitReader): the other end may be
// hostile, and so may its node.
package dialer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
)

// The bounds of a Dialer.
const (
	maxConnections = 1024 // in all
	maxPerTarget   = 256  // to one Service, pod or node
	patience       = 10 * time.Second
	maxAttempts    = 3 // endpoints of a Service, one after the other, within patience
)

// ErrFull says that there are as many connections as there may be.
var ErrFull = errors.New("too many connections into the cluster are open")

// ErrAddressNotAllowed is of addresses that nobody is to reach by way of the API, whatever an EndpointSlice, a name, a
// pod or a node says: loopback, link-local (where clouds tell machines their secrets), multicast and unspecified ones.
// Those of replicas are not dialled directly either: of this one's interfaces, and of all that Service
// default/kubernetes has. A pod of the host network on a replica's machine is reached by that node's agent.
var ErrAddressNotAllowed = errors.New("address not allowed")

// Endpoint is where a connection ends.
type Endpoint struct {
	Address string    // an IP address, or the name of an ExternalName Service
	Port    int32     //
	Node    string    // by whose agent it was reached; "" when directly
	Pod     types.UID // "" for what is no pod
}

// String is "10.0.0.7:8443".
func (e Endpoint) String() string { return net.JoinHostPort(e.Address, strconv.Itoa(int(e.Port))) }

// Cluster is what is known of the cluster: objects are shared and must not be changed.
type Cluster interface {
	// Get returns an object of the replica's cache, or of the store when the cache has none.
	Get(ctx context.Context, resource, namespace, name string) (api.Object, bool)
	// List returns the objects of a resource in a namespace, "" = all, of the cache unless fresh.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Dialer makes connections into the cluster. Safe for concurrent use.
type Dialer struct {
	cluster Cluster
	nodes   api.NodeDialer
	direct  func(ctx context.Context, network, address string) (net.Conn, error)
	judge   func() *podaddress.Index

	mu   sync.Mutex
	open int
	by   map[string]int
}

// New returns a dialer. nodes may be nil: pods and nodes are dialed directly then. addresses judges the addresses of pods;
// nil, or a nil Index: all of them count.
func New(cluster Cluster, nodes api.NodeDialer, addresses func() *podaddress.Index) *Dialer {
	if addresses == nil {
		addresses = func() *podaddress.Index { return nil }
	}
	d := &Dialer{cluster: cluster, nodes: nodes, judge: addresses, by: make(map[string]int)}
	d.direct = (&net.Dialer{Timeout: patience, KeepAlive: 30 * time.Second, ControlContext: d.allowed}).DialContext
	return d
}

// allowed refuses what a name resolved to, or an endpoint said, before any packet is sent.
func (d *Dialer) allowed(ctx context.Context, _, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil || !Proxyable(a.Addr()) || d.ofReplica(ctx, a.Addr().Unmap()) {
		return fmt.Errorf("%w: %s", ErrAddressNotAllowed, address)
	}
	return nil
}

// ofReplica says whether an address is one of this replica's machine, or where the API is served.
func (d *Dialer) ofReplica(ctx context.Context, a netip.Addr) bool {
	own, err := net.InterfaceAddrs()
	if err != nil {
		return true // who cannot say no says yes
	}
	for _, one := range own {
		if p, err := netip.ParsePrefix(one.String()); err == nil && p.Addr().Unmap() == a {
			return true
		}
	}
	o, _ := d.cluster.Get(ctx, "endpointslices", corev1.NamespaceDefault, apiSlice)
	s, ok := o.(*discoveryv1.EndpointSlice)
	return ok && slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
		return slices.ContainsFunc(e.Addresses, func(ip string) bool { return same(ip, a) })
	})
}

// apiSlice has the addresses of all replicas; the leader keeps it.
const apiSlice = "kubernetes"

// Proxyable says whether an address may be asked on somebody's behalf.
func Proxyable(a netip.Addr) bool { return a.Unmap().IsGlobalUnicast() }

// Dial connects to a ready endpoint of a port of a Service, which is named by its number. An error is a
// *apierrors.StatusError of code 503 when the Service, its port or its endpoints are missing.
func (d *Dialer) Dial(ctx context.Context, namespace, service string, port int32) (net.Conn, Endpoint, error) {
	return d.dialService(ctx, namespace, service, port, false)
}

func (d *Dialer) dialService(ctx context.Context, namespace, service string, port int32, strict bool) (net.Conn, Endpoint, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience,
		fmt.Errorf("no endpoint of service %q answered within %s", namespace+"/"+service, patience))
	defer cancel()
	ends, err := d.endpoints(ctx, namespace, service, port, strict)
	if err != nil {
		return nil, Endpoint{}, err
	}
	rand.Shuffle(len(ends), func(i, j int) { ends[i], ends[j] = ends[j], ends[i] })
	leave, err := d.enter("service/" + namespace + "/" + service)
	if err != nil {
		return nil, Endpoint{}, err
	}
	for _, e := range ends[:min(len(ends), maxAttempts)] {
		var conn net.Conn
		if conn, err = d.dial(ctx, e); err == nil {
			return &counted{Conn: conn, leave: leave}, e, nil
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
			break
		}
	}
	leave()
	return nil, Endpoint{}, err
}

// ForService is Dial as a DialContext, which takes no notice of the address.
func (d *Dialer) ForService(namespace, service string, port int32) func(ctx context.Context, _, _ string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := d.Dial(ctx, namespace, service, port)
		return conn, err
	}
}

// ForPods is ForService for those who choose the Service themselves: of its endpoints only pods of its namespace are
// dialled. Whoever may write Services could otherwise have this replica connect to any name or address.
func (d *Dialer) ForPods(namespace, service string, port int32) func(ctx context.Context, _, _ string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := d.dialService(ctx, namespace, service, port, true)
		return conn, err
	}
}

// DialPod connects to a port of a pod's address.
func (d *Dialer) DialPod(ctx context.Context, pod *corev1.Pod, port int32) (net.Conn, Endpoint, error) {
	e := Endpoint{Address: pod.Status.PodIP, Port: port, Node: pod.Spec.NodeName, Pod: pod.UID}
	if e.Address == "" || e.Node == "" {
		return nil, e, apierrors.NewServiceUnavailable(fmt.Sprintf("address not allowed: pod %q has none yet", pod.Name))
	}
	if counted := d.judge().Counted(pod); counted == nil || counted.Status.PodIP != e.Address {
		return nil, e, fmt.Errorf("%w: %s, which node %s reports for pod %q, cannot be the pod's", ErrAddressNotAllowed, e, e.Node, pod.Name)
	}
	return d.one(ctx, "pod/"+string(pod.UID), e)
}

// DialNode connects to a port of a node's address.
func (d *Dialer) DialNode(ctx context.Context, node *corev1.Node, port int32) (net.Conn, Endpoint, error) {
	e := Endpoint{Address: nodeAddress(node), Port: port, Node: node.Name}
	if e.Address == "" {
		return nil, e, apierrors.NewServiceUnavailable(fmt.Sprintf("no preferred addresses found; known addresses: %v", node.Status.Addresses))
	}
	return d.one(ctx, "node/"+node.Name, e)
}

func nodeAddress(node *corev1.Node) string {
	for _, want := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, a := range node.Status.Addresses {
			if a.Type == want {
				return a.Address
			}
		}
	}
	return ""
}

func (d *Dialer) one(ctx context.Context, target string, e Endpoint) (net.Conn, Endpoint, error) {
	if a, err := netip.ParseAddr(e.Address); err == nil && !Proxyable(a) { // its status says so, which others may write
		return nil, e, fmt.Errorf("%w: %s", ErrAddressNotAllowed, e)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("%s did not answer within %s", e, patience))
	defer cancel()
	leave, err := d.enter(target)
	if err != nil {
		return nil, e, err
	}
	conn, err := d.dial(ctx, e)
	if err != nil {
		leave()
		return nil, e, err
	}
	return &counted{Conn: conn, leave: leave}, e, nil
}

// dial connects by the node's agent where there is a node, which has to be the truth of the API and not what an
// EndpointSlice says: a node answers for its own pods and no others.
func (d *Dialer) dial(ctx context.Context, e Endpoint) (net.Conn, error) {
	if e.Node != "" && d.nodes != nil {
		return d.nodes.DialNode(ctx, e.Node, e.Pod, e.Address, e.Port)
	}
	return d.direct(ctx, "tcp", e.String())
}

// enter takes a place for one connection; leave gives it back, once.
func (d *Dialer) enter(target string) (leave func(), err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open >= maxConnections || d.by[target] >= maxPerTarget {
		return nil, fmt.Errorf("%w (%d, to %s %d)", ErrFull, d.open, target, d.by[target])
	}
	d.open++
	d.by[target]++
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.open--
		if d.by[target]--; d.by[target] == 0 {
			delete(d.by, target)
		}
	}), nil
}

// counted is a connection with a place of its own.
type counted struct {
	net.Conn
	leave func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	c.leave()
	return c.Conn.Close()
}
