package apiserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/apiserver/forward"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
)

// proxyFacet is the subresource that proxies requests to a Service, pod or node.
const proxyFacet = "proxy"

// isProxy reports whether a target is the proxy subresource of a Service, pod or node, or a path
// below it.
func isProxy(t endpoints.Target) bool {
	return t.GVR.Group == "" && t.GVR.Version == "v1" && t.Name != "" && !t.Watch &&
		(t.Subresource == proxyFacet || strings.HasPrefix(t.Subresource, proxyFacet+"/")) &&
		slices.Contains([]string{"services", "pods", "nodes"}, t.GVR.Resource)
}

// hop is the destination of a proxied request.
type hop struct {
	scheme, host string // the host name sent to the destination
	dial         func(ctx context.Context, network, address string) (net.Conn, error)
	tls          *tls.Config // nil = the certificate of the server is not verified
}

// proxySub serves a request for a proxy subresource. It returns false for all other requests.
func (s *Server) proxySub(w http.ResponseWriter, r *http.Request, u api.User) bool {
	t, ok := endpoints.ParsePath(r.URL.Path)
	if !ok || !isProxy(t) {
		return false
	}
	if err := s.proxyTo(w, r, u, t); err != nil {
		s.resources.Error(w, r, err)
	}
	return true
}

// proxyTo authorizes a request and proxies it to a Service, pod or node. If it returns an error, it
// has not written a response.
func (s *Server) proxyTo(w http.ResponseWriter, r *http.Request, u api.User, t endpoints.Target) error {
	if err := s.chain.decide(r.Context(), remoteAttributes(r, u), nil); err != nil {
		return err
	}
	prefix, rest, slash := splitProxy(r.URL.EscapedPath(), t)
	to, err := s.hopTo(r.Context(), u, t, rest)
	if err != nil {
		return err
	}
	if !slash && (r.Method == http.MethodGet || r.Method == http.MethodHead) && !forward.Upgrades(r) {
		// Relative links of the page need a path that ends with a slash.
		w.Header().Set("Location", (&url.URL{Path: r.URL.Path + "/", RawQuery: r.URL.RawQuery}).String())
		w.WriteHeader(http.StatusMovedPermanently)
		return nil
	}
	p, err := s.gate.Enter(r.Context(), flowcontrol.Watch, callerOf(u), proxied)
	if err != nil {
		return noRoom(err, flowcontrol.Watch, callerOf(u))
	}
	defer p.Leave()
	target, err := url.Parse(to.scheme + "://" + to.host + "/" + strings.TrimPrefix(rest, "/"))
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	target.RawQuery = r.URL.RawQuery
	if to.tls == nil { // as in Kubernetes
		to.tls = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
	}
	transport := forward.Transport(to.dial, &http.Transport{TLSClientConfig: to.tls, DisableKeepAlives: true})
	defer transport.CloseIdleConnections()
	forward.Forward{
		Target: target, Transport: transport,
		Head:   func(h http.Header) { h.Set("X-Forwarded-Uri", r.URL.EscapedPath()) },
		Answer: forward.Links{Prefix: prefix, Hosts: []string{target.Host, r.Host}}.Apply,
		Failed: func(w http.ResponseWriter, r *http.Request, err error) { s.resources.Error(w, r, proxyFailed(err)) },
	}.ServeHTTP(w, r)
	return nil
}

func proxyFailed(err error) error {
	var status apierrors.APIStatus
	switch {
	case errors.As(err, &status):
		return err
	case errors.Is(err, forward.ErrNoUpgrade):
		return apierrors.NewBadRequest(err.Error())
	}
	return apierrors.NewServiceUnavailable("error trying to reach service: " + err.Error())
}

// splitProxy splits an escaped path after the proxy subresource. slash reports whether a slash
// follows it.
func splitProxy(path string, t endpoints.Target) (prefix, rest string, slash bool) {
	n := 5 // the parts of /api/v1/nodes/NAME/proxy
	if t.Namespace != "" {
		n = 7
	}
	at := 0
	for range n {
		next := strings.IndexByte(path[at+1:], '/')
		if next < 0 {
			return path, "", false
		}
		at += 1 + next
	}
	return path[:at], path[at:], true
}

// splitName parses "name", "name:port" and "scheme:name:port".
func splitName(id string) (scheme, name, port string, ok bool) {
	parts := strings.Split(id, ":")
	switch len(parts) {
	case 1:
		return "http", parts[0], "", parts[0] != ""
	case 2:
		return "http", parts[0], parts[1], parts[0] != ""
	case 3:
		if parts[0] == "" {
			parts[0] = "http"
		}
		return parts[0], parts[1], parts[2], (parts[0] == "http" || parts[0] == "https") && parts[1] != ""
	}
	return "", "", "", false
}

