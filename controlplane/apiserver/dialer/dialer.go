// Package dialer connects the API server to endpoints of Services, pods and nodes in the cluster.
//
// Pods and nodes are reached through the tunnel of their node's agent, which works without a
// network route from a replica to the node. Other addresses, as in manually created EndpointSlices
// and ExternalName Services, are dialed directly.
//
// HTTP clients of a Service (webhooks of admission and conversion, aggregated APIs, the proxy
// subresources) use Dialer.ForService as the DialContext of an http.Transport. The TLS server name
// is SERVICE.NAMESPACE.svc:
//
//	t := &http.Transport{
//		DialContext:     d.ForService("shop", "admission", 443),
//		TLSClientConfig: &tls.Config{
//			ServerName: "admission.shop.svc", RootCAs: pool, MinVersion: tls.VersionTLS12,
//		},
//		// limits: MaxConnsPerHost, IdleConnTimeout, ResponseHeaderTimeout, MaxResponseHeaderBytes
//	}
//
// The Dialer limits the number of connections, per destination and in total, and the duration of
// dialing. Its users must limit the duration and the bytes of their requests (contexts, deadlines,
// io.LimitReader). The destination and its node may be malicious.
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

// Limits of a Dialer: open connections, and duration and number of the attempts to connect.
const (
	maxConnections = 1024 // in total
	maxPerTarget   = 256  // to one Service, pod or node
	patience       = 10 * time.Second
	maxAttempts    = 3 // endpoints of a Service that are tried one after the other, within patience
)

// ErrFull is returned if the maximum number of connections is open.
var ErrFull = errors.New("too many open connections to the cluster")

// ErrAddressNotAllowed is returned for an address that must not be reached through the API.
// Loopback, link-local (with the metadata services of clouds), multicast and unspecified addresses
// are never allowed, whether they come from EndpointSlices, names, pods or nodes. Addresses of
// replicas may not be dialed directly either: the interfaces of this machine and the endpoints of
// Service default/kubernetes. A host-network pod on a replica's machine is reached through its
// node's agent.
var ErrAddressNotAllowed = errors.New("address not allowed")

// Endpoint is the destination of a connection: an address and port, and possibly the node and pod.
type Endpoint struct {
	Address string    // an IP address, or the name of an ExternalName Service
	Port    int32     //
	Node    string    // node of the agent that connects to it; "" if it is dialed directly
	Pod     types.UID // "" if it is not a pod
}

// String returns address and port: "10.0.0.7:8443".
func (e Endpoint) String() string { return net.JoinHostPort(e.Address, strconv.Itoa(int(e.Port))) }

// Cluster reads objects of the cluster, which the caller must not change.
type Cluster interface {
	// Get returns an object from the replica's cache, or from the store if the cache does not have
	// it.
	Get(ctx context.Context, resource, namespace, name string) (api.Object, bool)
	// List returns the objects of a resource in a namespace ("" = all namespaces). It reads the
	// store if fresh is true, and otherwise the cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Dialer creates connections into the cluster. It is safe for concurrent use.
type Dialer struct {
	cluster      Cluster
	nodes        api.NodeDialer
	direct       func(ctx context.Context, network, address string) (net.Conn, error)
	podAddresses func() *podaddress.Index

	mu           sync.Mutex
	open         int
	openByTarget map[string]int
}

// New returns a Dialer. If nodes is nil, pods and nodes are dialed directly. addresses returns the
// index that validates pod addresses; if it or its result is nil, all addresses are accepted.
func New(cluster Cluster, nodes api.NodeDialer, addresses func() *podaddress.Index) *Dialer {
	if addresses == nil {
		addresses = func() *podaddress.Index { return nil }
	}
	d := &Dialer{cluster: cluster, nodes: nodes, podAddresses: addresses, openByTarget: make(map[string]int)}
	d.direct = (&net.Dialer{Timeout: patience, KeepAlive: 30 * time.Second, ControlContext: d.checkAddress}).DialContext
	return d
}

// checkAddress returns an error if an address must not be dialed. It runs after name resolution and
// before any packet is sent.
func (d *Dialer) checkAddress(ctx context.Context, _, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil || !Proxyable(a.Addr()) || d.isReplicaAddress(ctx, a.Addr().Unmap()) {
		return fmt.Errorf("%w: %s", ErrAddressNotAllowed, address)
	}
	return nil
}

// isReplicaAddress reports whether an address belongs to this machine or to a replica of the API
// server. It is true if the addresses of the replicas are unknown.
func (d *Dialer) isReplicaAddress(ctx context.Context, a netip.Addr) bool {
	own, err := net.InterfaceAddrs()
	if err != nil {
		return true // refuse if the addresses are unknown
	}
	for _, one := range own {
		if p, err := netip.ParsePrefix(one.String()); err == nil && p.Addr().Unmap() == a {
			return true
		}
	}
	o, _ := d.cluster.Get(ctx, "endpointslices", corev1.NamespaceDefault, apiSlice)
	s, ok := o.(*discoveryv1.EndpointSlice)
	return ok && slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
		return slices.ContainsFunc(e.Addresses, func(ip string) bool { return isSameIP(ip, a) })
	})
}

// apiSlice is the name of the EndpointSlice with the addresses of all API server replicas, which
// the leader maintains.
const apiSlice = "kubernetes"

// Proxyable reports whether the API server may connect to an address on behalf of a client. The
// address must be global unicast.
func Proxyable(a netip.Addr) bool { return a.Unmap().IsGlobalUnicast() }

// Dial connects to a ready endpoint of a Service. port is the number of the Service port. If the
// Service, its port or its endpoints are missing, the error is an *apierrors.StatusError with code
// 503.
func (d *Dialer) Dial(ctx context.Context, namespace, service string, port int32) (net.Conn, Endpoint, error) {
	return d.dialService(ctx, namespace, service, port, false)
}

func (d *Dialer) dialService(ctx context.Context, namespace, service string, port int32, strict bool) (
	net.Conn, Endpoint, error,
) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience,
		fmt.Errorf("no endpoint of service %q accepted a connection within %s", namespace+"/"+service, patience))
	defer cancel()
	ends, err := d.findEndpoints(ctx, namespace, service, port, strict)
	if err != nil {
		return nil, Endpoint{}, err
	}
	rand.Shuffle(len(ends), func(i, j int) { ends[i], ends[j] = ends[j], ends[i] })
	leave, err := d.reserveConn("service/" + namespace + "/" + service)
	if err != nil {
		return nil, Endpoint{}, err
	}
	for _, e := range ends[:min(len(ends), maxAttempts)] {
		var conn net.Conn
		if conn, err = d.dialEndpoint(ctx, e); err == nil {
			return &countedConn{Conn: conn, leave: leave}, e, nil
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
			break
		}
	}
	leave()
	return nil, Endpoint{}, err
}

// ForService returns a DialContext function, as http.Transport needs it, that calls Dial for a
// Service port. The function ignores the address that it is given.
func (d *Dialer) ForService(
	namespace, service string, port int32,
) func(ctx context.Context, _, _ string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := d.Dial(ctx, namespace, service, port)
		return conn, err
	}
}

// ForPods is like ForService, but for Services that clients choose. The function connects only to
// pods in the namespace of the Service. Otherwise, users who may write Services could make this
// replica connect to any name or address.
func (d *Dialer) ForPods(
	namespace, service string, port int32,
) func(ctx context.Context, _, _ string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := d.dialService(ctx, namespace, service, port, true)
		return conn, err
	}
}

// DialPod connects to a port at a pod's address. It returns ErrAddressNotAllowed if the address in
// the pod's status cannot belong to the pod.
func (d *Dialer) DialPod(ctx context.Context, pod *corev1.Pod, port int32) (net.Conn, Endpoint, error) {
	e := Endpoint{Address: pod.Status.PodIP, Port: port, Node: pod.Spec.NodeName, Pod: pod.UID}
	if e.Address == "" || e.Node == "" {
		return nil, e, apierrors.NewServiceUnavailable(fmt.Sprintf("address not allowed: pod %q has no address yet",
			pod.Name))
	}
	if counted := d.podAddresses().TrustedPod(pod); counted == nil || counted.Status.PodIP != e.Address {
		return nil, e, fmt.Errorf("%w: %s, which node %s reports for pod %q, is not an address of the pod",
			ErrAddressNotAllowed, e, e.Node, pod.Name)
	}
	return d.dialLimited(ctx, "pod/"+string(pod.UID), e)
}

// DialNode connects to a port at a node's address.
func (d *Dialer) DialNode(ctx context.Context, node *corev1.Node, port int32) (net.Conn, Endpoint, error) {
	e := Endpoint{Address: nodeAddress(node), Port: port, Node: node.Name}
	if e.Address == "" {
		return nil, e, apierrors.NewServiceUnavailable(fmt.Sprintf("no preferred addresses found; known addresses: %v",
			node.Status.Addresses))
	}
	return d.dialLimited(ctx, "node/"+node.Name, e)
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

func (d *Dialer) dialLimited(ctx context.Context, target string, e Endpoint) (net.Conn, Endpoint, error) {
	if a, err := netip.ParseAddr(e.Address); err == nil && !Proxyable(a) {
		// the address comes from a status, which is not trusted
		return nil, e, fmt.Errorf("%w: %s", ErrAddressNotAllowed, e)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience,
		fmt.Errorf("%s did not accept a connection within %s", e, patience))
	defer cancel()
	leave, err := d.reserveConn(target)
	if err != nil {
		return nil, e, err
	}
	conn, err := d.dialEndpoint(ctx, e)
	if err != nil {
		leave()
		return nil, e, err
	}
	return &countedConn{Conn: conn, leave: leave}, e, nil
}

// dialEndpoint connects to an endpoint: through the agent of e.Node if it is set, otherwise
// directly. e.Node must come from a Pod or Node object and not from an EndpointSlice, because a
// node is trusted for its own pods only.
func (d *Dialer) dialEndpoint(ctx context.Context, e Endpoint) (net.Conn, error) {
	if e.Node != "" && d.nodes != nil {
		return d.nodes.DialNode(ctx, e.Node, e.Pod, e.Address, e.Port)
	}
	return d.direct(ctx, "tcp", e.String())
}

// reserveConn counts one connection to target within the limits. leave ends the reservation; it may
// be called repeatedly.
func (d *Dialer) reserveConn(target string) (leave func(), err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open >= maxConnections || d.openByTarget[target] >= maxPerTarget {
		return nil, fmt.Errorf("%w (%d, to %s %d)", ErrFull, d.open, target, d.openByTarget[target])
	}
	d.open++
	d.openByTarget[target]++
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.open--
		if d.openByTarget[target]--; d.openByTarget[target] == 0 {
			delete(d.openByTarget, target)
		}
	}), nil
}

// countedConn is a connection that releases its reservation when it is closed.
type countedConn struct {
	net.Conn
	leave func()
}

// Close closes the connection and releases its reservation. It implements net.Conn.
func (c *countedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}