// hopTo returns the destination of a proxied request: it reads the object, runs admission and
// resolves address and port.
func (s *Server) hopTo(ctx context.Context, u api.User, t endpoints.Target, path string) (hop, error) {
	kind := s.cfg.Kinds.ByResource(t.GVR)
	scheme, name, port, ok := splitName(t.Name)
	if kind == nil || kind.Namespaced != (t.Namespace != "") {
		return hop{}, apierrors.NewNotFound(t.GVR.GroupResource(), t.Name)
	}
	if !ok {
		return hop{}, apierrors.NewBadRequest(fmt.Sprintf("invalid %s request %q", kind.Singular, t.Name))
	}
	r := &api.Request{User: u, Verb: api.VerbConnect, Kind: kind, Subresource: proxyFacet, Namespace: t.Namespace, Name: name}
	obj, err := s.cfg.Registry.Get(ctx, &api.Request{User: u, Verb: api.VerbGet, Kind: kind, Namespace: t.Namespace, Name: name})
	if err != nil {
		return hop{}, err
	}
	var options runtime.Object
	switch t.GVR.Resource {
	case "services":
		options = &corev1.ServiceProxyOptions{Path: path}
	case "pods":
		options = &corev1.PodProxyOptions{Path: path}
	default:
		options = &corev1.NodeProxyOptions{Path: path}
	}
	if _, err := subresource.Judge(ctx, r, s.chain, options, obj); err != nil {
		return hop{}, err
	}
	h := hop{scheme: scheme}
	switch o := obj.(type) {
	case *corev1.Service:
		return s.hopToService(h, o, port)
	case *corev1.Pod:
		return s.hopToPod(h, o, port)
	case *corev1.Node:
		return s.hopToNode(h, o, port)
	}
	return hop{}, apierrors.NewMethodNotSupported(kind.GroupResource(), proxyFacet)
}

func (s *Server) hopToService(h hop, svc *corev1.Service, port string) (hop, error) {
	number := int32(0)
	for _, p := range svc.Spec.Ports {
		if p.Name == port || strconv.Itoa(int(p.Port)) == port || port == "" && len(svc.Spec.Ports) == 1 {
			number = p.Port
			break
		}
	}
	if number == 0 {
		if n, err := strconv.ParseUint(port, 10, 16); err == nil {
			return hop{}, apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", n, svc.Name))
		}
		return hop{}, apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", svc.Name))
	}
	h.host = fmt.Sprintf("%s.%s.svc:%d", svc.Name, svc.Namespace, number)
	h.dial = s.dialer.ForPods(svc.Namespace, svc.Name, number)
	return h, nil
}

// hopToPod returns the destination for a pod. Without a port, it uses the first port that a
// container declares, else the scheme's default.
func (s *Server) hopToPod(h hop, pod *corev1.Pod, port string) (hop, error) {
	number, err := portNumber(port, h.scheme)
	if err != nil {
		return hop{}, err
	}
	if port == "" {
		for i := range pod.Spec.Containers {
			if ports := pod.Spec.Containers[i].Ports; len(ports) > 0 {
				number = ports[0].ContainerPort
				break
			}
		}
	}
	h.host = net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(number)))
	h.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := s.dialer.DialPod(ctx, pod, number)
		return conn, err
	}
	if pod.Status.PodIP == "" || pod.Spec.NodeName == "" {
		return hop{}, apierrors.NewServiceUnavailable(fmt.Sprintf("address not allowed: pod %q has none yet", pod.Name))
	}
	return h, nil
}

// hopToNode returns the destination for a node. The default port is that of the node's kubelet API.
// There, this API authenticates with its client certificate and the node trusts its authorization
// decision. If the node has no kubelet API, the request must name a port.
func (s *Server) hopToNode(h hop, node *corev1.Node, port string) (hop, error) {
	own := node.Status.DaemonEndpoints.KubeletEndpoint.Port
	number := own
	if port != "" {
		var err error
		if number, err = portNumber(port, h.scheme); err != nil {
			return hop{}, err
		}
	}
	if number == 0 {
		return hop{}, apierrors.NewServiceUnavailable(fmt.Sprintf("node %q serves no kubelet API: name a port (%s:PORT)", node.Name, node.Name))
	}
	if number == own && s.cfg.NodeTLS != nil {
		h.scheme, h.tls = "https", s.cfg.NodeTLS(node.Name)
	}
	h.host = net.JoinHostPort(node.Name, strconv.Itoa(int(number)))
	h.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := s.dialer.DialNode(ctx, node, number)
		return conn, err
	}
	return h, nil
}

func portNumber(port, scheme string) (int32, error) {
	if port == "" {
		if scheme == "https" {
			return 443, nil
		}
		return 80, nil
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid port %q", port))
	}
	return int32(n), nil
}
